"""A way, a workload and devices become one job: the command one would type. Pure.

Jobs carry no experiment's name: the same run is measured once, whoever asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ringtmp.bench.measuring.jobs import PYTHON, Job
from ringtmp.bench.measuring.measurement_files import Measurement
from ringtmp.bench.measuring.read_output import RUN
from ringtmp.bench.measuring.run_record import Record, from_facts
from ringtmp.bench.training_runs.strategy_variants import Way
from ringtmp.bench.training_runs.workloads import Workload, train_flags
from ringtmp.bench.user_choices import ALONE, Choices
from ringtmp.lab.devices_file import Device

EXPERIMENT = "run"
DEVICES = "devices.toml"
WARM_UP = 2
#: Between runs devices that joined need a moment to be back; one that is not there after this is not coming.
JOIN_S = "60"
RINGTMP = (PYTHON, "-P", "-m", "ringtmp")


class Cell(msgspec.Struct, frozen=True):
    """One point of an experiment: what it stands for, and the job that measures it."""

    way: Way
    nodes: int
    work: Workload
    job: Job
    label: str = ""


def toml(devices: Sequence[Device]) -> str:
    """For `ringtmp lab`; the first device is the master."""
    tables = []
    for device in devices:
        lines = [f'name = "{device.name}"']
        # A preset also says how much of it one thread may use.
        lines += [f'preset = "{device.preset}"'] if device.preset else [f"cpu = {device.cpu:g}"]
        lines += [f"memory_mb = {device.memory_mb:g}", f"link_mbps = {device.link_mbps:g}"]
        if device.latency_ms:
            lines.append(f"latency_ms = {device.latency_ms:g}")
        watts = {key: getattr(device, key) for key in ("idle_w", "busy_w", "nj_per_byte")}
        lines += [f"{key} = {value:g}" for key, value in watts.items() if value is not None]
        tables.append("\n".join(["[[device]]", *lines, ""]))
    return "\n".join(tables)


def lab(choices: Choices, emulated: bool) -> list[str]:
    isolation = [] if emulated else ["--no-isolation"]
    # A file may describe more than this machine has; then all of it is slowed by one factor, and the run says so.
    scale = ["--scale"] if choices.devices and emulated else []
    return [*RINGTMP, "lab", *isolation, *scale, "--devices", DEVICES, "--"]


def train_words(way: Way, work: Workload, nodes: int, run: str = RUN) -> list[str]:
    count = 1 if way is ALONE else way.microbatches(nodes, work.batch_size, work.pipeline_microbatches)
    protect = [] if "protect" in way.flags else ["--protect", "off"]
    return ["train", *train_flags(work, count), *way.words(), *protect, "--run-dir", run, "--json", "--quiet"]


def cell(choices: Choices, way: Way, work: Workload, devices: Sequence[Device], label: str = "") -> Cell:
    """On emulated devices, on plain processes behind links of the same rate, or on devices that joined."""
    nodes = len(devices)
    if choices.listen:
        there = ["--listen", choices.listen, "--start-with", str(nodes), "--wait", JOIN_S] if nodes > 1 else []
        return local(way, work, nodes, label, [*there, "--all-devices"], f"{nodes} joined")
    words = [*lab(choices, choices.emulated), *train_words(way, work, nodes), "--all-devices"]
    return Cell(
        way, nodes, work, _job(way, work, nodes, _place(choices, devices), words, {DEVICES: toml(devices)}), label
    )


def local(way: Way, work: Workload, nodes: int, label: str = "", extra: Sequence[str] = (), place: str = "") -> Cell:
    """On processes of this machine, where nothing depends on speed; or wherever `extra` leads, which `place` names."""
    words = [*RINGTMP, *train_words(way, work, nodes), "--nodes", str(nodes), "--threads", "1", *extra]
    return Cell(way, nodes, work, _job(way, work, nodes, place or f"{nodes} processes", words, {}), label)


def _job(way: Way, work: Workload, nodes: int, place: str, words: Sequence[str], files: dict[str, str]) -> Job:
    return Job(
        experiment=EXPERIMENT,
        workload=f"{work.name} b{work.batch_size} s{work.steps} lr{work.lr:g}",
        setting=place,
        case=way.label,
        command=tuple(words),
        files=files,
        output="run",
        batch_size=work.batch_size,
        warm_up=min(WARM_UP, max(0, work.steps - 2)),
        centre=way.centre,
        options={"nodes": nodes, "lr": str(work.lr)},
    )


def _place(choices: Choices, devices: Sequence[Device]) -> str:
    first = devices[0]
    kind = "devices" if choices.emulated else "processes"
    return f"{len(devices)} {kind} x{first.cpu:g} {first.link_mbps:g}Mbit" + (" of file" if choices.devices else "")


class Measured:
    """Measurements by what they measured."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._by_stem: dict[str, list[Measurement]] = {}
        self._records: dict[str, list[Record]] = {}  # several sections ask for the same
        for each in measurements:
            self._by_stem.setdefault(each.job.file_stem, []).append(each)

    def of(self, job: Job) -> list[Measurement]:
        """The repeats that were measured."""
        return [each for each in self._by_stem.get(job.file_stem, ()) if each.result is not None]

    def records(self, job: Job) -> list[Record]:
        if job.file_stem not in self._records:
            found = [from_facts(each.result.facts) for each in self.of(job) if each.result is not None]
            self._records[job.file_stem] = found
        return self._records[job.file_stem]

    def facts(self, job: Job) -> list[Mapping[str, object]]:
        return [each.result.facts for each in self.of(job) if each.result is not None]

    def problem(self, job: Job) -> str | None:
        """Why there is nothing to see, or less than there should be."""
        known = self._by_stem.get(job.file_stem, [])
        failed = [each for each in known if each.result is None]
        if not known:
            return "not measured: the bench was interrupted before it"
        if not failed:
            return None
        lines = [line.strip() for line in (failed[0].error or "").splitlines() if line.strip()]
        why = f"{failed[0].outcome}: {lines[-1][:300] if lines else 'nothing was said'}"
        return why if len(failed) == len(known) else f"{len(failed)} of {len(known)} repeats are missing, {why}"
