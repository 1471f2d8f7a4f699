"""How true plans are: rings of emulated devices, each trained with the plan's own forecast on record. Pure.

Beds in, jobs out; measurements in, rows out. A bed says which devices there are and what they train. What `train` forecast
before its first step (step time, peak memory of every node) is held against what came. Two beds of unequal devices are
trained three times: as planned, cut into equal parts, and on the best single device.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from ringtmp.bench.measuring.jobs import PYTHON, Job
from ringtmp.bench.measuring.measurement_files import Measurement
from ringtmp.bench.measuring.read_output import RUN
from ringtmp.metrics.summary import Forecast

EXPERIMENT = "plan"
#: What is asked of a plan: the middle and the ninth decile of the step's error, and the memory's.
STEP_MEDIAN, STEP_P90, MEMORY = 0.07, 0.15, 0.10


class Lent(msgspec.Struct, frozen=True):
    """One emulated device."""

    cpu: float
    link_mbps: float
    memory_mb: int = 1500
    latency_ms: float = 0.0


class Bed(msgspec.Struct, frozen=True):
    name: str
    devices: tuple[Lent, ...]
    model: str
    settings: dict[str, int]
    data: str
    batch_size: int
    microbatches: int = 8
    flags: tuple[str, ...] = ("--all-devices",)

    @property
    def text(self) -> str:
        cpus = ":".join(f"{device.cpu:g}" for device in self.devices)
        rates = sorted({device.link_mbps for device in self.devices})
        caps = sorted({device.memory_mb for device in self.devices})
        late = max(device.latency_ms for device in self.devices)
        sizes = " ".join(f"{key} {value}" for key, value in self.settings.items())
        return (
            f"{self.model} {sizes}, {self.batch_size} samples; {cpus} core, {'/'.join(f'{each:g}' for each in rates)} Mbit/s"
            f"{f', {late:g} ms' if late else ''}, {'/'.join(map(str, caps))} MiB"
        )


def _same(count: int, cpu: float, link_mbps: float, memory_mb: int = 1500) -> tuple[Lent, ...]:
    return (Lent(cpu, link_mbps, memory_mb),) * count


def _unequal(cpus: Sequence[float], link_mbps: float, latency_ms: float = 0.0) -> tuple[Lent, ...]:
    return tuple(Lent(cpu, link_mbps, latency_ms=latency_ms) for cpu in cpus)


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


def jobs(beds: Sequence[Bed], contrasts: Sequence[Bed], steps: int, warm_up: int) -> list[Job]:
    found = [_job(bed, "forecast", bed.devices, bed.flags, steps, warm_up) for bed in beds]
    for bed in contrasts:
        found.append(_job(bed, "planned", bed.devices, (), steps, warm_up))
        equal = ("--all-devices", "--cuts", EQUAL_CUTS)
        found.append(_job(bed, "equal parts", bed.devices, equal, steps, warm_up))
        fastest = max(bed.devices, key=lambda device: device.cpu)
        found.append(_job(bed, "best alone", (fastest,), (), steps, warm_up))
    return found


def _job(bed: Bed, case: str, devices: Sequence[Lent], flags: Sequence[str], steps: int, warm_up: int) -> Job:
    sizes = [word for key, value in bed.settings.items() for word in ("--set", f"{key}={value}")]
    train = [
        "train", "--model", bed.model, *sizes, "--data", bed.data, "--batch-size", str(bed.batch_size),
        "--microbatches", str(bed.microbatches), "--steps", str(warm_up + steps), *flags,
        "--protect", "off", "--run-dir", RUN, "--json", "--quiet",
    ]  # fmt: skip
    command = [PYTHON, "-P", "-m", "ringtmp", "lab", "--devices", "devices.toml", "--", *train]
    files = {"devices.toml": devices_file(devices)}
    return Job(
        EXPERIMENT, bed.model, bed.name, case, tuple(command), files, "run", bed.batch_size, warm_up
    )  # fmt: skip


def devices_file(devices: Sequence[Lent]) -> str:
    """For `ringtmp lab`; the first device is the master."""
    return "\n".join(
        f'[[device]]\nname = "n{index}"\ncpu = {device.cpu}\nmemory_mb = {device.memory_mb}\n'
        f"link_mbps = {device.link_mbps}\nlatency_ms = {device.latency_ms}\n"
        for index, device in enumerate(devices)
    )


# -- what came of it ------------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One bed. Errors are (predicted - measured) / measured."""

    bed: str
    text: str
    repeats: int
    error: str | None = None  # of the first that failed
    predicted_s: float | None = None
    measured_s: float | None = None
    step_error: float | None = None
    spread: float | None = None  # (longest - shortest) / middle of the repeats' steps
    memory_error: float | None = None  # of the node where it is largest


class Contrast(msgspec.Struct, frozen=True):
    bed: str
    wanted: float
    step_s: dict[str, float]  # by way
    left_out: tuple[str, ...]

    @property
    def over_equal(self) -> float | None:
        """How many times as fast as equal parts."""
        return _ratio(self.step_s, "equal parts")

    @property
    def over_alone(self) -> float | None:
        return _ratio(self.step_s, "best alone")


class Verdict(msgspec.Struct, frozen=True):
    step_median: float
    step_p90: float
    memory_median: float
    memory_worst: float


def rows(beds: Sequence[Bed], measurements: Sequence[Measurement]) -> list[Row]:
    found = []
    for bed in beds:
        group = [each for each in measurements if each.job.setting == bed.name and each.job.case == "forecast"]
        taken = [each for each in group if each.result is not None]
        failed = next((each.error for each in group if each.outcome != "measured"), None)
        if not taken:
            found.append(Row(bed.name, bed.text, 0, failed or "not measured"))
            continue
        measured = [_step_s(each) for each in taken]
        predicted = statistics.median(_forecast(each).step_s for each in taken)
        middle = statistics.median(measured)
        # Every run is held against its own forecast: both know the same machine.
        errors = [_forecast(each).step_s / _step_s(each) - 1 for each in taken]
        memory = [error for each in taken for error in memory_errors(each)]
        found.append(
            Row(
                bed.name, bed.text, len(taken), failed, predicted, middle, statistics.median(errors),
                (max(measured) - min(measured)) / middle, max(memory, key=abs, default=None),
            )
        )  # fmt: skip
    return found


def contrasts(beds: Sequence[tuple[Bed, float]], measurements: Sequence[Measurement]) -> list[Contrast]:
    found = []
    for bed, wanted in beds:
        group = [each for each in measurements if each.job.setting == bed.name and each.result is not None]
        steps = {
            way: statistics.median(times)
            for way in WAYS
            if (times := [_step_s(each) for each in group if each.job.case == way])
        }
        gone = next((_forecast(each).left_out for each in group if each.job.case == "planned"), ())
        found.append(Contrast(bed.name, wanted, steps, tuple(gone)))
    return found


def verdict(found: Sequence[Row]) -> Verdict | None:
    steps = [abs(row.step_error) for row in found if row.step_error is not None]
    memory = [abs(row.memory_error) for row in found if row.memory_error is not None]
    if not steps or not memory:
        return None
    p90 = float(np.quantile(steps, 0.9))
    return Verdict(statistics.median(steps), p90, statistics.median(memory), max(memory))


def memory_errors(measurement: Measurement) -> list[float]:
    """By node, in the order of the forecast."""
    assert measurement.result is not None
    peaks = {node["node"]: node["peak_rss_bytes"] for node in measurement.result.facts["per_node"]}
    return [
        each.memory_bytes / peaks[each.node] - 1 for each in _forecast(measurement).per_node if peaks.get(each.node)
    ]


def _forecast(measurement: Measurement) -> Forecast:
    assert measurement.result is not None
    return msgspec.convert(measurement.result.facts["forecast"], Forecast)


def _step_s(measurement: Measurement) -> float:
    assert measurement.result is not None
    return statistics.median(measurement.result.step_s)


def _ratio(step_s: dict[str, float], other: str) -> float | None:
    return step_s[other] / step_s["planned"] if {"planned", other} <= set(step_s) else None


def markdown(found: Sequence[Row], contrasted: Sequence[Contrast], command: str, date: str) -> str:
    lines = [
        f"`{command}`, {date}.",
        "",
        "| ring | predicted | measured | error | run to run | memory, worst node |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        if row.predicted_s is None or row.measured_s is None:
            lines.append(f"| {row.bed}: {row.text} | | failed | | | |")
            continue
        lines.append(
            f"| {row.bed}: {row.text} | {row.predicted_s * 1000:.0f} ms | {row.measured_s * 1000:.0f} ms | "
            f"{row.step_error:+.1%} | {row.spread:.1%} | {row.memory_error:+.1%} |"
        )
    if (total := verdict(found)) is not None:
        lines += [
            "",
            f"Step: median error {total.step_median:.1%} (wanted {STEP_MEDIAN:.0%}), ninth decile {total.step_p90:.1%} "
            f"(wanted {STEP_P90:.0%}). Memory: median {total.memory_median:.1%}, worst {total.memory_worst:.1%} "
            f"(wanted {MEMORY:.0%}).",
        ]
    lines += [
        "",
        "| devices | planned | equal parts | best alone | x equal parts | x best alone |",
        "|---|---|---|---|---|---|",
    ]
    for each in contrasted:
        cells = [f"{each.step_s[way] * 1000:.0f} ms" if way in each.step_s else "" for way in WAYS]
        ratios = [
            "" if each.over_equal is None else f"{each.over_equal:.1f} (wanted {each.wanted:g})",
            "" if each.over_alone is None else f"{each.over_alone:.2f} (wanted 1)",
        ]
        gone = f", left out: {', '.join(each.left_out)}" if each.left_out else ""
        lines.append(f"| {each.bed}{gone} | {' | '.join([*cells, *ratios])} |")
    failed = [f"- {row.bed}: {row.error}" for row in found if row.error]
    return "\n".join([*lines, *(["", *failed] if failed else []), ""])
