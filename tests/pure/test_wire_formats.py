"""What travels is as near as its bits allow, as small as it says, and shaped as the receiver expects."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from ringtmp.config import RunConfig, TrainingPart
from ringtmp.errors import UsageError
from ringtmp.run.check_settings import resolve
from ringtmp.wire.formats import PLAIN, WIRE_FORMATS, ErrorFeedback, WireFormat, wire_format
from ringtmp.wire.message_parts import Crossing, fits
from ringtmp.wire.tensors import describe

INT8 = wire_format("int8")
#: The largest error, as a part of the value; of int8 of the block's largest.
BOUNDS = {"float32": 0.0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127}
each_format = pytest.mark.parametrize("wire", WIRE_FORMATS.values(), ids=list(WIRE_FORMATS))


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
    assert [name for name, wire in WIRE_FORMATS.items() if wire.carries_error] == ["int8"]
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
