"""What a visit has in hand: the passes it is in, mail that waits for it, and what of that is ready to be worked on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import cast

import torch

from ringtmp.errors import ProtocolError
from ringtmp.plan.next_action import Ready
from ringtmp.plan.route import Visit
from ringtmp.runtime.clipping import Norms
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.stage import Stage
from ringtmp.wire.messages import Activations, Gradients


@dataclass
class Pass:
    """A training step or evaluation a visit is in."""

    turn: int
    step: int
    training: bool
    microbatches: int
    forwarded: int = 0
    backwarded: int = 0
    returned: int = 0  # gradients that have come from a neighbour
    norms_came: bool = False
    scale_came: bool = False
    deeper_norms: Norms | None = None
    norms_sent: bool = False
    total_norm: torch.Tensor | None = None

    @property
    def answered(self) -> bool:
        return self.training and self.backwarded == self.microbatches


@dataclass
class VisitState:
    """Passes begin and end in order. One at a time, or with delayed gradients two training steps: the second goes
    forward with weights that are there already, while the first is still on its way back."""

    visit: Visit
    stage: Stage
    staleness: int = 0
    activations: deque[Mail] = field(default_factory=deque)
    gradients: deque[Mail] = field(default_factory=deque)
    passes: deque[Pass] = field(default_factory=deque)  # those begun and not ended, oldest first
    done_turn: int = 0

    @property
    def current(self) -> Pass | None:
        """The oldest pass that has not ended."""
        return self.passes[0] if self.passes else None

    def pass_of(self, turn: int) -> Pass:
        for each in self.passes:
            if each.turn == turn:
                return each
        raise ProtocolError(f"visit {self.visit.index} is not in pass {turn}, for which something came")

    def begins(self, message: Activations) -> bool:
        """Whether this forward is the first of its pass."""
        return not self.passes or self.passes[-1].turn != message.turn

    def begin(self, message: Activations) -> Pass:
        """The pass a forward belongs to, begun if this is its first."""
        if self.passes and self.passes[-1].turn == message.turn:
            return self.passes[-1]
        last = self.passes[-1].turn if self.passes else self.done_turn
        if message.turn != last + 1:
            raise ProtocolError(f"pass {message.turn} reached visit {self.visit.index} after pass {last}")
        self.passes.append(Pass(message.turn, message.step, message.training, message.microbatches))
        return self.passes[-1]

    def end(self) -> None:
        self.done_turn = self.passes.popleft().turn

    def ready(self, clip: bool, in_flight: int) -> Ready:
        oldest = self.current
        forward = backward = None
        if self.activations:
            head = cast(Activations, self.activations[0].message)
            if self._may_go_forward(head):
                forward = head.microbatch
        answering = oldest
        if self.gradients:
            answer = cast(Gradients, self.gradients[0].message)
            backward, answering = answer.microbatch, self.pass_of(answer.turn)
        closing = oldest is not None and oldest.answered
        update = (
            closing
            and oldest is not None
            and not self.stage.has_deferred(oldest.step)
            and (not clip or oldest.total_norm is not None)
        )
        deferred = self.stage.deferred
        return Ready(
            self.visit.index, self.visit.index == 0, forward, backward,
            forwarded=answering.forwarded if answering else 0, in_flight=in_flight,
            microbatches=answering.microbatches if answering else 0, update=update, deferred=deferred,
            stored=self.stage.held + deferred, closing=closing,
        )  # fmt: skip

    def _may_go_forward(self, message: Activations) -> bool:
        if not self.passes or self.passes[-1].turn == message.turn:
            return True
        if message.keep:
            return False  # a snapshot is of a stage at rest
        return message.training and self.passes[-1].training and len(self.passes) <= self.staleness
