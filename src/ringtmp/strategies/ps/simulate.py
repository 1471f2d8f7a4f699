"""Parameter servers on paper: workers push gradients to the servers of their shards and pull parameters back.

With T_w to transmit a model, n equal workers and k dedicated servers, the busiest line carries n T_w / k each way:

    bsp, one key per shard     2 n T_w / k     nothing comes back before everything is in
    bsp, many keys             about n T_w / k     keys come back while others still go in
    bsp, servers=workers       2 (n-1)/n T_w     every node serves 1/n of the model
    teams                         a head's line carries a model each way and one for each other of its team
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
from ringtmp.strategies.ps.teams import heads, teams_of

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
    teams: int | None = None  # of workers, each behind its first one; None: every worker by itself


def simulate_ps(
    load: Workload, devices: Sequence[Device], options: ServerOptions, paths: Paths | None = None
) -> Simulated:
    """The first `options.servers` devices serve (the master is one of them), the others work."""
    return _Servers(load, devices, options, paths).run()


_DEPART, _AT_SERVER, _SUMMED, _AT_WORKER, _BEGIN, _AT_HEAD = range(6)


class _Servers:
    def __init__(self, load: Workload, devices: Sequence[Device], options: ServerOptions, paths: Paths | None) -> None:
        dedicated = options.servers
        self._options = options
        self._crew = SimulatedWorkers(devices, paths)
        self._workers = list(range(dedicated, len(devices)))
        self._servers = list(range(dedicated)) if dedicated else self._workers
        teams = teams_of(self._workers, options.teams)
        self._team = {worker: team for team in teams for worker in team}
        self._heads = heads(teams)
        self._gathered: dict[tuple[int, int], int] = {}  # (head, key): gradients of its team that are in
        self._keys = len(self._servers) * options.keys
        self._key_bytes = load.exchanged_bytes / self._keys
        self._add_s = load.add_s / self._keys
        self._update_s = load.update_s / self._keys
        self._table, microbatches = load.share(len(self._workers))
        self._compute_s = microbatches * (self._table.forward_s[-1] + self._table.backward_s[-1])
        self._heap: list[tuple[float, int, int, int, int, int]] = []  # time, number, kind, key, from, to
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
            now, _, kind, key, source, node = heapq.heappop(self._heap)
            if kind == _BEGIN:
                self._begin(node, now)
            elif kind == _DEPART:
                arrives = self._crew.lines.arrive(now, source, node, self._size(key, source))
                self._push(arrives, self._at(key, source, node), key, source, node)
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

    def _push(self, time: float, kind: int, key: int, source: int, node: int) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, self._number, kind, key, source, node))

    def _at(self, key: int, source: int, node: int) -> int:
        if source == self._server(key):
            return _AT_WORKER
        if node == self._server(key):
            return _AT_SERVER
        return _AT_HEAD if node == self._team[source][0] else _AT_WORKER

    def _size(self, key: int, source: int) -> float:
        return self._key_bytes if source == self._server(key) else self._key_bytes * self._options.pushed

    def _server(self, key: int) -> int:
        return self._servers[key % len(self._servers)]

    def _begin(self, worker: int, now: float) -> None:
        done = self._crew.work(worker, now, self._compute_s, 0.0, "compute")
        for index in range(self._keys):
            # Each worker begins with another server, so that not all stand before the first.
            key = (index + worker) % self._keys
            head = self._team[worker][0]
            if len(self._team[worker]) == 1:
                self._send(done, key, worker, self._server(key))
            elif worker == head:
                self._push(done, _AT_HEAD, key, worker, head)
            else:
                self._send(done, key, worker, head)

    def _gather(self, key: int, worker: int, head: int, now: float) -> None:
        """A head has one more gradient of its team; of all of them, it passes the sum on."""
        count = self._gathered[head, key] = self._gathered.get((head, key), 0) + 1
        own_s = self._crew.message_s(head, self._key_bytes) if worker != head else 0.0
        done = self._crew.work(head, now, self._add_s if count > 1 else 0.0, own_s, "reduce")
        if count == len(self._team[head]):
            self._gathered[head, key] = 0
            self._send(done, key, head, self._server(key))

    def _hand_on(self, key: int, source: int, node: int, now: float) -> None:
        """A key has come: to a head from the server, which gives it to its team, or to anyone else."""
        if source == self._server(key):
            for other in self._team[node][1:]:
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
        last = self._summed[key] == len(self._heads)
        add_s = self._add_s if self._summed[key] > 1 else 0.0
        done = self._crew.work(server, now, add_s + (self._update_s if last else 0.0), own_s, "reduce")
        if last:
            for index in range(len(self._heads)):
                self._push(done, _SUMMED, key, server, self._heads[(index + key) % len(self._heads)])

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
