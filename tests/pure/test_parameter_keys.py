"""Keys and lossy wires, by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.sum_over_workers import BUCKET, buckets


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
