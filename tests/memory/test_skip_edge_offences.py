"""Skips go past nodes that do not use them, and a node that breaks the protocol there is dropped and named, too."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import torch

from begun_runs import Begun
from crooked import Crooked, Tensors, bent
from ringtmp.errors import ProtocolError, RingError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.plan.route import plain_ring
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.strategies import registry
from ringtmp.strategies.ring.tensor_routes import flow_of
from ringtmp.transport.in_process import Hub
from ringtmp.wire import messages
from ringtmp.wire.address import NOWHERE
from ringtmp.wire.message_parts import Crossing
from ringtmp.wire.messages import Activations, Gradients, Message
from test_who_may_send_what import RECIPE

pytestmark = pytest.mark.usefixtures("offenders")
#: Visit 0 is enc1, 1 enc2, 2 the middle, 3 the decoder that gets both skips, 4 the rest, again on the master.
BOUNDS = [(0, 2), (2, 4), (4, 6), (6, 10), (10, 13)]
RING = {"cuts": ",".join(f"{first}-{stop - 1}" for first, stop in BOUNDS)}
STEPS = 3
#: Who is crooked, and what it says past a visit.
SKIPS: dict[str, tuple[int, type]] = {"there": (1, Activations), "back": (3, Gradients)}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    return Begun(tmp_path_factory.mktemp("unet"), "unet")


@pytest.fixture(scope="module")
def calm(begun: Begun) -> str:
    return str(begun.run(InMemoryPool(4), RING, steps=STEPS).summary.weights_sha256)


class Bending:
    """Bends one field of the n-th message of a class that goes past a visit."""

    def __init__(self, kind: type, which: int, way: int) -> None:
        self._kind, self._left, self._way = kind, which, way
        self.name, self.ways = "", 0

    def __call__(self, peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        if not isinstance(message, self._kind) or getattr(message, "source", -1) < 0:
            return None
        self._left -= 1
        if self._left >= 0:
            return None
        every = list(bent(message, tensors))
        self.ways = len(every)
        self.name, other, given = every[self._way % self.ways]
        return peer, other, given


def outcome(begun: Begun, calm: str, skip: str, bending: Bending) -> str:
    bad = SKIPS[skip][0]
    pool = Crooked(4, bad, bending)
    try:
        summary = begun.run(pool, RING, steps=STEPS).summary
    except RingError as error:
        return "ended" if f"node {bad}" in str(error) else f"ended with {error}"
    except Exception as error:
        return f"ended with a traceback: {error!r}"
    assert pool.spoke
    if summary.weights_sha256 != calm:
        return "has other bits"
    if any(each.lost != (bad,) for each in summary.recoveries):
        return f"lost {[each.lost for each in summary.recoveries]}"
    return "healed" if summary.recoveries else "went on"


@pytest.mark.parametrize("skip", SKIPS)
def test_a_skip_that_is_not_as_it_must_be_costs_its_sender_and_nobody_else(skip: str, begun: Begun, calm: str) -> None:
    """A few ways to bend one, by a seed; all of them in `make long`."""
    luck = random.Random(2)
    found = [outcome(begun, calm, skip, Bending(SKIPS[skip][1], which, luck.randrange(1000))) for which in (0, 5, 2)]
    assert set(found) <= {"healed", "went on", "ended"}
    assert "healed" in found


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("skip", SKIPS)
def test_every_field_of_a_skip_in_every_wrong_way(skip: str, begun: Begun, calm: str) -> None:
    wrong, ways = [], 1
    for which in (0, 5):
        way = 0
        while way < ways:
            bending = Bending(SKIPS[skip][1], which, way)
            came = outcome(begun, calm, skip, bending)
            ways, way = bending.ways, way + 1
            if came not in ("healed", "went on", "ended"):
                wrong.append(f"{which}, {bending.name}: {came}")
    assert not wrong, "\n".join(wrong)
    assert ways > 20


# -- held against the plan ----------------------------------------------------------------------------------------------


def receiver(begun: Begun, node: int) -> Endpoint:
    """The mailbox of a node under a plan of U-Net over four nodes."""
    route = plain_ring(4, BOUNDS)
    flow = flow_of(begun.layers, route, lambda training, value: Crossing("float32", (4,), True))
    setup = messages.Setup(route, RECIPE, 2, "1f1b", 0, dict.fromkeys(range(4), NOWHERE), 0, flow=flow)
    endpoint = Endpoint(Hub().transport(node), "ring", 1, limit_bytes=2**20)
    assert registry.member(endpoint, setup) is not None
    return endpoint


def skipped(**changes: Any) -> Activations:
    """From visit 1 to visit 3, as it should be."""
    honest = Activations(1, 0, 3, 0, 2, True, True, (True,), source=1)
    return msgspec.structs.replace(honest, **changes)


def spec(*shape: int, dtype: str = "float32") -> Any:
    from ringtmp.wire.tensors import TensorSpec

    strides = tuple(torch.empty(shape, device="meta").stride())
    return TensorSpec(dtype, shape, strides)


def test_a_skip_comes_from_the_node_that_the_plan_says_and_in_its_turn(begun: Begun) -> None:
    honest = skipped(tensors=(spec(2, 4),))
    receiver(begun, 3).judge(1, honest)
    for sender in (0, 2):  # one that holds the other skip, one that holds neither
        with pytest.raises(ProtocolError, match="which is said by"):
            receiver(begun, 3).judge(sender, honest)
    with pytest.raises(ProtocolError, match="which is said by"):
        receiver(begun, 3).judge(2, msgspec.structs.replace(honest, source=2))  # no edge of its own
    node = receiver(begun, 3)
    node.judge(1, honest)
    for bad in (
        honest,
        skipped(microbatch=2, tensors=(spec(2, 4),)),
        skipped(turn=2, microbatch=1, tensors=(spec(2, 4),)),
    ):
        with pytest.raises(ProtocolError, match="out of turn"):
            node.judge(1, bad)


@pytest.mark.parametrize(
    "tensors", [(), (spec(2, 4), spec(2, 4)), (spec(2, 5),), (spec(2, 4, dtype="int64"),), (None,)], ids=str
)
def test_a_skip_of_other_tensors_than_the_plan_says_is_refused_before_memory_is_taken(
    tensors: Any, begun: Begun
) -> None:
    with pytest.raises(ProtocolError, match="sent"):
        receiver(begun, 3).judge(1, skipped(tensors=tensors, wants=(True,) * len(tensors)))


def test_a_gradient_along_a_skip_for_what_was_never_sent_is_refused(begun: Begun) -> None:
    back = Gradients(1, 0, 1, 0, source=3, tensors=(spec(2, 4),))
    with pytest.raises(ProtocolError, match="out of turn"):
        receiver(begun, 1).judge(3, back)
    with pytest.raises(ProtocolError, match="which is said by"):
        receiver(begun, 1).judge(2, back)
