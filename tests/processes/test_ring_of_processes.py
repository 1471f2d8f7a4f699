"""The claims once more with real processes and the real command line: bits, isolation, kills, Ctrl-C, limits."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import assert_all_gone, begin, here, ringtmp, wait_for_step, workers_of
from ringtmp import Ring


def test_one_digest_for_one_and_four_processes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(Path(__file__).read_bytes())
    digests = set()
    for nodes in (1, 4):  # two: test_python_gives_the_same_bits_with_processes_as_without
        done = here(
            "train", "--model", "gpt", "--set", "width=32", "--set", "context=32", "--set", "dropout=0.1", "--data",
            "text:text", "--clip-norm", "1", "--nodes", nodes, "--steps", "5", "--json", "--quiet", cwd=tmp_path,
        )  # fmt: skip
        summary = json.loads(done.stdout)
        assert summary["nodes"] == nodes
        assert len(summary["per_node"]) == nodes
        digests.add(summary["weights_sha256"])
    assert len(digests) == 1


@pytest.mark.long
def test_a_workers_process_never_imports_the_users_file(tmp_path: Path, factory_file: Path) -> None:
    done = here(
        "train", "--model", f"{factory_file}:model", "--data", f"{factory_file}:data", "--nodes", 3, "--epochs", 3,
        "--json", "--quiet", cwd=tmp_path,
    )  # fmt: skip
    importers = set((factory_file.parent / "importers").read_text().split())
    assert len(importers) == 1, "only the master may import the user's file"
    log = tmp_path / json.loads(done.stdout)["run_dir"] / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    workers = {str(event["pid"]) for event in events if event["type"] == "node" and event["role"] == "worker"}
    assert len(workers) == 2
    assert not workers & importers


@pytest.mark.long  # the command line says it too
def test_python_gives_the_same_bits_with_processes_as_without(tmp_path: Path) -> None:
    one = Ring(nodes=1).fit("convnet", "digits", steps=4, run_dir=tmp_path / "one")
    two = Ring(nodes=2, schedule="gpipe").fit("convnet", "digits", steps=4, run_dir=tmp_path / "two")
    assert one.summary.weights_sha256 == two.summary.weights_sha256


@pytest.mark.long
@pytest.mark.alone
def test_a_killed_worker_is_named_with_its_step_within_five_seconds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = begin("train", "--nodes", 3, "--epochs", 500, "--protect", "off", "--run-dir", run, cwd=tmp_path)
    wait_for_step(run, 5, process)
    workers = workers_of(process)
    killed = time.monotonic()
    workers[2].kill()
    _, said = process.communicate(timeout=20)
    assert time.monotonic() - killed < 5
    assert process.returncode == 4
    assert f"node 2 (process {workers[2].pid}) was killed by SIGKILL in step " in said
    assert_all_gone(list(workers.values()))


@pytest.mark.long  # also in test_healing_processes, where the run is resumed
def test_when_the_master_is_killed_its_workers_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = begin("train", "--nodes", 3, "--epochs", 500, "--run-dir", run, cwd=tmp_path)
    wait_for_step(run, 2, process)
    workers = list(workers_of(process).values())
    process.kill()
    process.communicate()
    assert_all_gone(workers)
    for folder in Path(tempfile.gettempdir()).glob(f"ringtmp_{process.pid}-*"):
        shutil.rmtree(folder)  # what a killed master leaves, the test itself clears


def test_a_worker_that_raises_gives_its_traceback_node_and_step(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        """
import torch
from torch import nn

class FailsLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.long))
        self.table = nn.Embedding(20, 64)

    def forward(self, x):
        self.seen.add_(1)
        return x + self.table(self.seen + 0)

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), FailsLater(), nn.Linear(64, 10))
"""
    )
    done = here(
        "train", "--model", "late.py:model", "--cuts", "0-1,2,3", "--nodes", 2, "--epochs", 2, cwd=tmp_path, code=1
    )
    assert "node 1 failed in step 2: IndexError" in done.stderr
    assert "Traceback" in done.stderr


# A shell that goes sends its own, and the terminal another.
@pytest.mark.long
@pytest.mark.parametrize(
    "signals",
    [pytest.param([signal.SIGINT], id="ctrl-c"), pytest.param([signal.SIGHUP] * 2, id="closed-terminal")],
)
def test_ctrl_c_saves_and_the_run_goes_on_with_the_same_bits(tmp_path: Path, signals: list[int]) -> None:
    run = tmp_path / "run"
    process = begin("train", "--nodes", 3, "--steps", 120, "--run-dir", run, cwd=tmp_path)
    wait_for_step(run, 3, process)
    workers = list(workers_of(process).values())
    for each in signals:
        process.send_signal(each)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"resume with ringtmp train --resume {run}" in said
    assert_all_gone(workers)
    resumed = json.loads(here("train", "--resume", run, "--nodes", 2, "--json", "--quiet", cwd=tmp_path).stdout)
    whole = json.loads(here("train", "--nodes", 1, "--steps", 120, "--json", "--quiet", cwd=tmp_path).stdout)
    assert resumed["steps"] == 120
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.long  # the parts: test_built_in_files, test_export
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts private memory on Linux only")
def test_a_model_larger_than_the_masters_memory_trains(tmp_path: Path) -> None:
    """Weights, gradients and Adam's state need 4 x 96 MiB; the master may take 200 MiB more than before the first.
    Without snapshots: those it holds for its neighbour are memory too."""
    (tmp_path / "large.py").write_text(
        """
import resource
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1024, 1024), 1e-3))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)

def model():
    yield nn.Linear(64, 1024)
    # In the master, when torch and its exporter are loaded and no large layer is built yet. Workers have no such limit.
    used = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + 200 * 2**20, used + 200 * 2**20))
    for _ in range(24):
        yield Wide()
    yield nn.Linear(1024, 10)

def data():
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10
"""
    )
    done = ringtmp(
        "train", "--model", "large.py:model", "--data", "large.py:data", "--nodes", 5, "--steps", 3, "--batch-size", 16,
        "--protect", "checkpoint", "--json", "--quiet", cwd=tmp_path,
    )  # fmt: skip
    summary = json.loads(done.stdout)
    parameters = sum(node["params"] for node in summary["per_node"])
    assert parameters * 4 * 3 > 280 * 2**20, "weights and optimizer state alone exceed what the master may take"
    assert summary["outcome"] == "done"
    assert max(node["params"] for node in summary["per_node"]) < parameters / 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs root to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long  # in memory: test_node_pools; events: test_event_log
def test_a_full_disk_keeps_the_last_checkpoint_and_says_so(tmp_path: Path, small_disk: Path) -> None:
    flags = ["--nodes", 1, "--steps", 30, "--quiet"]
    done = ringtmp(
        "train", "--checkpoint-every", 10, "--run-dir", small_disk / "run", *flags, cwd=tmp_path, code=1
    )  # the first weights fit; weights with Adam's state beside them do not
    assert "no checkpoint of step 10: No space left on device; the one before is kept" in done.stderr
    assert (
        "the checkpoint of step 30 cannot be written: No space left on device; the last one kept is of step 0"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert [path.name for path in (small_disk / "run/checkpoints").iterdir()] == ["step-00000000"]
    done = here("train", "--set", "width=600", "--run-dir", small_disk / "large", *flags, cwd=tmp_path, code=2)
    assert "the model's first weights cannot be written" in done.stderr
    assert not (small_disk / "large").exists()
