"""What this device is: name, processor, cores, memory, addresses. No torch import."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket

import msgspec
import psutil

from ringtmp import __version__, untrusted
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch.agent_messages import Died, Facts, Started
from ringtmp.launch.device_names import NAME
from ringtmp.strategies import registry
from ringtmp.system.resources import cpu_name, free_memory_bytes
from ringtmp.wire.protocol import PROTOCOL

MOST_CORES = 4096
MOST_PACKAGES = 8
_ENDPOINT = re.compile(r"tcp://[0-9]{1,3}(\.[0-9]{1,3}){3}:[0-9]{1,5}")
_KEY = re.compile(r"[!-~]{40}")


def device_facts(name: str | None = None) -> Facts:
    return Facts(
        name or default_name(),
        cpu_name(),
        usable_cores(),
        free_memory_bytes(),
        installed("torch"),
        __version__,
        PROTOCOL,
        packages=registry.packages()[:MOST_PACKAGES],
    )


def checked(facts: Facts) -> Facts:
    """What another device says of itself: numbers that can be, and text that is only text."""
    if not NAME.fullmatch(facts.name):
        raise ProtocolError("its name is not 1 to 32 of a-z, 0-9 and '-'")
    untrusted.whole(facts.cores, "the number of its cores", 1, MOST_CORES)
    untrusted.whole(facts.memory_bytes, "its memory")
    texts = {name: untrusted.line(getattr(facts, name), 80) for name in ("cpu", "torch", "version", "address")}
    packages = tuple(untrusted.line(each, 80) for each in facts.packages[:MOST_PACKAGES])
    return msgspec.structs.replace(facts, packages=packages, **texts)


def checked_start(started: Started) -> Started:
    """Others are told to connect there."""
    untrusted.whole(started.generation, "a generation")
    untrusted.whole(started.pid, "a process id")
    if not (all(map(_ENDPOINT.fullmatch, started.address.endpoints)) and _KEY.fullmatch(started.address.key)):
        raise ProtocolError("it listens where nobody can connect to")
    return started


def checked_death(died: Died) -> Died:
    untrusted.whole(died.generation, "a generation")
    untrusted.whole(died.code, "an exit code", -1024, 2**32)
    return msgspec.structs.replace(died, last_words=untrusted.line(died.last_words, 300))


def default_name() -> str:
    """The host's name, made to fit."""
    text = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-")[:32]
    return text if NAME.fullmatch(text) else "device"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed(package: str) -> str:
    """Its version; empty: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def own_addresses() -> dict[str, str]:
    """IPv4 address -> interface."""
    found: dict[str, str] = {}
    for interface, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                found[each.address] = interface
    return found


def address_towards(host: str, port: int) -> str:
    """Which of our addresses the system uses to reach this host. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise UsageError(f"no route from this device to {host}: {error.strerror or error}") from error
        return str(probe.getsockname()[0])


def parse_listen(text: str, default_port: int, option: str = "--listen") -> tuple[str, int]:
    """'192.168.1.10:47100' -> its parts; refuses what is not an address of this machine."""
    host, separator, port_text = text.partition(":")
    port = default_port
    if separator:
        if not port_text.isdigit() or not 1 <= int(port_text) <= 65000:
            raise UsageError(f"{option} {text!r}: the port must be a number from 1 to 65000")
        port = int(port_text)
    try:
        host = socket.gethostbyname(host)
    except OSError as error:
        raise UsageError(f"{option} {text!r}: {host!r} is not an address: {error.strerror or error}") from error
    mine = own_addresses()
    if host not in mine:
        listed = ", ".join(f"{address} ({interface})" for address, interface in sorted(mine.items()))
        raise UsageError(f"{option} {text!r}: {host} is not an address of this machine; it has {listed}")
    return host, port
