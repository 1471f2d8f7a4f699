"""The master: a node like the others that also owns data, labels and loss, and leads the run.

It puts batches at the front and takes losses at the tail; between the two it does nothing but its share of the work.
The whole model never lies here: layers pass through one at a time, on their way to a node or to the disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from ringtmp.data.batches import Batch
from ringtmp.data.sources import leaves
from ringtmp.errors import LossNotFinite, NodeFailed, ProtocolError, WaitTimeout
from ringtmp.metrics.events import EventLog
from ringtmp.model import portable
from ringtmp.model.export import nest
from ringtmp.model.portable import Layer
from ringtmp.plan.route import MASTER
from ringtmp.ring.checkpoint import Checkpoint, CheckpointWriter, LayerTensors
from ringtmp.ring.endpoint import Endpoint, Mail
from ringtmp.ring.losses import LossFunction, Score
from ringtmp.ring.node import Node
from ringtmp.wire.message import (
    Activations,
    Bye,
    Failed,
    Fetch,
    Hello,
    Inspect,
    Inspected,
    LayerState,
    Place,
    Placed,
    Report,
    Setup,
    Stop,
)  # fmt: skip

HELLO_LIMIT_S = 60.0
STALL_LIMIT_S = 60.0
STALL_FACTOR = 20
WATCH_EVERY_S = 0.2
WAIT_S = 0.05
STOP_LIMIT_S = 2.0


class Crew(Protocol):
    """The other nodes of a ring, wherever they live."""

    def advance(self) -> bool:
        """Let nodes that live in this process work. True if any did."""
        ...

    def check(self, step: int) -> None:
        """Raise NodeLost if a node has died."""
        ...


class NotFinite(Exception):  # noqa: N818
    def __init__(self, step: int, microbatch: int, loss: float) -> None:
        super().__init__(step, microbatch, loss)
        self.step, self.microbatch, self.loss = step, microbatch, loss


@dataclass
class _Step:
    """A training step under way."""

    batch: Batch
    turn: int
    loss: float = 0.0


class Master:
    def __init__(
        self, endpoint: Endpoint, crew: Crew, layers: Sequence[Layer], loss: LossFunction, log: EventLog
    ) -> None:
        self.endpoint = endpoint
        self.hellos: dict[int, Hello] = {}
        self._crew = crew
        self._layers = layers
        self._loss = loss
        self._log = log
        self._node: Node | None = None
        self._turn = 0
        self._placed: set[int] = set()
        self._fetched: LayerState | None = None
        self._fetched_tensors: list[torch.Tensor] = []
        self._inspected: dict[int, Inspected] = {}
        self._batch: Batch | None = None  # of an evaluation
        self._steps: dict[int, _Step] = {}  # training steps under way
        self._committed = 0
        self._score: Score | None = None
        self._outputs: list[Any] | None = None
        self._gone: set[int] = set()
        self._last_watch = 0.0
        self._longest_step_s = 0.0

    # -- setting up ---------------------------------------------------------------------------------------------------

    def gather(self, others: Sequence[int]) -> None:
        """Wait until every node has said hello."""
        self._until(
            lambda: all(node in self.hellos for node in others),
            lambda: f"node {next(node for node in others if node not in self.hellos)} to start",
            HELLO_LIMIT_S,
        )

    def lay_out(self, setup: Setup, checkpoint: Checkpoint) -> None:
        """Send everyone the plan, and every layer to its holder, one at a time."""
        everyone = setup.addresses
        for node in setup.route.nodes():
            near = {peer: everyone[peer] for peer in setup.route.neighbours(node)}
            theirs = msgspec.structs.replace(setup, addresses=near)
            if node == MASTER:
                self._node = Node(self.endpoint, theirs, owner=self)
                self._node.emit = self._log.write
            else:
                self.endpoint.post(node, theirs)
        for index, layer in enumerate(self._layers):
            tensors, state = checkpoint.layer(index, layer)
            place = Place(index, portable.encode(layer), tuple(state))
            holder = setup.route.holder(index).node
            self.endpoint.post(holder, place, [*tensors, *state.values()])
            del tensors, state
            self._until(
                lambda index=index: index in self._placed,  # type: ignore[misc]
                lambda index=index, holder=holder: f"node {holder} to take layer {index}",  # type: ignore[misc]
                self._stall_limit(),
            )

    # -- passes -------------------------------------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        assert self._node is not None, "the ring is not laid out yet"
        return self._node

    @property
    def committed(self) -> int:
        """The first step whose batch has not been given to the ring: everything before must be finished."""
        return self._committed

    def train_step(
        self, step: int, batch: Batch, fresh: bool, upcoming: Callable[[int], Batch | None] | None = None
    ) -> float:
        """One update of every layer. The batch's mean loss before it.

        With delayed gradients the ring begins the next step before this one has ended: `upcoming` gives its batch, or
        None where the ring must come to rest after this step. A step that was begun early is asked for as any other.
        """
        started = self.endpoint.clock()
        if step not in self._steps:
            self._begin_step(step, batch, fresh)
        if upcoming is not None and self.node.setup.recipe.staleness and step + 1 not in self._steps:
            following = upcoming(step + 1)
            if following is not None:
                self._begin_step(step + 1, following, fresh=False)
        try:
            self._finish_pass(self._steps[step].turn, step)
        except NotFinite as found:
            raise self._diagnose(found) from None
        self._longest_step_s = max(self._longest_step_s, self.endpoint.clock() - started)
        return self._steps.pop(step).loss

    def _begin_step(self, step: int, batch: Batch, fresh: bool) -> None:
        self._steps[step] = _Step(batch, self._begin_pass(step, batch, training=True, fresh=fresh))
        self._committed = step + 1

    def evaluate(self, batches: Sequence[Batch] | Any, step: int, bytes_model: bool) -> Score:
        self._score = Score(bytes_model=bytes_model)
        for batch in batches:
            self._batch = batch
            self._finish_pass(self._begin_pass(step, batch, training=False, fresh=False), step)
        self._batch = None
        score, self._score = self._score, None
        return score

    def predict(self, batches: Any, step: int) -> list[Any]:
        """The model's outputs, one entry per microbatch, in order."""
        self._outputs = []
        for batch in batches:
            self._batch = batch
            self._finish_pass(self._begin_pass(step, batch, training=False, fresh=False), step)
        outputs, self._outputs = self._outputs, None
        self._batch = None
        return outputs

    def tail(self, step: int, microbatch: int, training: bool, outputs: list[torch.Tensor]) -> torch.Tensor | None:
        """Called by the node when a microbatch has gone through the last layer."""
        nested = nest(self._layers[-1].output, outputs)
        if not training and self._outputs is not None:
            self._outputs.append(nested)
            return None
        if not training:
            assert self._batch is not None
            assert self._score is not None
            targets = self._batch.targets[microbatch]
            with torch.no_grad():
                self._score.add(float(self._loss(nested, targets)), nested, targets)
            return None
        current = self._steps[step]
        with torch.enable_grad():
            loss = self._loss(nested, current.batch.targets[microbatch])
            weight = current.batch.weights[microbatch]
            value = float(loss.detach())
            if not math.isfinite(value):
                raise NotFinite(step, microbatch, value)
            current.loss += value * weight
            return loss * weight

    def _begin_pass(self, step: int, batch: Batch, training: bool, fresh: bool) -> int:
        """Put a batch at the front. The number of its pass."""
        self._turn += 1
        turn, now = self._turn, self.endpoint.clock()
        for microbatch, inputs in enumerate(batch.inputs):
            tensors: list[torch.Tensor | None] = list(leaves(inputs))
            message = Activations(
                turn, step, 0, microbatch, len(batch.inputs), training, fresh, (False,) * len(tensors)
            )  # fmt: skip
            self.node.handle(Mail(MASTER, message, tensors, 0, now, now))
        return turn

    def _finish_pass(self, turn: int, step: int) -> None:
        self._until(
            lambda: all(state.done_turn >= turn for state in self.node.visits.values()),
            lambda: self._waiting_for(step),
            self._stall_limit(),
        )

    # -- layers back to the disk --------------------------------------------------------------------------------------

    def save(self, writer: CheckpointWriter) -> None:
        for index, layer in enumerate(self._layers):
            tensors, state = self._layer_state(index)
            writer.add(index, layer, tensors, state)
            self._fetched, self._fetched_tensors = None, []

    def _layer_state(self, index: int) -> LayerTensors:
        visit = self.node.route.holder(index)
        if visit.node == MASTER:
            return self.node.visits[visit.index].stage.layer_state(index)
        self.endpoint.post(visit.node, Fetch(index))
        self._until(
            lambda: self._fetched is not None and self._fetched.layer == index,
            lambda: f"node {visit.node} to send layer {index}",
            self._stall_limit(),
        )
        assert self._fetched is not None
        own = len(self._layers[index].tensors)
        state = dict(zip(self._fetched.state, self._fetched_tensors[own:], strict=True))
        return self._fetched_tensors[:own], state

    def stop(self, reason: str, limit_s: float = STOP_LIMIT_S) -> None:
        """Tell every node to stop, and wait a moment for each to say goodbye."""
        for node in self.hellos:
            self.endpoint.post(node, Stop(reason))
        limit = self.endpoint.clock() + limit_s
        while len(self._gone) < len(self.hellos) and self.endpoint.clock() < limit:
            for mail in self.endpoint.collect():
                if isinstance(mail.message, Report | Bye):
                    self._take(mail)
            if not self._crew.advance():
                self.endpoint.wait(0.01)
        self.endpoint.collect()  # the acknowledgements go out

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _until(self, condition: Callable[[], bool], waiting_for: Callable[[], str], limit_s: float) -> None:
        """Work until the condition holds; at most `limit_s` without any sign of life."""
        quiet_since = self.endpoint.clock()
        while not condition():
            if self._pump():
                quiet_since = self.endpoint.clock()
            elif self.endpoint.clock() - quiet_since > limit_s:
                raise WaitTimeout(f"waited {limit_s:.0f} s for {waiting_for()} without a sign of life")

    def _pump(self) -> bool:
        mail = self.endpoint.collect()
        for each in mail:
            self._take(each)
        worked = self._node.act() if self._node is not None else False
        helped = self._crew.advance()
        now = time.monotonic()
        if now - self._last_watch > WATCH_EVERY_S:
            self._last_watch = now
            self._crew.check(self.node.step if self._node is not None else 0)
        if not (mail or worked or helped):
            self.endpoint.wait(WAIT_S)
        return bool(mail) or worked or helped

    def _take(self, mail: Mail) -> None:
        message = mail.message
        if isinstance(message, Hello):
            self.hellos[mail.sender] = message
        elif isinstance(message, Report):
            for event in message.events:
                self._log.write_encoded(event)
        elif isinstance(message, Bye):
            self._gone.add(mail.sender)
            self._log.write_encoded(message.event)
        elif isinstance(message, Placed):
            self._placed.add(message.layer)
        elif isinstance(message, LayerState):
            self._fetched = message
            self._fetched_tensors = [each for each in mail.tensors if each is not None]
        elif isinstance(message, Inspected):
            self._inspected[mail.sender] = message
        elif isinstance(message, Failed):
            raise NodeFailed(
                f"node {mail.sender} failed in step {message.step}: {message.error}\n{message.traceback.rstrip()}"
            )
        elif self._node is not None:
            self._node.handle(mail)
        else:
            raise ProtocolError(f"node {mail.sender} sent {type(message).__name__} before the ring was laid out")

    def _waiting_for(self, step: int) -> str:
        for index, state in sorted(self.node.visits.items()):
            if state.current is not None:
                current = state.current
                neighbour = min(index + 1, self.node.route.last)
                return (
                    f"node {self.node.route.node(neighbour)} in step {step}: "
                    f"{current.backwarded} of {current.microbatches} microbatches are back at visit {index}"
                )
        return f"node {self.node.route.node(self.node.route.last - 1)} in step {step}"

    def _stall_limit(self) -> float:
        return max(STALL_LIMIT_S, STALL_FACTOR * self._longest_step_s)

    def _diagnose(self, found: NotFinite) -> LossNotFinite:
        """Ask everyone where values first stopped being finite."""
        others = [node for node in self.node.route.nodes() if node != MASTER]
        self._inspected.clear()
        for node in others:
            self.endpoint.post(node, Inspect(found.microbatch))
        limit = self.endpoint.clock() + 5.0
        while len(self._inspected) < len(others) and self.endpoint.clock() < limit:
            for mail in self.endpoint.collect():
                if isinstance(mail.message, Inspected | Failed):
                    self._take(mail)
            if not self._crew.advance():
                self.endpoint.wait(WAIT_S)
        bad = [visit for each in self._inspected.values() for visit in each.bad]
        bad += [index for index, state in self.node.visits.items() if not state.stage.finite(found.microbatch)]
        where = "in the loss itself, on the master"
        if bad:
            visit = self.node.route.visits[min(bad)]
            name = "the master" if visit.node == MASTER else f"node {visit.node}"
            span = f"{self._layers[visit.first].name} to {self._layers[visit.stop - 1].name}"
            where = f"first in what {name} computed (layers {span})"
        return LossNotFinite(
            f"the loss is {found.loss} in step {found.step}, {where}: try a smaller --lr, --clip-norm or a --lr-schedule "
            "with warm-up"
        )
