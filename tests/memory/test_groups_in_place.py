"""When a member of a group goes and another comes, everyone else keeps its layers: no snapshot, the same bits."""

from __future__ import annotations

from collections.abc import Collection, Set
from pathlib import Path
from typing import Any

import pytest

from ringtmp.config import KeepPart
from ringtmp.errors import NodeLost
from ringtmp.metrics.events import Regrouped, read
from ringtmp.plan.node_groups import kept_in_place
from ringtmp.runtime.run_directory import RunDirectory
from ringtmp.strategies.ring.master import Master
from ringtmp.wire.address import NOWHERE, Address
from test_group_members_lost import STEPS, Mortal, Ticking, arm, expected, run

FAR = STEPS - 4


class OneWaits(Mortal):
    """Node 1 is lost for good; some steps later another comes in its place."""

    def __init__(self) -> None:
        super().__init__(5, clock=Ticking())
        self._missing, self._waiting = set[int](), False

    def kill(self, node: int) -> None:
        super().kill(node)
        self._missing.add(node)
        self.nodes -= 1

    def all_anew(self) -> bool:
        return False

    def changed(self) -> str | None:
        self._waiting = bool(self._missing) and any(each.step >= FAR for each in self._workers)
        return "another joined" if self._waiting else None

    def addresses(self) -> dict[int, Address]:
        return {node: NOWHERE for node in range(5) if node not in self._missing}

    def replace_lost(
        self, ring: str, generation: int, compact: bool, need_bytes: int, spared: Set[int] = frozenset()
    ) -> Collection[int]:
        living = {worker.endpoint.node for worker in self._workers}
        self.found_lost = [NodeLost(f"node {node} was killed", node) for node in sorted(self._dead)]
        self._dead.clear()
        for node in sorted(self._missing) if self._waiting else ():
            self._make(node, ring, generation)
            self._missing.discard(node)
            self.nodes += 1
        return living


def test_one_goes_and_another_comes_and_no_layer_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = expected(tmp_path)
    routes: list[Any] = []
    sent: list[tuple[int, int]] = []  # which plan, and who got a layer from somebody else
    lay_out, place, write = Master.lay_out, Master._place, RunDirectory.write_config
    kept: list[int] = []

    def written(this: RunDirectory, saved: Any) -> None:
        kept.append(saved.config.ring.nodes)
        write(this, saved)

    def laid_out(this: Master, checkpoint: Any) -> None:
        routes.append(this._setup.route)
        lay_out(this, checkpoint)

    def placed(this: Master, index: int, holder: int, given: Any) -> None:
        if given[0]:  # else it has no weights
            sent.append((len(routes), holder))
        place(this, index, holder, given)

    monkeypatch.setattr(RunDirectory, "write_config", written)
    monkeypatch.setattr(Master, "lay_out", laid_out)
    monkeypatch.setattr(Master, "_place", placed)
    seen = arm("after a sum was sent", 1, monkeypatch)
    next(seen)
    result = run(tmp_path / "hit", OneWaits(), "2,2", keep=KeepPart(checkpoint_every=1000))
    assert result.summary.weights_sha256 == calm
    assert [[visit.members for visit in each.visits] for each in routes] == [
        [(0,), (1, 2), (3, 4), (0,)], [(0,), (2,), (3, 4), (0,)], [(0,), (2, 1), (3, 4), (0,)],
    ]  # fmt: skip
    cuts = [[(visit.first, visit.stop) for visit in each.visits] for each in routes]
    assert cuts[0] == cuts[1] == cuts[2]
    assert {holder for plan, holder in sent if plan == 2} == set()
    assert {holder for plan, holder in sent if plan == 3} == {1}, "of a sibling, through the master"
    assert set(kept) == {5}, "who resumes it while one is missing would be told that the groups need five"
    lost, joined = (each for each in read(result.run_dir / "events.jsonl") if isinstance(each, Regrouped))
    assert (lost.source, lost.repeated, lost.nodes) == ("survivors", 0, 4)
    assert (joined.step, joined.nodes, joined.lost) == (FAR, 5, ())


@pytest.mark.parametrize(
    ("before", "nodes", "most", "after"),
    [
        ([(1, 2), (3, 4)], (0, 2, 3, 4), 4, [(2,), (3, 4)]),
        ([(2,), (3, 4)], (0, 1, 2, 3, 4), 4, [(2, 1), (3, 4)]),
        ([(1, 2), (3, 4)], (0, 1, 2, 3, 4, 5, 6, 7), 4, [(1, 2, 5, 7), (3, 4, 6)]),
        ([(1, 2), (3,)], (0, 1, 2, 4), 2, None),  # nobody is left who has those layers
        ([(1, 2), (3, 4)], (0, 1, 2, 3, 4, 5), 2, None),
        ([(1, 2)], (0, 2, 5), 2, [(2, 5)]),
    ],
)
def test_who_is_new_enters_the_smallest_group(
    before: list[tuple[int, ...]], nodes: tuple[int, ...], most: int, after: list[tuple[int, ...]] | None
) -> None:
    assert kept_in_place(before, nodes, most) == after
