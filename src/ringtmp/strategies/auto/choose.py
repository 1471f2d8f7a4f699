"""Which way to train: every way that the settings leave open is simulated, and the fastest that fits is taken.

Pure. Without leave to do otherwise only ways are open that keep inputs and labels on the master and end in the bits of one
process: the ring with whatever schedule, window and groups its plan finds best, and the master's device alone. `share_data`
opens those in which every node holds the whole model, `any_bits` those whose gradients are delayed.

What the choice knows of a strategy are facts of its value (`keeps_data`, `keeps_bits`, `delayed`); with which of its settings
it is tried, the strategy says itself (`ways`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ringtmp.config import RunConfig, replaced
from ringtmp.errors import DoesNotFit, RingError, UsageError
from ringtmp.metrics.summary import Considered
from ringtmp.plan.devices import Device, LayerCost, Paths
from ringtmp.plan.memory_forecast import require_fit
from ringtmp.plan.objective import TIME, cost_of
from ringtmp.strategies import registry
from ringtmp.strategies.base import OnPaper, Strategy, Task, keeps_bits
from ringtmp.strategies.ring.plan import options_on_paper

#: What gives something up, or sends devices home, must take so much less than the best other way: forecasts are not exact.
LEAST_GAIN = 0.02
#: A way that would need leave is looked at besides, to tell of it, with up to so many devices.
MOST_TO_TELL_OF = 16

DATA_GIVEN_UP = "inputs and labels leave the master"
DELAY_GIVEN_UP = "gradients are of older weights than those they change"
BITS_GIVEN_UP = "the bits are not those of one process"


@dataclass(frozen=True)
class Question:
    """A run whose way is open. `settle` gives settings checked together and complete, or UsageError."""

    config: RunConfig
    layers: Sequence[LayerCost]
    devices: tuple[Device, ...]  # the master first
    batch_size: int
    microbatches: int
    keep_all: bool
    settle: Callable[[RunConfig], RunConfig]
    paths: Paths = field(default_factory=dict)
    #: The master's device as it is when the others are sent home; None: they are not, but the ring's plan may leave them out.
    alone: Device | None = None
    in_order: bool = False  # running statistics go by the order in which microbatches pass
    unshared: str = ""  # why no two nodes may hold the same layers


@dataclass(frozen=True)
class Way:
    """One way to train, and what it would be."""

    strategy: Strategy
    config: RunConfig  # of a run that goes this way
    label: str  # as it is asked for
    gives_up: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # options that would allow it
    alone: bool = False
    made: OnPaper | None = None
    cost: float = math.inf  # in what is to be least
    carried: str = ""  # what travels
    problem: RingError | None = None

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def step_s(self) -> float | None:
        return None if self.made is None else self.made.step.step_s

    @property
    def devices(self) -> int:
        return 0 if self.made is None else len(self.made.step.nodes)

    @property
    def considered(self) -> Considered:
        """For the record."""
        return Considered(self.label, self.step_s, str(self.problem or ""), gives_up=self.gives_up, needs=self.needs)


@dataclass(frozen=True)
class Choice:
    best: Way
    ways: tuple[Way, ...]  # all that were looked at, the best among them


def choose(question: Question) -> Choice:
    """The fastest way that is open and fits; where none is, what stands against the first."""
    ways = [_on_paper(question, way) for way in _ways(question)]
    there = [each for each in ways if each.fits and not each.needs and (question.alone is not None or not each.alone)]
    if not there:
        raise _refusal(ways)
    return Choice(best_of(there), tuple(ways))


def best_of(ways: Sequence[Way]) -> Way:
    """Of those about as good as the best, one that gives up least and sends nobody home."""
    least = min(each.cost for each in ways)
    close = [each for each in ways if each.cost * (1 - LEAST_GAIN) <= least]
    return min(close, key=lambda each: (len(each.gives_up), len(each.needs), each.alone, each.cost))


def _refusal(ways: Sequence[Way]) -> RingError:
    problems = [each.problem for each in ways if each.problem is not None and not each.needs]
    short = [each for each in problems if isinstance(each, DoesNotFit)]
    return next(iter(short or problems), UsageError("no way is open: name one with --strategy"))


# -- which there are ----------------------------------------------------------------------------------------------------


def _ways(question: Question) -> Iterator[Way]:
    """Every way of every strategy, and the master's device alone."""
    asked, nodes = question.config, len(question.devices)
    ring = {"nodes": nodes, "strategy_settings": {}, "share_data": False, "any_bits": False}
    for strategy in registry.OURS.values():
        if nodes == 1 and not strategy.keeps_data:
            continue  # with nobody to share with it is what the others are
        least = {} if strategy.splits_layers else {"minimise": TIME}
        for config in strategy.ways(replaced(asked, {**ring, **least, "strategy": strategy.name})):
            way = _described(strategy, config, asked)
            yield from [way] if _worth_a_look(way, nodes) else []
            if strategy.keeps_data and not way.gives_up and nodes > 1:
                alone = replaced(config, {"nodes": 1, "groups": None})
                yield Way(strategy, alone, f"{question.devices[0].name} alone", alone=True)


def _worth_a_look(way: Way, nodes: int) -> bool:
    """What has leave, and what is quick to simulate. Delay is not advertised: a shorter step may need more of them."""
    if not way.needs:
        return True
    return nodes <= MOST_TO_TELL_OF and not way.strategy.splits_layers and "--any-bits" not in way.needs


def _described(strategy: Strategy, config: RunConfig, asked: RunConfig) -> Way:
    training, given = config.training, config.ring.strategy_settings
    settings, more = strategy.read(given), training.staleness > asked.training.staleness
    gives_up: list[str] = []
    needs: list[str] = []
    if not strategy.keeps_data:
        gives_up.append(DATA_GIVEN_UP)
        needs += [] if asked.ring.share_data else ["--share-data"]
    if more or strategy.delayed(settings):
        gives_up.append(DELAY_GIVEN_UP)
        needs += [] if asked.ring.any_bits else ["--any-bits"]
    elif not keeps_bits(strategy, settings, training.sum_tree):
        gives_up.append(BITS_GIVEN_UP)
    label = registry.spelled(
        registry.Choice(strategy.name, given, {"staleness": training.staleness} if more else {})
    )  # fmt: skip
    return Way(strategy, config, label, tuple(gives_up), tuple(needs))


# -- on paper -----------------------------------------------------------------------------------------------------------


def _refuse_unshared(question: Question) -> None:
    if question.unshared:
        raise UsageError(question.unshared)
    if question.in_order and question.config.training.sum_tree > 1:
        raise UsageError("running statistics go by the order of microbatches, which workers would share: use a ring")


def _on_paper(question: Question, way: Way) -> Way:
    devices, least = question.devices, question.config.ring.minimise
    if way.alone:
        devices = (question.alone or devices[0],)
    try:
        config = question.settle(way.config)
        if not way.strategy.splits_layers:
            _refuse_unshared(question)
        options = options_on_paper(
            replaced(config, {"minimise": least}), question.batch_size, question.microbatches, len(question.layers),
            len(devices), question.keep_all or way.alone, question.in_order,
        )  # fmt: skip
        task = Task(question.layers, devices, options, question.paths)
        made = way.strategy.simulate(way.strategy.read(config.ring.strategy_settings), task)
    except RingError as problem:
        return replace(way, problem=problem)
    found = replace(
        way, config=config, made=made, cost=cost_of(least, made.step, made.memory), carried=way.strategy.carried(task)
    )
    try:
        require_fit(made.memory, options.ring.microbatches)
    except RingError as problem:
        return replace(found, problem=problem)
    return found
