"""ringtmp env"""

from __future__ import annotations

import click
import msgspec


class Environment(msgspec.Struct, frozen=True):
    """What a bug report needs. No key, token, address, host name or value of an environment variable belongs in here."""

    ringtmp: str
    python: str
    torch: str  # empty: not installed; likewise below
    pyzmq: str
    libzmq: str
    msgspec: str
    safetensors: str
    numpy: str
    platform: str
    cpu: str
    cores: int
    memory_bytes: int
    group_cores: float | None  # limits of control groups, if any
    group_memory_bytes: int | None
    interfaces: tuple[str, ...]
    rings: int


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


def look() -> Environment:
    import platform

    import psutil
    import zmq

    from ringtmp import __version__
    from ringtmp.launch.device_facts import usable_cores
    from ringtmp.launch.key_store import Rings
    from ringtmp.system.container_limits import group_limits
    from ringtmp.system.resources import cpu_name

    limits = group_limits()
    return Environment(
        ringtmp=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        torch=_version("torch"),
        pyzmq=_version("pyzmq"),
        libzmq=f"{zmq.zmq_version()} {'with' if zmq.has('curve') else 'without'} CURVE",
        msgspec=_version("msgspec"),
        safetensors=_version("safetensors"),
        numpy=_version("numpy"),
        platform=platform.platform(),
        cpu=cpu_name(),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        group_cores=limits.cores,
        group_memory_bytes=limits.memory_bytes,
        interfaces=tuple(sorted(psutil.net_if_addrs())),
        rings=len(Rings().names()),
    )


def _lines(found: Environment) -> list[tuple[str, str]]:
    from ringtmp.units import bytes_text

    versions = ("ringtmp", "python", "torch", "pyzmq", "libzmq", "msgspec", "safetensors", "numpy")
    limits = [f"{found.group_cores:.2g} cores"] if found.group_cores is not None else []
    limits += [f"{bytes_text(found.group_memory_bytes)} memory"] if found.group_memory_bytes is not None else []
    return [
        *((name, getattr(found, name) or "not installed") for name in versions),
        ("platform", found.platform),
        ("cpu", found.cpu),
        ("cores", str(found.cores)),
        ("memory", bytes_text(found.memory_bytes)),
        ("group limits", ", ".join(limits) or "none"),
        ("interfaces", ", ".join(found.interfaces)),
        ("rings", str(found.rings)),
    ]


def _version(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
