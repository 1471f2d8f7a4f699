"""Decide which weights are cut and how, and write one worker's program. Pure: graphs and shapes in, programs out.

    linear(x, W, b)          x whole: columns. W and b are cut by outputs, the result is cut
                             x cut: rows. W is cut by inputs, every worker has a part of a sum; b is added to the total
    conv(x, W, b)            the same with channels
    batch_norm(x, ...)       x cut by channels: so are its weights and statistics
    attention(q, k, v)       cut by heads, if its arguments are
    dropout(x)               x cut: every worker draws the whole mask, and uses its part

Where columns do not divide, rows are tried; where neither does, the model is refused. A weight that is used twice, or has
fewer values than `least`, stays whole on every worker.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ringtmp.errors import UsageError
from ringtmp.model.allowed_operators import GRAD_MODE
from ringtmp.model.portable_layer import Argument, Graph, Items, Op, OwnedTensor, Ref, slots
from ringtmp.model.random_operators import draws
from ringtmp.strategies.tensor import cut_operators as rules
from ringtmp.strategies.tensor.cut_operators import name_of
from ringtmp.strategies.tensor.cut_tensors import Cut
from ringtmp.strategies.tensor.local_program import Exchanged, LocalProgram, Writer

#: By the name of a weight in the model; one that is not there is whole.
Cuts = dict[str, Cut]
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}


#: Instead of groups: the weight is cut by inputs although its input is whole, and each worker takes a part of that.
BY_INPUTS = 0


@dataclass(frozen=True)
class Way:
    """What the cutting goes by."""

    workers: int
    least: int
    rank: int = 0
    groups: Mapping[str, int] = field(
        default_factory=dict
    )  # of weights cut by outputs, where it is not 1; or BY_INPUTS
    fixed: Cuts | None = None  # decided already


class Cutting:
    """One graph of the whole model, cut. `cuts` says of every weight how."""

    def __init__(self, graph: Graph, values: Sequence[Any], tensors: Mapping[str, OwnedTensor], way: Way) -> None:
        refuse_what_cannot_be_cut(graph)
        self.cuts: Cuts = dict(way.fixed or {})
        self._graph, self._values, self._tensors, self._way = graph, values, tensors, way
        self._writer = Writer(graph.inputs)
        self._whole: dict[int, Argument] = {}
        self._cut: dict[int, tuple[Cut, Argument]] = {}
        self._memo: dict[tuple[str, int, Cut | None], Ref] = {}
        self._last: dict[int, int] = {}
        uses = Counter(slot for op in graph.ops for slot in _taken(op))
        self._once = {slot for slot, count in uses.items() if count == 1}
        self._trained: set[int] = set()  # a gradient comes back to these
        for slot, each in enumerate(graph.inputs):
            if each.kind != "input" and each.name in self.cuts:
                self._cut[slot] = self.cuts[each.name], Ref(slot)
            else:
                self._whole[slot] = Ref(slot)
            if each.kind != "input" and tensors[each.name].trainable:
                self._trained.add(slot)
        for slot, op in enumerate(graph.ops, len(graph.inputs)):
            self._last.update(dict.fromkeys(_taken(op), slot))
        for slot in [slot for value in graph.outputs for slot in slots(value)]:
            self._last[slot] = len(values)
        for slot, op in enumerate(graph.ops, len(graph.inputs)):
            if self._trained.intersection(_taken(op)):
                self._trained.add(slot)
            self._operate(slot, op)
        outputs = [self._wanted_whole(slot) for value in graph.outputs for slot in slots(value)]
        self.program: LocalProgram = self._writer.program([each.slot for each in outputs if isinstance(each, Ref)])

    # -- values ---------------------------------------------------------------------------------------------------------

    def _shape(self, slot: int) -> tuple[int, ...]:
        found = self._values[slot]
        return tuple(found.shape) if isinstance(found, torch.Tensor) else ()

    def _exchange(self, kind: Any, slot: int, source: Argument, cut: Cut | None = None) -> Ref:
        key = (kind, slot, cut)
        if key not in self._memo:
            assert isinstance(source, Ref)
            if source.slot < len(self._graph.inputs) and self._graph.inputs[source.slot].kind != "input":
                source = self._writer.op(
                    "aten.alias.default", source
                )  # exchanged are values, and this is the worker's own
            values, back = math.prod(self._shape(slot)), slot in self._trained
            self._memo[key] = self._writer.add(Exchanged(kind, source.slot, cut, values, back))
        return self._memo[key]

    def _wanted_whole(self, slot: int) -> Argument:
        if slot not in self._whole:
            cut, mine = self._cut[slot]
            self._whole[slot] = self._exchange("gather", slot, mine, cut)
        return self._whole[slot]

    def _wanted_cut(self, slot: int, cut: Cut) -> Argument:
        if slot in self._cut and self._cut[slot][0] == cut:
            return self._cut[slot][1]
        return self._exchange("slice", slot, self._wanted_whole(slot), cut)

    def _spread(self, slot: int) -> Argument:
        """A whole value that every worker uses for a part of what follows: its gradients are to be added up."""
        whole = self._wanted_whole(slot)
        return self._exchange("copy", slot, whole) if slot in self._trained else whole

    def _only_cut(self, slot: int) -> Cut | None:
        return self._cut[slot][0] if slot in self._cut and slot not in self._whole else None

    # -- operators ------------------------------------------------------------------------------------------------------

    def _operate(self, slot: int, op: Op) -> None:
        name, first = name_of(op.target), op.args[0].slot if op.args and isinstance(op.args[0], Ref) else -1
        if name.endswith("_") and not name.startswith("__") and first >= len(self._graph.inputs):
            op, name = self._without_writing(slot, op, first), name[:-1]
        if name == "linear" or name in CONVOLUTIONS:
            self._product(slot, op, name)
            return
        cut = self._only_cut(first) if first >= 0 else None
        if name == "sym_size" and cut:
            self._whole[slot] = self._size(op, first, cut)
            return
        anywhere = [each for each in _taken(op) if self._only_cut(each)]
        found = self._passed(slot, op, name, cut) if cut else None
        if found is None and anywhere and name in rules.EACH_VALUE:
            found = self._broadcast(slot, op, anywhere)
        if found is None:
            if name == "scaled_dot_product_attention":
                self._refuse_heads(first)
            self._whole[slot] = self._writer.add(self._with(op, self._wanted_whole))
        else:
            self._cut[slot] = found

    def _size(self, op: Op, first: int, cut: Cut) -> Argument:
        shape, at = self._shape(first), op.args[1]
        if isinstance(at, int) and at % len(shape) == cut.dim:
            return shape[cut.dim]
        return self._writer.add(self._only_first(op, self._cut[first][1]))

    def _passed(self, slot: int, op: Op, name: str, cut: Cut) -> tuple[Cut, Argument] | None:
        """The result for a first argument that is cut; None: it must be whole."""
        first = op.args[0]
        assert isinstance(first, Ref)
        shape, after = self._shape(first.slot), self._shape(slot)
        mine = self._cut[first.slot][1]
        rest = op.args[1:]
        if name in rules.EACH_VALUE and not any(self._values_of(each) for each in rest):
            return cut, self._writer.add(self._only_first(op, mine))
        if name == "dropout":
            return cut, self._dropout(op, mine, cut, shape)
        if name == "batch_norm" and cut.dim == 1:
            return self._batch_norm(op, first.slot, cut)
        if name == "scaled_dot_product_attention":
            return self._attention(op, cut)
        if name in ("matmul", "bmm"):
            return self._heads_product(op, cut, len(shape))
        found = self._moved(op, name, cut, shape, after)
        if found is None:
            return None
        changed = self._only_first(op, mine)
        if name in rules.RESHAPES or name == "unflatten":
            changed = self._resized(changed, found, after)
        if name == "split" and found.groups != cut.groups and isinstance(rest[0], int):
            changed = Op(changed.target, (mine, rest[0] // self._way.workers, *changed.args[2:]), changed.kwargs)
        return found, self._writer.add(changed)

    def _moved(self, op: Op, name: str, cut: Cut, shape: tuple[int, ...], after: tuple[int, ...]) -> Cut | None:
        """Where the cut dimension is in the result, of what moves values or works on other dimensions."""
        rest, dims = op.args[1:], len(shape)
        one = rest[0] if rest and isinstance(rest[0], int) else None
        listed = (
            [each for each in rest[0].values if isinstance(each, int)] if rest and isinstance(rest[0], Items) else []
        )
        if name in rules.EACH_CHANNEL:
            return cut if cut.dim == 1 else None
        if name in rules.RESHAPES or name in ("flatten", "unflatten"):
            return rules.reshaped(cut, shape, after, self._way.workers)
        if name == "permute":
            return rules.permuted(cut, listed)
        if name == "transpose" and one is not None and isinstance(rest[1], int):
            return rules.transposed(cut, one, rest[1], dims)
        if name in ("select", "squeeze") or (name == "unbind" and one is not None):
            return rules.without(cut, [one], dims) if one is not None else None
        if name == "unbind":
            return rules.without(cut, [0], dims)
        if name == "getitem":
            return cut  # of one of several results, whose cut was found when they were made
        if name == "unsqueeze" and one is not None:
            at = one % (dims + 1)
            return Cut(cut.dim + (at <= cut.dim), cut.groups)
        if name == "slice":
            return cut if (one or 0) % dims != cut.dim else None
        if name in ("chunk", "split") and one is not None:
            along = rest[1] % dims if len(rest) > 1 and isinstance(rest[1], int) else 0
            if along != cut.dim:
                return cut
            pieces = one if name == "chunk" else shape[cut.dim] // one
            even = cut.groups % pieces == 0 and shape[cut.dim] % pieces == 0 and pieces > 1
            return Cut(cut.dim, cut.groups // pieces) if even else None
        if name in rules.OVER_DIMS and (listed or one is not None):
            keep = bool(rest[1]) if len(rest) > 1 else bool(op.kwargs.get("keepdim", False))
            return rules.without(cut, listed or [one or 0], dims, keep)
        if name in rules.ALONG_DIM and one is not None:
            return cut if one % dims != cut.dim else None
        return None

    def _values_of(self, value: Argument) -> list[int]:
        """Tensors among an argument, but for single numbers that nobody learns."""
        tensors = [each for each in slots(value) if isinstance(self._values[each], torch.Tensor)]
        return [each for each in tensors if self._shape(each) or each in self._trained]

    def _broadcast(self, slot: int, op: Op, cut_ones: Sequence[int]) -> tuple[Cut, Argument] | None:
        """Arguments of several shapes, some of them cut, put together value by value."""
        most = len(self._shape(slot))
        found = {rules.aligned(self._cut[each][0], len(self._shape(each)), most) for each in cut_ones}
        if len(found) > 1:
            return None
        (cut,) = found
        size = self._shape(slot)[cut.dim]

        def put(each: int) -> Argument:
            shape = self._shape(each)
            own = Cut(cut.dim - (most - len(shape)), cut.groups)
            if not isinstance(self._values[each], torch.Tensor):
                return self._whole[each]
            return self._wanted_cut(each, own) if own.dim >= 0 and shape[own.dim] == size else self._spread(each)

        return cut, self._writer.add(self._with(op, put))

    # -- products and what goes with them -------------------------------------------------------------------------------

    def _product(self, slot: int, op: Op, name: str) -> None:
        x, weight = (each.slot if isinstance(each, Ref) else -1 for each in op.args[:2])
        bias = op.args[2].slot if len(op.args) > 2 and isinstance(op.args[2], Ref) else -1
        dim = len(self._shape(x)) - 1 if name == "linear" else 1
        decided = self._decided(op, name, (x, weight, bias), dim)
        if decided is None:
            self._whole[slot] = self._writer.add(self._with(op, self._wanted_whole))
            return
        rest = tuple(op.args[3:])
        if decided.dim == 0:
            mine = self._writer.op(op.target, self._spread(x), Ref(weight), Ref(bias) if bias >= 0 else None, *rest)
            self._cut[slot] = Cut(dim, decided.groups), mine
            return
        mine = self._writer.op(op.target, self._wanted_cut(x, Cut(dim, decided.groups)), Ref(weight), None, *rest)
        total: Ref = self._exchange("sum", slot, mine)
        if bias >= 0:
            added: Argument = Ref(bias)
            if name != "linear":
                flat = (len(self._shape(slot)) - 2) * (1,)
                added = self._writer.op("aten.view.default", added, Items((self._shape(bias)[0], *flat)))
            total = self._writer.op("aten.add.Tensor", total, added)
        self._whole[slot] = total

    def _decided(self, op: Op, name: str, where: tuple[int, int, int], dim: int) -> Cut | None:
        """How the weight is cut: 0 by outputs, 1 by inputs; None: not at all."""
        x, weight, bias = where
        if not 0 <= weight < len(self._graph.inputs) or (bias >= len(self._graph.inputs)):
            return None
        own = self._graph.inputs[weight].name
        if self._way.fixed is not None:
            return self.cuts.get(own)
        shape = self._shape(weight)
        if weight not in self._once or (bias >= 0 and bias not in self._once) or math.prod(shape) < self._way.least:
            return None
        if self._graph.inputs[weight].kind != "parameter" or (name != "linear" and not _one_group(op)):
            return None
        workers, groups = self._way.workers, self._way.groups.get(own, 1)
        cut = self._only_cut(x)
        if cut is not None and cut.dim == dim:
            self.cuts[own] = Cut(1, cut.groups)
        elif groups != BY_INPUTS and Cut(0, groups).divides(shape[0], workers):
            self.cuts[own] = Cut(0, groups)
            if bias >= 0:
                self.cuts[self._graph.inputs[bias].name] = Cut(0, groups)
        elif shape[1] % workers == 0:
            self.cuts[own] = Cut(1)
        else:
            what, size = ("channels" if name != "linear" else "values"), math.prod(shape)
            raise UsageError(
                f"{own} takes {shape[1]} {what} and gives {shape[0]}, which {workers} workers cannot share out evenly: use "
                f"{_choices(shape[:2])} nodes, or least={size + 1} to keep it whole on every worker"
            )
        return self.cuts[own]

    def _batch_norm(self, op: Op, first: int, cut: Cut) -> tuple[Cut, Argument] | None:
        """Its weights and statistics, which are one for each channel, are cut with the channels."""
        own = [each.slot for each in op.args[1:5] if isinstance(each, Ref)]
        if any(each >= len(self._graph.inputs) or each not in self._once for each in own):
            return None
        names = [self._graph.inputs[each].name for each in own]
        if self._way.fixed is None:
            self.cuts.update(dict.fromkeys(names, Cut(0, cut.groups)))
        elif any(self.cuts.get(name) != Cut(0, cut.groups) for name in names):
            return None
        mine = self._cut[first][1]
        return cut, self._writer.add(self._with(op, lambda each: mine if each == first else Ref(each)))

    def _attention(self, op: Op, cut: Cut) -> tuple[Cut, Argument] | None:
        three = [each.slot for each in op.args[:3] if isinstance(each, Ref)]
        if len(three) != 3 or cut.dim != 1 or any(self._only_cut(each) != cut for each in three):
            return None
        if draws(op):
            raise UsageError(
                "dropout inside attention draws for all heads at once, which workers that have some of the heads cannot "
                "repeat: set the dropout of the attention weights to 0 (dropout behind it is fine)"
            )
        mask = op.args[3] if len(op.args) > 3 else op.kwargs.get("attn_mask")
        if isinstance(mask, Ref) and (len(self._shape(mask.slot)) == 4 and self._shape(mask.slot)[1] != 1):
            return None
        return cut, self._writer.add(
            self._with(op, lambda each: self._cut[each][1] if each in three else self._spread(each))
        )

    def _refuse_heads(self, query: int) -> None:
        heads, workers = self._shape(query)[1] if len(self._shape(query)) == 4 else 0, self._way.workers
        if heads % workers:
            raise UsageError(
                f"an attention has {heads} heads, which {workers} workers cannot share out evenly: use {_choices([heads])} "
                "nodes"
            )

    def _heads_product(self, op: Op, cut: Cut, dims: int) -> tuple[Cut, Argument] | None:
        both = [each.slot for each in op.args[:2] if isinstance(each, Ref)]
        if len(both) != 2 or cut.dim >= dims - 2 or any(self._only_cut(each) != cut for each in both):
            return None
        if len(self._shape(both[0])) != len(self._shape(both[1])):
            return None
        return cut, self._writer.add(self._with(op, lambda each: self._cut[each][1]))

    def _dropout(self, op: Op, mine: Argument, cut: Cut, shape: tuple[int, ...]) -> Argument:
        """The same numbers as without a cut: a mask for the whole value is drawn."""
        if not draws(op):
            return self._writer.add(self._only_first(op, mine))
        write, workers = self._writer.op, self._way.workers
        whole = write("aten.cat.default", Items((mine,) * workers), cut.dim)
        mask = self._writer.add(self._only_first(op, write("aten.ones_like.default", whole)))
        size = shape[cut.dim] // (cut.groups * workers)
        starts = [(group * workers + self._way.rank) * size for group in range(cut.groups)]
        parts = [write("aten.slice.Tensor", mask, cut.dim, start, start + size) for start in starts]
        part = parts[0] if len(parts) == 1 else write("aten.cat.default", Items(tuple(parts)), cut.dim)
        return write("aten.mul.Tensor", mine, part)

    # -- the operators themselves ---------------------------------------------------------------------------------------

    def _with(self, op: Op, put: Any) -> Op:
        def moved(value: Argument) -> Argument:
            if isinstance(value, Ref):
                return put(value.slot)  # type: ignore[no-any-return]
            if isinstance(value, Items):
                return Items(tuple(moved(each) for each in value.values))
            return value

        return Op(op.target, tuple(map(moved, op.args)), {key: moved(each) for key, each in op.kwargs.items()})

    def _only_first(self, op: Op, mine: Argument) -> Op:
        rest = self._with(Op(op.target, op.args[1:], op.kwargs), self._wanted_whole)
        return Op(op.target, (mine, *rest.args), rest.kwargs)

    def _resized(self, op: Op, cut: Cut, after: tuple[int, ...]) -> Op:
        """The part's own size in a new shape."""
        at = 2 if name_of(op.target) == "unflatten" else 1
        sizes = op.args[at]
        assert isinstance(sizes, Items)
        lead = len(after) - len(sizes.values) if at == 1 else int(op.args[1]) % len(after)  # type: ignore[arg-type]
        mine = after[cut.dim] // self._way.workers
        changed = Items(tuple(mine if place + lead == cut.dim else each for place, each in enumerate(sizes.values)))
        return Op(op.target, (*op.args[:at], changed, *op.args[at + 1 :]), op.kwargs)

    def _without_writing(self, slot: int, op: Op, first: int) -> Op:
        """An operator that changes its argument, as one that does not: nobody looks at the argument afterwards."""
        made_by = name_of(self._graph.ops[first - len(self._graph.inputs)].target)
        if made_by in rules.VIEWS or self._last[first] != slot:
            raise UsageError(
                f"strategy tensor: {op.target} changes a value in place that is used again: write it without inplace=True"
            )
        name = name_of(op.target)
        return Op(op.target.replace(f".{name}.", f".{name[:-1]}."), op.args, op.kwargs)


def _one_group(op: Op) -> bool:
    groups = op.args[6] if len(op.args) > 6 else op.kwargs.get("groups", 1)
    return groups == 1


def _choices(sizes: Sequence[int]) -> str:
    """Numbers of workers among which one of these can be shared out."""
    found = [each for each in range(1, 1 + max(sizes)) if any(size % each == 0 for size in sizes)]
    return ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")


def _taken(op: Op) -> list[int]:
    return [slot for value in (*op.args, *op.kwargs.values()) for slot in slots(value)]


def refuse_what_cannot_be_cut(graph: Graph) -> None:
    if graph.customs:
        raise UsageError(
            f"strategy tensor cannot cut the function {graph.customs[0].name!r}, which has a backward of its own"
        )
    for op in graph.ops:
        if op.target == GRAD_MODE:
            raise UsageError("strategy tensor cannot cut a model that switches gradients off inside its forward")
    for each in graph.inputs:
        if each.kept:
            raise UsageError(f"strategy tensor cuts float32 weights, and {each.name} is kept in {each.kept}")
