"""Every experiment by its name: what it asks, the module of `experiments/` it is, and the options that are its own. Pure.

A module has `cells(choices)`, or `jobs(choices)` where they are more than runs of a strategy, which refuses what cannot be
measured, and `section(choices, measured)`; one whose answer is a list of figures has `results(choices, measured)` too.
"""

from __future__ import annotations

import msgspec

from ringtmp.errors import unknown

#: Options of everything that compares the ring with the parameter server.
_COMPARED = ("--devices", "--strategies", "--no-isolation", "--listen", "--nodes")
_STEPS = ("--steps", "--warm-up")


class Experiment(msgspec.Struct, frozen=True):
    name: str
    title: str
    module: str = ""  # of `experiments/`, where it has another name
    compares: bool = True  # the ring with the parameter server, each at its best learning rate; part of `all`
    options: tuple[str, ...] = _COMPARED
    repeats: int = 5
    quick_repeats: int = 1
    once: bool = False  # whatever --repeats says: its answer is a size, not a time
    limit_s: float = 1800.0
    lab: str = ""  # what it does to devices, which only emulated ones (or plain processes) let it

    def times(self, quick: bool, asked: int | None) -> int:
        """How often each of its jobs is measured."""
        return 1 if self.once else asked or (self.quick_repeats if quick else self.repeats)


CATALOG = {
    each.name: each
    for each in (
        Experiment("idle", "idle time of every worker, by cause, number of nodes and batch size"),
        Experiment("progress", "loss per iteration, second, byte and joule; the cost to a target", "learning_progress"),
        Experiment("scaling", "1 to 8 devices, strong and weak: speed-up, efficiency, the busiest link"),
        Experiment(
            "resilience",
            "a worker, a server or the master removed: time to notice and recover, repeated work, bits",
            lab="takes devices away",
        ),
        Experiment(
            "capacity", "the largest model under a real memory cap, by strategy", once=True, lab="sets memory caps"
        ),
        Experiment(
            "energy", "joules per epoch and per sample, by node and strategy, and how much of it is the energy model"
        ),
        Experiment("traffic", "values and bytes per epoch by batch size and model shape, with the break-even"),
        Experiment("exchange", "one exchange of the model, by pattern: its lower bound beside a measured step"),
        Experiment(
            "equations",
            "measured step time against equations (1), (2) and (3), over link rates",
            "step_time_equations",
            lab="sets link rates",
        ),
        Experiment(
            "speed",
            "milliseconds per step of every strategy, and of torch's own",
            compares=False,
            options=("--cases", "--workloads", "--settings", "--microbatches", *_STEPS),
            quick_repeats=5,
            limit_s=900.0,
        ),
        Experiment(
            "plan",
            "predicted against measured step time and memory, on ten rings of emulated devices",
            "plan_accuracy",
            compares=False,
            options=("--beds", *_STEPS),
            repeats=2,
            limit_s=600.0,
        ),
        Experiment(
            "choice",
            "--strategy auto against every way it could have chosen, in twelve settings of emulated devices",
            "strategy_choice",
            compares=False,
            options=("--beds", *_STEPS),
            repeats=2,
            limit_s=600.0,
        ),
        Experiment(
            "messages",
            "one-way latency of a small message between two nodes, and of Gloo",
            compares=False,
            options=("--size", "--count", "--rounds"),
            repeats=1,
            limit_s=120.0,
        ),
    )
}
COMPARISONS = tuple(each.name for each in CATALOG.values() if each.compares)
#: Words that stand for all comparisons.
EVERY = {
    "quick": "all comparisons at small size, in minutes; with other names, those at small size",
    "all": "all comparisons at full size, in hours",
}


def named(names: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """(experiments in their order, whether small): `quick` alone means all comparisons in small."""
    for name in names:
        if name not in CATALOG and name not in EVERY:
            raise unknown("experiment", name, [*CATALOG, *EVERY])
    wanted = {*names, *(COMPARISONS if "all" in names or set(names) <= {"quick"} else ())}
    return tuple(name for name in CATALOG if name in wanted), "quick" in names
