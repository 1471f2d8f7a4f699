"""Turn one live `nn.Module` into a portable layer with `torch.export`, batch size left free.

Two graphs are taken, one in training mode and one in evaluation mode, because an exported graph cannot change its
mode. Layers that are alike down to their plain attributes share one export: a stack of equal blocks costs one.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from ringtmp.errors import UsageError
from ringtmp.model.alias import Memory
from ringtmp.model.operators import ASSERTIONS, ATEN_OVERLOADS, SIZE_FUNCTIONS
from ringtmp.model.portable import Graph, Input, Items, Layer, Named, Op, OutputTree, OwnedTensor, Ref, Value
from ringtmp.resources import loading

#: Batch size of the example a layer is exported with: not 0 or 1, which export would freeze, and rarely a layer's
#: own width, so that a frozen batch is noticed.
EXAMPLE_BATCH = 3


class Exporter:
    """Exports layers one at a time and remembers the graphs of those it has seen."""

    def __init__(self) -> None:
        with loading():
            importlib.import_module("torch.export._trace")  # which the first export would load
        self._seen: dict[object, tuple[Graph, Graph, OutputTree, dict[str, torch.Tensor]]] = {}

    def export(self, name: str, module: nn.Module, example: Any) -> tuple[Layer, dict[str, torch.Tensor]]:
        """The layer as data, and its tensors by local name (shared with `module`, not copied)."""
        example = pytree.tree_map(_distinct, example)
        key = _signature(module, example)
        found = self._seen.get(key) if key is not None else None
        if found is None:
            train, constants, tree = _export_graph(name, module.train(), example)
            evaluate, more, other = _export_graph(name, module.eval(), example)
            module.train()
            if other != tree:
                raise UsageError(f"layer {name!r} returns another number of tensors in evaluation than in training")
            found = (train, evaluate, tree, constants | more)
            if key is not None:
                self._seen[key] = found
        train, evaluate, tree, constants = found
        described, tensors = _owned(module, constants)
        return Layer(name, train, evaluate, tuple(described), tree), tensors


def _distinct(leaf: torch.Tensor) -> torch.Tensor:
    """A copy laid out alike. Export takes two inputs that are one tensor for one input, which is true of this example
    alone (a skip connection's two ends) and not of the next batch."""
    if 0 in leaf.stride():
        return leaf.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return torch.empty(extent, dtype=leaf.dtype).as_strided(leaf.shape, leaf.stride()).copy_(leaf)


def _export_graph(name: str, module: nn.Module, example: Any) -> tuple[Graph, dict[str, torch.Tensor], OutputTree]:
    flexible = pytree.tree_map(
        lambda leaf: {0: Dim.AUTO} if leaf.dim() and leaf.shape[0] == EXAMPLE_BATCH else {}, (example,)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = export(module, (example,), dynamic_shapes=flexible, strict=False)
    except Exception as error:  # torch.export raises many kinds; the user needs one sentence
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"layer {name!r} ({type(module).__name__}) cannot be exported: {first.strip()[:300]}. "
            "A layer must be a fixed sequence of tensor operations: no branch on tensor values, no tensor made "
            "into a number, no Python side effects; try to move that part into the loss or the data"
        ) from error
    mode = "training" if module.training else "evaluation"
    return _read_program(f"{name!r} ({type(module).__name__}, {mode})", program, example)


def _read_program(
    label: str, program: ExportedProgram, example: Any
) -> tuple[Graph, dict[str, torch.Tensor], OutputTree]:
    slots: dict[str, int] = {}
    inputs: list[Input] = []
    constants: dict[str, torch.Tensor] = {}
    ops: list[Op] = []
    outputs: tuple[Value, ...] = ()
    leaves = iter(pytree.tree_leaves(example))
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    entering: set[str] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind is InputKind.USER_INPUT:
                leaf = next(leaves)
                if leaf.dim() and leaf.shape[0] == EXAMPLE_BATCH and _is_fixed(node.meta["val"].shape[0]):
                    raise UsageError(
                        f"layer {label} fixes the batch size: it must accept any number of samples in dimension 0"
                    )
                inputs.append(Input("input", str(len(entering))))
                entering.add(node.name)
            else:
                kind = _KINDS.get(spec.kind)
                if kind is None or spec.target is None:
                    raise UsageError(f"layer {label} uses {spec.kind.name.lower()}, which cannot travel")
                if kind == "constant":
                    constants[spec.target] = program.constants[spec.target]
                inputs.append(Input(kind, spec.target))
            slots[node.name] = len(slots)
        elif node.op == "call_function":
            target = _target(node.target)
            if target in ASSERTIONS:
                continue
            if target not in ATEN_OVERLOADS and target not in SIZE_FUNCTIONS:
                raise UsageError(
                    f"layer {label} uses the operator {target}, which is not on RingTMP's list of operators that "
                    "may travel: write that part with ordinary tensor operations"
                )
            args = tuple(_value(label, each, slots) for each in node.args)
            kwargs = {key: _value(label, each, slots) for key, each in node.kwargs.items() if key != "pin_memory"}
            slots[node.name] = len(slots)
            ops.append(Op(target, args, kwargs))
        elif node.op == "output":
            outputs = tuple(_value(label, each, slots) for each in node.args[0])
        else:
            raise UsageError(f"layer {label} contains a {node.op} node, which cannot travel")
    for value in outputs:
        if not isinstance(value, Ref):
            raise UsageError(f"layer {label} returns something that is not a tensor: return tensors or tuples of them")
    graph = Graph(tuple(inputs), tuple(ops), outputs, changes_inputs=False)
    graph = msgspec.structs.replace(graph, changes_inputs=bool(Memory(graph).written_inputs()))
    return graph, constants, _tree(label, program.call_spec.out_spec)


_KINDS: dict[InputKind, Literal["parameter", "buffer", "constant"]] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def _is_fixed(size: Any) -> bool:
    """A symbolic size that export found to be a number is a number."""
    return isinstance(size, int) or size.node.maybe_as_int() is not None


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", "")
    if module in ("_operator", "builtins", "math", "torch") or name.startswith("sym_"):
        return {"min": "sym_min", "max": "sym_max"}.get(name, name)
    return f"{module}.{name}"


def _value(label: str, value: Any, slots: dict[str, int]) -> Value:
    if isinstance(value, torch.fx.Node):
        if value.name not in slots:
            raise UsageError(f"layer {label} depends on a value that cannot travel: {value.name}")
        return Ref(slots[value.name])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return Items(tuple(_value(label, item, slots) for item in value))
    if isinstance(value, torch.dtype):
        return Named("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.layout):
        return Named("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Named("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Named("device", "node")
    raise UsageError(f"layer {label} passes a {type(value).__name__} to an operator, which cannot travel")


def _tree(label: str, spec: Any) -> OutputTree:
    if spec.is_leaf():
        return OutputTree("*")
    if spec.type not in (tuple, list):
        raise UsageError(f"layer {label} returns a {spec.type.__name__}: return a tensor or a tuple of tensors")
    kind: Literal["tuple", "list"] = "tuple" if spec.type is tuple else "list"
    return OutputTree(kind, tuple(_tree(label, child) for child in spec.children()))


def nest(tree: OutputTree, flat: Sequence[Any]) -> Any:
    """Flat tensors as the layer returned them."""
    return _nest(tree, iter(flat))


def _nest(tree: OutputTree, rest: Iterator[Any]) -> Any:
    # Not a function within `nest`: one that calls itself would hold itself, and the tensors, until a garbage collection.
    if tree.kind == "*":
        return next(rest)
    make: Callable[[Any], Any] = tuple if tree.kind == "tuple" else list
    return make(_nest(child, rest) for child in tree.children)


def _owned(module: nn.Module, constants: dict[str, torch.Tensor]) -> tuple[list[OwnedTensor], dict[str, torch.Tensor]]:
    """Everything the layer owns, in `state_dict` order: what is saved first, the rest after."""
    saved = module.state_dict(keep_vars=True)
    parameters = dict(module.named_parameters())
    extra = {name: each for name, each in module.named_buffers() if name not in saved}
    described: list[OwnedTensor] = []
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (*saved.items(), *extra.items(), *constants.items()):
        if name in tensors:
            continue
        kind: Literal["parameter", "buffer", "constant"] = (
            "parameter" if name in parameters else "constant" if name not in saved and name not in extra else "buffer"
        )
        described.append(
            OwnedTensor(
                name,
                kind,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                trainable=kind == "parameter" and tensor.requires_grad,
                saved=name in saved,
            )
        )
        tensors[name] = tensor.detach()
    return described, tensors


def _signature(module: nn.Module, example: Any) -> object | None:
    """Equal for layers whose graphs are surely equal; None when that cannot be known."""
    parts: list[object] = [(tuple(leaf.shape), leaf.dtype, leaf.stride()) for leaf in pytree.tree_leaves(example)]
    parts.append(str(pytree.tree_structure(example)))
    for name, each in module.named_modules():
        if each._forward_hooks or each._forward_pre_hooks or each._backward_hooks:
            return None
        plain: list[object] = []
        for attribute, value in sorted(vars(each).items()):
            if attribute in ("_parameters", "_buffers", "_modules") or attribute.startswith("_flat_weight"):
                continue
            if attribute.endswith("_hooks") or attribute.startswith(("_forward_hooks", "_state_dict", "_load_state")):
                continue
            frozen = _plain(value)
            if frozen is None:
                return None
            plain.append((attribute, frozen))
        owned = [
            (key, None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
            for key, tensor in (*each._parameters.items(), *each._buffers.items())
        ]
        parts.append((name, type(each), tuple(plain), tuple(owned), tuple(sorted(each._non_persistent_buffers_set))))
    return tuple(parts)


def _plain(value: Any) -> object | None:
    """A hashable stand-in for a plain attribute; None when the attribute could hide anything."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return (type(value).__name__, value)
    if isinstance(value, tuple | list | set | frozenset):
        items = [_plain(item) for item in value]
        return None if any(item is None for item in items) else (type(value).__name__, tuple(map(str, items)))
    if isinstance(value, dict):
        pairs = [(_plain(key), _plain(item)) for key, item in value.items()]
        return None if any(None in pair for pair in pairs) else tuple(pairs)
    if callable(value) and getattr(value, "__module__", "").startswith("torch"):
        return ("function", id(value))
    return None
