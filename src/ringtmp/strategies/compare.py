"""The same work done another way, on paper: a short name and devices in, a simulated step or the reason against it out.

Names: ring, ps:bsp, ps:async, ps:ssp:SLACK, each ps with an optional :K for K dedicated servers or :workers for servers on
all nodes, allreduce:ring, allreduce:tree. Equal numbers of devices for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ringtmp.errors import RingError, UsageError, unknown
from ringtmp.plan.devices import Device, LayerCost, Paths
from ringtmp.plan.memory_forecast import MemoryForecast, replica_forecast, require_fit
from ringtmp.plan.planner import PlanOptions, plan
from ringtmp.plan.simulation import Simulated
from ringtmp.strategies.allreduce.simulate import Shape, simulate_allreduce
from ringtmp.strategies.data_parallel.simulated_workers import Workload
from ringtmp.strategies.ps.simulate import Mode, ServerOptions, simulate_ps

KNOWN = ("ring", "ps:bsp", "ps:async", "ps:ssp:3", "allreduce:ring", "allreduce:tree")


@dataclass(frozen=True, slots=True)
class Way:
    """`problem` is empty for a way that works; the step is simulated even where memory is too small."""

    name: str
    simulated: Simulated | None
    memory: tuple[MemoryForecast, ...]
    problem: str = ""


def compare(
    name: str, layers: Sequence[LayerCost], devices: Sequence[Device], options: PlanOptions, paths: Paths | None = None
) -> Way:
    if name == "ring":
        try:
            made = plan(layers, devices, options, paths)
        except RingError as error:
            return Way(name, None, (), str(error))
        return Way(name, made.simulated, made.memory)
    load = Workload(layers, options.batch_size, options.ring.microbatches, options.wire_ratio)
    kind, _, rest = name.partition(":")
    if kind == "allreduce" and rest in ("ring", "tree"):
        simulated, workers, servers = simulate_allreduce(load, devices, cast(Shape, rest), paths), len(devices), 0
    elif kind == "ps":
        chosen = server_options(name)
        if len(devices) <= chosen.servers:
            return Way(name, None, (), f"{chosen.servers} servers leave none of {len(devices)} devices to work")
        simulated, servers = simulate_ps(load, devices, chosen, paths), chosen.servers
        workers = len(devices) - servers
    else:
        raise unknown("way to compare with", name, KNOWN)
    table, _ = load.share(workers)
    memory = tuple(
        replica_forecast(table, device, node >= servers, options.process_bytes) for node, device in enumerate(devices)
    )
    try:
        require_fit(memory, options.ring.microbatches)
    except RingError as error:
        return Way(name, simulated, memory, str(error).rpartition(": ")[0])
    return Way(name, simulated, memory)


def check_name(name: str) -> None:
    """Refuse what `compare` would refuse, before anything is measured."""
    if name.partition(":")[0] == "ps":
        server_options(name)
    elif name not in KNOWN:
        raise unknown("way to compare with", name, KNOWN)


def server_options(name: str) -> ServerOptions:
    """'ps:ssp:3:workers' -> its parts."""
    _, mode, *rest = [*name.split(":"), ""] if ":" not in name else name.split(":")
    mode = mode or "bsp"
    if mode not in ("bsp", "async", "ssp"):
        raise unknown("way to compare with", name, KNOWN)
    slack = 3
    if mode == "ssp" and rest and rest[0].isdigit():
        slack = int(rest.pop(0))
    servers = 1
    if rest:
        word = rest.pop(0)
        if word != "workers" and not (word.isdigit() and int(word)):
            raise UsageError(f"{name!r}: {word!r} is neither a number of servers nor 'workers'")
        servers = 0 if word == "workers" else int(word)
    if rest:
        raise UsageError(f"{name!r} has a part too many: {rest[0]!r}")
    return ServerOptions(servers, cast(Mode, mode), slack)
