"""A ring of devices: whoever joined with a token, over links that are encrypted and known by key on both ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from ringtmp.errors import NodeLost, UsageError, WaitTimeout
from ringtmp.launch import token as tokens
from ringtmp.launch.facts import TORCH_BYTES, usable_cores
from ringtmp.launch.hub import Device, Hub
from ringtmp.launch.keys import Rings
from ringtmp.launch.speech import SILENCE_LIMIT_S, End, Prepare
from ringtmp.launch.token import Token
from ringtmp.plan import device as planned
from ringtmp.resources import free_memory_bytes
from ringtmp.ring.endpoint import Endpoint
from ringtmp.transport.curve import new_key_pair
from ringtmp.transport.slow import slowed
from ringtmp.transport.zeromq import ZeroMQTransport
from ringtmp.units import bytes_text
from ringtmp.wire.address import Address

JOIN_LIMIT_S = 3600.0
START_LIMIT_S = 60.0


class RemoteCrew:
    """Waits for `nodes` - 1 devices, or after `wait_s` for as few as `start_with` - 1, and numbers them as they came."""

    alike = False

    def __init__(
        self,
        rings: Rings,
        ring: str,
        host: str,
        port: int,
        nodes: int,
        threads: int | None,
        start_with: int | None,
        wait_s: float,
        phase: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self.nodes = nodes
        self.threads = threads or 1
        self._given_threads = threads
        self._rings = rings
        self._ring = ring
        self._host = host
        self._port = port
        self._least = start_with or nodes
        self._wait_s = wait_s
        self._phase = phase
        self._tell = tell
        self._hub: Hub | None = None
        self._devices: dict[int, Device] = {}
        self._transport: ZeroMQTransport | None = None
        self._generation = 0
        self._started = False
        self._revoked: set[str] = set()

    def start(self, ring: str, generation: int) -> Endpoint:
        """Show the line to type, wait for the devices, let each start its compute process."""
        self._generation = generation
        self._rings.open(self._ring, create=True)
        address = f"{self._host}:{self._port}"
        self._hub = Hub(self._ring, self._rings, self._host, self._port)
        self._rings.set_address(self._ring, address)
        self._gather(address)
        return self._begin(ring)

    def changed(self) -> str | None:
        """A revoked device works on to the end of its step, then the ring goes on without it."""
        gone = [f"{device.facts.name} was revoked" for device in self._devices.values() if device.key in self._revoked]
        return " and ".join(gone) or None

    def regroup(self, ring: str, generation: int) -> Endpoint:
        assert self._hub is not None
        assert self._transport is not None
        self._transport.close()
        staying = []
        for device in self._devices.values():
            if device.key in self._revoked:
                self._hub.tell(device, End(self._generation))
            else:
                staying.append(device)
        self._generation = generation
        self.nodes = len(staying) + 1
        self._devices = {index + 1: device for index, device in enumerate(staying)}
        return self._begin(ring)

    def _begin(self, ring: str) -> Endpoint:
        """Fresh link keys for everyone, and a compute process on every device."""
        assert self._hub is not None
        generation = self._generation
        endpoint = f"tcp://{self._host}:*"
        self._transport = ZeroMQTransport(0, (endpoint, endpoint, endpoint), new_key_pair())
        if not self._started:  # never a function of who is left
            cores = [usable_cores(), *(device.facts.cores for device in self._devices.values())]
            self.threads = self._given_threads or min(cores)
            self._started = True
        for node, device in self._devices.items():
            device.started = device.died = None
            self._hub.tell(device, Prepare(ring, generation, node, self._transport.address, self.threads))
        self._await_compute()
        return Endpoint(slowed(self._transport), ring, generation)

    def addresses(self) -> dict[int, Address]:
        assert self._transport is not None, "not started"
        found = {0: self._transport.address}
        for node, device in self._devices.items():
            assert device.started is not None
            found[node] = device.started.address
        return found

    def devices(self) -> tuple[planned.Device, ...]:
        """Under the names they gave themselves; two of one name are told apart by their number."""
        rss = psutil.Process().memory_info().rss  # what this process has taken already counts as its own
        found = [planned.Device("master", cores=usable_cores(), memory_bytes=free_memory_bytes() + rss)]
        names = [device.facts.name for device in self._devices.values()]
        for node, device in self._devices.items():
            name = device.facts.name
            unique = name if names.count(name) == 1 and name != "master" else f"{name} ({node})"
            found.append(planned.Device(unique, cores=device.facts.cores, memory_bytes=device.facts.memory_bytes))
        return tuple(found)

    def pids(self) -> dict[int, int]:
        return {node: device.started.pid for node, device in self._devices.items() if device.started is not None}

    def advance(self) -> bool:
        return False

    def check(self, step: int) -> None:
        """Raise NodeLost for a device that died, left, was revoked or fell silent."""
        assert self._hub is not None
        self._hub.poll()
        self._hub.refresh()
        self._revoked = {device.key for device in self._devices.values() if device.key not in self._hub.devices}
        for node, device in self._devices.items():
            who = f"node {node} ({device.facts.name})"
            if device.key in self._revoked:
                continue
            if device.died is not None and device.died.generation == self._generation:
                words = f": {device.died.last_words}" if device.died.last_words else ""
                raise NodeLost(
                    f"{who}: its compute process ended with code {device.died.code} in step {step}{words}", node
                )
            if device.left:
                raise NodeLost(f"{who} left in step {step}", node)
            silent = time.monotonic() - device.last_heard
            if silent > SILENCE_LIMIT_S:
                raise NodeLost(
                    f"{who} has not been heard for {silent:.0f} s in step {step}: power, cable, Wi-Fi?", node
                )

    def bury(self, node: int) -> None:
        assert self._hub is not None
        self._hub.tell(self._devices.pop(node), End(self._generation))

    def stop(self) -> None:
        if self._hub is not None:
            for device in self._devices.values():
                self._hub.tell(device, End(self._generation))
            self._hub.close()
            self._hub = None
        self._devices.clear()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _gather(self, address: str) -> None:
        assert self._hub is not None
        secret = self._rings.new_secret(self._ring, self.nodes - 1)
        line = tokens.encode(Token(self._ring, address, self._rings.open(self._ring).public, secret))
        self._tell(f"on each device, run:\n\n    ringtmp node --join {line}\n")
        seen: set[str] = set()
        began = time.monotonic()
        while True:
            self._hub.poll(0.05)
            here = [device for device in self._hub.present() if self._fits(device, seen)]
            for device in here:
                if device.key not in seen:
                    seen.add(device.key)
                    self._tell(_arrival(len(seen), device))
            if len(here) >= self.nodes - 1:
                break
            waited = time.monotonic() - began
            if len(here) >= self._least - 1 and waited > self._wait_s and self._least < self.nodes:
                break
            if waited > JOIN_LIMIT_S:
                raise WaitTimeout(
                    f"{len(here)} of {self.nodes - 1} devices came within an hour: start again, or use --start-with"
                )
            self._phase(f"{len(here)} of {self.nodes - 1} devices are here")
        self._hub.close_door()
        chosen = here[: self.nodes - 1]
        self.nodes = len(chosen) + 1
        self._devices = {index + 1: device for index, device in enumerate(chosen)}

    def _fits(self, device: Device, seen: set[str]) -> bool:
        if device.facts.memory_bytes >= TORCH_BYTES:
            return True
        if device.key not in seen:
            seen.add(device.key)
            self._tell(
                f"{device.facts.name} has {bytes_text(device.facts.memory_bytes)} free, and torch alone needs "
                f"{bytes_text(TORCH_BYTES)}: it is left out"
            )
        return False

    def _await_compute(self) -> None:
        assert self._hub is not None
        assert self._transport is not None
        limit = time.monotonic() + START_LIMIT_S
        waiting = dict(self._devices)
        while waiting:
            self._hub.poll(0.05)
            for node, device in list(waiting.items()):
                if device.started is not None and device.started.generation == self._generation:
                    self._transport.connect(node, device.started.address)
                    del waiting[node]
                elif device.died is not None:
                    raise UsageError(
                        f"node {node} ({device.facts.name}) could not start its compute process (code {device.died.code}): "
                        f"{device.died.last_words or 'it said nothing'}"
                    )
            if time.monotonic() > limit:
                names = ", ".join(f"node {node} ({device.facts.name})" for node, device in waiting.items())
                raise WaitTimeout(f"{names} did not start a compute process within {START_LIMIT_S:.0f} s")


def _arrival(number: int, device: Device) -> str:
    facts = device.facts
    return (
        f"{number}. {facts.name}: {facts.cpu}, {facts.cores} core{'s' if facts.cores != 1 else ''}, "
        f"{bytes_text(facts.memory_bytes)} free, {facts.address}"
    )
