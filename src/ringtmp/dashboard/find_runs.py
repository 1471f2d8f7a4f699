"""Which directories are runs that a page can show, and what to say of those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringtmp.errors import UsageError
from ringtmp.metrics import events

MOST_RUNS = 8


def checked_runs(runs: Sequence[Path]) -> list[Path]:
    """UsageError where one is no run, or of a version whose events mean something else."""
    if len(runs) > MOST_RUNS:
        raise UsageError(f"{len(runs)} runs are too many for one page: give at most {MOST_RUNS}")
    for run in runs:
        if run.is_file():
            hint = (
                f": give {run.parent}, the folder it is in"
                if run.name == "events.jsonl"
                else ": give the folder of a run"
            )
            raise UsageError(f"{run} is a file, not a run directory{hint}")
        if not run.is_dir():
            raise UsageError(f"{run} is not a run directory: there is no such folder")
        if not (run / "events.jsonl").is_file():
            inside = sorted(each.parent.name for each in run.glob("*/events.jsonl"))
            hint = f"; the runs in it are {', '.join(inside[-3:])}" if inside else ""
            raise UsageError(f"{run} is not a run directory: it has no events.jsonl{hint}")
        _check_schema(run)
    return list(runs)


def _check_schema(run: Path) -> None:
    first = next((each for each in events.of_run(run) if isinstance(each, events.RunStarted)), None)
    if first is not None and first.schema > events.SCHEMA:
        raise UsageError(
            f"{run} was written by ringtmp {first.version}, whose events (schema {first.schema}) this version cannot read "
            f"(it knows {events.SCHEMA}): watch it with that version"
        )
