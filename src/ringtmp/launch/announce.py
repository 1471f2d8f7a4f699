"""Rings on the local network: a master says that it is there (mDNS, DNS-SD), a device looks around.

Announced are the ring's name, its address and its public key, which is no secret: a device needs it to speak to the door at
all, and pairing proves it. What others announce is untrusted: whatever does not look like a ring is passed over. UDP port
5353, multicast, on the one address a master listens on.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from ringtmp.errors import UsageError
from ringtmp.launch.device_names import NAME
from ringtmp.launch.pairing_code import MISSING
from ringtmp.transport.encryption import is_key

KIND = "_ringtmp._tcp.local."
LOOK_S = 3.0
#: Of a network full of strangers' announcements, so many are looked at.
MOST_RINGS = 64


class Found(msgspec.Struct, frozen=True, order=True):
    ring: str
    address: str  # host:port of the door
    key: str

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]


def available() -> bool:
    """Whether what discovery needs is installed."""
    from importlib.util import find_spec

    return find_spec("zeroconf") is not None and find_spec("spake2") is not None


def can_announce(host: str) -> bool:
    """Whether it can be announced, with what is installed, that a ring is at this address."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return available()


class Announcement:
    """Says that a ring is here, until it is closed. In a thread of its own: it takes a second to be sure that the name is free,
    and a network without multicast must not keep a master from waiting for devices."""

    def __init__(self, ring: str, host: str, port: int, key: str) -> None:
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._announce, args=(ring, host, port, key), daemon=True)
        self._thread.start()

    def _announce(self, ring: str, host: str, port: int, key: str) -> None:
        with contextlib.suppress(Exception):  # whatever a network refuses: devices can still join with a token
            zeroconf = _zeroconf([host])
            try:
                zeroconf.register_service(_service(ring, host, port, key), allow_name_change=True)
                self._closed.wait()
                zeroconf.unregister_all_services()
            finally:
                zeroconf.close()

    def close(self) -> None:
        """Without waiting for the network."""
        self._closed.set()


def look(seconds: float = LOOK_S, hosts: Iterable[str] | None = None) -> list[Found]:
    """The rings that answer within that time, on all networks of this device or on those of these addresses."""
    if not available():
        raise UsageError(MISSING)
    from zeroconf import ServiceBrowser

    seen = _Seen()
    try:
        zeroconf = _zeroconf(hosts)
    except OSError as error:
        raise UsageError(
            f"cannot look for rings here: {error.strerror or error}. Join with the line the master prints (--join TOKEN)"
        ) from error
    try:
        ServiceBrowser(zeroconf, KIND, listener=seen)  # type: ignore[arg-type, unused-ignore]
        time.sleep(seconds)
        limit_ms = 1000.0
        infos = [
            zeroconf.get_service_info(KIND, name, timeout=int(limit_ms)) for name in sorted(seen.names)[:MOST_RINGS]
        ]
    finally:
        zeroconf.close()
    return sorted({ring for info in infos if info is not None for ring in read(info)})


class _Seen:
    """Names that were announced."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add_service(self, zeroconf: Any, kind: str, name: str) -> None:
        if len(self.names) < MOST_RINGS:
            self.names.add(name)

    def update_service(self, zeroconf: Any, kind: str, name: str) -> None:
        self.add_service(zeroconf, kind, name)

    def remove_service(self, zeroconf: Any, kind: str, name: str) -> None:
        self.names.discard(name)


def read(info: Any) -> list[Found]:
    """What an announcement says, if it is one of a ring."""
    said = {name: value for name, value in (info.properties or {}).items() if isinstance(value, bytes)}
    ring, key = (said.get(name, b"").decode("ascii", "replace") for name in (b"ring", b"key"))
    if not (NAME.fullmatch(ring) and is_key(key) and info.port and 0 < info.port < 65535):
        return []
    found = []
    for packed in info.addresses[:4]:
        with contextlib.suppress(ValueError):
            address = ipaddress.IPv4Address(packed)
            if not (address.is_multicast or address.is_unspecified):
                found.append(Found(ring, f"{address}:{info.port}", key))
    return found


def _service(ring: str, host: str, port: int, key: str) -> Any:
    from zeroconf import ServiceInfo

    # The name need not be the ring's: two masters in one network may both have a ring called home.
    return ServiceInfo(
        KIND, f"{ring}-{key[:4].encode().hex()}.{KIND}", port=port, addresses=[ipaddress.IPv4Address(host).packed],
        properties={b"ring": ring.encode(), b"key": key.encode()}, server=f"ringtmp-{key[:6].encode().hex()}.local.",
    )  # fmt: skip


def _zeroconf(hosts: Iterable[str] | None) -> Any:
    from zeroconf import InterfaceChoice, IPVersion, Zeroconf

    chosen: Any = InterfaceChoice.All if hosts is None else list(hosts)
    return Zeroconf(interfaces=chosen, ip_version=IPVersion.V4Only)
