"""How many microbatches: few leave the ring empty at both ends of a step, many cost a call and a message each.

Pure. Every number tried gets a plan of its own, with layer costs at its size of microbatch. The step grows to both
sides of the best number, so the search climbs from the usual one and looks two numbers ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ringtmp.errors import DoesNotFit
from ringtmp.plan.choose_schedule import plan_with_schedule
from ringtmp.plan.devices import Device, LayerCost, Paths
from ringtmp.plan.planner import Plan, PlanOptions

MOST = 64
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST)
#: Of numbers whose steps differ by less the smallest is taken: what a simulation leaves out costs per microbatch.
CLOSE = 0.01


def sizes(batch_size: int) -> list[int]:
    """Microbatch sizes to measure, so that every number of microbatches lies between two of them, or near one."""
    found, size = {max(1, batch_size // 2)}, batch_size // 2
    while size > 1 and batch_size // (size // 2) <= MOST:
        size //= 2
        found.add(size)
    return sorted(found)


def microbatch_sizes(batch_sizes: Iterable[int], microbatches: int) -> list[int]:
    """Every size a microbatch may have, in order."""
    sizes = set(batch_sizes)
    parts = {size: min(microbatches, size) for size in sizes}
    return sorted({-(-size // parts[size]) for size in sizes} | {size // parts[size] for size in sizes})


def to_build(batch_sizes: Iterable[int], batch_size: int, microbatches: int, auto: bool) -> tuple[list[int], list[int]]:
    """Sizes a model is built for, and those whose cost is measured. With `auto` the number is not known yet: two samples
    are what a BatchNorm needs, and with one microbatch a batch of any size has them."""
    if not auto:
        found = microbatch_sizes(batch_sizes, microbatches)
        return found, found[-1:]
    measured = sizes(batch_size)
    return [min(2, *batch_sizes), measured[-1]], measured


def best_plan(
    layers: Sequence[LayerCost],
    devices: Sequence[Device],
    options: PlanOptions,
    allowed: Callable[[int], bool],
    paths: Paths | None = None,
) -> Plan:
    """The plan with the shortest step over all allowed numbers of microbatches; `options.microbatches` is where the
    search begins. DoesNotFit where none fits."""
    counts = [each for each in COUNTS if each <= options.batch_size and allowed(each)] or [1]
    if options.ring.pipeline.all_forward_first and options.window is not None:
        counts = [each for each in counts if each <= options.window] or [1]
    made: dict[int, Plan] = {}
    problems: list[DoesNotFit] = []

    def cost(place: int) -> float:
        count = counts[place]
        if count not in made:
            try:
                made[count] = plan_with_schedule(layers, devices, replace(options, microbatches=count), paths)
            except DoesNotFit as problem:
                problems.append(problem)
                return math.inf
        return made[count].cost

    start = min(range(len(counts)), key=lambda place: abs(counts[place] - options.microbatches))
    best, least = start, cost(start)
    for direction in (1, -1):
        place = best
        while 0 <= place + direction < len(counts) and abs(place + direction - best) <= 2:
            place += direction
            if (took := cost(place)) < least:
                best, least = place, took
    if not made:
        raise problems[-1]
    return made[min(count for count, each in made.items() if each.cost <= least * (1 + CLOSE))]
