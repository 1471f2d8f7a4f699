"""Epochs that end before the slowest worker is done with its share of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.strategies.data_parallel.partial_epochs import Stretch
from test_strategies import Case, logged, train


def test_a_stretch_ends_once_when_all_is_dealt_and_enough_is_done() -> None:
    stretch = Stretch(0.75)
    for number in range(4):
        stretch.dealt(1.0, fresh=number == 0)
    stretch.done(2.9)
    assert not stretch.may_end()
    stretch.done(0.1)
    assert [stretch.may_end(), stretch.may_end()] == [True, False]
    stretch.dealt(1.0, fresh=True)
    assert not stretch.may_end(), "a new one has begun"
    stretch.done(0.8)
    assert stretch.may_end()
    whole = Stretch(1.0)
    whole.dealt(1.0, fresh=True)
    whole.done(1.0)
    assert not whole.may_end(), "nothing is given up"


#: Three workers have as many samples each, but for one or two.
EQUAL: dict[str, Any] = {"microbatches": 6, "epochs": 2}


class OneSlow(InMemoryPool):
    """Node 2 has a turn where the others have twenty."""

    turns = 0

    def advance(self) -> bool:
        self.turns += 1
        everyone = self._workers
        if self.turns % 20:
            self._workers = [each for each in everyone if each.endpoint.node != 2]
        try:
            return super().advance() or bool(self.turns % 20)  # node 2 is slow, not stuck: nobody waits by the clock
        finally:
            self._workers = everyone


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, id="plain"), pytest.param({"replicas": 1, "servers": 2}, id="replicas", marks=pytest.mark.long)],
)
def test_what_a_slow_worker_has_not_begun_is_given_up_and_counted(more: dict[str, Any], tmp_path: Path) -> None:
    nodes = 4 + bool(more)
    settings = {"consistency": "async", **more}
    whole = train(Case("ps", nodes, settings), tmp_path / "whole", pool=OneSlow(nodes), **EQUAL)
    part = train(Case("ps", nodes, {**settings, "enough": 0.6}), tmp_path / "part", pool=OneSlow(nodes), **EQUAL)
    assert whole.summary.steps == part.summary.steps == 46, "an epoch has as many steps as ever"
    every, some = (sum(each.applied for each in logged(result, events.NodeEnded)) for result in (whole, part))
    dropped = {each.node: each.dropped for each in logged(part, events.NodeEnded)}
    keys = every // (46 * 3)
    assert every == keys * 46 * 3, "every gradient of every worker"
    assert some == keys * (46 * 3 - sum(dropped.values()))
    assert sum(dropped.values()) <= 0.41 * 46 * 3
    assert dropped[2] > 0.8 * sum(dropped.values()) > 0, "the slow one's, and little that others had not begun"
    assert part.summary.accuracy is not None
    assert part.summary.accuracy > 0.5
