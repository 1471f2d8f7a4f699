"""All that a page knows of a run so far, made from its events: they go in, in order, and nothing else does.

It can be written down and gone on with (kept_view.py), so it holds values alone: no file, no clock.
"""

from __future__ import annotations

import msgspec

from ringtmp.dashboard.decimated_history import Frames, Points
from ringtmp.dashboard.messages_to_browser import Member, Membership, Outage, Test, membership
from ringtmp.dashboard.sentences_for_events import Happenings
from ringtmp.metrics import events
from ringtmp.metrics.fold_events import Fold

#: Steps that are kept apart of all nodes together, and of each at least.
RECENT_NODE_STEPS, LEAST_RECENT = 512, 32


class Seen(msgspec.Struct):
    """`recent`: see RECENT_NODE_STEPS. `tests_from`: tests from this place on are other than those told last."""

    recent: int = RECENT_NODE_STEPS
    fold: Fold = msgspec.field(default_factory=Fold)
    points: Points = msgspec.field(default_factory=Points)
    frames: Frames = msgspec.field(default_factory=Frames)
    log: Happenings = msgspec.field(default_factory=Happenings)
    tests: list[Test] = []
    tests_from: int = 0
    memberships: list[Membership] = []
    outages: list[Outage] = []
    pending: list[events.NodeStep] = []  # of a step that is not done
    started: events.RunStarted | None = None
    ended: events.RunEnded | None = None
    newest: tuple[events.StepDone, float] | None = None

    def told(self) -> None:
        """Everything so far: what changes from here on is news."""
        self.points.changed_from, self.frames.changed_from = len(self.points.rows), len(self.frames.frames)
        self.tests_from, self.log.changed_from = len(self.tests), len(self.log.entries)

    def take_all(self, found: list[events.Event]) -> None:
        """A day has millions of nodes' shares of steps: they are added to the sums many at a time."""
        shares: list[events.NodeStep] = []
        pending = 0  # those from here on are of a step that is not done
        for event in found:
            if type(event) is events.NodeStep:
                shares.append(event)
                continue
            if type(event) is events.StepDone:
                self.pending += shares[pending:]
                pending = len(shares)
                self.fold.take(event)
                self._step_done(event, self.fold.run_s(event.at))
                continue
            self.fold.take_node_steps(shares)
            self.pending += shares[pending:]
            shares.clear()
            pending = 0
            self._take(event)
        self.fold.take_node_steps(shares)
        self.pending += shares[pending:]

    def _take(self, event: events.Event) -> None:
        """Any but a step, and a node's share of one."""
        if isinstance(event, events.RunStarted) and self.started is None:
            self._fold_for(event)
        self.fold.take(event)
        if isinstance(event, events.NodeEnded | events.NodeStep):
            return
        at_s = self.fold.run_s(event.at)
        self.log.take(event, at_s)
        if isinstance(event, events.Evaluated):
            self.tests.append(Test(event.step, at_s, event.loss, event.accuracy, event.bits_per_byte, event.perplexity))
        elif isinstance(event, events.NodeStarted):
            self._joined(event, at_s)
        elif isinstance(event, events.NodeGone):
            if event.node is not None:
                self.outages.append(Outage(event.node, at_s))
        elif isinstance(event, events.Regrouped):
            self._regrouped(event, at_s)
        elif isinstance(event, events.RunStarted):
            self._run_started(event)
        elif isinstance(event, events.RunEnded) and event.begun:
            self.ended = event

    def _step_done(self, event: events.StepDone, at_s: float) -> None:
        self.points.take(event, at_s)
        self.frames.take(self.pending, event.step, at_s)
        self.pending.clear()
        self.newest = event, at_s

    def _run_started(self, event: events.RunStarted) -> None:
        self.started, self.ended = event, None
        self._undo(event.first_step)
        for each in self.outages:
            each.to_s = self.fold.run_s(event.at) if each.to_s is None else each.to_s

    def _fold_for(self, event: events.RunStarted) -> None:
        nodes = event.config.get("ring", {}).get("nodes", 4) if isinstance(event.config, dict) else 4
        self.fold.recent = max(LEAST_RECENT, self.recent // max(1, nodes if isinstance(nodes, int) else 4))

    def _joined(self, event: events.NodeStarted, at_s: float) -> None:
        name = event.device or ("master" if event.node == 0 else f"node {event.node}")
        new = Member(event.node, name, event.role, event.segments, event.parameters)
        last = self.memberships[-1] if self.memberships else None
        self.frames.forget_readings([event.node])
        if last is None or last.generation != event.generation or at_s < last.at_s:
            self.memberships.append(membership(at_s, event.generation, (new,)))
            return
        others = tuple(each for each in last.members if each.node != new.node)
        members = tuple(sorted((*others, new), key=lambda each: each.node))
        self.memberships[-1] = membership(last.at_s, last.generation, members)

    def _regrouped(self, event: events.Regrouped, at_s: float) -> None:
        told = {each.node for each in self.outages if each.to_s is None}
        self.outages += [Outage(node, at_s - event.seconds) for node in event.lost if node not in told]
        for each in self.outages:
            each.to_s = at_s if each.to_s is None else each.to_s
        last = self.memberships[-1] if self.memberships else None
        if (
            last is not None and event.lost and last.at_s < at_s - event.seconds
        ):  # nobody started: others take its place
            members = tuple(each for each in last.members if each.node not in event.lost)
            self.memberships.append(membership(at_s, event.generation, members))
        self._undo(event.step)

    def _undo(self, step: int) -> None:
        self.points.keep_before(step)
        kept = [each for each in self.tests if each.step <= step]
        self.tests_from = min(self.tests_from, len(kept))
        self.tests = kept
