"""A member of a group vanishes at each named moment of a step, also while its group adds up and agrees: the same bits.

With dropout, AdamW and clipping, M-2-2-M, in memory. Every moment is one at which the nodes of a group differ.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.launch.ring_in_one_process import InMemoryPool
from test_healing import Ticking
from test_training_loop import blobs

STEPS = 12
FIRST, OTHER = 1, 4  # the first of the first group, who speaks for it; the second of the second

NODE, SUMS, ENDING, KEEPING = (
    "strategies.ring.node:Node",
    "strategies.ring.group_sums:GroupSums",
    "strategies.ring.sums_and_norms:SumsAndNorms",
    "strategies.ring.exchange_snapshots:NodeSnapshots",
)


class Moment(NamedTuple):
    what: str  # module:Class.method, below ringtmp
    when: str  # before or after it
    times: int  # the how-manieth time on this node
    nodes: tuple[int, ...] = (FIRST, OTHER)


MOMENTS = {
    "before a forward": Moment(f"{NODE}._forward", "before", 13),
    "after its activations were sent": Moment(f"{NODE}._send_on", "after", 14),
    "before a backward": Moment(f"{NODE}._backward", "before", 14),
    "before its group adds up": Moment(f"{SUMS}.begin", "before", 7),
    "before its first sum is sent": Moment(f"{SUMS}._send", "before", 20),
    "after a sum was sent": Moment(f"{SUMS}._send", "after", 20),
    "after it sent all of its own": Moment(f"{SUMS}.finish", "after", 7),
    "before it takes another's sum": Moment(f"{SUMS}._take", "before", 13),
    "after it took another's sum": Moment(f"{SUMS}._take", "after", 13),
    "before its sum is whole": Moment(f"{SUMS}._ended", "before", 15),
    "when its sum is whole": Moment(f"{ENDING}.summed", "before", 7),
    "after it said the norms": Moment(f"{ENDING}.summed", "after", 7),
    "before it hears the total norm": Moment(f"{ENDING}.scale", "before", 7),
    "after it passed the total norm on": Moment(f"{ENDING}.scale", "after", 7),
    "before its update": Moment(f"{NODE}._update", "before", 7),
    "after its update": Moment(f"{NODE}._update", "after", 7),
    "before its step is told": Moment(f"{NODE}._close_step", "before", 7),
    "after its step was told": Moment(f"{NODE}._close_step", "after", 7),
    "before a copy": Moment(f"{KEEPING}.take", "before", 1, (FIRST,)),
    "after a copy": Moment(f"{KEEPING}.take", "after", 1, (FIRST,)),
    "holder before it tells": Moment(f"{KEEPING}._hold", "before", 1, (3,)),
    "holder after it told": Moment(f"{KEEPING}._hold", "after", 1, (3,)),
}
QUICK = {("after a sum was sent", OTHER), ("when its sum is whole", FIRST)}


class Gone(BaseException):
    """This node stops where it is."""


class Mortal(InMemoryPool):
    def _make(self, node: int, ring: str, generation: int) -> None:
        super()._make(node, ring, generation)
        worker = self._workers[-1]
        turn = worker.turn

        def until_gone() -> bool:
            try:
                return turn()
            except Gone:
                self.kill(node)
                return True

        worker.turn = until_gone  # type: ignore[method-assign]


def node_of(this: Any) -> int:
    if hasattr(this, "_rank"):
        return int(this._visit.members[this._rank])
    if hasattr(this, "_endpoint"):
        return int(this._endpoint.node)
    return int(getattr(this, "me", getattr(this, "_me", -1)))


def arm(name: str, node: int, patch: pytest.MonkeyPatch) -> Iterator[int]:
    """Once, this node stops at this moment."""
    moment = MOMENTS[name]
    module, path = moment.what.split(":")
    kind, method = path.split(".")
    owner = getattr(importlib.import_module(f"ringtmp.{module}"), kind)
    work, seen = getattr(owner, method), 0

    @functools.wraps(work)
    def watched(this: Any, *args: Any, **options: Any) -> Any:
        nonlocal seen
        seen += (here := node_of(this) == node)
        if here and seen == moment.times and moment.when == "before":
            seen += 1
            raise Gone
        result = work(this, *args, **options)
        if here and seen == moment.times and moment.when == "after":
            seen += 1
            raise Gone
        return result

    patch.setattr(owner, method, watched)
    while True:
        yield seen


def model() -> nn.Sequential:
    torch.manual_seed(2)
    inner = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), *inner, nn.Linear(16, 3))


def run(
    folder: Path, pool: InMemoryPool, groups: str | None, schedule: Any = "auto", keep: KeepPart | None = None, **ring: Any
) -> api.Result:  # fmt: skip
    config = RunConfig(
        training=TrainingPart(
            data="given", steps=STEPS, batch_size=16, microbatches=4, sum_tree=4, clip_norm=0.5, optimizer="adamw",
            optimizer_settings={"lr": 0.01},
        ),
        ring=RingPart(nodes=pool.nodes, groups=groups, all_devices=True, schedule=schedule, **ring),
        keep=keep or KeepPart(checkpoint_every=5),
    )  # fmt: skip
    data = (tensors("t", *blobs()), tensors("t", *blobs(30)))
    return api.start(config, model(), data, None, run_dir=folder, pool=pool)


@cache
def expected(folder: Path) -> str | None:
    return run(folder / "calm", InMemoryPool(1), None).summary.weights_sha256


@pytest.mark.parametrize(
    ("name", "node"),
    [
        pytest.param(name, node, marks=[] if (name, node) in QUICK else pytest.mark.long)
        for name, moment in MOMENTS.items()
        for node in moment.nodes
    ],
)
def test_a_member_lost_at_a_named_moment_changes_no_bit(
    name: str, node: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = expected(tmp_path_factory.getbasetemp())
    seen = arm(name, node, monkeypatch)
    next(seen)
    hit = run(tmp_path / "hit", Mortal(5, clock=Ticking()), "2,2")
    assert next(seen) > MOMENTS[name].times, "it never came to its moment"
    assert [each.lost for each in hit.summary.recoveries] == [(node,)]
    assert hit.summary.weights_sha256 == calm
