"""What a command left becomes a result: a run directory of `ringtmp train`, a peer's or a runner's one line of JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ringtmp.bench.measuring import run_record
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Result
from ringtmp.errors import RingError
from ringtmp.metrics import events
from ringtmp.metrics.fold_events import parts_of

#: Where a job's command keeps its run, inside its folder.
RUN = "run"
#: `lab exec` puts the device's name before every line.
_LINE = re.compile(r"^(?:[a-z0-9-]+: )?(\{.*\})$", re.MULTILINE)


class PeerSteps(msgspec.Struct, frozen=True):
    """What a peer prints: the moment each step ended, by its own clock, and what the step was."""

    ended_s: tuple[float, ...]
    samples: tuple[int, ...]
    epochs: tuple[int, ...]
    facts: dict[str, Any] = {}


def read(job: Job, out: str, folder: Path) -> Result:
    """Raises RingError when nothing can be counted."""
    said = _LINE.findall(out)
    if not said:
        raise RingError("it printed no line of JSON")
    try:
        if job.output == "told":
            return msgspec.json.decode(said[-1], type=Result)
        if job.output != "peer":
            facts = msgspec.json.decode(said[-1], type=dict[str, Any])
            parts = parts_of(events.read(folder / RUN / "events.jsonl"))
            if not parts or parts[-1].ended is None:
                raise RingError("its event log is incomplete: some events could not be written")
            step_s = step_times(parts[-1].steps, parts[-1].pauses, job.batch_size, job.warm_up)
            # As it will be read from the measurement's file, where every key is text.
            facts["record"] = msgspec.to_builtins(run_record.record(parts[-1]), str_keys=True)
        else:
            peer = msgspec.json.decode(said[-1], type=PeerSteps)
            facts, step_s = peer.facts, step_times(_as_steps(peer), (), job.batch_size, job.warm_up)
    except (msgspec.DecodeError, OSError) as error:
        raise RingError(f"what it left cannot be read: {error}") from error
    if not step_s:
        raise RingError(
            f"no step could be measured: after {job.warm_up} warm-up steps, none follows another step of the same epoch"
        )
    return Result(step_s, facts)


def step_times(
    steps: Sequence[events.StepDone], pauses: Sequence[float], batch_size: int, warm_up: int
) -> tuple[float, ...]:
    """Seconds from the end of one step to the end of the next, so that nothing between them goes uncounted.

    Left out: the first `warm_up` steps, steps of fewer samples, and those that follow one of the run's `pauses`. Where every
    step is an epoch, with whatever ends an epoch behind it, a step takes what it says itself.
    """
    if len(steps) > 1 and len({each.epoch for each in steps}) == len(steps):
        return tuple(each.wall_s for each in steps if each.step >= warm_up and each.wall_s > 0)
    return tuple(
        each.at - before.at
        for before, each in pairwise(steps)
        if each.step >= warm_up
        and each.samples == batch_size
        and each.epoch == before.epoch
        and not any(before.at < at <= each.at for at in pauses)
    )


def _as_steps(peer: PeerSteps) -> list[events.StepDone]:
    moments = zip(peer.ended_s, peer.samples, peer.epochs, strict=True)
    return [
        events.StepDone(at, step, epoch, 0.0, 0.0, samples, 0.0) for step, (at, samples, epoch) in enumerate(moments)
    ]
