"""EASGD, asynchronous: the parts of the centre and of worker i.

    centre                                     worker i
    w~ <- the model                            w_i <- w~
    loop                                       for t in 1, 2, ...
      on a request from worker i: send w~        if t mod tau = 0:
      on d from worker i: w~ <- w~ + d             fetch w~;  d <- alpha (w_i - w~);  send d;  w_i <- w_i - d
                                                 x <- share i of the next batch
                                                 w_i <- w_i - rate gradient of the mean loss of x at w_i

    symbol    here
    tau       the setting tau
    alpha     the setting alpha; beta / workers with beta = 0.9 unless it is given
    w~        the centre, on the master, which does not work: the model of the run

Departures. The optimizer of the run takes the place of plain descent (the paper has a variant with momentum on the workers,
EAMSGD: --optimizer sgd with momentum). t counts the run's steps from 1, and gradients are taken at w_i after the exchange, not
before. What a worker had beyond the centre is not in a checkpoint: a resumed run begins with w~ everywhere.

With alpha = 0 the centre never moves and every worker trains as if it were alone.

Lost worker: nobody waits for it; what it had sent is in the centre. The centre is on the master: a run that lost it is resumed
from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringtmp.errors import ProtocolError, Unasked
from ringtmp.metrics import events, power_of_this_device
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.route import MASTER
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.worker import farewell, reading_of, report
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.message_checks import KeyScrutiny, is_a
from ringtmp.strategies.data_parallel.own_updates import OwnUpdates
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.trainer import Exchange, Trainer
from ringtmp.wire.messages import Enlist, Fetch, Kept, Lost, Pull, Pulled, Push, Store


class EasgdMember:
    """The centre, or a worker; alone, both."""

    def __init__(self, endpoint: Endpoint, plan: Enlist, roles: Roles, tau: int, alpha: float) -> None:
        self.endpoint = endpoint
        self.emit: Callable[[events.Event], None] = lambda event: report(endpoint, event)
        power = power_of_this_device.power(plan.recipe.threads)
        self._recorder = recorder = Recorder(
            endpoint.node, endpoint.clock, plan.detailed_steps, power_of_this_device.meter(), power,
            reading=reading_of(endpoint), asked=lambda: endpoint.detailed_step,
        )  # fmt: skip
        table = parameter_keys.cut(plan.sizes, 1)
        serves, works = endpoint.node in roles.servers, endpoint.node in roles.workers
        self.centre = Centre(endpoint, table, recorder, plan.step, works) if serves else None
        if self.centre is not None and not works:
            self.centre.emit = lambda event: self.emit(event)
        self.worker: ElasticWorker | None = None
        self.trainer: Trainer | None = None
        if works:
            replica = Replica(plan.recipe, endpoint.node)
            self.worker = ElasticWorker(
                endpoint, plan, replica, recorder, table=table, centre=roles.servers[0], tau=tau, alpha=alpha
            )
            self.trainer = Trainer(endpoint, plan, recorder, self.worker, replica)
            self.trainer.emit = lambda event: self.emit(event)
        endpoint.enter_plan(is_a(lambda: roles), KeyScrutiny(table, plan.wire, 1, lambda: self.step))
        others = {peer: address for peer, address in plan.addresses.items() if peer not in (endpoint.node, MASTER)}
        endpoint.connect_all(others)

    @property
    def step(self) -> int:
        return self.trainer.step if self.trainer is not None else self.centre.step if self.centre is not None else 0

    def handle(self, mail: Mail) -> None:
        message = mail.message
        self._recorder.heard(mail.arrived_at)
        if self.endpoint.forgot(mail.sender):
            return
        if isinstance(message, Lost):
            self.lose(message.node)
        elif isinstance(message, Pulled) and self.worker is not None:
            self.worker.fetched(message, mail)
        elif self.centre is not None and self.centre.handle(mail):
            pass
        elif self.trainer is None or not self.trainer.handle(mail):
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def act(self) -> bool:
        if self.trainer is not None:
            return self.trainer.act()
        self._recorder.waiting_for("workers")
        return False

    def lose(self, node: int) -> None:
        self.endpoint.forget(node)

    def leave(self) -> None:
        """A new generation begins with a checkpoint."""

    def farewell(self) -> events.NodeEnded:
        return farewell(self.endpoint)


class Centre:
    def __init__(self, endpoint: Endpoint, table: tuple[Key, ...], recorder: Recorder, step: int, works: bool) -> None:
        """`works`: the node is a worker too, and keeps the record of its steps as such."""
        self.endpoint = endpoint
        self.emit: Callable[[events.Event], None] | None = None
        self.step = self._first = step  # of the worker that is furthest
        self._works = works
        self._table = table
        self._recorder = recorder
        self._values: dict[int, torch.Tensor] = {}  # w~, by key
        self._state: dict[
            int, tuple[tuple[str, ...], list[torch.Tensor]]
        ] = {}  # an optimizer's, which nobody needs here

    def handle(self, mail: Mail) -> bool:
        message = mail.message
        if isinstance(message, Pull):
            self._close(message.step)
            values = self._values[message.key].clone()  # it changes while this travels
            if mail.sender != self.endpoint.node:
                self._recorder.count_sent(values.nbytes)
            self.endpoint.post(mail.sender, Pulled(message.key, message.step, message.step), [values])
        elif isinstance(message, Push):
            if not (given := mail.present()):
                raise ProtocolError(f"sent nothing to move key {message.key} by")
            self._values[message.key].add_(given[0])
        elif isinstance(message, Store):
            values, *state = mail.present()
            self._values[message.key], self._state[message.key] = values.clone(), (message.state, state)
        elif isinstance(message, Fetch):
            for key in self._table:
                if key.layer == message.layer:
                    names, state = self._state[key.number]
                    tensors = [self._values[key.number].clone(), *(each.clone() for each in state)]
                    self.endpoint.post(MASTER, Kept(key.number, names), tensors)
            return not self._works  # else the worker has its part to give too
        else:
            return False
        return True

    def _close(self, step: int) -> None:
        """Somebody has come to this step."""
        self.endpoint.sent.clear()  # who waited for what to arrive is the workers' record
        while self.step < step:
            if self.emit is not None:
                self.emit(self._recorder.close_step(self.step, self._first))
            self.step += 1


class ElasticWorker(Exchange):
    cause = "centre"

    def __init__(
        self, endpoint: Endpoint, plan: Enlist, replica: Replica, recorder: Recorder,
        *, table: tuple[Key, ...], centre: int, tau: int, alpha: float,
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self.step = plan.step
        self._replica = replica
        self._recorder = recorder
        self._table = table
        self._centre = centre
        self._tau = tau
        self._alpha = alpha
        self._own = OwnUpdates(plan, replica, recorder)
        self._begun = False  # it has a model
        self._asked = plan.step - 1  # the newest step before which it asked for the centre
        self._missing: set[int] = set()  # keys that have not come
        self._came: dict[int, torch.Tensor] = {}

    def ready(self, layer: int, step: int, training: bool) -> bool:
        if not training or layer > 0:
            return True
        if self._asked < step and (not self._begun or (step + 1) % self._tau == 0):
            self._asked = step
            self._missing = {key.number for key in self._table}
            for key in self._table:
                self.endpoint.post(self._centre, Pull(key.number, step))
        return not self._missing

    def fetched(self, message: Pulled, mail: Mail) -> None:
        if message.key not in self._missing or message.step != self._asked:
            raise Unasked(message.key, message.step)
        self._recorder.received(self._table[message.key].layer, -1, mail.first_at, mail.arrived_at, mail.payload_bytes)
        self._missing.discard(message.key)
        self._came[message.key] = mail.present()[0]
        if not self._missing:
            self._meet_the_centre()

    def _meet_the_centre(self) -> None:
        """d <- alpha (w_i - w~);  w~ <- w~ + d;  w_i <- w_i - d"""
        started = self._recorder.begin()
        for key in self._table:
            mine, centre = self._replica.values[key.layer][key.start : key.stop], self._came.pop(key.number)
            if not self._begun:
                mine.copy_(centre)
                continue
            pull = (mine - centre).mul_(self._alpha)
            mine.sub_(pull)
            if self._centre != self.endpoint.node:
                self._recorder.count_sent(pull.nbytes)
            self.endpoint.post(self._centre, Push(key.number, self._asked, 0.0, False), [pull])
        self._begun = True
        self._recorder.end(started, "update", 0, -1)

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if self._own.take(layer, share, gradient):
            self._own.make(step)
            self.step = step + 1
