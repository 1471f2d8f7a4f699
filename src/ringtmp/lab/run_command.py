"""The lab: the real commands, run on emulated devices of this machine.

`lead` starts a master in the first device, reads the line for the others from what it prints, and runs `ringtmp node`
with that token in each of them. `execute` runs any command once per device.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from ringtmp.errors import DoesNotFit, NodeLost, UsageError, WaitTimeout
from ringtmp.lab.devices_file import Device
from ringtmp.lab.emulated_devices import EmulatedDevices
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.system.signals import on_signals

#: A slow device imports torch slowly.
TOKEN_LIMIT_S = 600.0
STOP_LIMIT_S = 60.0
#: Verbs of which the first device is the master, and the others its nodes.
VERBS = ("train", "evaluate", "predict", "generate")
FAREWELL_LIMIT_S = 5.0
_TOKEN = re.compile(rb"ringtmp node --join (rt1\.\S+)")
#: What a master tells people to type on each device: here nobody has to.
_INVITATION, _INVITED = (
    b"on each device, run:",
    re.compile(rb"on each device, run:\n\n    ringtmp node --join \S+\n\n?"),
)
_JOINED = re.compile(rb"ringtmp node: joined ring")


class Tap:
    """Passes on what comes out of a pipe, and shows each whole line to whoever listens."""

    def __init__(self, sink: IO[bytes], prefix: str = "", line: Callable[[bytes], None] | None = None) -> None:
        self._sink = sink
        self._prefix = prefix.encode()
        self._line = line
        self._rest = b""
        self._held = b""

    def take(self, chunk: bytes) -> None:
        """An empty chunk is the end."""
        shown = self._without_invitation(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk and self._rest:
            lines, self._rest = [self._rest], b""
        out = b"".join(self._prefix + line + b"\n" for line in lines) if self._prefix else shown
        if out:
            # Nobody reads results any more: stop. Nobody reads progress: go on, the pipes must still be emptied.
            with contextlib.suppress(BrokenPipeError) if self._sink is sys.stderr.buffer else contextlib.nullcontext():
                self._sink.write(out)
                self._sink.flush()
        if self._line is not None:
            for line in lines:
                self._line(line)

    def _without_invitation(self, chunk: bytes) -> bytes:
        """What of the bytes so far is shown now."""
        text = _INVITED.sub(b"", self._held + chunk)
        begun = text.find(_INVITATION) if chunk else -1
        self._held = text[begun:] if begun >= 0 else b""
        return text[:begun] if begun >= 0 else text


class Taps:
    """All pipes of all devices, emptied by one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, pipe: IO[bytes] | None, tap: Tap) -> None:
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        self._selector.register(pipe, selectors.EVENT_READ, tap)

    def flow(self, limit_s: float) -> bool:
        """Pass on what is there, waiting at most this long for it; False when nothing came."""
        if not self._selector.get_map():
            time.sleep(limit_s)
            return False
        ready = self._selector.select(limit_s)
        for key, _ in ready:
            chunk = os.read(key.fd, 65536)
            if not chunk:
                self._selector.unregister(key.fileobj)
            key.data.take(chunk)
        return bool(ready)

    def drain(self) -> None:
        while self._selector.get_map() and self.flow(0.0):
            pass


class Signals:
    """Ctrl-C, SIGTERM and SIGHUP go to the processes named here; before there are any, they end the lab."""

    def __init__(self) -> None:
        self.targets: list[subprocess.Popen[bytes]] = []
        self.since: float | None = None

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        with on_signals(self._handle):
            yield

    def overdue(self) -> bool:
        return self.since is not None and time.monotonic() - self.since > STOP_LIMIT_S

    def _handle(self, number: int, frame: object) -> None:
        if not self.targets:
            raise KeyboardInterrupt
        if self.since is not None and number == signal.SIGHUP:
            return  # a shell that goes sends its own, and the terminal another: nobody insists
        self.since = self.since or time.monotonic()
        for process in self.targets:
            # To its whole process group, as a terminal does: a shell waits for the command it runs.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def ringtmp(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "ringtmp", *words]


def lead(
    emulated: EmulatedDevices, verb: str, arguments: Sequence[str], signals: Signals, say: Callable[[str], None]
) -> int:
    """The master's exit code. `arguments` are complete but for the address and the number of nodes."""
    began = time.monotonic()
    others = range(1, len(emulated.shares))
    where = ["--listen", emulated.master_address()] if others else []
    master = emulated.start(0, ringtmp(verb, *arguments, *where, "--nodes", str(len(emulated.shares))))
    signals.targets = [master]
    taps = Taps()
    nodes: dict[int, subprocess.Popen[bytes]] = {}
    joined: set[int] = set()
    token_at = 0.0

    def of_master(line: bytes) -> None:
        nonlocal token_at
        if not nodes and (found := _TOKEN.search(line)):
            token_at = time.monotonic()
            for index in others:
                nodes[index] = _node(emulated, index, found[1])
                taps.add(nodes[index].stderr, Tap(sys.stderr.buffer, f"{emulated.name(index)}: ", of_node(index)))

    def of_node(index: int) -> Callable[[bytes], None]:
        def see(line: bytes) -> None:
            if _JOINED.search(line) and index not in joined:
                joined.add(index)
                if len(joined) == len(others):
                    now = time.monotonic()
                    say(f"all joined {now - token_at:.1f} s after the token, {now - began:.1f} s after the start")

        return see

    taps.add(master.stderr, Tap(sys.stderr.buffer, line=of_master))
    while master.poll() is None:
        taps.flow(0.1)
        for index, node in nodes.items():
            if node.poll() is not None and index not in joined:
                taps.drain()
                raise NodeLost(
                    f"{emulated.name(index)} ended with code {node.returncode} before it joined{_why(emulated, index)}"
                )
        if others and not nodes and time.monotonic() - began > TOKEN_LIMIT_S:
            raise WaitTimeout(f"{emulated.name(0)} printed no token within {TOKEN_LIMIT_S:.0f} s")
        if signals.overdue():
            raise WaitTimeout(f"{emulated.name(0)} did not stop within {STOP_LIMIT_S:.0f} s of the signal")
    taps.drain()
    _let_go(list(nodes.values()), taps)
    for index in range(len(emulated.shares)):
        if why := _why(emulated, index):
            say(f"{emulated.name(index)}{why}")
    return _code(master)


def execute(emulated: EmulatedDevices, command: Sequence[str], signals: Signals) -> int:
    """Run a command in every device at once; returns the first exit code that is not 0, in the order of the devices."""
    taps = Taps()
    processes: list[subprocess.Popen[bytes]] = []
    for index in range(len(emulated.shares)):
        process = emulated.start(index, command, stdout=subprocess.PIPE)
        processes.append(process)
        taps.add(process.stdout, Tap(sys.stdout.buffer, f"{emulated.name(index)}: "))
        taps.add(process.stderr, Tap(sys.stderr.buffer, f"{emulated.name(index)}: "))
    signals.targets = processes
    while any(process.poll() is None for process in processes):
        taps.flow(0.1)
        if signals.overdue():
            raise WaitTimeout(f"the commands did not stop within {STOP_LIMIT_S:.0f} s of the signal")
    taps.drain()
    return next((code for process in processes if (code := _code(process))), 0)


def require_memory(devices: Sequence[Device]) -> None:
    for device in devices:
        # The master would leave it out (`launch/joined_devices.py`) and wait for another.
        if device.memory_mb * 2**20 < PROCESS_BYTES:
            raise DoesNotFit(
                f"{device.name} has {device.memory_mb:g} MiB, but torch alone needs {PROCESS_BYTES // 2**20}: "
                "raise its memory_mb or remove the device"
            )


def complete(arguments: Sequence[str], devices: int, verb: str = "train") -> tuple[list[str], int]:
    """The arguments for the master, checked, and its threads: one, unless the caller chose."""
    if flag(arguments, "--listen") is not None:
        raise UsageError(f"{verb} in the lab takes no --listen: the lab chooses the address")
    nodes = flag(arguments, "--nodes")
    if nodes is not None and nodes != str(devices):
        raise UsageError(f"--nodes {nodes}, but the devices file has {devices}: leave --nodes out, or change the file")
    if verb != "train":
        return list(arguments), 1
    threads = flag(arguments, "--threads")
    if threads is None:
        return [*arguments, "--threads", "1"], 1
    if not threads.isdigit() or int(threads) < 1:
        raise UsageError(f"--threads {threads!r}: give a number from 1")
    return list(arguments), int(threads)


def flag(arguments: Sequence[str], name: str) -> str | None:
    """The last value given for a flag; both --flag value and --flag=value."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == name:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


def _node(emulated: EmulatedDevices, index: int, token: bytes) -> subprocess.Popen[bytes]:
    """The token goes in by standard input: a command line can be read by everybody on the machine."""
    lent = emulated.lent_memory_mb(index)
    memory = ["--memory", str(lent)] if lent is not None else []
    command = ringtmp("node", "--join", "-", "--name", emulated.name(index), *memory, "--once")
    node = emulated.start(index, command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert node.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        node.stdin.write(token + b"\n")
        node.stdin.close()
    return node


def _let_go(nodes: Sequence[subprocess.Popen[bytes]], taps: Taps) -> None:
    """A moment for the nodes to say that the run has ended and leave by themselves."""
    limit = time.monotonic() + FAREWELL_LIMIT_S
    while time.monotonic() < limit and any(node.poll() is None for node in nodes):
        taps.flow(0.05)
    taps.drain()


def _why(emulated: EmulatedDevices, index: int) -> str:
    kills = emulated.memory_kills(index)
    cap = f"{emulated.shares[index].device.memory_mb:g} MiB"
    return f": the kernel ended {kills} of its processes at the memory cap of {cap}" if kills else ""


def _code(process: subprocess.Popen[bytes]) -> int:
    code = process.returncode
    return 128 - code if code < 0 else int(code)
