"""A run's numbers in files that every tool reads: CSV, a row per step, and JSON lines, an object per thing that happens."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import IO, Any

from ringtmp.errors import UsageError
from ringtmp.metrics.events import Evaluated, Regrouped, RunEnded, RunStarted, StepDone
from ringtmp.run.what_to_train import Watcher
from ringtmp.watchers.values_to_log import NUMBERS, forgiven, step_numbers, test_numbers

#: Steps and epochs are counted from 1, as in `Result.history`.
COLUMNS = ("run", "step", "epoch", *NUMBERS)


class CSVWatcher(Watcher):
    """A row per step, the values of a test in the row of the step it followed.

    Rows are added to a file that is there already: a resumed run goes on in its file, and several runs may share one; `run`
    is the name of the run's directory. A step that is done again after a loss has two rows, of which the last counts.
    """

    only_logs = True

    def __init__(self, path: str | Path) -> None:
        self.where, self.failed = f"the CSV file {path}", False
        header = _first_line(Path(path))
        if header is not None and header != ",".join(COLUMNS):
            raise UsageError(f"{path} is there already and has other columns: remove it, or choose another name")
        self._file = _opened(Path(path))
        self._writer = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        if header is None:
            self._writer.writeheader()
            self._file.flush()
        self._run = ""
        self._row: dict[str, Any] = {}

    def started(self, run_dir: Path, event: RunStarted) -> None:
        self._run = run_dir.resolve().name

    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        self._write()
        self._row = {"run": self._run, "step": done, "epoch": event.epoch + 1, **step_numbers(event, idle)}

    def evaluated(self, event: Evaluated) -> None:
        if self._row.get("step") == event.step:
            self._row.update(test_numbers(event))
        self._write()

    def recovered(self, event: Regrouped) -> None:
        self._write()

    @forgiven
    def ended(self, event: RunEnded) -> None:
        self._write()
        self._file.close()

    @forgiven
    def _write(self) -> None:
        row, self._row = self._row, {}
        if row:
            self._writer.writerow(row)
            self._file.flush()


class JSONLinesWatcher(Watcher):
    """An object per line: `event` is start, step, test, recovery, warning or end. Lines are added to a file that is there.

    `file` may also be open for text already, such as `sys.stdout`; it is flushed and not closed.
    """

    only_logs = True

    def __init__(self, file: str | Path | IO[str]) -> None:
        given = isinstance(file, io.TextIOBase) or hasattr(file, "write")
        self.where, self.failed = f"the JSON lines file {getattr(file, 'name', file)}", False
        self._closes = not given
        self._file: IO[str] = file if given else _opened(Path(file))  # type: ignore[assignment, arg-type]
        self._epoch = 1

    def started(self, run_dir: Path, event: RunStarted) -> None:
        self._write(
            "start", run=str(run_dir), first_step=event.first_step, version=event.version, settings=event.config
        )

    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        self._epoch = event.epoch + 1
        self._write("step", step=done, epoch=self._epoch, **step_numbers(event, idle))

    def evaluated(self, event: Evaluated) -> None:
        self._write("test", step=event.step, epoch=self._epoch, samples=event.samples, **test_numbers(event))

    def recovered(self, event: Regrouped) -> None:
        self._write(
            "recovery", step=event.step, nodes=event.nodes, lost=event.lost, reason=event.reason, seconds=event.seconds,
            repeated=event.repeated,
        )  # fmt: skip

    def warn(self, text: str) -> None:
        self._write("warning", text=text)

    @forgiven
    def ended(self, event: RunEnded) -> None:
        self._write(
            "end", step=event.step, outcome=event.outcome, weights_sha256=event.weights_sha256, error=event.error
        )
        if self._closes:
            self._file.close()

    @forgiven
    def _write(self, event: str, /, **what: Any) -> None:
        # Python's own module writes a loss that is not a number as NaN, which no JSON has.
        finite = {name: None if value != value or value in (_HUGE, -_HUGE) else value for name, value in what.items()}
        self._file.write(json.dumps({"event": event, **finite}) + "\n")
        self._file.flush()


_HUGE = float("inf")


def _opened(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _first_line(path: Path) -> str | None:
    """None where there is none yet."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().rstrip("\r\n") or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}, to which rows would be added: {error}") from error
