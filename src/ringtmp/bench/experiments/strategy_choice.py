"""choice: does `--strategy auto` take the best way?

Four models on three sets of emulated devices. In each of the twelve settings `auto` chooses with leave to share data, and
every way it could have chosen is measured beside it, in turns: the ring, the ring with groups, one device alone, all-reduce
and a parameter server. With --sum-tree they all end in the same bits; BatchNorm cannot have that, and no groups.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.measuring.read_output import RUN
from ringtmp.bench.training_runs.device_setups import DEVICES, equal_devices, lab
from ringtmp.errors import UsageError, unknown
from ringtmp.lab.devices_file import Device, toml
from ringtmp.report.page_content import Section, Table, Verdict

AIM = "--strategy auto takes the best way"
#: So much slower than the best measured way it may be, and in so many of the settings it must not be slower than that.
CLOSE, LEAST_CLOSE = 0.10, 10 / 12
#: Beyond what runs of one setting differ by.
WORSE = 0.05
AUTO, ALONE = "auto", "one device"


class Training(msgspec.Struct, frozen=True):
    name: str
    flags: tuple[str, ...]
    batch_size: int
    files: dict[str, str] = {}
    in_order: bool = False  # BatchNorm: microbatches cannot be shared


#: A Llama of 7.3 million parameters, of which adapters of 66,000 are trained.
_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 256,
    "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
_TOKENS = """import torch


def tokens():
    ids = torch.randint(0, 1024, (1024, 128), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}
"""
TRAININGS = (
    Training("mlp", ("--model", "mlp", "--set", "depth=12", "--set", "width=1024", "--data", "random:784x10"), 1024),
    Training(
        "gpt",
        ("--model", "gpt", "--set", "depth=8", "--set", "width=256", "--set", "heads=4", "--set", "context=128", "--data",
         "pysource"),
        16,
    ),
    Training(
        "convnet",
        ("--model", "convnet", "--set", "depth=6", "--set", "width=24", "--data", "random:3x32x32x10"),
        64,
        in_order=True,
    ),
    Training(
        "adapters",
        ("--model", "hf:llama.json", "--lora", "r=8,alpha=16,on=q_proj,v_proj", "--data", "tokens.py:tokens", "--loss",
         "model"),
        16,
        {"llama.json": msgspec.json.encode(_LLAMA).decode(), "tokens.py": _TOKENS},
    ),
)  # fmt: skip
NETWORKS = {
    "alike at 100": equal_devices(4, 0.45, 100.0, 1500.0),
    "alike at 1000": equal_devices(4, 0.45, 1000.0, 1500.0),
    "10:5:2:1 at 100": tuple(
        Device(f"n{index}", cpu, cpu, 1500.0, 100.0) for index, cpu in enumerate((1.0, 0.5, 0.2, 0.1))
    ),
}
#: By case, what is asked of `ringtmp train`.
ALWAYS = {AUTO: ("--strategy", "auto", "--share-data"), ALONE: ("--strategy", "ring")}
SHARED = {
    "ring": ("--strategy", "ring"),
    "ring with groups": ("--strategy", "ring", "--groups", "auto"),
    "allreduce:halving": ("--strategy", "allreduce:halving"),
    "ps:bsp:workers": ("--strategy", "ps:bsp:workers"),
    "ps:bsp": ("--strategy", "ps:bsp"),
}
IN_ORDER = {
    "ring": ("--strategy", "ring"),
    "allreduce:ring": ("--strategy", "allreduce:ring"),
    "allreduce:halving": ("--strategy", "allreduce:halving"),
    "ps:bsp:workers": ("--strategy", "ps:bsp:workers"),
    "ps:bsp": ("--strategy", "ps:bsp"),
}


class Trial(msgspec.Struct, frozen=True):
    """One of the twelve settings."""

    training: Training
    network: str

    @property
    def name(self) -> str:
        return f"{self.training.name} {self.network}"

    @property
    def ways(self) -> dict[str, tuple[str, ...]]:
        found = ALWAYS | (IN_ORDER if self.training.in_order else SHARED)
        tree = () if self.training.in_order else ("--sum-tree", "4")
        return {case: (*flags, *tree) for case, flags in found.items()}


TRIALS = tuple(Trial(training, network) for training in TRAININGS for network in NETWORKS)


def _wanted(choices: Choices) -> list[Trial]:
    if not choices.isolated:
        raise UsageError(
            "bench choice needs the lab, which needs root on Linux, ip and tc: sudo ringtmp bench choice …"
        )
    names = [name.strip() for name in choices.beds.split(",") if name.strip()]
    known = [*(each.name for each in TRIALS), *(each.name for each in TRAININGS)]
    for name in names:
        if name not in known:
            raise unknown("setting", name, known)
    return [each for each in TRIALS if not names or {each.name, each.training.name} & set(names)]


def jobs(choices: Choices) -> list[Job]:
    return [job for trial in _wanted(choices) for job in trial_jobs(choices, trial).values()]


def trial_jobs(choices: Choices, trial: Trial) -> dict[str, Job]:
    """By case."""
    return {case: _job(choices, trial, case, flags) for case, flags in trial.ways.items()}


def _job(choices: Choices, trial: Trial, case: str, flags: Sequence[str]) -> Job:
    training, devices = trial.training, NETWORKS[trial.network]
    train = [
        "train", *training.flags, "--batch-size", str(training.batch_size), "--microbatches", "8", "--steps",
        str(choices.warm_up + choices.steps), *flags, "--protect", "off", "--run-dir", RUN, "--json", "--quiet",
    ]  # fmt: skip
    return Job(
        experiment="choice",
        workload=training.name,
        setting=trial.network,
        case=case,
        command=(*lab(), *train),
        files={DEVICES: toml(devices[:1] if case == ALONE else devices), **training.files},
        output="run",
        batch_size=training.batch_size,
        warm_up=choices.warm_up,
    )


# -- what came of it ------------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One setting. Seconds a step; `ways` without `auto`."""

    setting: str
    chosen: str  # by auto, in its own words
    auto_s: float
    ways: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.ways, key=lambda way: self.ways[way])

    @property
    def over_best(self) -> float:
        """How much slower than the best measured way; below 0: faster."""
        return self.auto_s / self.ways[self.best] - 1

    @property
    def over_alone(self) -> float | None:
        return self.auto_s / self.ways[ALONE] - 1 if ALONE in self.ways else None


def rows(choices: Choices, measured: Measured) -> list[Row]:
    found = []
    for trial in _wanted(choices):
        taken = {case: measured.results(job) for case, job in trial_jobs(choices, trial).items()}
        steps = {
            case: statistics.median(statistics.median(each.step_s) for each in group)
            for case, group in taken.items()
            if group
        }
        if AUTO in steps and len(steps) > 1:
            why = str(taken[AUTO][-1].facts.get("strategy_chosen", ""))
            found.append(Row(trial.name, why, steps.pop(AUTO), steps))
    return found


def results(choices: Choices, measured: Measured) -> dict[str, Any]:
    return {"rows": rows(choices, measured)}


def section(choices: Choices, measured: Measured) -> Section:
    found = rows(choices, measured)
    return Section(
        "choice",
        "The choice of a strategy",
        (__doc__ or "").partition("\n\n")[2].strip(),
        (_verdict(found),),
        (),
        (_table(found),) if found else (),
        measured.missing(jobs(choices)),
    )


def _verdict(found: Sequence[Row]) -> Verdict:
    if not found:
        return Verdict(AIM, "Open: nothing was measured.", "open")
    close = [each for each in found if each.over_best <= CLOSE]
    worse = [each.setting for each in found if each.over_alone is not None and each.over_alone > WORSE]
    text = f"Within {CLOSE:.0%} of the best measured way in {len(close)} of {len(found)} settings (wanted 10 of 12)."
    text += f" Slower than one device alone: {', '.join(worse)}." if worse else " Never slower than one device alone."
    return Verdict(AIM, text, "yes" if len(close) >= LEAST_CLOSE * len(found) and not worse else "no")


def _table(found: Sequence[Row]) -> Table:
    columns = ("setting", "auto", "best", "over the best", "all measured", "in its words")
    cells = tuple(
        (
            each.setting,
            _ms(each.auto_s),
            f"{each.best} {_ms(each.ways[each.best])}",
            f"{each.over_best:+.0%}",
            ", ".join(f"{way} {_ms(took)}" for way, took in sorted(each.ways.items(), key=lambda pair: pair[1])),
            each.chosen,
        )
        for each in found
    )
    return Table("What auto took, and what the others took", columns, cells)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
