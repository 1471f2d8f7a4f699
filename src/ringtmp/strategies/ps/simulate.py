"""Parameter servers on paper: workers push gradients to the servers of their shards and pull parameters back.

With T_w to transmit a model, n equal workers and k dedicated servers, the busiest line carries n T_w / k each way:

    bsp, one key per shard     2 n T_w / k     nothing comes back before everything is in
    bsp, many keys             about n T_w / k     keys come back while others still go in
    bsp, servers=workers       2 (n-1)/n T_w     every node serves 1/n of the model
    teams                         a head's line carries a model each way and one for each other below it
    teams by all-reduce           in a ring of m each sends 2 (m-1)/m models; then the head pushes one
    asynchronous, one worker   2 T_w + U_w per round; n workers at most n T_w / k apart

The model is cut into `keys` pieces per server; a server updates a key as soon as all workers (bsp) or one worker
(async, ssp) sent it. ssp lets no worker get more than `slack` rounds ahead of the slowest. A step is one batch of samples
over all workers. O(rounds * workers * servers * keys) events.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringtmp.plan.devices import Device, Paths
from ringtmp.plan.simulated_step import Simulated, per_step
from ringtmp.strategies.data_parallel.simulated_workers import SimulatedWorkers, Workload
from ringtmp.strategies.ps.teams import Team, Teams

Mode = Literal["bsp", "async", "ssp"]
#: Steps of asynchronous training that are simulated; the first two only warm up.
ROUNDS, WARM_ROUNDS = 8, 2


@dataclass(frozen=True, slots=True)
class ServerOptions:
    servers: int = 1  # dedicated; 0: every node serves and works
    mode: Mode = "bsp"
    slack: int = 3  # ssp
    keys: int = 8  # per server
    pushed: float = 1.0  # of a gradient: what a push of it takes
    teams: Teams | None = None  # of workers, each behind its first one; None: every worker by itself
    rings: bool = False  # teams sum by all-reduce


def simulate_ps(
    load: Workload, devices: Sequence[Device], options: ServerOptions, paths: Paths | None = None
) -> Simulated:
    """The first `options.servers` devices serve (the master is one of them), the others work."""
    return _Servers(load, devices, options, paths).run()


_DEPART, _AT_SERVER, _SUMMED, _AT_WORKER, _BEGIN, _AT_HEAD, _IN_RING = range(7)


class _Servers:
    def __init__(self, load: Workload, devices: Sequence[Device], options: ServerOptions, paths: Paths | None) -> None:
        dedicated = options.servers
        self._options = options
        self._crew = SimulatedWorkers(devices, paths)
        self._workers = list(range(dedicated, len(devices)))
        self._servers = list(range(dedicated)) if dedicated else self._workers
        self._teams = teams = options.teams or Teams.of(self._workers, ())
        self._rings = {
            worker: ring for worker in self._workers if len(ring := teams.team(worker)) > 1 and options.rings
        }
        self._awaited = {  # by head: gradients that it adds up
            head: 1 + sum(each not in self._rings.get(head, ()) for each in teams.below(head)) for head in self._workers
        }
        self._gathered: dict[tuple[int, int], int] = {}  # (head, key): gradients of those below it that are in
        self._joined: dict[tuple[Team, int], int] = {}  # (ring, key): workers that have their own gradient
        self._around: dict[tuple[Team, int], int] = {}  # (ring, key): chunks that have come to their end
        self._keys = len(self._servers) * options.keys
        self._key_bytes = load.exchanged_bytes / self._keys
        self._add_s = load.add_s / self._keys
        self._update_s = load.update_s / self._keys
        self._table, microbatches = load.share(len(self._workers))
        self._compute_s = microbatches * (self._table.forward_s[-1] + self._table.backward_s[-1])
        self._heap: list[tuple[float, int, int, int, int, int, int]] = []  # time, number, kind, key, from, to, hops
        self._number = 0
        self._summed = [0] * self._keys
        self._pulled = dict.fromkeys(self._workers, 0)
        self._rounds = dict.fromkeys(self._workers, 0)
        self._waiting: dict[int, float] = {}  # worker -> since when (ssp)
        self._waited = [0.0] * len(devices)
        self._ended = 0
        self._warm: tuple[float, dict[tuple[int, int], float]] = (0.0, {})
        self._end = 0.0

    def run(self) -> Simulated:
        for worker in self._workers:
            self._push(0.0, _BEGIN, 0, worker, worker)
        target = len(self._workers) * (1 if self._options.mode == "bsp" else ROUNDS)
        while self._heap and self._ended < target:
            now, _, kind, key, source, node, hops = heapq.heappop(self._heap)
            if kind == _BEGIN:
                self._begin(node, now)
            elif kind == _DEPART:
                arrives = self._crew.lines.arrive(now, source, node, self._size(key, source, hops))
                self._push(arrives, self._at(key, source, node, hops), key, source, node, hops)
            elif kind == _IN_RING:
                self._pass_around(key, source, node, now, hops)
            elif kind == _AT_HEAD:
                self._gather(key, source, node, now)
            elif kind == _AT_SERVER:
                self._add(key, source, node, now)
            elif kind == _SUMMED:
                self._answer(key, source, node, now)
            else:
                self._hand_on(key, source, node, now)
        steps = 1 if self._options.mode == "bsp" else ROUNDS - WARM_ROUNDS
        begin, before = self._warm
        memory = [self._table.stored[-1] if node in self._pulled else 0.0 for node in range(len(self._crew.devices))]
        return self._crew.result(
            begin, self._end, steps, per_step(self._crew.lines.carried, before, steps),
            memory_bytes=memory, servers=self._options.servers, waits=self._waited,
        )  # fmt: skip

    def _push(self, time: float, kind: int, key: int, source: int, node: int, hops: int = 0) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, kind, key, source, node, hops))

    def _at(self, key: int, source: int, node: int, hops: int) -> int:
        if hops:
            return _IN_RING
        if source == self._server(key):
            return _AT_WORKER
        if node == self._server(key):
            return _AT_SERVER
        return _AT_HEAD if node == self._teams.above(source) else _AT_WORKER

    def _size(self, key: int, source: int, hops: int = 0) -> float:
        if hops:
            return self._key_bytes / len(self._rings[source])
        return self._key_bytes if source == self._server(key) else self._key_bytes * self._options.pushed

    def _server(self, key: int) -> int:
        return self._servers[key % len(self._servers)]

    def _begin(self, worker: int, now: float) -> None:
        done = self._crew.work(worker, now, self._compute_s, 0.0, "compute")
        for index in range(self._keys):
            # Each worker begins with another server, so that not all stand before the first.
            key = (index + worker) % self._keys
            if worker in self._rings:
                self._join(key, self._rings[worker], done)
            elif self._awaited[worker] > 1:
                self._push(done, _AT_HEAD, key, worker, worker)
            else:
                self._pass_up(key, worker, done)

    def _join(self, key: int, ring: Team, now: float) -> None:
        """One more of a ring has its gradient; when all have, its chunks go around, one from each worker."""
        count = self._joined[ring, key] = self._joined.get((ring, key), 0) + 1
        if count == len(ring):
            self._joined[ring, key] = 0
            for worker in ring:
                self._hop(key, worker, now, 1)

    def _hop(self, key: int, worker: int, now: float, hops: int) -> None:
        ring = self._rings[worker]
        following, size = ring[(ring.index(worker) + 1) % len(ring)], self._size(key, worker, hops)
        ready = self._crew.work(worker, now, 0.0, self._crew.message_s(worker, size), "send")
        self._push(self._crew.lines.depart(ready, worker, following, size), _DEPART, key, worker, following, hops)

    def _pass_around(self, key: int, source: int, worker: int, now: float, hops: int) -> None:
        """A chunk has come: half of the way it is added to, the other half it is a sum."""
        ring = self._rings[worker]
        add_s = self._add_s / len(ring) if hops < len(ring) else 0.0
        done = self._crew.work(
            worker, now, add_s, self._crew.message_s(worker, self._size(key, source, hops)), "reduce"
        )
        if hops < 2 * (len(ring) - 1):
            self._hop(key, worker, done, hops + 1)
            return
        count = self._around[ring, key] = self._around.get((ring, key), 0) + 1
        if count == len(ring):
            self._around[ring, key] = 0
            self._push(done, _AT_HEAD, key, ring[0], ring[0])

    def _gather(self, key: int, worker: int, head: int, now: float) -> None:
        """A worker has one more gradient of those below it, or its own; of all of them, it passes the sum on."""
        count = self._gathered[head, key] = self._gathered.get((head, key), 0) + 1
        own_s = self._crew.message_s(head, self._key_bytes) if worker != head else 0.0
        done = self._crew.work(head, now, self._add_s if count > 1 else 0.0, own_s, "reduce")
        if count == self._awaited[head]:
            self._gathered[head, key] = 0
            self._pass_up(key, head, done)

    def _pass_up(self, key: int, worker: int, now: float) -> None:
        above = self._teams.above(worker)
        self._send(now, key, worker, self._server(key) if above is None else above)

    def _hand_on(self, key: int, source: int, node: int, now: float) -> None:
        """A key has come: to a head, which gives it to those below it, or to anyone else."""
        for other in self._teams.below(node):
            ready = self._crew.work(node, now, 0.0, self._crew.message_s(node, self._key_bytes), "send")
            leaves = self._crew.lines.depart(ready, node, other, self._key_bytes)
            self._push(leaves, _DEPART, key, node, other)
        self._receive(node, now)

    def _send(self, now: float, key: int, source: int, target: int) -> None:
        if source == target:  # its own shard
            self._push(now, _AT_SERVER, key, source, target)
            return
        size = self._size(key, source)
        ready = self._crew.work(source, now, 0.0, self._crew.message_s(source, size), "send")
        self._push(self._crew.lines.depart(ready, source, target, size), _DEPART, key, source, target)

    def _add(self, key: int, worker: int, server: int, now: float) -> None:
        own_s = self._crew.message_s(server, self._size(key, worker)) if worker != server else 0.0
        if self._options.mode != "bsp":
            done = self._crew.work(server, now, self._update_s, own_s, "reduce")
            self._push(done, _SUMMED, key, server, worker)
            return
        self._summed[key] += 1
        top = self._teams.top
        last = self._summed[key] == len(top)
        add_s = self._add_s if self._summed[key] > 1 else 0.0
        done = self._crew.work(server, now, add_s + (self._update_s if last else 0.0), own_s, "reduce")
        if last:
            for index in range(len(top)):
                self._push(done, _SUMMED, key, server, top[(index + key) % len(top)])

    def _answer(self, key: int, server: int, worker: int, now: float) -> None:
        if server == worker:
            self._receive(worker, now)
        else:
            self._send(now, key, server, worker)

    def _receive(self, worker: int, now: float) -> None:
        done = self._crew.work(worker, now, 0.0, self._crew.message_s(worker, self._key_bytes), "receive")
        self._pulled[worker] += 1
        if self._pulled[worker] % self._keys:
            return
        self._rounds[worker] += 1
        self._ended += 1
        self._end = max(self._end, done)
        if self._ended == len(self._workers) * WARM_ROUNDS and self._options.mode != "bsp":
            self._warm = (done, dict(self._crew.lines.carried))
            self._waited = [0.0] * len(self._waited)
        if self._options.mode == "bsp":
            return
        self._waiting[worker] = done
        self._release(done)

    def _release(self, now: float) -> None:
        """Whoever is not too far ahead begins the next round."""
        slowest = min(self._rounds.values())
        for worker, since in list(self._waiting.items()):
            if self._options.mode == "async" or self._rounds[worker] - slowest <= self._options.slack:
                del self._waiting[worker]
                begin = max(now, since)
                self._waited[worker] += begin - since
                self._push(begin, _BEGIN, 0, worker, worker)
