"""ringtmp lab"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ringtmp.errors import UsageError

if TYPE_CHECKING:
    from ringtmp.lab.devices_file import Device
    from ringtmp.lab.machine_shares import Share


@click.command("lab")
@click.option(
    "--devices", "file", type=click.Path(path_type=Path), required=True, metavar="FILE.toml",
    help="The devices, one [[device]] table each, the master first.",
)  # fmt: skip
@click.option(
    "--scale", is_flag=True, allow_from_autoenv=False,
    help="If the devices need more than this machine has, slow down every CPU and link by the same factor.",
)  # fmt: skip
@click.option(
    "--no-isolation", is_flag=True,
    help="Use plain processes on 127.0.0.1, without root: links are slowed down, CPU and memory are not limited.",
)  # fmt: skip
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- VERB … | exec -- COMMAND…")
def command(file: Path, scale: bool, no_isolation: bool, words: tuple[str, ...]) -> None:
    """Train, evaluate, predict or generate on emulated devices, each with its own network, link rate, CPU share and memory.

    \b
    ringtmp lab --devices five.toml -- train --model mlp --steps 100
    ringtmp lab --devices five.toml -- evaluate RUN     likewise predict and generate
    ringtmp lab exec --devices five.toml -- COMMAND…    once on every device, output after the device's name

    The devices run the real commands. The lab passes on the master's output and exits with its exit code. It needs root on
    Linux, except with --no-isolation. A command has RINGTMP_DEVICE, RINGTMP_ADDRESS and RINGTMP_PEERS (name=address …) in
    its environment.
    """
    from ringtmp.lab import devices_file, run_command
    from ringtmp.lab.emulated_devices import EmulatedDevices, remove_leftovers

    verb, rest = (words[0], list(words[1:])) if words else ("", [])
    if verb not in (*run_command.VERBS, "exec") or (verb == "exec" and not rest):
        raise UsageError(
            f"lab runs {', '.join(run_command.VERBS)} or 'exec COMMAND…' after --, not {verb or 'nothing'!r}: "
            "run other verbs with exec ringtmp VERB …"
        )
    devices = devices_file.read(file)
    threads = 1024  # a command may use every core of its device
    if verb != "exec":
        rest, threads = run_command.complete(rest, len(devices), verb)
        if not no_isolation:
            run_command.require_memory(devices)
    if not no_isolation:
        _require_isolation()
    factor, shares = _shares(devices, threads, scale, no_isolation)
    signals = run_command.Signals()
    with signals.caught():
        if dead := remove_leftovers(not no_isolation):
            _say(f"removed what killed labs left behind: {', '.join(map(str, dead))}")
        began = time.monotonic()
        with EmulatedDevices(shares, factor, not no_isolation) as emulated:
            _tell(shares, factor, no_isolation, time.monotonic() - began)
            code = (
                run_command.lead(emulated, verb, rest, signals, _say)
                if verb != "exec"
                else run_command.execute(emulated, rest, signals)
            )
    sys.exit(code)


def _require_isolation() -> None:
    from ringtmp.lab import networks

    if sys.platform != "linux":
        raise UsageError(f"the lab needs Linux, and this is {sys.platform}: use a Linux machine, {networks.INSTEAD}")
    if os.geteuid() != 0:
        raise UsageError(
            f"the lab needs root to make networks and control groups: sudo ringtmp lab …, {networks.INSTEAD}"
        )
    networks.require_tools()


def _shares(
    devices: tuple[Device, ...], threads: int, scale: bool, no_isolation: bool
) -> tuple[float, tuple[Share, ...]]:
    from ringtmp.lab.machine_shares import Share, share_out
    from ringtmp.system.resources import machine_free_bytes

    if not no_isolation:
        return share_out(devices, sorted(os.sched_getaffinity(0)), machine_free_bytes(), threads, scale)
    if scale:
        raise UsageError("--scale cannot be used with --no-isolation, which does not limit CPUs")
    return 1.0, tuple(Share(device, device.cpu, (), device.link_mbps) for device in devices)


def _tell(shares: tuple[Share, ...], factor: float, no_isolation: bool, took_s: float) -> None:
    if no_isolation:
        _say(
            f"{len(shares)} plain processes on 127.0.0.1. NOT emulated: CPU shares, memory caps, a network of their own; "
            "speeds say nothing about such devices"
        )
        return
    listed = "; ".join(
        f"{share.device.name} {share.cpu:.3g} core{'s' if share.cpu > 1 else ''}, {share.device.memory_mb:g} MiB, "
        f"{share.link_mbps:.4g} Mbit/s"
        for share in shares
    )
    _say(f"{len(shares)} emulated devices ready in {took_s:.1f} s: {listed}")
    if factor < 1:
        _say(f"SCALED: every CPU and link runs at {factor:.3g} of its speed (a second here stands for {factor:.3g} s)")


def _say(text: str) -> None:
    print(f"ringtmp lab: {text}", file=sys.stderr, flush=True)
