"""Contract 2: the local rule, on a clock of whole ticks and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtmp.errors import UsageError
from ringtmp.plan.next_action import Action, Ready, next_action
from ringtmp.plan.pipeline_schedules import DEFAULT_SCHEDULE, SCHEDULES, PipelineSchedule, ScheduleName, schedule_named


@dataclass
class Toy:
    """A visit on a node of its own: what has arrived and what was done."""

    visit: int
    forwards: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    forwarded: int = 0
    backwarded: int = 0
    held: int = 0
    deferred: list[int] = field(default_factory=list)
    weighed: int = 0
    most_held: int = 0
    updated: bool = False
    row: list[str] = field(default_factory=list)


def run(
    visits: int, microbatches: int, window: int, rule: PipelineSchedule, holders: list[int], latency: object
) -> list[Toy]:
    """Run one step; every action takes a tick, a message `latency()` ticks."""
    toys = [Toy(index) for index in range(visits)]
    toys[0].forwards = list(range(microbatches))
    mail: list[tuple[int, int, str, int]] = []
    nodes = sorted(set(holders))
    now = 0
    while not all(toy.updated for toy in toys):
        assert now < 200 + 50 * visits * microbatches, "the ring does not end"
        for item in sorted(item for item in mail if item[0] <= now):
            mail.remove(item)
            _, visit, kind, number = item
            (toys[visit].forwards if kind == "F" else toys[visit].backwards).append(number)
        for node in nodes:
            mine = [toy for toy, holder in zip(toys, holders, strict=True) if holder == node]
            action = next_action([_ready(toy, microbatches) for toy in mine], window, rule)
            for toy in mine:
                toy.row.append(".")
            if action is None:
                continue
            toy = toys[action.visit]
            toy.row[-1] = _do(toy, action, mail, now, visits, latency, rule)
        now += 1
    return toys


def _ready(toy: Toy, microbatches: int) -> Ready:
    return Ready(
        toy.visit,
        toy.visit == 0,
        toy.forwards[0] if toy.forwards else None,
        toy.backwards[0] if toy.backwards else None,
        toy.forwarded,
        toy.forwarded - toy.backwarded,
        microbatches,
        toy.backwarded == microbatches and not toy.deferred and not toy.updated,
        len(toy.deferred),
        toy.held + len(toy.deferred),
        toy.backwarded == microbatches,
    )


def _do(toy: Toy, action: Action, mail: list, now: int, visits: int, latency: object, rule: PipelineSchedule) -> str:
    delay = latency()  # type: ignore[operator]
    if action.kind == "forward":
        number = toy.forwards.pop(0)
        toy.forwarded += 1
        toy.held += 1
        toy.most_held = max(toy.most_held, toy.held + len(toy.deferred))
        if toy.visit == visits - 1:
            mail.append((now + 1, toy.visit, "B", number))
        else:
            _send(mail, now + 1 + delay, toy.visit + 1, "F", number)
        return f"F{number}"
    if action.kind == "backward":
        number = toy.backwards.pop(0)
        assert number == toy.backwarded, "gradients come in the order of microbatches"
        toy.backwarded += 1
        toy.held -= 1
        if rule.defers_weights:
            toy.deferred.append(number)
        if toy.visit:
            _send(mail, now + 1 + delay, toy.visit - 1, "B", number)
        return f"B{number}"
    if action.kind == "weights":
        number = toy.deferred.pop(0)
        assert number == toy.weighed, "weight gradients are added in the order of microbatches"
        toy.weighed += 1
        return f"W{number}"
    assert not toy.deferred, "an update without all its gradients"
    toy.updated = True
    return "U"


def _send(mail: list, at: int, visit: int, kind: str, number: int) -> None:
    """Links keep order: nothing overtakes what was sent before it."""
    before = [item[0] for item in mail if item[1:3] == (visit, kind)]
    mail.append((max([at, *before]), visit, kind, number))


def grid(toys: list[Toy]) -> list[str]:
    return [" ".join(f"{cell:<2}" for cell in toy.row).rstrip() for toy in toys]


def test_1f1b_draws_the_grid_in_its_docstring() -> None:
    toys = run(2, 4, 3, DEFAULT_SCHEDULE, [0, 1], lambda: 0)
    assert grid(toys) == [
        "F0 F1 F2 B0 F3 B1 .  B2 .  B3 U",
        ".  F0 B0 F1 B1 F2 B2 F3 B3 U  .",
    ]


def test_gpipe_goes_all_the_way_forward_before_it_turns_back() -> None:
    toys = run(2, 4, 4, SCHEDULES["gpipe"], [0, 1], lambda: 0)
    assert grid(toys) == ["F0 F1 F2 F3 .  .  B0 B1 B2 B3 U", ".  F0 F1 F2 F3 B0 B1 B2 B3 U  ."]


def test_zero_bubble_works_off_weight_gradients_while_it_would_wait() -> None:
    toys = run(2, 4, 3, SCHEDULES["zero-bubble"], [0, 1], lambda: 0)
    assert grid(toys) == [
        "F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3 U  .",
        ".  F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3 U",
    ]


@settings(max_examples=150, deadline=None)
@given(
    visits=st.integers(1, 6),
    microbatches=st.integers(1, 8),
    window=st.integers(1, 10),
    rule=st.sampled_from(list(SCHEDULES.values())),
    seed=st.integers(0, 10**6),
)
def test_no_latency_no_window_and_no_layout_can_stop_the_ring(
    visits: int, microbatches: int, window: int, rule: PipelineSchedule, seed: int
) -> None:
    luck = random.Random(seed)
    holders = [luck.randrange(visits) for _ in range(visits)]  # laps and V shapes included
    if rule.all_forward_first:
        window = microbatches
    toys = run(visits, microbatches, window, rule, holders, lambda: luck.randrange(4))
    for toy in toys:
        assert toy.forwarded == toy.backwarded == microbatches
        assert toy.most_held <= rule.places(window)


def test_the_default_window_covers_every_visit_and_transfer_but_not_more_than_there_are() -> None:
    assert [DEFAULT_SCHEDULE.default_window(visits, 8) for visits in (1, 2, 4, 9)] == [1, 3, 7, 8]
    assert SCHEDULES["gpipe"].default_window(2, 8) == 8


def test_every_schedule_of_the_settings_is_known_and_no_other() -> None:
    assert set(SCHEDULES) == set(get_args(ScheduleName))
    with pytest.raises(UsageError, match="unknown schedule '1f2b': did you mean '1f1b'"):
        schedule_named("1f2b")


@pytest.mark.parametrize(
    ("name", "usual", "safe", "places"),
    [
        ("1f1b", [5, 5, 3, 1], [5, 5, 5, 1], 5),
        ("gpipe", [5, 5, 5, 5], [5, 5, 5, 5], 5),
        ("zero-bubble", [8, 8, 6, 4], [8, 8, 8, 8], 8),
    ],
)
def test_what_a_visit_holds_is_its_way_to_the_tail_and_back_and_what_waits(
    name: str, usual: list[int], safe: list[int], places: int
) -> None:
    schedule = SCHEDULES[name]
    assert [schedule.held(visit, 4, 5, safe=False) for visit in range(4)] == usual
    assert [schedule.held(visit, 4, 5, safe=True) for visit in range(4)] == safe
    assert schedule.places(5) == places
