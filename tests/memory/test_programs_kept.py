"""Graphs are compiled once in a process: after a loss, those who survive it do not compile the layers they have again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtmp.model.portable_layer import Graph, Input
from ringtmp.runtime.kept_programs import Programs
from test_group_members_lost import Mortal, Ticking, arm, expected, run


def test_after_a_loss_only_the_new_member_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M-2-2-M: everyone has the layers it had, and the member that takes the lost one's place is a new process."""
    calm = expected(tmp_path)
    renewed: dict[Programs, list[int]] = {}  # what each had compiled whenever a plan came
    renew = Programs.renew

    def watched(this: Programs) -> None:
        renewed.setdefault(this, []).append(this.made)
        renew(this)

    monkeypatch.setattr(Programs, "renew", watched)
    seen = arm("before its update", 4, monkeypatch)
    next(seen)
    hit = run(tmp_path / "hit", Mortal(5, clock=Ticking()), "2,2")
    assert [each.lost for each in hit.summary.recoveries] == [(4,)]
    assert hit.summary.weights_sha256 == calm
    survivors = [each for each, plans in renewed.items() if len(plans) == 2]
    assert sorted(len(plans) for plans in renewed.values()) == [1, 1, 2, 2, 2, 2], "one was lost, one is new"
    assert all(renewed[each] == [0, each.made] and each.made for each in survivors)


def test_what_a_generation_did_not_use_is_let_go() -> None:
    one, other = (Graph((Input("input", name),), (), (), False) for name in ("a", "b"))
    programs = Programs()
    first = programs.of(one)
    assert programs.of(one) is first
    assert programs.of(one, catch=True) is not first
    programs.renew()
    assert programs.of(one) is first
    programs.of(other)
    programs.renew()
    assert programs.of(one) is first
    programs.renew()
    assert programs.of(one) is first
    made = programs.made
    programs.of(other)
    assert programs.made == made + 1
