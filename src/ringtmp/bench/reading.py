"""What a command left becomes a result: a run directory of `ringtmp train`, a peer's or a runner's one line of JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from ringtmp.bench import record
from ringtmp.bench.jobs import Job
from ringtmp.bench.measurements import Result
from ringtmp.errors import RingError
from ringtmp.metrics import events

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
            stream = list(events.read(folder / RUN / "events.jsonl"))
            if not any(isinstance(each, events.RunEnded) for each in stream):
                raise RingError("its events have no end: part of them could not be written")
            step_s = step_times(stream, job.batch_size, job.warm_up)
            # As it will be read from the measurement's file, where every key is text.
            facts["record"] = msgspec.to_builtins(record.record(stream), str_keys=True)
        else:
            peer = msgspec.json.decode(said[-1], type=PeerSteps)
            facts, step_s = peer.facts, step_times(_as_events(peer), job.batch_size, job.warm_up)
    except (msgspec.DecodeError, OSError) as error:
        raise RingError(f"what it left cannot be read: {error}") from error
    if not step_s:
        raise RingError(
            f"none of its steps counts: after {job.warm_up} to warm up, none follows a step of its own epoch"
        )
    return Result(step_s, facts)


def step_times(stream: Iterable[events.Event], batch_size: int, warm_up: int) -> tuple[float, ...]:
    """Seconds from the end of one step to the end of the next, so that nothing between them goes uncounted.

    Left out: the first `warm_up` steps, steps of fewer samples, and those that follow an evaluation or a checkpoint.
    """
    found = []
    last: events.StepDone | None = None
    for event in stream:
        if isinstance(event, events.StepDone):
            if last is not None and event.step >= warm_up and event.samples == batch_size and event.epoch == last.epoch:
                found.append(event.at - last.at)
            last = event
        elif isinstance(event, events.Evaluated | events.CheckpointSaved | events.Regrouped | events.RunStarted):
            last = None
    return tuple(found)


def _as_events(peer: PeerSteps) -> Iterable[events.Event]:
    for step, (at, samples, epoch) in enumerate(zip(peer.ended_s, peer.samples, peer.epochs, strict=True)):
        yield events.StepDone(at, step, epoch, 0.0, 0.0, samples, 0.0)
