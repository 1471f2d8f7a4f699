"""The tables and the figure of docs/scale.md: one model on 4 to 100,000 devices, by every way to train, on three networks.

    python scripts/forecast_large_rings.py [--figure docs/scale.svg]        about three minutes; the figure needs matplotlib

What has an event simulation is simulated; what would take too long (marked ~) follows from the formula the simulation is
tested against.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from ringtmp.plan.devices import Device, LayerCost, Link, Measured
from ringtmp.plan.layer_costs import CostTable
from ringtmp.plan.memory_forecast import forecast, held_in, replica_forecast
from ringtmp.plan.route import Route, Visit
from ringtmp.plan.simulate_pipeline import RingOptions, simulate_ring
from ringtmp.strategies.data_parallel.simulate_sum_over_workers import simulate_sums, up_and_down_tree
from ringtmp.strategies.data_parallel.simulated_workers import Workload
from ringtmp.strategies.ps.simulate import ServerOptions, simulate_ps

COUNTS = (4, 16, 64, 256, 1024, 100_000)
BLOCKS, WIDTH, SEQUENCE, BATCH, MICROBATCH = 128, 512, 128, 1024, 1
#: A board of the class of a Pi 4: float32 operations per second of all cores, memory, watts are not needed here.
BOARD_FLOPS, BOARD_BYTES = 24e9, 4 * 2**30
NETWORKS = {
    "LAN, 1 Gbit/s": Link(117e6, 117e6, 0.1e-3, 250e-6, 2e-9),
    "Wi-Fi, 40 Mbit/s": Link(4.7e6, 4.7e6, 1.5e-3, 250e-6, 2e-9),
    "home internet, 20 up / 100 down": Link(2.35e6, 11.7e6, 15e-3, 250e-6, 2e-9),
}


def model() -> list[LayerCost]:
    """A byte transformer: 12 w**2 parameters and 24 w**2 operations per position and block, three times that with
    backward; a microbatch keeps about 34 values per width and position."""
    block_s = 24 * WIDTH**2 * SEQUENCE * MICROBATCH / BOARD_FLOPS
    boundary = 4 * WIDTH * SEQUENCE * MICROBATCH
    weights = 4 * 12 * WIDTH**2
    update_s = weights / 1e9
    end = LayerCost("end", (Measured(MICROBATCH, block_s / 50, block_s / 25, boundary, boundary),), 2**20, 2**20, 2**21)
    block = LayerCost(
        "block",
        (Measured(MICROBATCH, block_s, 2 * block_s, 17 * boundary, boundary),),
        weights,
        weights,
        2 * weights,
        update_s,
    )
    return [end, *[block] * BLOCKS, end]


def boards(count: int, link: Link) -> list[Device]:
    return [Device(f"board {index}", memory_bytes=BOARD_BYTES, link=link) for index in range(count)]


@dataclass(frozen=True)
class Cell:
    samples_per_s: float
    note: str = ""  # '~' from the formula; 'mem' does not fit
    members: int = 0


def laps_route(count: int, laps: int) -> Route | None:
    """Every board is visited `laps` times, the master once more for the tail; layers spread evenly over boards."""
    visits = count * laps + 1
    layers = BLOCKS + 2
    if visits > layers:
        return None
    # The master is visited once more than the others: its segments are that much shorter.
    parts = [1 / (laps + 1) if index % count == 0 else 1 / laps for index in range(visits)]
    ends = accumulate(parts)
    edges = [0, *(max(index + 1, round(end * layers / count)) for index, end in enumerate(ends))]
    return Route(tuple(Visit(i, i % count, edges[i], edges[i + 1]) for i in range(visits)))


def ring(count: int, link: Link, laps: int = 1, batch: int = BATCH) -> Cell | None:
    layers = model()
    route = laps_route(count, laps)
    if route is None:
        return None
    microbatches = max(1, batch // MICROBATCH)
    table, there = CostTable(layers, min(MICROBATCH, batch)), boards(count, link)
    visits = len(route.visits)
    for window in (2 * visits, visits, visits // 2, 2):
        options = RingOptions(microbatches, window=min(microbatches, window))
        result = simulate_ring(table, route, there, options)
        memory = forecast(table, route, there, held_in(result, route, options, there))
        if all(each.missing_bytes <= 0 for each in memory):
            return Cell(batch / result.step_s, "", count)
    return Cell(batch / result.step_s, "mem", count)


def rings_of_rings(count: int, link: Link) -> Cell | None:
    """R rings of p boards, each with its part of the batch; boards that hold the same layers sum their gradients by ring
    all-reduce: 2 (R-1) messages of P/(p R). The best p is taken."""
    best: Cell | None = None
    parameters = sum(layer.gradient_bytes for layer in model())
    for size in (4, 8, 16, 32, 64, 128):
        rings = count // size
        if rings < 1 or BATCH // rings < 1:
            continue
        own = ring(size, link, batch=BATCH // rings)
        if own is None or own.note:
            continue
        hop = parameters / size / rings / min(link.up_bytes_per_s, link.down_bytes_per_s) + 2 * link.latency_s
        step_s = (BATCH // rings) / own.samples_per_s + 2 * (rings - 1) * hop
        rate = (BATCH // rings) * rings / step_s
        if best is None or rate > best.samples_per_s:
            best = Cell(rate, "~" if rings > 1 else "", size)
    return best


def exchange(count: int, link: Link, way: str) -> Cell | None:
    if count > BATCH:
        return None
    layers = model()
    load = Workload(layers, BATCH, BATCH // MICROBATCH)
    there = boards(count, link)
    servers = 1 if way == "ps" else 0
    table, microbatches = load.share(count - servers)
    short = replica_forecast(table, there[0], True).missing_bytes > 0
    rate = min(link.up_bytes_per_s, link.down_bytes_per_s)
    if way == "ps workers" and count > 64:
        compute = microbatches * (table.forward_s[-1] + table.backward_s[-1])
        step_s = compute + 2 * load.exchanged_bytes * (count - 1) / count / rate + 4 * link.latency_s
        return Cell(BATCH / step_s, "~mem" if short else "~", count)
    simulate: dict[str, Callable[[], float]] = {
        "ps": lambda: simulate_ps(load, there, ServerOptions(1, keys=8)).step_s,
        "ps workers": lambda: simulate_ps(load, there, ServerOptions(0, keys=1)).step_s,
        "all-reduce ring": lambda: simulate_sums(load, there).step_s,
        "all-reduce tree": lambda: simulate_sums(load, there, way=up_and_down_tree).step_s,
    }
    return Cell(BATCH / simulate[way](), "mem" if short else "", count)


WAYS: dict[str, Callable[[int, Link], Cell | None]] = {
    "ring": ring,
    "ring, 4 laps": lambda count, link: ring(count, link, 4),
    "rings of rings": rings_of_rings,
    "ps, one server": lambda count, link: exchange(count, link, "ps"),
    "ps, servers = workers": lambda count, link: exchange(count, link, "ps workers"),
    "all-reduce, ring": lambda count, link: exchange(count, link, "all-reduce ring"),
    "all-reduce, tree": lambda count, link: exchange(count, link, "all-reduce tree"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", metavar="FILE.svg")
    arguments = parser.parse_args()
    table = CostTable(model(), MICROBATCH)
    alone = BATCH / (BATCH / MICROBATCH * (table.forward_s[-1] + table.backward_s[-1]))
    parameters = sum(layer.gradient_bytes for layer in model()) / 4
    print(f"{BLOCKS} blocks, {parameters / 1e6:.0f}M parameters, batch {BATCH}; one board that could hold it: ", end="")
    print(f"{alone:.3g} samples/s\n")
    found: dict[str, dict[str, list[Cell | None]]] = {}
    for network, link in NETWORKS.items():
        print(f"**{network}**, efficiency (samples/s)\n")
        print("| way | " + " | ".join(f"{count:,}" for count in COUNTS) + " |\n|" + "---|" * (len(COUNTS) + 1))
        for way, make in WAYS.items():
            cells = [make(count, link) for count in COUNTS]
            found.setdefault(network, {})[way] = cells
            texts = [_text(cell, count, alone, way) for cell, count in zip(cells, COUNTS, strict=True)]
            print(f"| {way} | " + " | ".join(texts) + " |", flush=True)
        print()
    if arguments.figure:
        _draw(found, alone, arguments.figure)


def _text(cell: Cell | None, count: int, alone: float, way: str) -> str:
    if cell is None:
        return "-"
    share = cell.samples_per_s / (alone * count)
    size = f", {cell.members} each" if way == "rings of rings" else ""
    memory = " †" if "mem" in cell.note else ""
    percent = f"{share:.0%}" if share >= 0.01 else f"{share * 100:.1g}%" if share >= 1e-4 else "<0.01%"
    return f"{'~' if '~' in cell.note else ''}{percent} ({_rate(cell.samples_per_s)}{size}){memory}"


def _rate(per_s: float) -> str:
    digits = max(0, 1 - math.floor(math.log10(per_s)))
    return f"{per_s:,.{digits}f}"


def _draw(found: dict[str, dict[str, list[Cell | None]]], alone: float, path: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    colours = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#cc79a7", "#999999")
    figure, axes = pyplot.subplots(1, len(found), figsize=(13, 4.2), sharey=True)
    for axis, (network, ways) in zip(axes, found.items(), strict=True):
        axis.plot(
            COUNTS, [alone * count for count in COUNTS], color="#cccccc", linestyle="--", linewidth=1, label="ideal"
        )
        for colour, (way, cells) in zip(colours, ways.items(), strict=True):
            points = [(count, cell) for count, cell in zip(COUNTS, cells, strict=True) if cell is not None]
            axis.plot(
                [count for count, _ in points], [cell.samples_per_s for _, cell in points], color=colour, label=way,
                linewidth=1.6,
            )  # fmt: skip
            for count, cell in points:  # hollow: does not fit these boards
                face = "white" if "mem" in cell.note else colour
                axis.plot([count], [cell.samples_per_s], marker="o", markersize=5, color=colour, markerfacecolor=face)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(network, fontsize=11)
        axis.set_xlabel("devices")
        axis.grid(True, color="#eeeeee")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("samples per second")
    axes[-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    pyplot.rcParams["svg.hashsalt"] = "scale"
    figure.savefig(path, metadata={"Date": None})
    print(f"figure in {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
