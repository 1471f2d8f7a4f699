"""Worker k: has its part of every cut weight, takes every batch whole, and meets the others wherever parts come together.

for t in 0, 1, 2, ...          on every worker
  x, y <- batch t
  for every piece of the model:   z_k <- operators of worker k;  z <- all-reduce, or gather, where the next takes it whole
  loss <- of whole outputs, the same on every worker
  the same backward;  w_k <- w_k - rate(t) g_k        with its own part of every gradient
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.nn.utils import clip_grads_with_norm_

from ringtmp.data.batches import as_in_the_batch
from ringtmp.errors import ProtocolError
from ringtmp.metrics import events, power_of_this_device
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.model import portable_layer
from ringtmp.model.output_tree import nest
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.route import MASTER
from ringtmp.runtime.checkpoint import StateName
from ringtmp.runtime.learning_rates import learning_rate
from ringtmp.runtime.losses import LOSSES, LossFunction, Score, is_of_bytes
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.optimizers import Optimizer, make_optimizer
from ringtmp.runtime.random_keys import LOSS, seed_generator
from ringtmp.runtime.worker import farewell, reading_of, report
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel.loss import Criterion, not_there
from ringtmp.strategies.data_parallel.message_checks import is_a
from ringtmp.strategies.data_parallel.samples_already_sent import Rows
from ringtmp.strategies.tensor import program_run
from ringtmp.strategies.tensor.collectives import Collectives, StepSender
from ringtmp.strategies.tensor.program_run import Compiled, Pass, Together
from ringtmp.strategies.tensor.told import Told, local_layer, programs
from ringtmp.wire.messages import (
    Enlist,
    Fetch,
    GradientPart,
    LayerState,
    Place,
    Placed,
    Scored,
    Work,
    WorkDone,
)


class TensorMember:
    def __init__(self, endpoint: Endpoint, plan: Enlist, told: Told, roles: Roles) -> None:
        self.endpoint = endpoint
        self.step = plan.step
        self.emit: Callable[[events.Event], None] = lambda event: report(endpoint, event)
        power = power_of_this_device.power(plan.recipe.threads)
        self._recorder = Recorder(
            endpoint.node, endpoint.clock, plan.detailed_steps, power_of_this_device.meter(), power,
            reading=reading_of(endpoint), asked=lambda: endpoint.detailed_step,
        )  # fmt: skip
        self._plan, self._told, self._workers = plan, told, roles.workers
        self._rank = roles.workers.index(endpoint.node)
        self._sender = StepSender(endpoint, plan.wire, self._recorder)
        self._together = Collectives(self._sender, roles.workers)
        self._loss: LossFunction = LOSSES.get(plan.loss, not_there)
        self._rows = Rows()
        self._layers: list[Layer] = []
        self._owned: dict[str, torch.Tensor] = {}  # by name in the model
        self._states: dict[int, dict[StateName, torch.Tensor]] = {}
        self._compiled: dict[bool, Compiled] = {}
        self._trained: list[str] = []
        self._optimizer: Optimizer | None = None
        self._work: deque[tuple[Work, list[torch.Tensor | None]]] = deque()
        self._fetches: list[Fetch] = []
        self._under_way: program_run.Work | None = None
        self._waits_for: Together | None = None
        endpoint.enter_plan(is_a(lambda: roles), self._together.inspect)
        others = {peer: address for peer, address in plan.addresses.items() if peer not in (endpoint.node, MASTER)}
        endpoint.connect_all(others)

    # -- what comes in ------------------------------------------------------------------------------------------------

    def handle(self, mail: Mail) -> None:
        message = mail.message
        self._recorder.heard(mail.arrived_at)
        if isinstance(message, GradientPart):
            if self._sender.training:
                self._recorder.received(
                    message.bucket, message.chunk, mail.first_at, mail.arrived_at, mail.payload_bytes
                )
            self._together.part(mail)
        elif isinstance(message, Work):
            self._work.append((message, mail.tensors))
        elif isinstance(message, Place):
            self._move_in(message, mail.tensors)
        elif isinstance(message, Fetch):
            self._fetches.append(message)
        else:
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def _move_in(self, message: Place, tensors: list[torch.Tensor | None]) -> None:
        layer = portable_layer.decode(message.graph)
        if message.layer == len(self._plan.sizes):
            self._loss = Criterion(layer, tensors)
            return
        if message.layer != len(self._layers):
            raise ProtocolError(f"layer {message.layer} came after {len(self._layers)} layers")
        mine = local_layer(layer, self._told.every_cut(), len(self._workers))
        own = len(mine.tensors)
        for each, tensor in zip(mine.tensors, tensors[:own], strict=True):
            if tensor is None or tuple(tensor.shape) != each.shape:
                raise ProtocolError(f"layer {layer.name} came without this worker's part of {each.name}")
            self._owned[layer.full_name(each)] = tensor.requires_grad_(each.trainable)
        state = [each for each in tensors[own:] if each is not None]
        self._states[message.layer] = dict(zip(message.state, state, strict=True))
        self._layers.append(layer)
        self.endpoint.post(MASTER, Placed(message.layer))
        if len(self._layers) == len(self._plan.sizes):
            self._complete()

    def _complete(self) -> None:
        found = programs(self._layers, self._told, self._rank, len(self._workers))
        for training, program in ((True, found.train), (False, found.evaluate)):
            self._compiled[training] = Compiled(program, self._owned, self._rank, len(self._workers))
        recipe, states = self._plan.recipe, []
        for index, layer in enumerate(self._layers):
            for each in layer.tensors:
                if each.trainable:
                    self._trained.append(layer.full_name(each))
                    kept = self._states[index].items()
                    states.append({key: value for (name, key), value in kept if name == each.name})
        self._optimizer = make_optimizer(recipe.optimizer, recipe.optimizer_settings, self._parameters)
        for state, given in zip(self._optimizer.states, states, strict=True):
            state.update(given)
        self._states.clear()

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [self._owned[name] for name in self._trained]

    # -- what is done -------------------------------------------------------------------------------------------------

    def act(self) -> bool:
        """A piece of the model, forward or backward. False: nothing to do, or others are not there yet."""
        if self._under_way is None and not self._begin():
            return False
        answer = None
        if self._waits_for is not None:
            collective = self._together
            answer = collective.take_total() if self._waits_for.what == "add" else collective.take_parts()
            if answer is None:
                self._recorder.waiting_for("parts")
                return False
            self._waits_for = None
        assert self._under_way is not None
        try:
            self._waits_for = self._under_way.send(answer)
        except StopIteration:
            self._under_way = None
            return True
        if self._waits_for is not None:
            begin = self._together.add_up if self._waits_for.what == "add" else self._together.tell
            begin(self._waits_for.vector)
        return True

    def _begin(self) -> bool:
        while self._fetches and len(self._layers) == len(self._plan.sizes) and self._fetches[0].step <= self.step:
            self._give(self._fetches.pop(0))
        if not self._work or not self._compiled:
            self._recorder.waiting_for("work")
            return False
        work, tensors = self._work.popleft()
        self._sender.training = work.training
        self._under_way = self._trained_on(work, tensors) if work.training else self._evaluated(work, tensors)
        return True

    def _pass(self, work: Work, tensors: list[torch.Tensor | None]) -> tuple[Pass, list[torch.Tensor]]:
        inputs, targets = self._rows.take(work.table, tensors)
        columns = [torch.split(each, list(work.sizes)) for each in inputs]
        starts = [sum(work.sizes[:at]) for at in range(len(work.sizes))]
        values: list[program_run.Values] = [
            {place: as_in_the_batch(column[at], start) for place, column in enumerate(columns)}
            for at, start in enumerate(starts)
        ]
        compiled = self._compiled[work.training]
        return Pass(compiled, self._plan.recipe.seed, work.step, work.training, values), list(
            torch.split(targets, list(work.sizes))
        )

    def _trained_on(self, work: Work, tensors: list[torch.Tensor | None]) -> program_run.Work:
        if work.fresh:
            self._recorder.fresh()
        passing, targets = self._pass(work, tensors)
        yield from self._recorded(passing.forward(), "forward")
        started = self._recorder.begin()
        loss, seeds = 0.0, []
        for number, mine in enumerate(targets):
            leaves = [each.detach().requires_grad_(each.requires_grad) for each in passing.outputs(number)]
            seed_generator(self._plan.recipe.seed, work.step, number, LOSS)
            with torch.enable_grad():
                value = self._loss(self._nested(leaves), mine)
                share = len(mine) / work.samples
                (value * share).backward()  # type: ignore[no-untyped-call]
            loss += float(value.detach()) * share
            seeds.append([each.grad for each in leaves])
        self._recorder.end(started, "forward", len(self._layers), -1)
        yield from self._recorded(passing.backward(seeds), "backward")
        norm = yield from self._norm()
        started = self._recorder.begin()
        self._update(work.step, norm)
        self._recorder.end(started, "update", 0, -1)
        self._close(work.step)
        self.endpoint.post(MASTER, WorkDone(work.step, loss, 1.0))

    def _recorded(self, work: program_run.Work, kind: str) -> program_run.Work:
        """Its pieces as spans of the step."""
        answer, number = None, 0
        while True:
            started = self._recorder.begin()
            try:
                wanted = work.send(answer)
            except StopIteration:
                self._recorder.end(started, kind, number, -1)
                return
            self._recorder.end(started, kind, number, -1)
            number += 1
            answer = yield wanted

    def _norm(self) -> program_run.Work:
        """Of all gradients of the model: parts of all workers, and once what is whole."""
        if self._plan.recipe.clip_norm is None:
            return None
        squares = {True: torch.zeros(1), False: torch.zeros(1)}
        for name in self._trained:
            gradient = self._owned[name].grad
            if gradient is not None:
                squares[name in self._told.cuts] += gradient.square().sum()
        total = yield Together("add", squares[True])
        return (total + squares[False]).sqrt()[0]

    def _update(self, step: int, norm: torch.Tensor | None) -> None:
        parameters, recipe = self._parameters, self._plan.recipe
        if norm is not None and recipe.clip_norm is not None:
            clip_grads_with_norm_(parameters, recipe.clip_norm, norm)
        assert self._optimizer is not None
        self._optimizer.step(learning_rate(recipe.schedule, recipe.optimizer_settings["lr"], step), parameters)
        for each in parameters:
            each.grad = None

    def _evaluated(self, work: Work, tensors: list[torch.Tensor | None]) -> program_run.Work:
        passing, targets = self._pass(work, tensors)
        yield from passing.forward()
        score = Score(bytes_model=is_of_bytes(self._plan.loss))
        with torch.no_grad():
            for number, mine in enumerate(targets):
                outputs = self._nested(passing.outputs(number))
                score.add(float(self._loss(outputs, mine)), outputs, mine)
        self.endpoint.post(
            MASTER,
            Scored(score.loss_sum, score.samples, score.right, score.guesses, score.token_loss_sum, score.tokens),
        )

    def _nested(self, outputs: Sequence[torch.Tensor]) -> object:
        return nest(self._layers[-1].output, list(outputs))

    def _close(self, step: int) -> None:
        for _, posted, acknowledged, size in self.endpoint.sent:
            self._recorder.sent(posted, acknowledged, size)
        self.endpoint.sent.clear()
        self.emit(self._recorder.close_step(step, self._plan.step))
        self.step = step + 1

    def _give(self, fetch: Fetch) -> None:
        """This worker's part of a layer and of its optimizer state."""
        layer, state = self._layers[fetch.layer], dict[StateName, torch.Tensor]()
        assert self._optimizer is not None
        for each in layer.tensors:
            if each.trainable:
                kept = self._optimizer.states[self._trained.index(layer.full_name(each))]
                state.update({(each.name, key): value for key, value in sorted(kept.items())})
        tensors = [self._owned[layer.full_name(each)].detach().clone() for each in layer.tensors]
        self.endpoint.post(MASTER, LayerState(fetch.layer, tuple(state)), [*tensors, *state.values()])

    def leave(self) -> None:
        """No worker has the whole of anything: a new generation begins with a checkpoint."""

    def farewell(self) -> events.NodeEnded:
        return farewell(self.endpoint)
