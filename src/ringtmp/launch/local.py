"""A ring of processes on this machine, joined by Unix sockets in a private folder.

Each child is a session of its own (Ctrl-C reaches the master alone) and holds a pipe from its parent: when the parent
is gone, however it went, the pipe closes and the child ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from ringtmp.errors import NodeLost, UsageError
from ringtmp.launch.compute import Orders
from ringtmp.ring.endpoint import Endpoint
from ringtmp.transport.zeromq import ZeroMQTransport, ipc_address
from ringtmp.wire.address import Address

STOP_LIMIT_S = 3.0


class LocalCrew:
    def __init__(self, nodes: int, threads: int, logs: Path) -> None:
        self.nodes = nodes
        self.threads = threads
        self._logs = logs
        self._folder: str | None = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._transport: ZeroMQTransport | None = None

    def start(self, ring: str, generation: int) -> Endpoint:
        """Start the other nodes; returns the master's endpoint. They need a second or two to say hello."""
        self._folder = tempfile.mkdtemp(prefix=f"ringtmp-{os.getpid()}-")  # 0700
        addresses = self.addresses()
        self._transport = ZeroMQTransport(0, addresses[0].endpoints)
        for node in range(1, self.nodes):
            orders = Orders(ring, generation, node, addresses[node].endpoints, addresses[0], self.threads)
            self._children[node] = self._spawn(node, orders)
        return Endpoint(self._transport, ring, generation)

    def addresses(self) -> dict[int, Address]:
        assert self._folder is not None, "not started"
        return {node: ipc_address(self._folder, node) for node in range(self.nodes)}

    def pids(self) -> dict[int, int]:
        return {node: child.pid for node, child in self._children.items()}

    def advance(self) -> bool:
        return False

    def changed(self) -> str | None:
        return None

    def regroup(self, ring: str, generation: int) -> Endpoint:
        self.stop()
        return self.start(ring, generation)

    def check(self, step: int) -> None:
        for node, child in self._children.items():
            code = child.poll()
            if code is not None:
                raise NodeLost(
                    f"node {node} (process {child.pid}) {_how_it_died(code)} in step {step}; "
                    f"its log is {self._logs / f'node-{node}.log'}{self._last_words(node)}"
                )

    def stop(self) -> None:
        """End every child and remove the sockets. Safe to call twice."""
        for child in self._children.values():
            if child.stdin is not None:
                child.stdin.close()  # the child's sign to go
        for child in self._children.values():
            try:
                child.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children.clear()
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _spawn(self, node: int, orders: Orders) -> subprocess.Popen[bytes]:
        environment = dict(os.environ, OMP_NUM_THREADS=str(self.threads), PYTHONUNBUFFERED="1")
        try:
            with (self._logs / f"node-{node}.log").open("ab") as log:
                child = subprocess.Popen(
                    # -P: the user's folder is not on the path, so no file of theirs can be imported by accident.
                    [sys.executable, "-P", "-m", "ringtmp.launch.compute"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(f"cannot start a process for node {node}: {error.strerror}") from error
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(orders) + b"\n")
        child.stdin.flush()
        return child

    def _last_words(self, node: int) -> str:
        try:
            lines = (self._logs / f"node-{node}.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f" (last line: {lines[-1][:200]})" if lines else ""


def _how_it_died(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
