"""Exact cuts for the slowest of compute, send and receive: dynamic programmes over (layers, devices).

Pure. Per microbatch a node takes the longest of what it computes, sends and receives; a ring takes the longest of its
nodes. The master holds two runs of layers, so its cost belongs to a pair (front ends at f, tail begins at t), and the
workers between share layers f..t-1:

    best[S][f, t] = min over d in S, m of max(cost of d for f..m-1, best[S - d][m, t])          best[{}][t, t] = 0
    bottleneck(S) = min over f, t of max(master[f, t], best[S][f, t])

S is a multiset of kinds of devices: equal devices are not told apart, so 31 like workers make 32 states, 7 different
ones 128. Runs that exceed a device's memory cost infinity. O(states * kinds * layers**2 * tails): the tails worth
looking at are few, because a master with a long tail is the bottleneck itself; which is checked, and widened if not so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from ringtmp.plan.devices import Device
from ringtmp.plan.layer_costs import CostTable, most_kept
from ringtmp.plan.memory_forecast import PROCESS_BYTES, held
from ringtmp.plan.node_groups import BUCKET_BYTES, by_group, exchange_s
from ringtmp.plan.objective import TIME, Objective
from ringtmp.plan.simulate_pipeline import RingOptions
from ringtmp.plan.sum_tree import SumTree

Matrix = npt.NDArray[np.float64]
Bounds = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Devices by number, the master first, with their cuts; the bottleneck in seconds (or bytes) per microbatch."""

    order: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    bottleneck: float
    groups: tuple[int, ...] = ()  # how many of the workers share each stage, in their order; empty: one each


class Segments:
    """Costs of every run of layers on a device, as matrices over (first, stop). Infinite where it does not fit."""

    def __init__(
        self, table: CostTable, options: RingOptions, process_bytes: float = PROCESS_BYTES, safe: bool = False,
        protect: str = "off", minimise: Objective = TIME,
    ) -> None:  # fmt: skip
        self.table = table
        self.minimise: Objective = minimise  # what a simulated step is judged by
        self.options = options
        self.safe = safe  # count a full window everywhere
        self.process_bytes = process_bytes
        self.protect = protect
        self._cut = np.array(table.cut_bytes)
        self._crossing = np.array(table.crossing_bytes)
        self._crossing[-1] = 0.0  # the tail sends nothing on
        self._compute = np.array(table.forward_s) + np.array(table.backward_s)
        self._compute += np.array(table.update_s) / options.microbatches
        self._weights = np.array(table.weights) + np.array(table.gradients) + np.array(table.optimizer)
        if protect == "memory":  # a node's own snapshots; those it holds depend on its neighbour, and are counted later
            self._weights += 2 * (np.array(table.weights) + np.array(table.optimizer))
        self._stored = np.array(table.stored)
        self._largest = self._running_largest()
        self._cache: dict[tuple[object, ...], Matrix] = {}

    def stage(self, members: Sequence[Device], visit: int, visits: int, widest: int) -> Matrix:
        """[first, stop]: seconds per microbatch of the whole step, for a group that shares a stage; `widest` is the largest
        group. Adding up its gradients, once a step, is spread over the microbatches."""
        if len(members) == widest == 1:
            return self.worker(members[0], visit, visits)
        options = replace(self.options, widest=widest)
        count, total = held(visit, visits, options, self.safe, len(members)), options.microbatches
        key = (tuple(each.kind for each in members), count)
        if key not in self._cache:
            tree = SumTree(options.parts)
            compute, crossing = self._compute[None, :] - self._compute[:, None], _sum(self._cut, self._cut)
            need = self._memory(count) + self.process_bytes + self.table.exchanged(len(members)) * self._exchanged()
            need -= self._kept_by_others(len(members))
            costs = np.zeros_like(need)
            for rank, each in enumerate(members):
                share = len(tree.microbatches(tree.share(rank, len(members)), total)) / total
                np.maximum(costs, self._seconds(each, compute, crossing) * share, out=costs)
                costs[need + each.extra_bytes > each.memory_bytes] = math.inf
            none, much = (exchange_s(members, size) for size in (0.0, BUCKET_BYTES))
            if not options.late:
                costs += ((much - none) / BUCKET_BYTES * self._exchanged() + none) / total
            self._cache[key] = _proper(costs)
        return self._cache[key]

    def _exchanged(self) -> Matrix:
        """[first, stop]: bytes of gradients."""
        gradients = np.array(self.table.gradients)
        each: Matrix = gradients[None, :] - gradients[:, None]
        return each

    def _kept_by_others(self, members: int) -> Matrix:
        """[first, stop]: bytes of optimizer state that other members of a group keep."""
        table, count = self.table, self.table.count
        found = np.zeros((count + 1, count + 1))
        for first in range(count if members > 1 and table.shares_state else 0):
            largest = 0.0
            for stop in range(first + 1, count + 1):
                largest = max(largest, table.largest_state[stop - 1])
                whole = table.optimizer[stop] - table.optimizer[first]
                found[first, stop] = whole - most_kept(whole, largest, members)
        return found

    def worker(self, device: Device, visit: int, visits: int) -> Matrix:
        """[first, stop]: seconds per microbatch."""
        count = held(visit, visits, self.options, self.safe)
        key = (device.kind, count)
        if key not in self._cache:
            costs = self._seconds(device, self._compute[None, :] - self._compute[:, None], _sum(self._cut, self._cut))
            costs[self._memory(count) + self.process_bytes + device.extra_bytes > device.memory_bytes] = math.inf
            self._cache[key] = _proper(costs)
        return self._cache[key]

    def worker_missing(self, device: Device, visit: int, visits: int) -> Matrix:
        """[first, stop]: bytes that are too few."""
        need = self._memory(held(visit, visits, self.options, self.safe)) + self.process_bytes + device.extra_bytes
        return _proper(np.maximum(need - device.memory_bytes, 0.0))

    def master(self, device: Device, visits: int, widest: int = 1) -> Matrix:
        """[end of front, begin of tail]: seconds per microbatch."""
        compute = self._compute[:, None] + self._compute[-1] - self._compute[None, :]
        costs = self._seconds(device, compute, _sum(self._cut, self._cut))
        costs[self._master_memory(visits, widest) + device.extra_bytes > device.memory_bytes] = math.inf
        return self._allowed(costs)

    def master_missing(self, device: Device, visits: int) -> Matrix:
        return self._allowed(np.maximum(self._master_memory(visits) + device.extra_bytes - device.memory_bytes, 0.0))

    def passing_s(self, device: Device) -> Matrix:
        """[first, stop]: one microbatch's way through a worker and over the links behind it, there and back."""
        crossing = 2 * self._cut[None, :] / min(device.link.up_bytes_per_s, device.link.down_bytes_per_s)
        passing: Matrix = (self._compute[None, :] - self._compute[:, None]) / device.pace + crossing
        return passing

    def _seconds(self, device: Device, compute: Matrix, crossing: Matrix) -> Matrix:
        link = device.link
        share = device.pace / device.speed
        # Forward and backward each handle a message at both ends of the run.
        own = (4 * link.message_cpu_s + 2 * crossing * link.byte_cpu_s) / share
        costs: Matrix = compute / device.pace + own
        return np.maximum(costs, crossing / min(link.up_bytes_per_s, link.down_bytes_per_s), out=costs)

    def _memory(self, count: int) -> Matrix:
        each: Matrix = self._weights + self.table.stored_by(count) * self._stored
        total: Matrix = each[None, :] - each[:, None] + (count + 1) * _sum(self._crossing, self._crossing)
        return np.add(total, self._largest, out=total)

    def _master_memory(self, visits: int, widest: int = 1) -> Matrix:
        options = replace(self.options, widest=widest)
        front = self._memory(held(0, visits, options, self.safe))[0]
        tail = self._memory(held(visits - 1, visits, options, self.safe))[:, -1]
        # Both have counted the working space of their largest layer; one of them works at a time.
        overlap = np.minimum(self._largest[0][:, None], self._largest[:, -1][None, :])
        total: Matrix = _sum(front, tail) - overlap + self.process_bytes
        return total

    def _allowed(self, costs: Matrix) -> Matrix:
        """Inputs and labels stay on the master."""
        costs[: self.table.least_front] = math.inf
        costs[:, self.table.count - self.table.least_tail + 1 :] = math.inf
        return _proper(costs)

    def _running_largest(self) -> Matrix:
        count = self.table.count
        each = np.array(self.table.working)
        largest = np.zeros((count + 1, count + 1))
        for first in range(count):
            largest[first, first + 1 :] = np.maximum.accumulate(each[first:])
        return largest


def given_order(segments: Segments, devices: Sequence[Device], groups: tuple[int, ...] = ()) -> Candidate | None:
    """The best cuts for devices in this order, the master first; `groups` as in a Candidate. None where no cuts fit."""
    stages = by_group(groups or (1,) * (len(devices) - 1), devices)
    visits, widest = len(stages) + 1, max(groups, default=1)
    costs = [segments.stage(members, index, visits, widest) for index, members in enumerate(stages) if index]
    found = _in_order(segments.master(devices[0], visits, widest), costs)
    return None if found is None else replace(found, order=tuple(range(len(devices))), groups=groups)


def least_missing(segments: Segments, devices: Sequence[Device]) -> Candidate | None:
    """The cuts that lack the fewest bytes on the device that lacks most. None where there are too few layers."""
    visits = len(devices) + 1
    costs = [segments.worker_missing(device, index, visits) for index, device in enumerate(devices) if index]
    return _in_order(segments.master_missing(devices[0], visits), costs)


def _in_order(master: Matrix, costs: Sequence[Matrix]) -> Candidate | None:
    best: list[Matrix] = []

    def fill(tails: Sequence[int]) -> Matrix:
        best[:] = [_nobody(len(master), tails)]
        for each in reversed(costs):
            best.append(_through(each, best[-1]))
        return best[-1]

    found = _best_pair(master, fill)
    if found is None:
        return None
    front, tail, column, bottleneck = found
    cuts = [front]
    for index, each in enumerate(costs):
        cuts.append(_next_cut(each, best[len(costs) - index - 1][:, column], cuts[-1]))
    assert cuts[-1] == tail
    return Candidate(tuple(range(len(costs) + 1)), _bounds(cuts, len(master) - 1), bottleneck)


def shortest_way(
    segments: Segments, devices: Sequence[Device], cap: float, groups: tuple[int, ...] = ()
) -> Candidate | None:
    """The cuts with the shortest way of one microbatch through the ring, none of them slower than `cap`.

    A step takes about (microbatches - 1) * bottleneck + the way of one microbatch, so with few microbatches on many
    devices the fast ones should hold more than the bottleneck alone would give them. Same recurrence, with a sum.
    """
    stages = by_group(groups or (1,) * (len(devices) - 1), devices)
    visits, count, widest = len(stages) + 1, segments.table.count, max(groups, default=1)
    master = segments.master(devices[0], visits, widest)
    tails = [int(tail) for tail in np.flatnonzero((master <= cap).any(axis=0))]
    if not tails:
        return None
    costs = []
    for index, members in enumerate(stages[1:], start=1):
        passing = np.maximum.reduce([segments.passing_s(each) for each in members])
        costs.append(np.where(segments.stage(members, index, visits, widest) <= cap, passing, math.inf))
    best = [_nobody(count + 1, tails)]
    for each in reversed(costs):
        best.append(_through(each, best[-1], np.add))
    passing = segments.passing_s(devices[0])
    way = passing[0, :, None] + passing[tails, -1][None, :] + best[-1]
    way[~(master[:, tails] <= cap)] = math.inf
    front, column = (int(each) for each in np.unravel_index(int(way.argmin()), way.shape))
    if math.isinf(way[front, column]):
        return None
    cuts = [front]
    for index, each in enumerate(costs):
        rest = best[len(costs) - index - 1][:, column]
        cuts.append(cuts[-1] + 1 + int((each[cuts[-1], cuts[-1] + 1 :] + rest[cuts[-1] + 1 :]).argmin()))
    return Candidate(tuple(range(len(devices))), _bounds(cuts, count), cap, groups)


def states_of(devices: Sequence[Device], named: Collection[str] = ()) -> int:
    """How many multisets of workers there are; those named are of no kind but their own."""
    return math.prod(len(members) + 1 for members in kinds_of(devices, named))


def every_multiset(segments: Segments, devices: Sequence[Device], named: Collection[str] = ()) -> list[Candidate]:
    """For every choice of workers that can hold the model: the best order and cuts, bottleneck first."""
    kinds = kinds_of(devices, named)
    states = sorted(product(*(range(len(members) + 1) for members in kinds)), key=sum)
    rows = segments.table.count + 1
    best: dict[tuple[int, ...], Matrix] = {states[0]: _nobody(rows, range(rows))}
    for state in states[1:]:
        best[state] = np.minimum.reduce(
            [_through(_costs_of(segments, devices[kinds[kind][0]], state), best[_less(state, kind)])
             for kind in _present(state)]
        )  # fmt: skip
    found = []
    for state in states[1:]:
        joint = np.maximum(segments.master(devices[0], sum(state) + 2), best[state])
        front, tail = (int(each) for each in np.unravel_index(int(joint.argmin()), joint.shape))
        if not math.isinf(joint[front, tail]):
            order, cuts = _backtrack(segments, devices, kinds, best, state, front, tail)
            found.append(Candidate(order, _bounds(cuts, segments.table.count), float(joint[front, tail])))
    return sorted(found, key=lambda each: each.bottleneck)


def _backtrack(
    segments: Segments,
    devices: Sequence[Device],
    kinds: list[list[int]],
    best: dict[tuple[int, ...], Matrix],
    state: tuple[int, ...],
    front: int,
    tail: int,
) -> tuple[tuple[int, ...], list[int]]:
    """Who comes next, and where its layers end, from the front to the tail."""
    order, cuts = [0], [front]
    unused = [list(members) for members in kinds]
    while any(state):
        choices = []
        for kind in _present(state):
            costs, rest = _costs_of(segments, devices[kinds[kind][0]], state), best[_less(state, kind)][:, tail]
            cut = _next_cut(costs, rest, cuts[-1])
            here = costs[cuts[-1], cut]
            choices.append((max(here, rest[cut]), here + rest[cut], kind, cut))
        _, _, kind, cut = min(choices)
        order.append(unused[kind].pop(0))
        cuts.append(cut)
        state = _less(state, kind)
    return tuple(order), cuts


def _costs_of(segments: Segments, device: Device, state: tuple[int, ...]) -> Matrix:
    """The first of `state` workers before the tail: its distance from the tail says what it must hold."""
    visits = sum(state) + 2
    return segments.worker(device, 1, visits)


def kinds_of(devices: Sequence[Device], named: Collection[str]) -> list[list[int]]:
    """Workers by number, those together that may stand in for each other."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, device in enumerate(devices[1:], start=1):
        name = device.name if device.name in named else None
        kinds.setdefault((*device.kind, name), []).append(index)
    return list(kinds.values())


def _present(state: tuple[int, ...]) -> list[int]:
    return [kind for kind, count in enumerate(state) if count]


def _less(state: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*state[:kind], state[kind] - 1, *state[kind + 1 :])


def _nobody(rows: int, tails: Sequence[int]) -> Matrix:
    best = np.full((rows, len(tails)), math.inf)
    best[list(tails), range(len(tails))] = 0.0
    return best


def _through(costs: Matrix, best: Matrix, join: np.ufunc = np.maximum) -> Matrix:
    """out[s, t] = min over m > s of join(costs[s, m], best[m, t])."""
    out = np.full_like(best, math.inf)
    for first in range(len(costs) - 1):
        out[first] = join(costs[first, first + 1 :, None], best[first + 1 :]).min(axis=0)
    return out


def _next_cut(costs: Matrix, rest: Matrix, first: int) -> int:
    """The cut behind `first` with the least bottleneck; among equals the one with the least sum."""
    row = costs[first, first + 1 :]
    worst = np.maximum(row, rest[first + 1 :])
    ties = np.flatnonzero(worst <= worst.min() * (1 + 1e-12))
    sums = row[ties] + rest[first + 1 :][ties]
    return int(first + 1 + ties[int(sums.argmin())])


def _best_pair(master: Matrix, fill: Callable[[Sequence[int]], Matrix]) -> tuple[int, int, int, float] | None:
    """Front, tail, the tail's column, and the bottleneck. Begins with the tails cheapest for the master."""
    cheapest = master.min(axis=0)  # by tail, whatever the front
    ranked = [int(tail) for tail in np.argsort(cheapest, kind="stable") if not math.isinf(cheapest[tail])]
    count = 16
    while ranked:
        tails = sorted(ranked[:count])
        joint = np.maximum(master[:, tails], fill(tails))
        front, column = (int(each) for each in np.unravel_index(int(joint.argmin()), joint.shape))
        bottleneck = float(joint[front, column])
        # No tail left out can do better than the master alone would with it.
        if count >= len(ranked) or cheapest[ranked[count]] >= bottleneck:
            return None if math.isinf(bottleneck) else (front, tails[column], column, bottleneck)
        count *= 4
    return None


def _bounds(cuts: Sequence[int], layers: int) -> tuple[tuple[int, int], ...]:
    edges = [0, *cuts, layers]
    return tuple(pairwise(edges))


def _sum(rows: Matrix, columns: Matrix) -> Matrix:
    total: Matrix = rows[:, None] + columns[None, :]
    return total


def _proper(costs: Matrix) -> Matrix:
    """Only runs of at least one layer."""
    costs[np.tril_indices(len(costs))] = math.inf
    return costs
