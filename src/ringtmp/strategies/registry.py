"""Every strategy there is: our own, and those that installed packages offer under the entry point `ringtmp.strategies`.

One grammar wherever a strategy is named (`train --strategy`, `plan --compare`, every bench):

    NAME[:SHORT][:KEY=VALUE]...    SHORT is what the strategy says it is; KEY a setting of the strategy, or one of RUN_KEYS

Pure, and loads no torch. A package's strategy that cannot be used is named with the reason, and refused where it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import msgspec

from ringtmp.config import SETTINGS, RingPart, RunConfig, parse_pairs
from ringtmp.errors import RingError, UsageError, unknown
from ringtmp.strategies.allreduce import STRATEGY as ALLREDUCE
from ringtmp.strategies.auto import STRATEGY as CHOOSER
from ringtmp.strategies.averaging import STRATEGY as AVERAGING
from ringtmp.strategies.base import About, Settings, Strategy, as_typed, said_of
from ringtmp.strategies.block_momentum import STRATEGY as BLOCK_MOMENTUM
from ringtmp.strategies.dpsgd import STRATEGY as DPSGD
from ringtmp.strategies.easgd import STRATEGY as EASGD
from ringtmp.strategies.ensemble import STRATEGY as ENSEMBLE
from ringtmp.strategies.gadmm import STRATEGY as GADMM
from ringtmp.strategies.gosgd import STRATEGY as GOSGD
from ringtmp.strategies.gossip_learning import STRATEGY as GOSSIP_LEARNING
from ringtmp.strategies.hybcomm import STRATEGY as HYBCOMM
from ringtmp.strategies.lbfgs import STRATEGY as LBFGS
from ringtmp.strategies.mpca import STRATEGY as MPCA
from ringtmp.strategies.ps import STRATEGY as PS
from ringtmp.strategies.ring import STRATEGY as RING
from ringtmp.strategies.scheduled import STRATEGY as SCHEDULED
from ringtmp.strategies.tensor import STRATEGY as TENSOR
from ringtmp.strategies.tree_easgd import STRATEGY as TREE_EASGD

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.runtime.member import Member
    from ringtmp.wire.messages import Message

GROUP = "ringtmp.strategies"
_OURS = (
    RING, PS, ALLREDUCE, HYBCOMM, LBFGS, AVERAGING, BLOCK_MOMENTUM, EASGD, TREE_EASGD, DPSGD, GOSGD, MPCA, GOSSIP_LEARNING,
    GADMM, SCHEDULED, TENSOR, ENSEMBLE,
)  # fmt: skip
#: Stands for whichever of the others is chosen.
AUTO: Strategy = CHOOSER
#: All the others.
OURS: dict[str, Strategy] = {each.name: each for each in _OURS}
#: Settings of a run that may be part of a strategy's name, and where they lie.
RUN_KEYS = {
    "staleness": "training", "wire": "training", "microbatches": "training", "sum_tree": "training",
    "schedule": "ring", "window": "ring", "laps": "ring", "route": "ring", "recompute": "ring", "groups": "ring",
    "protect": "keep",
}  # fmt: skip
_NEEDED = ("name", "about", "simulate", "traffic")


class Found(msgspec.Struct, frozen=True):
    """A strategy of an installed package; or why there is none."""

    name: str
    package: str  # with its version
    strategy: Strategy | None = None
    problem: str = ""


@cache
def installed() -> tuple[Found, ...]:
    """What packages offer, in the order of their names."""
    found: list[Found] = []
    taken = {*OURS, AUTO.name}
    for point in sorted(entry_points(group=GROUP), key=lambda each: (each.name, _package(each))):
        found.append(_load(point, taken))
        taken.add(point.name)
    return tuple(found)


def _load(point: EntryPoint, taken: set[str]) -> Found:
    package = _package(point)
    if point.name in taken:
        return Found(point.name, package, None, "there is another strategy of that name")
    try:
        strategy = point.load()
    except (Exception, SystemExit) as error:  # whatever another's code does
        return Found(point.name, package, None, f"it cannot be imported: {type(error).__name__}: {error}")
    problem = _fault(strategy, point.name)
    return Found(point.name, package, None if problem else strategy, problem)


def _fault(strategy: Any, name: str) -> str:
    if not isinstance(strategy, Strategy):
        return f"it is a {type(strategy).__name__}, not a ringtmp.strategies.base.Strategy"
    lacking = [each for each in _NEEDED if getattr(type(strategy), each, None) is getattr(Strategy, each, None)]
    kind = type(strategy)
    if kind.worker is Strategy.worker and Strategy.plan in (kind.plan, kind.member):
        lacking.append("worker")
    if lacking:
        return f"it lacks {', '.join(lacking)}"
    if not (isinstance(strategy.about, About) and issubclass(kind.Settings, Settings)):
        return "its `about` is not an About, or its `Settings` no Settings"
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        return "its name is not made of a-z, 0-9 and '-'"
    return "" if strategy.name == name else f"its entry point is called {name!r} and it calls itself {strategy.name!r}"


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def packages() -> tuple[str, ...]:
    """Installed packages that offer strategies, with their versions; none of them is imported."""
    return tuple(sorted({_package(point) for point in entry_points(group=GROUP)}))


def every() -> dict[str, Strategy]:
    return OURS | {each.name: each.strategy for each in installed() if each.strategy is not None}


def problems() -> list[str]:
    """A line for every strategy of a package that cannot be used."""
    return [f"strategy {each.name!r} of {each.package}: {each.problem}" for each in installed() if each.problem]


def get(name: str) -> Strategy:
    if name in OURS:  # what is installed is looked at only where it must be
        return OURS[name]
    if name == AUTO.name:
        return AUTO
    for each in installed():
        if each.name == name and each.strategy is not None:
            return each.strategy
        if each.name == name:
            raise UsageError(f"strategy {name!r} of {each.package} cannot be used: {each.problem}")
    raise unknown("strategy", name, [*every(), AUTO.name])


def package_of(text: str) -> str:
    """The package, with its version, that a strategy comes from, by its name and whatever follows it; empty: this one."""
    name = text.partition(":")[0]
    found = () if name in OURS else installed()
    return next((each.package for each in found if each.name == name and each.strategy), "")


def of(ring: RingPart) -> tuple[Strategy, Any]:
    """The strategy of a run, and its settings."""
    strategy = get(ring.strategy)
    for key in ring.strategy_settings:
        if key not in _names(strategy):
            raise _unknown_setting(strategy, key, _names(strategy))
    return strategy, strategy.read(ring.strategy_settings)


def _names(strategy: Strategy) -> list[str]:
    return [each.name for each in msgspec.structs.fields(strategy.Settings)]


def _unknown_setting(strategy: Strategy, key: str, known: Sequence[str]) -> UsageError:
    """Says whose it is, where it is another's."""
    what = f"setting of strategy {strategy.name}"
    if key in SETTINGS and (strategy.splits_layers or not SETTINGS[key].said.split):
        return UsageError(f"unknown {what} {key!r}: that is a setting of the run: use {SETTINGS[key].title}")
    owners = [name for name, each in every().items() if key in _names(each)]
    if key in SETTINGS:
        owners.append(f"{splitting_layers()} ({SETTINGS[key].option})")
    if not known:
        whose = f": that is a setting of {', '.join(owners)}" if owners else ""
        return UsageError(f"strategy {strategy.name} takes no settings, so {key!r} is unknown{whose}")
    if owners:
        choices = ", ".join(sorted(known))
        return UsageError(f"unknown {what} {key!r}: that is a setting of {', '.join(owners)}; choose from {choices}")
    return unknown(what, key, known)


def keeping_bits_by_tree() -> str:
    """Names of those that keep the bits of one process with a tree of sums, for people."""
    return ", ".join(each.tree_name for each in every().values() if each.tree_name)


def splitting_layers() -> str:
    """Names of those that do, for people."""
    return " or ".join(name for name, each in every().items() if each.splits_layers)


def member(endpoint: Endpoint, message: Message) -> Member | None:
    """The part a plan from the master gives this node; None if the message is not a plan."""
    from ringtmp.wire.messages import Enlist, ServeTables

    if isinstance(message, ServeTables):  # no strategy: a store that its own workers use as they like
        from ringtmp.runtime.key_value_server import KeyValueServer

        return KeyValueServer(endpoint, message)
    if not isinstance(message, Enlist):
        return next((made for each in OURS.values() if (made := each.member(endpoint, message)) is not None), None)
    try:
        strategy = get(message.strategy)
    except UsageError as error:
        raise RingError(
            f"{error}; the master has it from {message.package or 'a newer ringtmp'}: install that here"
        ) from None
    if (here := package_of(strategy.name)) != message.package:
        raise RingError(f"strategy {strategy.name} comes from {here} here and from {message.package} on the master")
    return strategy.member(endpoint, message)


# -- names -------------------------------------------------------------------------------------------------------------


class Choice(msgspec.Struct, frozen=True):
    """A strategy's name in parts."""

    name: str
    settings: dict[str, Any] = {}  # of the strategy
    run: dict[str, Any] = {}  # of the run: RUN_KEYS

    def applied_to(self, config: RunConfig) -> RunConfig:
        """The settings with this strategy. What is said in its name and elsewhere must be the same."""
        parts = {part: getattr(config, part) for part in ("training", "ring", "keep")}
        for key, value in self.run.items():
            part = parts[RUN_KEYS[key]]
            usual = getattr(type(part)(), key)
            if getattr(part, key) not in (usual, value):
                raise UsageError(f"{spelled(self)} and --{key} {getattr(part, key)} contradict each other")
            parts[RUN_KEYS[key]] = msgspec.structs.replace(part, **{key: value})
        given = {**self.settings, **config.ring.strategy_settings}
        for key, value in self.settings.items():
            if given[key] != value:
                raise UsageError(f"{spelled(self)} and --with {key}={as_typed(given[key])} contradict each other")
        parts["ring"] = msgspec.structs.replace(parts["ring"], strategy=self.name, strategy_settings=given)
        return msgspec.structs.replace(config, **parts)


def parse(text: str) -> Choice:
    """`ps:ssp:3:servers=2` -> Choice('ps', {'consistency': 'ssp:3', 'servers': 2})"""
    name, *words = text.strip().split(":")
    strategy = get(name)
    first = next((index for index, word in enumerate(words) if "=" in word), len(words))
    short, pairs = words[:first], list[str]()
    for word in words[first:]:
        if "=" in word:
            pairs.append(word)
        else:  # a colon within a value: consistency=ssp:3
            pairs[-1] += f":{word}"
    known = _names(strategy)
    keys = [key for key in RUN_KEYS if strategy.splits_layers or not SETTINGS[key].said.split]
    if short and not strategy.short:
        raise UsageError(
            f"strategy {name} has no short form {':'.join(short)!r}: write {name}:KEY=VALUE, with a KEY of "
            f"{', '.join([*known, *keys])}"
        )
    settings = strategy.parse_short(":".join(short)) if short else {}
    run: dict[str, Any] = {}
    for key, value in parse_pairs(text, pairs).items():
        if key not in (*known, *keys):
            raise _unknown_setting(strategy, key, [*known, *keys])
        if settings.get(key, value) != value:
            raise UsageError(f"{text}: {name}:{':'.join(short)} and {key}={as_typed(value)} contradict each other")
        (settings if key in known else run)[key] = value
    strategy.read(settings)
    return Choice(name, settings, run)


def spelled(choice: Choice) -> str:
    """As `parse` reads it."""
    strategy, settings = get(choice.name), dict(choice.settings)
    words = [choice.name]
    if strategy.short in settings:
        words.append(str(settings.pop(strategy.short)))
    return ":".join([*words, *(f"{key}={value}" for key, value in {**settings, **choice.run}.items())])


def settings_of(strategy: Strategy) -> list[dict[str, str]]:
    """What `ringtmp strategies` lists."""
    found = []
    for each in msgspec.structs.fields(strategy.Settings):
        said = said_of(each)
        row = {key: said.get(key) or "" for key in ("values", "default", "meaning", "systems")}
        found.append({"name": each.name, **row, "default": row["default"] or as_typed(each.default)})
    return found
