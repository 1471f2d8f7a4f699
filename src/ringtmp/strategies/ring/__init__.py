"""The ring: each node holds a run of adjacent layers; activations go clockwise, gradients anticlockwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringtmp.strategies.base import About, OnPaper, Plan, PlanRequest, Runs, Sizes, Strategy, Task, Traffic
from ringtmp.units import bytes_text

if TYPE_CHECKING:
    from ringtmp.config import RunConfig
    from ringtmp.metrics.event_log import EventLog
    from ringtmp.runtime.base_leader import NodePool
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.runtime.member import Member
    from ringtmp.wire.messages import Hello, Message


class Ring(Strategy):
    name = "ring"
    about = About(
        "Ring Topological Model Parallel: each node holds a run of adjacent layers",
        "model (vertical)", "decentralised by layer, one owner each", "synchronous", "activations and their gradients",
        "ring", "the project's own",
    )  # fmt: skip
    splits_layers = True
    keeps_data = True
    state_from = "snapshot"
    tree_name = "ring"
    runs = (
        Runs("PyTorch", "ring --groups auto --sum-tree 4"),
        Runs("DIANNE", "ring", lacks="copies of the pipeline beside each other"),
    )

    def sums_by_tree(self, settings: Any) -> bool:
        return True

    def exactness(self, settings: Any) -> str:
        return "bits"

    def refuse_too_few(
        self, config: RunConfig, nodes: int, keep_all: bool, has_parameters: Sequence[bool], why: str
    ) -> None:
        from ringtmp.strategies.ring.plan import refuse_too_few

        refuse_too_few(config, nodes, keep_all, has_parameters, why)

    def tried(
        self, request: PlanRequest, endpoint: Endpoint, pool: NodePool, log: EventLog,
        *, phase: Callable[[str], None], hellos: Mapping[int, Hello],
    ) -> tuple[PlanRequest, dict[int, Hello]]:  # fmt: skip
        from ringtmp.strategies.ring.plan import tried

        return tried(request, endpoint, pool, log, phase=phase, hellos=hellos)

    def tried_alike(self, request: PlanRequest, known: PlanRequest) -> bool:
        from ringtmp.strategies.ring.plan import order_is_given

        return order_is_given(request) == order_is_given(known)

    def with_best_microbatches(self, request: PlanRequest, batch_sizes: Collection[int]) -> PlanRequest:
        from ringtmp.strategies.ring.plan import with_best_microbatches

        return with_best_microbatches(request, batch_sizes)

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.ring.plan import plan

        return plan(request)

    def member(self, endpoint: Endpoint, message: Message) -> Member | None:
        from ringtmp.wire.messages import Setup

        if not isinstance(message, Setup):
            return None
        from ringtmp.strategies.ring.node import Node

        return Node(endpoint, message)

    def simulate(self, settings: Any, task: Task) -> OnPaper:
        from ringtmp.strategies.ring.plan import planned_once

        made = planned_once(task.layers, task.devices, task.options, task.paths)
        shape = ", ".join(filter(None, (made.shape, made.options.schedule)))
        return OnPaper(made.simulated, made.memory, shape)

    def ways(self, config: RunConfig) -> Sequence[RunConfig]:
        """With the groups that were asked for, or that keep the bits; and with delayed gradients."""
        from ringtmp.strategies.ring.plan import ways

        return ways(config)

    def carried(self, task: Task) -> str:
        from ringtmp.plan.layer_costs import CostTable

        count = task.options.ring.microbatches
        table = CostTable(task.layers, task.options.batch_size / count, task.options.wire_ratio)
        return f"{bytes_text(count * table.mean_cut_bytes)} each way over a cut"

    def traffic(self, settings: Any, sizes: Sizes, nodes: int) -> Traffic:
        """A sample's activations go over every cut and its gradients come back; a node sends what leaves it, and the
        gradients of what enters it. The master has both ends."""
        around = zip(sizes.cuts, sizes.cuts[1:] + sizes.cuts[:1], strict=True)
        return Traffic(
            2 * sum(sizes.cuts) * sizes.samples, max((a + b for a, b in around), default=0.0) * sizes.samples
        )


STRATEGY = Ring()
