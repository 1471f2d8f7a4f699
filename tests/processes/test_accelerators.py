"""Nodes that compute on an accelerator. Where there is none, refusals alone are tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import here
from ringtmp.errors import UsageError
from ringtmp.runtime import compute_device

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
#: Dropout, so that randomness on the accelerator is seeded too.
MODEL = ("--model", "mlp", "--set", "dropout=0.2", "--set", "depth=6", "--optimizer", "adamw", "--clip-norm", 1)


def summary(*args: object, cwd: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(here("train", *args, "--json", "--quiet", cwd=cwd).stdout)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_the_start(tmp_path: Path) -> None:
    told = here("train", "--device", "cuda", cwd=tmp_path, code=2).stderr
    assert "--device cuda: torch" in told
    assert "use --device cpu, or auto" in told
    assert not list(tmp_path.iterdir())
    if not torch.backends.mps.is_available():
        assert compute_device.find("auto") == torch.device("cpu")
        with pytest.raises(UsageError, match="no Metal device"):
            compute_device.find("mps")


def test_a_strategy_whose_workers_hold_the_whole_model_computes_on_the_processor(tmp_path: Path) -> None:
    told = here("train", "--device", "auto", "--strategy", "allreduce", cwd=tmp_path, code=2).stderr
    assert "--device works with --strategy ring only" in told


def test_what_comes_several_times_is_brought_once() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    first, second, third = compute_device.brought([one, two, one])
    assert first is third
    assert second is not first


@cuda
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_nodes_on_a_gpu_have_the_bits_of_one_process_on_it(schedule: str, tmp_path: Path) -> None:
    given = (*MODEL, "--steps", 12, "--device", "cuda")
    one = summary(*given, "--nodes", 1, cwd=tmp_path)
    ring = summary(*given, "--nodes", 3, "--schedule", schedule, cwd=tmp_path)
    assert ring["weights_sha256"] == one["weights_sha256"]
    assert ring["exactness"] == "replay"


@cuda
def test_a_run_begun_on_a_gpu_goes_on_without_it(tmp_path: Path) -> None:
    summary("--steps", 6, "--device", "cuda", "--nodes", 2, "--run-dir", "run", cwd=tmp_path)
    told = summary("--resume", "run", "--steps", 12, "--device", "cpu", cwd=tmp_path)
    assert told["steps"] == 12


@cuda
def test_losses_are_those_of_the_processor_to_a_thousandth(tmp_path: Path) -> None:
    given = (
        "--model",
        "gpt",
        "--data",
        "pysource",
        "--set",
        "depth=3",
        "--set",
        "width=64",
        "--steps",
        50,
        "--nodes",
        2,
    )
    on_gpu = summary(*given, "--device", "cuda", cwd=tmp_path)["loss"]
    on_cpu = summary(*given, cwd=tmp_path)["loss"]
    assert isinstance(on_gpu, dict)
    assert isinstance(on_cpu, dict)
    assert on_gpu["last"] == pytest.approx(on_cpu["last"], abs=1e-3)
