"""What becomes of an operator whose arguments are cut: its result is cut as well, or its arguments must be whole. Pure.

Rules of shape: how a cut passes through operators that compute every value by itself, move values, or work on other
dimensions. What is not listed takes whole values, which is always right and sometimes costs an exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ringtmp.strategies.tensor.cut_tensors import Cut

Shape = tuple[int, ...]

_EACH_VALUE = """
relu gelu silu sigmoid tanh neg exp abs sqrt rsqrt square hardswish hardsigmoid hardtanh leaky_relu elu mish softplus relu6 selu
celu log clamp clamp_min clamp_max pow add sub rsub mul div maximum minimum masked_fill where to _to_copy contiguous clone alias
detach erf sin cos reciprocal
"""
_EACH_CHANNEL = """
max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
upsample_nearest2d upsample_bilinear2d
"""
_VIEWS = """
permute transpose select slice unbind chunk split split_with_sizes flatten unflatten squeeze unsqueeze expand t getitem alias
detach narrow
"""
#: Every value by itself, of arguments that are broadcast together.
EACH_VALUE = frozenset(_EACH_VALUE.split())
#: Every channel (dimension 1) by itself.
EACH_CHANNEL = frozenset(_EACH_CHANNEL.split())
#: New shapes of the same values in the same order; the second argument is the shape.
RESHAPES = frozenset({"view", "reshape", "_unsafe_view"})
#: Over the dimensions that are their second argument.
OVER_DIMS = frozenset({"mean", "sum", "amax", "amin", "var"})
#: Along the dimension that is their second argument.
ALONG_DIM = frozenset({"softmax", "_softmax", "log_softmax", "cumsum"})
#: Makers of views: what is written into one is written into what it shows.
VIEWS = RESHAPES | frozenset(_VIEWS.split())


def name_of(target: str) -> str:
    """aten.add_.Tensor -> add_"""
    return target.split(".")[1] if target.startswith("aten.") else target


def reshaped(cut: Cut, before: Shape, after: Shape, workers: int) -> Cut | None:
    """Where the cut dimension lies in another shape of the same values; None: parts would not stay parts."""
    size, left = before[cut.dim], math.prod(before[: cut.dim])
    starts = [at for at in range(len(after)) if math.prod(after[:at]) == left and after[at] > 1]
    if not starts:
        return None
    at = starts[0]
    if after[at] >= size:  # as it is, or with dimensions behind it
        return Cut(at, cut.groups) if after[at] % size == 0 else None
    if math.prod(after[at:]) % size:
        return None
    if after[at] == cut.groups and cut.groups > 1 and at + 1 < len(after):  # block by block
        return Cut(at + 1) if after[at + 1] % workers == 0 else None
    found = Cut(at, cut.groups)
    return found if size % after[at] == 0 and found.divides(after[at], workers) else None


def permuted(cut: Cut, dims: Sequence[int]) -> Cut:
    count = len(dims)
    return Cut([each % count for each in dims].index(cut.dim), cut.groups)


def transposed(cut: Cut, one: int, two: int, dims: int) -> Cut:
    swap = {one % dims: two % dims, two % dims: one % dims}
    return Cut(swap.get(cut.dim, cut.dim), cut.groups)


def without(cut: Cut, dims: Sequence[int], count: int, keep: bool = False) -> Cut | None:
    """When these dimensions are gone; None: the cut one is among them."""
    gone = {each % count for each in dims}
    if cut.dim in gone:
        return None
    return Cut(cut.dim if keep else cut.dim - sum(each < cut.dim for each in gone), cut.groups)


def aligned(cut: Cut, count: int, most: int) -> Cut:
    """As a dimension of the result, where a tensor of `count` dimensions is broadcast to `most`."""
    return Cut(cut.dim + most - count, cut.groups)
