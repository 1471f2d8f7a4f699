"""A real disk that is full: protection drops to what is possible, that is said once, and training goes on."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_failpoints import FLAGS, MODEL
from test_processes import ringtmp

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="a small disk is mounted as root"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_snapshots_alone_and_is_said_once(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    flags = [each for each in FLAGS if each not in ("--checkpoint-every", 20)]
    alone = ringtmp("train", "--nodes", 1, *flags, cwd=tmp_path)
    done = ringtmp(
        "train", *flags, "--nodes", 3, "--run-dir", small_disk / "run", "--protect", "disk", cwd=tmp_path
    )  # fmt: skip
    summary = json.loads(done.stdout)
    assert summary["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    assert done.stderr.count("no more snapshots: No space left on device") == 1, done.stderr
    assert not (small_disk / "run" / "snapshots").exists()
