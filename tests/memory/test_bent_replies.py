"""A bad node costs itself, not the run: everything it may say, with every field in turn as it must not be."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from crooked import Crooked, Tensors, bent
from ringtmp.errors import RingError
from ringtmp.runtime import snapshot_schedule
from ringtmp.strategies.data_parallel import sum_over_workers
from ringtmp.strategies.hybcomm.choose_way import chunk
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
    "factors": ("hybcomm", {"way": "factors"}, 3, 1, ("Factors", "GradientPart")),
    "centre": ("easgd", {"tau": 1}, 3, 1, ("Push",)),
    "neighbour": ("dpsgd", {}, 3, 1, ("PeerModel",)),
    "ensemble": ("ensemble", {}, 3, 1, ("Predicted", "LayerState")),
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


def test_a_push_that_moves_nothing_does_not_end_the_run(base: Base) -> None:
    """It did: the centre is on the master, which looked for what had not come."""

    def empty(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        return (peer, message, []) if isinstance(message, messages.Push) else None

    (lost,) = base.run(Crooked(3, 1, empty), "easgd", {"tau": 1}, steps=STEPS).summary.recoveries
    assert (lost.lost, "nothing to move" in lost.reason) == ((1,), True)


@pytest.mark.parametrize("share", [math.nan, 2.0])
@pytest.mark.parametrize(("strategy", "settings"), [("easgd", {"tau": 1}), ("ps", {"consistency": "async"})])
def test_a_share_that_was_not_dealt_costs_its_sender_and_nobody_waits_for_it(
    strategy: str, settings: dict[str, Any], share: float, base: Base
) -> None:
    """What was dealt to it was nobody's any more: a step never came to its end."""

    def too_much(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, messages.WorkDone):
            return None
        return peer, msgspec.structs.replace(message, share=share), tensors

    (lost,) = base.run(Crooked(3, 1, too_much), strategy, settings, steps=STEPS).summary.recoveries
    assert (lost.lost, f"did {share:g} of step" in lost.reason) == ((1,), True)


@pytest.mark.parametrize("other", [0, 2])
def test_who_sends_a_gradient_another_way_than_all_is_named_whoever_comes_last(other: int, base: Base) -> None:
    """The last was blamed; and where that was the one who noticed, the run ended."""
    linear = {0: 112, 4: 272, 6: 64}  # layers by their number: values, each tensor on a boundary

    def by_server(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, messages.Factors) or peer != other:
            return None
        group = 1 + list(linear).index(message.layer)  # behind the BatchNorm, whose values go that way
        first, stop = chunk(linear[message.layer], 3, peer)
        return peer, messages.GradientPart(message.step, group, peer, 0, False), [torch.zeros(stop - first)]

    for seed in range(3):
        pool = Crooked(3, 1, by_server, seed)
        (lost,) = base.run(pool, "hybcomm", {"way": "factors"}, steps=STEPS).summary.recoveries
        assert (lost.lost, "another way than the others" in lost.reason) == ((1,), True)


@pytest.mark.parametrize(
    ("strategy", "settings", "nodes"),
    [("easgd", {"tau": 1}, 3), ("ps", {"consistency": "async"}, 3), ("ps", {"teams": "2/1"}, 5)],
)
def test_who_asks_for_what_it_did_not_want_is_dropped_and_does_not_end_the_run(
    strategy: str, settings: dict[str, Any], nodes: int, base: Base
) -> None:
    """It accused the master of an answer that nobody had asked for, and failed."""

    def another(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, messages.Pull) or peer or not message.step:
            return None
        return peer, msgspec.structs.replace(message, step=message.step - 1), tensors

    (lost, *_) = base.run(Crooked(nodes, 1, another), strategy, settings, steps=STEPS).summary.recoveries
    assert (lost.lost, "asked for what it did not want" in lost.reason) == ((1,), True)


def test_a_server_takes_no_gradient_of_keys_it_does_not_have_nor_of_steps_to_come(base: Base) -> None:
    """It kept them: a worker could fill its memory."""

    def elsewhere(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        return (1 - peer, message, tensors) if isinstance(message, messages.Push) else None

    def later(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, messages.Push):
            return None
        return peer, msgspec.structs.replace(message, step=message.step + 1), tensors

    def much_later_elsewhere(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, messages.Push):
            return None
        return 1 - peer, msgspec.structs.replace(message, step=message.step + 1000), tensors

    for crooked, replicas, said in (
        (elsewhere, 0, "does not have it"), (later, 0, "out of turn"), (much_later_elsewhere, 1, "out of turn"),
    ):  # fmt: skip
        pool = Crooked(4, 2, crooked)
        (lost, *_) = base.run(pool, "ps", {"servers": 2, "replicas": replicas}, steps=STEPS).summary.recoveries
        assert (lost.lost, said in lost.reason) == ((2,), True)


@pytest.mark.parametrize("field", ["step", "bucket"])
def test_a_part_of_the_next_exchange_or_of_the_other_kind_costs_its_sender_and_nobody_waits(
    field: str, base: Base
) -> None:
    """It was kept for later: what was due never came, and the run ended with the word that it had waited for node 0."""

    def other(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, messages.GradientPart) or message.step < 3 or message.chunk != 1 or message.hop:
            return None
        was = getattr(message, field)
        return peer, msgspec.structs.replace(message, **{field: was + 1 if field == "step" else 1 - was}), tensors

    pool = Crooked(2, 1, other)
    (lost,) = base.run(pool, "tensor", {"least": 1}, steps=STEPS, clip_norm=0.5).summary.recoveries
    assert lost.lost == (1,)
    assert "of another kind" in lost.reason or "before all of" in lost.reason


def test_a_neighbour_sends_no_model_of_steps_that_nobody_can_have_come_to(base: Base) -> None:
    def later(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, messages.PeerModel) or message.bucket:
            return None
        return peer, msgspec.structs.replace(message, step=message.step + 2), tensors

    (lost, *_) = base.run(Crooked(3, 1, later), "dpsgd", steps=STEPS).summary.recoveries
    assert lost.lost == (1,)
