"""Turn one live `nn.Module` into a portable layer with `torch.export`, batch size left free.

Two graphs are taken, one in training mode and one in evaluation mode, because an exported graph cannot change its
mode. Layers that are alike down to their plain attributes share one export: a stack of equal blocks costs one.
"""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from ringtmp.errors import UsageError
from ringtmp.model import user_lines
from ringtmp.model.allowed_operators import ASSERTIONS, GRAD_MODE
from ringtmp.model.call import unpacked, without_cache
from ringtmp.model.check_hooks import lines, refuse_narrow
from ringtmp.model.check_operator import refuse_operator
from ringtmp.model.custom_backward import traced_along
from ringtmp.model.flatten_graph import Flat, Mode, Region, Step
from ringtmp.model.graph_anatomy import Fact
from ringtmp.model.memory_aliases import Memory
from ringtmp.model.output_tree import flattened
from ringtmp.model.portable_layer import (
    CUSTOM,
    Argument,
    Custom,
    Graph,
    Input,
    Items,
    Layer,
    Named,
    Op,
    OutputTree,
    OwnedTensor,
    Ref,
)
from ringtmp.system.resources import loading, out_of_files

#: Batch size of the example a layer is exported with: not 0 or 1, which export would freeze, and rarely a layer's
#: own width, so that a frozen batch is noticed.
EXAMPLE_BATCH = 3
#: And of the one it is exported with again.
AGAIN_BATCH = 4


class Exporter:
    """Exports layers one at a time and remembers the graphs of those it has seen."""

    def __init__(self) -> None:
        with loading():
            importlib.import_module("torch.export._trace")  # which the first export would load
        self._seen: dict[object, _Found] = {}
        #: Of the slots of the graphs exported last, in training and in evaluation.
        self.facts: tuple[tuple[Fact, ...], tuple[Fact, ...]] = ((), ())

    def export(
        self,
        name: str,
        module: nn.Module,
        example: Any,
        again: Any = None,
        check: Callable[[Layer, dict[str, torch.Tensor]], None] | None = None,
    ) -> tuple[Layer, dict[str, torch.Tensor]]:
        """The layer as data, and its tensors by local name (shared with `module`, not copied). With `again`, an example of
        another size, it is exported twice, and both must agree. `check` is called for a layer unlike those before."""
        example = pytree.tree_map(_distinct, example)
        key = _signature(module, example)
        found = self._seen.get(key) if key is not None else None
        new = found is None
        if found is None:
            found = _export_graphs(name, module, example, EXAMPLE_BATCH)
            if again is not None:
                again = pytree.tree_map(_distinct, again)
                _refuse_other_graphs(name, module, found, again)
        train, evaluate, tree, constants, _, self.facts = found
        described, tensors = _owned(module, constants)
        layer = Layer(name, train, evaluate, tuple(described), tree)
        if new and check is not None:
            check(layer, tensors)
        if key is not None:
            self._seen[key] = found
        return layer, tensors


#: The graphs of training and evaluation, what they return, constants, where the user's code branches on a size, and what
#: is known of the graphs' slots.
_Found = tuple[Graph, Graph, OutputTree, dict[str, torch.Tensor], list[str], tuple[tuple[Fact, ...], tuple[Fact, ...]]]


def _export_graphs(name: str, module: nn.Module, example: Any, batch: int, both: bool = True) -> _Found:
    """Unless `both`, the graph of evaluation is taken to be that of training, as it was before."""
    branches: list[str] = []
    train, constants, tree, facts = _export_graph(name, module.train(), example, batch, branches)
    if not both:
        return train, train, tree, constants, branches, (facts, facts)
    evaluate, more, other, others = _export_graph(name, module.eval(), example, batch, branches)
    module.train()
    if other != tree:
        raise UsageError(
            f"layer {name!r} returns something else in evaluation mode than in training mode, or another number of tensors"
        )
    return train, evaluate, tree, constants | more, branches, (facts, others)


def _refuse_other_graphs(name: str, module: nn.Module, first: _Found, again: Any) -> None:
    """A layer is the same sequence of operations whenever it is asked, with however many samples."""
    second = _export_graphs(name, module, again, AGAIN_BATCH, both=first[0] != first[1])
    alike = first[3].keys() == second[3].keys() and all(first[3][key].equal(second[3][key]) for key in first[3])
    if first[:3] == second[:3] and alike:
        return
    third = _export_graphs(name, module, again, AGAIN_BATCH, both=first[0] != first[1])
    stays = second[:3] == third[:3]
    counted = (
        f"depends on the number of samples{lines(first[4])}" if stays else "changes from one forward pass to the next"
    )
    raise UsageError(
        f"layer {name!r} ({type(module).__name__}) {counted}{_first_difference(first, second)}: a layer must be a fixed "
        "sequence of tensor operations; a Python counter can be a buffer (register_buffer), Python's random torch.rand"
    )


def _first_difference(first: _Found, second: _Found) -> str:
    for one, other in zip(first[:2], second[:2], strict=True):
        for left, right in zip(one.ops, other.ops, strict=False):
            if left != right:
                return f" (at {left.target})"
    return ""


def _distinct(leaf: torch.Tensor) -> torch.Tensor:
    """A copy laid out alike. Export takes two inputs that are one tensor for one input, which is true of this example
    alone (a skip connection's two ends) and not of the next batch."""
    if 0 in leaf.stride():
        return leaf.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return torch.empty(extent, dtype=leaf.dtype).as_strided(leaf.shape, leaf.stride()).copy_(leaf)


def _export_graph(
    name: str, module: nn.Module, example: Any, batch: int, branches: list[str]
) -> tuple[Graph, dict[str, torch.Tensor], OutputTree, tuple[Fact, ...]]:
    args, kwargs = unpacked(example)
    bound = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    flexible = pytree.tree_map(lambda leaf: {0: Dim.AUTO} if leaf.dim() and len(leaf) == batch else {}, bound)
    label = f"{name!r} ({type(module).__name__})"
    trees: list[OutputTree] = []
    try:
        with warnings.catch_warnings(), traced_along(label, module) as asked, _flat_outputs(label, module, trees):
            warnings.simplefilter("ignore")
            with user_lines.instead_of_torch():
                program = export(module, args, kwargs, dynamic_shapes=flexible, strict=False)
        branches += asked
    except UsageError:
        raise
    except Exception as error:  # torch.export raises many kinds; the user needs one sentence
        if (shortage := out_of_files(error)) is not None:
            raise UsageError(shortage) from error  # which no layer is to blame for
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"layer {name!r} ({type(module).__name__}) cannot be exported: {_reason(first)}{user_lines.of_error(error)}. "
            "A layer must be a fixed sequence of tensor operations: no branch on tensor values, no tensor made "
            "into a number, no Python side effects; try to move that part into the loss or the data"
        ) from error
    mode = "training" if module.training else "evaluation"
    label = f"{name!r} ({type(module).__name__}, {mode})"
    graph, constants, facts = _read_program(
        label, program, example, batch, branches=branches, names=first_names(module)
    )  # fmt: skip
    return graph, constants, trees[-1], facts


@contextmanager
def _flat_outputs(label: str, module: nn.Module, trees: list[OutputTree]) -> Iterator[None]:
    """While it is exported, the module returns a tuple of tensors, whatever the user's class is, and its tree comes here."""

    def flatten(_module: nn.Module, _inputs: Any, outputs: Any) -> tuple[torch.Tensor, ...]:
        tree, tensors = flattened(outputs, f"layer {label}")
        trees.append(tree)
        return tuple(tensors)

    handle = module.register_forward_hook(flatten)
    try:
        with without_cache(module):
            yield
    finally:
        handle.remove()


def _reason(first: str) -> str:
    if "fake tensor in the exported program constant" in first:
        return "a tensor is used past autograd, most likely by .data: write .detach() instead"
    if "data-dependent" in first:
        return "it branches on the values of a tensor, or makes one into a number"
    return first.strip().rstrip(".")[:300]


def first_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer, and the first of those that the same tensor has."""
    first: dict[int, str] = {}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    order = {name: at for at, name in enumerate(module.state_dict(keep_vars=True))}
    ordered = sorted(every, key=lambda item: order.get(item[0], len(order)))
    return {name: first.setdefault(id(tensor), name) for name, tensor in ordered}


def _read_program(
    label: str, program: ExportedProgram, example: Any, batch: int, *, branches: Sequence[str], names: Mapping[str, str]
) -> tuple[Graph, dict[str, torch.Tensor], tuple[Fact, ...]]:
    flat = Flat(program.graph_module)
    inputs: list[Input] = []
    constants: dict[str, torch.Tensor] = {}
    leaves = iter(pytree.tree_leaves(example))
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    entering: set[Node] = set()
    for node in flat.placeholders:
        spec = specs[node.name]
        if spec.kind is InputKind.USER_INPUT:
            leaf = next(leaves)
            if leaf.dim() and len(leaf) == batch and _is_fixed(node.meta["val"].shape[0]):
                raise UsageError(
                    f"layer {label} fixes the batch size: it must accept any number of samples in dimension 0 (and ask for it "
                    "with x.shape[0], not len(x))"
                )
            if leaf.dim() and len(leaf) == batch:
                refuse_narrow(label, node.meta["val"].shape[0], program.range_constraints, branches)
            inputs.append(Input("input", str(len(entering))))
            entering.add(node)
        else:
            kind = _KINDS.get(spec.kind)
            if kind is None or spec.target is None:
                raise UsageError(f"layer {label} uses {spec.kind.name.lower()}, which cannot travel")
            if kind == "constant":
                constants[spec.target] = program.constants[spec.target]
            inputs.append(Input(kind, names.get(spec.target, spec.target)))
    writer = _GraphWriter(label, flat, inputs, flat.placeholders)
    for step in flat.steps:
        writer.add(step)
    graph = writer.graph(flat.outputs, entering)
    for value in graph.outputs:
        if not isinstance(value, Ref):
            raise UsageError(f"layer {label} returns something that is not a tensor: return tensors or tuples of them")
    return graph, constants, tuple(writer.facts)


def _fact(node: Node) -> Fact:
    value = node.meta.get("val")
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    if isinstance(value, torch.Tensor):
        shape = tuple(int(each) if _is_fixed(each) else str(each) for each in value.shape)
        sizes: list[Any] = list(value.shape)
        numbers = [int(each) if _is_fixed(each) else each.node.hint / EXAMPLE_BATCH for each in sizes]
        size = math.prod(numbers) * value.dtype.itemsize
        return Fact(shape, str(value.dtype).removeprefix("torch."), path=path, sample_bytes=float(size))
    return Fact(None, many=isinstance(value, tuple | list), path=path)


class _GraphWriter:
    """Writes one graph, step after step. `places` are the nodes whose values fill the input slots."""

    def __init__(self, label: str, flat: Flat, inputs: Sequence[Input], places: Sequence[Node]) -> None:
        self._label = label
        self._flat = flat
        self._inputs = tuple(inputs)
        self._slots = {node: slot for slot, node in enumerate(places)}
        self._ops: list[Op] = []
        self.facts = [_fact(node) for node in places]
        self._customs: list[Custom] = []
        self._modes: list[int] = []  # where the gradient mode before each open block is kept

    def graph(self, outputs: Sequence[Any], entering: set[Node]) -> Graph:
        values = tuple(self._value(each) for each in outputs)
        graph = Graph(self._inputs, tuple(self._ops), values, False, tuple(self._customs))
        return msgspec.structs.replace(graph, changes_inputs=bool(Memory(graph).written_inputs()))

    def add(self, step: Step) -> None:
        if isinstance(step, Mode):
            if step.enabled is not None:
                self._modes.append(self._op(GRAD_MODE, (step.enabled,)))
            else:
                self._op(GRAD_MODE, (Ref(self._modes.pop()),))
        elif isinstance(step, Region):
            self._custom(step)
        elif step in self._slots:
            return  # a result of a custom function
        elif step.op == "call_function":
            self._call(step)
        else:
            raise UsageError(f"layer {self._label} contains a {step.op} node, which cannot travel")

    def _op(
        self,
        target: str,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument] | None = None,
        node: Node | None = None,
    ) -> int:
        self._ops.append(Op(target, args, kwargs or {}))
        self.facts.append(Fact(None, many=target == CUSTOM) if node is None else _fact(node))
        return len(self._inputs) + len(self._ops) - 1

    def _value(self, value: Any) -> Argument:
        return _value(self._label, value, self._flat, self._slots)

    def _call(self, node: Node) -> None:
        function, filled = _without_out(node)
        target = _FILLED.get(_target(function), _target(function))
        if target in ASSERTIONS:
            return
        refuse_operator(self._label, target, node)
        args = tuple(self._value(each) for each in node.args)
        kwargs = {key: self._value(each) for key, each in node.kwargs.items() if key not in ("pin_memory", filled)}
        self._slots[node] = self._op(target, args, kwargs, node)
        if filled is not None:
            written = self._value(node.kwargs[filled]), Ref(self._slots[node])
            self._slots[node] = self._op("aten.copy_.default", written, None, node)

    def _custom(self, region: Region) -> None:
        outside = [*region.entering, *region.captured]
        forward = self._part(region.forward, [*region.entered, *region.captured], [*region.results, *region.saved])
        backward = self._part(region.backward, [*region.saved, *region.gradients], region.returned)
        if forward.changes_inputs:
            raise UsageError(
                f"layer {self._label}: {region.name} changes a tensor it was given in place: work on a clone instead"
            )
        self._customs.append(Custom(region.name, forward, backward, region.differentiable))
        made = self._op(CUSTOM, (len(self._customs) - 1, *(self._value(each) for each in outside)))
        for place, node in enumerate(region.given):
            if node is not None or region.hook:
                slot = self._op("getitem", (Ref(made), place), None, node or region.entering[0])
                # whoever reads a parameter with a hook from here on reads what the function gives
                self._slots.update({each: slot for each in (node, region.entering[0] if region.hook else None) if each})

    def _part(self, steps: Sequence[Node], places: Sequence[Node], outputs: Sequence[Any]) -> Graph:
        """A graph within this one, for a custom function."""
        inputs = [Input("input", str(number)) for number in range(len(places))]
        writer = _GraphWriter(self._label, self._flat, inputs, places)
        for step in steps:
            writer.add(step)
        return writer.graph(outputs, set(places))


_KINDS: dict[InputKind, Literal["parameter", "buffer", "constant"]] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def _is_fixed(size: Any) -> bool:
    """A symbolic size that export found to be a number is a number."""
    return isinstance(size, int) or size.node.maybe_as_int() is not None


#: Memory as it was found is not data, and may be somebody's: whoever asks for it gets zeros, to be overwritten.
_FILLED = {"aten.empty_like.default": "aten.zeros_like.default", "aten.empty.memory_format": "aten.zeros.default"}


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", "")
    if module in ("_operator", "builtins", "math", "torch") or name.startswith("sym_"):
        return {"min": "sym_min", "max": "sym_max"}.get(name, name)
    return f"{module}.{name}"


def _without_out(node: Node) -> tuple[Any, str | None]:
    """The operator, or for one that writes its result into `out` the same without, and the name of that argument."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not any(each.is_out for each in target._schema.arguments):
        return target, None
    (filled,) = [each.name for each in target._schema.arguments if each.is_out][:1]
    wanted = [(each.name, str(each.type)) for each in target._schema.arguments if not each.is_out]
    packet: Any = target._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if [(each.name, str(each.type)) for each in other._schema.arguments] == wanted:
            return other, filled
    return target, None


def _value(label: str, value: Any, flat: Flat, slots: dict[Node, int]) -> Argument:
    if isinstance(value, Node):
        source = flat.source(value)
        if source not in slots:
            raise UsageError(f"layer {label} depends on a value that cannot travel: {value.name}")
        return Ref(slots[source])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return Items(tuple(_value(label, item, flat, slots) for item in value))
    if isinstance(value, torch.dtype):
        return Named("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.layout):
        return Named("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return Named("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Named("device", "node")
    raise UsageError(f"layer {label} passes a {type(value).__name__} to an operator, which cannot travel")


def _owned(module: nn.Module, constants: dict[str, torch.Tensor]) -> tuple[list[OwnedTensor], dict[str, torch.Tensor]]:
    """Everything the layer owns, in `state_dict` order: what is saved first, the rest after."""
    saved = module.state_dict(keep_vars=True)
    parameters = dict(module.named_parameters())
    names = first_names(module)
    saved = {name: tensor for name, tensor in saved.items() if names.get(name, name) == name}
    parameters = {names[name]: each for name, each in parameters.items()}
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
        if any(tensor is not None and tensor._backward_hooks for tensor in each._parameters.values()):
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
