"""A segment living on a node: it goes forward, backward and steps. Knows nothing of messages."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_

from ringtmp.model.compiled_graph import refuse_without_compiler
from ringtmp.model.deferred_gradients import ROOM, Job, at_once
from ringtmp.model.matrices_for_muon import hidden_matrices
from ringtmp.model.portable_layer import Layer
from ringtmp.model.sufficient_factors import Factors
from ringtmp.plan.route import Visit
from ringtmp.plan.sum_tree import SumTree
from ringtmp.runtime import compute_device
from ringtmp.runtime.checkpoint import LayerTensors, StateName
from ringtmp.runtime.clipping import Norms, norms_of
from ringtmp.runtime.gradient_sums import GradientSums
from ringtmp.runtime.gradients_at_segment_edges import (
    Gradient,
    add_together,
    copied_alike,
    detached,
    enter,
    nothing_saved,
    roots_and_seeds,
    run_backward,
    saved_bytes,
)  # fmt: skip
from ringtmp.runtime.kept_programs import Programs
from ringtmp.runtime.learning_rates import learning_rate
from ringtmp.runtime.optimizers import Optimizer, make_optimizer
from ringtmp.runtime.random_keys import RandomKeys
from ringtmp.runtime.segment_run import Crossings, SegmentRun, segment_run
from ringtmp.runtime.staged_layer import PREVIOUS, StagedLayer
from ringtmp.system.resources import only_repeating_kernels
from ringtmp.wire.messages import Recipe

#: Deferred weight gradients are worked off in pieces of about this many multiply-adds (a millisecond or so): large
#: enough to be worth a turn of the loop, small enough that an arriving gradient does not wait long.
PIECE_OF_WORK = 2**24


@dataclass
class _Held:
    """A microbatch between its forward and its backward."""

    entered: list[torch.Tensor]
    wants: tuple[bool, ...]
    outputs: list[torch.Tensor] | None = None  # None: compute them again
    caught: list[Gradient] = field(default_factory=list)
    later: list[Job] | None = None  # work backward leaves for later
    seeds: list[Gradient] | None = None  # at the tail: where backward begins


class Stage:
    """With staleness 1, step t goes forward and backward with the weights w[t-1] while the update of step t-1 may still
    be on its way to make w[t]: two steps overlap. w[k] lives on side k % 2; the update of step t writes w[t+1] over
    w[t-1], which nobody needs any more. With staleness 0 there is one side.
    """

    def __init__(
        self,
        visit: Visit,
        recipe: Recipe,
        defer: bool = False,
        step: int = 0,
        recompute: Callable[[int], bool] | None = None,
        crossings: Mapping[bool, Crossings] | None = None,
        final: Callable[[int], None] | None = None,
        catch: bool = False,
        programs: Programs | None = None,
        updated: Sequence[torch.Tensor] = (),
    ) -> None:
        """With `defer`, `backward` leaves weight gradients that can wait to `weight_gradients`; with `catch`, what those of
        linear operators are made of to `caught`. `step`: updates done.
        `recompute` is asked once, with the bytes a microbatch leaves stored, whether to keep only what entered.
        `crossings`: what enters and leaves in training and in evaluation; None: as in a list of layers. `final` hears of
        parameters (by position) to whose gradients nothing more will be added in a step, while its last backward goes on or
        after it, and may take them. Of some it may not hear. `programs` that others of this process have, too. `updated`: what
        updates change in the place of the parameters, which somebody else makes of it again and again."""
        self._recompute = recompute
        self._repeating: dict[tuple[bool, ...], bool] = {}  # by what inputs want, after the first: whether to recompute
        self._sides = 1 + recipe.staleness
        self._newest = step % self._sides
        self.visit, self._recipe = visit, recipe
        self._defer, self._catch = defer or catch, catch
        self.caught: list[Factors] = []  # of one microbatch after the other; whoever takes them leaves an empty list
        self._at_once: list[Job] | None = None  # where work goes that is done as soon as it is there
        # oldest first: step, part of the tree of sums and weight gradients still to be computed, a queue per microbatch
        self._deferred: deque[tuple[int, int, deque[Job]]] = deque()
        self._tree = SumTree(recipe.sum_tree)
        self._instead = list(updated)
        self._sums: list[GradientSums] = []  # of every side; none where gradients are added up in plain order
        self._layers: dict[int, StagedLayer] = {}
        #: Whether a forward pass in training changes what belongs to a layer; None: layers are on their way here.
        self.changes: bool | None = None if visit.layers else False
        if recipe.compiled:
            refuse_without_compiler()
        only_repeating_kernels(recipe.deterministic)
        self._programs = Programs() if programs is None else programs
        self._states: dict[int, dict[StateName, torch.Tensor]] = {}
        self._optimizer: Optimizer | None = None
        self.parameters: list[list[torch.Tensor]] = [[] for _ in range(self._sides)]
        self._position: dict[tuple[int, str], int] = {}
        self._final, self._last_backward = final, False  # of this step: what is under way is no less than its last
        self._crossings = crossings or {}
        self._runs: dict[bool, SegmentRun] = {} if visit.layers else self._planned()  # by whether it is training
        self.stored: dict[tuple[int, int], _Held] = {}  # by step and microbatch: gone forward and not backward

    def place(
        self, index: int, layer: Layer, tensors: Sequence[torch.Tensor], state: dict[StateName, torch.Tensor]
    ) -> None:
        """A layer moves in, with its optimizer state if it has one."""
        tensors = compute_device.brought(tensors)
        state = dict(zip(state, compute_device.brought(list(state.values())), strict=True))
        # Compiled operators hand nothing to whoever catches.
        train = self._programs.of(layer.train, self._recipe.compiled and not self._catch, self._catch)
        evaluate = self._programs.of(layer.evaluate, catch=self._catch)
        self._layers[index] = StagedLayer(layer, tensors, train, evaluate)
        if state:
            self._states[index] = state
        if set(self._layers) == set(self.visit.layers):
            self._complete()

    def _complete(self) -> None:
        """Every layer is here: make the optimizer."""
        self._runs = self._planned()
        self.changes = any(each.changed for each in self._layers.values())
        if self._sides > 1:
            for index, layer in self._layers.items():
                state = self._states.get(index, {})
                layer.double(self._newest, {name: value for (name, key), value in state.items() if key == PREVIOUS})
        named = [(index, name) for index in self.visit.layers for name in self._layers[index].trainable]
        self.parameters = [
            [self._layers[index].sides[side][name] for index, name in named] for side in range(self._sides)
        ]
        self._position = {each: position for position, each in enumerate(named)}
        self._at_once = at_once(self.parameters[0])
        if not named:
            return
        if self._final is not None:
            self._watch()
        if self._recipe.sum_tree > 1:
            self._sums = [GradientSums(self._tree, each) for each in self.parameters]
        hidden = {index: hidden_matrices(self._layers[index].layer) for index in self.visit.layers}
        self._optimizer = make_optimizer(
            self._recipe.optimizer, self._recipe.optimizer_settings, self.parameters[self._newest],
            [name in hidden[index] for index, name in named],
        )  # fmt: skip
        for index, state in self._states.items():
            for (parameter, key), value in state.items():
                if key != PREVIOUS:
                    self._optimizer.states[self._position[index, parameter]][key] = value
        self._states.clear()

    def _watch(self) -> None:
        """Where weight gradients wait it is not backward that has the last word. Elsewhere than on a processor autograd goes
        backward in a thread of its own, in which nothing may be sent."""
        if self._defer or compute_device.here().type != "cpu":
            return
        this = weakref.ref(self)  # a parameter holds on to what it calls, and a stage to its parameters

        def accumulated(position: int, parameter: torch.Tensor) -> None:
            stage = this()
            if stage is not None and stage._last_backward and stage._final is not None:
                stage._final(position)

        def done(job: Job) -> None:  # autograd knows nothing of these
            for parameter in job.parameters:
                if id(parameter) in places:  # a bias may be frozen
                    accumulated(places[id(parameter)], parameter)

        places = {id(parameter): position for position, parameter in enumerate(self.parameters[0])}
        self._at_once = at_once(self.parameters[0], done)
        for position, parameter in enumerate(self.parameters[0]):
            watched: Any = parameter
            watched.register_post_accumulate_grad_hook(partial(accumulated, position))

    def _tell_what_is_final(self) -> None:
        """After the last backward: all but what deferred work still adds to."""
        if self._defer and self._last_backward and self._final is not None:
            waiting = {id(each) for _, _, jobs in self._deferred for job in jobs for each in job.parameters}
            for position, parameter in enumerate(self.parameters[0]):
                if id(parameter) not in waiting:
                    self._final(position)

    def _planned(self) -> dict[bool, SegmentRun]:
        layers = [(index, self._layers[index].layer) for index in self.visit.layers]
        return {training: segment_run(layers, training, self._crossings.get(training)) for training in (True, False)}

    def crossings(self, training: bool) -> Crossings:
        return self._runs[training].crossings

    @property
    def lends(self) -> bool:
        """Whether visits behind this one get its parameters, which on this node are the very same memory."""
        return self._runs[True].lends

    @property
    def parameter_bytes(self) -> int:
        return sum(each.nbytes for each in self.parameters[self._newest])

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps after the first step."""
        return 0 if self._optimizer is None else self._optimizer.state_bytes

    @property
    def held(self) -> int:  # microbatches whose activations are stored
        return len(self.stored)

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
        """What leaves the segment. In training what `backward` needs is kept: the graph, or to compute it again, only
        what entered."""
        inputs = compute_device.brought(inputs)
        if not training:
            with torch.no_grad(), compute_device.going_forward(self._recipe.compute):
                values, _ = enter(inputs, [False] * len(inputs), self._runs[False].written)
                for value, wanted in zip(values, wants, strict=True):
                    # A weight that another segment lends: without gradients, too, torch takes another kernel by this flag.
                    value.requires_grad_(wanted and value.is_floating_point())
                return self._run(step, microbatch, values, self._newest, False)
        key = tuple(wants)
        held = self.stored[step, microbatch] = _Held(list(inputs), key)
        if self._repeating.get(key):
            with nothing_saved():
                outputs = self._with_graph(held, step, microbatch, once_more=False)
            return self._let_go(held, outputs)
        if self._recompute is None or key in self._repeating:
            return self._with_graph(held, step, microbatch, once_more=False)
        with saved_bytes([*held.entered, *self.parameters[self._side(step)]]) as saved:
            outputs = self._with_graph(held, step, microbatch, once_more=False)
        may = all(layer.repeatable for layer in self._layers.values())
        self._repeating[key] = may and self._recompute(saved.total)
        return self._let_go(held, outputs) if self._repeating[key] else outputs

    def _let_go(self, held: _Held, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Keep only what entered: the rest will be computed again."""
        held.outputs, held.caught, held.later = None, [], None
        return detached(outputs)

    def _with_graph(self, held: _Held, step: int, microbatch: int, once_more: bool) -> list[torch.Tensor]:
        """Forward under autograd. `once_more`: buffers have changed already and are left alone."""
        values, held.caught = enter(held.entered, held.wants, self._runs[True].written)
        held.later = [] if self._defer else self._at_once
        with torch.enable_grad(), compute_device.going_forward(self._recipe.compute):
            held.outputs = self._run(step, microbatch, values, self._side(step), True, held.later, once_more)
        return held.outputs

    def _run(
        self,
        step: int,
        microbatch: int,
        values: list[torch.Tensor],
        side: int,
        training: bool,
        later: list[Job] | None = None,
        once_more: bool = False,
    ) -> list[torch.Tensor]:
        run = self._runs[training]
        keys = RandomKeys(self._recipe.seed, step, microbatch, self._recipe.randomness)
        there = dict(zip(run.crossings.entering, values, strict=True)) if run.steps else {}
        if run.steps:
            values.clear()
        for each in run.steps:
            layer, index = self._layers[each.index], each.index
            if not once_more:
                layer.renew(training)
            owned = layer.sides[side]
            if once_more and layer.changed:
                owned = {**owned, **{name: copied_alike(owned[name]) for name in layer.changed}}
            reseed = keys.begin_layer(index, layer.layer, training)
            taken = [there[value] for value in each.takes]
            for value in each.done:
                there.pop(value, None)
            given = (layer.train if training else layer.evaluate).run(taken, owned, later, reseed)
            there.update(pair for pair in zip(each.gives, given, strict=True) if pair[0] not in each.done)
        keys.begin_loss()
        return [there[value] for value in run.crossings.leaving] if run.steps else values

    def to_loss(self, step: int, microbatch: int, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """At the tail: what left the last layer, as the loss takes it; like any layer it may change it in place."""
        held = self.stored[step, microbatch]
        if held.outputs is None:
            wants = [each.requires_grad for each in outputs]
            outputs, held.seeds = enter(outputs, wants, range(len(outputs)))
        return outputs

    def end_in(self, step: int, microbatch: int, loss: torch.Tensor) -> None:
        """The tail goes backward from its loss, which was computed of what `to_loss` gave."""
        held = self.stored[step, microbatch]
        if held.outputs is None:
            run_backward([loss], [torch.ones_like(loss)])
        else:
            held.outputs, held.seeds = [loss], [torch.ones_like(loss)]

    def backward(
        self, step: int, microbatch: int, gradients: Sequence[torch.Tensor | None] | None, microbatches: int = 0,
        last: bool = False,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """Gradients of what entered, None where nobody needs one. `gradients` None: the segment ended in the loss.
        `microbatches`: of the whole batch; it matters where gradients are added up as a tree. `last`: none follows in this
        step."""
        held = self.stored.pop((step, microbatch))
        if held.outputs is None:
            self._with_graph(held, step, microbatch, once_more=True)
        assert held.outputs is not None
        arriving = held.seeds if gradients is None else gradients
        assert arriving is not None, "the segment does not end in a loss"
        roots, seeds = roots_and_seeds(held.outputs, arriving)
        # Nothing but the graph holds on to activations now, and the graph lets go of each as it is used.
        held.entered, held.outputs = [], None
        part = self._tree.part_of(microbatch, microbatches) if self._sums else 0
        if self._sums:
            sums = self._sums[self._side(step)]
            sums.turn_to(part)
            if microbatch == self._tree.microbatches(range(part, part + 1), microbatches)[-1]:
                sums.last_of(part)
        self._last_backward = last
        if roots and compute_device.works_behind() and not (self._sums or held.later):
            add_together(self.parameters[self._side(step)], partial(run_backward, roots, seeds))
        elif roots:
            run_backward(roots, seeds)
        if held.later and self._catch:
            self.caught += held.later  # type: ignore[arg-type]  # Catching leaves these
        elif held.later:
            self._deferred.append((step, part, deque(held.later)))
        if held.later:
            held.later.clear()  # the graph holds on to this list, and would hold on to itself through the jobs in it
        self._close_parts(step)
        self._tell_what_is_final()
        return held.caught

    def weight_gradients(self) -> None:
        """A piece of the oldest deferred work."""
        (step, part, jobs), done = self._deferred[0], 0
        if self._sums:
            self._sums[self._side(step)].turn_to(part)
        while jobs and done < PIECE_OF_WORK:
            job = jobs.popleft()
            job.work()
            done += job.size
        if not jobs:
            self._deferred.popleft()
            self._close_parts(step)
        self._tell_what_is_final()

    def _close_parts(self, step: int) -> None:
        if self._sums:
            self._sums[self._side(step)].close({part for other, part, _ in self._deferred if other == step})

    def sums_of(self, step: int) -> GradientSums:
        """With a tree of sums: the gradients of a step, to be taken or given."""
        return self._sums[self._side(step)] if self._sums else GradientSums(self._tree, [])

    def gradient_norms(self, step: int) -> Norms:
        """What torch's own clipping begins with."""
        self._add_up(step)
        return [compute_device.taken_back(each) for each in norms_of(self._updated(self._side(step)))]

    def _add_up(self, step: int) -> None:
        """Every gradient of the step is there."""
        if self._sums:
            self._sums[self._side(step)].total()

    def _updated(self, side: int) -> list[torch.Tensor]:
        return self._instead or self.parameters[side]

    def step(self, step: int, total_norm: torch.Tensor | None) -> None:
        """The update that ends training step `step`."""
        self._add_up(step)
        ROOM.leave()
        side = self._side(step)
        if self._optimizer is not None:
            parameters = self._updated(side)
            if total_norm is not None and self._recipe.clip_norm is not None:
                (norm,) = compute_device.brought([total_norm])
                clip_grads_with_norm_(parameters, self._recipe.clip_norm, norm)
            if side != self._newest:
                with torch.no_grad():
                    torch._foreach_copy_(parameters, self.parameters[self._newest])
            rate = learning_rate(self._recipe.schedule, self._recipe.optimizer_settings["lr"], step)
            self._optimizer.step(rate, parameters)
            for parameter in parameters:
                parameter.grad = None
        self._newest, self._last_backward = side, False

    def layer_state(self, index: int, without: Collection[str] = ()) -> LayerTensors:
        """The layer's tensors in its own order, but for those `without` names, and its optimizer state."""
        layer = self._layers[index]
        state: dict[StateName, torch.Tensor] = {}
        if self._optimizer is not None:
            for name in layer.trainable:
                for key, value in sorted(self._optimizer.states[self._position[index, name]].items()):
                    state[name, key] = compute_device.taken_back(value)
                if self._sides > 1:
                    state[name, PREVIOUS] = compute_device.taken_back(layer.sides[1 - self._newest][name].detach())
        own = layer.sides[self._newest % len(layer.sides)]
        kept = [own[each.name].detach() for each in layer.layer.tensors if each.name not in without]
        return [compute_device.taken_back(each) for each in kept], state

    def frozen(self, index: int) -> dict[str, torch.Tensor]:
        """The layer's parameters that nothing changes."""
        layer = self._layers[index]
        return {name: compute_device.taken_back(layer.sides[0][name]) for name in layer.frozen}

    def frozen_of(self, index: int) -> frozenset[str]:
        return self._layers[index].frozen

    def finite(self, microbatch: int) -> bool:
        """Whether what left the segment in this microbatch is a number everywhere."""
        for (step, number), held in self.stored.items():
            if number == microbatch:
                outputs = held.outputs or self._with_graph(held, step, number, once_more=True)
                if not all(bool(torch.isfinite(each).all()) for each in outputs if each.is_floating_point()):
                    return False
        return True


def layer_of(stage: Stage, index: int) -> Layer:
    return stage._layers[index].layer
