"""A layer is checked before it is trusted: its graphs must train as the live module does, bit for bit.

Export follows one forward pass. What it does not see (a hook, a Python counter, a branch on the number of samples) would
train another model without a word. So the live module and its graphs are run on the same samples, at the sizes the run will
have, with the same random numbers and the same gradients from behind: outputs, gradients and buffers must have equal bytes.
The module runs twice first: one that differs from itself cannot be compared with anything. Digests are compared, not
tensors, so that one set of gradients is in memory at a time.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ringtmp.errors import UsageError
from ringtmp.model.call_module import called
from ringtmp.model.compute_formats import as_written
from ringtmp.model.name_in_errors import Subject
from ringtmp.model.output_tree import leaves_of
from ringtmp.model.parameters_changed_in_forward import written_parameters
from ringtmp.model.plain_state import plain_state
from ringtmp.model.portable_layer import Layer
from ringtmp.model.run_graph import Program

#: What was computed, by name, as digests.
Found = dict[str, str]
_SEED = 20


class Check:
    """Of one layer: the live module against its graphs. `asks`: the gradient of what enters is needed, too."""

    def __init__(
        self, subject: Subject, module: nn.Module, layer: Layer, tensors: Mapping[str, torch.Tensor], asks: bool
    ) -> None:
        self._label, self._noun = str(subject), subject.noun
        self._module = module
        self._layer = layer
        self._tensors = tensors
        self._asks = asks
        self._written = written_parameters(layer.train) | written_parameters(layer.evaluate)
        for local, may in self._written.items():
            if not may:
                raise UsageError(
                    f"{self._label} changes its parameter {local} in forward, while microbatches on their way still need it as "
                    "it was for their backward: compute with a changed copy instead (weight.clamp(…), or "
                    "torch.nn.utils.parametrize)"
                )

    def run(self, sample: Any, training: bool) -> None:
        """UsageError where the graphs would compute anything else."""
        run_eager = self._eager_training if training else self._eager_evaluation
        run_graph = self._graph_training if training else self._graph_evaluation
        self._module.train(training)
        with torch.random.fork_rng(devices=[]):
            drawn = _python_random()
            first = self._tried(run_eager, sample)
            if _python_random() != drawn:
                _restore(drawn)
                raise UsageError(
                    f"{self._label} draws random numbers from Python or NumPy{self._drawing(sample)}, which would "
                    "differ on every node: use torch's, such as torch.rand"
                )
            counted = plain_state(self._module)
            second = self._tried(run_eager, sample)
            self._refuse_counters(counted)
            self._compare(first, second, sample, "is not deterministic: run twice on the same samples,")
            self._compare(first, self._tried(run_graph, sample), sample, "would not train as it does in eager mode:")

    # -- the live module and its graphs -------------------------------------------------------------------------------

    def _eager_training(self, sample: Any) -> Found:
        parameters = dict(self._module.named_parameters())
        with without_gradients(parameters), buffers_kept(self._module):
            leaves, entering = self._entering(sample)
            torch.default_generator.manual_seed(_SEED)
            outputs = leaves_of(called(self._module, entering))
            return trained(leaves, outputs, parameters, self._buffers())

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Those of the module that the layer has, each by one name."""
        return {each.name: self._module.get_buffer(each.name) for each in self._layer.tensors if each.kind == "buffer"}

    def _graph_training(self, sample: Any) -> Found:
        owned, parameters = {}, {}
        for each in self._layer.tensors:
            tensor = self._tensors[each.name].detach()
            owned[each.name] = tensor.requires_grad_(each.trainable) if each.kind == "parameter" else tensor.clone()
            if each.kind == "parameter":
                parameters[each.name] = owned[each.name]
        leaves, entering = self._entering(sample)
        torch.default_generator.manual_seed(_SEED)
        outputs = Program(self._layer.train).run(pytree.tree_leaves(entering), owned)
        buffers = {each.name: owned[each.name] for each in self._layer.tensors if each.kind == "buffer"}
        return trained(leaves, outputs, parameters, buffers)

    def _eager_evaluation(self, sample: Any) -> Found:
        with torch.no_grad(), buffers_kept(self._module), _as_graphs_compute():
            torch.default_generator.manual_seed(_SEED)
            outputs = leaves_of(called(self._module, _copied(sample)))
            return _digests("output", outputs) | _digests_of("buffer", self._buffers())

    def _graph_evaluation(self, sample: Any) -> Found:
        owned = {}
        for each in self._layer.tensors:
            # Torch takes another kernel by this flag, also without gradients: a node sets it as the module has it.
            tensor = self._tensors[each.name].detach().requires_grad_(each.kind == "parameter" and each.trainable)
            owned[each.name] = tensor.clone() if each.kind == "buffer" else tensor
        with torch.no_grad():
            torch.default_generator.manual_seed(_SEED)
            outputs = Program(self._layer.evaluate).run(pytree.tree_leaves(_copied(sample)), owned)
        buffers = {each.name: owned[each.name] for each in self._layer.tensors if each.kind == "buffer"}
        return _digests("output", outputs) | _digests_of("buffer", buffers)

    def _entering(self, sample: Any) -> tuple[list[torch.Tensor], Any]:
        """Leaves whose gradient is compared, and what enters: as behind another layer, where in-place changes are allowed."""
        leaves: list[torch.Tensor] = []

        def enter(leaf: torch.Tensor) -> torch.Tensor:
            if not (self._asks and leaf.is_floating_point()):
                return leaf.clone()
            leaves.append(leaf.detach().clone().requires_grad_())
            return leaves[-1].clone()

        return leaves, pytree.tree_map(enter, sample)

    # -- what may be wrong --------------------------------------------------------------------------------------------

    def _tried(self, run: Callable[[Any], Found], sample: Any) -> Found:
        try:
            with self._parameters_kept():
                return run(sample)
        except Exception as error:  # the layer is the user's: whatever it raises is the answer
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UsageError(
                f"{self._label} cannot be trained on {_samples(sample)}: {reason.strip()[:300]}"
            ) from error

    def _compare(self, expected: Found, found: Found, sample: Any, problem: str) -> None:
        wrong = [what for what in expected if found.get(what) != expected[what]]
        if wrong or len(found) != len(expected):
            what = ", ".join(wrong[:3]) or "the number of results"
            raise UsageError(
                f"{self._label} {problem} with {_samples(sample)}, {what} comes out different. A {self._noun} must be a fixed "
                "sequence of tensor operations that depends only on its inputs, its tensors and torch's random numbers"
            )

    def _refuse_counters(self, before: dict[str, object]) -> None:
        for name, value in plain_state(self._module).items():
            if before.get(name) != value:
                raise UsageError(
                    f"{self._label} changes {name} with every forward pass, and a graph of tensor operations would not: "
                    "make it a buffer (register_buffer) and change that in place"
                )

    @contextmanager
    def _parameters_kept(self) -> Iterator[None]:
        """A layer that changes its own parameters in forward does so for this check alone."""
        kept = {name: self._tensors[name].clone() for name in self._written}
        try:
            yield
        finally:
            for name, value in kept.items():
                self._tensors[name].copy_(value)

    def _drawing(self, sample: Any) -> str:
        """Where the module draws from Python's generators."""
        found: list[str] = []
        last = kept = _python_random()
        before: dict[Any, int] = {}

        def watch(frame: Any, event: str, argument: Any) -> Any:
            nonlocal last
            if frame.f_code.co_filename.startswith((str(Path(torch.__file__).parent), random.__file__)):
                return None
            if _python_random() != last:
                last = _python_random()
                found.append(f" ({Path(frame.f_code.co_filename).name}:{before.get(frame, frame.f_lineno)})")
            before[frame] = frame.f_lineno
            return watch

        sys.settrace(watch)
        try:
            self._eager_evaluation(sample)
        finally:
            sys.settrace(None)
            _restore(kept)
        return found[0] if found else ""


@contextmanager
def _as_graphs_compute() -> Iterator[None]:
    """Attention modules have a fused kernel of their own for inference, which no exported graph has (docs/exactness.md)."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Buffers as they were, also one that is replaced instead of changed."""
    kept = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in kept:
            owner._buffers[name] = buffer.copy_(value)


@contextmanager
def without_gradients(parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The user's own gradients, if there are any, are put aside."""
    kept = {name: each.grad for name, each in parameters.items()}
    for each in parameters.values():
        each.grad = None
    try:
        yield
    finally:
        for name, each in parameters.items():
            each.grad = kept[name]


def trained(
    leaves: list[torch.Tensor],
    outputs: list[Any],
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> Found:
    """Digests of everything that follows from a forward pass, which goes backward here."""
    found = _digests("output", outputs)
    roots = [each for each in outputs if each.requires_grad]
    generator = torch.Generator().manual_seed(_SEED)
    seeds = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in roots]
    if roots:
        with as_written():
            torch.autograd.backward(roots, seeds)
    found |= _digests("the gradient of input", [each.grad for each in leaves])
    found |= _digests_of("the gradient of", {name: each.grad for name, each in parameters.items()})
    return found | _digests_of("buffer", buffers)


def _digests(what: str, tensors: list[Any]) -> Found:
    return _digests_of(what, {str(number): each for number, each in enumerate(tensors)})


def _digests_of(what: str, tensors: Mapping[str, Any]) -> Found:
    return {f"{what} {name}": _digest(each) for name, each in tensors.items()}


def _digest(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    raw: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(raw, digest_size=16).hexdigest()}"


def _copied(sample: Any) -> Any:
    return pytree.tree_map(torch.clone, sample)


def _samples(sample: Any) -> str:
    return "inputs of shape " + ", ".join(str(tuple(leaf.shape)) for leaf in pytree.tree_leaves(sample))


def _python_random() -> tuple[Any, ...]:
    return random.getstate(), *_numpy_state()


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = numpy.random.get_state()
    return kind, tuple(keys), *rest


def _restore(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1:])
