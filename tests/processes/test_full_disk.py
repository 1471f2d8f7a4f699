"""A real disk that is full: protection drops to what is possible, that is said once, and training goes on; a bench ends, and
keeps what it has measured."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import REMEMBERING, here, remembering_model, ringtmp

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="a small disk is mounted as root"),
]
FLAGS = (*REMEMBERING, "--steps", 60)


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Where a run's snapshots go, with room for less than two of them."""
    with disk(tmp_path / "run" / "snapshots", "250k") as folder:
        yield folder


def test_a_full_disk_ends_snapshots_alone_and_is_said_once(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "mine.py").write_text(remembering_model(32))
    alone = ringtmp("train", "--nodes", 1, *FLAGS, cwd=tmp_path)
    done = ringtmp("train", *FLAGS, "--nodes", 3, "--run-dir", small_disk.parent, "--protect", "disk", cwd=tmp_path)
    summary = json.loads(done.stdout)
    assert summary["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    assert done.stderr.count("no more snapshots: No space left on device") == 1, done.stderr
    assert not any(path.is_file() for path in small_disk.rglob("*"))


@pytest.mark.timeout(300)
def test_a_streams_batches_go_to_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        remembering_model(32)
        + """
import torch

def data():
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        yield torch.randn(32, 1, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)
"""
    )
    words = (*FLAGS, "--data", "mine.py:data", "--checkpoint-every", 50)
    alone = here("train", "--nodes", 1, *words, cwd=tmp_path)
    with disk(tmp_path / "run" / "stream", "100k"):
        done = here("train", *words, "--nodes", 3, "--run-dir", "run", "--stream-keep", "disk", cwd=tmp_path)
    assert json.loads(done.stdout)["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    assert done.stderr.count("batches of the stream cannot be written: No space left on device") == 1, done.stderr


def test_a_bench_on_a_full_disk_keeps_what_was_measured_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    words = (
        "bench",
        "speed",
        "--quick",
        "--workloads",
        "mlp",
        "--settings",
        "two",
        "--cases",
        "ring",
        "--repeats",
        1,
        "--quiet",
    )
    with disk(tmp_path / "out", "16k") as out:
        done = ringtmp(*words, "--out", out, cwd=tmp_path, code=1)
        assert "No space left on device; what was measured before is kept, and the same command goes on" in done.stderr
        kept = [path.name for path in (out / "measurements").glob("*.json")]
        assert len(kept) == 1, kept
        subprocess.run(["mount", "-o", "remount,size=10m", str(out)], check=True)
        before = {name: (out / "measurements" / name).stat().st_mtime_ns for name in kept}
        ringtmp(*words, "--out", out, cwd=tmp_path)
        assert len(list((out / "measurements").glob("*.json"))) == 3
        assert {name: (out / "measurements" / name).stat().st_mtime_ns for name in kept} == before
