"""The operations of a graph as torch.compile makes them: one function from one random operator to the next.

Each layer is compiled on its own, whatever else its node holds: so its bits depend on no cut. A random operator stays what it
is, because its generator is seeded just before it. A layer stays uncompiled where torch.compile would see something else than
the run does: functions with a backward of their own, frozen weights that are kept small, blocks without gradients, changed
parameters, and operators whose arguments are checked before every call. Where a check asks for shapes and types alone it is
made once for those that come, on tensors without values.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ringtmp.errors import UsageError
from ringtmp.model.allowed_operators import GRAD_MODE, resolve
from ringtmp.model.operator_contracts import CONTRACTS, OF_SHAPES_ALONE, under_contract
from ringtmp.model.parameters_changed_in_forward import written_parameters
from ringtmp.model.portable_layer import Graph, Items, Named, Ref, references, slots
from ringtmp.model.torch_constants import torch_constant

#: What torch.compile makes code with.
BACKEND = "inductor"
#: Sizes of microbatches for which one piece is compiled; torch's own limit is 8.
MOST_SIZES = 64


def refuse_without_compiler() -> None:
    """UsageError where torch would find no compiler for what it writes."""
    if BACKEND != "inductor":
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise UsageError(
            "--compile: torch.compile needs a C++ compiler on every node, and finds none here: install g++ (on Debian: "
            "apt install g++), or leave out --compile"
        ) from None


def compilable(graph: Graph) -> bool:
    if graph.customs or written_parameters(graph) or any(each.kept for each in graph.inputs):
        return False
    if not graph.ops or any(op.target == GRAD_MODE for op in graph.ops):
        return False
    return not any(_is_checked(op.target) and op.target not in OF_SHAPES_ALONE for op in graph.ops)


def _is_checked(target: str) -> bool:
    return target in CONTRACTS


class Piece:
    """Operations of a graph, from one position up to another, as a function of what they read."""

    def __init__(self, graph: Graph, first: int, last: int, device: torch.device) -> None:
        start = len(graph.inputs)
        behind = [*(each for op in graph.ops[last:] for each in references(op)), *_returned(graph)]
        reads = [each for op in graph.ops[first:last] for each in references(op)]
        self._takes = sorted({each for each in reads if each < start + first})
        self._gives = sorted({each for each in behind if start + first <= each < start + last})
        self._done = [each for each in self._takes if each not in set(behind)]
        self.operators = last - first
        traced = torch.fx.Graph()
        nodes: dict[int, Any] = {each: traced.placeholder(f"slot_{each}") for each in self._takes}
        self._checked: Any = None  # the same, each operator behind its contract
        self._fit = set[tuple[Any, ...]]()  # shapes and types that were found to keep it
        contracts = {op.target for op in graph.ops[first:last] if _is_checked(op.target)}
        for position in range(first, last):
            op = graph.ops[position]
            given = {name: _argument(value, nodes, device) for name, value in op.kwargs.items()}
            function = resolve(op.target)
            if device.type != "cpu" and takes_device(function):
                given["device"] = device
            arguments = tuple(_argument(value, nodes, device) for value in op.args)
            nodes[start + position] = traced.call_function(function, arguments, given)
        traced.output(tuple(nodes[each] for each in self._gives))
        config: Any = importlib.import_module("torch._dynamo.config")
        config.recompile_limit = max(config.recompile_limit, MOST_SIZES)
        module = torch.fx.GraphModule(torch.nn.Module(), traced)
        # Its function and not the module, which has a few calls of Python more.
        self._run: Any = torch.compile(module.forward, fullgraph=True, dynamic=False, backend=BACKEND)
        if contracts:
            behind_contract = {resolve(target): under_contract(target, resolve(target)) for target in contracts}
            self._checked = _Checking(module, behind_contract)

    def extend(self, values: list[Any]) -> None:
        """The slots so far, and those of these operations that somebody reads behind them."""
        given = [values[each] for each in self._takes]
        if self._checked is not None:
            self._keep_contracts(given)
        for each in self._done:
            values[each] = None
        made = self._run(*given)
        values += [None] * self.operators
        for slot, value in zip(self._gives, made, strict=True):
            values[slot] = value

    def _keep_contracts(self, given: Sequence[Any]) -> None:
        """ProtocolError, as in a run operator by operator; but before anything is computed."""
        kind = tuple((each.dtype, *each.shape) if isinstance(each, torch.Tensor) else each for each in given)
        key = (*kind, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
        if key not in self._fit:
            fake: Any = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode()
            with torch.no_grad(), fake:
                self._checked.run(
                    *(fake.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in given)
                )
            self._fit.add(key)


class _Checking(torch.fx.Interpreter):
    """Operators one by one, some of them behind their contracts."""

    def __init__(self, module: torch.fx.GraphModule, contracts: Mapping[Any, Any]) -> None:
        super().__init__(module)
        self._contracts = contracts

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._contracts.get(target, target)(*args, **kwargs)


def takes_device(function: Any) -> bool:
    schema = getattr(function, "_schema", None)
    return schema is not None and any(each.name == "device" and each.kwarg_only for each in schema.arguments)


def _returned(graph: Graph) -> list[int]:
    return [slot for value in graph.outputs for slot in slots(value)]


def _argument(value: Any, nodes: dict[int, Any], device: torch.device) -> Any:
    if isinstance(value, Ref):
        return nodes[value.slot]
    if isinstance(value, Items):
        return [_argument(each, nodes, device) for each in value.values]
    return torch_constant(value, device) if isinstance(value, Named) else value
