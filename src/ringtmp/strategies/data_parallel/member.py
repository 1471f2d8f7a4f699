"""A node that holds the whole model and sums vectors with the other workers: what differs is its exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics import events, power_of_this_device
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.route import MASTER
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.member import Member
from ringtmp.runtime.worker import farewell, reading_of, report
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel.message_checks import PartScrutiny, is_a
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.sum_over_workers import Algorithm, RingReduce, Sender, TreeReduce, buckets
from ringtmp.strategies.data_parallel.trainer import Exchange, Trainer
from ringtmp.wire.messages import Enlist, GradientPart


class ParallelMember(Member, Protocol):
    """A node's part in a data-parallel run."""

    emit: Callable[[events.Event], None]

    def lose(self, node: int) -> None:
        """Another node is gone and this one goes on; said where the strategy's `can_lose` says yes."""
        ...


class SummingExchange(Exchange, Protocol):
    """What a strategy does with gradients and parameters, by sums over all workers."""

    #: Rounds of sums over the whole model that are done; the next one has this number.
    rounds: int
    #: Training steps whose updates are made.
    step: int

    def whole(self) -> int:
        """The step before which this worker has what the next generation may go on with."""
        return self.step

    def summed(self, round: int, bucket: int, vector: torch.Tensor) -> None:
        """The sum of a bucket is there; the vector is this worker's to change, but for what is still on its way out."""
        ...

    def summed_in_parts(self, round: int, bucket: int, vector: torch.Tensor, there: tuple[bool, ...]) -> None:
        """The same, of a sum in which some tensors have no gradient."""
        self.summed(round, bucket, vector)


#: The plan, the model, who notes what takes how long, and how to start the sum of a bucket.
MakeExchange = Callable[[Enlist, Replica, Recorder, Any], SummingExchange]
#: Who sends, all workers, and who is told of the sums.
MakeAlgorithm = Callable[[Sender, Sequence[int], SummingExchange], Algorithm]


def around_a_ring(sender: Sender, workers: Sequence[int], exchange: SummingExchange) -> Algorithm:
    return RingReduce(sender, workers, exchange.summed)


def up_and_down_a_tree(sender: Sender, workers: Sequence[int], exchange: SummingExchange) -> Algorithm:
    return TreeReduce(sender, workers, exchange.summed)


class WorkerMember:
    def __init__(
        self, endpoint: Endpoint, plan: Enlist, roles: Roles, make: MakeExchange,
        *, algorithm: MakeAlgorithm = around_a_ring, hands_over: bool = False,
        sizes: Sequence[int] | None = None, replica: Replica | None = None,
    ) -> None:  # fmt: skip
        """`hands_over`: what it has when the generation ends, the next one goes on with. `sizes`: of all that is summed in a
        round, where it is not the model once. `replica`: where it is not a plain one."""
        self.endpoint = endpoint
        self._hands_over = hands_over
        self.emit: Callable[[events.Event], None] = lambda event: report(endpoint, event)
        power = power_of_this_device.power(plan.recipe.threads)
        self._recorder = Recorder(
            endpoint.node, endpoint.clock, plan.detailed_steps, power_of_this_device.meter(), power,
            reading=reading_of(endpoint), asked=lambda: endpoint.detailed_step,
        )  # fmt: skip
        replica = replica or Replica(plan.recipe, endpoint.node)
        self._exchange = exchange = make(plan, replica, self._recorder, lambda *vector: self._algorithm.start(*vector))
        sender = Sender(endpoint, plan.wire, self._recorder)
        self._algorithm: Algorithm = algorithm(sender, roles.workers, exchange)
        if sizes is None:
            sizes = [sum(plan.sizes[layer] for layer in group) for group in buckets(plan.sizes)]
        scrutiny = PartScrutiny(
            lambda sender, part: self._algorithm.due(sender, part, sizes[part.bucket]),
            len(sizes), plan.wire, lambda: exchange.rounds,
        )  # fmt: skip
        endpoint.enter_plan(is_a(lambda: roles), scrutiny)
        self.trainer = Trainer(endpoint, plan, self._recorder, exchange, replica)
        self.trainer.emit = lambda event: self.emit(event)
        others = {peer: address for peer, address in plan.addresses.items() if peer not in (endpoint.node, MASTER)}
        endpoint.connect_all(others)

    @property
    def step(self) -> int:
        return self.trainer.step

    def handle(self, mail: Mail) -> None:
        message = mail.message
        self._recorder.heard(mail.arrived_at)
        if isinstance(message, GradientPart):
            self._recorder.received(message.bucket, message.chunk, mail.first_at, mail.arrived_at, mail.payload_bytes)
            self._algorithm.part(mail)
        elif not self.trainer.handle(mail):
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def act(self) -> bool:
        return self.trainer.act()

    def lose(self, node: int) -> None:
        raise NotImplementedError("a strategy whose `can_lose` says yes has a member of its own")

    def leave(self) -> None:
        if self._hands_over:
            self.trainer.leave(self._exchange.whole())

    def farewell(self) -> events.NodeEnded:
        return farewell(self.endpoint)
