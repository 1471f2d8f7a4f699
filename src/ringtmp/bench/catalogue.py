"""Every experiment by its name: what it asks, and the module of `experiments/` that it is."""

from __future__ import annotations

import msgspec

from ringtmp.errors import unknown


class Experiment(msgspec.Struct, frozen=True):
    name: str
    title: str
    module: str = ""  # of `experiments/`, where it has not its name
    once: bool = False  # measured once, not in every repeat: its answer is a size, not a time
    lab: str = ""  # what it does to devices, which only emulated ones (or plain processes) let it


CATALOG = {
    each.name: each
    for each in (
        Experiment("idle", "idle time of every worker, by cause, number of nodes and batch size"),
        Experiment(
            "progress", "loss per iteration, second, byte and joule; what it takes to a target", "learning_progress"
        ),
        Experiment("scaling", "1 to 8 devices, strong and weak: speed-up, efficiency, the busiest link"),
        Experiment(
            "resilience",
            "a worker, a server or the master removed: notice, recovery, work repeated, bits",
            lab="takes devices away",
        ),
        Experiment(
            "capacity", "the largest model under a real memory cap, by strategy", once=True, lab="sets memory caps"
        ),
        Experiment("energy", "joules per epoch and per sample, by node and strategy, with what the model assumes"),
        Experiment("traffic", "values and bytes per epoch over batch sizes and shapes, with the break-even"),
        Experiment(
            "equations",
            "measured step time against equations (1), (2), (3) over link rates",
            "step_time_equations",
            lab="sets link rates",
        ),
    )
}
#: Words that stand for all of them.
EVERY = {"quick": "all experiments at small size, in minutes", "all": "all experiments, as the question deserves"}


def named(names: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """(experiments in their order, whether small): `quick` alone means all of them in small."""
    for name in names:
        if name not in CATALOG and name not in EVERY:
            raise unknown("experiment", name, [*CATALOG, *EVERY, "speed"])
    quick = "quick" in names
    plain = [name for name in CATALOG if name in names]
    if "all" in names or not plain:
        plain = list(CATALOG)
    return tuple(plain), quick
