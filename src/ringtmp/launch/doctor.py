"""What may stand between this device and a ring, looked at one thing at a time; `check_join.py` looks at the way to a master.

A check takes what it judges as arguments, changes nothing and returns findings. None of them loads torch into this
process: a device may be too small for it, and that is worth saying.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import zmq

from ringtmp.errors import UsageError
from ringtmp.launch.agent_messages import DEFAULT_PORT, HUB_PORT_OFFSET
from ringtmp.launch.device_facts import address_towards, own_addresses, usable_cores
from ringtmp.launch.key_store import config_dir
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.system.container_limits import Limits, group_limits
from ringtmp.units import bytes_text, seconds_text

OLDEST_TORCH = (2, 6)
OLDEST_ZMQ = (4, 3, 5)
OLDEST_PYTHON = (3, 11)
YEAR_2025_S = 1_735_689_600.0
TORCH_LIMIT_S = 120.0
#: Reserved for documentation and never routed; asking for the way there sends nothing.
_ELSEWHERE = "198.51.100.1"
_PROBE = """
import json, time
began = time.monotonic()
import torch
print(json.dumps([torch.__version__, torch.version.cuda, torch.version.hip, time.monotonic() - began]))
"""


class Finding(msgspec.Struct, frozen=True):
    name: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    todo: str = ""


def look(listen: tuple[str, int] | None = None) -> list[Finding]:
    """Everything that needs no master. `listen`: where a master is meant to listen here."""
    limits = group_limits()
    addresses = own_addresses()
    used = listen[0] if listen else _default_address(addresses)
    return [
        check_addresses(addresses, used),
        check_ports(used, listen[1] if listen else DEFAULT_PORT, wanted=listen is not None),
        check_clock(time.time()),
        check_python(sys.version_info[:3], zmq.zmq_version_info(), bool(zmq.has("curve"))),
        check_torch(nvidia=Path("/dev/nvidiactl").exists()),
        check_cores(usable_cores(), limits),
        check_memory(psutil.virtual_memory().available, limits),
        check_config(config_dir()),
        check_power(Path("/"), shutil.which("vcgencmd") is not None),
    ]


def check_addresses(addresses: dict[str, str], used: str) -> Finding:
    """`addresses`: IPv4 address -> interface."""
    outside = {address: interface for address, interface in addresses.items() if not address.startswith("127.")}
    if not outside:
        return Finding(
            "addresses", "warn", "this device has no address that another could reach",
            "plug in a cable or join a Wi-Fi; until then only rings on this machine work",
        )  # fmt: skip
    listed = ", ".join(f"{address} ({interface})" for address, interface in sorted(outside.items()))
    if used.startswith("169.254."):
        return Finding(
            "addresses", "warn", f"{listed}; used: {used}, which this device gave itself because no router answered",
            "check the cable or the router's DHCP; boards on one switch without a router still reach each other",
        )  # fmt: skip
    if len(outside) == 1:
        return Finding("addresses", "ok", listed)
    return Finding(
        "addresses", "ok", f"{listed}; used: {used}",
        "to use another, pass --listen ADDRESS to ringtmp train or ringtmp node; every device must be able to reach it",
    )  # fmt: skip


def check_ports(host: str, port: int, wanted: bool) -> Finding:
    """Free for a master? Bound for a moment, never listened on. A device that only joins needs neither."""
    taken = [each for each in (port, port + HUB_PORT_OFFSET) if not _is_free(host, each)]
    if not taken:
        return Finding("ports", "ok", f"{port} and {port + HUB_PORT_OFFSET} on {host} are free")
    text = " and ".join(str(each) for each in taken)
    return Finding(
        "ports", "fail" if wanted else "warn", f"{text} on {host} {'is' if len(taken) == 1 else 'are'} taken",
        f"a master may be running here already (fine); a second needs --listen {host}:PORT with PORT and PORT+1 free",
    )  # fmt: skip


def check_clock(now_s: float) -> Finding:
    text = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now_s))
    if YEAR_2025_S <= now_s < YEAR_2025_S + 50 * 365 * 86400:
        return Finding("clock", "ok", text)
    return Finding(
        "clock", "warn", f"{text} cannot be right",
        "joining still works (only the master's clock limits a token); set the clock so that runs get the right dates",
    )  # fmt: skip


def check_python(python: Iterable[int], libzmq: Iterable[int], curve: bool) -> Finding:
    python, libzmq = tuple(python), tuple(libzmq)
    text = f"Python {_dotted(python)}, libzmq {_dotted(libzmq)} {'with' if curve else 'without'} CURVE"
    if python < OLDEST_PYTHON:
        return Finding("python", "fail", text, f"install Python {_dotted(OLDEST_PYTHON)} or newer")
    if not curve:
        return Finding(
            "python", "fail", text, "nothing is sent unencrypted: install pyzmq's own wheel (pip install pyzmq)"
        )
    if libzmq < OLDEST_ZMQ:
        return Finding("python", "warn", text, f"libzmq {_dotted(OLDEST_ZMQ)} is what is tested: pip install -U pyzmq")
    return Finding("python", "ok", text)


def check_torch(nvidia: bool, python: str = sys.executable, limit_s: float = TORCH_LIMIT_S) -> Finding:
    """Loads it in a process of its own."""
    install = "install it as docs/devices.md says (the CPU build)"
    try:
        done = subprocess.run([python, "-P", "-c", _PROBE], capture_output=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("torch", "fail", f"could not be loaded: {error}", install)
    if done.returncode < 0:
        return Finding(
            "torch", "fail", f"the process that loaded it was killed by signal {-done.returncode}",
            "signal 9: too little memory, close other programs or add swap; signal 4: this wheel is not for this processor",
        )  # fmt: skip
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        return Finding("torch", "fail", f"does not load: {words[-1][:200] if words else 'it said nothing'}", install)
    version, cuda, hip, took_s = msgspec.json.decode(done.stdout, type=tuple[str, str | None, str | None, float])
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    text = f"{version}, {build} build, loads in {seconds_text(took_s)}"
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        return Finding("torch", "fail", text, f"RingTMP needs {_dotted(OLDEST_TORCH)} or newer: {install}")
    if cuda and not nvidia:
        why = "there is no NVIDIA device here, so the CUDA libraries waste gigabytes"
        return Finding("torch", "warn", text, f"{why}: {install}")
    return Finding("torch", "ok", text)


def check_cores(usable: int, limits: Limits) -> Finding:
    text = f"{usable} usable of {os.cpu_count()}"
    if limits.cores is not None and limits.cores < usable:
        return Finding(
            "cores", "warn", f"{text}, but a control group allows {limits.cores:.2g} cores' worth of time",
            "train with --threads 1: more threads than time only wait for each other",
        )  # fmt: skip
    return Finding("cores", "ok", f"{text}; a ring uses the smallest number among its devices, or --threads")


def check_memory(available_bytes: int, limits: Limits) -> Finding:
    free = min(available_bytes, limits.memory_free_bytes if limits.memory_free_bytes is not None else available_bytes)
    text = f"{bytes_text(free)} free, torch alone needs {bytes_text(PROCESS_BYTES)}"
    if limits.memory_bytes is not None and free < available_bytes:
        text += f" (a control group allows {bytes_text(limits.memory_bytes)})"
    if free < PROCESS_BYTES:
        return Finding("memory", "fail", text, "close other programs, boot without a desktop, or leave this device out")
    if free < 2 * PROCESS_BYTES:
        return Finding("memory", "warn", text, "little is left for layers: give this device a small segment (--cuts)")
    return Finding("memory", "ok", text)


def check_config(folder: Path) -> Finding:
    """Keys and rings are for their owner's eyes: folders 0700, files 0600."""
    if not folder.is_dir():
        return Finding("config", "ok", f"{folder} is made on first use")
    folders = [each for each in (folder, folder / "rings") if each.is_dir()]
    files = [each for each in (folder / "identity.json", *sorted((folder / "rings").glob("*.json"))) if each.is_file()]
    loose = [each for each in (*folders, *files) if each.stat().st_mode & 0o077]
    if loose:
        listed = ", ".join(f"{each} ({each.stat().st_mode & 0o777:04o})" for each in loose)
        return Finding("config", "fail", f"other users can read {listed}", f"chmod -R u=rwX,go= {folder}")
    if not os.access(folder, os.W_OK):
        return Finding("config", "fail", f"{folder} cannot be written", f"check who owns it: ls -ld {folder}")
    return Finding("config", "ok", f"{folder} is yours alone")


def check_power(root: Path, vcgencmd: bool) -> Finding:
    """Only whether they are there; none is read."""
    seen = {
        "powercap": any(root.glob("sys/class/powercap/*/energy_uj")),
        "hwmon": any(root.glob("sys/class/hwmon/*/power*_input")) or any(root.glob("sys/class/hwmon/*/curr*_input")),
        "NVML": (root / "dev/nvidiactl").exists(),
        "vcgencmd": vcgencmd,
    }
    there = [name for name, present in seen.items() if present]
    return Finding(
        "power", "ok", f"sensors: {', '.join(there)}" if there else "no power sensor; nothing here needs one"
    )


def _default_address(addresses: dict[str, str]) -> str:
    """The one on the way out; without a way out, the first that is not loopback."""
    try:
        return address_towards(_ELSEWHERE, 9)
    except UsageError:
        return next((each for each in sorted(addresses) if not each.startswith("127.")), "127.0.0.1")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does: closing connections do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _dotted(version: Iterable[int]) -> str:
    return ".".join(str(part) for part in version)
