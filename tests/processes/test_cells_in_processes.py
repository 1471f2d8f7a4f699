"""An ordinary module from the command line, in real processes: killed, interrupted, resumed, evaluated, asked.

Its skips go past a node and one of its blocks is used twice. In memory: tests/memory/test_cells_keep_promises.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import assert_all_gone, begin, here, wait_for_step, workers_of
from ringtmp import Result

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)
        self.shared, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.drop, self.head = nn.ConvTranspose2d(8, 4, 2, 2), nn.Dropout(0.2), nn.Linear(8, 10)

    def forward(self, x):
        a = torch.relu(self.stem(x.view(-1, 1, 8, 8)))
        b = torch.relu(self.down(a))
        y = torch.relu(self.norm(self.shared(b)))
        y = torch.relu(self.shared(y)) + b
        y = torch.cat([self.up(y), a], 1)
        return self.head(self.drop(y.mean((2, 3))))

def model():
    return Net()
"""
FLAGS = (
    "--model", "mine.py:model", "--optimizer", "adamw", "--clip-norm", 1, "--steps", 60, "--json", "--quiet",
    "--checkpoint-every", 15,
)  # fmt: skip
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run of one node, and its digest."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "mine.py").write_text(MODEL)
    done = here("train", "--nodes", 1, *FLAGS, "--run-dir", "run", cwd=folder)
    return folder / "run", json.loads(done.stdout)["weights_sha256"]


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "mine.py").write_text(MODEL)
    return begin("train", *FLAGS, "--nodes", 3, "--all-devices", "--run-dir", folder / "run", cwd=folder)


@pytest.mark.long  # in memory: test_cells_keep_promises; processes with layers of a list: test_healing_processes
def test_killed_workers_an_interrupted_and_a_killed_master_leave_the_bits(
    tmp_path: Path, alone: tuple[Path, str]
) -> None:
    process = start(tmp_path)
    wait_for_step(tmp_path / "run", 8, process)
    workers = workers_of(process)
    workers[2].kill()
    wait_for_step(tmp_path / "run", 20, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert_all_gone(list(workers.values()))
    assert Result(tmp_path / "run").summary.recoveries
    process = begin("train", "--resume", tmp_path / "run", "--nodes", 2, "--json", "--quiet", cwd=tmp_path)
    wait_for_step(tmp_path / "run", 36, process)
    workers = workers_of(process)
    process.kill()
    process.communicate()
    assert_all_gone(list(workers.values()))
    here("train", "--resume", tmp_path / "run", "--nodes", 3, "--quiet", cwd=tmp_path)
    assert Result(tmp_path / "run").summary.weights_sha256 == alone[1]


@pytest.mark.long  # in memory: test_result_of_cells
def test_evaluate_predict_and_the_model_without_its_class(alone: tuple[Path, str], tmp_path: Path) -> None:
    run, _ = alone
    one, two = (here("evaluate", run, "--nodes", nodes, "--json", cwd=run.parent).stdout for nodes in (1, 2))
    assert json.loads(one)["accuracy"] == json.loads(two)["accuracy"] > 0.2
    samples = torch.randn(5, 1, 8, 8)
    np.save(tmp_path / "x.npy", samples.numpy())
    model = Result(run).model
    said = here("predict", run, tmp_path / "x.npy", "--nodes", 2, cwd=run.parent).stdout.split()
    assert said == [str(int(each)) for each in model(samples).argmax(1)]
    assert type(model).__name__ == "PortableModel"
    assert set(model.state_dict()) >= {"shared.weight", "norm.running_mean", "head.bias"}
    assert model(samples).shape == (5, 10)
