"""Turn one live `nn.Module` into a portable layer with `torch.export`, batch size left free.

Two graphs are taken, one in training mode and one in evaluation mode, because an exported graph cannot change its
mode. Layers that are alike down to their plain attributes share one export: a stack of equal blocks costs one.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from ringtmp.errors import UsageError
from ringtmp.model import find_source_line
from ringtmp.model.analyse_graph import Fact
from ringtmp.model.call_module import unpacked, without_cache
from ringtmp.model.check_hooks import lines, refuse_narrow
from ringtmp.model.compute_formats import as_written
from ringtmp.model.custom_backward import traced_along
from ringtmp.model.flatten_graph import Flat
from ringtmp.model.name_in_errors import Subject, layer_called, model_itself
from ringtmp.model.output_tree import flattened
from ringtmp.model.portable_layer import (
    Graph,
    Input,
    Layer,
    OutputTree,
    OwnedTensor,
    Ref,
)
from ringtmp.model.recurrent_shapes import not_unrolled
from ringtmp.model.write_graph import EXAMPLE_BATCH as EXAMPLE_BATCH
from ringtmp.model.write_graph import GraphWriter, is_fixed
from ringtmp.system.resources import loading, out_of_files

#: Of a layer: no tensor has two names.
NO_NAMES: Mapping[str, str] = {}
#: Batch size of the example a layer is exported with again.
AGAIN_BATCH = 4


class Exporter:
    """Exports layers one at a time and remembers the graphs of those it has seen."""

    def __init__(self, whole: bool = False) -> None:
        """`whole`: a model, in which one tensor may have several names."""
        self._whole = whole
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
        *,
        both: bool = True,
    ) -> tuple[Layer, dict[str, torch.Tensor]]:
        """The layer as data, and its tensors by local name (shared with `module`, not copied). With `again`, an example of
        another size, it is exported twice, and both must agree. `check` is called for a layer unlike those before. Unless
        `both`, the graph of training is that of evaluation, too."""
        example = pytree.tree_map(_distinct, example)
        key = _signature(module, example)
        found = self._seen.get(key) if key is not None else None
        new = found is None
        if found is None:
            example = pytree.tree_map(_as_written, example)
            names = first_names(module) if self._whole else {}
            subject = model_itself(module) if self._whole else layer_called(name, module)
            found = _export_graphs(subject, module, example, EXAMPLE_BATCH, both=both, names=names)
            if again is not None:
                again = pytree.tree_map(_as_written, pytree.tree_map(_distinct, again))
                _refuse_other_graphs(subject, module, found, again)
        train, evaluate, tree, constants, _, self.facts = found
        described, tensors = _owned(module, constants, first_names(module) if self._whole else {})
        layer = Layer(name, train, evaluate, tuple(described), tree)
        if new and check is not None:
            check(layer, tensors)
        if key is not None:
            self._seen[key] = found
        return layer, tensors

    def evaluation(self, name: str, module: nn.Module, example: Any) -> tuple[Layer, dict[str, torch.Tensor]]:
        """A module that is never trained: its graph of evaluation stands for both."""
        example = pytree.tree_map(_distinct, example)
        names = first_names(module)
        graph, constants, tree, facts = _export_graph(
            model_itself(module), module.eval(), example, EXAMPLE_BATCH, branches=[], names=names
        )
        self.facts = facts, facts
        described, tensors = _owned(module, constants, names)
        return Layer(name, graph, graph, tuple(described), tree), tensors


#: The graphs of training and evaluation, what they return, constants, where the user's code branches on a size, and what
#: is known of the graphs' slots.
_Found = tuple[Graph, Graph, OutputTree, dict[str, torch.Tensor], list[str], tuple[tuple[Fact, ...], tuple[Fact, ...]]]


def _export_graphs(
    subject: Subject,
    module: nn.Module,
    example: Any,
    batch: int,
    *,
    both: bool = True,
    names: Mapping[str, str] = NO_NAMES,
) -> _Found:
    """Unless `both`, the graph of evaluation is taken to be that of training, as it was before."""
    branches: list[str] = []
    train, constants, tree, facts = _export_graph(
        subject, module.train(), example, batch, branches=branches, names=names
    )
    if not both:
        return train, train, tree, constants, branches, (facts, facts)
    evaluate, more, other, others = _export_graph(
        subject, module.eval(), example, batch, branches=branches, names=names
    )
    module.train()
    if other != tree:
        raise UsageError(
            f"{subject} returns something else in evaluation mode than in training mode, or another number of tensors"
        )
    return train, evaluate, tree, constants | more, branches, (facts, others)


def _refuse_other_graphs(subject: Subject, module: nn.Module, first: _Found, again: Any) -> None:
    """A layer is the same sequence of operations whenever it is asked, with however many samples."""
    second = _export_graphs(subject, module, again, AGAIN_BATCH, both=first[0] != first[1])
    alike = first[3].keys() == second[3].keys() and all(first[3][key].equal(second[3][key]) for key in first[3])
    if first[:3] == second[:3] and alike:
        return
    third = _export_graphs(subject, module, again, AGAIN_BATCH, both=first[0] != first[1])
    stays = second[:3] == third[:3]
    counted = (
        f"depends on the number of samples{lines(first[4])}" if stays else "changes from one forward pass to the next"
    )
    raise UsageError(
        f"{subject} {counted}{_first_difference(first, second)}: a {subject.noun} must be a fixed "
        "sequence of tensor operations; a Python counter can be a buffer (register_buffer), Python's random torch.rand"
    )


def _first_difference(first: _Found, second: _Found) -> str:
    for one, other in zip(first[:2], second[:2], strict=True):
        for left, right in zip(one.ops, other.ops, strict=False):
            if left != right:
                return f" (at {left.target})"
    return ""


def _as_written(leaf: torch.Tensor) -> torch.Tensor:
    """Operators are written down without autocast, so what autocast has rounded on its way here comes as it would without."""
    return leaf.float() if torch.is_autocast_enabled("cpu") and leaf.dtype == torch.get_autocast_dtype("cpu") else leaf


def _distinct(leaf: torch.Tensor) -> torch.Tensor:
    """A copy laid out alike. Export takes two inputs that are one tensor for one input, which is true of this example
    alone (a skip connection's two ends) and not of the next batch."""
    if 0 in leaf.stride():
        return leaf.clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return torch.empty(extent, dtype=leaf.dtype).as_strided(leaf.shape, leaf.stride()).copy_(leaf)


def _export_graph(
    subject: Subject, module: nn.Module, example: Any, batch: int, *, branches: list[str], names: Mapping[str, str]
) -> tuple[Graph, dict[str, torch.Tensor], OutputTree, tuple[Fact, ...]]:
    args, kwargs = unpacked(example)
    with _explicit_arguments(module, args, kwargs):
        return _exported(subject, module, example, batch, branches=branches, names=names)


def _exported(
    subject: Subject, module: nn.Module, example: Any, batch: int, *, branches: list[str], names: Mapping[str, str]
) -> tuple[Graph, dict[str, torch.Tensor], OutputTree, tuple[Fact, ...]]:
    args, kwargs = unpacked(example)
    bound = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    flexible = pytree.tree_map(lambda leaf: {0: Dim.AUTO} if leaf.dim() and len(leaf) == batch else {}, bound)
    label = str(subject)
    trees: list[OutputTree] = []
    try:
        with warnings.catch_warnings(), traced_along(label, module) as asked, _flat_outputs(label, module, trees):
            warnings.simplefilter("ignore")
            with find_source_line.instead_of_torch(), not_unrolled(), as_written():
                program = export(module, args, kwargs, dynamic_shapes=flexible, strict=False)
        branches += asked
    except UsageError:
        raise
    except Exception as error:  # torch.export raises many kinds; the user needs one sentence
        if (shortage := out_of_files(error)) is not None:
            raise UsageError(shortage) from error  # which no layer is to blame for
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"{subject} cannot be exported: {_reason(first)}{find_source_line.of_error(error)}. "
            f"A {subject.noun} must be a fixed sequence of tensor operations: no branch on tensor values, no tensor made "
            "into a number, no Python side effects; try to move that part into the loss or the data"
        ) from error
    label = subject.seen("training" if module.training else "evaluation")
    graph, constants, facts = _read_program(
        label, program, example, batch, branches=branches, names=names
    )  # fmt: skip
    return graph, constants, trees[-1], facts


@contextmanager
def _explicit_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """While it is exported, a `forward(*args, **kwargs)` has the names of what it is given: torch's export cannot say of
    others which of their sizes are free. Wrappers have such a forward, PEFT's for one."""
    signature = inspect.signature(module.forward)
    used = (signature.parameters[each].kind for each in signature.bind(*args, **kwargs).arguments)
    if not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}.intersection(used):
        yield
        return
    original, own = module.forward, vars(module).get("forward")

    def forward(*given: Any, **named: Any) -> Any:
        return original(*given, **named)

    names = [*(f"argument_{place}" for place in range(len(args))), *kwargs]
    usual = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature([inspect.Parameter(each, usual) for each in names])  # type: ignore[attr-defined]
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        if own is None:
            object.__delattr__(module, "forward")
        else:
            object.__setattr__(module, "forward", own)


@contextmanager
def _flat_outputs(label: str, module: nn.Module, trees: list[OutputTree]) -> Iterator[None]:
    """While it is exported, the module returns a tuple of tensors, whatever the user's class is, and its tree comes here."""

    def flatten(_module: nn.Module, _inputs: Any, outputs: Any) -> tuple[torch.Tensor, ...]:
        tree, tensors = flattened(outputs, label)
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
            if leaf.dim() and len(leaf) == batch and is_fixed(node.meta["val"].shape[0]):
                raise UsageError(
                    f"{label} fixes the batch size: it must accept any number of samples in dimension 0 (and ask for it "
                    "with x.shape[0], not len(x))"
                )
            if leaf.dim() and len(leaf) == batch:
                refuse_narrow(label, node.meta["val"].shape[0], program.range_constraints, branches)
            inputs.append(Input("input", str(len(entering))))
            entering.add(node)
        else:
            kind = _KINDS.get(spec.kind)
            if kind is None or spec.target is None:
                raise UsageError(f"{label} uses {spec.kind.name.lower()}, which cannot travel")
            if kind == "constant":
                constants[spec.target] = program.constants[spec.target]
            inputs.append(Input(kind, names.get(spec.target, spec.target)))
    writer = GraphWriter(label, flat, inputs, flat.placeholders)
    for step in flat.steps:
        writer.add(step)
    graph = writer.graph(flat.outputs, entering)
    for value in graph.outputs:
        if not isinstance(value, Ref):
            raise UsageError(f"{label} returns something that is not a tensor: return tensors or tuples of them")
    return graph, constants, tuple(writer.facts)


_KINDS: dict[InputKind, Literal["parameter", "buffer", "constant"]] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def _owned(
    module: nn.Module, constants: dict[str, torch.Tensor], names: Mapping[str, str]
) -> tuple[list[OwnedTensor], dict[str, torch.Tensor]]:
    """Everything the layer owns, in `state_dict` order: what is saved first, the rest after."""
    saved = module.state_dict(keep_vars=True)
    parameters = dict(module.named_parameters())
    saved = {name: tensor for name, tensor in saved.items() if names.get(name, name) == name}
    parameters = {names.get(name, name): each for name, each in parameters.items()}
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
