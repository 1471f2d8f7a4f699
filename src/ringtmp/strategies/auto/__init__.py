"""`auto`: stands for a strategy until layers and devices are known, then chooses one.

Until then a run takes whatever any of the strategies it may choose would; from the first layout on it is the chosen one's,
and so are its settings in the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from ringtmp.errors import UsageError
from ringtmp.strategies.base import About, OnPaper, Plan, PlanRequest, Sizes, Strategy, Task, Traffic

if TYPE_CHECKING:
    from ringtmp.metrics.event_log import EventLog
    from ringtmp.runtime.base_leader import NodePool
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.wire.messages import Hello


class Auto(Strategy):
    name = "auto"
    about = About(
        "The fastest way that fits these devices, links and memory, keeps the bits asked for and the data at home",
        "as chosen", "as chosen", "as chosen", "as chosen", "as chosen", "the project's own",
    )  # fmt: skip
    splits_layers = True
    keeps_data = True
    chooses = True
    state_from = "snapshot"

    def sums_by_tree(self, settings: Any) -> bool:
        """Ways that do not are not open where a tree of sums was asked for."""
        return True

    def tried(
        self, request: PlanRequest, endpoint: Endpoint, pool: NodePool, log: EventLog,
        *, phase: Callable[[str], None], hellos: Mapping[int, Hello],
    ) -> tuple[PlanRequest, dict[int, Hello]]:  # fmt: skip
        said = dict(hellos)
        for each in self._all():
            request, said = each.tried(request, endpoint, pool, log, phase=phase, hellos=said)
        return request, said

    def tried_alike(self, request: PlanRequest, known: PlanRequest) -> bool:
        return all(each.tried_alike(request, known) for each in self._all())

    def with_best_microbatches(self, request: PlanRequest, batch_sizes: Collection[int]) -> PlanRequest:
        for each in self._all():
            if each.splits_layers:
                return each.with_best_microbatches(request, batch_sizes)
        return request

    def plan(self, request: PlanRequest) -> Plan:
        raise AssertionError("a way is chosen before it is planned")

    def simulate(self, settings: Any, task: Task) -> OnPaper:
        raise UsageError("auto chooses among the others: use ringtmp plan --strategy auto")

    def traffic(self, settings: Any, sizes: Sizes, nodes: int) -> Traffic:
        raise UsageError("auto has no traffic of its own: it chooses among the others")

    def _all(self) -> list[Strategy]:
        from ringtmp.strategies.registry import OURS

        return list(OURS.values())


STRATEGY = Auto()
