"""A segment living on a node: it goes forward, backward and steps. Knows nothing of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch.nn.utils import clip_grads_with_norm_

from ringtmp.errors import ProtocolError
from ringtmp.model.defer import Job
from ringtmp.model.execute import Program, dtype_of
from ringtmp.model.portable import Graph, Layer
from ringtmp.plan.route import Visit
from ringtmp.ring.optimizer import Optimizer, make_optimizer
from ringtmp.ring.recipe import learning_rate, random_key
from ringtmp.wire.message import Recipe

StateName = tuple[str, str]
#: Deferred weight gradients are worked off in pieces of about this many multiply-adds (a millisecond or so): large
#: enough to be worth a turn of the loop, small enough that an arriving gradient does not wait long.
PIECE_OF_WORK = 2**24


#: Among a layer's optimizer state: the weights one update ago, at which the next delayed gradient is taken.
PREVIOUS = "previous"


class StagedLayer:
    """A layer with its tensors, ready to run. With delayed gradients every parameter exists on two sides."""

    def __init__(self, layer: Layer, tensors: Sequence[torch.Tensor], train: Program, evaluate: Program) -> None:
        self.layer = layer
        self.train = train
        self.evaluate = evaluate
        owned: dict[str, torch.Tensor] = {}
        for each, tensor in zip(layer.tensors, tensors, strict=True):
            if tuple(tensor.shape) != each.shape or tensor.dtype != dtype_of(each.dtype):
                raise ValueError(f"tensor {each.name} of layer {layer.name} is not as its layer describes it")
            owned[each.name] = tensor.requires_grad_(each.trainable)
        self.trainable = [each.name for each in layer.tensors if each.trainable]
        self.sides = [owned]

    def double(self, newest: int, previous: Mapping[str, torch.Tensor]) -> None:
        """The weights one update ago take the other side (today's, when there was no update yet); buffers are shared."""
        (owned,) = self.sides
        other = dict(owned)
        for name in self.trainable:
            other[name] = previous.get(name, owned[name]).detach().clone().requires_grad_()
        self.sides = [owned, other] if newest == 0 else [other, owned]


class Stage:
    """With staleness 1, step t goes forward and backward with the weights w[t-1] while the update of step t-1 may still
    be on its way to make w[t]: two steps overlap. w[k] lives on side k % 2; the update of step t writes w[t+1] over
    w[t-1], which nobody needs any more. With staleness 0 there is one side.
    """

    def __init__(self, visit: Visit, recipe: Recipe, defer: bool = False, step: int = 0) -> None:
        """With `defer`, `backward` leaves weight gradients that can wait to `weight_gradients`. `step`: updates done."""
        self._sides = 1 + recipe.staleness
        self._newest = step % self._sides
        self.visit = visit
        self._recipe = recipe
        self._defer = defer
        # oldest first: step and weight gradients still to be computed, a queue per microbatch
        self._deferred: deque[tuple[int, deque[Job]]] = deque()
        self._layers: dict[int, StagedLayer] = {}
        self._programs: dict[bytes, Program] = {}
        self._states: dict[int, dict[StateName, torch.Tensor]] = {}
        self._optimizer: Optimizer | None = None
        self._parameters: list[list[torch.Tensor]] = [[] for _ in range(self._sides)]
        self._position: dict[tuple[int, str], int] = {}
        self._copy_inputs = {True: False, False: False}
        # (step, microbatch) -> what entered (leaves that collect gradients), what left, work backward leaves for later
        self._stored: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor], list[Job] | None]] = {}

    def place(
        self,
        index: int,
        layer: Layer,
        tensors: Sequence[torch.Tensor],
        state: dict[StateName, torch.Tensor],
    ) -> None:
        """A layer moves in, with its optimizer state if it has one."""
        staged = StagedLayer(layer, tensors, self._program(layer.train), self._program(layer.evaluate))
        self._layers[index] = staged
        if state:
            self._states[index] = state
        if set(self._layers) == set(self.visit.layers):
            self._complete()

    def _complete(self) -> None:
        """Every layer is here: make the optimizer."""
        self._copy_inputs = {
            True: any(each.train.changes_inputs for each in self._layers.values()),
            False: any(each.evaluate.changes_inputs for each in self._layers.values()),
        }
        if self._sides > 1:
            for index, layer in self._layers.items():
                state = self._states.get(index, {})
                layer.double(self._newest, {name: value for (name, key), value in state.items() if key == PREVIOUS})
        named = [(index, name) for index in self.visit.layers for name in self._layers[index].trainable]
        self._parameters = [
            [self._layers[index].sides[side][name] for index, name in named] for side in range(self._sides)
        ]
        self._position = {each: position for position, each in enumerate(named)}
        if not named:
            return
        self._optimizer = make_optimizer(
            self._recipe.optimizer, self._recipe.optimizer_settings, self._parameters[self._newest]
        )
        for index, state in self._states.items():
            for (parameter, key), value in state.items():
                if key != PREVIOUS:
                    self._optimizer.states[self._position[index, parameter]][key] = value
        self._states.clear()

    @property
    def parameter_count(self) -> int:
        return sum(layer.layer.parameters for layer in self._layers.values())

    @property
    def held(self) -> int:
        """Microbatches whose activations are stored."""
        return len(self._stored)

    @property
    def deferred(self) -> int:
        """Microbatches that have gone backward and whose weight gradients wait."""
        return len(self._deferred)

    def has_deferred(self, step: int) -> bool:
        """Whether any belong to this step or one before."""
        return bool(self._deferred) and self._deferred[0][0] <= step

    def _side(self, step: int) -> int:
        """Where the weights lie with which a training step is computed."""
        return (step + 1) % self._sides

    def forward(
        self, microbatch: int, step: int, inputs: Sequence[torch.Tensor], wants: Sequence[bool], training: bool
    ) -> list[torch.Tensor]:
        """What leaves the segment. In training the graph is kept until `backward` asks for it."""
        generator = torch.default_generator
        later: list[Job] | None = [] if training and self._defer else None
        side = self._side(step) if training else self._newest
        with torch.set_grad_enabled(training):
            leaves = [
                tensor.requires_grad_(wanted) if training else tensor
                for tensor, wanted in zip(inputs, wants, strict=True)
            ]
            values = [leaf.clone() for leaf in leaves] if self._copy_inputs[training] else list(leaves)
            for index in self.visit.layers:
                layer = self._layers[index]
                generator.manual_seed(random_key(self._recipe.seed, step, microbatch, index))
                values = (layer.train if training else layer.evaluate).run(values, layer.sides[side], later)
        if training:
            self._stored[step, microbatch] = (leaves, values, later)
        return values

    def replace_outputs(self, step: int, microbatch: int, outputs: list[torch.Tensor]) -> None:
        """The tail goes backward from its loss instead of from what left the last layer."""
        leaves, _, later = self._stored[step, microbatch]
        self._stored[step, microbatch] = (leaves, outputs, later)

    def backward(
        self, step: int, microbatch: int, gradients: Sequence[torch.Tensor | None] | None
    ) -> list[torch.Tensor | None]:
        """Gradients of what entered, None where nobody needs one. `gradients` None: the output is the loss itself."""
        leaves, outputs, later = self._stored.pop((step, microbatch))
        arriving = [torch.ones_like(output) for output in outputs] if gradients is None else gradients
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        for output, gradient in zip(outputs, arriving, strict=True):
            if output.requires_grad and gradient is not None:
                if gradient.shape != output.shape:
                    raise ProtocolError(
                        f"a gradient of shape {tuple(gradient.shape)} for an output of {tuple(output.shape)}"
                    )
                roots.append(output)
                seeds.append(gradient)
        if roots:
            _run_backward(roots, seeds)
        if later:
            self._deferred.append((step, deque(later)))
        return [leaf.grad if leaf.requires_grad else None for leaf in leaves]

    def weight_gradients(self) -> None:
        """A piece of the oldest deferred work."""
        jobs, done = self._deferred[0][1], 0
        while jobs and done < PIECE_OF_WORK:
            size, work = jobs.popleft()
            work()
            done += size
        if not jobs:
            self._deferred.popleft()

    def gradient_norms(self, step: int) -> torch.Tensor:
        """One norm per parameter that has a gradient, in parameter order: what torch's own clipping begins with."""
        parameters = self._parameters[self._side(step)]
        norms = [torch.linalg.vector_norm(each.grad) for each in parameters if each.grad is not None]
        return torch.stack(norms) if norms else torch.empty(0)

    def step(self, step: int, total_norm: torch.Tensor | None) -> None:
        """The update that ends training step `step`."""
        side = self._side(step)
        if self._optimizer is not None:
            parameters = self._parameters[side]
            if total_norm is not None and self._recipe.clip_norm is not None:
                clip_grads_with_norm_(parameters, self._recipe.clip_norm, total_norm)
            if side != self._newest:
                with torch.no_grad():
                    torch._foreach_copy_(parameters, self._parameters[self._newest])
            rate = learning_rate(self._recipe.schedule, self._recipe.optimizer_settings["lr"], step)
            self._optimizer.step(rate, parameters)
            for parameter in parameters:
                parameter.grad = None
        self._newest = side

    def layer_state(self, index: int) -> tuple[list[torch.Tensor], dict[StateName, torch.Tensor]]:
        """The layer's tensors in its own order, and its optimizer state."""
        layer = self._layers[index]
        state: dict[StateName, torch.Tensor] = {}
        if self._optimizer is not None:
            for name in layer.trainable:
                for key, value in sorted(self._optimizer.states[self._position[index, name]].items()):
                    state[name, key] = value
                if self._sides > 1:
                    state[name, PREVIOUS] = layer.sides[1 - self._newest][name].detach()
        return [layer.sides[self._newest % len(layer.sides)][each.name].detach() for each in layer.layer.tensors], state

    def finite(self, microbatch: int) -> bool:
        """Whether what left the segment in this microbatch is a number everywhere."""
        held = [outputs for (_, number), (_, outputs, _) in self._stored.items() if number == microbatch]
        return all(bool(torch.isfinite(each).all()) for out in held for each in out if each.is_floating_point())

    def _program(self, graph: Graph) -> Program:
        key = msgspec.msgpack.encode(graph)
        if key not in self._programs:
            self._programs[key] = Program(graph)
        return self._programs[key]


def _run_backward(roots: list[torch.Tensor], seeds: list[torch.Tensor]) -> None:
    """What `torch.autograd.backward(roots, seeds)` does once it has compared shapes, for which it imports a computer
    algebra system (0.6 s on every node); we have compared them ourselves."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
