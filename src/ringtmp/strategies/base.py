"""What a strategy is: one value that answers whatever the rest of the program asks about a way to train.

A folder of `strategies/` exports one, and so may a package of yours, under the entry point `ringtmp.strategies`. Nothing here
loads torch: a strategy's code is imported when a run needs it. The defaults are those of the plainest data parallelism, in
which every node holds the whole model and works; docs/strategies.md says how to write one.

The taxonomy is that of Langer et al., Distributed Training of Deep Learning Models: A Taxonomic Perspective (2020), and
Verbraeken et al., A Survey on Distributed Machine Learning (2020).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from ringtmp.errors import UsageError
from ringtmp.plan.exchange_bounds import Exchange
from ringtmp.units import bytes_text
from ringtmp.wire.formats import WIRE_FORMATS, wire_format

if TYPE_CHECKING:
    import torch

    from ringtmp.config import RunConfig
    from ringtmp.data.batches import Batch
    from ringtmp.errors import NodeLost
    from ringtmp.metrics.event_log import EventLog
    from ringtmp.metrics.events import NodeEnded
    from ringtmp.model.portable_layer import Layer
    from ringtmp.plan.devices import Device, LayerCost, Paths
    from ringtmp.plan.memory_forecast import MemoryForecast
    from ringtmp.plan.planner import PlanOptions
    from ringtmp.plan.route import Route
    from ringtmp.plan.simulated_step import Simulated
    from ringtmp.plan.when_to_rebalance import Balance
    from ringtmp.runtime.base_leader import NodePool, Start
    from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter
    from ringtmp.runtime.losses import LossFunction, Score
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.runtime.member import Member
    from ringtmp.runtime.run_directory import LayerIndex
    from ringtmp.strategies.data_parallel.member import ParallelMember
    from ringtmp.wire.address import Address
    from ringtmp.wire.messages import Enlist, Hello, Message, Recipe


class About(msgspec.Struct, frozen=True):
    """A row of the taxonomy: what is split, where the update is made, who waits for whom, what travels, who talks to whom."""

    title: str
    parallelism: str
    optimisation: str
    scheduling: str
    exchange: str
    topology: str
    source: str


class Runs(msgspec.Struct, frozen=True):
    """How a published system runs here."""

    system: str  # its name in `published_systems.py`
    options: str  # what follows `ringtmp train --strategy`, other options of that command included
    lacks: str = ""  # what of the published system is left out


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A strategy's settings: a subclass adds fields, `Annotated` with `described`, and a `__post_init__` that raises UsageError
    for what can never be."""

    def check(self, nodes: int, wire: str) -> None:
        """Raise UsageError for what cannot be with so many nodes and this wire format."""


def described(values: str, meaning: str, systems: str = "", default: str = "") -> msgspec.Meta:
    """What `ringtmp strategies` says of a setting; `systems`: who chose which value."""
    return msgspec.Meta(description=meaning, extra={"values": values, "systems": systems, "default": default})


def said_of(setting: msgspec.structs.FieldInfo) -> dict[str, str]:
    """What `described` was told of a setting; nothing of one that is not described."""
    metas = [meta for meta in getattr(setting.type, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    return {"meaning": metas[0].description or "", **(metas[0].extra or {})} if metas else {}


def as_typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class OfRanks(enum.IntEnum):
    """What a strategy wants of torch.distributed."""

    NOTHING = 0
    SUMS = 1
    MESH = 2  # its own default group besides, for parts of it that take no other


class Roles(msgspec.Struct, frozen=True):
    """Nodes by what they do; a node may do both."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]

    def without(self, node: int) -> Roles:
        return Roles(*(tuple(each for each in group if each != node) for group in (self.servers, self.workers)))


class Sizes(msgspec.Struct, frozen=True):
    """What decides how much travels in a step."""

    parameters: float
    cuts: tuple[float, ...]  # values per sample at every cut on the way round, where layers are split
    samples: float  # of a step
    inside: float = 0.0  # values per sample that workers add up on the way there and back, where layers are cut inside
    linear: tuple[tuple[int, int, int], ...] = ()  # plain linear layers: parameters, inputs, outputs; a sample is a row


class Traffic(msgspec.Struct, frozen=True):
    """Values per step."""

    total: float  # sent by all nodes together
    busiest: float  # sent by the node that sends most
    #: How the model is exchanged, with what that cannot be faster than; None: something else travels, or less of it.
    exchange: Exchange | None = None


@dataclass(frozen=True)
class Task:
    """A step to be simulated."""

    layers: Sequence[LayerCost]
    devices: Sequence[Device]
    options: PlanOptions
    paths: Paths | None = None


@dataclass(frozen=True)
class OnPaper:
    """What a step would be."""

    step: Simulated
    memory: tuple[MemoryForecast, ...]  # of every node
    shape: str = ""  # what was chosen for it, for people


#: Where the state comes from with which a run goes on after a loss that needs a new generation.
StateFrom = Literal["checkpoint", "snapshot", "survivors"]


class Strategy:
    """Required: `name`, `about`, `worker` (or `plan` and `member`), `simulate` and `traffic`. Methods take settings as `read`
    returns them."""

    name: ClassVar[str]
    about: ClassVar[About]
    Settings: ClassVar[type[Settings]] = Settings
    #: The setting a short name gives: with 'consistency', `ps:ssp:3` is consistency=ssp:3.
    short: ClassVar[str] = ""
    #: Where that is a whole number, one and what it means: "8 for a mean every 8 steps".
    short_number: ClassVar[str] = ""
    #: Each node holds some of the layers: cuts, window, laps, route, recompute, schedule, staleness and microbatches=auto
    #: apply.
    splits_layers: ClassVar[bool] = False
    #: Inputs and labels stay with the master.
    keeps_data: ClassVar[bool] = False
    #: It stands for whichever way is chosen before the first step.
    chooses: ClassVar[bool] = False
    #: Every step takes the whole data.
    full_batch: ClassVar[bool] = False
    #: What comes out is not what one process would have, whatever the settings.
    own_method: ClassVar[bool] = False
    #: Whether that needs others: one worker trains as one process does.
    own_among_several: ClassVar[bool] = False
    #: Workers take shares of a batch; else every worker takes the whole.
    shares_batches: ClassVar[bool] = True
    #: What travels are gradients that add up from step to step: a wire format may leave out what the next one brings.
    sums_gradients: ClassVar[bool] = False
    #: Settings that choose the order in which sums are made, and who holds what: they may change when a run goes on, as the
    #: number of nodes may.
    order_of_sums: ClassVar[frozenset[str]] = frozenset()
    state_from: ClassVar[StateFrom] = "checkpoint"
    #: Published systems that this strategy runs.
    runs: ClassVar[tuple[Runs, ...]] = ()

    #: As which it keeps the bits of one process with `--sum-tree`; empty: it does not.
    tree_name: ClassVar[str] = ""

    # -- settings -----------------------------------------------------------------------------------------------------

    def parse_short(self, text: str) -> dict[str, Any]:
        """What follows the name in `NAME:SHORT`, as settings; asked only of a strategy that has a `short`."""
        if self.short_number and not text.isdigit():
            raise UsageError(f"{self.name}:{text}: write {self.name}:{self.short_number}")
        return {self.short: int(text) if self.short_number else text}

    def read(self, given: Mapping[str, Any]) -> Any:
        """The settings as a value; refuses names and types the strategy does not have."""
        try:
            return msgspec.convert(dict(given), self.Settings, strict=True)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            raise self._unreadable(where.rstrip("`"), given, what) from error

    def _unreadable(self, key: str, given: Mapping[str, Any], what: str) -> UsageError:
        """`what`: as msgspec says it."""
        said = {each.name: said_of(each) for each in msgspec.structs.fields(self.Settings)}
        values = said.get(key, {}).get("values")
        if not values:
            return UsageError(f"{key or 'settings'} of strategy {self.name}: {what[0].lower()}{what[1:]}")
        whole = "a whole number, " if what.startswith("Expected `int`") else ""
        value = repr(given[key]) if whole and isinstance(given[key], str) else as_typed(given[key])
        return UsageError(f"{key}={value} cannot be: {key} of strategy {self.name} is {whole}{values}")

    def refuse_wire(self, wire: str) -> None:
        """UsageError for a wire format that what travels here cannot bear."""
        if wire_format(wire).gradients_only and not self.sums_gradients:
            others = ", ".join(name for name, each in WIRE_FORMATS.items() if not each.gradients_only)
            raise UsageError(
                f"--wire {wire} leaves out most of a gradient and makes up for it with the next one: strategy {self.name} "
                f"sends {self.about.exchange}, where nothing would. Use --wire {others}, or a strategy that sums gradients"
            )

    # -- what it does on the nodes ------------------------------------------------------------------------------------

    def roles(self, settings: Any, nodes: int) -> Roles:
        return Roles((), tuple(range(nodes)))

    def exactness(self, settings: Any) -> str:
        """With float32 on the wire. `bits`: those of one process; `replay`: the same bits every time; `steps`: the same
        batches, other rounding."""
        return "replay"

    def sums_by_tree(self, settings: Any) -> bool:
        """Whether workers add up whole parts of the tree of sums (plan/sum_tree.py), for the bits of one process."""
        return False

    def needs_ranks(self, settings: Any) -> OfRanks:
        """What torch.distributed itself does for the nodes, which it must have started then (torchrun)."""
        return OfRanks.NOTHING

    def delayed(self, settings: Any) -> bool:
        """Whether gradients may be of other weights than those they change."""
        return False

    def ways(self, config: RunConfig) -> Sequence[RunConfig]:
        """A run's settings for each way in which it is considered by `--strategy auto`; none: it must be asked for."""
        return ()

    def carried(self, task: Task) -> str:
        """What a step sends, for people."""
        size = sum(layer.gradient_bytes for layer in task.layers) * task.options.wire_ratio
        return f"{bytes_text(size)} of gradients"

    def refuse_too_few(
        self, config: RunConfig, nodes: int, keep_all: bool, has_parameters: Sequence[bool], why: str
    ) -> None:
        """UsageError for what can be told of so many layers before they are compared and measured. `has_parameters`: of
        each, whether it has some of its own behind the inputs; `why`: what keeps a module from being cut into more,
        empty for a list of layers."""

    def tried(
        self, request: PlanRequest, endpoint: Endpoint, pool: NodePool, log: EventLog,
        *, phase: Callable[[str], None], hellos: Mapping[int, Hello],
    ) -> tuple[PlanRequest, dict[int, Hello]]:  # fmt: skip
        """With the devices as they are found to be, where a plan depends on it; and who has said hello by then."""
        return request, dict(hellos)

    def tried_alike(self, request: PlanRequest, known: PlanRequest) -> bool:
        """Whether what was found out for `known` is all that `tried` would look for now."""
        return True

    def with_best_microbatches(self, request: PlanRequest, batch_sizes: Collection[int]) -> PlanRequest:
        """`--microbatches auto`; asked only of a strategy that splits layers."""
        return request

    def plan(self, request: PlanRequest) -> Plan:
        """The run laid out for the nodes that are there."""
        from ringtmp.strategies.data_parallel.plan import plan

        return plan(request, self)

    def member(self, endpoint: Endpoint, message: Message) -> Member | None:
        """The part that a plan from the master gives this node; None: the message is not a plan of this strategy."""
        from ringtmp.wire.messages import Enlist

        if not isinstance(message, Enlist) or message.strategy != self.name:
            return None
        settings = self.read(message.settings)
        return self.worker(endpoint, message, settings, self.roles(settings, message.nodes))

    def worker(self, endpoint: Endpoint, plan: Enlist, settings: Any, roles: Roles) -> ParallelMember:
        """This node's part in a plan of `data_parallel`."""
        raise NotImplementedError

    def can_lose(self, settings: Any, roles: Roles, node: int, bare: Collection[int], nodes: int) -> bool:
        """Whether the others go on within the generation when `node` is lost, without going back to an older state. `roles`:
        of those who are left, `node` among them; `bare`: servers whose keys have no replica any more; `nodes`: how many
        there were when the generation began."""
        return False

    # -- on paper -----------------------------------------------------------------------------------------------------

    def simulate(self, settings: Any, task: Task) -> OnPaper:
        raise NotImplementedError

    def traffic(self, settings: Any, sizes: Sizes, nodes: int) -> Traffic:
        raise NotImplementedError


def keeps_bits(strategy: Strategy, settings: Any, sum_tree: int) -> bool:
    """Whether float32 on the wire ends in the bits of one process with so many parts of a batch."""
    return strategy.exactness(settings) == "bits" or (sum_tree > 1 and strategy.sums_by_tree(settings))


def drifts(strategy: Strategy, settings: Any, nodes: int = 2) -> bool:
    """Whether it trains otherwise than one process does, not only with other rounding. `nodes`: of which one may be alone."""
    if strategy.own_among_several and len(strategy.roles(settings, nodes).workers) == 1:
        return False
    own = strategy.own_method or strategy.full_batch or strategy.delayed(settings)
    return own or strategy.exactness(settings) == "steps"


# -- what a plan is made of, and what it makes --------------------------------------------------------------------------

#: The batch of a later step; None: not before the steps so far are done (an evaluation, a checkpoint, the end).
Upcoming = Callable[[int], "Batch | None"]


def nothing_ahead(step: int) -> Batch | None:
    return None


@dataclass(frozen=True)
class PlanRequest:
    """A run as a strategy sees it."""

    config: RunConfig
    index: LayerIndex
    layers: list[Layer]
    loss: LossFunction
    loss_name: str
    recipe: Recipe
    step: int  # steps already done
    microbatches: int
    batch_size: int
    addresses: dict[int, Address]
    devices: tuple[Device, ...]  # of every node, the master first
    keep_all: bool  # every node takes part, in the order of their numbers
    targets: torch.Tensor  # of a few samples
    apart: frozenset[frozenset[int]] = frozenset()  # pairs of nodes that cannot reach each other
    paths: Paths = field(default_factory=dict)  # between devices, where they are not as their links say
    chosen: bool = False  # the number of microbatches is the plan's own choice
    before: Route | None = None  # who held what until now, where layers are split


@dataclass(frozen=True)
class Share:
    """What one node does, for the record."""

    node: int
    role: str
    segments: tuple[str, ...]
    parameters: int


class Leader(Protocol):
    """The master of a run."""

    @property
    def committed(self) -> int:
        """The first step nobody has begun: a run may only be stopped there."""
        ...

    def lay_out(self, checkpoint: Checkpoint) -> None:
        """Give everyone what it needs: of the snapshot the run goes back to, or else of the checkpoint."""
        ...

    def train_step(self, step: int, batch: Batch, fresh: bool, upcoming: Upcoming = nothing_ahead) -> float:
        """One update of every layer. The batch's mean loss before it."""
        ...

    def evaluate(self, batches: Iterable[Batch], step: int, bytes_model: bool) -> Score: ...
    def save(self, writer: CheckpointWriter) -> None: ...
    def leave(self) -> dict[int, float]:
        """The generation ends. Losses of steps that are done and not counted yet."""
        ...

    def stop(self, reason: str, limit_s: float = 2.0) -> list[NodeLost]:
        """Everyone says goodbye; returns those who had died before they could."""
        ...

    def farewell(self) -> NodeEnded: ...
    def keep_in_touch(self) -> None:
        """While the run waits for something else: hear what nodes say. NodeLost: one is gone."""
        ...

    def want_detail(self, step: int) -> None:
        """Every node records every span of a step that nobody has begun: somebody looks on."""
        ...

    def try_lines(self) -> dict[int, tuple[float, float]]:
        """Bytes per second to and from other nodes, while the run is at rest; asked where a plan has a balance to keep."""
        ...


class Plan(Protocol):
    """A strategy laid out for the nodes that are there."""

    @property
    def warnings(self) -> tuple[str, ...]: ...
    @property
    def lines(self) -> tuple[str, ...]:
        """What to expect, for people."""
        ...

    @property
    def facts(self) -> dict[str, Any]: ...
    @property
    def shares(self) -> tuple[Share, ...]: ...
    @property
    def left_out(self) -> bool:
        """Somebody was, and may do better the next time."""
        ...

    def balance(self, not_before: float) -> Balance | None:
        """Watches whether nodes are as fast as planned; None: nothing could be moved from one to another."""
        ...

    def lead(self, start: Start) -> Leader:
        """Who leads the nodes of `shares`, which have all said hello."""
        ...
