"""plan: how true are plans, and what do they gain?

Rings of emulated devices, each trained with the plan's own forecast on record. What `train` forecast before its first step
(step time, peak memory of every node) is held against what came. Two rings of unequal devices are trained three times: as
planned, cut into equal parts, and on the best single device.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured, Result
from ringtmp.bench.measuring.read_output import RUN
from ringtmp.bench.training_runs.device_setups import DEVICES, equal_devices, lab
from ringtmp.errors import UsageError, unknown
from ringtmp.lab.devices_file import Device, toml
from ringtmp.metrics.summary import Forecast
from ringtmp.report.page_content import Section, Table, Verdict

AIM = "Plans foretell step time and memory"
#: What is asked of a plan: the middle and the ninth decile of the step's error, and the memory's.
STEP_MEDIAN, STEP_P90, MEMORY = 0.07, 0.15, 0.10


class Bed(msgspec.Struct, frozen=True):
    """Which devices there are, and what they train."""

    name: str
    devices: tuple[Device, ...]
    model: str
    settings: dict[str, int]
    data: str
    batch_size: int
    microbatches: int = 8
    flags: tuple[str, ...] = ("--all-devices",)

    @property
    def text(self) -> str:
        cpus = ":".join(f"{device.cpu:g}" for device in self.devices)
        rates = "/".join(f"{each:g}" for each in sorted({device.link_mbps for device in self.devices}))
        caps = "/".join(f"{each:g}" for each in sorted({device.memory_mb for device in self.devices}))
        late = max(device.latency_ms for device in self.devices)
        sizes = " ".join(f"{key} {value}" for key, value in self.settings.items())
        return (
            f"{self.model} {sizes}, {self.batch_size} samples; {cpus} core, {rates} Mbit/s"
            f"{f', {late:g} ms' if late else ''}, {caps} MiB"
        )


def _same(count: int, cpu: float, link_mbps: float, memory_mb: float = 1500.0) -> tuple[Device, ...]:
    return equal_devices(count, cpu, link_mbps, memory_mb)


def _unequal(cpus: Sequence[float], link_mbps: float, latency_ms: float = 0.0) -> tuple[Device, ...]:
    return tuple(Device(f"n{index}", cpu, cpu, 1500.0, link_mbps, latency_ms) for index, cpu in enumerate(cpus))


_GPT = {"depth": 8, "width": 256, "heads": 4, "context": 128}
_DEEP = {"depth": 16, "width": 128, "heads": 4, "context": 128}
_MLP = {"depth": 12, "width": 1024}
_CONV = {"depth": 6, "width": 24}
_PICTURES = "random:3x32x32x10"

BEDS = (
    Bed("gpt-2", _same(2, 0.9, 1000), "gpt", _GPT, "pysource", 16),
    Bed("gpt-4", _same(4, 0.45, 1000), "gpt", _GPT, "pysource", 16),
    Bed("gpt-4-slow-links", _same(4, 0.45, 100), "gpt", _GPT, "pysource", 16),
    Bed("gpt-3-uneven", _unequal([0.9, 0.6, 0.3], 1000), "gpt", _GPT, "pysource", 16),
    Bed("gpt-4-tenfold", _unequal([0.45, 0.45, 0.45, 0.045], 200, 5.0), "gpt", _DEEP, "pysource", 16),
    Bed("gpt-6-capped", _same(6, 0.3, 50, 420), "gpt", _DEEP, "pysource", 16),
    Bed("mlp-4", _same(4, 0.45, 1000), "mlp", _MLP, "random:784x10", 1024),
    Bed("mlp-3-slowest-links", _same(3, 0.45, 10, 400), "mlp", {"depth": 8, "width": 512}, "random:784x10", 128, 4),
    Bed("convnet-3", _same(3, 0.45, 100), "convnet", _CONV, _PICTURES, 64),
    Bed("convnet-5-uneven", _unequal([0.6, 0.6, 0.3, 0.2, 0.1], 1000), "convnet", _CONV, _PICTURES, 64),
)

#: Contrasts: devices from fast to slow, and how much faster the plan must be than equal parts.
CONTRASTS = (
    (Bed("10:10:10:1", _unequal([0.45, 0.45, 0.45, 0.045], 1000), "gpt", _DEEP, "pysource", 16, flags=()), 5.0),
    (Bed("10:1:1:1", _unequal([0.9, 0.09, 0.09, 0.09], 1000), "gpt", _DEEP, "pysource", 16, flags=()), 2.2),
)
#: 18 layers in four equal parts: what the master holds is its front and its tail together.
EQUAL_CUTS = "0-2,3-7,8-12,13-16,17"
WAYS = ("planned", "equal parts", "best alone")


def _wanted(choices: Choices) -> tuple[list[Bed], list[tuple[Bed, float]]]:
    if not choices.isolated:
        raise UsageError("bench plan needs the lab, which needs root on Linux, ip and tc: sudo ringtmp bench plan …")
    names = [name.strip() for name in choices.beds.split(",") if name.strip()]
    known = [bed.name for bed in (*BEDS, *(bed for bed, _ in CONTRASTS))]
    for name in names:
        if name not in known:
            raise unknown("ring of devices", name, known)
    wanted = names or known
    return [bed for bed in BEDS if bed.name in wanted], [each for each in CONTRASTS if each[0].name in wanted]


def jobs(choices: Choices) -> list[Job]:
    beds, contrasted = _wanted(choices)
    return [
        *(forecast_job(choices, bed) for bed in beds),
        *(each for bed, _ in contrasted for each in contrast_jobs(choices, bed).values()),
    ]


def forecast_job(choices: Choices, bed: Bed) -> Job:
    return _job(choices, bed, "forecast", bed.devices, bed.flags)


def contrast_jobs(choices: Choices, bed: Bed) -> dict[str, Job]:
    """By way, as WAYS has them."""
    fastest = max(bed.devices, key=lambda device: device.cpu)
    equal = ("--all-devices", "--cuts", EQUAL_CUTS)
    return {
        "planned": _job(choices, bed, "planned", bed.devices, ()),
        "equal parts": _job(choices, bed, "equal parts", bed.devices, equal),
        "best alone": _job(choices, bed, "best alone", (fastest,), ()),
    }


def _job(choices: Choices, bed: Bed, case: str, devices: Sequence[Device], flags: Sequence[str]) -> Job:
    sizes = [word for key, value in bed.settings.items() for word in ("--set", f"{key}={value}")]
    train = [
        "train", "--model", bed.model, *sizes, "--data", bed.data, "--batch-size", str(bed.batch_size),
        "--microbatches", str(bed.microbatches), "--steps", str(choices.warm_up + choices.steps), *flags,
        "--protect", "off", "--run-dir", RUN, "--json", "--quiet",
    ]  # fmt: skip
    return Job(
        experiment="plan",
        workload=bed.model,
        setting=bed.name,
        case=case,
        command=(*lab(), *train),
        files={DEVICES: toml(devices)},
        output="run",
        batch_size=bed.batch_size,
        warm_up=choices.warm_up,
    )


# -- what came of it ------------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One bed. Errors are (predicted - measured) / measured."""

    bed: str
    text: str
    repeats: int
    predicted_s: float
    measured_s: float
    step_error: float
    spread: float  # (longest - shortest) / middle of the repeats' steps
    memory_error: float | None  # of the node where it is largest


class Contrast(msgspec.Struct, frozen=True):
    bed: str
    wanted: float
    step_s: dict[str, float]  # by way
    left_out: tuple[str, ...]

    def over(self, way: str) -> float | None:
        """How many times as fast as this way."""
        return self.step_s[way] / self.step_s["planned"] if {"planned", way} <= set(self.step_s) else None


class Errors(msgspec.Struct, frozen=True):
    """Over all beds, whichever way they were wrong."""

    step_median: float
    step_p90: float
    memory_median: float
    memory_worst: float

    @property
    def small(self) -> bool:
        return self.step_median <= STEP_MEDIAN and self.step_p90 <= STEP_P90 and self.memory_worst <= MEMORY

    @property
    def text(self) -> str:
        return (
            f"Step: median error {self.step_median:.1%} (wanted {STEP_MEDIAN:.0%}), ninth decile {self.step_p90:.1%} "
            f"(wanted {STEP_P90:.0%}). Memory: median {self.memory_median:.1%}, worst {self.memory_worst:.1%} "
            f"(wanted {MEMORY:.0%})."
        )


def results(choices: Choices, measured: Measured) -> dict[str, Any]:
    found = rows(choices, measured)
    return {"rows": found, "contrasts": contrasts(choices, measured), "verdict": errors(found)}


def section(choices: Choices, measured: Measured) -> Section:
    found = rows(choices, measured)
    total = errors(found)
    said = (total.text, "yes" if total.small else "no") if total else ("Open: nothing was measured.", "open")
    tables = (_forecast_table(found), _contrast_table(contrasts(choices, measured)))
    return Section(
        "plan",
        "Plans",
        (__doc__ or "").partition("\n\n")[2].strip(),
        (Verdict(AIM, *said),) if _wanted(choices)[0] else (),  # type: ignore[arg-type]
        (),
        tuple(table for table in tables if table.rows),
        measured.missing(jobs(choices)),
    )


def rows(choices: Choices, measured: Measured) -> list[Row]:
    found = []
    for bed in _wanted(choices)[0]:
        taken = measured.results(forecast_job(choices, bed))
        if not taken:
            continue
        steps = [_step_s(each) for each in taken]
        middle = statistics.median(steps)
        found.append(
            Row(
                bed=bed.name,
                text=bed.text,
                repeats=len(taken),
                predicted_s=statistics.median(_forecast(each).step_s for each in taken),
                measured_s=middle,
                # Every run is held against its own forecast: both know the same machine.
                step_error=statistics.median(_forecast(each).step_s / _step_s(each) - 1 for each in taken),
                spread=(max(steps) - min(steps)) / middle,
                memory_error=max((error for each in taken for error in memory_errors(each)), key=abs, default=None),
            )
        )
    return found


def contrasts(choices: Choices, measured: Measured) -> list[Contrast]:
    found = []
    for bed, wanted in _wanted(choices)[1]:
        taken = {way: measured.results(job) for way, job in contrast_jobs(choices, bed).items()}
        steps = {way: statistics.median(map(_step_s, group)) for way, group in taken.items() if group}
        gone = next((_forecast(each).left_out for each in taken["planned"]), ())
        found.append(Contrast(bed.name, wanted, steps, tuple(gone)))
    return found


def errors(found: Sequence[Row]) -> Errors | None:
    steps = [abs(row.step_error) for row in found]
    memory = [abs(row.memory_error) for row in found if row.memory_error is not None]
    if not steps or not memory:
        return None
    return Errors(statistics.median(steps), float(np.quantile(steps, 0.9)), statistics.median(memory), max(memory))


def memory_errors(result: Result) -> list[float]:
    """By node, in the order of the forecast."""
    peaks = {node["node"]: node["peak_rss_bytes"] for node in result.facts["per_node"]}
    return [each.memory_bytes / peaks[each.node] - 1 for each in _forecast(result).per_node if peaks.get(each.node)]


def _forecast(result: Result) -> Forecast:
    return msgspec.convert(result.facts["forecast"], Forecast)


def _step_s(result: Result) -> float:
    return statistics.median(result.step_s)


def _forecast_table(found: Sequence[Row]) -> Table:
    columns = ("ring", "predicted", "measured", "error", "run to run", "memory, worst node")
    cells = tuple(
        (
            f"{row.bed}: {row.text}",
            _ms(row.predicted_s),
            _ms(row.measured_s),
            f"{row.step_error:+.1%}",
            f"{row.spread:.1%}",
            "" if row.memory_error is None else f"{row.memory_error:+.1%}",
        )
        for row in found
    )
    return Table("Predicted and measured", columns, cells)


def _contrast_table(found: Sequence[Contrast]) -> Table:
    rows = []
    for each in found:
        equal, alone = each.over("equal parts"), each.over("best alone")
        rows.append(
            (
                each.bed + (f", left out: {', '.join(each.left_out)}" if each.left_out else ""),
                *(_ms(each.step_s[way]) if way in each.step_s else "" for way in WAYS),
                "" if equal is None else f"{equal:.1f} (wanted {each.wanted:g})",
                "" if alone is None else f"{alone:.2f} (wanted 1)",
            )
        )
    columns = ("devices", *WAYS, "x equal parts", "x best alone")
    return Table("What a plan gains on unequal devices", columns, tuple(rows))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
