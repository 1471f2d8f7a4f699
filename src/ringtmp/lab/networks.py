"""Networks of emulated devices: a namespace for each, a cable of limited rate to one switch in a namespace of its own.

    rtlab-PID-NAME          rtlab-PID-switch
      eth0 10.77.0.N  <-->  pN -- bridge        the rate is set on both ends, so it holds in both directions

The host's own network is not touched: the cables are laid between the namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ringtmp.errors import UsageError
from ringtmp.lab.devices_file import RESERVED

PREFIX = "rtlab-"
FOLDER = Path("/var/run/netns")  # where `ip netns` keeps them
INSTEAD = "or use --no-isolation, which limits neither CPU nor memory"
COMMAND_LIMIT_S = 30.0
#: What a full queue holds, as in a home router. Beyond it packets are dropped and TCP slows down.
QUEUE_MS = 50
#: The most that TCP hands to a card at once, and its headers.
SEGMENT_BYTES = 68_000
#: Congestion control: the one every kernel lets a namespace choose; the host's own may be one that sends packet by packet on a
#: timer (bbr). Receive buffers: large packets fill small ones early, and what finds them full is dropped.
SETTINGS = {"tcp_congestion_control": "reno", "tcp_rmem": "4096 1048576 6291456"}
_NAME = re.compile(PREFIX + r"(\d+)-[a-z0-9-]+")


class Port(msgspec.Struct, frozen=True):
    """One device's place on the switch."""

    name: str
    number: int  # from 1
    link_mbps: float

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"


def namespace(lab: int, name: str) -> str:
    return f"{PREFIX}{lab}-{name}"


def require_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UsageError(f"the lab needs {' and '.join(missing)}: install the package iproute2, {INSTEAD}")


def build(lab: int, ports: Sequence[Port]) -> None:
    """Everything up when it returns, about 30 ms per device. On an error, `remove` clears what was made."""
    switch = namespace(lab, RESERVED)
    _run(["ip", "netns", "add", switch])
    for port in ports:
        _run(["ip", "netns", "add", namespace(lab, port.name)])
    cables = ["link add bridge type bridge", "link set bridge up"]
    for port in ports:
        cables.append(f"link add p{port.number} type veth peer name eth0 netns {namespace(lab, port.name)}")
        cables.append(f"link set p{port.number} master bridge mtu {packet_bytes(port.link_mbps)} up")
    _batch("ip", switch, cables)
    _batch("tc", switch, [_limit(f"p{port.number}", port.link_mbps) for port in ports])
    for port in ports:
        inside = namespace(lab, port.name)
        _batch(
            "ip",
            inside,
            [
                "link set lo up",
                f"addr add {port.address}/24 dev eth0",
                f"link set eth0 mtu {packet_bytes(port.link_mbps)} up",
            ],
        )
        _batch("tc", inside, [_limit("eth0", port.link_mbps)])
        for file, value in SETTINGS.items():
            _run(["ip", "netns", "exec", inside, "tee", f"/proc/sys/net/ipv4/{file}"], value)


def remove(lab: int) -> None:
    """Delete every namespace of this lab; their cables and the bridge go with them."""
    for name in _names():
        if (found := _NAME.fullmatch(name)) and int(found[1]) == lab:
            _run(["ip", "netns", "delete", name])


def labs() -> set[int]:
    """Process ids of the labs that namespaces exist of."""
    return {int(found[1]) for name in _names() if (found := _NAME.fullmatch(name))}


def packet_bytes(link_mbps: float) -> int:
    """A millisecond's worth, within what Ethernet knows. Every packet that waits for its turn costs a timer, an interrupt and
    a wake-up, and they are charged to the device that happens to run; a real wire charges nobody."""
    return max(1500, min(9000, round(link_mbps * 1e6 / 8 / 1000)))


def burst_bytes(link_mbps: float) -> int:
    """What may pass at once: 2 ms worth, but no less than ten full frames, and one whole segment where that is at most 6 ms:
    else every packet wakes the receiver for itself, which costs an emulated device what a network card would spare it."""
    bytes_per_ms = link_mbps * 1e6 / 8 / 1000
    segment = SEGMENT_BYTES if 6 * bytes_per_ms >= SEGMENT_BYTES else 0
    return max(15_140, segment, round(2 * bytes_per_ms))


def _limit(interface: str, link_mbps: float) -> str:
    rate = f"rate {round(link_mbps * 1e6)}bit burst {burst_bytes(link_mbps)} latency {QUEUE_MS}ms"
    return f"qdisc add dev {interface} root tbf {rate}"


def _names() -> Iterable[str]:
    return sorted(os.listdir(FOLDER)) if FOLDER.is_dir() else ()


def _batch(tool: str, inside: str, lines: Sequence[str]) -> None:
    _run([tool, "-n", inside, "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:300]
        raise UsageError(f"this machine refuses {' '.join(command)!r}: {said}: run the lab as root on Linux, {INSTEAD}")
