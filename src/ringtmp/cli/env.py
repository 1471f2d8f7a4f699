"""ringtmp env"""

from __future__ import annotations

from typing import Any

import click
import msgspec


@click.command("env")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Print versions and facts about this machine. Contains no keys, tokens or addresses: safe to publish."""
    found = look()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    for name, value in _lines(found):
        print(f"{name:12}  {value}")


def look() -> dict[str, Any]:
    """What a bug report needs. No key, token, address, host name or value of an environment variable belongs in here."""
    import platform

    import psutil
    import zmq

    from ringtmp import __version__
    from ringtmp.launch.device_facts import installed, usable_cores
    from ringtmp.launch.key_store import Rings
    from ringtmp.system.container_limits import group_limits
    from ringtmp.system.resources import cpu_name

    limits = group_limits()
    return {
        "ringtmp": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": installed("torch"),
        "pyzmq": installed("pyzmq"),
        "libzmq": f"{zmq.zmq_version()} {'with' if zmq.has('curve') else 'without'} CURVE",
        **{package: installed(package) for package in ("msgspec", "safetensors", "numpy")},
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "group_cores": limits.cores,
        "group_memory_bytes": limits.memory_bytes,
        "interfaces": sorted(psutil.net_if_addrs()),
        "rings": len(Rings().names()),
    }


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    from ringtmp.units import bytes_text

    group_cores, group_bytes = found.pop("group_cores"), found.pop("group_memory_bytes")
    limits = [f"{group_cores:.2g} cores"] if group_cores is not None else []
    limits += [f"{bytes_text(group_bytes)} memory"] if group_bytes is not None else []
    shown = {
        "memory": bytes_text(found.pop("memory_bytes")),
        "group limits": ", ".join(limits) or "none",
        "interfaces": ", ".join(found.pop("interfaces")),
        "rings": found.pop("rings"),
    }
    return [(name, str(value) or "not installed") for name, value in {**found, **shown}.items()]
