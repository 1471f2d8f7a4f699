"""A plan as people and programs read it: one frozen page, printed as tables or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

import msgspec
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ringtmp.config import RunConfig
from ringtmp.plan import advice
from ringtmp.plan.devices import Device
from ringtmp.plan.memory_forecast import MemoryForecast
from ringtmp.plan.objective import told
from ringtmp.plan.planner import Plan
from ringtmp.plan.simulated_step import Simulated
from ringtmp.strategies.compare import Way
from ringtmp.units import bytes_text, joules_text, seconds_text


class NodePage(msgspec.Struct, frozen=True):
    node: int
    device: str
    layers: str
    params_bytes: float
    memory: dict[str, float]  # by part, with total and free
    busy_s: float
    idle_s: float
    idle_fraction: float
    idle_causes: dict[str, float]
    bytes_sent: float
    bytes_received: float
    energy_j: float | None


class WayPage(msgspec.Struct, frozen=True):
    strategy: str
    step_s: float | None = None  # like those below: nothing is known of a way that cannot be
    samples_per_s: float | None = None
    idle_fraction: float | None = None
    bytes_total: float | None = None
    busiest_line_bytes: float | None = None
    most_memory_bytes: float | None = None
    energy_j_epoch: float | None = None
    problem: str = ""


class WithAll(msgspec.Struct, frozen=True):
    """A plan in short."""

    step_s: float
    samples_per_s: float
    idle_fraction: float
    layers: dict[str, str]  # by device
    cuts: str
    most_memory_bytes: float


class Page(msgspec.Struct, frozen=True):
    """All times per step, all bytes per step unless named otherwise; everything is predicted."""

    model: str
    data: str
    nodes: int
    batch_size: int
    microbatches: int
    window: int
    schedule: str
    cuts: str
    step_s: float
    samples_per_s: float
    epoch_s: float | None
    ideal_s: dict[str, float]
    parts: dict[str, float]
    parts_of: str
    limit: str
    limit_share: float
    gains: list[dict[str, float | str]]
    left_out: list[dict[str, str]]
    order_gap: float
    per_node: list[NodePage]
    ways: list[WayPage]
    layers: list[str] = []  # their names, by number
    with_all: WithAll | None = None  # the best plan that uses every device, where this one does not
    made_for: str = "time"  # what is least
    purpose: str = ""  # the same for people
    energy_source: str = "modelled"
    strategy: str = ""  # the way that --strategy auto chooses; everything above is of the best ring
    strategy_chosen: str = ""  # why, in one line
    groups: str = ""  # M-2-2-M, with who holds what; empty where no stage is shared


def headline(made: Plan) -> str:
    count, idle = len(made.devices), made.simulated.idle_fraction
    return f"{count} device{'s' if count != 1 else ''}, {seconds_text(made.step_s)} a step, idle {idle:.0%}"


def page(
    made: Plan, everyone: Sequence[Device], may_grow: bool, others: Sequence[Way], steps_per_epoch: int | None,
    settings: RunConfig, data: str, with_all: Plan | None = None, strategy: str = "", why: str = "",
) -> Page:  # fmt: skip
    limits, parts, limit = advice.bounds(made), advice.parts(made), advice.limit(made)
    gains = advice.gains(made, tuple(everyone), may_grow)
    own = Way(settings.ring.strategy, made.simulated, made.memory)
    waiting = {f"waiting for {cause}": length for cause, length in parts.waiting_s.items()}
    work = {"forward": parts.forward_s, "backward": parts.backward_s, "update": parts.update_s}
    ideal = {"compute": limits.compute_s, "link": limits.link_s, "slowest node": limits.slowest_s}
    return Page(
        model=settings.model.name, data=data, nodes=len(made.devices), batch_size=made.options.batch_size,
        microbatches=made.options.ring.microbatches, window=made.window, schedule=made.options.schedule,
        cuts=_cuts(made.bounds), step_s=made.step_s, samples_per_s=made.samples_per_s,
        epoch_s=None if steps_per_epoch is None else steps_per_epoch * made.step_s,
        ideal_s=ideal | {"max(c, T)": limits.ideal_s},
        parts=work | waiting, parts_of=parts.device, limit=limit.text, limit_share=limit.share,
        gains=[{"change": each.change, "step_s": each.step_s, "gain": each.gain} for each in gains],
        left_out=[{"device": each.device, "reason": each.reason} for each in made.left_out], order_gap=made.gap,
        per_node=[_node(made, node) for node in range(len(made.devices))],
        ways=[_way(each, made.options.batch_size, steps_per_epoch) for each in (own, *others)],
        layers=[each.name for each in made.layers], with_all=None if with_all is None else _with_all(with_all),
        groups=made.groups_text, made_for=made.options.minimise, purpose=told(made.options.minimise, made.cost),
        strategy=strategy or settings.ring.strategy, strategy_chosen=why,
    )  # fmt: skip


def _with_all(made: Plan) -> WithAll:
    return WithAll(
        made.step_s, made.samples_per_s, made.simulated.idle_fraction,
        {device.name: made.layers_text(node) for node, device in enumerate(made.devices)}, _cuts(made.bounds),
        max(each.total_bytes for each in made.memory),
    )  # fmt: skip


def _node(made: Plan, node: int) -> NodePage:
    step, memory = made.simulated.nodes[node], made.memory[node]
    return NodePage(
        node=node, device=step.device, layers=made.layers_text(node), params_bytes=memory.weight_bytes,
        memory=_memory(memory), busy_s=step.busy_s, idle_s=step.idle_s, idle_fraction=step.idle_fraction,
        idle_causes=step.idle_causes, bytes_sent=step.sent_bytes, bytes_received=step.received_bytes,
        energy_j=step.joules,
    )  # fmt: skip


def _memory(each: MemoryForecast) -> dict[str, float]:
    return {
        "process": each.process_bytes, "weights": each.weight_bytes, "gradients": each.gradient_bytes,
        "optimizer": each.optimizer_bytes, "activations": each.stored_bytes, "boundary": each.boundary_bytes,
        "working": each.working_bytes, "snapshots": each.snapshot_bytes, "total": each.total_bytes, "free": each.free_bytes,
    }  # fmt: skip


def _way(way: Way, batch_size: int, steps_per_epoch: int | None) -> WayPage:
    result: Simulated | None = way.simulated
    if result is None:
        return WayPage(way.name, problem=way.problem)
    line = max((max(node.sent_bytes, node.received_bytes) for node in result.nodes), default=0.0)
    energy = None if result.joules is None or steps_per_epoch is None else result.joules * steps_per_epoch
    return WayPage(
        way.name, step_s=result.step_s, samples_per_s=batch_size / result.step_s, idle_fraction=result.idle_fraction,
        bytes_total=result.bytes_total, busiest_line_bytes=line, energy_j_epoch=energy, problem=way.problem,
        most_memory_bytes=max(each.total_bytes for each in way.memory),
    )  # fmt: skip


def _cuts(bounds: Sequence[tuple[int, int]]) -> str:
    """As --cuts takes it."""
    return ",".join("-" if a == b else str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in bounds)


# -- for people -----------------------------------------------------------------------------------------------------------


def print_page(made: Page, stream: IO[str]) -> None:
    console = Console(file=stream, width=None if stream.isatty() else 118, highlight=False)
    epoch = f", an epoch {seconds_text(made.epoch_s)}" if made.epoch_s is not None else ""
    console.print(
        f"[bold]{made.model} on {made.data}[/bold], {made.batch_size} samples a step in {made.microbatches} microbatches, "
        f"window {made.window}, {made.schedule}"
    )
    energy = made.ways[0].energy_j_epoch
    spent = f" and {energy / 3600:.3g} Wh" if energy is not None else ""
    console.print(
        f"[bold]{seconds_text(made.step_s)} a step[/bold], {_rate(made.samples_per_s)} samples/s{epoch}{spent}, "
        f"1,000 steps {seconds_text(1000 * made.step_s)}; "
        f"the ideal (the longer of computing and sending) is {seconds_text(made.ideal_s['max(c, T)'])}\n",
        soft_wrap=True,
    )
    if made.strategy_chosen:
        console.print(f"{escape(made.strategy_chosen)}\n", soft_wrap=True)
    if made.purpose:
        console.print(f"[bold]planned[/bold] {made.purpose}\n", soft_wrap=True)
    if made.groups:
        console.print(f"[bold]groups[/bold]  {escape(made.groups)}\n", soft_wrap=True)
    _print_nodes(console, made)
    for each in made.left_out:
        console.print(f"[yellow]left out[/yellow] {each['device']}: {each['reason']}")
    if (every := made.with_all) is not None:
        held = " | ".join(f"{name} {layers}" for name, layers in every.layers.items())
        console.print(
            f"[bold]with --all-devices[/bold]  {seconds_text(every.step_s)} a step, {_rate(every.samples_per_s)} samples/s, "
            f"idle {every.idle_fraction:.0%}, at most {bytes_text(every.most_memory_bytes)} on a device: {held}",
            soft_wrap=True,
        )
    parts = ", ".join(f"{name} {seconds_text(took)}" for name, took in made.parts.items() if took > 0)
    console.print(f"\n[bold]a step of {made.parts_of}[/bold]  {parts}")
    console.print(f"[bold]limited by[/bold]  {made.limit}")
    if made.order_gap > 0:
        other = "shape" if made.groups else "order"
        console.print(
            f"[bold]searched[/bold]  another {other} could be at most {made.order_gap:.0%} better at its slowest node"
        )
    _print_gains(console, made)
    if len(made.ways) > 1:
        _print_ways(console, made)
    console.print("\n[bold]layers by number[/bold]")
    console.print(Columns([escape(f"{number} {name}") for number, name in enumerate(made.layers)], padding=(0, 3)))
    console.print(f"to set these cuts by hand: --cuts {made.cuts}", style="dim", soft_wrap=True)


def _print_nodes(console: Console, made: Page) -> None:
    watts = any(node.energy_j is not None for node in made.per_node)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    columns = [
        ("device", "left"), ("layers", "left"), ("memory", "right"), ("of free", "right"), ("", "left"), ("busy", "right"),
        ("idle", "right"), ("waits most for", "left"), ("sends", "right"), *([("energy", "right")] if watts else []),
    ]  # fmt: skip
    for title, side in columns:
        table.add_column(title, justify=side, no_wrap=title != "layers")  # type: ignore[arg-type]
    for node in made.per_node:
        share = node.memory["total"] / node.memory["free"]
        cause = max(node.idle_causes, key=lambda each: node.idle_causes[each]) if node.idle_causes else ""
        cells = [
            node.device, node.layers, bytes_text(node.memory["total"]), bytes_text(node.memory["free"]), _bar(share),
            seconds_text(node.busy_s), f"{node.idle_fraction:.0%}", cause, bytes_text(node.bytes_sent),
        ]  # fmt: skip
        if watts:
            cells.append(joules_text(node.energy_j) if node.energy_j is not None else "?")
        table.add_row(*cells)
    console.print(table)


def _print_gains(console: Console, made: Page) -> None:
    if not made.gains:
        console.print("[bold]would help[/bold]  nothing we tried")
        return
    for index, each in enumerate(made.gains):
        lead = "[bold]would help[/bold]" if index == 0 else " " * 10
        gain = float(each["gain"])
        text = f"+{gain:.0%}" if gain < 1 else f"{1 + gain:.1f}x"
        console.print(
            f"{lead}  [green]{text:>6}[/green]  {each['change']} ({seconds_text(float(each['step_s']))} a step)"
        )


def _print_ways(console: Console, made: Page) -> None:
    energy = any(way.energy_j_epoch is not None for way in made.ways)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title, side in (
        ("way", "left"), ("step", "right"), ("samples/s", "right"), ("idle", "right"), ("bytes, all", "right"),
        ("busiest line", "right"), ("most memory", "right"), *((("energy, epoch", "right"),) if energy else ()), ("", "left"),
    ):  # fmt: skip
        table.add_column(title, justify=side, no_wrap=bool(title))
    for way in made.ways:
        if way.step_s is None:
            table.add_row(way.strategy, *[""] * (6 + energy), way.problem)
            continue
        cells = [
            way.strategy, seconds_text(way.step_s), _rate(way.samples_per_s or 0.0), f"{way.idle_fraction:.0%}",
            bytes_text(way.bytes_total or 0.0), bytes_text(way.busiest_line_bytes or 0.0),
            bytes_text(way.most_memory_bytes or 0.0),
        ]  # fmt: skip
        if energy:
            cells.append("?" if way.energy_j_epoch is None else f"{way.energy_j_epoch / 3600:.3g} Wh")
        table.add_row(*cells, f"[red]does not fit[/red]: {way.problem}" if way.problem else "")
    console.print()
    console.print(table)


def _bar(share: float, width: int = 10) -> str:
    """A share of memory, full at one."""
    full = min(width, round(share * width))
    colour = "green" if share < 0.7 else "yellow" if share < 0.95 else "red"
    return f"[{colour}]{'█' * full}[/{colour}][dim]{'░' * (width - full)}[/dim]"


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s >= 10 else f"{per_s:.2g}"
