"""A real disk that is full: protection drops to what is possible, that is said once, and training goes on."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import REMEMBERING, remembering_model, ringtmp

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="a small disk is mounted as root"),
]
FLAGS = (*REMEMBERING, "--steps", 60)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Where a run's snapshots go, with room for less than two of them."""
    folder = tmp_path / "run" / "snapshots"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=250k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_snapshots_alone_and_is_said_once(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "mine.py").write_text(remembering_model(32))
    alone = ringtmp("train", "--nodes", 1, *FLAGS, cwd=tmp_path)
    done = ringtmp("train", *FLAGS, "--nodes", 3, "--run-dir", small_disk.parent, "--protect", "disk", cwd=tmp_path)
    summary = json.loads(done.stdout)
    assert summary["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    assert done.stderr.count("no more snapshots: No space left on device") == 1, done.stderr
    assert not any(path.is_file() for path in small_disk.rglob("*"))
