"""A node of a HybComm run, and what the others may send it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ringtmp import untrusted
from ringtmp.errors import ProtocolError
from ringtmp.metrics import events, power_of_this_device
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.route import MASTER
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.worker import farewell, reading_of, report
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel.message_checks import flat, is_a
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.trainer import Trainer
from ringtmp.strategies.hybcomm.choose_way import chunk, most_rows
from ringtmp.strategies.hybcomm.two_ways import TwoWays
from ringtmp.wire.formats import PLAIN, wire_format
from ringtmp.wire.messages import Enlist, Factors, GradientPart, Message


class HybCommMember:
    def __init__(self, endpoint: Endpoint, plan: Enlist, roles: Roles, way: str) -> None:
        self.endpoint = endpoint
        self.emit: Callable[[events.Event], None] = lambda event: report(endpoint, event)
        power = power_of_this_device.power(plan.recipe.threads)
        self._recorder = Recorder(
            endpoint.node, endpoint.clock, plan.detailed_steps, power_of_this_device.meter(), power,
            reading=reading_of(endpoint), asked=lambda: endpoint.detailed_step,
        )  # fmt: skip
        factored = [layer for layer, each in enumerate(plan.linear) if each]
        replica = Replica(plan.recipe, endpoint.node, factored=factored)
        self._exchange = TwoWays(
            plan, replica, self._recorder, self._send,
            me=endpoint.node, workers=roles.workers, way=way, offended=endpoint.offended,
        )  # fmt: skip
        endpoint.enter_plan(is_a(lambda: roles), Scrutiny(self._exchange, roles.workers, endpoint.node, plan.wire))
        self.trainer = Trainer(endpoint, plan, self._recorder, self._exchange, replica)
        self.trainer.emit = lambda event: self.emit(event)
        others = {peer: address for peer, address in plan.addresses.items() if peer not in (endpoint.node, MASTER)}
        endpoint.connect_all(others)

    @property
    def step(self) -> int:
        return self.trainer.step

    def handle(self, mail: Mail) -> None:
        message = mail.message
        self._recorder.heard(mail.arrived_at)
        if isinstance(message, GradientPart | Factors):
            of = message.bucket if isinstance(message, GradientPart) else message.layer
            self._recorder.received(of, -1, mail.first_at, mail.arrived_at, mail.payload_bytes)
        if isinstance(message, GradientPart):
            self._exchange.part(mail.sender, message, mail.present())
        elif isinstance(message, Factors):
            self._exchange.arrived(mail.sender, message, mail.present())
        elif not self.trainer.handle(mail):
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def act(self) -> bool:
        return self.trainer.act()

    def lose(self, node: int) -> None:
        raise NotImplementedError("the others begin a new generation with what they have")

    def leave(self) -> None:
        self.trainer.leave(self._exchange.step)

    def farewell(self) -> events.NodeEnded:
        return farewell(self.endpoint)

    def _send(self, peer: int, message: GradientPart | Factors, tensors: Sequence[torch.Tensor]) -> None:
        self._recorder.count_sent(sum(each.nbytes for each in tensors))
        self.endpoint.post(peer, message, tensors)


class Scrutiny:
    """Every worker gives to every group of layers once in a step, as factors or as the chunk that this one serves, and may
    send the sum of its own chunk once. Workers are at most one step apart."""

    def __init__(self, exchange: TwoWays, workers: Sequence[int], me: int, wire: str) -> None:
        self._exchange = exchange
        self._workers = list(workers)
        self._rank = self._workers.index(me)
        self._wire = wire_format(wire)
        self._first = exchange.step
        self._given: dict[tuple[int, int], int] = {}  # by sender and group: the step it gave to last
        self._summed: dict[tuple[int, int], int] = {}

    def __call__(self, sender: int, message: Message) -> None:
        if isinstance(message, GradientPart):
            self._part(sender, message)
        elif isinstance(message, Factors):
            self._factors(sender, message)

    def _part(self, sender: int, part: GradientPart) -> None:
        step, rank = self._exchange.step, self._workers.index(sender)
        untrusted.whole(part.step, "the step", step, step + 1)
        untrusted.whole(part.bucket, "the number of a group of layers", 0, len(self._exchange.groups) - 1)
        served = rank if part.summed else self._rank
        if part.chunk != served or part.hop or part.there:
            raise ProtocolError(f"sent chunk {part.chunk} after {part.hop} hops, which is not its to send")
        if part.tensors or part.summed:
            first, stop = chunk(self._exchange.sizes[part.bucket], len(self._workers), served)
            flat(part.tensors, stop - first, self._wire)
        if not part.summed:
            self._in_turn(sender, part.bucket, part.step)
        elif part.step <= self._summed.get((sender, part.bucket), self._first - 1):
            raise ProtocolError(f"sent a sum of step {part.step} twice")
        else:
            self._summed[sender, part.bucket] = part.step

    def _factors(self, sender: int, message: Factors) -> None:
        step, linear = self._exchange.step, self._exchange.linear
        untrusted.whole(message.step, "the step", step, step + 1)
        if message.layer not in linear:
            raise ProtocolError(f"sent factors of layer {message.layer}, which is no plain linear layer")
        known, group = linear[message.layer], self._exchange.groups.index((message.layer,))
        most = most_rows(known.width)
        untrusted.whole(message.rows, "the number of rows", 0, most)
        shapes = ((message.rows, known.inputs), (message.rows, known.outputs)) if message.rows else ()
        wanted = [each for shape in shapes for each in self._wire.travels(PLAIN.name, shape)]
        if [each and (each.dtype, each.shape) for each in message.tensors] != wanted:
            raise ProtocolError(f"sent {message.tensors} for {message.rows} rows of layer {message.layer}")
        self._in_turn(sender, group, message.step)

    def _in_turn(self, sender: int, group: int, step: int) -> None:
        if step != self._given.get((sender, group), self._first - 1) + 1:
            raise ProtocolError(f"sent its gradient of step {step} out of turn")
        self._given[sender, group] = step
