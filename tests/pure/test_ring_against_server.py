"""A difference is found where it was planted, and nowhere else."""

from __future__ import annotations

import random

from ringtmp.bench.analysis import ring_against_server
from ringtmp.bench.analysis.ring_against_server import Sampled
from ringtmp.bench.training_runs.strategy_variants import parse


def unsaid(side: Sampled) -> str:
    return ""


def noisy(way: str, centre: float, seed: int) -> Sampled:
    """Five repeats of twenty steps, two percent of noise between repeats and five between steps."""
    draw = random.Random(f"{way} {seed}")
    repeats = [centre * (1 + draw.gauss(0, 0.02)) for _ in range(5)]
    return Sampled(parse(way), tuple(tuple(each * (1 + draw.gauss(0, 0.05)) for _ in range(20)) for each in repeats))


def test_a_planted_difference_of_a_tenth_is_found() -> None:
    found = ring_against_server.both([noisy("ring", 0.9, 1), noisy("ps:bsp", 1.0, 1), noisy("ps:async", 1.5, 1)], 0)
    assert [(name, each.server.way.label, each.holds) for name, each in found] == [
        ("same precision and each at its best", "ps:bsp", "yes")
    ]
    assert found[0][1].ratio.low < 0.9 < found[0][1].ratio.high
    verdict = ring_against_server.verdict(
        "aim", "seconds", lambda side: {"ring": "0.9 s"}.get(side.way.label, "1 s"), found
    )
    assert verdict.holds == "yes"
    assert "ring 0.9 s against ps:bsp 1 s: 1.1" in verdict.sentence
    worse = ring_against_server.both([noisy("ring", 1.1, 1), noisy("ps:bsp", 1.0, 1)], 0)
    assert ring_against_server.verdict("aim", "seconds", unsaid, worse).holds == "no", "losses are said like wins"


def test_a_planted_difference_of_nothing_is_reported_as_none() -> None:
    found = ring_against_server.both([noisy("ring", 1.0, 2), noisy("ps:bsp", 1.0, 2)], 0)
    verdict = ring_against_server.verdict("aim", "seconds", unsaid, found)
    assert verdict.holds == "open"
    assert "no difference found" in verdict.sentence


def test_to_be_as_good_is_less_than_to_be_better() -> None:
    same = Sampled(parse("ring"), ((32.0,),) * 5), Sampled(parse("ps:bsp"), ((32.0,),) * 5)
    found = ring_against_server.both(same, 0)
    assert ring_against_server.verdict("aim", "steps", unsaid, found).holds == "open"
    equal = ring_against_server.verdict("aim", "steps", unsaid, found, as_good=True)
    assert (equal.holds, "as good, within 5%" in equal.sentence) == ("yes", True)
    worse = ring_against_server.both([noisy("ring", 1.1, 1), noisy("ps:bsp", 1.0, 1)], 0)
    assert ring_against_server.verdict("aim", "seconds", unsaid, worse, as_good=True).holds == "no"
    once = ring_against_server.both([Sampled(parse("ring"), ((1.0,),)), Sampled(parse("ps:bsp"), ((1.0,),))], 0)
    assert ring_against_server.verdict("aim", "seconds", unsaid, once, as_good=True).holds == "open"


def test_what_was_measured_once_decides_nothing() -> None:
    found = ring_against_server.both([Sampled(parse("ring"), ((1.0,),)), Sampled(parse("ps:bsp"), ((2.0,),))], 0)
    assert ring_against_server.verdict("aim", "seconds", unsaid, found).holds == "open"
    assert "no interval" in found[0][1].ratio_text


def test_false_alarms_are_rare() -> None:
    alarms = sum(
        ring_against_server.both([noisy("ring", 1.0, seed), noisy("ps:bsp", 1.0, seed)], 0)[0][1].holds != "open"
        for seed in range(10)
    )
    assert alarms <= 2, "five repeats give intervals that are a little too narrow, not more"


def test_the_best_of_a_side_may_have_another_wire_only_where_each_is_at_its_best() -> None:
    plain, lossy = noisy("ring", 1.0, 3), noisy("ring:wire=bfloat16", 0.5, 3)
    found = dict(ring_against_server.both([plain, lossy, noisy("ps:bsp", 1.0, 3)], 0))
    assert found["same precision"].ring.way.label == "ring"
    assert found["each at its best"].ring.way.label == "ring:wire=bfloat16"


def test_delay_is_no_part_of_the_same_precision_on_either_side() -> None:
    sides = [
        noisy("ring", 1.0, 4),
        noisy("ring:staleness=1", 0.6, 4),
        noisy("ps:bsp", 1.0, 4),
        noisy("ps:async", 0.5, 4),
    ]
    found = dict(ring_against_server.both(sides, 0))
    same, best = found["same precision"], found["each at its best"]
    assert (same.ring.way.label, same.server.way.label) == ("ring", "ps:bsp")
    assert (best.ring.way.label, best.server.way.label) == ("ring:staleness=1", "ps:async")


def test_without_a_parameter_server_nothing_is_claimed() -> None:
    assert (
        ring_against_server.verdict(
            "aim", "seconds", unsaid, ring_against_server.both([noisy("ring", 1.0, 4)], 0)
        ).holds
        == "open"
    )
