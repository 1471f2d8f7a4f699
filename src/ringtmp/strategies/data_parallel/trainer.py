"""A worker of any data-parallel strategy: gets a share of a batch, goes through the layers, hands gradients over.

Layer by layer for all its microbatches: forward as soon as a layer's parameters are there, backward from the last layer
down, and each layer's gradient leaves the moment it is complete, while the layers below are still at work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ringtmp.data.batches import as_in_the_batch
from ringtmp.errors import ProtocolError
from ringtmp.metrics import events
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.model import portable_layer
from ringtmp.model.ensemble import one_tensor
from ringtmp.model.output_tree import nest
from ringtmp.model.portable_layer import Layer, Value
from ringtmp.model.sufficient_factors import Factors
from ringtmp.plan.route import MASTER
from ringtmp.runtime import compute_device
from ringtmp.runtime.checkpoint import StateName
from ringtmp.runtime.gradient_sums import Sums
from ringtmp.runtime.gradients_at_segment_edges import detached
from ringtmp.runtime.losses import LOSSES, LossFunction, Score, is_of_bytes
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.strategies.data_parallel.dealt_shares import samples_before
from ringtmp.strategies.data_parallel.loss import Criterion, not_there
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.samples_already_sent import Rows
from ringtmp.wire.messages import (
    Enlist,
    Enough,
    Fetch,
    LayerState,
    Lend,
    Place,
    Placed,
    Predicted,
    Restore,
    Scored,
    Work,
    WorkDone,
)


class Exchange(Protocol):
    """What a strategy does with gradients and parameters."""

    #: What a worker waits for when `ready` says no.
    cause: str
    #: Nodes of the tree of sums that this worker's parts add up to; none: gradients are added up in plain order.
    nodes: tuple[int, ...] = ()
    #: Whether a worker may go through its samples several times in a step.
    several_passes: bool = False
    #: Whether the master is told what a worker's model predicts, where it asks for a score.
    predicts: bool = False

    def begin(self, fresh: bool) -> None:
        """A training step begins; `fresh`: not directly after another."""
        return

    def dealt(self, microbatches: int, samples: int) -> None:
        """The step that begins has so many microbatches, over all workers."""
        return

    def ready(self, layer: int, step: int, training: bool) -> bool:
        """Whether the layer's parameters are good for this step; if so they are in the replica now."""
        ...

    def again(self, layer: int, step: int) -> bool:
        """Whether the layer's parameters are there for its backward pass too."""
        return True

    def entered(self, layer: int, tensors: Sequence[torch.Tensor], share: float) -> None:
        """In training: what enters the layer of some samples, which are this share of the batch."""
        return

    def used(self, layer: int) -> None:
        """A pass through the layer is over."""
        return

    def overtaken(self, step: int) -> bool:
        """Whether the others have finished this step without us."""
        return False

    def give_up(self, step: int) -> None:
        """The step is over without this worker's gradients."""
        return

    def loss(self, value: float) -> None:
        """The mean loss of this worker's share of the batch, before its first gradient."""
        return

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        """A layer's whole gradient of this worker's share of the batch."""
        ...

    def factors(self, layer: int, step: int, share: float, factors: Sequence[Factors]) -> None:
        """Instead of `gradient`, for a layer that the replica has as `factored`: of each microbatch."""
        raise ProtocolError("gradients come as factors, which this strategy does not exchange")

    def sums(self, layer: int, step: int, share: float, sums: list[Sums | None]) -> None:
        """Instead of `gradient`, where there is a tree of sums: a layer's gradients, for every one of `nodes`."""
        raise ProtocolError("there is a tree of sums, which this strategy does not add up along")

    def another_pass(self, step: int) -> bool:
        """After the last gradient of a pass: whether to go through the same samples again, for other gradients."""
        return False

    def collected(self, layer: int, step: int, whole: bool) -> bool:
        """Before a layer goes to the master, or only what is not trained of it: whether the replica has it as of this step."""
        return not whole or self.ready(layer, step, training=False)

    def rest(self) -> None:
        """The run is about to be evaluated or saved: what was held back goes out now."""
        return

    def oldest(self) -> int | None:
        """Every update before this step is in the parameters of the step just done; None: nobody runs ahead."""
        return None


@dataclass
class _Task:
    """A share of a batch on its way through the layers."""

    work: Work
    microbatches: tuple[int, ...]
    values: list[dict[Value, torch.Tensor]]  # what layers have made so far and others need, per microbatch
    targets: list[torch.Tensor]
    position: int = 0  # layers gone forward, then layers gone backward
    loss: float = 0.0  # mean over this worker's samples, in the first pass
    outputs: list[list[torch.Tensor]] = field(default_factory=list)  # of the last layer, per microbatch
    gradients: list[dict[Value, torch.Tensor]] = field(default_factory=list)
    entered: list[dict[Value, torch.Tensor]] = field(default_factory=list)  # for another pass
    passes: int = 0  # that are over

    def once_more(self) -> None:
        self.values = [dict(each) for each in self.entered]
        self.position, self.outputs, self.gradients = 0, [], []
        self.passes += 1


class Trainer:
    def __init__(
        self, endpoint: Endpoint, plan: Enlist, recorder: Recorder, exchange: Exchange, replica: Replica
    ) -> None:
        self.endpoint = endpoint
        self.replica = replica
        self.recorder = recorder
        self.step = plan.step
        self.emit: Callable[[events.Event], None]
        self._plan = plan
        self._exchange = exchange
        self._loss: LossFunction = LOSSES.get(plan.loss, not_there)
        self._rows = Rows()
        self._work: deque[_Task] = deque()
        self._task: _Task | None = None
        self._given_up = plan.step  # work of steps before this one is not begun
        self._fetches: list[Fetch] = []
        self._inherited = endpoint.snapshots.claim()

    # -- what comes in ------------------------------------------------------------------------------------------------

    def handle(self, mail: Mail) -> bool:
        message = mail.message
        if isinstance(message, Work):
            self._work.append(self._unpack(message, mail.tensors))
        elif isinstance(message, Place):
            layer = portable_layer.decode(message.graph)
            own = len(layer.tensors)
            if message.layer == len(self._plan.sizes):
                self._loss = Criterion(layer, mail.tensors)
                return True
            state = [each for each in mail.tensors[own:] if each is not None]
            self._move_in(message.layer, layer, mail.tensors[:own], dict(zip(message.state, state, strict=True)))
        elif isinstance(message, Restore):
            kept = self._inherited.get((message.step, message.layer))
            if kept is None:
                raise ProtocolError(f"node {self.endpoint.node} has no layer {message.layer} of step {message.step}")
            self._move_in(message.layer, portable_layer.decode(message.graph), *kept)
        elif isinstance(message, Lend):
            self.replica.lend(message.layer, mail.tensors)
        elif isinstance(message, Fetch):
            self._fetches.append(message)
        elif isinstance(message, Enough):
            self._given_up = message.step
        else:
            return False
        return True

    def _move_in(
        self, index: int, layer: Layer, tensors: Sequence[torch.Tensor | None], state: dict[StateName, torch.Tensor]
    ) -> None:
        self.replica.place(index, layer, tensors, state)
        self._inherited = {key: kept for key, kept in self._inherited.items() if key[1] != index}
        self.endpoint.post(MASTER, Placed(index))

    def leave(self, step: int) -> None:
        """For the next generation: the layers as they were before `step`, and what the last one left and nobody took."""
        mine = {(step, layer): self.replica.before(step, layer) for layer in range(len(self.replica.stages))}
        self.endpoint.snapshots.hand_over({**self._inherited, **mine})

    def _unpack(self, work: Work, tensors: list[torch.Tensor | None]) -> _Task:
        if not work.sizes:
            return _Task(work, (), [], [])
        inputs, targets = self._rows.take(work.table, tensors)
        pieces = [torch.split(each, list(work.sizes)) for each in inputs]
        numbers = tuple(range(work.first, work.first + len(work.sizes)))
        starts = [samples_before(number, work) for number in numbers]
        values = [
            {(0, place): as_in_the_batch(column[position], start) for place, column in enumerate(pieces)}
            for position, start in enumerate(starts)
        ]
        return _Task(work, numbers, values, list(torch.split(targets, list(work.sizes))))

    # -- what is done -------------------------------------------------------------------------------------------------

    def act(self) -> bool:
        """One layer forward or backward. False: nothing to do, or parameters are not there yet."""
        if self._fetches:
            self._fetches = [each for each in self._fetches if not self._fetched(each)]
        if self._task is None and not self._begin():
            return False
        task = self._task
        assert task is not None
        layers = len(self.replica.stages)
        if task.position >= layers:
            if not self._exchange.again(2 * layers - 1 - task.position, task.work.step):
                self.recorder.waiting_for(self._exchange.cause)
                return False
            self._backward(task)
            return True
        lent = not task.work.training and self.replica.lent(task.position)
        if not lent and not self._exchange.ready(task.position, task.work.step, task.work.training):
            self.recorder.waiting_for(self._exchange.cause)
            return False
        self._forward(task)
        return True

    def _fetched(self, fetch: Fetch) -> bool:
        self._exchange.rest()
        if not self._exchange.collected(fetch.layer, fetch.step, fetch.whole):
            return False
        if not fetch.whole:
            self.endpoint.post(MASTER, LayerState(fetch.layer, ()), self.replica.buffers(fetch.layer))
            return True
        tensors, state = self.replica.layer_state(fetch.layer)
        self.endpoint.post(MASTER, LayerState(fetch.layer, tuple(state)), [*tensors, *state.values()])
        return True

    def _begin(self) -> bool:
        while self._work:
            task = self._work.popleft()
            given_up = task.work.step < self._given_up
            if task.work.training and (given_up or self._exchange.overtaken(task.work.step)):
                if given_up:
                    self._exchange.give_up(task.work.step)
                share = sum(task.work.sizes) / task.work.samples
                self.endpoint.post(MASTER, WorkDone(task.work.step, 0.0, share, skipped=True))
                self.step = task.work.step + 1
                continue
            self._task = task
            if task.work.training:
                if self._exchange.several_passes:
                    task.entered = [dict(each) for each in task.values]
                self.replica.take_back()
                self._exchange.dealt(task.work.microbatches, task.work.samples)
                self._exchange.begin(task.work.fresh)
                if task.work.fresh:
                    self.recorder.fresh()
            return True
        self.recorder.waiting_for("work")
        return False

    def _forward(self, task: _Task) -> None:
        layer, work = task.position, task.work
        stage = self.replica.stages[layer]
        started = self.recorder.begin() if work.training else 0.0
        crossings, needed = stage.crossings(work.training), self.replica.needed_after(layer, work.training)
        last = layer == len(self.replica.stages) - 1
        for position, number in enumerate(task.microbatches):
            values = task.values[position]
            entering = [values[each] for each in crossings.entering]
            if work.training:
                self._exchange.entered(layer, entering, work.sizes[position] / work.samples)
            wants = [each.requires_grad for each in entering]
            outputs = stage.forward(number, work.step, entering, wants, work.training)
            if last:
                task.outputs.append(outputs)
            values.update(zip(crossings.leaving, detached(outputs), strict=True))
            task.values[position] = {value: each for value, each in values.items() if value in needed}
        task.position += 1
        self._exchange.used(layer)
        if task.position == len(self.replica.stages):
            if work.training:
                self._losses(task)
            else:
                self._score(task)
        if work.training:
            self.recorder.end(started, "forward", layer, -1)

    def _losses(self, task: _Task) -> None:
        last, mine = self.replica.stages[-1], sum(task.work.sizes)
        task.gradients = [{} for _ in task.microbatches]
        with torch.enable_grad():
            for position, number in enumerate(task.microbatches):
                task.outputs[position] = last.to_loss(task.work.step, number, task.outputs[position])
                with compute_device.going_forward(self._plan.recipe.compute):
                    loss = self._loss(self._nested(task, position), task.targets[position])
                samples = len(task.targets[position])
                if not task.passes:
                    task.loss += float(loss.detach()) * samples / mine
                last.end_in(task.work.step, number, loss * (samples / task.work.samples))
        task.values, task.outputs = [], []
        if mine and not task.passes:
            self._exchange.loss(task.loss)

    def _score(self, task: _Task) -> None:
        if self._exchange.predicts:
            with torch.no_grad():
                predicted = [one_tensor(self._nested(task, position)) for position in range(len(task.microbatches))]
            self.endpoint.post(MASTER, Predicted(), [torch.cat(predicted)])
            self._task = None
            return
        score = Score(bytes_model=is_of_bytes(self._plan.loss))
        with torch.no_grad(), compute_device.going_forward(self._plan.recipe.compute):
            for position in range(len(task.microbatches)):
                outputs, targets = self._nested(task, position), task.targets[position]
                score.add(float(self._loss(outputs, targets)), outputs, targets)
        self.endpoint.post(
            MASTER,
            Scored(score.loss_sum, score.samples, score.right, score.guesses, score.token_loss_sum, score.tokens),
        )
        self._task = None

    def _nested(self, task: _Task, position: int) -> object:
        return nest(self.replica.layers[-1].output, task.outputs[position])

    def _backward(self, task: _Task) -> None:
        layers = len(self.replica.stages)
        layer, work = 2 * layers - 1 - task.position, task.work
        stage, share = self.replica.stages[layer], sum(work.sizes) / work.samples
        started = self.recorder.begin()
        nodes = self._exchange.nodes
        factored = layer in self.replica.factored
        gradient = None if nodes or factored else self.replica.collect_gradients(layer)
        crossings = stage.crossings(True)
        for position, number in enumerate(task.microbatches):
            found = task.gradients[position]
            arriving = None if layer == layers - 1 else [found.pop(each, None) for each in crossings.leaving]
            caught = stage.backward(work.step, number, arriving, work.microbatches)
            found.update(
                (value, each) for value, each in zip(crossings.entering, caught, strict=True) if each is not None
            )
        task.position += 1
        sums = stage.sums_of(work.step).take(nodes)
        self.replica.let_go_of_gradients(layer)
        self._exchange.used(layer)
        self.recorder.end(started, "backward", layer, -1)
        if factored:
            factors, stage.caught = stage.caught, []
            self._exchange.factors(layer, work.step, share, factors)
        elif gradient is None:
            self._exchange.sums(layer, work.step, share, sums)
        else:
            self._exchange.gradient(layer, work.step, share, gradient)
        if task.position == 2 * layers:
            if self._exchange.another_pass(work.step):
                task.once_more()
                return
            self._task = None
            self._close(work.step)
            self.endpoint.post(MASTER, WorkDone(work.step, task.loss, share))

    def _close(self, step: int) -> None:
        for _, posted, acknowledged, size in self.endpoint.sent:
            self.recorder.sent(posted, acknowledged, size)
        self.endpoint.sent.clear()
        self.emit(self.recorder.close_step(step, self._plan.step, self._exchange.oldest()))
        self.step = step + 1
