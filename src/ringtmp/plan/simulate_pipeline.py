"""A ring on paper: the same local rule as the live nodes, on simulated processors and lines.

Events in a heap, ordered by time and then by number, so equal inputs give equal results. What comes to a visit is worked
off in the order in which it came. O(visits * microbatches) events.

    two visits, one second each, free links, window 2         bubble (p-1)/(m+p-1)
    visit 0  F0 F1 .  B0 F2 B1 .  B2 U
    visit 1  .  F0 B0 F1 B1 F2 B2 U  .

Deferred weight gradients (zero-bubble) are worked off a layer at a time. With staleness 1 a visit may be in two steps.
Routes may visit a node any number of times, and a visit may have several members (groups.py): each takes its own
microbatches, and the update waits until the group has added up its gradients, which begins behind the last of them. What a
schedule to come needs: a new kind of action in the rule, its duration in `_durations` and what follows from it in `_done`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.layer_costs import CostTable, StageCost
from ringtmp.plan.next_action import Action, Ready, next_action
from ringtmp.plan.node_groups import added_up_at, admission, exchange_bytes, share_of
from ringtmp.plan.pipeline_schedules import DEFAULT_SCHEDULE, SCHEDULES, PipelineSchedule, ScheduleName
from ringtmp.plan.route import Route, Visit
from ringtmp.plan.simulated_clocks import Lines, Processor
from ringtmp.plan.simulated_step import NodeStep, Simulated, Span, line_bytes, per_step
from ringtmp.plan.sum_tree import SumTree

#: A clipping norm or coefficient on its way.
NORM_BYTES = 64.0
_DONE, _DEPART, _ACTIVATIONS, _GRADIENTS, _NORMS, _SCALE, _SUMMED = range(7)


@dataclass(frozen=True, slots=True)
class RingOptions:
    microbatches: int
    window: int | None = None  # None: the default of the live ring
    schedule: ScheduleName = DEFAULT_SCHEDULE.name
    clip: bool = False
    steps: int = 1  # with more than one the first only warms up
    staleness: int = 0
    parts: int = 1  # of a step, which members of a group share
    late: bool = False  # they do not wait for each other's gradients
    widest: int = 1  # members of the largest group: as many times more are in flight

    def window_for(self, visits: int) -> int:
        usual = self.pipeline.default_window(visits, self.microbatches, self.staleness)
        return self.window or (usual if self.widest == 1 else min(usual * self.widest, self.microbatches))

    @property
    def pipeline(self) -> PipelineSchedule:
        return SCHEDULES[self.schedule]

    @property
    def warm_up(self) -> int:
        """Steps that do not count: steps that overlap reach their rhythm later."""
        return min(self.steps - 1, 1 + 2 * self.staleness)

    @property
    def counted(self) -> int:
        """Steps that count: the last one ends early where nobody begins the next meanwhile."""
        return max(1, self.steps - self.warm_up - self.staleness)


def simulate_ring(
    table: CostTable, route: Route, devices: Sequence[Device], options: RingOptions, paths: Paths | None = None
) -> Simulated:
    """Steps of `options.microbatches` microbatches, fill and drain included. `devices[n]` is node n of the route."""
    return _Ring(table, route, devices, options, paths).run()


class _Visit:
    """One member's part of a visit. Counts over all passes so far; the pass it is in is `turn`."""

    __slots__ = (
        "answers", "backwarded", "coming", "count", "ended", "ending", "first", "forwarded", "held", "index", "last",
        "most_held", "node", "norms", "norms_sent", "number", "pieces", "pieces_left", "scaled", "stage", "summed", "turn",
        "weighed",
    )  # fmt: skip

    def __init__(
        self, number: int, index: int, node: int, stage: StageCost, *, last: int, pieces: int, count: int
    ) -> None:
        self.number, self.index, self.node, self.stage = number, index, node, stage
        self.count = count  # microbatches of a step
        self.coming: deque[int] = deque()  # microbatches whose activations are here
        self.answers: deque[int] = deque()  # and whose gradients
        self.summed = 0  # passes whose gradients the whole group has added up
        self.pieces = self.pieces_left = pieces  # of a microbatch's deferred weight gradients; 0: none are deferred
        self.weighed = 0  # microbatches whose weight gradients are done
        self.ending = self.ended = 0.0  # when the last of a step's weight gradients were begun, and done
        self.first, self.last = index == 0, index == last
        self.turn = self.forwarded = self.backwarded = 0
        self.held = self.most_held = 0
        self.norms = self.norms_sent = self.scaled = 0  # passes


class _Node:
    __slots__ = ("busy", "cause", "free_since", "gaps", "level", "most_level", "processor", "spans", "visits")

    def __init__(self, device: Device) -> None:
        self.processor = Processor(device.quota, device.speed)
        self.visits: list[_Visit] = []
        self.busy: Action | None = None
        self.free_since = 0.0
        self.cause = "activations"
        self.level = self.most_level = 0.0  # bytes of activations and boundary tensors
        self.spans: list[tuple[str, int, int, float, float]] = []
        self.gaps: list[tuple[float, float, str]] = []


class _Ring:
    def __init__(
        self, table: CostTable, route: Route, devices: Sequence[Device], options: RingOptions, paths: Paths | None
    ) -> None:
        self._devices = devices
        self._options = options
        self._microbatches = options.microbatches
        self._window = options.window_for(len(route.visits))
        self._schedule = options.pipeline
        self._nodes = [_Node(device) for device in devices]
        self._visits: list[_Visit] = []
        self._groups: list[list[_Visit]] = []  # the members of every visit of the route
        self._has: list[list[_Visit]] = []  # by visit of the route and microbatch: who has it
        self._admitted = (
            admission(route, SumTree(options.parts), options.microbatches)
            if route.grouped
            else list(range(options.microbatches))
        )
        for each in route.visits:
            self._add(table, each, route.last)
        self._gradient_bytes = [table.gradients[each.stop] - table.gradients[each.first] for each in route.visits]
        self._cut_bytes = [table.cut_bytes[each.first] for each in route.visits]  # into each visit
        self._durations = [self._visit_durations(visit) for visit in self._visits]
        self._lines = Lines(devices, paths)
        #: time, number, kind, member of a visit (or node), bytes, microbatch, node that sends
        self._heap: list[tuple[float, int, int, int, float, int, int]] = []
        self._number = 0
        self._ends: list[float] = []  # of steps, as the master sees them
        self._warm: dict[tuple[int, int], float] = {}

    def _add(self, table: CostTable, visit: Visit, last: int) -> None:
        stage, tree = table.stage(visit.first, visit.stop), SumTree(self._options.parts)
        pieces = max(1, visit.stop - visit.first) if self._schedule.defers_weights and stage.weights_s > 0 else 0
        has: list[_Visit] = []
        self._groups.append([])
        for node in visit.members:
            alone = not visit.others
            count = (
                self._microbatches if alone else len(tree.microbatches(share_of(visit, node, tree), self._microbatches))
            )
            made = _Visit(len(self._visits), visit.index, node, stage, last=last, pieces=pieces, count=count)
            has += [made] * count
            self._visits.append(made)
            self._nodes[node].visits.append(made)
            self._groups[-1].append(made)
        self._has.append(has)

    def _visit_durations(self, visit: _Visit) -> dict[str, tuple[float, float]]:
        """By action: work in profiled seconds, and what the messages cost this device itself."""
        link = self._devices[visit.node].link
        before = after = 0.0
        if not visit.first and self._groups[visit.index - 1][0].node != visit.node:
            before = link.cpu_s(self._cut_bytes[visit.index])
        if not visit.last and self._groups[visit.index + 1][0].node != visit.node:
            after = link.cpu_s(self._cut_bytes[visit.index + 1])
        stage = visit.stage
        later_s = stage.weights_s if visit.pieces else 0.0
        return {
            "forward": (stage.forward_s, before + after),
            "backward": (stage.backward_s - later_s, before + after),
            "weights": (later_s / max(visit.pieces, 1), 0.0),
            "update": (stage.update_s, 0.0),
        }

    # -- the clock ----------------------------------------------------------------------------------------------------

    def run(self) -> Simulated:
        for _ in range(min(1 + self._options.staleness, self._options.steps)):
            self._visits[0].coming.extend(self._admitted)
        self._choose(self._nodes[self._visits[0].node], 0.0)
        heap = self._heap
        while heap:
            now = heap[0][0]
            woken: dict[int, None] = {}
            # Everything that happens at this moment happens before anyone decides, as a node empties its mail first.
            while heap and heap[0][0] == now:
                _, _, kind, index, size, microbatch, source = heapq.heappop(heap)
                if kind == _DONE:
                    self._done(self._nodes[index], now)
                    woken[index] = None
                elif kind == _DEPART:
                    # The target is encoded beside the kind of message it will be.
                    visit, message = divmod(index, 8)
                    self._leave(now, visit, message, size, microbatch, source)
                else:
                    self._arrived(kind, index, now, microbatch)
                    woken[self._visits[index].node] = None
            for number in woken:
                node = self._nodes[number]
                if node.busy is None:
                    self._choose(node, now)
        return self._result()

    def _push(
        self, time: float, kind: int, index: int, size: float = 0.0, microbatch: int = -1, source: int = -1
    ) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, kind, index, size, microbatch, source))

    def _send(
        self, now: float, source: int, visit: _Visit, message: int, size: float, microbatch: int = -1
    ) -> None:  # fmt: skip
        """To a member of a visit; within a node at once."""
        if source == visit.node:
            self._push(now, message, visit.number, microbatch=microbatch)
            return
        start = self._lines.depart(now, source, visit.node, size)
        if start > now:
            self._push(start, _DEPART, visit.number * 8 + message, size, microbatch, source)
        else:
            self._leave(now, visit.number, message, size, microbatch, source)

    def _leave(self, now: float, visit: int, message: int, size: float, microbatch: int, source: int) -> None:
        there = self._lines.arrive(now, source, self._visits[visit].node, size)
        self._push(there, message, visit, microbatch=microbatch)

    # -- a node -------------------------------------------------------------------------------------------------------

    def _choose(self, node: _Node, now: float) -> None:
        action = next_action([self._ready(visit) for visit in node.visits], self._window, self._schedule)
        if action is None:
            node.cause = self._cause(node)
            return
        if now > node.free_since:
            node.gaps.append((node.free_since, now, node.cause))
        visit = self._visits[action.visit]
        if action.kind == "backward":
            visit.answers.popleft()
            if not visit.pieces:
                visit.ending = now
        elif action.kind == "forward":
            visit.coming.popleft()
            visit.held += 1
            visit.most_held = max(visit.most_held, visit.held)
            self._weigh(node, visit.stage.stored_bytes)
        elif action.kind == "weights" and visit.pieces_left == visit.pieces:
            visit.ending = now
        work, own = self._durations[action.visit][action.kind]
        end = node.processor.finish(now, work, own)
        node.busy = action
        microbatch = visit.weighed % visit.count if action.kind == "weights" else action.microbatch
        node.spans.append((action.kind, visit.index, microbatch, now, end))
        self._push(end, _DONE, visit.node)

    def _ready(self, visit: _Visit) -> Ready:
        count = visit.count
        may_go = visit.forwarded // count - visit.turn <= self._options.staleness
        answering = visit.backwarded // count  # the pass whose gradient comes next
        end = (visit.turn + 1) * count
        return Ready(
            visit.number,
            visit.first,
            visit.coming[0] if visit.coming and may_go else None,
            visit.answers[0] if visit.answers else None,
            forwarded=min(visit.forwarded - answering * count, count),
            in_flight=visit.forwarded - visit.backwarded if visit.first else 0,
            microbatches=count,
            update=visit.summed > visit.turn and (not self._options.clip or visit.scaled > visit.turn),
            deferred=visit.backwarded - visit.weighed,
            stored=visit.forwarded - visit.weighed,
            closing=visit.backwarded >= end,
        )

    def _cause(self, node: _Node) -> str:
        """As the live node tells it."""
        deepest = node.visits[-1]
        for visit in (deepest, *node.visits):
            count = visit.count
            forwarded = visit.forwarded - visit.turn * count
            if forwarded:  # in a pass
                if visit.backwarded - visit.turn * count >= count:
                    return "clipping" if visit.summed > visit.turn else "sums"
                if visit.first and visit.coming:
                    return "window"
                if forwarded >= count:
                    return "gradients"
        return "activations"

    def _done(self, node: _Node, now: float) -> None:
        action, node.busy = node.busy, None
        assert action is not None
        node.free_since = now
        visit = self._visits[action.visit]
        if action.kind == "forward":
            visit.forwarded += 1
            if visit.last:
                self._push(now, _GRADIENTS, visit.number, microbatch=action.microbatch)
            else:
                target = self._has[visit.index + 1][action.microbatch]
                self._send(now, visit.node, target, _ACTIVATIONS, self._cut_bytes[visit.index + 1], action.microbatch)
        elif action.kind == "backward":
            visit.backwarded += 1
            if not visit.first:
                target = self._has[visit.index - 1][action.microbatch]
                self._send(now, visit.node, target, _GRADIENTS, self._cut_bytes[visit.index], action.microbatch)
            if not visit.pieces:
                self._let_go(node, visit, now)
        elif action.kind == "weights":
            visit.pieces_left -= 1
            if not visit.pieces_left:
                visit.pieces_left = visit.pieces
                self._let_go(node, visit, now)
        else:
            visit.turn += 1
            self._end_of_step(node, now)

    def _let_go(self, node: _Node, visit: _Visit, now: float) -> None:
        """All gradients of a microbatch are there: nothing of it is needed any more."""
        visit.weighed += 1
        visit.held -= 1
        stage = visit.stage
        freed = stage.stored_bytes + (0.0 if visit.first else stage.input_bytes)
        self._weigh(node, -freed - (0.0 if visit.last else stage.output_bytes))
        if visit.weighed % visit.count == 0:
            self._add_up(visit, now)

    def _add_up(self, visit: _Visit, now: float) -> None:
        """The last of a group that is done with its own microbatches: then all of them exchange their sums."""
        group, visit.ended = self._groups[visit.index], now
        if len(group) == 1 or self._options.late:
            for other in group:
                if other is not visit:
                    self._lines.carry(visit.node, other.node, self._gradient_bytes[visit.index])
            visit.summed += 1
            self._pass_norms_on(visit, now)
        elif all(each.weighed // each.count >= visit.weighed // visit.count for each in group):
            size, members = self._gradient_bytes[visit.index], [self._devices[each.node] for each in group]
            end = added_up_at(members, size, [each.ending for each in group], [each.ended for each in group])
            each_way = exchange_bytes(members, size) / (len(group) - 1)
            for member in group:
                self._push(end, _SUMMED, member.number)
                for other in group:
                    if other is not member:
                        self._lines.carry(member.node, other.node, each_way)

    def _arrived(self, kind: int, index: int, now: float, microbatch: int) -> None:
        visit = self._visits[index]
        if kind == _ACTIVATIONS:
            visit.coming.append(microbatch)
            self._weigh(self._nodes[visit.node], visit.stage.input_bytes)
        elif kind == _GRADIENTS:
            visit.answers.append(microbatch)
            self._weigh(self._nodes[visit.node], 0.0 if visit.last else visit.stage.output_bytes)
        elif kind == _SUMMED:
            visit.summed += 1
            self._pass_norms_on(visit, now)
        elif kind == _NORMS:
            visit.norms += 1
            self._pass_norms_on(visit, now)
        else:
            self._scale(visit, now)

    def _weigh(self, node: _Node, change: float) -> None:
        node.level += change
        node.most_level = max(node.most_level, node.level)

    def _pass_norms_on(self, visit: _Visit, now: float) -> None:
        first = self._groups[visit.index][0]
        if not self._options.clip or visit is not first or visit.summed <= visit.norms_sent:
            return
        if not visit.last and visit.norms <= visit.norms_sent:
            return
        visit.norms_sent += 1
        if visit.first:
            self._scale(visit, now)
        else:
            self._send(now, visit.node, self._groups[visit.index - 1][0], _NORMS, NORM_BYTES)

    def _scale(self, visit: _Visit, now: float) -> None:
        visit.scaled += 1
        if not visit.last and visit is self._groups[visit.index][0]:
            for member in self._groups[visit.index + 1]:
                self._send(now, visit.node, member, _SCALE, NORM_BYTES)

    def _end_of_step(self, node: _Node, now: float) -> None:
        """The master begins the next step when all its own visits are done with this one."""
        if node is not self._nodes[self._visits[0].node]:
            return
        done = min(visit.turn for visit in node.visits)
        if done <= len(self._ends):
            return
        self._ends.append(now)
        if done == self._options.warm_up:
            self._warm = dict(self._lines.carried)
        if done + self._options.staleness < self._options.steps:
            self._visits[0].coming.extend(self._admitted)

    # -- what came of it ----------------------------------------------------------------------------------------------

    def _result(self) -> Simulated:
        warm_up = self._options.warm_up
        begin = self._ends[warm_up - 1] if warm_up else 0.0
        steps = self._options.counted
        ended = self._ends[warm_up + steps - 1]
        # The last update may end on a worker when the master is done already.
        end = ended if self._options.steps > 1 else max(ended, *(node.free_since for node in self._nodes))
        step_s = (end - begin) / steps
        links = per_step(self._lines.carried, self._warm, self._options.steps - warm_up)
        sent, received = line_bytes(links, len(self._devices))
        nodes = []
        for number, (node, device) in enumerate(zip(self._nodes, self._devices, strict=True)):
            busy = sum(_overlap(a, b, begin, end) for _, _, _, a, b in node.spans) / steps
            causes: dict[str, float] = {}
            for a, b, cause in (*node.gaps, (node.free_since, end, "activations")):
                if (length := _overlap(a, b, begin, end) / steps) > 0:
                    causes[cause] = causes.get(cause, 0.0) + length
            nodes.append(
                NodeStep.of(
                    device, busy, step_s, causes, sent_bytes=sent[number], received_bytes=received[number],
                    memory_bytes=node.most_level, held=tuple(visit.most_held for visit in node.visits),
                )
            )  # fmt: skip
        # One step is drawn: the last that counts. Where steps overlap, what is done of the next one is in it.
        drawn = self._ends[warm_up + steps - 2] if self._options.steps > 1 else 0.0
        spans = tuple(
            Span(number, kind, visit, microbatch, max(a - drawn, 0.0), b - drawn)
            for number, node in enumerate(self._nodes)
            for kind, visit, microbatch, a, b in node.spans
            if b > drawn and (a < ended or not self._options.staleness)
        )
        return Simulated(step_s, tuple(nodes), links, spans)


def _overlap(start: float, end: float, low: float, high: float) -> float:
    return max(0.0, min(end, high) - max(start, low))
