"""The whole machine stands still for long, then everybody goes on: time in which nobody could speak is nobody's silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtmp.launch.ring_in_one_process import InMemoryPool
from test_every_strategy import train
from test_healing import Ticking

SLEPT_S = 600.0


class Sleeping(InMemoryPool):
    """From a step on nobody but the master moves, until it has nothing to do any more; then it is ten minutes later."""

    def __init__(self, nodes: int, step: int) -> None:
        super().__init__(nodes, seed=1, clock=Ticking())
        self._at, self._turns_left = step, 600

    def advance(self) -> bool:
        if self._turns_left and min(worker.step for worker in self._workers) >= self._at:
            self._turns_left -= 1
            if self._turns_left == 100:
                assert isinstance(self._clock, Ticking)
                self._clock.now += SLEPT_S
            return False
        return super().advance()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("tree-easgd:2", 4),
        ("tree-easgd:2", 0),  # before anybody has said hello
        *(
            pytest.param(name, 4, marks=pytest.mark.long)
            for name in ("ring", "ps:bsp", "allreduce", "ensemble", "tensor")
        ),
    ],
)
def test_a_run_goes_on_when_the_machine_wakes(name: str, step: int, tmp_path: Path) -> None:
    pool = Sleeping(3, step)
    summary = train(name, tmp_path, 30 if name.startswith("tree") else 10, pool).summary
    assert not pool._turns_left, "it never slept"
    assert summary.recoveries == ()
    assert summary.loss.last < summary.loss.first
