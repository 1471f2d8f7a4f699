"""Tensors are let go the moment nobody needs them: none waits in a reference cycle for Python's garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtmp import api
from ringtmp.config import KeepPart, ModelPart, RingPart, RunConfig, TrainingPart
from ringtmp.launch.ring_in_one_process import InMemoryPool

#: From the end of one of these steps to the end of the other everything is looked at.
FIRST, LAST = 2, 5


class Collecting(api.Watcher):
    """Keeps what became garbage between two steps."""

    found: list[Any] | None = None

    def step(self, done: int, *rest: Any) -> None:
        if done == FIRST:
            gc.collect()
            gc.disable()
        if done == LAST:
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            self.found = list(gc.garbage)


@pytest.fixture
def collecting() -> Iterator[Collecting]:
    try:
        yield Collecting()
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("ring", "training"),
    [
        pytest.param({}, {}, marks=pytest.mark.long),
        ({"schedule": "zero-bubble"}, {"clip_norm": 1.0}),
        ({"recompute": "all"}, {"staleness": 1}),
        ({"laps": 2}, {"wire": "int8"}),
        ({"strategy": "ps"}, {}),
        pytest.param({"strategy": "ps:async"}, {"wire": "bfloat16"}, marks=pytest.mark.long),
        ({"strategy": "allreduce"}, {}),
    ],
    ids=str,
)
def test_no_tensor_becomes_garbage_in_a_cycle(
    ring: dict[str, Any], training: dict[str, Any], collecting: Collecting, tmp_path: Path
) -> None:
    config = RunConfig(
        training=TrainingPart(data="digits", steps=LAST + 1, batch_size=32, microbatches=4, **training),
        ring=RingPart(nodes=2, **ring),
        keep=KeepPart(),
        model=ModelPart(name="mlp", settings={"depth": 5, "width": 16}),
    )
    api.start(config, None, None, None, run_dir=tmp_path / "run", watcher=collecting, pool=InMemoryPool(2))
    assert collecting.found is not None, "the steps between were never looked at"
    held = [tuple(each.shape) for each in collecting.found if isinstance(each, torch.Tensor)]
    assert not held, f"of these shapes: {held}"


def test_what_was_there_before_the_first_step_is_not_looked_through_again(tmp_path: Path) -> None:
    """A search through all of torch takes as long as several steps. The caller's garbage is collected again afterwards."""
    seen: list[int] = []

    class Counting(api.Watcher):
        def step(self, done: int, *rest: Any) -> None:
            seen.append(gc.get_freeze_count())

    before = gc.get_freeze_count()
    config = RunConfig(
        training=TrainingPart(data="digits", steps=1, batch_size=32),
        ring=RingPart(nodes=1),
        keep=KeepPart(),
        model=ModelPart(name="mlp", settings={"depth": 2, "width": 16}),
    )
    api.start(config, None, None, None, run_dir=tmp_path / "run", watcher=Counting(), pool=InMemoryPool(1))
    assert seen[0] > 100_000
    assert gc.get_freeze_count() == before
