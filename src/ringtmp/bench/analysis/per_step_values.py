"""What a record says, a value per step, ready for an interval: seconds, idleness, bytes, joules. Pure.

The first `warm_up` steps count for nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ringtmp.bench.measuring.run_record import Record, Track
from ringtmp.metrics.energy import Load


def step_s(record: Record, warm_up: int) -> list[float]:
    """In the described devices' time, where they were slowed."""
    return [took * record.scale for took in record.took_s[warm_up:]]


def sample_times(record: Record, warm_up: int) -> list[tuple[float, float]]:
    """(seconds, samples): all seconds over all samples, however long a step is."""
    return list(zip(step_s(record, warm_up), map(float, record.samples[warm_up:]), strict=True))


def idle_times(record: Record, warm_up: int) -> list[tuple[float, float]]:
    """(idle, whole) seconds of all workers: a share is idle time over training time, so a long step counts for more."""
    found = []
    for step in range(warm_up, len(record.steps)):
        idle = sum(track.idle_s[step] for track in record.workers)
        whole = idle + sum(track.busy_s[step] for track in record.workers)
        if whole > 0:
            found.append((idle, whole))
    return found


def sent_bytes(record: Record, warm_up: int) -> list[float]:
    return [float(sum(track.sent_bytes[step] for track in record.tracks)) for step in range(warm_up, len(record.steps))]


def busiest_step_bytes(record: Record, warm_up: int) -> list[float]:
    """In the fuller direction of the fullest link."""
    return [
        float(max(max(track.sent_bytes[step], track.received_bytes[step]) for track in record.tracks))
        for step in range(warm_up, len(record.steps))
    ]


def busiest_bytes(record: Record, warm_up: int) -> float:
    """Per step, in the fuller direction of the fullest link."""
    steps = max(1, len(record.steps) - warm_up)
    return max(
        max(sum(track.sent_bytes[warm_up:]), sum(track.received_bytes[warm_up:])) / steps for track in record.tracks
    )


def step_joules(record: Record, warm_up: int) -> list[float]:
    """All nodes, by the model: idle watts for as long as the step takes, more while a node is busy, and the bytes. Empty
    where the watts of a device are not known."""
    if not modelled(record):
        return []
    steps = range(warm_up, len(record.steps))
    shares = [_believed(record, track, steps) for track in record.tracks]
    return [
        sum(_load(record, track, [step], share).joules for track, share in zip(record.tracks, shares, strict=True))
        for step in steps
    ]


def run_loads(record: Record, warm_up: int, stop: int | None = None) -> list[Load]:
    """What the model is applied to: all steps that count together, those before `stop`, a node each."""
    return [node_load(record, track, warm_up, stop) for track in record.tracks]


def node_load(record: Record, track: Track, warm_up: int, stop: int | None = None) -> Load:
    steps = range(len(record.steps))[warm_up:stop]
    return _load(record, track, steps, _believed(record, track, steps))


def modelled(record: Record) -> bool:
    return all(track.power is not None for track in record.tracks)


def _believed(record: Record, track: Track, steps: Sequence[int]) -> float:
    """Of a node's busy seconds. Its record of a step may reach beyond the master's, and where steps overlap it is of another
    time altogether; over all of them it was busy for no longer than there was time."""
    busy, there = sum(track.busy_s[step] for step in steps), sum(record.took_s[step] for step in steps)
    return min(1.0, there / busy) if busy else 1.0


def _load(record: Record, track: Track, steps: Sequence[int], believed: float) -> Load:
    assert track.power is not None
    busy = believed * sum(track.busy_s[step] for step in steps)
    moved = sum(track.sent_bytes[step] + track.received_bytes[step] for step in steps)
    seconds = sum(record.took_s[step] for step in steps)
    return Load(track.power.watts, seconds * record.scale, busy * record.scale, float(moved), track.power.share)


def reached(loss: Sequence[float], target: float, window: int) -> int | None:
    """Index of the first step whose loss, averaged over the last `window` steps, is at most `target`; None: never."""
    for index in range(window - 1, len(loss)):
        mean = sum(loss[index - window + 1 : index + 1]) / window
        if math.isfinite(mean) and mean <= target:
            return index
    return None
