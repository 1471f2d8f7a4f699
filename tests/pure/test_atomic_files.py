"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ringtmp.system.files import write_atomic


def test_a_file_is_replaced_as_a_whole_with_the_mode_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_atomic(path, b"old", 0o600)
    write_atomic(path, b"new", 0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["keys.json"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_cannot_be_written_leaves_what_was_there_and_nothing_beside_it(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise error

    path = tmp_path / "keys.json"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(type(error)):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["keys.json"]
    write_atomic(path, b"new", durable=False)
    assert path.read_bytes() == b"new"
