"""A bad node costs itself, not the run: everything it may say, with every field in turn as it must not be."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from crooked import Crooked, Tensors, bent
from ringtmp.errors import RingError
from ringtmp.runtime import snapshot_schedule
from ringtmp.strategies.data_parallel import sum_over_workers
from ringtmp.wire import messages as messages
from ringtmp.wire.messages import Message
from test_data_parallel_healing import Base

pytestmark = pytest.mark.usefixtures("offenders")
STEPS = 4
RING = ("Hello", "Activations", "Gradients", "Norms", "Scale", "Keep", "Held", "Placed", "LayerState", "Report", "Bye")
SERVERS = ("Hello", "Kept", "Pulled", "Copy", "Copied", "Squares", "Total", "Report", "Bye")
WORKERS = ("Hello", "Placed", "LayerState", "WorkDone", "Scored", "Push", "Pull", "Report", "Bye")
REDUCERS = ("Hello", "Placed", "LayerState", "WorkDone", "Scored", "GradientPart", "Report", "Bye")
#: Strategy, settings, nodes, who is crooked, what it says.
CASES: dict[str, tuple[str, dict[str, Any], int, int, tuple[str, ...]]] = {
    "ring": ("ring", {}, 3, 1, RING),
    "server": ("ps", {"servers": 3, "replicas": 1}, 5, 1, SERVERS),
    "worker": ("ps", {"servers": 2}, 4, 2, WORKERS),
    "team": ("ps", {"teams": 1}, 4, 3, ("Push", "Pull")),
    "team by all-reduce": ("ps", {"teams": 1, "team_sum": "all-reduce"}, 4, 3, ("GradientPart", "Pull")),
    "allreduce": ("allreduce", {}, 3, 1, REDUCERS),
    "tree": ("allreduce", {"algorithm": "tree"}, 4, 1, ("GradientPart",)),
}
#: How many parameters have gradients is known to their holder alone: the first time, fewer norms or more are wrong values
#: of the right kind, as wrong gradients are; from the second on they are found out.
VALUES = {
    ("Norms", 0, "tensors-0"), ("Norms", 0, "tensors-5"), ("Norms", 0, "tensors-6"), ("Squares", 0, "value-1"),
    ("Squares", 0, "value-2"), ("Squares", 0, "value-3"), ("Squares", 3, "value-1"), ("Squares", 3, "value-2"),
    ("Squares", 3, "value-3"),
}  # fmt: skip
#: Which of the messages of a class is bent: the first, and one in the middle of things.
WHICH = (0, 3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_over_workers, "BUCKET", 32)
        patch.setattr(snapshot_schedule, "BUDGET", 1e9)
        patch.setattr(snapshot_schedule, "FIRST_AFTER", 1)
        yield Base(tmp_path_factory.mktemp("base"))


class Bending:
    """Bends one field of the n-th message of a class; `ways` counts how many ways there were."""

    def __init__(self, kind: str, which: int, way: int | None) -> None:
        self._kind = getattr(messages, kind)
        self._left, self._way = which, way
        self.name, self.ways = "", 0

    def __call__(self, peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, self._kind):
            return None
        self._left -= 1
        if self._left >= 0:
            return None
        every = list(bent(message, tensors))
        self.ways = len(every)
        if self._way is None:
            return None
        self.name, other, given = every[self._way % self.ways]
        return peer, other, given


def outcome(base: Base, case: str, bending: Bending, calm: str) -> str:
    """healed, went on or ended; anything else is what must not be."""
    strategy, settings, nodes, bad, _ = CASES[case]
    pool = Crooked(nodes, bad, bending)
    try:
        summary = base.run(pool, strategy, settings, steps=STEPS, clip_norm=0.5).summary
    except RingError as error:
        named = f"node {bad}" in str(error) and "\x1b" not in str(error)
        return "ended" if named else f"ended with {error}"
    except Exception as error:
        return f"ended with a traceback: {error!r}"
    if (strategy == "ring" or not summary.recoveries) and summary.weights_sha256 != calm:
        return "has other bits"
    log = (base.folder / str(base._runs) / "events.jsonl").read_text()
    if "\\u001b" in log or any(len(line) > 10_000 for line in log.splitlines()):
        return "wrote what it liked into the log"
    return "healed" if summary.recoveries else "went on"


def calm_digest(base: Base, case: str) -> str:
    strategy, settings, nodes, bad, _ = CASES[case]
    pool = Crooked(nodes, bad, lambda *_: None)
    return str(base.run(pool, strategy, settings, steps=STEPS, clip_norm=0.5).summary.weights_sha256)


class Tally:
    def __init__(self, base: Base, case: str) -> None:
        self._base, self._case = base, case
        self._calm = calm_digest(base, case)
        self.found = {"healed": 0, "went on": 0, "ended": 0}
        self.wrong: list[str] = []

    def ways(self, kind: str, which: int) -> int:
        """How many ways there are to bend this message."""
        probe = Bending(kind, which, None)
        assert outcome(self._base, self._case, probe, self._calm) == "went on"
        return probe.ways

    def bend(self, kind: str, which: int, way: int) -> None:
        bending = Bending(kind, which, way)
        came = outcome(self._base, self._case, bending, self._calm)
        if came in self.found:
            self.found[came] += 1
        elif (kind, which, bending.name) not in VALUES:
            self.wrong.append(f"{kind} {which}, {bending.name}: {came}")


@pytest.mark.parametrize("case", CASES)
def test_a_field_that_is_not_as_it_must_be_costs_its_sender_and_nobody_else(case: str, base: Base) -> None:
    """One way to bend each, by a seed; all of them in `make long`."""
    tally, luck = Tally(base, case), random.Random(1)
    for kind in CASES[case][4]:
        tally.bend(kind, 0, luck.randrange(1000))
    print(case, tally.found)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.found["healed"] > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
def test_every_field_of_every_message_in_every_wrong_way(case: str, base: Base) -> None:
    tally = Tally(base, case)
    for kind in CASES[case][4]:
        for which in WHICH:
            for way in range(tally.ways(kind, which)):
                tally.bend(kind, which, way)
    print(case, tally.found)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.found["healed"] > tally.found["ended"]
