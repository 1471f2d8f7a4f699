"""One run as a page shows it: its events, followed and folded, as news that browsers can add to what they have.

Totals are the summary that `--json` prints, made by the same fold from the same events; curves and what nodes do over time
are decimated. Reads the run's directory and nothing else.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from ringtmp import __version__
from ringtmp.dashboard.follow_file import Follower
from ringtmp.dashboard.kept_view import KEEP_EVERY_BYTES, keep, kept
from ringtmp.dashboard.messages_to_browser import More, News, Now
from ringtmp.dashboard.seen_so_far import Seen
from ringtmp.errors import UsageError
from ringtmp.metrics.summary import Summary, of_parts

#: A loss that undoes more than was kept apart has the file read again, and so many times more kept.
MORE_RECENT = 16
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
        self._opened = False
        self._begin(Seen())

    def _begin(self, seen: Seen) -> None:
        self._seen = seen
        self._kept_bytes = self.follower.read
        self._summary: Summary | None = None
        self._summary_due = 0.0
        self._summary_new = self._behind = self._anew = False
        self._status_told = ""
        self._news_waiting = True

    # -- events in ----------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Take what is new. True: there is more than fits into one turn."""
        if not self._opened:
            self._opened = True
            self._open()
        if self.follower.replaced():
            self._begin(Seen())
            self._anew = True
        limit = time.monotonic() + TURN_S
        before = self.follower.read
        while time.monotonic() < limit:
            start = self.follower.read
            self._seen.take_all(self.follower.more())
            if self._seen.fold.undone_too_far:
                self._read_all_again()
                return True
            if self.follower.read == start:
                break
        self._behind = self.follower.read < self.follower.size
        if self.follower.read != before:
            self._news_waiting = True
        self._summarise()
        self._keep()
        return self._behind

    def _open(self) -> None:
        found = kept(self.path)
        if found is not None:
            self.follower.go_on_from(found[0])
            self._begin(found[1])
            self._anew = True

    def _keep(self) -> None:
        """What was read, for the next page: now and then while a long run goes on, and when it has ended."""
        new_bytes = self.follower.read - self._kept_bytes
        if self._behind or self.follower.read < KEEP_EVERY_BYTES or not new_bytes:
            return
        if new_bytes >= KEEP_EVERY_BYTES or self._seen.ended is not None:
            self._kept_bytes = self.follower.read  # tried once, whether or not there is room
            keep(self.path, self.follower.mark, self._seen)

    def _read_all_again(self) -> None:
        """With more of what nodes did kept apart: a loss undid more than had been."""
        self.follower.restart()
        self._begin(Seen(recent=self._seen.recent * MORE_RECENT))
        self._anew = True

    # -- the same numbers as --json -------------------------------------------------------------------------------------

    def _summarise(self) -> None:
        """Now and then while it goes on, and once when it has ended."""
        if self._behind or self._seen.started is None or (not self._news_waiting and self._summary is not None):
            return
        started = time.monotonic()
        ended = self._seen.ended is not None
        if started < self._summary_due and not ended:
            return
        parts = self._seen.fold.parts()
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
        if self._seen.started is None:
            return "waiting"
        if self._seen.ended is not None:
            return self._seen.ended.outcome
        if not self._process_lives():
            return "cut off"
        return "healing" if any(each.to_s is None for each in self._seen.outages) else "running"

    @property
    def _now(self) -> Now | None:
        if self._seen.newest is None:
            return None
        done, at_s = self._seen.newest
        return Now(at_s, done.step + 1, done.epoch + 1, done.loss, done.lr, done.unprotected)

    @property
    def over(self) -> bool:
        """Nobody is there who could be asked for something."""
        return self._seen.ended is not None or (self._seen.started is not None and not self._process_lives())

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
        self._seen.told()
        self._news_waiting = self._summary_new = self._anew = False
        return made

    def everything(self) -> News:
        """For one who comes now."""
        return self._made(self.status, whole=True)

    def _made(self, status: str, whole: bool) -> News:
        seen, mark = self._seen, self.follower.mark
        started, points, frames = seen.started, seen.points, seen.frames
        since = [0] * 4 if whole else [points.changed_from, frames.changed_from, seen.tests_from, seen.log.changed_from]
        training = started.config.get("training", {}) if started is not None else {}
        written_by = "" if started is None else started.version
        frame_rows = frames.rows(since[1])  # before `kinds`, which they name
        return News(
            run=self.number, name=self.path.name or str(self.path), status=status, whole=whole,
            read=self.follower.read / self.follower.size if self._behind else 1.0,
            damaged=mark.damaged, unknown=mark.unknown, left_out=seen.log.left_out,
            other_version="" if written_by == __version__ else written_by,
            total_steps=started.facts.get("total_steps") or training.get("steps") if started is not None else None,
            epochs=training.get("epochs"), began=started.wall_clock if started is not None else "", now=self._now,
            summary=self._summary if whole or self._summary_new else None, kinds=list(frames.kinds), frame_s=frames.frame_s,
            memberships=seen.memberships, outages=seen.outages,
            detailed=sorted(mark.detailed)[-MOST_TOLD_STEPS:],
            points=More(since[0], [each.row for each in points.rows[since[0] :]]),
            frames=More(since[1], frame_rows),
            tests=More(since[2], seen.tests[since[2] :]),
            log=More(since[3], seen.log.entries[since[3] :]),
        )  # fmt: skip
