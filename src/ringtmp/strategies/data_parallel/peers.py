"""Workers that send each other their parameters, each to whom its strategy says: what differs is the exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ringtmp import untrusted
from ringtmp.errors import ProtocolError
from ringtmp.metrics import events, power_of_this_device
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.route import MASTER
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.worker import farewell, reading_of, report
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel.message_checks import MOST_AHEAD, flat, is_a
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import buckets
from ringtmp.strategies.data_parallel.trainer import Exchange, Trainer
from ringtmp.wire.formats import PLAIN
from ringtmp.wire.messages import Enlist, Lost, Message, PeerModel

#: A model as it travels: the flat values of every layer, empty for one without parameters.
Model = list[torch.Tensor]
#: (to whom, the sender's step, its weight, the model). The model is copied.
Send = Callable[[int, int, float, Sequence[torch.Tensor]], None]


class PeerExchange(Exchange, Protocol):
    """What a strategy does with its own parameters and those of others. It changes the replica only when a step begins or its
    gradient is there: meanwhile layers are at work with it, or another model is being evaluated."""

    def arrived(self, sender: int, step: int, weight: float, model: Model) -> None:
        """Another worker's model is there, whole; it is this worker's to change."""
        ...

    def lose(self, node: int) -> None:
        """Another worker is gone for good."""
        ...


MakePeerExchange = Callable[[Enlist, Replica, Recorder, Send], PeerExchange]


class PeerMember:
    def __init__(self, endpoint: Endpoint, plan: Enlist, roles: Roles, make: MakePeerExchange) -> None:
        self.endpoint = endpoint
        self.emit: Callable[[events.Event], None] = lambda event: report(endpoint, event)
        power = power_of_this_device.power(plan.recipe.threads)
        self._recorder = Recorder(
            endpoint.node, endpoint.clock, plan.detailed_steps, power_of_this_device.meter(), power,
            reading=reading_of(endpoint), asked=lambda: endpoint.detailed_step,
        )  # fmt: skip
        self._plan = plan
        self._buckets = buckets(plan.sizes)
        self._parts: dict[int, list[torch.Tensor]] = {}  # by sender: what has come of a model
        replica = Replica(plan.recipe, endpoint.node)
        self.exchange = make(plan, replica, self._recorder, self._send)
        self.trainer = Trainer(endpoint, plan, self._recorder, self.exchange, replica)
        self.trainer.emit = lambda event: self.emit(event)
        sizes = [sum(plan.sizes[layer] for layer in group) for group in self._buckets]
        endpoint.enter_plan(is_a(lambda: roles), PeerScrutiny(sizes, lambda: self.trainer.step))
        others = {peer: address for peer, address in plan.addresses.items() if peer not in (endpoint.node, MASTER)}
        endpoint.connect_all(others)

    @property
    def step(self) -> int:
        return self.trainer.step

    def handle(self, mail: Mail) -> None:
        message = mail.message
        self._recorder.heard(mail.arrived_at)
        if self.endpoint.forgot(mail.sender):
            return
        if isinstance(message, Lost):
            self.lose(message.node)
        elif isinstance(message, PeerModel):
            self._recorder.received(message.bucket, -1, mail.first_at, mail.arrived_at, mail.payload_bytes)
            parts = self._parts.setdefault(mail.sender, [])
            parts += mail.present()
            if len(parts) == len(self._buckets):
                self.exchange.arrived(
                    mail.sender, message.step, message.weight, self._model(self._parts.pop(mail.sender))
                )
        elif not self.trainer.handle(mail):
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def act(self) -> bool:
        return self.trainer.act()

    def lose(self, node: int) -> None:
        self.endpoint.forget(node)
        self._parts.pop(node, None)
        self.exchange.lose(node)

    def leave(self) -> None:
        """Workers differ and are in different steps: a new generation begins with a checkpoint."""

    def farewell(self) -> events.NodeEnded:
        return farewell(self.endpoint)

    def _send(self, peer: int, step: int, weight: float, model: Sequence[torch.Tensor]) -> None:
        for number, group in enumerate(self._buckets):
            vector = torch.cat([model[layer] for layer in group])
            self._recorder.count_sent(vector.nbytes)
            self.endpoint.post(peer, PeerModel(step, number, weight), [vector])

    def _model(self, parts: list[torch.Tensor]) -> Model:
        found = [torch.empty(0)] * len(self._plan.sizes)
        for group, part in zip(self._buckets, parts, strict=True):
            for layer, values in zip(group, torch.split(part, [self._plan.sizes[each] for each in group]), strict=True):
                found[layer] = values
        return found


class PeerScrutiny:
    """A model comes bucket after bucket, of one step and weight, and after those of earlier steps."""

    def __init__(self, sizes: Sequence[int], step: Callable[[], int]) -> None:
        self._sizes = sizes
        self._step = step
        self._last: dict[int, PeerModel] = {}

    def __call__(self, sender: int, message: Message) -> None:
        if not isinstance(message, PeerModel):
            return
        untrusted.whole(message.step, "the step", 0, self._step() + MOST_AHEAD)
        untrusted.whole(message.bucket, "the number of a bucket", 0, len(self._sizes) - 1)
        untrusted.number(message.weight, "the weight of a model", 0.0, 1.0)
        flat(message.tensors, self._sizes[message.bucket], PLAIN)
        last, count = self._last.get(sender), len(self._sizes)
        first = last is None or last.bucket == count - 1
        same = last is not None and (last.step, last.weight, last.bucket + 1) == (
            message.step, message.weight, message.bucket,
        )  # fmt: skip
        later = message.bucket == 0 and (last is None or message.step > last.step)
        if not (later if first else same):
            raise ProtocolError(f"sent bucket {message.bucket} of its model of step {message.step} out of turn")
        self._last[sender] = message
