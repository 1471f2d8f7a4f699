"""All-reduce made by torch.distributed: among ranks that torchrun started, with the settings, data and bits of our own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from commands import here
from ringtmp.errors import UsageError
from ringtmp.strategies.allreduce import AllReduceSettings
from ringtmp.transport import torch_distributed
from ringtmp.wire.address import NOWHERE
from test_torchrun import digest, summary, torchrun
from test_transports import ranks

LIMIT_S = 60.0


def test_sums_come_in_the_order_of_their_starts_with_the_same_bits_everywhere_and_wake_who_waits() -> None:
    ends = ranks(3)
    generator = torch.Generator().manual_seed(0)
    vectors = [[torch.randn(1000, generator=generator) for _ in range(4)] for _ in ends]
    expected = [sum(vector[at].double() for vector in vectors) for at in range(4)]
    for end, mine in zip(ends, vectors, strict=True):
        for at, vector in enumerate(mine):
            end.sums.start((7, at), vector)
    found: list[list[torch.Tensor]] = []
    for end in ends:
        got: list[tuple[tuple[int, int], torch.Tensor]] = []
        limit = time.monotonic() + LIMIT_S
        while len(got) < 4 and time.monotonic() < limit:
            if end.wait(LIMIT_S):  # nothing else comes: only a sum ends the wait
                got += end.sums.there()
        assert [name for name, _ in got] == [(7, 0), (7, 1), (7, 2), (7, 3)]
        found.append([vector for _, vector in got])
    for at, total in enumerate(expected):
        assert torch.allclose(found[0][at].double(), torch.as_tensor(total), atol=1e-5)
        assert all(torch.equal(each[at], found[0][at]) for each in found)
    for end in ends:
        end.close()


def test_no_thread_outlives_a_transport_whatever_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes back from the library while the interpreter goes down aborts the process, after its work was done."""
    monkeypatch.setattr(torch_distributed, "CLOSE_LIMIT_S", 0.2)
    before = set(threading.enumerate())
    here_, silent, _ = ranks(3)
    for peer in (1, 2):
        here_.connect(peer, NOWHERE)  # who never says anything
    here_.sums.start((0, 0), torch.ones(1000))  # which nobody else starts
    here_.close()
    assert set(threading.enumerate()) <= before
    silent.close()


#: Sums are under way when the interpreter goes down, and end meanwhile.
ENDS_AMID_SUMS = """
import torch
from test_transports import ranks
ends = ranks(2)
for number in range(20):
    for end in ends:
        end.sums.start((0, number), torch.ones(100_000))
for end in ends:
    end.close()
"""


@pytest.mark.long  # quick: the threads, above
def test_a_process_that_closes_amid_sums_is_not_aborted() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", ENDS_AMID_SUMS], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_without_ranks_or_with_a_lossy_wire_it_is_refused(tmp_path: Path) -> None:
    said = here("train", "--strategy", "allreduce:torch", "--nodes", 2, "--run-dir", "run", cwd=tmp_path, code=2).stderr
    assert "allreduce with algorithm=torch: torch.distributed makes the sums" in said
    assert "torchrun --nproc-per-node 2" in said
    assert not (tmp_path / "run").exists(), "nothing has started"
    with pytest.raises(UsageError, match="--wire int8 does not go with allreduce:torch"):
        AllReduceSettings(algorithm="torch").check(2, "int8")


@pytest.mark.long  # quick: the sums, above
@pytest.mark.timeout(300)
def test_two_ranks_that_torch_sums_over_have_the_bits_of_our_own_all_reduce(tmp_path: Path) -> None:
    """Of two numbers there is one sum. Dropout, clipping, AdamW, a checkpoint, a smaller last batch on the way."""
    given = ("--steps", 12, "--optimizer", "adamw", "--clip-norm", 1, "--set", "dropout=0.1", "--checkpoint-every", 5)
    told = summary(torchrun(2, *given, "--strategy", "allreduce:torch", "--json", "--run-dir", "run", cwd=tmp_path))
    assert told["strategy"] == "allreduce"
    assert told["weights_sha256"] == digest(*given, "--strategy", "allreduce", "--nodes", 2, cwd=tmp_path)
    ours = {each["node"]: each["bytes_sent"] for each in told["per_node"]}  # type: ignore[attr-defined]
    assert min(ours.values()) > 0, "what torch sent counts"
    assert (tmp_path / "run/checkpoints").is_dir()


@pytest.mark.nightly  # quick: the sums, above
@pytest.mark.timeout(600)
def test_three_ranks_that_torch_sums_over_end_with_the_same_bits_twice(tmp_path: Path) -> None:
    given = ("--steps", 6, "--strategy", "allreduce:torch", "--json")
    assert len({summary(torchrun(3, *given, cwd=tmp_path))["weights_sha256"] for _ in range(2)}) == 1
