"""The head of a team: to its team a server, to the servers one worker.

    on push(key, g, t) of a worker of the team:  g_t <- g_t + g;  of all: push(key, g_t, t) to the server
    on pull(key, t) of a worker of the team:     pull(key, t) from the server, once for all; answer each

It adds up in the order of the workers, and all of a team compute with the same parameters. Nobody waits for a lost worker of
the team; with the head the team is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.wire.formats import WireFormat
from ringtmp.wire.messages import Pull, Pulled, Push


@dataclass
class _Held:
    """What is under way of one key."""

    arrived: dict[int, dict[int, tuple[torch.Tensor, float, bool]]] = field(default_factory=dict)  # by step and worker
    waiting: list[tuple[int, Pull]] = field(default_factory=list)
    asked: list[Pull] = field(default_factory=list)  # of the server, not answered yet
    passed: int = -1  # the newest step whose sum the server was sent
    answers: dict[int, tuple[Pulled, list[torch.Tensor]]] = field(default_factory=dict)  # by step, for who asks late


class Proxy:
    def __init__(
        self, endpoint: Endpoint, team: Sequence[int], owners: Sequence[int], table: Sequence[Key],
        *, step: int, lag: int, wire: WireFormat, recorder: Recorder,
    ) -> None:  # fmt: skip
        """`step`: the first; `lag`: steps that a worker computes with parameters that lack its newest gradient."""
        self._lag = lag
        self._endpoint = endpoint
        self._team = list(team)
        self._owners = owners
        self._table = table
        self._wire = wire
        self._recorder = recorder
        self._keys = [_Held(passed=step - 1) for _ in table]

    def handle(self, mail: Mail) -> bool:
        message = mail.message
        if not isinstance(message, Push | Pull):
            return False
        if mail.sender not in self._team:
            raise ProtocolError(f"sent {type(message).__name__} to the head of a team that it is not in")
        if isinstance(message, Push):
            if not (given := mail.present()):
                raise ProtocolError(f"sent no gradient of key {message.key}, for which its team waits")
            self._pushed(mail.sender, message, self._wire.decode(given, self._table[message.key].size))
        else:
            self._asked(mail.sender, message)
        return True

    def pulled(self, message: Pulled, mail: Mail) -> None:
        """From a server."""
        key, held = self._table[message.key], self._keys[message.key]
        found = next((each for each in held.asked if each.step == message.step), None)
        if found is None:
            raise ProtocolError(f"sent key {message.key} for step {message.step}, which nobody asked for")
        held.asked.remove(found)
        self._recorder.received(key.layer, -1, mail.first_at, mail.arrived_at, mail.payload_bytes)
        # Whoever asks for this step later gets the same; a worker is at most one step behind what its team has pushed.
        held.answers = {step: each for step, each in held.answers.items() if step > message.step - 3}
        held.answers[message.step] = (message, mail.present())
        waiting, held.waiting = held.waiting, []
        for worker, pull in waiting:
            self._asked(worker, pull)

    def lose(self, node: int) -> None:
        if node not in self._team:
            return
        self._team.remove(node)
        for number, held in enumerate(self._keys):
            held.waiting = [each for each in held.waiting if each[0] != node]
            for step in sorted(held.arrived):
                held.arrived[step].pop(node, None)
                self._pass_on_if_complete(number, step)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _pushed(self, worker: int, push: Push, gradient: torch.Tensor) -> None:
        held = self._keys[push.key]
        # Nobody in a team can be further ahead of it: the parameters of a step come when the team has pushed those before.
        if not held.passed < push.step <= held.passed + 1 + self._lag:
            raise ProtocolError(f"sent its gradient of key {push.key} of step {push.step} out of turn")
        of_step = held.arrived.setdefault(push.step, {})
        if worker in of_step:
            raise ProtocolError(f"sent its gradient of key {push.key} of step {push.step} twice")
        of_step[worker] = (gradient, push.share, push.fresh)
        self._pass_on_if_complete(push.key, push.step)

    def _pass_on_if_complete(self, number: int, step: int) -> None:
        held = self._keys[number]
        of_step = held.arrived.get(step, {})
        if not of_step or len(of_step) < len(self._team):
            return
        del held.arrived[step]
        gradients, shares, fresh = zip(*(of_step[worker] for worker in sorted(of_step)), strict=True)
        total = gradients[0]
        for each in gradients[1:]:
            total = total.add_(each)
        tensors = self._wire.encode(total)
        self._post(self._owners[number], Push(number, step, sum(shares), any(fresh)), tensors)
        held.passed = step
        waiting, held.waiting = held.waiting, []
        for worker, pull in waiting:
            self._asked(worker, pull)

    def _asked(self, worker: int, pull: Pull) -> None:
        held = self._keys[pull.key]
        there = held.answers.get(pull.step)
        if there is not None and (not pull.exact or there[0].oldest >= pull.step):
            answer, tensors = there
            self._post(worker, Pulled(pull.key, pull.step, answer.oldest), [each.clone() for each in tensors])
            return
        held.waiting.append((worker, pull))
        # What a team is given has its own gradients in it.
        due = pull.exact or pull.step <= held.passed + 1 + self._lag
        if due and not any(each.step == pull.step and each.exact >= pull.exact for each in held.asked):
            held.asked.append(pull)
            self._endpoint.post(self._owners[pull.key], pull)

    def _post(self, node: int, message: Push | Pulled, tensors: list[torch.Tensor]) -> None:
        if node != self._endpoint.node:
            self._recorder.count_sent(sum(each.nbytes for each in tensors))
        self._endpoint.post(node, message, tensors)
