"""A whole model's evaluation graph as a module that `torch.export` can follow: for files that are used without ringtmp.

It computes what `PortableModel` computes, without the checks that a graph from another machine needs, which a trace cannot
pass: sizes are symbols there, not numbers. Tensors are shared, not copied.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ringtmp.model.allowed_operators import GRAD_MODE, resolve
from ringtmp.model.portable_layer import CUSTOM, Argument, Graph, Input, Items, Named, Ref
from ringtmp.model.run_graph import torch_constant
from ringtmp.model.to_module import Tensors, descend

BATCH = "batch"
_ON_SIZES: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "floordiv": operator.floordiv, "truediv": operator.truediv, "mod": operator.mod, "neg": operator.neg,
    "sym_min": torch.sym_min, "sym_max": torch.sym_max, "sym_sum": torch.sym_sum, "sym_int": torch.sym_int,
    "sym_float": torch.sym_float, "trunc": math.trunc, GRAD_MODE: lambda enabled: enabled,
}  # fmt: skip


class WholeModule(nn.Module):
    """Called with its inputs by place or all by name; returns a tensor, a tuple, or a dict of tensors."""

    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[str, torch.Tensor],
        inputs: Sequence[str],
        outputs: Mapping[str, int],
        *,
        zeros: tuple[int, tuple[int, ...], torch.dtype] | None = None,
    ) -> None:
        """`tensors`: by their names in the graph. `inputs`: their names, in order. `outputs`: name and place of those wanted.
        `zeros`: the place, the shape of a sample and the type of an input that is not given, and is zeros."""
        super().__init__()
        self._graph, self._wanted, self._zeros = graph, dict(outputs), zeros
        self.names = [plain_name(each) or "input" for each in inputs]
        for each in graph.inputs:
            if each.kind != "input":
                *path, last = each.name.split(".")
                owner, tensor = descend(self, path, Tensors), tensors[each.name]
                if isinstance(tensor, nn.Parameter):
                    owner.register_parameter(last, tensor)
                else:
                    owner.register_buffer(last, tensor, persistent=each.kind == "buffer")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = list(args) if args else [kwargs[name] for name in self.names]
        if self._graph.changes_inputs:  # of its own copy, not of the caller's
            given = [each.clone() for each in given]
        if self._zeros is not None:
            place, rest, dtype = self._zeros
            given.insert(place, torch.zeros((given[0].shape[0], *rest), dtype=dtype))
        found = _run(self._graph, given, self._owned)
        wanted = {name: found[place] for name, place in self._wanted.items()}
        if list(wanted) == [""]:
            return wanted[""]
        if not _has_words(wanted):
            return tuple(wanted.values())
        return {plain_name(name, "output"): each for name, each in wanted.items()}

    def _owned(self, each: Input) -> torch.Tensor:
        path, _, last = each.name.rpartition(".")
        tensor: torch.Tensor = getattr(self.get_submodule(path), last)
        return tensor


def exported(module: WholeModule, example: Mapping[str, torch.Tensor], per_sample: Sequence[bool]) -> Any:
    """The program that `torch.export` makes of it, with any number of samples."""
    batch = torch.export.Dim(BATCH)
    shapes = {name: {0: batch} if each else None for name, each in zip(module.names, per_sample, strict=True)}
    args: tuple[Any, ...] = () if _has_words(example) else tuple(example.values())
    kwargs = dict(zip(module.names, example.values(), strict=True)) if _has_words(example) else {}
    with torch.no_grad():
        return torch.export.export(_with_signature(module), args, kwargs, dynamic_shapes=shapes, strict=False)


def _with_signature(module: WholeModule) -> WholeModule:
    """`torch.export` asks what the arguments are called, and takes no keywords that a signature does not name."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD

    def forward(*args: Any, **kwargs: Any) -> Any:
        return WholeModule.forward(module, *args, **kwargs)

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in module.names]
    )
    module.forward = forward  # type: ignore[method-assign]
    return module


def call(module: Callable[..., Any], inputs: Mapping[str, torch.Tensor]) -> Any:
    """As it was exported: by place where inputs have no names of their own, else by name."""
    if not _has_words(inputs):
        return module(*inputs.values())
    return module(**{plain_name(name): each for name, each in inputs.items()})


def plain_name(name: str, kind: str = "input") -> str:
    """Such as other formats take: 'extra.mask' is extra_mask, '0' is input_0."""
    return f"{kind}_{name.replace('.', '_')}" if name[:1].isdecimal() else name.replace(".", "_")


def _has_words(names: Iterable[str]) -> bool:
    return not all(name.isdecimal() or not name for name in names)


def _run(graph: Graph, inputs: Sequence[Any], owned: Callable[[Input], torch.Tensor]) -> list[Any]:
    arriving = iter(inputs)
    values: list[Any] = [next(arriving) if each.kind == "input" else owned(each) for each in graph.inputs]
    for op in graph.ops:
        args = [_value(each, values) for each in op.args]
        kwargs = {name: _value(each, values) for name, each in op.kwargs.items()}
        if op.target == CUSTOM:
            custom = graph.customs[args[0]]
            values.append(tuple(_run(custom.forward, args[1:], owned)[: len(custom.differentiable)]))
        else:
            values.append((_ON_SIZES.get(op.target) or resolve(op.target))(*args, **kwargs))
    return [_value(each, values) for each in graph.outputs]


def _value(value: Argument, values: Sequence[Any]) -> Any:
    if isinstance(value, Ref):
        return values[value.slot]
    if isinstance(value, Items):
        return [_value(each, values) for each in value.values]
    return torch_constant(value, torch.device("cpu")) if isinstance(value, Named) else value
