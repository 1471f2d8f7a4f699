"""What must hold of an operator's arguments where torch does not ask: checked at every call, before the kernel runs.

A graph is data from outside. Some kernels trust their arguments: a `g` of another length than `v` has channels frees
memory twice, a negative offset of a bag reads what lies before its indices. Each such operator has a contract here, a
function with the operator's own signature that raises ProtocolError. All others are called as they are, at no cost.
What has no contract has been fuzzed (test_operator_fuzzer.py): odd arguments of it end in an error, not in a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ringtmp.errors import ProtocolError

Tensor = torch.Tensor


#: Whose contracts ask for shapes and types alone: what holds once holds for every call with the same ones.
OF_SHAPES_ALONE = frozenset({"aten.scaled_dot_product_attention.default", "aten.native_group_norm.default"})


def under_contract(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, behind its contract if it has one."""
    contract = CONTRACTS.get(target)
    if contract is None:
        return function

    return _Checked(target, function, contract)


class _Checked:
    def __init__(self, target: str, function: Callable[..., Any], contract: Callable[..., None]) -> None:
        self._target = target
        self._function = function
        self._contract = contract
        self._schema = function._schema  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._contract(*args, **kwargs)
        except (TypeError, AttributeError, IndexError) as error:  # an argument of another type, or missing
            raise ProtocolError(f"{self._target}: {error}") from error
        return self._function(*args, **kwargs)

    def __str__(self) -> str:
        return self._target


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError(what)


def _known(tensor: Tensor) -> bool:
    """Whether it has values: on the meta device there are shapes alone."""
    return not tensor.is_meta


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    # The kernel reads one length of `g` for every slice of `v` and asks nothing.
    _must(v.dim() > 0 and v.numel() > 0, f"_weight_norm: a weight of shape {tuple(v.shape)} has no norm")
    _must(-1 <= dim < v.dim(), f"_weight_norm: no dimension {dim} in shape {tuple(v.shape)}")
    _must(v.is_floating_point() and g.dtype == v.dtype, f"_weight_norm: v is {v.dtype}, g is {g.dtype}")
    if dim == -1:  # one norm for all of it, by ordinary operators
        _must(g.numel() == 1 and g.dim() <= v.dim(), f"_weight_norm: g of shape {tuple(g.shape)} for one norm")
        return
    lengths = [size if at == dim else 1 for at, size in enumerate(v.shape)]
    _must(list(g.shape) == lengths, f"_weight_norm: g of shape {tuple(g.shape)} for v of {tuple(v.shape)}, dim {dim}")


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> None:
    name = "embedding_bag"
    _must(
        weight.dim() == 2 and weight.is_floating_point(),
        f"{name}: a table of shape {tuple(weight.shape)}, {weight.dtype}",
    )
    whole = (torch.int64, torch.int32)
    _must(indices.dim() == 1 and offsets.dim() == 1, f"{name}: indices and offsets have one dimension each")
    _must(
        indices.dtype in whole and offsets.dtype in whole, f"{name}: {indices.dtype} and {offsets.dtype} are no indices"
    )
    _must(mode in (0, 1, 2), f"{name}: there is no mode {mode}")
    rows, count = weight.shape[0], indices.shape[0]
    _must(padding_idx is None or -rows <= padding_idx < rows, f"{name}: padding index {padding_idx} of {rows} rows")
    if per_sample_weights is not None:
        _must(mode == 0 and per_sample_weights.shape == indices.shape and per_sample_weights.dtype == weight.dtype,
              f"{name}: weights of shape {tuple(per_sample_weights.shape)}, {per_sample_weights.dtype}")  # fmt: skip
    _must(offsets.shape[0] > include_last_offset, f"{name}: no bag")
    if not (_known(indices) and _known(offsets)):
        return
    if count:
        low, high = torch.aminmax(indices)
        _must(int(low) >= 0 and int(high) < rows, f"{name}: indices from {int(low)} to {int(high)} of {rows} rows")
    bounds = offsets.tolist()
    _must(bounds[0] == 0 and bounds[-1] <= count, f"{name}: bags from {bounds[0]} to {bounds[-1]} of {count} indices")
    _must(all(a <= b for a, b in pairwise(bounds)), f"{name}: offsets must not decrease")


def _repeats_alone(repeats: Tensor, *, output_size: int | None = None) -> None:
    if _known(repeats) and repeats.dim() == 1 and repeats.numel():
        # In Python's own integers: the kernel's sum may wrap around to a small number and be believed.
        counts = repeats.tolist()
        _must(min(counts) >= 0, f"repeat_interleave: {min(counts)} repeats")
        _must(sum(counts) < 2**62, f"repeat_interleave: {sum(counts)} repeats in all")
        _must(
            output_size is None or output_size == sum(counts),
            f"repeat_interleave: {sum(counts)} repeats, not {output_size}",
        )
    elif output_size is not None:
        _must(
            0 <= output_size < 2**62 and bool(repeats.numel() or not output_size),
            f"repeat_interleave: output size {output_size}",
        )


def _repeats(self: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: int | None = None) -> None:
    size = self.numel() if dim is None else self.shape[dim] if self.dim() else 1
    _must(repeats.dim() <= 1, f"repeat_interleave: repeats of shape {tuple(repeats.shape)}")
    _must(repeats.numel() in (1, size), f"repeat_interleave: {repeats.numel()} repeats for {size} slices")
    spread = repeats.reshape(1).expand(size) if repeats.numel() == 1 else repeats
    if repeats.numel() == 1 and _known(repeats):
        times = int(repeats)
        _must(times >= 0 and times * max(1, size) < 2**62, f"repeat_interleave: {times} repeats of {size} slices")
        _must(output_size is None or output_size == times * size, f"repeat_interleave: output size {output_size}")
    else:
        _repeats_alone(spread, output_size=output_size)


def _repeats_number(self: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None) -> None:
    size = self.numel() if dim is None else self.shape[dim] if self.dim() else 1
    _must(repeats >= 0 and repeats * max(1, self.numel()) < 2**62, f"repeat_interleave: {repeats} repeats")
    _must(output_size is None or output_size == repeats * size, f"repeat_interleave: output size {output_size}")


def _recurrent(name: str, gates: int) -> Callable[..., None]:
    """The kernels walk through `params` by arithmetic and trust every shape in it."""

    def contract(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> None:
        states = list(hx) if name == "lstm" else [hx]
        _must(len(states) == (2 if name == "lstm" else 1), f"{name}: {len(states)} states")
        _must(
            input.dim() == 3 and all(each.dim() == 3 for each in states),
            f"{name}: input and state have three dimensions",
        )
        _must(0 < num_layers < 2**16 and 0 <= dropout <= 1, f"{name}: {num_layers} layers, dropout {dropout}")
        ways = 2 if bidirectional else 1
        batch = input.shape[0 if batch_first else 1]
        hidden, leaving = states[-1].shape[2], states[0].shape[2]
        _must(min(*input.shape, hidden, leaving) > 0, f"{name}: nothing of shape {tuple(input.shape)} to work on")
        for each in states:
            _must(each.shape[:2] == (num_layers * ways, batch), f"{name}: a state of shape {tuple(each.shape)}")
        wanted: list[tuple[int, ...]] = []
        for layer in range(num_layers):
            entering = input.shape[2] if layer == 0 else leaving * ways
            cell: list[tuple[int, ...]] = [(gates * hidden, entering), (gates * hidden, leaving)]
            cell += [(gates * hidden,), (gates * hidden,)] if has_biases else []
            wanted += (cell + ([(leaving, hidden)] if leaving != hidden else [])) * ways
        found = [tuple(each.shape) for each in params]
        _must(found == wanted, f"{name}: parameters of shapes {found[:6]}, wanted are {wanted[:6]}")
        kinds = {each.dtype for each in (input, *states, *params)}
        _must(len(kinds) == 1 and input.is_floating_point(), f"{name}: mixed or odd dtypes {sorted(map(str, kinds))}")

    return contract


def _native_group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,  # noqa: N803
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    eps: float,
) -> None:
    name = "native_group_norm"
    _must(min(N, HxW) >= 0 and C > 0 and N * C * HxW == input.numel(), f"{name}: {N} x {C} x {HxW} of {input.numel()}")
    _must(group > 0 and C % group == 0, f"{name}: {C} channels in {group} groups")
    for each in (weight, bias):
        fits = each is None or (each.shape == (C,) and each.is_contiguous())
        _must(fits, f"{name}: a scale or shift that is not {C} numbers in a row")


def _median(self: Tensor, dim: int, keepdim: bool = False) -> None:
    repeated = self.dim() > 0 and self.shape[dim] > 1 and self.stride(dim) == 0
    _must(not repeated, "median: along a dimension made by `expand`; call .contiguous() first")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    # A value longer than its key is written past the end.
    shapes = f"attention: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    _must(min(query.dim(), key.dim(), value.dim()) > 1 and query.shape[-1] == key.shape[-1], shapes)
    _must(key.shape[:-1] == value.shape[:-1] and query.dtype == key.dtype == value.dtype, shapes)
    if enable_gqa:
        _must(min(query.dim(), key.dim()) > 2 and key.shape[-3] > 0 and query.shape[-3] % key.shape[-3] == 0, shapes)
    if attn_mask is not None:
        wanted = (*query.shape[:-1], key.shape[-2])
        pairs = zip(reversed(attn_mask.shape), reversed(wanted), strict=False)
        fits = attn_mask.dim() <= len(wanted) and all(size in (1, other) for size, other in pairs)
        _must(fits, f"attention: a mask of shape {tuple(attn_mask.shape)} for {wanted}")


def _sampled(self: Tensor, output_size: Sequence[int], *rest: Any, **named: Any) -> None:
    """The kernel finds its pixels by dividing by the scale it is told."""
    known = ("scales", "scales_h", "scales_w")
    told = [*(each for each in rest if not isinstance(each, bool)), *(named[each] for each in known if each in named)]
    _must(
        self.dim() > 2 and len(output_size) == self.dim() - 2, f"upsample: {tuple(self.shape)} to {list(output_size)}"
    )
    for scale in told:
        _must(scale is None or 2.0**-16 <= scale <= 2.0**16, f"upsample: a scale of {scale}")


def _scaled(input: Tensor, output_size: Any, *rest: Any, **named: Any) -> None:
    factors = named.get("scale_factors", rest[-1] if rest else None)
    for scale in factors if isinstance(factors, list | tuple) else ():
        _must(2.0**-16 <= scale <= 2.0**16, f"upsample: a scale of {scale}")


def _arange(start: float, end: float, step: float = 1, *, dtype: torch.dtype | None = None, **_: Any) -> None:
    whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    _must(abs(step) >= 1 if whole else step != 0, f"arange: from {start} to {end} in steps of {step}")


CONTRACTS: dict[str, Callable[..., None]] = {
    "aten._weight_norm.default": _weight_norm,
    "aten.embedding_bag.default": _embedding_bag,
    "aten.embedding_bag.padding_idx": _embedding_bag,
    "aten.repeat_interleave.Tensor": _repeats_alone,
    "aten.repeat_interleave.self_Tensor": _repeats,
    "aten.repeat_interleave.self_int": _repeats_number,
    "aten.lstm.input": _recurrent("lstm", 4),
    "aten.gru.input": _recurrent("gru", 3),
    "aten.rnn_tanh.input": _recurrent("rnn_tanh", 1),
    "aten.rnn_relu.input": _recurrent("rnn_relu", 1),
    "aten.native_group_norm.default": _native_group_norm,
    "aten.median.dim": _median,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.arange.start_step": _arange,
    "aten.upsample_nearest1d.default": _sampled,
    "aten.upsample_nearest2d.default": _sampled,
    "aten.upsample_bilinear2d.default": _sampled,
    "aten.upsample_bicubic2d.default": _sampled,
    "aten.upsample_nearest1d.vec": _scaled,
    "aten.upsample_nearest2d.vec": _scaled,
    "aten.upsample_bilinear2d.vec": _scaled,
    "aten.upsample_bicubic2d.vec": _scaled,
}
