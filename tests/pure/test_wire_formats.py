"""What travels is as near as its bits allow, as small as it says, and shaped as the receiver expects."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.run.check_settings import resolve
from ringtmp.wire.formats import PLAIN, WIRE_FORMATS, ErrorFeedback, WireFormat, wire_format
from ringtmp.wire.message_parts import Crossing, fits
from ringtmp.wire.tensors import describe

INT8 = wire_format("int8")
#: The largest error, as a part of the value; of int8 of the block's largest.
BOUNDS = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127}
each_format = pytest.mark.parametrize(
    "wire", [each for each in WIRE_FORMATS.values() if not each.gradients_only], ids=list(BOUNDS)
)
COARSE = [name for name, each in WIRE_FORMATS.items() if each.gradients_only]


@each_format
def test_a_tensor_comes_out_as_near_as_its_bits_and_takes_what_the_format_says(wire: WireFormat) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    sent = wire.encode(tensor)
    assert sum(each.nbytes for each in sent) == wire.payload_bytes(1000)
    back = wire.decode(sent)
    largest = tensor.abs().max() if wire.block else tensor.abs()
    assert bool(((back - tensor).abs() <= BOUNDS[wire.name] * largest * 1.01).all())
    assert wire.exact == back.equal(tensor)
    assert wire.decode(wire.encode(back)).equal(back) or wire.block


@each_format
def test_what_is_packed_has_the_types_and_shapes_that_are_announced(wire: WireFormat) -> None:
    tensors = [torch.randn(3, 100), None, torch.arange(6).reshape(2, 3), torch.tensor(1.0)]
    packed = wire.pack(tensors)
    specs = tuple(None if each is None else describe(each)[0] for each in packed)
    crossings = [Crossing(str(each.dtype)[6:], tuple(each.shape), False) for each in tensors if each is not None]
    crossings.insert(1, Crossing("float32", (7,), False))  # what may be missing
    assert fits(crossings, specs, wire)
    assert not fits(crossings, specs[:-1], wire)
    assert not fits([*crossings[1:], crossings[0]], specs, wire)
    if wire.block:
        assert not fits(crossings, (specs[0], None, *specs[2:]), wire), "values without their scales"
        assert not fits(crossings, (*specs[:3], specs[1], *specs[4:]), wire), "scales of nothing"
    for before, after in zip(tensors, wire.unpack(packed), strict=True):
        assert (before is None) == (after is None)
        assert before is None or after is None or (before.dtype, before.shape) == (after.dtype, after.shape)


def test_integers_zeros_and_what_is_not_finite_come_through() -> None:
    numbers = torch.arange(5)
    assert INT8.encode(numbers)[0] is numbers
    zeros = torch.zeros(300)
    assert INT8.decode(INT8.encode(zeros)).equal(zeros)
    assert bool(INT8.decode(INT8.encode(torch.tensor([1.0, math.nan, 2.0]))).isnan().any())
    float16 = wire_format("float16")
    assert bool(float16.decode(float16.encode(torch.tensor([1e30, -1e30]))).isfinite().all())


def test_with_error_feedback_what_was_rounded_away_arrives_in_the_end() -> None:
    wanted = torch.full((256,), 0.001)
    wanted[0] = 1.0  # makes a step of 1/127, eight times the others
    arrived, feedback = torch.zeros(256), ErrorFeedback(INT8)
    for _ in range(100):
        arrived += INT8.decode(feedback.encode("key", wanted))
        feedback.encode("another", -wanted)
    assert bool(((arrived - 100 * wanted).abs() < 0.01).all())


def test_only_a_coarse_format_carries_its_error_along() -> None:
    tensor = torch.randn(8)
    assert [name for name, wire in WIRE_FORMATS.items() if wire.carries_error] == ["int8", *COARSE]
    assert ErrorFeedback(PLAIN).encode("key", tensor)[0] is tensor


def test_a_format_is_named_and_refused_without_loading_torch() -> None:
    with pytest.raises(UsageError, match="unknown wire format 'int7': did you mean 'int8'"):
        wire_format("int7")
    check = "import sys, ringtmp.wire.formats, ringtmp.wire.protocol; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_format_in_one_entry_is_taken_from_the_settings_to_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers in 16 bits, with a scale for every 8 values."""
    coarse = WireFormat("int16", 2, lambda scaled: scaled.round().short(), block=8)
    monkeypatch.setitem(WIRE_FORMATS, "int16", coarse)
    assert resolve(RunConfig(training=TrainingPart(wire="int16"))).training.wire == "int16"
    tensor = torch.randn(3, 7)
    specs = tuple(describe(each)[0] for each in coarse.encode(tensor))
    assert fits([Crossing("float32", (3, 7), False)], specs, coarse)
    assert sum(spec.nbytes for spec in specs) == coarse.payload_bytes(21)
    assert bool((coarse.decode(coarse.encode(tensor)) - tensor).abs().max() < 0.02)


# -- for gradients alone ------------------------------------------------------------------------------------------------------


def random(size: int, seed: int = 0) -> torch.Tensor:
    """Values of very different sizes, as gradients are."""
    normal = torch.randn(2, size, generator=torch.Generator().manual_seed(seed))
    return normal[0] * normal[1].exp()


@pytest.mark.parametrize("size", [1, 7, 512, 513, 1040])
@pytest.mark.parametrize("name", COARSE)
def test_a_gradient_takes_the_bytes_and_has_the_shapes_that_are_announced(name: str, size: int) -> None:
    wire, gradient = wire_format(name), random(size)
    sent = wire.encode(gradient)
    specs = [describe(each)[0] for each in sent]
    assert [(spec.dtype, spec.shape) for spec in specs] == wire.travels("float32", (size,))
    assert sum(spec.nbytes for spec in specs) == wire.payload_bytes(size)
    back = wire.decode(sent, size)
    assert (back.dtype, back.shape) == (gradient.dtype, gradient.shape)
    assert not wire.exact


def test_one_bit_is_a_sign_and_the_mean_of_its_block_by_hand() -> None:
    wire = WIRE_FORMATS["1bit"]
    assert wire.payload_bytes(1 << 20) == (1 << 17) + 8 * (1 << 11)
    gradient = torch.tensor([1.0, 3.0, -2.0, 0.0, -4.0])
    bits, means = wire.encode(gradient)
    assert bits.tolist() == [0b11010000]
    assert means.tolist() == [[-3.0, pytest.approx(4 / 3)]]
    assert wire.decode([bits, means], 5).tolist() == pytest.approx([4 / 3, 4 / 3, -3.0, 4 / 3, -3.0])


def test_one_bit_is_the_projection_its_bound_says_and_every_block_keeps_its_sum() -> None:
    wire, gradient = WIRE_FORMATS["1bit"], random(2000)
    back = wire.decode(wire.encode(gradient), 2000)
    lost, kept, whole = ((each.double() ** 2).sum() for each in (gradient - back, back, gradient))
    assert float(lost) == pytest.approx(float(whole - kept), rel=1e-5)
    for start in range(0, 2000, wire.block):
        block = slice(start, start + wire.block)
        assert float(back[block].sum()) == pytest.approx(float(gradient[block].sum()), abs=1e-3)


def test_topk_sends_the_largest_and_leaves_out_no_more_than_its_bound() -> None:
    wire, gradient = WIRE_FORMATS["topk"], random(2000)
    values, places = wire.encode(gradient)
    kept = -(-2000 // wire.block)
    assert len(values) == len(places) == kept
    back = wire.decode([values, places], 2000)
    assert back[places.long()].equal(gradient[places.long()])
    left_out = (gradient - back).abs()
    assert float(left_out.max()) <= float(values.abs().min())
    assert float((left_out**2).sum()) <= (1 - kept / 2000) * float((gradient**2).sum())


@pytest.mark.parametrize("name", COARSE)
def test_with_error_feedback_the_sum_that_arrives_lacks_the_last_remainder_alone(name: str) -> None:
    wire = wire_format(name)
    feedback, arrived, meant = ErrorFeedback(wire), torch.zeros(1000).double(), torch.zeros(1000).double()
    largest = 0.0
    for step in range(300):
        gradient = random(1000, step)
        largest = max(largest, float(gradient.norm()))
        arrived += wire.decode(feedback.encode("key", gradient), 1000).double()
        meant += gradient.double()
        # A k-th of a vector sent each time: what waits never grows beyond 2 n / k of the largest gradient.
        assert float((meant - arrived).norm()) <= 2 * wire.block * largest
    assert float((meant - arrived).norm()) < float(meant.norm())


@pytest.mark.parametrize("name", COARSE)
def test_what_is_not_a_number_arrives_and_a_place_that_does_not_exist_is_refused(name: str) -> None:
    wire = wire_format(name)
    gradient = random(600)
    gradient[3] = math.nan
    assert bool(wire.decode(wire.encode(gradient), 600).isnan().any())
    zeros = torch.zeros(600)
    assert wire.decode(wire.encode(zeros), 600).equal(zeros)
    if name == "topk":
        values, places = wire.encode(zeros)
        for wrong in (-1, 600):
            places[0] = wrong
            with pytest.raises(ProtocolError, match="of a gradient of 600 values"):
                wire.decode([values, places], 600)


@pytest.mark.parametrize("name", COARSE)
def test_what_makes_no_sense_of_activations_is_refused_with_a_clear_word(name: str) -> None:
    with pytest.raises(
        UsageError, match=f"--wire {name} leaves out .* strategy ring sends activations .* Use --wire float32,"
    ):
        resolve(RunConfig(training=TrainingPart(wire=name)))
    for strategy in ("allreduce", "ps"):
        config = RunConfig(training=TrainingPart(wire=name), ring=RingPart(strategy=strategy))
        assert resolve(config).training.wire == name
    layerwise = RingPart(strategy="ps", strategy_settings={"fetch": "layerwise"})
    with pytest.raises(UsageError, match="fetch=layerwise"):
        resolve(RunConfig(training=TrainingPart(wire=name), ring=layerwise))
