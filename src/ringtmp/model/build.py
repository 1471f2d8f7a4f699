"""From live layers to portable ones: check, export, measure; one layer at a time, nothing kept.

The sample that enters the first layer is carried through the model, so every layer sees real shapes. What eager mode
would refuse (a BatchNorm on one value per channel, inputs of the wrong shape) is refused here, before a node starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringtmp.errors import UsageError, reason_of, some_of
from ringtmp.model import export_as_eager_runs
from ringtmp.model.allowed_operators import resolve
from ringtmp.model.blocks import refuse_unmatched
from ringtmp.model.build_cells import Cell, Cutting, Samples, cells_of, state_of
from ringtmp.model.call_module import Arguments, call_arguments
from ringtmp.model.check_hooks import refuse_averaging, refuse_hooks
from ringtmp.model.check_layer import Check
from ringtmp.model.check_whole_model import check_whole, fits
from ringtmp.model.cut_cells import CutCell
from ringtmp.model.export import AGAIN_BATCH, EXAMPLE_BATCH, Exporter
from ringtmp.model.export_cache import ExportCache, Exported, module_key
from ringtmp.model.frozen_formats import WHOLE, FrozenAs
from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.model.layers import Model, layers_of, opened_model
from ringtmp.model.memory_aliases import Memory
from ringtmp.model.name_in_errors import Subject, layer_called, model_itself
from ringtmp.model.one_export_for_both_modes import same_in_both_modes
from ringtmp.model.output_tree import described, flattened, is_plain, nest
from ringtmp.model.overlapping_memory import named_tensors, refuse_overlapping
from ringtmp.model.parameters_changed_in_forward import written_parameters
from ringtmp.model.portable_layer import CUSTOM, Layer, hides_inputs
from ringtmp.model.prepare_weights import Preparation
from ringtmp.model.random_operators import random_count
from ringtmp.model.recompute import changed_buffers
from ringtmp.model.shrink_frozen_weights import channel_axes, shrink
from ringtmp.model.tensors_sharing_memory import Sample, refuse_own_writes, refuse_shared_writes, refuse_stale, untie

T = TypeVar("T")
#: Told before the long work: of every layer whether it has parameters of its own behind the inputs, and of one module why it
#: has no more layers.
Known = Callable[[Sequence[bool], str], None]
#: A layer is compared with its graphs at so many microbatch sizes at most.
MOST_SIZES = 4
#: Parameters up to this size are copied for a trial run.
COPIED_BYTES = 64 * 2**20
#: `checked` of a model that was compared with eager mode by the path it is exported by, since eager mode looks at values.
TRACED = "traced"


@dataclass(frozen=True)
class BuiltLayer:
    layer: Layer
    tensors: dict[str, torch.Tensor]
    sample_outputs: Any  # of the largest microbatch, in evaluation mode
    takes_one_sample: bool  # in training, as eager mode would
    checked: str = "layers"  # against eager mode; of the last one "model": in a row, too
    cell: Cell | None = None  # of a module that was cut: what enters and leaves it
    state: tuple[
        tuple[str, str], ...
    ] = ()  # of such a module: the names in its state_dict, and the tensors' first names


def build_layers(
    model: Model,
    seed: int,
    sample: Callable[[int], Any],
    microbatch_sizes: Sequence[int],
    known: Known = lambda has_parameters, why: None,
    cutting: Cutting | None = None,
    phase: Callable[[str], None] = lambda text: None,
    folder: Path | None = None,
    preparation: Preparation | None = None,
) -> Iterator[BuiltLayer]:
    """`sample(n)` gives n samples of input. The caller is done with a layer when it asks for the next. `known` is told
    before any work is done on the first layer, if they can be known; of one module, when it has been cut."""
    opened = opened_model(model, seed, folder, preparation)
    frozen_as = WHOLE if preparation is None else preparation.frozen_as
    if (module := opened.whole) is not None:
        yield from _build_cells(
            module, sample, microbatch_sizes, known, cutting=cutting or Cutting(), phase=phase, frozen_as=frozen_as
        )
        return
    if cutting is not None and cutting.blocks:
        raise UsageError(
            f"--blocks {','.join(cutting.blocks)!r} is for a module with a forward of its own; this model is an nn.Sequential "
            "or a list of layers, which is cut between its layers: leave out --blocks"
        )
    exporter = Exporter()
    row = _Row(known)
    smallest, largest = min(microbatch_sizes), max(microbatch_sizes)
    checked = _spread(sorted(set(microbatch_sizes)))
    samples: dict[int, Sample] = {}
    trained = Sample(None)  # as it goes through in training mode, which may share memory in another way
    one_sample = True
    drawn = drawn_evaluating = 0
    for index, (name, module) in enumerate(layers_of(opened, row.know)):
        _refuse_what_cannot_travel(name, module)
        if index == 0:
            samples = {size: Sample(sample(size)) for size in {1, EXAMPLE_BATCH, AGAIN_BATCH, *checked}}
            trained = samples[EXAMPLE_BATCH]
        else:
            _refuse_objects(name, samples[1].value)
        subject = layer_called(name, module)
        refuse_hooks(subject, module)
        refuse_averaging(subject, module)
        _try_eager(subject, module, samples[smallest])
        one_sample = one_sample and _takes(subject, module, samples[1])
        example, again = samples[EXAMPLE_BATCH], samples[AGAIN_BATCH]
        check = partial(_check, subject, module, (example, trained), samples, checked, index > 0)
        layer, tensors = exporter.export(name, module, example.value, again.value, check)
        layer = msgspec.structs.replace(layer, random_before=drawn, random_before_evaluating=drawn_evaluating)
        drawn, drawn_evaluating = drawn + random_count(layer.train), drawn_evaluating + random_count(layer.evaluate)
        _refuse_shared(subject, (example, trained), layer)
        tensors = _apart(layer, tensors)
        trained = trained.through(subject, module.train(), bool(written_parameters(layer.train)))
        kept = bool(written_parameters(layer.evaluate))
        samples = {size: each.through(subject, module.eval(), kept) for size, each in samples.items()}
        module.train()
        whole = row.add(layer, tensors, sample(smallest))
        layer, tensors = shrink(layer, tensors, frozen_as, channel_axes(module))
        yield BuiltLayer(layer, tensors, samples[largest].value, one_sample, "model" if whole else "layers")
        del module, tensors, check


def _build_cells(
    module: nn.Module,
    sample: Callable[[int], Any],
    microbatch_sizes: Sequence[int],
    known: Known,
    *,
    cutting: Cutting,
    phase: Callable[[str], None],
    frozen_as: FrozenAs,
) -> Iterator[BuiltLayer]:
    """The module is a layer like any other until its graphs are cut."""
    subject = model_itself(module)
    smallest, largest = min(microbatch_sizes), max(microbatch_sizes)
    sizes = _spread(sorted(set(microbatch_sizes)))
    _refuse_what_cannot_travel("", module)
    refuse_overlapping(named_tensors(module))
    refuse_unmatched(module, cutting.blocks)
    samples = {size: Sample(call_arguments(module, sample(size))) for size in {1, EXAMPLE_BATCH, AGAIN_BATCH, *sizes}}
    refuse_hooks(subject, module)
    refuse_averaging(subject, module)
    _try_eager(subject, module, samples[smallest])
    one_sample = _takes(subject, module, samples[1])
    layer, cells, tensors, checked = _exported_whole(module, samples, sizes, known, cutting=cutting, phase=phase)
    row, state = Samples(samples[largest].leaves, largest, cells), state_of(module)
    # Of the whole module: a weight that several cells read is kept alike in all of them.
    axes = {name: axis for name, axis in channel_axes(module).items() if name in frozen_names(layer)}
    for index, cell in enumerate(cells):
        own = {each.name: tensors[each.full] for each in cell.layer.tensors}
        found = row.through(index, own)
        outputs = nest(layer.output, found.leaving, own=True) if index == len(cells) - 1 else found.leaving
        small, own = shrink(cell.layer, own, frozen_as, axes)
        yield BuiltLayer(small, own, outputs, one_sample, checked, found, state)


#: A module as one layer, what is known of the slots of its graphs, and its tensors.
_Graphs = tuple[Layer, tuple[Any, Any], dict[str, torch.Tensor]]


class _Whole(NamedTuple):
    layer: Layer
    cells: list[CutCell]
    tensors: dict[str, torch.Tensor]
    checked: str


def _exported_whole(
    module: nn.Module,
    samples: Mapping[int, Sample],
    sizes: Sequence[int],
    known: Known,
    *,
    cutting: Cutting,
    phase: Callable[[str], None],
) -> _Whole:
    """The module as one layer that trains as eager mode does, and cut; by whichever path it takes."""
    subject, example = model_itself(module), samples[EXAMPLE_BATCH]
    refusals: list[tuple[bool, UsageError]] = []  # and whether it is of a kept export
    cache = ExportCache()

    def attempted(
        work: Callable[[], T], path: Callable[[], AbstractContextManager[None]], key: str, kept: bool
    ) -> T | None:
        """None if the module is refused by this path."""
        try:
            with path():
                return work()
        except UsageError as refused:
            cache.forget(key)
            refusals.append((kept, refused))
            return None
        finally:
            module.train()

    for number, path in enumerate(export_as_eager_runs.paths()):
        key = module_key(module, example.value, number)
        for kept in (cache.get(key, module), None):
            if kept is None:
                phase("exporting the model")
            cut = attempted(partial(_cut, module, example, kept, cutting), path, key, kept is not None)
            if cut is None:
                continue
            (layer, facts, tensors), cells, why = cut
            if kept is None:
                cache.put(key, layer, facts, tensors)
            known(hides_inputs([cell.layer for cell in cells]), why)
            phase("comparing the model with eager mode")
            # Not exported a second time as layers are: another number of samples is compared, as those of the run are.
            # What does not fit is not: if that is all of the run's, evaluation is compared alone.
            stored = sum(each.sample_bytes for each in facts[0][len(layer.train.inputs) :])
            trained = [size for size in (AGAIN_BATCH, *sizes) if fits([module], size * stored)]
            fitting = not set(trained).isdisjoint(sizes)
            check = partial(_check, subject, module, (example, example), samples, trained if fitting else [], False)
            if attempted(partial(_agrees, check, layer, tensors), path, key, kept is not None):
                checked = TRACED if number else "model" if fitting else "evaluation"
                return _Whole(layer, cells, _apart(layer, tensors), checked)
    raise min(refusals, key=lambda each: each[0])[1]


def _cut(
    module: nn.Module, example: Sample, kept: tuple[Exported, dict[str, torch.Tensor]] | None, cutting: Cutting
) -> tuple[_Graphs, list[CutCell], str]:
    graphs = _graphs(module, example, kept)
    return graphs, *cells_of(module, *graphs[:2], cutting)


def _agrees(
    check: Callable[[Layer, dict[str, torch.Tensor]], None], layer: Layer, tensors: dict[str, torch.Tensor]
) -> bool:
    check(layer, tensors)
    return True


def _graphs(module: nn.Module, example: Sample, kept: tuple[Exported, dict[str, torch.Tensor]] | None) -> _Graphs:
    """With what is known of every value, in training and in evaluation."""
    if kept is not None:
        return kept[0].layer, (kept[0].train, kept[0].evaluate), kept[1]
    exporter = Exporter(whole=True)
    both = not same_in_both_modes(module, example.value, _may_write(module))
    layer, tensors = exporter.export(type(module).__name__, module, example.value, both=both)
    return layer, exporter.facts, tensors


def _refuse_objects(name: str, entering: Any) -> None:
    tree, _ = flattened(entering)
    if not is_plain(tree):
        raise UsageError(
            f"layer {name!r} is given {described(entering)} by the layer before it: between layers only tensors may pass, and "
            "tuples, lists and dicts of them; return such an object from the last layer"
        )


class _Row:
    """A model whose layers are all in memory is checked as a whole, too, when the last one has been exported."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._modules: list[nn.Module] = []
        self._layers: list[tuple[Layer, dict[str, torch.Tensor]]] = []

    def know(self, modules: list[nn.Module]) -> None:
        self._known([any(is_lazy(each) or each.numel() for each in module.parameters()) for module in modules], "")
        if fits(modules):
            self._modules = modules

    def add(self, layer: Layer, tensors: dict[str, torch.Tensor], sample: Any) -> bool:
        """True when that was the last one and the whole model was checked."""
        if not self._modules:
            return False
        self._layers.append((layer, tensors))
        if len(self._layers) < len(self._modules) or any(written_parameters(each.train) for each, _ in self._layers):
            return False
        check_whole(self._modules, self._layers, sample)
        return True


def _check(
    subject: Subject,
    module: nn.Module,
    entering: tuple[Sample, Sample],
    samples: Mapping[int, Sample],
    sizes: Sequence[int],
    asks: bool,
    layer: Layer,
    tensors: dict[str, torch.Tensor],
) -> None:
    """In numbers, at the sizes of the run; evaluation may also see a single sample."""
    _refuse_sparse_gradients(subject, layer)
    refuse_own_writes(subject, layer)
    _refuse_shared(subject, entering, layer)
    _apart(layer, tensors)
    check = Check(subject, module, layer, tensors, asks)
    for size in sizes:
        check.run(samples[size].value, training=True)
    for size in {1, *sizes[-1:]}:
        check.run(samples[size].value, training=False)
    module.train()


def _apart(layer: Layer, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    trained = {each.name: tensors[each.name] for each in layer.tensors if each.trainable}
    constants = {each.name: tensors[each.name] for each in layer.tensors if each.kind == "constant"}
    refuse_stale(layer.name, trained, constants)
    return untie(layer.name, tensors, changed_buffers(layer.train) | changed_buffers(layer.evaluate))


def _refuse_shared(subject: Subject, entering: tuple[Sample, Sample], layer: Layer) -> None:
    """Samples of evaluation and of training; memory may be shared for one layer and not for the next of its kind."""
    evaluated, trained = entering
    refuse_shared_writes(subject, evaluated, Memory(layer.evaluate).written_inputs())
    refuse_shared_writes(subject, trained, Memory(layer.train).written_inputs())


def _spread(sizes: Sequence[int]) -> list[int]:
    """The smallest, the largest and a few between: a run has one or two, a search for the best number of them many."""
    if len(sizes) <= MOST_SIZES:
        return list(sizes)
    return sorted({sizes[round(step * (len(sizes) - 1) / (MOST_SIZES - 1))] for step in range(MOST_SIZES)})


def _refuse_what_cannot_travel(name: str, module: nn.Module) -> None:
    for path, each in module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            full = ".".join(filter(None, (name, path))) or "the model"
            raise UsageError(
                f"{full} ({type(each).__name__}) has a get_extra_state, and what it returns is no tensor that could travel to "
                "a node or change in training: keep tensors in buffers (register_buffer), and leave the method out of the "
                "model you train"
            )
    for local, tensor in (*module.named_parameters(), *module.named_buffers()):
        full = f"{name}.{local}" if name else local
        if tensor.device.type != "cpu":
            raise UsageError(f"{full} is on {tensor.device}: move the model to the CPU first")
        if is_lazy(tensor):
            raise UsageError(f"{full} is lazy and has no shape yet: run the model once on a sample first")
        if tensor.is_complex():
            raise UsageError(
                f"{full} is complex, which neither links nor optimizers here can take: keep its real and imaginary "
                "parts as two tensors"
            )


def _refuse_sparse_gradients(subject: Subject, layer: Layer) -> None:
    for op in layer.train.ops:
        schema: Any = None if op.target == CUSTOM else getattr(resolve(op.target), "_schema", None)
        for index, each in enumerate(schema.arguments if schema is not None else ()):
            value = op.args[index] if index < len(op.args) else op.kwargs.get(each.name)
            if each.name in ("sparse", "sparse_grad") and value is True:
                raise UsageError(
                    f"{subject} asks {op.target.split('.')[1]} for sparse gradients, which the optimizers here do "
                    f"not take: use {each.name}=False"
                )


def _may_write(module: nn.Module) -> bool:
    """Before its graph is known: whether parameters are copied for a trial, in case the layer changes them itself."""
    size = sum(each.nbytes for each in module.parameters())
    return size <= COPIED_BYTES or any(getattr(each, "max_norm", None) is not None for each in module.modules())


def _try_eager(subject: Subject, module: nn.Module, sample: Sample) -> None:
    try:
        sample.through(subject, module.train(), _may_write(module))
    except UsageError:
        raise
    except Exception as error:  # the layer is the user's: whatever it raises is the answer
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in sample.leaves)
        reason = reason_of(error)
        kinds = {leaf.dtype for leaf in sample.leaves}
        weights = {each.dtype for each in module.parameters()}
        hint = "Check the shape of the data; if it is the number of samples, use fewer --microbatches or another --batch-size"
        if isinstance(sample.value, Arguments) and isinstance(next(iter(sample.value.args), None), tuple | list):
            hint = (
                f"{type(module).__name__}.forward was given all inputs as one tuple: to name its arguments, give a dict"
            )
        floats = {each for each in kinds if each.is_floating_point}
        if ("type" in reason and floats - weights) or ("dtype" in reason and kinds.isdisjoint(weights)):
            hint = f"The data is {_names(kinds)} and the weights are {_names(weights)}: "
            hint += "convert the data, as in inputs.float()" if torch.float32 in weights else "use model.float()"
        if isinstance(error, IndexError) and (beyond := _beyond_a_table(module, sample)):
            hint = beyond
        raise UsageError(f"{subject} refuses a microbatch of shape {shapes}: {reason}. {hint}") from error


def _beyond_a_table(module: nn.Module, sample: Sample) -> str | None:
    """Torch says neither which number it was nor of which table."""
    largest = max((int(each.max()) for each in sample.leaves if each.dtype == torch.int64 and each.numel()), default=0)
    tables = {name: each.num_embeddings for name, each in module.named_modules() if isinstance(each, nn.Embedding)}
    short = [f"{name or 'the embedding'} ({rows})" for name, rows in tables.items() if rows <= largest]
    if not short:
        return None
    return (
        f"The data has the number {largest}, and these tables have fewer rows: {some_of(short)}. Tokens of another "
        "tokeniser? Make the data with the model's own, or the table larger"
    )


def _names(kinds: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(each).removeprefix("torch.") for each in kinds))


def _takes(subject: Subject, module: nn.Module, sample: Sample) -> bool:
    """Whether eager mode would train on it: a BatchNorm refuses a single value per channel, its exported graph does not."""
    try:
        sample.through(subject, module.train(), _may_write(module))
    except Exception:  # the layer is the user's: whatever it raises is a no
        return False
    return True
