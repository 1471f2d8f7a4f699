"""A server that dies: with replicas the bits stay and no gradient is lost, without them the error is clear."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtmp.errors import NodeLost
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.runtime.checkpoint import latest
from test_strategies import Case, check_counts, once, train


class Dying(InMemoryPool):
    """One node stops without a word, some turns after it has come to a step."""

    def __init__(self, nodes: int, victim: int, step: int, turns: int) -> None:
        super().__init__(nodes, seed=turns)
        self._victim, self._step, self._turns = victim, step, turns

    def advance(self) -> bool:
        victim = next((each for each in self._workers if each.endpoint.node == self._victim), None)
        if victim is not None and victim.step >= self._step:
            self._turns -= 1
            if self._turns < 0:
                self.kill(self._victim)
        return super().advance()


@pytest.mark.parametrize("turns", [2, *(pytest.param(each, marks=pytest.mark.long) for each in (0, 1, 5))])
@pytest.mark.parametrize("clip", [0.5, pytest.param(None, marks=pytest.mark.long)])
def test_with_replicas_a_server_may_die_and_the_bits_stay(turns: int, clip: float | None, tmp_path: Path) -> None:
    case = Case("ps", 5, {"servers": 2, "replicas": 1})
    calm = once(f"calm {clip}", lambda: train(case, tmp_path / "calm", steps=20, clip_norm=clip))
    hit = train(case, tmp_path / "hit", steps=20, clip_norm=clip, pool=Dying(5, 1, 5, turns))
    assert any("node 0 serves its keys" in text for text in hit.summary.warnings)
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256


def test_with_replicas_and_async_a_lost_server_costs_no_gradient(tmp_path: Path) -> None:
    case = Case("ps", 5, {"servers": 3, "replicas": 1, "consistency": "async"})
    hit = train(case, tmp_path, pool=Dying(5, 1, 15, 1), steps=40)
    assert any("serves its keys" in text for text in hit.summary.warnings)
    check_counts(case, hit)  # the heir's count begins with what it repeated


def test_without_replicas_a_lost_server_is_a_clear_error_and_the_checkpoint_is_kept(tmp_path: Path) -> None:
    case = Case("ps", 4, {"servers": 2})
    with pytest.raises(NodeLost, match="node 1"):
        train(case, tmp_path, pool=Dying(4, 1, 5, 0), protect="off")
    checkpoint, problems = latest(tmp_path / "run" / "checkpoints")
    assert checkpoint.progress.step == 0
    assert not problems
