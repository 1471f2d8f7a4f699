"""`--strategy auto` on paper: of the ways that keep what was asked for, the fastest that fits, and one line that says why."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ringtmp.config import ModelPart, RingPart, RunConfig, from_tree, replaced
from ringtmp.errors import DoesNotFit, UsageError
from ringtmp.plan.devices import Device, LayerCost, Link, Measured
from ringtmp.run.check_settings import resolve, resumed
from ringtmp.strategies import registry
from ringtmp.strategies.auto import choose as choosing
from ringtmp.strategies.auto.choose import Choice, Question, Way, choose
from ringtmp.strategies.auto.tell_why import why
from ringtmp.strategies.base import Strategy, keeps_bits

MIB = 2**20


def layers(
    count: int = 6, seconds: float = 1e-2, crossing: float = 1e4, gradients: int = 1000, weights: int = 1000
) -> list[LayerCost]:
    measured = (Measured(1, seconds, 2 * seconds, 1e4, crossing),)
    return [LayerCost(f"layer{at}", measured, weights, gradients, gradients) for at in range(count)]


def like(count: int, rate: float = 1e9, **each: Any) -> tuple[Device, ...]:
    return tuple(Device(f"d{at}", memory_bytes=1e12, link=Link(rate, rate), **each) for at in range(count))


def asked(model: list[LayerCost], devices: tuple[Device, ...], **given: Any) -> Choice:
    about = {key: given.pop(key) for key in ("keep_all", "alone", "in_order", "unshared") if key in given}
    config = resolve(replaced(RunConfig(), {"strategy": "auto", "batch_size": 8, "microbatches": 8, **given}))
    question = Question(config, model, devices, 8, 8, keep_all=about.pop("keep_all", False), settle=resolve, **about)
    return choose(question)


def named(choice: Choice) -> str:
    best = choice.best
    return "alone" if best.alone or best.devices == 1 else best.label


def way(choice: Choice, label: str) -> Way:
    return next(each for each in choice.ways if each.label == label)


# -- every kind of answer, and what turns it ----------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "answer"), [(1e9, "ring"), (1e4, "alone")])
def test_over_fast_links_a_ring_and_over_slow_ones_the_master_alone(rate: float, answer: str) -> None:
    made = asked(layers(), like(3, rate))
    assert named(made) == answer
    assert not made.best.gives_up
    assert made.best.cost == min(each.cost for each in made.ways if not each.needs)


@pytest.mark.parametrize(("speed", "answer"), [(1.0, "ring"), (0.001, "alone")])
def test_devices_that_are_too_slow_are_left_at_home(speed: float, answer: str) -> None:
    desk, *others = like(3)
    assert named(asked(layers(), (desk, *(replace(each, speed=speed) for each in others)))) == answer


@pytest.mark.parametrize(("parts", "shared"), [(4, True), (1, False)])
def test_groups_win_where_there_are_many_devices_for_the_microbatches_and_a_tree_keeps_the_bits(
    parts: int, shared: bool
) -> None:
    made = asked(layers(8), like(5), sum_tree=parts)
    assert made.best.made is not None
    assert (made.best.made.shape.startswith("M-")) == shared
    assert made.best.config.ring.groups == ("auto" if shared else None)
    without = asked(layers(8), like(5), sum_tree=parts, in_order=True)
    assert without.best.made is not None
    assert not without.best.made.shape.startswith("M-"), "running statistics go by the order of microbatches"


@pytest.mark.parametrize(("gradients", "answer"), [(MIB // 20, True), (40 * MIB, False)])
def test_with_adapters_alone_gradients_are_small_and_copies_of_the_model_win(gradients: int, answer: bool) -> None:
    """What crosses a cut is large, as in a language model; the layers themselves are the same."""
    model = layers(crossing=4 * MIB, gradients=gradients, weights=40 * MIB)
    made = asked(model, like(4, 1.25e7), share_data=True)
    assert (not made.best.strategy.splits_layers) == answer
    assert ("of gradients, ring would send 32.0 MiB each way over a cut" in why(made, "time")) == answer


def test_without_leave_inputs_and_labels_stay_and_what_it_would_bring_is_said() -> None:
    model = layers(crossing=4 * MIB, gradients=MIB // 20)
    kept, shared = asked(model, like(4, 1.25e7)), asked(model, like(4, 1.25e7), share_data=True)
    assert kept.best.strategy.keeps_data
    assert kept.best.cost > shared.best.cost
    told = why(kept, "time")
    assert f"; with --share-data {shared.best.label} would take about" in told
    assert told.endswith("but inputs and labels leave the master and the bits are not those of one process")
    assert why(shared, "time").endswith("; inputs and labels leave the master; the bits are not those of one process")


def test_with_a_tree_of_sums_only_ways_that_add_up_along_it_are_open() -> None:
    model = layers(crossing=4 * MIB, gradients=MIB // 20)
    made = asked(model, like(4, 1.25e7), share_data=True, sum_tree=4)
    assert made.best.gives_up == (choosing.DATA_GIVEN_UP,)
    open_ = [each for each in made.ways if each.fits]
    assert all(keeps_bits(each.strategy, each.strategy.read(each.config.ring.strategy_settings), 4) for each in open_)
    assert "keeps the bits of one process" in str(way(made, "allreduce:ring").problem)
    few = asked(model, like(4, 1.25e7), share_data=True, sum_tree=2)
    assert few.best.strategy.keeps_data, "four workers cannot share two parts"


def test_delayed_gradients_are_taken_only_with_leave_and_only_where_they_are_faster() -> None:
    far = tuple(replace(each, link=replace(each.link, latency_s=0.02)) for each in like(3))
    assert way(asked(layers(), far, any_bits=True), "ring:staleness=1").gives_up == (choosing.DELAY_GIVEN_UP,)
    made = asked(layers(), far, any_bits=True)
    assert made.best.label == "ring:staleness=1"
    assert made.best.config.training.staleness == 1
    assert "gradients are of older weights" in why(made, "time")
    kept = asked(layers(), far)
    assert kept.best.label == "ring"
    assert kept.best.cost > made.best.cost
    assert asked(layers(), like(3, 1e4), any_bits=True).best.gives_up == (), "it would gain nothing"
    given = asked(layers(), far, staleness=1)
    assert given.best.config.training.staleness == 1
    assert given.best.gives_up == (), "what is asked for is not given up"


def test_means_every_few_steps_are_considered_with_both_leaves_and_not_even_spoken_of_without() -> None:
    model = layers(gradients=20 * MIB, crossing=4 * MIB)
    both = asked(model, like(4, 1.25e7), share_data=True, any_bits=True)
    assert way(both, "averaging").gives_up == (choosing.DATA_GIVEN_UP, choosing.DELAY_GIVEN_UP)
    assert way(both, "averaging").cost < way(both, "allreduce:halving").cost, "gradients travel every eighth step"
    for less in (False, True):
        made = asked(model, like(4, 1.25e7), share_data=less)
        assert "averaging" not in {each.label for each in made.ways}
        assert "averaging" not in why(made, "time")


def test_what_does_not_fit_one_device_is_split_however_slow_and_what_fits_nowhere_is_refused() -> None:
    model = layers(weights=300 * MIB)
    small = tuple(replace(each, memory_bytes=1000.0 * MIB) for each in like(4, 1e5))
    made = asked(model, small, share_data=True)
    assert named(made) == "ring"
    assert "d0 alone does not fit" in why(made, "time")
    assert {each.label for each in made.ways if each.fits} == {"ring"}
    with pytest.raises(DoesNotFit, match="bytes"):
        asked(model, tuple(replace(each, memory_bytes=300.0 * MIB) for each in small))


# -- who may be sent home -----------------------------------------------------------------------------------------------


def test_processes_of_one_machine_are_sent_home_only_where_they_can_be() -> None:
    desk, *others = like(3, 1e4)
    stay = asked(layers(), (desk, *others), keep_all=True)
    assert named(stay) == "ring"
    assert way(stay, "d0 alone").cost < stay.best.cost, "it is told of, not taken"
    home = asked(layers(), (desk, *others), keep_all=True, alone=desk)
    assert home.best.alone
    assert home.best.config.ring.nodes == 1
    crowded = tuple(replace(each, speed=0.5) for each in like(3))
    both = asked(layers(), crowded, keep_all=True, alone=desk)
    assert named(both) == "ring", "three at half the speed are faster than one"
    assert way(both, "d0 alone").step_s == pytest.approx(8 * 6 * 3e-2), "alone it has the machine for itself"


def test_one_device_has_no_choice_and_says_so() -> None:
    made = asked(layers(), like(1), share_data=True)
    assert [each.label for each in made.ways] == ["ring"]
    assert why(made, "time") == "auto: d0 alone, about 1.4 s a step"


# -- other purposes, other settings -------------------------------------------------------------------------------------


def test_the_least_energy_is_compared_as_energy() -> None:
    frugal, *hot = (
        replace(each, idle_w=watts, busy_w=2 * watts) for each, watts in zip(like(3), (1, 40, 40), strict=True)
    )
    made = asked(layers(), (frugal, *hot), share_data=True, minimise="energy")
    assert named(made) == "alone"
    assert "J (modelled) a step" in why(made, "energy")
    assert named(asked(layers(), (frugal, *hot), share_data=True)) != "alone"
    with pytest.raises(UsageError, match="needs to know what every device draws"):
        asked(layers(), like(3), minimise="energy")


def test_settings_that_only_a_ring_has_leave_only_rings_open() -> None:
    model = layers(crossing=4 * MIB, gradients=MIB // 20)
    made = asked(model, like(4, 1.25e7), share_data=True, window=3)
    assert made.best.strategy.splits_layers
    assert "--window works with --strategy ring only" in str(way(made, "allreduce:ring").problem)


def test_layers_that_no_two_nodes_may_hold_are_not_copied() -> None:
    model = layers(crossing=4 * MIB, gradients=MIB // 20)
    made = asked(model, like(4, 1.25e7), share_data=True, unshared="layer 'a' changes its parameter")
    assert made.best.strategy.splits_layers
    assert str(way(made, "allreduce:ring").problem) == "layer 'a' changes its parameter"


def test_the_chosen_settings_name_the_way_and_ask_for_nothing_any_more() -> None:
    made = asked(layers(crossing=4 * MIB, gradients=MIB // 20), like(4, 1.25e7), share_data=True, any_bits=True)
    ring = made.best.config.ring
    assert registry.spelled(registry.Choice(ring.strategy, ring.strategy_settings)) == made.best.label
    assert (ring.share_data, ring.any_bits) == (False, False)
    assert resolve(made.best.config) == made.best.config
    assert [each.strategy for each in (way.considered for way in made.ways)] == [each.label for each in made.ways]


# -- what may not be asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"share_data": True}, "--share-data is not needed: with --strategy ring inputs and labels stay"),
        ({"strategy": "ps:bsp", "any_bits": True}, "--any-bits goes with --strategy auto"),
        ({"strategy": "auto", "cuts": "0-2,3-5"}, "--strategy auto cannot keep --cuts"),
        ({"strategy": "auto", "laps": 2}, "--strategy auto cannot keep --laps"),
        ({"strategy": "auto", "route": "v"}, "--strategy auto cannot keep --route"),
        ({"strategy": "auto", "strategy_settings": {"servers": 2}}, "strategy auto takes no settings"),
        ({"strategy": "auto:fast"}, "strategy auto has no short form"),
        ({"strategy": "auto", "wire": "topk"}, "--wire topk leaves out most of a gradient"),
        ({"strategy": "autos"}, "did you mean 'auto'"),
    ],
)
def test_it_is_refused_before_anything_starts(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve(replaced(RunConfig(), given))


def test_leave_to_share_data_is_no_news_to_a_strategy_that_does() -> None:
    assert resolve(RunConfig(ring=RingPart(strategy="allreduce", share_data=True))).ring.strategy == "allreduce"


def test_a_settings_file_may_ask_for_it() -> None:
    config = resolve(from_tree({"ring": {"strategy": "auto", "share_data": True, "any_bits": True}}))
    assert (config.ring.strategy, config.ring.share_data, config.ring.any_bits) == ("auto", True, True)


def test_a_resumed_run_keeps_its_choice() -> None:
    saved = resolve(RunConfig(ModelPart(), ring=RingPart(strategy="allreduce:tree", nodes=4)))
    again = {"strategy": "auto", "share_data": True, "any_bits": True}
    assert resumed(saved, again) == saved
    assert resumed(saved, {**again, "strategy": "allreduce:tree"} | {"share_data": False, "any_bits": False}) == saved
    alone = resolve(RunConfig(ring=RingPart(nodes=1)))
    assert resumed(alone, {"strategy": "auto", "nodes": 3}) == alone, "the others had been sent home"
    assert resumed(alone, {"nodes": 3}).ring.nodes == 3
    with pytest.raises(UsageError, match="cannot change --share-data"):
        resumed(saved, {"share_data": True})


# -- facts of strategies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", registry.OURS.values(), ids=list(registry.OURS))
def test_whatever_a_strategy_puts_up_for_choice_can_be_read_and_keeps_what_it_says(strategy: Strategy) -> None:
    config = replaced(RunConfig(), {"nodes": 4, "strategy": strategy.name})
    for each in strategy.ways(config):
        settings = strategy.read(each.ring.strategy_settings)
        assert each.ring.strategy == strategy.name
        resolve(each)
        if keeps_bits(strategy, settings, 1):
            assert strategy.exactness(settings) == "bits"
        assert strategy.keeps_data == strategy.splits_layers, "who holds the whole model is sent samples"


def test_a_way_that_gives_something_up_must_be_worth_it() -> None:
    model, devices = layers(crossing=4 * MIB, gradients=MIB // 20), like(4, 1.25e7)
    made = asked(model, devices, share_data=True)
    kept = asked(model, devices).best.cost
    gain = 1 - made.best.cost / kept
    assert choosing.LEAST_GAIN < gain < math.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "LEAST_GAIN", gain + 0.01)
        assert asked(model, devices, share_data=True).best.gives_up == ()
