"""choice: does `--strategy auto` take the best way?

Four models on three sets of emulated devices. In each of the twelve settings `auto` chooses with leave to share data, and
every way it could have chosen is measured beside it: the ring, the ring with groups, one device alone, all-reduce and a
parameter server. With --sum-tree they all end in the same bits; BatchNorm cannot have that, and no groups.

Of a setting `auto` is measured first. Left out, each with its reason, is a way whose exchange alone takes longer on the links
than a step of `auto` took, so that it cannot be the best, or whose forecast is three times that step. One device alone is
measured once for all networks in which it is the same.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ringtmp.bench.bench_request import Choices
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.measuring.read_output import RUN
from ringtmp.bench.training_runs.device_setups import DEVICES, equal_devices, lab
from ringtmp.bench.training_runs.strategy_variants import Way, parse
from ringtmp.errors import UsageError, unknown
from ringtmp.lab.devices_file import Device, toml
from ringtmp.plan.exchange_bounds import Speeds
from ringtmp.report.page_content import Section, Skipped, Table, Verdict

AIM = "--strategy auto takes the best way"
#: So much slower than the best measured way it may be, and in so many of the settings it must not be slower than that.
CLOSE, LEAST_CLOSE = 0.10, 10 / 12
#: Beyond what runs of one setting differ by.
WORSE = 0.05
AUTO, ALONE = "auto", "one device"
#: Of one device, which sends nothing.
ALONE_MBPS = 1000.0
#: Beyond `auto` by which a bound of the link, and a forecast, must lie for a way not to be measured.
SURE, WIDE = 1.1, 3.0


class Training(msgspec.Struct, frozen=True):
    name: str
    flags: tuple[str, ...]
    batch_size: int
    files: dict[str, str] = {}
    in_order: bool = False  # BatchNorm: microbatches cannot be shared
    trained: int = 0  # values that have a gradient


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
    Training(
        "mlp", ("--model", "mlp", "--set", "depth=12", "--set", "width=1024", "--data", "random:784x10"), 1024,
        trained=12_359_690,
    ),
    Training(
        "gpt",
        ("--model", "gpt", "--set", "depth=8", "--set", "width=256", "--set", "heads=4", "--set", "context=128", "--data",
         "pysource"),
        16,
        trained=6_482_432,
    ),
    Training(
        "convnet",
        ("--model", "convnet", "--set", "depth=6", "--set", "width=24", "--data", "random:3x32x32x10"),
        64,
        in_order=True,
        trained=162_994,
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

    def asked(self, case: str) -> str:
        """Its strategy, as it is asked for."""
        return self.ways[case][1]

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
    setting = trial.network
    if case == ALONE:  # the same in every network that begins with such a device
        devices = tuple(msgspec.structs.replace(each, link_mbps=ALONE_MBPS) for each in devices[:1])
        setting = f"{devices[0].cpu:g} core"
    train = [
        "train", *training.flags, "--batch-size", str(training.batch_size), "--microbatches", "8", "--steps",
        str(choices.warm_up + choices.steps), *flags, "--protect", "off", "--run-dir", RUN, "--json", "--quiet",
    ]  # fmt: skip
    return Job(
        experiment="choice",
        workload=training.name,
        setting=setting,
        case=case,
        command=(*lab(), *train),
        files={DEVICES: toml(devices), **training.files},
        output="run",
        batch_size=training.batch_size,
        warm_up=choices.warm_up,
    )


def arranged(plan: Sequence[tuple[int, Job]]) -> list[tuple[int, Job]]:
    """Setting after setting, `auto` first, so that it can say what need not be measured; else as planned."""
    places: dict[tuple[int, str, str], int] = {}
    for repeat, job in plan:
        places.setdefault((repeat, job.workload, job.setting), len(places))
    return sorted(plan, key=lambda each: (places[each[0], each[1].workload, each[1].setting], each[1].case != AUTO))


def needless(choices: Choices, job: Job, measured: Measured) -> str | None:
    """Why a way cannot be the best of its setting, after what `auto` took there; None: it can. Rings, and one device alone, are
    measured whatever is known."""
    trial = next((each for each in TRIALS if (each.training.name, each.network) == (job.workload, job.setting)), None)
    if job.experiment != "choice" or trial is None or job.case == AUTO or parse(trial.asked(job.case)).splits_layers:
        return None
    taken = measured.results(trial_jobs(choices, trial)[AUTO])
    if not taken:
        return None
    way, devices = parse(job.case), NETWORKS[trial.network]
    auto_s = statistics.median(statistics.median(each.step_s) for each in taken)
    exchange = way.exchange(len(devices))
    if exchange is not None and trial.training.trained:
        rate = max(device.link_mbps for device in devices) * 1e6 / 8
        floor_s = exchange.floor_s(Speeds(4 * trial.training.trained / rate))
        if floor_s > auto_s * SURE:
            return f"its exchange takes {_ms(floor_s)} on the links alone, and a step of auto took {_ms(auto_s)}"
    forecast_s = _forecast_s(way, taken[-1].facts)
    if forecast_s is not None and forecast_s > auto_s * WIDE:
        return f"forecast {_ms(forecast_s)}, more than {WIDE:g} times the {_ms(auto_s)} that auto took"
    return None


def _forecast_s(way: Way, facts: Mapping[str, Any]) -> float | None:
    """What `auto` expected of a way, if it looked at it."""
    for each in facts.get("considered", ()):
        with contextlib.suppress(UsageError):  # one device alone has a name that is none of a strategy
            if way.same(parse(each["strategy"])):
                return float(each["step_s"]) if each.get("step_s") is not None else None
    return None


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
        tuple(_missing(choices, measured)),
    )


def _missing(choices: Choices, measured: Measured) -> Iterator[Skipped]:
    every = {job.file_stem: job for job in jobs(choices)}
    for job in every.values():
        reason = None if measured.every(job) else needless(choices, job, measured)
        if why := reason or measured.problem(job):
            yield Skipped(job.name, why)


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
