"""The ways to train that `speed` compares, and the command each becomes for a workload in a setting. Pure.

Each case takes the number of microbatches that suits it: a pipeline the workload's own, data parallelism one per
worker. Asynchronous servers, and steps that overlap, end in bursts, so they are averaged; all others have a median step.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from ringtmp.bench.analysis.intervals import Centre
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.read_output import RUN
from ringtmp.bench.training_runs.device_setups import DEVICES, RINGTMP, Setting, lab, program
from ringtmp.bench.training_runs.workloads import Workload, train_flags
from ringtmp.errors import unknown
from ringtmp.lab.devices_file import toml
from ringtmp.strategies import registry

EXPERIMENT = "speed"
#: The base of "ideal" has a setting of its own: it is measured once, not once per setting.
ALONE = Setting("alone", 1, 1.0, None, emulated=False)


class Case(msgspec.Struct, frozen=True):
    name: str
    family: str  # a strategy, or whose it is otherwise: one, side_by_side, ddp, pipelining
    flags: tuple[str, ...] = ()  # of `ringtmp train`
    servers: Literal["none", "one", "workers"] = "none"
    schedule: str = ""  # of torch.distributed.pipelining
    layout: Literal["straight", "looped", "v"] = "straight"  # one stage per rank, or two: 0 1 0 1, or 0 1 1 0
    one_each: bool = False  # the schedule wants at least as many microbatches as there are stages
    microbatches: int | Literal["auto"] | None = (
        None  # what the case itself says, "auto" leaves it to the plan; None: the bench chooses
    )
    centre: Centre = "median"

    @property
    def group(self) -> str:
        return {"one": "base", "side_by_side": "base", "ddp": "peer", "pipelining": "peer"}.get(self.family, "ours")

    @property
    def splits_layers(self) -> bool:
        return registry.get(self.family).splits_layers if self.group == "ours" else self.family == "pipelining"


#: What all are compared with: one process; and all devices at once, each with its share, which do not talk.
ONE, SIDE_BY_SIDE = Case("one", "one"), Case("side-by-side", "side_by_side")
CASES = (
    ONE,
    SIDE_BY_SIDE,
    Case("ring", "ring", ("--strategy", "ring")),
    Case("ring:auto", "ring", ("--strategy", "ring"), microbatches="auto"),
    Case("ring:zero-bubble", "ring", ("--strategy", "ring", "--schedule", "zero-bubble"), microbatches="auto"),
    Case("ring:staleness=1", "ring", ("--strategy", "ring", "--staleness", "1"), microbatches="auto", centre="mean"),
    Case("ring:protected", "ring", ("--strategy", "ring", "--protect", "auto"), centre="mean"),
    Case("ring:groups", "ring", ("--strategy", "ring", "--groups", "auto", "--sum-tree", "4"), microbatches="auto"),
    Case("auto", "ring", ("--strategy", "auto", "--share-data", "--sum-tree", "4"), microbatches="auto"),
    Case("ps:bsp", "ps", ("--strategy", "ps:bsp", "--with", "servers=1"), "one"),
    Case("ps:bsp:workers", "ps", ("--strategy", "ps:bsp", "--with", "servers=workers"), "workers"),
    Case("ps:async", "ps", ("--strategy", "ps:async", "--with", "servers=1"), "one", centre="mean"),
    Case("ps:ssp:3", "ps", ("--strategy", "ps:ssp:3", "--with", "servers=1"), "one", centre="mean"),
    Case("allreduce:ring", "allreduce", ("--strategy", "allreduce:ring")),
    Case("ddp", "ddp"),
    Case("pipelining:gpipe", "pipelining", schedule="ScheduleGPipe"),
    Case("pipelining:1f1b", "pipelining", schedule="Schedule1F1B"),
    Case("pipelining:looped-bfs", "pipelining", schedule="ScheduleLoopedBFS", layout="looped"),
    Case("pipelining:interleaved", "pipelining", schedule="ScheduleInterleaved1F1B", layout="looped"),
    Case("pipelining:interleaved-zb", "pipelining", schedule="ScheduleInterleavedZeroBubble", layout="looped"),
    Case("pipelining:zbv", "pipelining", schedule="ScheduleZBVZeroBubble", layout="v"),
    Case("pipelining:dualpipe-v", "pipelining", schedule="ScheduleDualPipeV", layout="v", one_each=True),
)


def case_named(text: str) -> Case:
    """One of CASES, or any strategy by its name with settings: `ps:ssp:3:servers=2`."""
    known = next((case for case in CASES if case.name == text), None)
    if known is not None:
        return known
    if text.partition(":")[0] not in registry.every():
        raise unknown("case", text, [case.name for case in CASES])
    choice = registry.parse(text)
    strategy = registry.get(choice.name)
    dedicated = strategy.roles(strategy.read(choice.settings), 2).workers != (0, 1)
    servers: Literal["none", "one"] = "one" if dedicated else "none"
    return Case(
        text, choice.name, ("--strategy", text), servers, microbatches=choice.run.get("microbatches"), centre="mean"
    )


def chosen_cases(pattern: str) -> list[Case]:
    """Those of CASES that match, and strategies that are named and not among them."""
    words = [word.strip() for word in pattern.split(",") if word.strip()]
    found = [case for case in CASES if any(fnmatchcase(case.name, word) for word in words)]
    named = [word for word in words if not set(word) & set("*?[") and word not in {case.name for case in found}]
    if not (found or named):
        raise unknown("case", pattern, [case.name for case in CASES])
    return found + [case_named(word) for word in named]


def job(case: Case, work: Workload, setting: Setting, warm_up: int, microbatches: int | None = None) -> Job:
    """`work` says how many steps there are in all. `microbatches` overrides what suits a pipeline."""
    count = _microbatches(case, work, setting, microbatches)
    if case.family == "one":
        command = list(program("peers.one_process", work))
    elif case.group != "ours":
        schedule = ["--schedule", case.schedule, "--layout", case.layout, "--microbatches", str(count)]
        peer = program(
            f"peers.{case.family}", work, "--meet", "meet", *(schedule if case.family == "pipelining" else [])
        )
        command = [*lab(setting.emulated, execute=True), *peer]
    else:
        train = [
            "train", *train_flags(work, count), "--all-devices", "--protect", "off", "--no-rebalance", *case.flags,
            "--run-dir", RUN, "--json", "--quiet",
        ]  # fmt: skip
        nodes = ["--nodes", str(setting.nodes), "--threads", "1"]
        command = [*lab(), *train] if setting.emulated else [*RINGTMP, *train, *nodes]
    return Job(
        experiment=EXPERIMENT,
        workload=work.name,
        setting=setting.name,
        case=case.name if microbatches is None else f"{case.name}:m{count}",
        command=tuple(command),
        files={DEVICES: toml(setting.devices)} if DEVICES in command else {},
        output="run" if case.group == "ours" else "peer",
        batch_size=work.batch_size,
        warm_up=warm_up,
        centre=case.centre,
        # The lab places its devices itself.
        processors=0 if setting.emulated else setting.nodes,
        group=case.group,
        options={"microbatches": count} | ({"schedule": case.schedule} if case.schedule else {}),
    )


def pipelined(case: Case) -> bool:
    """Whether its number of microbatches is the bench's to choose."""
    return case.splits_layers and case.microbatches is None


def workers(case: Case, setting: Setting) -> int:
    """Nodes that compute."""
    return max(1, setting.nodes - (case.servers == "one"))


def stage_ranks(layout: Literal["straight", "looped", "v"], nodes: int) -> list[int]:
    """Which node holds each stage, in the order of the model.

    straight  0 1 2 3
    looped    0 1 2 3 0 1 2 3
    v         0 1 2 3 3 2 1 0
    """
    once = list(range(nodes))
    return once + {"straight": [], "looped": once, "v": once[::-1]}[layout]


def _microbatches(case: Case, work: Workload, setting: Setting, wanted: int | None) -> int | str:
    if case.group == "base":
        return 1
    if case.microbatches is not None:
        return case.microbatches
    if not pipelined(case):
        return min(workers(case, setting), work.batch_size)
    least = len(stage_ranks(case.layout, setting.nodes)) if case.one_each else 1
    return min(max(wanted or work.pipeline_microbatches, least), work.batch_size)
