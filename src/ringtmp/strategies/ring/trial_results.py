"""What the trials have found, as a plan wants it: devices with pace, memory and line, and paths that are not as those say.

Pure. A device hangs on the network by one line, known from the master's end. Where two devices reach each other clearly
better than that (both are far from the master), their lines are taken to be as good as that, and what is slower is the path
to the master; where they reach each other clearly worse, the path between them has a figure of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import median_low

import msgspec

from ringtmp.plan.devices import CURVE_BYTE_CPU_S, NETWORK_MESSAGE_CPU_S, Device, Link, Path, Paths, quota_of
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.plan.route import MASTER
from ringtmp.strategies.ring.link_trials import Line, Pair
from ringtmp.wire.messages import Timed

#: Devices with the same quota that differ by no more than this are taken to be alike: a plan that believes in what was
#: noise gives the lucky one too much to do.
ALIKE = 0.12
#: Less than this share of a rate is clearly less. Beyond this rate it is the processors of the two that are measured, and what
#: they do is counted as their work.
CLEARLY_LESS = 0.6
ENOUGH_BYTES_PER_S = 4e7
#: Two that do not hear each other are planned with this: next to each other only where it cannot be helped.
SILENT_BYTES_PER_S = 1e5
#: Latencies that differ by less than this and half of what is expected are the same.
SAME_S = 1e-3


@dataclass(frozen=True)
class Seen:
    """By number of node; not every line may have been tried."""

    told: Mapping[int, Timed]  # on the wall, without a model
    lines: Mapping[int, Line]  # of the master
    pairs: Mapping[Pair, Line | None]  # between others; None: they do not hear each other


def doubtful(lines: Mapping[int, Line], pairs: Mapping[Pair, Line | None]) -> list[Pair]:
    """Those that were not heard of, or are clearly slower than the lines of the two to the master promise."""
    found = []
    for (a, b), line in pairs.items():
        if line is None:
            found.append((a, b))
        elif a in lines and b in lines:
            there = min(lines[a].up_bytes_per_s, lines[b].down_bytes_per_s)
            back = min(lines[b].up_bytes_per_s, lines[a].down_bytes_per_s)
            if _less(line.down_bytes_per_s, there) or _less(line.up_bytes_per_s, back):
                found.append((a, b))
    return found


def settled(
    lines: Mapping[int, Line], once: Mapping[Pair, Line | None], again: Mapping[Pair, Line | None]
) -> dict[Pair, Line | None]:
    """The better of two tries. One that looked slow and had no second says nothing; None: nothing was ever heard."""
    doubted = set(doubtful(lines, once))
    found: dict[Pair, Line | None] = {}
    for pair, first in once.items():
        second = again.get(pair)
        if first is not None and second is not None:
            found[pair] = _better(first, second)
        elif first is None or pair not in doubted or pair in again:
            found[pair] = first or second
    return found


def _better(one: Line, other: Line) -> Line:
    return Line(
        max(one.down_bytes_per_s, other.down_bytes_per_s),
        max(one.up_bytes_per_s, other.up_bytes_per_s),
        min(one.latency_s, other.latency_s),
    )


def described(
    devices: Sequence[Device], numbers: Sequence[int], seen: Seen, profiled_s: float, threads: int
) -> tuple[tuple[Device, ...], Paths]:
    """Devices with the pace and the lines that were found, and paths between them that differ from those lines.
    `profiled_s`: processor time of the sample, as costs have it."""
    found = []
    paces_s = _alike([seen.told[node] for node in numbers])
    ends = _ends(numbers, seen.lines)
    raised = _raised(ends, seen.pairs)
    for device, node, pace_s in zip(devices, numbers, paces_s, strict=True):
        end, told = raised[node], seen.told[node]
        quota = quota_of(told.cores, told.period_s, threads)
        speed = profiled_s / pace_s / (quota.share if quota is not None else 1.0)
        # Work of the node itself around its layers takes as much longer as the layers do.
        link = Link(
            end.up_bytes_per_s,
            end.down_bytes_per_s,
            end.latency_s,
            NETWORK_MESSAGE_CPU_S / speed,
            CURVE_BYTE_CPU_S / speed,
        )
        # Library code that processes share counts as taken, and so as memory there is: a cap does not count it.
        extra, memory = told.rss_bytes - PROCESS_BYTES, told.memory_bytes
        found.append(
            replace(device, speed=speed, quota=quota, link=link, extra_bytes=extra, memory_bytes=memory)
        )  # fmt: skip
    names = {node: device.name for node, device in zip(numbers, devices, strict=True)}
    paths = _paths(ends, raised, seen.pairs)
    return tuple(found), {(names[a], names[b]): path for (a, b), path in paths.items()}


def _ends(numbers: Sequence[int], lines: Mapping[int, Line]) -> dict[int, Line]:
    """Every device's own end. A latency is that of two ends; the master's is taken to be half of the shortest. A line that
    was not tried is taken to be as the slowest that was."""
    own_s = min((line.latency_s for line in lines.values()), default=0.0) / 2
    slowest = min(lines.values(), key=lambda line: line.up_bytes_per_s, default=Line(math.inf, math.inf, 0.0))
    # The master's own line carries at least what the fastest of the others does.
    fastest = max((max(line.up_bytes_per_s, line.down_bytes_per_s) for line in lines.values()), default=math.inf)
    ends = {}
    for node in numbers:
        line = lines.get(node, slowest)
        ends[node] = replace(line, latency_s=max(line.latency_s - own_s, 0.0))
    return ends | {MASTER: Line(fastest, fastest, own_s)}


def _raised(ends: Mapping[int, Line], pairs: Mapping[Pair, Line | None]) -> dict[int, Line]:
    """Ends that carry clearly more between two devices than to and from the master."""
    found = dict(ends)
    for source, target, rate, _ in _ways({pair: line for pair, line in pairs.items() if line is not None}):
        if _less(ends[source].up_bytes_per_s, rate):
            up = max(found[source].up_bytes_per_s, rate)
            found[source] = replace(found[source], up_bytes_per_s=up)
        if _less(ends[target].down_bytes_per_s, rate):
            down = max(found[target].down_bytes_per_s, rate)
            found[target] = replace(found[target], down_bytes_per_s=down)
    return found


def _paths(ends: Mapping[int, Line], raised: Mapping[int, Line], pairs: Mapping[Pair, Line | None]) -> dict[Pair, Path]:
    found = {}
    for node, end in ends.items():
        if raised[node] != end:
            latency_s = end.latency_s + ends[MASTER].latency_s
            found[MASTER, node] = Path(end.down_bytes_per_s, latency_s)
            found[node, MASTER] = Path(end.up_bytes_per_s, latency_s)
    for source, target in permutations(ends, 2):
        apart = MASTER not in (source, target) and (source, target) not in pairs and (target, source) not in pairs
        if apart and (raised[source] != ends[source] or raised[target] != ends[target]):
            rate = min(ends[source].up_bytes_per_s, ends[target].down_bytes_per_s)  # nobody knows better
            found[source, target] = Path(rate, ends[source].latency_s + ends[target].latency_s, tried=False)
    for source, target, rate, heard_s in _ways(pairs):
        slow = _less(rate, min(raised[source].up_bytes_per_s, raised[target].down_bytes_per_s))
        usual_s = ends[source].latency_s + ends[target].latency_s
        takes_s = heard_s if heard_s is not None and abs(heard_s - usual_s) > SAME_S + usual_s / 2 else usual_s
        if slow or takes_s != usual_s:
            found[source, target] = Path(rate if slow else math.inf, takes_s)
    return found


def _ways(pairs: Mapping[Pair, Line | None]) -> list[tuple[int, int, float, float | None]]:
    """(from, to, bytes per second, latency if known), both ways of every pair."""
    found: list[tuple[int, int, float, float | None]] = []
    for (a, b), line in pairs.items():
        if line is None:
            found += [(a, b, SILENT_BYTES_PER_S, None), (b, a, SILENT_BYTES_PER_S, None)]
        else:
            found += [(a, b, line.down_bytes_per_s, line.latency_s), (b, a, line.up_bytes_per_s, line.latency_s)]
    return found


def _less(rate: float, other: float) -> bool:
    return min(rate, ENOUGH_BYTES_PER_S) < CLEARLY_LESS * min(other, ENOUGH_BYTES_PER_S)


def uneven(told: Collection[Timed]) -> bool:
    """Whether a device looks faster or slower than others of its kind: that may be so, or a moment's noise."""
    return any(pace_s != middle_s for pace_s, middle_s in _paces(told))


def better_told(once: Mapping[int, Timed], again: Mapping[int, Timed]) -> dict[int, Timed]:
    """The faster of two runs: noise only ever takes time. Memory is as it was before both."""
    return {
        node: msgspec.structs.replace(each, seconds=min(each.seconds, again[node].seconds))
        for node, each in once.items()
    }


def _alike(told: Sequence[Timed]) -> list[float]:
    """Seconds of a run on each device; those of one kind that are close to its middle have the middle."""
    return [pace_s for pace_s, _ in _paces(told)]


def _paces(told: Collection[Timed]) -> list[tuple[float, float]]:
    """Of each device, what it is taken to need, and the middle of its kind."""
    found = []
    for each in told:
        kind = [other.seconds for other in told if (other.cores, other.period_s) == (each.cores, each.period_s)]
        middle = median_low(kind)  # one that was measured, so that two that differ are not both moved
        found.append((middle if abs(each.seconds - middle) <= ALIKE * middle else each.seconds, middle))
    return found
