"""capacity: the largest model under a real memory cap per device, by strategy.

Depth grows, then width, until a run of two steps is refused or fails. The cap is the kernel's: who takes more is killed.
So it needs the lab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.programs.largest_model import Search, Try
from ringtmp.bench.training_runs.device_setups import DEVICES, RINGTMP, lab, program
from ringtmp.bench.training_runs.strategy_variants import RING, SERVER, Way, parse
from ringtmp.lab.devices_file import toml
from ringtmp.report.page_content import Figure, Holds, Section, Series, Skipped, Table, Verdict
from ringtmp.units import bytes_text, count_text

AIM = "RingTMP can hold larger models"
CAP_MB = 420.0
#: What the master, which takes models apart, needs of it before any model; the others need about 235.
PROCESS_MB = 350.0
WIDTH = 1024
#: Weights and gradients, four bytes each.
PARAMETER_BYTES = 8
INPUTS, OUTPUTS = 64, 10
_QUICK = ("ring:protect=off", "ps:bsp")
_FULL = (
    *_QUICK,
    "ps:bsp:fetch=layerwise",
    "ring:protect=auto",
    "ring:protect=memory",
    "ps:bsp:servers=workers",
    "allreduce:ring",
)


def ways(choices: Choices) -> list[Way]:
    wanted = {way.strategy for way in choices.ways}
    return [way for way in map(parse, _QUICK if choices.quick else _FULL) if way.strategy in wanted]


def jobs(choices: Choices) -> list[Job]:
    return [job(choices, way) for way in ways(choices)] if choices.isolated else []


def job(choices: Choices, way: Way) -> Job:
    devices = [
        msgspec.structs.replace(device, memory_mb=cap_mb(choices))
        for device in choices.place(nodes(choices), most=nodes(choices))
    ]
    protect = [] if "protect" in way.flags else ["--protect", "off"]
    words = [
        *lab(scale=bool(choices.devices))[len(RINGTMP) :],
        "train", "--model", "mlp", "--data", "digits", "--optimizer", "sgd", "--lr", "0.01",
        "--batch-size", "32", "--microbatches", "4" if way.splits_layers else str(way.workers(nodes(choices))),
        "--steps", "2", "--seed", str(choices.seed), *way.words(), *protect, "--all-devices", "--json", "--quiet",
    ]  # fmt: skip
    search = Search(
        words=tuple(words), inputs=INPUTS, outputs=OUTPUTS, width=WIDTH, depth=first_depth(choices, way),
        least_depth=nodes(choices), factor=2.0 if choices.quick else 1.4, most_tries=2 if choices.quick else 6,
        grow_width=not choices.quick,
    )  # fmt: skip
    return Job(
        experiment="capacity",
        workload=f"mlp w{WIDTH}",
        setting=f"{len(devices)} devices {cap_mb(choices):g}MiB",
        case=way.label,
        command=program("programs.largest_model", search),
        files={DEVICES: toml(devices)},
        output="told",
        batch_size=32,
        warm_up=0,
        options={"nodes": len(devices)},
    )


def nodes(choices: Choices) -> int:
    """A small bench has two, which start quicker at a whole core each."""
    return 2 if choices.quick and not choices.devices else choices.nodes


def cap_mb(choices: Choices) -> float:
    """Devices of a file keep their own; they must be equal for one number to mean something, so the least counts."""
    return min(device.memory_mb for device in choices.devices) if choices.devices else CAP_MB


def first_depth(choices: Choices, way: Way) -> int:
    """About what weights and gradients alone would allow: the search goes from there. A small bench has two tries, and begins
    where every way was seen to end."""
    room = (cap_mb(choices) - PROCESS_MB) * 2**20
    layer = PARAMETER_BYTES * WIDTH * WIDTH
    holders = nodes(choices) if way.splits_layers else 1
    return max(nodes(choices), int(room * holders / layer)) * (2 if choices.quick else 1)


def section(choices: Choices, measured: Measured) -> Section:
    title, text = "Capacity", (
        f"Every device has {cap_mb(choices):g} MiB, enforced by the kernel; the master's process takes about {PROCESS_MB:g} "
        f"of it. Dense layers of {WIDTH}, plain SGD, two steps. A strategy's answer is the largest size that worked."
    )  # fmt: skip
    if not choices.isolated:
        why = "a memory cap per device needs the lab: root on Linux, ip and tc"
        return Section(
            "capacity", title, text, (Verdict(AIM, f"Open: {why}.", "open"),), (), (), (Skipped("all of it", why),)
        )
    known = {way.label: tries(measured.facts(job(choices, way))) for way in ways(choices)}
    best = {label: largest(each) for label, each in known.items() if each}
    return Section(
        "capacity",
        title,
        text,
        (_verdict(best, known),),
        tuple(_figures(best, cap_mb(choices))),
        (_table(known),),
        tuple(_skipped(choices, measured)),
    )


def _skipped(choices: Choices, measured: Measured) -> list[Skipped]:
    problems = {way.label: measured.problem(job(choices, way)) for way in ways(choices)}
    found = [Skipped(label, problem) for label, problem in problems.items() if problem]
    found.append(
        Skipped(
            "staleness, async, ssp and lossy wires",
            "capacity tries the ways of holding a model: ring, server, all-reduce",
        )
    )
    if choices.quick:
        found.append(Skipped("growing width; other strategies", "small sizes; ringtmp bench capacity has them"))
    return found


def tries(facts: Sequence[Any]) -> list[Try]:
    return msgspec.convert(facts[0]["tries"], list[Try]) if facts else []


def largest(known: Sequence[Try]) -> Try | None:
    return max((each for each in known if each.outcome == "fits"), key=lambda each: each.parameters, default=None)


def _verdict(best: dict[str, Try | None], known: dict[str, list[Try]]) -> Verdict:
    rings = {label: made for label, made in best.items() if label.startswith(RING) and made}
    servers = {label: made for label, made in best.items() if label.startswith(SERVER) and made}
    if not rings or not servers:
        return Verdict(AIM, "Open: the ring or the parameter server held no model that was tried.", "open")
    ring = max(rings, key=lambda label: rings[label].parameters)
    plain = {label: made for label, made in servers.items() if "layerwise" not in label}
    parts: list[str] = []
    ratios: list[float] = []
    answers: list[Holds] = []
    for name, group in (("where each worker holds the whole model", plain), ("at its best", servers)):
        if group:
            server = max(group, key=lambda label: group[label].parameters)
            ratio = rings[ring].parameters / group[server].parameters
            ratios.append(ratio)
            least, most = _bounds(known[ring], known[server])
            answers.append("yes" if least > 1 else "no" if most < 1 else "open")
            between = f"{least:.2f}–{most:.2f}" if math.isfinite(most) else f"{least:.2f} or more"
            parts.append(
                f"{ratio:.2f} times ({between}, as far as sizes were tried) the {count_text(group[server].parameters)} of "
                f"{server}, a server {name}"
            )
    holds: Holds = answers[0] if len(set(answers)) == 1 else "mixed"
    if not all(_bounded(known[label]) for label in (ring, *servers)):
        holds = "open"
        parts.append("but not every search came to a size that does not work")
    sentence = f"{ring} holds {count_text(rings[ring].parameters)} parameters: {'; '.join(parts)}."
    return Verdict(AIM, sentence, holds, f"{ratios[0]:.2f}")


def too_large(each: Try) -> bool:
    """Whether it was memory that it failed for: refused, or killed by the kernel. A run that was merely slow says nothing."""
    killed = "code -9" in each.reason or "memory" in each.reason.lower()
    return each.outcome == "refused" or (each.outcome == "failed" and killed)


def _bounded(known: Sequence[Try]) -> bool:
    return math.isfinite(_between(known)[1])


def _bounds(ring: Sequence[Try], server: Sequence[Try]) -> tuple[float, float]:
    """What the sizes that were tried leave open: the true largest lies below the smallest that did not work."""
    (low_ring, high_ring), (low_server, high_server) = _between(ring), _between(server)
    return low_ring / high_server, high_ring / low_server


def _between(known: Sequence[Try]) -> tuple[float, float]:
    """The largest size that worked, and the smallest above it that is too large; inf where none was tried."""
    fits = max(each.parameters for each in known if each.outcome == "fits")
    above = (each.parameters for each in known if too_large(each) and each.parameters > fits)
    return fits, min(above, default=math.inf)


def _figures(best: dict[str, Try | None], cap: float) -> list[Figure]:
    known = {label: made for label, made in best.items() if made is not None}
    if not known:
        return []
    nodes = max(len(made.peak_rss_bytes) for made in known.values())
    memory = tuple(
        Series(
            "master" if node == 0 else f"node {node}",
            tuple(known),
            tuple(
                made.peak_rss_bytes[node] / 2**20 if node < len(made.peak_rss_bytes) else float("nan")
                for made in known.values()
            ),
        )
        for node in range(nodes)
    )
    sizes = Series("parameters", tuple(known), tuple(float(made.parameters) for made in known.values()))
    return [
        Figure("largest-model", "Largest model that trained", "bars", "", "parameters", (sizes,)),
        Figure("memory-per-node", "Peak memory per node at the largest model", "bars", "", "MiB", memory,
               line=cap, line_label=f"cap {cap:g} MiB"),
    ]  # fmt: skip


def _table(known: dict[str, list[Try]]) -> Table:
    rows = [
        (
            label,
            str(each.depth),
            str(each.width),
            count_text(each.parameters),
            each.outcome,
            bytes_text(max(each.peak_rss_bytes)) if each.peak_rss_bytes else "",
            each.reason,
        )
        for label, made in known.items()
        for each in sorted(made, key=lambda each: each.parameters)
    ]
    columns = ("strategy", "depth", "width", "parameters", "outcome", "most memory of a node", "reason")
    note = "A process's resident memory has pages of shared files in it, which the cap may count elsewhere."
    return Table("Every size that was tried", columns, tuple(rows), note)
