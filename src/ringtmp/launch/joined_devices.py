"""A ring of devices: whoever joined with a token, over links that are encrypted and known by key on both ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set

import zmq

from ringtmp.errors import DoesNotFit, NodeLost, UsageError, WaitTimeout
from ringtmp.launch import join_token as tokens
from ringtmp.launch.agent_messages import SILENCE_LIMIT_S, End
from ringtmp.launch.authenticate_devices import REOPEN_S, Device, Hub
from ringtmp.launch.dead_processes import MOST_DEATHS, Deaths, dead
from ringtmp.launch.device_facts import usable_cores
from ringtmp.launch.join_token import Token
from ringtmp.launch.key_store import Rings
from ringtmp.launch.pairing_code import MasterSide
from ringtmp.launch.private_folder import PrivateFolder, remove_leftovers
from ringtmp.launch.start_on_devices import start_on
from ringtmp.launch.ways_to_join import pairing_for, ways_to_join
from ringtmp.plan import devices as planned
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.runtime.snapshot_store import SnapshotStore
from ringtmp.system.resources import free_memory_bytes, own_memory_bytes
from ringtmp.transport.encryption import new_key_pair
from ringtmp.transport.slow_link import slowed
from ringtmp.transport.zeromq import ZeroMQTransport
from ringtmp.units import bytes_text, seconds_text
from ringtmp.wire.address import Address

JOIN_LIMIT_S = 3600.0


class DevicePool:
    """Waits for `nodes` - 1 devices, or after `wait_s` for as few as `start_with` - 1, and numbers them as they came."""

    same_machine = False
    ranks_of_torch = False

    def __init__(
        self,
        rings: Rings,
        ring: str,
        host: str,
        port: int,
        *,
        nodes: int,
        threads: int | None,
        phase: Callable[[str], None],
        tell: Callable[[str], None],
        start_with: int | None = None,
        wait_s: float = 0.0,
        notice_s: float = SILENCE_LIMIT_S,
        package: str = "",
        discovery: bool = True,
        qr: bool = False,
        outlives_master: bool = False,
        before: str = "",
    ) -> None:
        """`discovery`: devices may find the ring and join with a code; `qr`: the join line is shown as a QR code, too.
        `before`: the ring of a master that was killed, whose snapshots devices may still have."""
        self.outlives_master = outlives_master
        self._before = before
        self._discovery, self._qr = discovery, qr
        self._notice_s = notice_s
        self.nodes = nodes
        self.threads = threads or 1
        self._given_threads = threads
        self._rings = rings
        self._ring = ring
        self._host, self._port = host, port
        self._package = package  # that every device must have, with its version
        self._least = start_with or nodes
        self._wait_s = wait_s
        # As many as there are to be, or none: then nobody waits for an hour.
        self._join_s = wait_s if start_with == nodes else JOIN_LIMIT_S
        self._phase = phase
        self._tell = tell
        self._opened: Hub | None = None
        self._pairing: MasterSide | None = None
        self._devices: dict[int, Device] = {}
        self._transport: ZeroMQTransport | None = None
        self._generation = 0
        self._started = False
        self._revoked: set[str] = set()
        self._released: set[str] = set()
        self._snapshots = SnapshotStore()
        self.found_lost: list[NodeLost] = []
        self._folder: PrivateFolder | None = None
        self._places: dict[str, int] = {}  # keys of devices whose compute process is linked, and its number
        self._seen: set[str] = set()
        self._wanted = nodes
        self._step = 0
        self._deaths: dict[str, Deaths] = {}  # by incarnation
        self._resting: set[str] = set()  # incarnations of devices that die again and again, left out
        self._accused: Counter[str] = Counter()  # by key: how often a device was expelled
        self._told_of_door = False
        self._door_not_before = 0.0
        self._rekey = False  # a revoked device is gone, and the remaining ones still know its keys

    @property
    def _hub(self) -> Hub:
        assert self._opened is not None, "not started"
        return self._opened

    @property
    def _links(self) -> ZeroMQTransport:
        assert self._transport is not None, "not started"
        return self._transport

    def start(self, ring: str, generation: int) -> Endpoint:
        """Show the line to type, wait for the devices, let each start its compute process."""
        remove_leftovers()
        self._generation = generation
        self._rings.open(self._ring, create=True)
        self._rings.take_back(self._ring)
        address = f"{self._host}:{self._port}"
        self._pairing = pairing_for(self._rings, self._ring, self._host, self._tell) if self._discovery else None
        self._opened = Hub(
            self._ring,
            self._rings,
            self._host,
            self._port,
            package=self._package,
            tell=self._tell,
            pairing=self._pairing,
        )
        self._hub.run = ring
        self._rings.set_address(self._ring, address)
        self._gather(address)
        return self._begin(ring)

    def changed(self) -> str | None:
        """A revoked or released device works on to the end of its step, then the ring goes on without it; one that waits
        for a place gets it then."""
        words = [
            f"{device.facts.name} was {'revoked' if device.key in self._revoked else 'released'}"
            for device in self._devices.values()
            if device.key in self._revoked or device.key in self._released
        ]
        words += [f"{device.facts.name} joined" for device in self._spares()]
        if self._rekey:
            words.append("fresh keys for the remaining nodes")
        return " and ".join(words) or None

    def release(self, node: int) -> None:
        if node not in self._devices:
            raise UsageError("no device has that number")
        self._rings.release(self._ring, self._devices[node].key)

    def all_anew(self) -> bool:
        return bool(self._revoked) or self._rekey

    def regroup(self, ring: str, generation: int) -> Endpoint:
        self._links.close()
        self._snapshots.close()
        self._drop_the_gone()
        self._rekey = False
        self._generation = generation
        everyone = [*self._devices.values(), *self._spares()]
        self.nodes = len(everyone) + 1
        self._devices = {index + 1: device for index, device in enumerate(everyone)}
        return self._begin(ring)

    def replace_lost(
        self, ring: str, generation: int, compact: bool, need_bytes: int, spared: Set[int] = frozenset()
    ) -> Collection[int]:
        """A compute process that ended is started again where its agent lives; a device that is gone leaves a hole in the
        numbers, unless a spare one waits. Those who live on keep their processes and their link keys."""
        self._hub.poll()
        self.found_lost = list(self._lost(self._step))
        self._drop_the_gone()
        self._generation = generation
        self._gather_spares(need_bytes)
        if compact:
            self._close_ranks()
        living = {node for node, device in self._devices.items() if self._lives(node, device)}
        fresh = {node: device for node, device in self._devices.items() if node not in living}
        self.nodes = len(self._devices) + 1
        try:
            self._start_on(fresh, ring)
        except NodeLost:
            for device in fresh.values():  # those who did start are of a generation that will not be
                self._places.pop(device.key, None)
            raise
        self._mind_the_door()
        return living

    def _drop_the_gone(self) -> None:
        for node, device in list(self._devices.items()):
            self._rekey = self._rekey or not self._hub.admits(device.key)
            gone = self._hub.devices.get(device.key) is not device or device.left or bool(device.broke)
            gone = gone or self._dies_on(device)
            if gone or self._hub.silent_s(device) > self._notice_s or device.key in (self._revoked | self._released):
                self._end(device)
                self._places.pop(device.key, None)
                del self._devices[node]

    def _dies_on(self, device: Device) -> bool:
        """Whether its process has died so often without a step between that it would go on."""
        if not dead(device):
            return False
        deaths = self._deaths.setdefault(device.incarnation, Deaths())
        if not deaths.told_of(device.died, self._step):
            return False
        self._resting.add(device.incarnation)
        assert device.died is not None
        said = device.died.last_words or "it said nothing"
        self._tell(f"{device.facts.name} is left out: its process died {deaths.count} times without a step ({said})")
        return True

    def _lives(self, node: int, device: Device) -> bool:
        """Whether its compute process is there, has this number, and is known to the master's links."""
        return not dead(device) and device.started is not None and self._places.get(device.key) == node

    def _close_ranks(self) -> None:
        for hole in range(1, len(self._devices) + 1):
            if hole not in self._devices:
                self._devices[hole] = self._devices.pop(max(self._devices))

    def _gather_spares(self, need_bytes: int) -> None:
        """Waiting devices get a place."""
        for device in self._spares():
            node = next(number for number in range(1, self._wanted) if number not in self._devices)
            self._devices[node] = device
        missing = need_bytes - self._room_bytes()
        if missing > 0:
            raise DoesNotFit(f"the remaining devices are {bytes_text(missing)} of memory short")

    def await_another(self, why: str, leaving: Callable[[], bool]) -> bool:
        self._wanted = max(self._wanted, len(self._devices) + 2)
        self._tell(f"paused: {why}; the run goes on when a device joins (ringtmp ring token prints a token)")
        limit = time.monotonic() + JOIN_LIMIT_S
        while not leaving() and time.monotonic() < limit:
            self._mind_the_door()
            self._hub.poll(0.2)
            self._hub.refresh()
            if self._spares():
                return True
        return False

    def _room_bytes(self) -> int:
        """What the devices said they have free, less what torch takes, and what is free here."""
        others = sum(max(0, device.facts.memory_bytes - PROCESS_BYTES) for device in self._devices.values())
        return others + free_memory_bytes()

    def _mind_the_door(self) -> None:
        """Open while a place is free."""
        if len(self._devices) + 1 >= self._wanted:
            self._hub.close_door()
        elif time.monotonic() >= self._door_not_before:
            try:
                self._hub.open_door()
                self._told_of_door = False
            except zmq.ZMQError as error:
                if not self._told_of_door:
                    said = error.strerror or error
                    self._tell(f"nobody can join yet: cannot listen on port {self._port}: {said}; retrying")
                self._told_of_door = True
                self._door_not_before = time.monotonic() + REOPEN_S

    def _spares(self) -> list[Device]:
        """Devices that wait for a place, as many as there are places."""
        used = {device.key for device in self._devices.values()}
        waiting = [
            each
            for each in self._hub.present(self._notice_s)
            if each.key not in used | self._released
            and self._accused[each.key] < MOST_DEATHS
            and each.incarnation not in self._resting
            and self._fits(each)
        ]
        return waiting[: self._wanted - 1 - len(self._devices)]

    def _end(self, device: Device, over: bool = False) -> None:
        """Its compute process is known by the generation it was started in, not by those it lived through."""
        if device.started is not None:
            self._hub.tell(device, End(device.started.generation, over))

    def _begin(self, ring: str) -> Endpoint:
        """Fresh link keys for everyone, and a compute process on every device."""
        generation = self._generation
        endpoint = f"tcp://{self._host}:*"
        self._transport = ZeroMQTransport(0, (endpoint, endpoint, endpoint), new_key_pair())
        if not self._started:  # never a function of who is left
            cores = [usable_cores(), *(device.facts.cores for device in self._devices.values())]
            self.threads = self._given_threads or min(cores)
            self._started = True
        self._places.clear()
        self._start_on(self._devices, ring)
        self._folder = self._folder or PrivateFolder()
        self._snapshots = SnapshotStore(self._folder.path / "snapshots")
        return Endpoint(slowed(self._transport), ring, generation, snapshots=self._snapshots)

    def addresses(self) -> dict[int, Address]:
        found = {0: self._links.address}
        for node, device in self._devices.items():
            assert device.started is not None
            found[node] = device.started.address
        return found

    def devices(self) -> tuple[planned.Device, ...]:
        """Under the names they gave themselves; two of one name are told apart by their number."""
        found = [planned.Device("master", cores=usable_cores(), memory_bytes=own_memory_bytes())]
        names = [device.facts.name for device in self._devices.values()]
        for node, device in sorted(self._devices.items()):  # a place that was given again comes last
            facts = device.facts
            name = facts.name
            unique = name if names.count(name) == 1 and name != "master" else f"{name} ({node})"
            # One that was restarted may be slower, or have less memory, than it had.
            process = device.started.pid if device.started is not None else 0
            who = f"{device.key} {device.incarnation} {process}"
            found.append(planned.Device(unique, cores=facts.cores, memory_bytes=facts.memory_bytes, identity=who))
        return tuple(found)

    def alone(self) -> None:
        return None  # the plan of the ring leaves out whoever slows it down, and it may have another chance later

    def send_home(self) -> None:
        raise AssertionError("nobody is sent home")

    def pids(self) -> dict[int, int]:
        return {node: device.started.pid for node, device in self._devices.items() if device.started is not None}

    def advance(self) -> bool:
        return False

    def check(self, step: int) -> None:
        """Raise NodeLost for a device that died, left, was revoked or fell silent."""
        self._step = step
        self._hub.poll()
        self._hub.refresh()
        self._revoked = {device.key for device in self._devices.values() if not self._hub.admits(device.key)}
        self._released = set(self._rings.open(self._ring).released)
        self._mind_the_door()
        for loss in self._lost(step):
            raise loss

    def _lost(self, step: int) -> Iterator[NodeLost]:
        for node, device in self._devices.items():
            who = f"node {node} ({device.facts.name})"
            if device.key in self._revoked:
                continue
            if dead(device) and device.died is not None and device.started is not None:
                words = f": {device.died.last_words}" if device.died.last_words else ""
                code = device.died.code
                yield NodeLost(f"{who}: its compute process ended with code {code} in step {step}{words}", node)
            elif device.broke:
                self._accused[device.key] = MOST_DEATHS
                yield NodeLost(f"{who} broke the protocol in step {step}: {device.broke}", node)
            elif device.left:
                yield NodeLost(f"{who} left in step {step}", node)
            elif self._hub.devices.get(device.key) is not device:
                yield NodeLost(f"{who} was restarted in step {step}", node)
            elif (silent := self._hub.silent_s(device)) > self._notice_s:
                text = f"{who} has been silent for {silent:.1f} s in step {step}: check power, cable and Wi-Fi"
                yield NodeLost(text, node, silent)

    def drop(self, node: int) -> None:
        device = self._devices.pop(node)
        self._end(device)
        self._places.pop(device.key, None)

    def expel(self, node: int, sure: bool) -> None:
        device = self._devices.get(node)
        if device is None:
            return
        self.drop(node)
        self._accused[device.key] += MOST_DEATHS if sure else 1
        if self._accused[device.key] >= MOST_DEATHS:
            self._tell(f"{device.facts.name} is left out until the end of the run: it broke the protocol")

    def stop(self) -> None:
        if self._opened is not None:
            for device in self._opened.devices.values():
                self._end(device, over=True)
            self._opened.close()
            self._opened = None
        self._devices.clear()
        self._snapshots.close()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _gather(self, address: str) -> None:
        secret = self._rings.new_secret(self._ring, self.nodes - 1)
        line = tokens.encode(Token(self._ring, address, self._rings.open(self._ring).public, secret))
        self._tell(ways_to_join(f"ringtmp node --join {line}", self._ring, self._pairing, self._qr))
        began = time.monotonic()
        while True:
            self._hub.poll(0.05)
            here = [device for device in self._hub.present() if self._fits(device)]
            for device in here:
                if device.key not in self._seen:
                    self._seen.add(device.key)
                    self._tell(_arrival(len(self._seen), device))
            if len(here) >= self.nodes - 1:
                break
            waited = time.monotonic() - began
            if len(here) >= self._least - 1 and waited > self._wait_s and self._least < self.nodes:
                break
            if waited > self._join_s:
                raise WaitTimeout(
                    f"only {len(here)} of {self.nodes - 1} devices joined within {seconds_text(self._join_s)}: try again, or "
                    "use --start-with"
                )
            self._phase(f"{len(here)} of {self.nodes - 1} devices are here")
        chosen = here[: self.nodes - 1]
        self._wanted, self.nodes = self.nodes, len(chosen) + 1
        self._devices = {index + 1: device for index, device in enumerate(chosen)}
        self._mind_the_door()

    def _fits(self, device: Device) -> bool:
        if device.facts.memory_bytes >= PROCESS_BYTES:
            return True
        if device.key not in self._seen:
            self._seen.add(device.key)
            self._tell(
                f"{device.facts.name} has {bytes_text(device.facts.memory_bytes)} free, but torch alone needs "
                f"{bytes_text(PROCESS_BYTES)}: it is left out"
            )
        return False

    def _start_on(self, devices: Mapping[int, Device], ring: str) -> None:
        for device in devices.values():
            self._places.pop(device.key, None)
        started = start_on(
            devices, self._hub, self._links, ring, self._generation, threads=self.threads, notice_s=self._notice_s,
            before=self._before,
        )  # fmt: skip
        for node in started:
            self._places[devices[node].key] = node
        self._before = ""


def _arrival(number: int, device: Device) -> str:
    facts = device.facts
    return (
        f"{number}. {facts.name}: {facts.cpu}, {facts.cores} core{'s' if facts.cores != 1 else ''}, "
        f"{bytes_text(facts.memory_bytes)} free, {facts.address}"
    )
