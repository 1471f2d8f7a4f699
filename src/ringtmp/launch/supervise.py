"""Starts a master, and starts it again when it was killed: a small process that outlives it. No torch import.

What a run is lies in its directory, so a master that is started again goes on from there; how far it had come is in the run's
events. A master that ends with an exit code of its own has said its last word: an error would come again. One that a signal
ended has not, unless the signal came through here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

import msgspec

from ringtmp.errors import Interrupted, NodeLost, UsageError
from ringtmp.launch.start_process import by_whom, signal_name
from ringtmp.metrics.events import NodeStarted, RunStarted, StepDone, Warned, decoded, encode
from ringtmp.system.end_with_parent import tied
from ringtmp.system.files import write_atomic
from ringtmp.system.signals import WISHES, on_signals

RESTARTS = 10
#: In a master's environment: the process that starts it again.
SUPERVISED = "RINGTMP_SUPERVISED_BY"
#: And of a master that takes another's place in its run: what became of that one, for the record.
RESTARTED = "RINGTMP_RESTARTED_AFTER"
#: So often in a row a master may be killed before its first step: while it reads the model, or waits for its nodes.
MOST_WITHOUT_STEP = 3
#: What a killed master leaves behind ends within this: its processes, and whoever listens on its ports.
PAUSE_S = 1.5
LOOK_EVERY_S = 0.2
#: One look counts for no more silence than this.
LONGEST_LOOK_S = 1.0
_TELLING = (b'{"type":"run"', b'{"type":"node"', b'{"type":"step"')
_SHOW_CURSOR = "\x1b[?25h"


def command() -> tuple[str, ...]:
    """That finds the user's modules where this process does: in the working folder only if that is on its path."""
    path = () if sys.path[:1] in ([""], [os.getcwd()]) else ("-P",)
    return (sys.executable, *path, "-m", "ringtmp", "train")


class Death(NamedTuple):
    """`steps` that were done when a signal ended the master; None: it had not come to a step since it was started. Where it was
    `silent_s` without a word, the signal came from here."""

    number: int
    steps: int | None
    silent_s: float = 0.0

    def __str__(self) -> str:
        when = "before its first step" if self.steps is None else f"after step {self.steps}"
        if self.silent_s:
            return f"the master was ended {when}, because it had written no event for {self.silent_s:.0f} s"
        return f"the master was killed by {signal_name(self.number)} {when}{by_whom(self.number)}"


def why_not_again(deaths: Sequence[Death], restarts: int) -> str | None:
    """Why the master is not started once more. The newest death comes last."""
    *before, last = deaths
    if last.steps is not None and any(each.steps == last.steps for each in before):
        return "for the second time in this very step: what kills it comes back with the step"
    newest = deaths[-MOST_WITHOUT_STEP:]
    if len(newest) == MOST_WITHOUT_STEP and all(each.steps is None for each in newest):
        return f"{MOST_WITHOUT_STEP} times in a row without a step: what kills it comes back with every start"
    if len(deaths) > restarts:
        return f"and --restarts {restarts} allows no more"
    return None


class Restarted(msgspec.Struct, frozen=True):
    """What became of the master before this one."""

    reason: str
    at: float  # when it was noticed, by the machine's monotonic clock
    steps: int | None  # that were done then


def restarted() -> Restarted | None:
    """Of the master whose place this process takes; None: of nobody's. Told once."""
    try:
        return msgspec.json.decode(os.environ.pop(RESTARTED, ""), type=Restarted)
    except msgspec.DecodeError:
        return None


class _Kept(msgspec.Struct, frozen=True):
    """What was asked for, beside the run: the same command later, after a reboot, goes on with the run."""

    words: tuple[str, ...]


class Begun(NamedTuple):
    """How a master is started: with which words for a run that is not there yet, and for one that is."""

    words: tuple[str, ...]  # by which the same wish is known again
    first: tuple[str, ...]
    again: tuple[str, ...]


class Silence:
    """For how long nothing has happened to a master's events, which begin at this byte: nothing at all is no silence, as it may
    wait for its nodes. Time during which this process did not look, since it was stopped as well, does not count."""

    def __init__(self, log: Path, begins: int) -> None:
        self._log, self._begins = log, begins
        self._last = 0
        self._looked: float | None = None
        self._seconds = 0.0

    def seconds(self, now: float) -> float:
        looked, self._looked = self._looked or now, now
        try:
            found = self._log.stat()
        except OSError:
            return 0.0
        if found.st_size <= self._begins or found.st_mtime_ns != self._last:
            self._last, self._seconds = found.st_mtime_ns, 0.0
        else:
            self._seconds += min(now - looked, LONGEST_LOOK_S)
        return self._seconds


class Supervisor:
    def __init__(
        self, run: Path, begun: Begun, restarts: int, say: Callable[[str], None], command: Sequence[str],
        *, silent_after_s: float | None = None,
    ) -> None:  # fmt: skip
        """`silent_after_s`: a master whose run has begun and that writes no event for so long has hung; None: none has."""
        self._silent_after_s = silent_after_s
        self._silent_s = 0.0  # when the last master was ended for it
        self._died_at = 0.0
        self._command = command
        self._run = run
        self._begun = begun
        self._restarts = restarts
        self._say = say
        self._folder_is_ours = not run.exists()
        self._run_is_ours = not self._there()  # it is begun here, so that the same command may go on with it
        self._child: subprocess.Popen[bytes] | None = None
        self._wished: int | None = None  # a signal that came through here
        self._early: int | None = None  # and before there was a master to pass it on to
        self._leaving = threading.Event()
        self._deaths: list[Death] = []

    def to_the_end(self) -> int:
        """The master's exit code. NodeLost: it was killed once too often; Interrupted: it did not save any more."""
        with on_signals(self._pass_on):
            while True:
                code = self._one_life()
                if code >= 0:
                    return code
                if sys.stderr.isatty():
                    print(_SHOW_CURSOR, end="", file=sys.stderr, flush=True)
                self._go_on_after(-code)
                self._leaving.wait(PAUSE_S)
                if self._wished is not None:
                    raise Interrupted(f"interrupted before the master was started again{self._how_to_go_on()}")

    # -- one master ---------------------------------------------------------------------------------------------------

    def _one_life(self) -> int:
        again = bool(self._deaths) and self._there()
        log_bytes = self._log_bytes()
        with contextlib.ExitStack() as stack:
            # Results come once, from the master that came to its end: what a killed one wrote of them is not shown.
            results = None if sys.stdout.isatty() else stack.enter_context(tempfile.TemporaryFile())
            self._silent_s = 0.0
            self._child = child = self._started(self._begun.again if again else self._begun.first, results, again)
            if self._early is not None:
                child.send_signal(self._early)
            code = self._ended(child, log_bytes)
            self._child, self._died_at = None, time.monotonic()
            if code >= 0 and results is not None:
                results.seek(0)
                sys.stdout.write(results.read().decode(errors="replace"))
                sys.stdout.flush()
        if code < 0:
            self._deaths.append(Death(-code, steps_done(self._log, log_bytes), self._silent_s))
        return code

    def _started(self, words: Sequence[str], results: IO[bytes] | None, again: bool) -> subprocess.Popen[bytes]:
        """In a session of its own: Ctrl-C comes here, and goes on from here once."""
        settings = {name: value for name, value in os.environ.items() if not name.startswith("RINGTMP_TRAIN_")}
        if again:
            last = self._deaths[-1]
            settings[RESTARTED] = msgspec.json.encode(Restarted(str(last), self._died_at, last.steps)).decode()
        try:
            return subprocess.Popen(
                [*self._command, *words], stdin=subprocess.DEVNULL, stdout=results,
                env=tied({**settings, SUPERVISED: str(os.getpid())}), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"cannot start the master: {error.strerror}") from error

    def _ended(self, child: subprocess.Popen[bytes], log_bytes: int) -> int:
        while self._run_is_ours and not self._there():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(LOOK_EVERY_S)
        if self._run_is_ours:
            with contextlib.suppress(OSError):  # on a full disk: then the same command is refused, and --resume goes on
                write_atomic(_kept(self._run), msgspec.json.encode(_Kept(self._begun.words)), 0o600)
        silence = Silence(self._log, log_bytes)
        while self._silent_after_s is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(LOOK_EVERY_S)
            if (silent_s := silence.seconds(time.monotonic())) > self._silent_after_s:
                self._silent_s = silent_s
                child.kill()  # a stopped process hears nothing else
                break
        return child.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._wished = number
        self._leaving.set()
        if self._child is not None:
            self._child.send_signal(number)  # nothing, where it has ended
        else:
            self._early = number

    # -- between two ----------------------------------------------------------------------------------------------------

    def _go_on_after(self, number: int) -> None:
        """Says what happened. Raises if the master is not to be started again."""
        death = self._deaths[-1]
        if self._wished is not None:
            what = "interrupted before it could save" if number in WISHES else f"interrupted, and then {death}"
            raise Interrupted(f"{what}{self._how_to_go_on()}")
        if (why := why_not_again(self._deaths, self._restarts)) is not None:
            text = f"{death}, {why}"
            self._note(text)
            raise NodeLost(f"{text}{self._how_to_go_on()}", 0)
        text = f"{death}; starting it again (restart {len(self._deaths)} of at most {self._restarts})"
        self._say(text)
        self._note(text)
        if not self._there() and self._folder_is_ours:
            shutil.rmtree(self._run, ignore_errors=True)

    def _how_to_go_on(self) -> str:
        return f": go on with ringtmp train --resume {self._run}" if self._there() else ""

    def _note(self, text: str) -> None:
        """Among the run's events, where the next master would have to guess it."""
        with contextlib.suppress(OSError), self._log.open("r+b") as log:
            begun = log.seek(0, os.SEEK_END)
            log.seek(max(0, begun - 1))
            torn = log.read() not in (b"", b"\n")
            log.write(b"\n" * torn + encode(Warned(time.monotonic(), text)) + b"\n")

    def _there(self) -> bool:
        """The run has begun, and can be gone on with."""
        return (self._run / "config.json").exists()

    @property
    def _log(self) -> Path:
        return self._run / "events.jsonl"

    def _log_bytes(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0


def goes_on(run: Path, words: Sequence[str]) -> bool:
    """Whether a run lies there that was begun by this very command."""
    try:
        kept = msgspec.json.decode(_kept(run).read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return kept.words == tuple(words) and (run / "config.json").exists()


def steps_done(log: Path, begins: int) -> int | None:
    """By the events a master wrote, which begin at this byte: the steps that were done when it wrote the last. None: it never
    came to a step."""
    first, laid_out, done = 0, False, None
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(begins)
        for event in decoded(line for line in file if line.startswith(_TELLING)):
            if isinstance(event, RunStarted):
                first = event.first_step
            elif isinstance(event, NodeStarted):
                laid_out = True
            elif isinstance(event, StepDone):
                done = event.step + 1
    return done if done is not None else first if laid_out else None


def _kept(run: Path) -> Path:
    return run / "supervised.json"
