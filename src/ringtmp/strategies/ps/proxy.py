"""The head of a team: to its team a server, to the servers, or to the head above it, one worker.

    on push(key, g, t) from below:   g_t <- g_t + g;  of all below and itself: push(key, g_t, t) to whoever is above
    on pull(key, t) from below:      pull(key, t) from whoever is above, once for all; answer each

It adds up in the order of the workers, and all below it compute with the same parameters. Where a team sums by all-reduce
(team_sums.py), its sum comes as the head's own gradient, and its members only pull. Nobody waits for a lost worker at the foot
of the tree; with a head, those below it are lost to the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ringtmp.errors import ProtocolError, Unasked
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.strategies.data_parallel.dealt_shares import CLOSE, shares_dealt
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.strategies.ps.teams import Team, Teams
from ringtmp.wire.formats import WireFormat
from ringtmp.wire.messages import Pull, Pulled, Push, Work


@dataclass
class _Held:
    """What is under way of one key."""

    arrived: dict[int, dict[int, tuple[torch.Tensor, Push]]] = field(default_factory=dict)  # by step and worker
    waiting: list[tuple[int, Pull]] = field(default_factory=list)
    asked: list[Pull] = field(default_factory=list)  # of whoever is above, not answered yet
    passed: int = -1  # the newest step whose sum was passed on
    answers: dict[int, tuple[Pulled, list[torch.Tensor]]] = field(default_factory=dict)  # by step, for who asks late


class Proxy:
    def __init__(
        self, endpoint: Endpoint, teams: Teams, ring: Team, *, above: Sequence[int], table: Sequence[Key], step: int,
        lag: int, wire: WireFormat, recorder: Recorder,
    ) -> None:  # fmt: skip
        """`ring`: its own team, if that sums by all-reduce; `above`: by key, who gets its sum; `step`: the first; `lag`: steps
        that a worker computes with parameters that lack its newest gradient."""
        me = endpoint.node
        self._me = me
        self._lag = lag
        self._endpoint = endpoint
        self._pulling = {me, *teams.below(me)}
        self._pushing = self._pulling - set(ring) | {me}
        self._beneath = {worker: teams.beneath(worker) for worker in self._pushing} | {me: ring or (me,)}
        self._above = above
        self._table = table
        self._wire = wire
        self._recorder = recorder
        self._keys = [_Held(passed=step - 1) for _ in table]
        self._dealt: dict[int, Mapping[int, float]] = {}  # by step: the share of a batch that each one's gradient is of

    def takes_from(self, node: int) -> bool:
        """Whether parameters come from there."""
        return node in self._above and node != self._me

    def dealt(self, work: Work, workers: Sequence[int]) -> None:
        """What the master gave this worker of a step says what it gave the others, who are these."""
        shares = shares_dealt(work, workers)
        self._dealt[work.step] = {
            each: sum(shares.get(worker, 0.0) for worker in beneath) for each, beneath in self._beneath.items()
        }

    def handle(self, mail: Mail) -> bool:
        message = mail.message
        if not isinstance(message, Push | Pull):
            return False
        if mail.sender not in (self._pushing if isinstance(message, Push) else self._pulling):
            raise ProtocolError(f"sent {type(message).__name__} to the head of a team that it is not in")
        if isinstance(message, Push):
            if not (given := mail.present()):
                raise ProtocolError(f"sent no gradient of key {message.key}, for which its team waits")
            self._pushed(mail.sender, message, self._wire.decode(given, self._table[message.key].size))
        else:
            self._asked(mail.sender, message)
        return True

    def pulled(self, message: Pulled, mail: Mail) -> None:
        """From above."""
        key, held = self._table[message.key], self._keys[message.key]
        found = next((each for each in held.asked if each.step == message.step), None)
        if found is None:
            raise Unasked(message.key, message.step)
        held.asked.remove(found)
        self._recorder.received(key.layer, -1, mail.first_at, mail.arrived_at, mail.payload_bytes)
        # Whoever asks for this step later gets the same; a worker is at most one step behind what its team has pushed.
        held.answers = {step: each for step, each in held.answers.items() if step > message.step - 3}
        held.answers[message.step] = (message, mail.present())
        waiting, held.waiting = held.waiting, []
        for worker, pull in waiting:
            self._asked(worker, pull)

    def lose(self, node: int) -> None:
        self._pulling.discard(node)
        self._pushing.discard(node)
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
        of_step[worker] = (gradient, push)
        self._pass_on_if_complete(push.key, push.step)

    def _pass_on_if_complete(self, number: int, step: int) -> None:
        held = self._keys[number]
        of_step = held.arrived.get(step, {})
        if not of_step or len(of_step) < len(self._pushing):
            return
        share = self._checked_share(of_step)
        if share is None:
            return  # it goes on when the run has let go of whoever lied
        del held.arrived[step]
        gradients, pushes = zip(*(of_step[worker] for worker in sorted(of_step)), strict=True)
        total = gradients[0]
        for each in gradients[1:]:
            total = total.add_(each)
        self._post(
            self._above[number], Push(number, step, share, any(push.fresh for push in pushes)), self._wire.encode(total)
        )
        held.passed = step
        if all(each.passed >= step for each in self._keys):
            self._dealt.pop(step, None)
        waiting, held.waiting = held.waiting, []
        for worker, pull in waiting:
            self._asked(worker, pull)

    def _checked_share(self, of_step: Mapping[int, tuple[torch.Tensor, Push]]) -> float | None:
        """Of the batch, that these gradients are of; None: somebody says another than it was dealt. Checked when the head's own
        is there, because then what was dealt is known, and nobody can have passed on less than that but for a loss below it."""
        dealt = self._dealt[next(iter(of_step.values()))[1].step]
        shares = {}
        for worker, (_, push) in of_step.items():
            mine, most = worker == self._me, dealt[worker]
            least = most if len(self._beneath[worker]) == 1 else 0.0
            if not (mine or least - CLOSE <= push.share <= most + CLOSE):
                text = f"says that its gradient of key {push.key} is of {push.share:.6g} of step {push.step}, not of {most:.6g}"
                self._endpoint.offended(worker, text)
                return None
            shares[worker] = most if mine else push.share
        return min(1.0, sum(shares[worker] for worker in sorted(shares)))  # rounding may add a little

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
            self._endpoint.post(self._above[pull.key], pull)

    def _post(self, node: int, message: Push | Pulled, tensors: list[torch.Tensor]) -> None:
        if node != self._endpoint.node:
            self._recorder.count_sent(sum(each.nbytes for each in tensors))
        self._endpoint.post(node, message, tensors)
