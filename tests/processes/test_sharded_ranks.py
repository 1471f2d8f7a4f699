"""`allreduce:torch` with shard=true among two ranks that torchrun started: each keeps a part of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from commands import assert_all_gone, here, wait_for_step
from ringtmp.runtime.checkpoint import Checkpoint
from ringtmp.runtime.run_directory import RunDirectory
from test_torchrun import digest, summary, torchrun

SHARDED = ("--strategy", "allreduce:torch", "--with", "shard=true", "--json")
REMEMBERING = ("--optimizer", "adamw", "--set", "dropout=0.1", "--checkpoint-every", 5)

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # quick: test_sharded_all_reduce.py


def weights(run: Path) -> dict[str, torch.Tensor]:
    _, layers = RunDirectory(run).read_layers()
    newest = Checkpoint(max((run / "checkpoints").glob("step-*")))
    found = {}
    for index, layer in enumerate(layers):
        tensors, state = newest.layer(index, layer)
        named: dict[Any, torch.Tensor] = dict(zip([each.name for each in layer.tensors], tensors, strict=True))
        found.update({f"{index}/{name}": each for name, each in {**named, **state}.items()})
    return found


@pytest.mark.parametrize("clipping", [(), ("--clip-norm", 1)])
def test_two_ranks_with_half_a_model_each_learn_what_two_with_a_whole_one_learn(
    clipping: tuple[object, ...], tmp_path: Path
) -> None:
    """Of two gradients there is one sum. 14 steps of 96 samples: the last of an epoch is smaller."""
    given = ("--steps", 34, *REMEMBERING, *clipping)
    told = summary(torchrun(2, *given, *SHARDED, "--run-dir", "cut", cwd=tmp_path))
    here("train", *given, "--strategy", "allreduce", "--nodes", 2, "--run-dir", "whole", "--quiet", cwd=tmp_path)
    cut, whole = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert cut.keys() == whole.keys()
    for name, each in whole.items():
        assert torch.allclose(cut[name], each, rtol=1e-5, atol=1e-6), name
    assert told["exactness"] == "replay"
    assert [each["bytes_sent"] > 0 for each in told["per_node"]] == [True, True]  # type: ignore[attr-defined]


def test_a_sharded_run_goes_on_with_whole_ranks_and_without_torchrun_and_back(tmp_path: Path) -> None:
    whole = ("--strategy", "allreduce:ring", "--with", "shard=false", "--nodes", 2, "--quiet")
    here("train", "--steps", 6, *REMEMBERING, *whole, "--run-dir", "run", cwd=tmp_path)
    told = summary(torchrun(2, "--resume", "run", "--steps", 12, *SHARDED, cwd=tmp_path))
    assert (told["steps"], told["strategy"]) == (12, "allreduce")
    here("train", "--resume", "run", "--steps", 16, *whole, cwd=tmp_path)
    here("train", "--steps", 16, *REMEMBERING, *whole, "--run-dir", "alone", cwd=tmp_path)
    found, expected = weights(tmp_path / "run"), weights(tmp_path / "alone")
    assert all(torch.allclose(found[name], each, rtol=1e-5, atol=1e-6) for name, each in expected.items())


def test_a_killed_rank_costs_nothing_but_time(tmp_path: Path) -> None:
    given = ("--steps", 120, *REMEMBERING)
    started = torchrun(2, *given, *SHARDED, "--run-dir", "run", cwd=tmp_path, more=("--max-restarts", "1"))
    wait_for_step(tmp_path / "run", 30, started)
    ranks = [each for each in psutil.Process(started.pid).children() if "program.py" in each.cmdline()]
    (victim,) = [each for each in ranks if each.environ()["RANK"] == "1"]
    victim.kill()
    told = summary(started)
    assert told["weights_sha256"] == summary(torchrun(2, *given, *SHARDED, cwd=tmp_path))["weights_sha256"]
    assert_all_gone(ranks)


def test_a_rank_without_samples_in_the_last_batch_takes_part(tmp_path: Path) -> None:
    """The last of 1,437 samples is a batch of its own."""
    given = ("--epochs", 1, "--batch-size", 359, "--microbatches", 2)
    told = summary(torchrun(2, *given, *SHARDED, cwd=tmp_path))
    assert told["steps"] == 5
    assert told["weights_sha256"] == digest(*given, "--strategy", "allreduce", "--nodes", 2, cwd=tmp_path)
