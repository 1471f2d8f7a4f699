"""One run as a page shows it: its events, followed and folded, as news that browsers can add to what they have.

Totals are the summary that `--json` prints, made by the same fold from the same events; curves and what nodes do over time
are decimated. Reads the run's directory and nothing else.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from ringtmp import __version__
from ringtmp.dashboard.decimated_history import Frames, Points
from ringtmp.dashboard.follow_file import Follower
from ringtmp.dashboard.messages_to_browser import Member, Membership, More, News, Now, Outage, Test, membership
from ringtmp.dashboard.sentences_for_events import Happenings
from ringtmp.errors import UsageError
from ringtmp.metrics import events
from ringtmp.metrics.fold_events import Fold
from ringtmp.metrics.summary import Summary, of_parts

#: Steps that are kept apart of all nodes together, and of each at least. A loss that undoes more has the file read again, and
#: more kept.
RECENT_NODE_STEPS, LEAST_RECENT, MORE_RECENT = 512, 32, 16
#: The summary takes at most this share of a core.
SUMMARY_SHARE = 0.01
SUMMARY_PAUSE_S = 1.0
#: Read without a pause, before others have their turn and viewers are told how far it is.
TURN_S = 0.5
MOST_TOLD_STEPS = 60


class RunView:
    def __init__(self, run: Path, number: int = 0) -> None:
        self.path = run
        self.number = number
        self.follower = Follower(run / "events.jsonl")
        self._recent = RECENT_NODE_STEPS
        self._begin()

    def _begin(self) -> None:
        self._fold = Fold(self._recent)
        self._points, self._frames, self._log = Points(), Frames(), Happenings()
        self._tests: list[Test] = []
        self._tests_from = 0
        self._memberships: list[Membership] = []
        self._outages: list[Outage] = []
        self._shares: list[events.NodeStep] = []  # read, and taken with the next event of another kind
        self._pending: list[events.NodeStep] = []  # of a step that is not done
        self._started: events.RunStarted | None = None
        self._ended: events.RunEnded | None = None
        self._newest: tuple[events.StepDone, float] | None = None
        self._summary: Summary | None = None
        self._summary_due = 0.0
        self._summary_new = self._behind = self._anew = False
        self._status_told = ""
        self._news_waiting = True

    # -- events in ----------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Take what is new. True: there is more than fits into one turn."""
        if self.follower.replaced():
            self._begin()
            self._anew = True
        limit = time.monotonic() + TURN_S
        before = self.follower.read
        while time.monotonic() < limit:
            start = self.follower.read
            for event in self.follower.more():
                if isinstance(event, events.NodeStep):  # nearly all are
                    self._shares.append(event)
                else:
                    self._take(event)
            self._take_shares()
            if self._fold.undone_too_far:
                self._read_all_again()
                return True
            if self.follower.read == start:
                break
        self._behind = self.follower.read < self.follower.size
        if self.follower.read != before:
            self._news_waiting = True
        self._summarise()
        return self._behind

    def _read_all_again(self) -> None:
        """With more of what nodes did kept apart: a loss undid more than had been."""
        self.follower.restart()
        self._recent *= MORE_RECENT
        self._begin()
        self._anew = True

    def _take_shares(self) -> None:
        self._fold.take_node_steps(self._shares)
        self._pending += self._shares
        self._shares.clear()

    def _take(self, event: events.Event) -> None:
        """Any but a node's share of a step."""
        self._take_shares()
        if isinstance(event, events.StepDone):
            self._fold.take(event)
            self._step_done(event, self._fold.run_s(event.at))
            return
        if isinstance(event, events.RunStarted) and self._started is None:
            self._fold_for(event)
        self._fold.take(event)
        if isinstance(event, events.NodeEnded | events.NodeStep):
            return
        at_s = self._fold.run_s(event.at)
        self._log.take(event, at_s)
        if isinstance(event, events.Evaluated):
            self._tests.append(
                Test(event.step, at_s, event.loss, event.accuracy, event.bits_per_byte, event.perplexity)
            )
        elif isinstance(event, events.NodeStarted):
            self._joined(event, at_s)
        elif isinstance(event, events.NodeGone):
            if event.node is not None:
                self._outages.append(Outage(event.node, at_s))
        elif isinstance(event, events.Regrouped):
            self._regrouped(event, at_s)
        elif isinstance(event, events.RunStarted):
            self._run_started(event)
        elif isinstance(event, events.RunEnded) and event.begun:
            self._ended = event

    def _step_done(self, event: events.StepDone, at_s: float) -> None:
        self._points.take(event, at_s)
        self._frames.take(self._pending, event.step, at_s)
        self._pending.clear()
        self._newest = event, at_s

    def _run_started(self, event: events.RunStarted) -> None:
        self._started, self._ended = event, None
        self._undo(event.first_step)
        for each in self._outages:
            each.to_s = self._fold.run_s(event.at) if each.to_s is None else each.to_s

    def _fold_for(self, event: events.RunStarted) -> None:
        nodes = event.config.get("ring", {}).get("nodes", 4) if isinstance(event.config, dict) else 4
        self._fold.recent = max(LEAST_RECENT, self._recent // max(1, nodes if isinstance(nodes, int) else 4))

    def _joined(self, event: events.NodeStarted, at_s: float) -> None:
        name = event.device or ("master" if event.node == 0 else f"node {event.node}")
        new = Member(event.node, name, event.role, event.segments, event.parameters)
        last = self._memberships[-1] if self._memberships else None
        self._frames.forget_readings([event.node])
        if last is None or last.generation != event.generation or at_s < last.at_s:
            self._memberships.append(membership(at_s, event.generation, (new,)))
            return
        others = tuple(each for each in last.members if each.node != new.node)
        members = tuple(sorted((*others, new), key=lambda each: each.node))
        self._memberships[-1] = membership(last.at_s, last.generation, members)

    def _regrouped(self, event: events.Regrouped, at_s: float) -> None:
        told = {each.node for each in self._outages if each.to_s is None}
        self._outages += [Outage(node, at_s - event.seconds) for node in event.lost if node not in told]
        for each in self._outages:
            each.to_s = at_s if each.to_s is None else each.to_s
        last = self._memberships[-1] if self._memberships else None
        if (
            last is not None and event.lost and last.at_s < at_s - event.seconds
        ):  # nobody started: others take its place
            members = tuple(each for each in last.members if each.node not in event.lost)
            self._memberships.append(membership(at_s, event.generation, members))
        self._undo(event.step)

    def _undo(self, step: int) -> None:
        self._points.keep_before(step)
        kept = [each for each in self._tests if each.step <= step]
        self._tests_from = min(self._tests_from, len(kept))
        self._tests = kept

    # -- the same numbers as --json -------------------------------------------------------------------------------------

    def _summarise(self) -> None:
        """Now and then while it goes on, and once when it has ended."""
        if self._behind or self._started is None or (not self._news_waiting and self._summary is not None):
            return
        started = time.monotonic()
        ended = self._ended is not None
        if started < self._summary_due and not ended:
            return
        parts = self._fold.parts()
        try:
            self._summary = of_parts(parts, str(self.path))
        except UsageError:
            self._summary = None
        self._summary_new = True
        took = time.monotonic() - started
        self._summary_due = time.monotonic() + max(SUMMARY_PAUSE_S, took / SUMMARY_SHARE)

    # -- news out -------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """waiting, reading, running, healing, cut off, or how it ended."""
        if self._behind:
            return "reading"
        if self._started is None:
            return "waiting"
        if self._ended is not None:
            return self._ended.outcome
        if not self._process_lives():
            return "cut off"
        return "healing" if any(each.to_s is None for each in self._outages) else "running"

    @property
    def _now(self) -> Now | None:
        if self._newest is None:
            return None
        done, at_s = self._newest
        return Now(at_s, done.step + 1, done.epoch + 1, done.loss, done.lr, done.unprotected)

    @property
    def over(self) -> bool:
        """Nobody is there who could be asked for something."""
        return self._ended is not None or (self._started is not None and not self._process_lives())

    def _process_lives(self) -> bool:
        try:
            holder = int((self.path / "lock").read_text().strip() or 0)
        except (OSError, ValueError):
            return True  # nobody can tell
        return holder == 0 or psutil.pid_exists(holder)

    def news(self) -> News | None:
        """What is new since this was asked last; None: nothing."""
        status = self.status
        if not self._news_waiting and not self._summary_new and status == self._status_told:
            return None
        made = self._made(status, whole=self._anew)
        self._status_told = status
        self._points.changed_from, self._frames.changed_from = len(self._points.rows), len(self._frames.frames)
        self._tests_from, self._log.changed_from = len(self._tests), len(self._log.entries)
        self._news_waiting = self._summary_new = self._anew = False
        return made

    def everything(self) -> News:
        """For one who comes now."""
        return self._made(self.status, whole=True)

    def _made(self, status: str, whole: bool) -> News:
        started, points, frames = self._started, self._points, self._frames
        since = (
            [0] * 4 if whole else [points.changed_from, frames.changed_from, self._tests_from, self._log.changed_from]
        )
        training = started.config.get("training", {}) if started is not None else {}
        written_by = "" if started is None else started.version
        frame_rows = frames.rows(since[1])  # before `kinds`, which they name
        return News(
            run=self.number, name=self.path.name or str(self.path), status=status, whole=whole,
            read=self.follower.read / self.follower.size if self._behind else 1.0,
            damaged=self.follower.damaged, unknown=self.follower.unknown, left_out=self._log.left_out,
            other_version="" if written_by == __version__ else written_by,
            total_steps=started.facts.get("total_steps") or training.get("steps") if started is not None else None,
            epochs=training.get("epochs"), began=started.wall_clock if started is not None else "", now=self._now,
            summary=self._summary if whole or self._summary_new else None, kinds=list(frames.kinds), frame_s=frames.frame_s,
            memberships=self._memberships, outages=self._outages,
            detailed=sorted(self.follower.detailed)[-MOST_TOLD_STEPS:],
            points=More(since[0], [each.row for each in points.rows[since[0] :]]),
            frames=More(since[1], frame_rows),
            tests=More(since[2], self._tests[since[2] :]),
            log=More(since[3], self._log.entries[since[3] :]),
        )  # fmt: skip
