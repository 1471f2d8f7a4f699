"""Keys and lossy wires, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.sum_over_workers import BUCKET, buckets
from ringtmp.wire import formats


def test_a_layer_is_laid_end_to_end_with_every_tensor_on_a_64_byte_boundary() -> None:
    layout = parameter_keys.flat([("weight", (3, 5)), ("bias", (3,)), ("scale", ())])
    assert [(slot.name, slot.start, slot.stop) for slot in layout.slots] == [
        ("weight", 0, 15), ("bias", 16, 19), ("scale", 32, 33),
    ]  # fmt: skip
    assert layout.size == 48


@given(
    st.lists(st.integers(0, 3_000_000).map(lambda size: size // 16 * 16), min_size=1, max_size=12), st.integers(1, 9)
)
def test_keys_cover_every_layer_once_in_order_and_shards_come_out_even(sizes: list[int], servers: int) -> None:
    table = parameter_keys.cut(sizes, servers)
    assert [key.number for key in table] == list(range(len(table)))
    for layer, size in enumerate(sizes):
        mine = [key for key in table if key.layer == layer]
        edges = [0, *(key.stop for key in mine)]
        assert edges[-1] == (size if mine else 0) == size
        assert all(key.start == start for key, start in zip(mine, edges, strict=False))
        assert all(
            key.start % parameter_keys.GRAIN == 0 and 0 < key.size <= parameter_keys.LARGEST_KEY + parameter_keys.GRAIN
            for key in mine
        )
    owners = parameter_keys.deal(table, servers)
    loads = [sum(key.size for key in table if owners[key.number] == server) for server in range(servers)]
    assert max(loads) - min(loads) <= max((key.size for key in table), default=0)


def test_buckets_follow_the_backward_pass_and_leave_no_layer_out() -> None:
    sizes = [BUCKET // 2, 0, BUCKET, 16, BUCKET // 2, BUCKET - 16]
    assert buckets(sizes) == [(5, 4), (3, 2), (0,)]


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8"])
def test_a_lossy_wire_is_as_near_as_its_bits_and_as_small_as_it_says(wire: str) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    sent = formats.encode(wire, tensor)
    assert sum(each.nbytes for each in sent) == formats.wire_bytes(wire, 1000)
    back = formats.decode(wire, sent)
    bound = {"bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127}[wire]
    largest = tensor.abs().max() if wire == "int8" else tensor.abs()
    assert bool(((back - tensor).abs() <= bound * largest * 1.01).all())
    assert formats.decode(wire, formats.encode(wire, back)).equal(back) or wire == "int8"


def test_a_lossy_wire_leaves_integers_zeros_and_what_is_not_finite_alone() -> None:
    numbers = torch.arange(5)
    assert formats.encode("int8", numbers)[0] is numbers
    zeros = torch.zeros(300)
    assert formats.decode("int8", formats.encode("int8", zeros)).equal(zeros)
    broken = torch.tensor([1.0, math.nan, 2.0])
    assert bool(formats.decode("int8", formats.encode("int8", broken)).isnan().any())
    huge = torch.tensor([1e30, -1e30])
    assert bool(formats.decode("float16", formats.encode("float16", huge)).isfinite().all())


def test_with_error_feedback_what_was_rounded_away_arrives_in_the_end() -> None:
    wanted = torch.full((256,), 0.001)
    wanted[0] = 1.0  # makes a step of 1/127, eight times the others
    arrived, residual = torch.zeros(256), torch.zeros(256)
    for _ in range(100):
        sent = formats.encode("int8", wanted + residual)
        residual = wanted + residual - formats.decode("int8", sent)
        arrived += formats.decode("int8", sent)
    assert bool(((arrived - 100 * wanted).abs() < 0.01).all())
