"""A way, a workload and devices become one job: the command one would type. Pure.

Jobs carry no experiment's name: the same run is measured once, whoever asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringtmp.bench.bench_request import ALONE, Choices
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.read_output import RUN
from ringtmp.bench.training_runs.device_setups import DEVICES, RINGTMP, lab
from ringtmp.bench.training_runs.strategy_variants import Way
from ringtmp.bench.training_runs.workloads import Workload, train_flags
from ringtmp.lab.devices_file import Device, toml

EXPERIMENT = "run"
WARM_UP = 2
#: Between runs devices that joined need a moment to be back; one that is not there after this is not coming.
JOIN_S = "60"


class Cell(msgspec.Struct, frozen=True):
    """One point of an experiment: what it stands for, and the job that measures it."""

    way: Way
    nodes: int
    work: Workload
    job: Job
    label: str = ""


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
    words = [*lab(choices.emulated, choices.slowed), *train_words(way, work, nodes), "--all-devices"]
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
