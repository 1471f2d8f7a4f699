"""The master of a run whose layers are cut inside: gives every worker its parts and every batch, and puts parts together."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from ringtmp import untrusted
from ringtmp.data.batches import Batch
from ringtmp.errors import LossNotFinite, ProtocolError
from ringtmp.metrics import events
from ringtmp.model import portable_layer
from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.plan.route import MASTER
from ringtmp.runtime import check_node_replies
from ringtmp.runtime.base_leader import BaseLeader, Start
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter, LayerTensors
from ringtmp.runtime.losses import Score, what_to_try_when_not_finite
from ringtmp.runtime.mailbox import Mail
from ringtmp.strategies.base import Upcoming, nothing_ahead
from ringtmp.strategies.data_parallel.own_samples import joined as samples_of
from ringtmp.strategies.data_parallel.samples_already_sent import Ledger
from ringtmp.strategies.tensor.cut_tensors import joined, part
from ringtmp.strategies.tensor.told import local_layer
from ringtmp.transport.base import Channel
from ringtmp.wire.messages import Fetch, LayerState, Message, Place, Scored, Work, WorkDone

if TYPE_CHECKING:
    from ringtmp.strategies.tensor.member import TensorMember
    from ringtmp.strategies.tensor.plan import TensorPlan

#: Layers on their way to the workers: the master holds no more of the model than this and one layer.
PLACING_BYTES = 8 * 1024**2


class TensorLeader(BaseLeader):
    def __init__(self, start: Start, plan: TensorPlan) -> None:
        super().__init__(start, plan.request.step, plan.enlist.detailed_steps)
        self._plan = plan
        self._layers = plan.request.layers
        self._workers = plan.roles.workers
        self._ledgers = {worker: Ledger() for worker in self._workers}
        self._dids: dict[int, dict[int, float]] = {}  # by step, of every worker: the loss
        self._scores: dict[int, Scored] = {}
        self._most_samples = 0  # of the batch that is evaluated
        self._warned = False
        self._member = cast("TensorMember", plan.strategy.member(self.endpoint, plan.enlist))
        self._member.emit = self._log.write
        self.endpoint.inspect_too(self._inspect)

    # -- setting up -----------------------------------------------------------------------------------------------------

    def lay_out(self, checkpoint: Checkpoint) -> None:
        for worker in self._workers:
            if worker != MASTER:
                self.endpoint.post(worker, self._plan.enlist)
        for index, layer in enumerate(self._layers):
            tensors, state = checkpoint.layer(index, layer)
            graph = portable_layer.encode(layer)
            names = {each.name: layer.full_name(each) for each in layer.tensors}
            owners = [*(layer.full_name(each) for each in layer.tensors), *(names[name] for name, _ in state)]
            for rank, worker in enumerate(self._workers):
                mine = [
                    self._mine(name, each, rank) for name, each in zip(owners, [*tensors, *state.values()], strict=True)
                ]
                self.endpoint.post(worker, Place(index, graph, tuple(state)), mine)
            self._settle(PLACING_BYTES)
        if self._plan.loss is not None:
            loss, tensors = self._plan.loss
            for worker in self._workers:
                self.endpoint.post(worker, Place(len(self._layers), portable_layer.encode(loss), ()), tensors)
        self._settle(0)

    def _mine(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        cut = self._plan.cuts.get(name)
        return tensor.clone() if cut is None or not tensor.dim() else part(tensor, cut, rank, len(self._workers))

    def _settle(self, most_bytes: int) -> None:
        """Until no more than this is on its way."""
        self._until(
            lambda: (
                sum(self.endpoint.in_flight_bytes(each, Channel.BULK) for each in self._workers if each != MASTER)
                <= most_bytes
            ),
            lambda: "the layers to arrive",
            self._stall_limit(),
        )

    # -- training -------------------------------------------------------------------------------------------------------

    def train_step(self, step: int, batch: Batch, fresh: bool, upcoming: Upcoming = nothing_ahead) -> float:
        started = self.endpoint.clock()
        if self._committed == step:
            self._deal(step, batch, True, fresh)
        if self._committed == step + 1 and (later := upcoming(step + 1)) is not None:
            self._deal(step + 1, later, True, False)
        self._until(
            lambda: len(self._dids.get(step, ())) == len(self._workers),
            lambda: f"node {self._late(self._dids.get(step, {}))} in step {step}",
            self._stall_limit(),
        )
        self._longest_step_s = max(self._longest_step_s, self.endpoint.clock() - started)
        losses = self._dids.pop(step)
        if len(set(losses.values())) > 1 and not self._warned:
            self._warned = True
            self._log.write(
                events.Warned(
                    time.monotonic(),
                    f"workers computed losses from {min(losses.values()):.9g} to {max(losses.values()):.9g} for the same "
                    f"samples in step {step}: their processors round differently, and what each keeps whole drifts apart",
                )
            )
        return losses[MASTER]

    def _late(self, there: Iterable[int]) -> int:
        return next((worker for worker in self._workers if worker not in set(there)), MASTER)

    def _deal(self, step: int, batch: Batch, training: bool, fresh: bool) -> None:
        """Every worker takes the whole batch."""
        sizes = tuple(len(each) for each in batch.targets)
        inputs, targets, numbers = samples_of(batch, 0, len(sizes))
        for worker in self._workers:
            kept = "train" if training else "test"
            table, tensors = self._ledgers[worker].to_send(kept, numbers, inputs, targets)
            work = Work(step, training, fresh, batch.samples, 0, sizes, table, microbatches=len(sizes))
            self.endpoint.post(worker, work, tensors)
        if training:
            self._committed = step + 1

    def evaluate(self, batches: Iterable[Batch], step: int, bytes_model: bool) -> Score:
        score = Score(bytes_model=bytes_model)
        for batch in batches:
            self._scores.clear()
            self._most_samples = batch.samples
            self._deal(step, batch, False, False)
            self._until(
                lambda: len(self._scores) == len(self._workers),
                lambda: f"node {self._late(self._scores)} to evaluate",
                self._stall_limit(),
            )
            mine = self._scores[MASTER]  # all workers have the same outputs
            score.loss_sum += mine.loss_sum
            score.samples += mine.samples
            score.right += mine.right
            score.guesses += mine.guesses
            score.token_loss_sum += mine.token_loss_sum
            score.tokens += mine.tokens
        return score

    # -- the model back to the disk ---------------------------------------------------------------------------------------

    def save(self, writer: CheckpointWriter) -> None:
        for index, layer in enumerate(self._layers):
            tensors, state = self._layer_state(index)
            writer.add(index, layer, tensors, state, frozen_names(layer))

    def _layer_state(self, index: int) -> LayerTensors:
        """Of every worker's parts."""
        layer = self._layers[index]
        self._states.clear()
        self._awaited = index
        for worker in self._workers:
            self.endpoint.post(worker, Fetch(index, self._committed))
        self._until(
            lambda: len(self._states) == len(self._workers),
            lambda: f"layer {index} to come back from node {self._late(self._states)}",
            self._stall_limit(),
        )
        self._awaited = None
        found = [self._states[worker] for worker in self._workers]
        state = found[0][0].state
        if any(message.state != state for message, _ in found):
            raise ProtocolError(f"workers have different optimizer state for layer {layer.name}")
        names = {each.name: layer.full_name(each) for each in layer.tensors}
        owners = [*names.values(), *(names[name] for name, _ in state)]
        whole = [
            self._together(name, parts)
            for name, parts in zip(owners, zip(*(t for _, t in found), strict=True), strict=True)
        ]
        own = len(layer.tensors)
        return whole[:own], dict(zip(state, whole[own:], strict=True))

    def _together(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        cut = self._plan.cuts.get(name)
        return parts[0] if cut is None or not parts[0].dim() else joined(parts, cut)

    # -- what comes in ----------------------------------------------------------------------------------------------------

    def _hear(self, mail: Mail) -> bool:
        message = mail.message
        if isinstance(message, WorkDone):
            there = self._dids.setdefault(message.step, {})
            if mail.sender in there or not self._plan.request.step <= message.step < self._committed:
                raise ProtocolError(f"says that it did step {message.step}, which nobody asked for")
            if not math.isfinite(message.loss):
                raise LossNotFinite(
                    f"the loss is {message.loss} in step {message.step} on node {mail.sender}: "
                    f"{what_to_try_when_not_finite(message.step)}"
                )
            there[mail.sender] = message.loss
        elif isinstance(message, Scored):
            untrusted.whole(message.samples, "the number of samples", 0, self._most_samples)
            untrusted.whole(message.guesses, "the number of guesses")
            untrusted.whole(message.right, "the number of right ones", 0, message.guesses)
            untrusted.whole(message.tokens, "the number of tokens")
            if mail.sender in self._scores:
                raise ProtocolError("sent Scored, which nobody asked for")
            self._scores[mail.sender] = message
        elif isinstance(message, LayerState):
            if message.layer != self._awaited or mail.sender in self._states:
                raise ProtocolError(f"sent layer {message.layer}, which nobody asked for")
            self._states[mail.sender] = (message, mail.present())
        else:
            return False
        return True

    def _inspect(self, sender: int, message: Message) -> None:
        if isinstance(message, LayerState):
            check_node_replies.layer_of(message.layer, len(self._layers))
            mine = local_layer(self._layers[message.layer], self._plan.cuts, len(self._workers))
            check_node_replies.layer_state(message, mine)
