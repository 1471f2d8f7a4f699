"""What a visit has in hand: the passes it is in, mail that waits for it, and what of that is ready to be worked on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from ringtmp.errors import Misconduct, ProtocolError
from ringtmp.plan.next_action import Ready
from ringtmp.plan.route import Visit
from ringtmp.plan.sum_tree import SumTree
from ringtmp.runtime.clipping import Norms
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.stage import Stage
from ringtmp.strategies.ring.tensor_routes import Ways
from ringtmp.wire.message_parts import Edge
from ringtmp.wire.messages import Activations, Gradients


@dataclass
class Pass:
    """A training step or evaluation a visit is in."""

    turn: int
    step: int
    training: bool
    microbatches: int  # that come here: all, but for a member of a group
    count: int = 0  # of the whole pass
    summed: bool = True  # gradients are added up over the group
    forwarded: int = 0
    backwarded: int = 0
    returned: int = 0  # gradients that have come from a neighbour
    adding_up: bool = False  # a group has begun to
    went_back: set[int] = field(default_factory=set)  # microbatches whose gradient came, where they come in any order
    norms_came: bool = False
    scale_came: bool = False
    deeper_norms: Norms | None = None
    norms_sent: bool = False
    total_norm: torch.Tensor | None = None
    updated: bool = False  # what this node updates itself
    weights_came: bool = False  # what other members of its group have updated is here

    @property
    def answered(self) -> bool:
        return self.training and self.backwarded == self.microbatches


@dataclass(frozen=True)
class Share:
    """What a member of a group has of every pass: whole parts of the tree of sums."""

    tree: SumTree
    parts: range

    def microbatches(self, count: int) -> range:
        return self.tree.microbatches(self.parts, count)


@dataclass
class VisitState:
    """Passes begin and end in order. One at a time, or with delayed gradients two training steps: the second goes
    forward with weights that are there already, while the first is still on its way back."""

    visit: Visit
    stage: Stage
    staleness: int = 0
    grouped: bool = False  # some visit of the route is a group's: microbatches come in any order
    ways: Mapping[bool, Ways] = field(
        default_factory=dict
    )  # by whether it is training; empty: all goes to the next visit
    share: Share | None = None  # of a member of a group
    activations: deque[Mail] = field(default_factory=deque)
    gradients: deque[Mail] = field(default_factory=deque)
    skipped: dict[int, deque[Mail]] = field(default_factory=dict)  # activations from visits further back, by visit
    returned: dict[int, deque[Mail]] = field(default_factory=dict)  # gradients from visits further on, by visit
    passes: deque[Pass] = field(default_factory=deque)  # those begun and not ended, oldest first
    done_turn: int = 0
    updates: int = 0  # made in this generation

    @property
    def speaks(self) -> bool:
        """Whether this member speaks for its group."""
        return self.share is not None and self.share.parts.start == 0

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
        count = message.microbatches
        own = count if self.share is None else len(self.share.microbatches(count))
        summed = self.share is None or not message.training
        self.passes.append(Pass(message.turn, message.step, message.training, own, count, summed))
        return self.passes[-1]

    def arrived(self, mail: Mail) -> None:
        """Something to go forward with. Among groups several may send, and a pass of one that is ahead waits."""
        message = cast(Activations, mail.message)
        queue = self.activations if message.source < 0 else self.skipped.setdefault(message.source, deque())
        place = len(queue)
        while place and self.grouped and cast(Activations, queue[place - 1].message).turn > message.turn:
            place -= 1
        queue.insert(place, mail)

    def returns(self, mail: Mail) -> None:
        """Something to go backward with."""
        message = cast(Gradients, mail.message)
        queue = self.gradients if message.source < 0 else self.returned.setdefault(message.source, deque())
        queue.append(mail)

    def end(self) -> None:
        ended = self.passes.popleft()
        self.done_turn = ended.turn
        self.updates += ended.training

    def ready(self, clip: bool, in_flight: int, still_read: bool = False, settled: bool = True) -> Ready:
        """`still_read`: work that was left for later elsewhere needs the parameters here as they are. `settled`: what other
        members of the group have made of the steps before is applied."""
        oldest = self.current
        forward = backward = None
        if self.activations:
            head = cast(Activations, self.activations[0].message)
            sources = self.sources(head.training) if head.microbatch >= 0 else ()
            if self._may_go_forward(head, settled) and all(self._has(self.skipped, each, head) for each in sources):
                forward = head.microbatch
        answering = oldest
        if self.gradients:
            answer = cast(Gradients, self.gradients[0].message)
            if all(self._has(self.returned, each, answer) for each in self.targets):
                backward, answering = answer.microbatch, self.pass_of(answer.turn)
        closing = oldest is not None and oldest.answered
        update = (
            closing
            and oldest is not None
            and not self.stage.has_deferred(oldest.step)
            and oldest.summed
            and (not clip or oldest.total_norm is not None)
            and not still_read
            and (not oldest.updated or oldest.weights_came)
        )
        deferred = self.stage.deferred
        return Ready(
            self.visit.index, self.visit.index == 0, forward, backward,
            forwarded=answering.forwarded if answering else 0, in_flight=in_flight,
            microbatches=answering.microbatches if answering else 0, update=update, deferred=deferred,
            stored=self.stage.held + deferred, closing=closing,
        )  # fmt: skip

    def sources(self, training: bool) -> tuple[int, ...]:
        """Visits besides the one before that something must come from before a microbatch can go forward."""
        return self.ways[training].sources if self.ways else ()

    @property
    def targets(self) -> tuple[int, ...]:
        """Visits besides the next that gradients must come from before one can go backward."""
        return self.ways[True].targets if self.ways else ()

    def entering(self, count: int) -> list[tuple[int, int]]:
        """The visits from which a microbatch's `count` tensors come, and how many from each."""
        if not self.ways:
            return [(self.visit.index - 1, count)]
        return [(each.source, len(each.values)) for each in self.ways[True].entering]

    def leaving(self, training: bool, count: int) -> list[tuple[int, int]]:
        """The visits to which `count` tensors go, and how many to each."""
        if not self.ways:
            return [(self.visit.index + 1, count)]
        return [(each.target, len(each.values)) for each in self.ways[training].leaving]

    def take(self) -> tuple[Activations, list[Mail]]:
        """The next microbatch to go forward: what it comes with, the mail from the visit before it first."""
        mail = self.activations.popleft()
        message = cast(Activations, mail.message)
        tensors = message.microbatch >= 0
        more = [self._pop(self.skipped, each, message) for each in self.sources(message.training)] if tensors else []
        found = [mail, *self._matching(message, more)]
        if more:
            _agree(self.ways[message.training].entering, found)
        return message, found

    def take_back(self) -> tuple[Gradients, list[Mail]]:
        """The next microbatch to go backward, likewise."""
        mail = self.gradients.popleft()
        message = cast(Gradients, mail.message)
        more = [self._pop(self.returned, each, message) for each in self.targets]
        return message, [mail, *self._matching(message, more)]

    def _has(self, queues: Mapping[int, deque[Mail]], visit: int, message: Activations | Gradients) -> bool:
        """Whether what comes past a visit is there. Among groups it may come in another order."""
        queue = queues.get(visit, ())
        return bool(queue) and (not self.grouped or any(_moment_of(each) == _moment(message) for each in queue))

    def _pop(self, queues: Mapping[int, deque[Mail]], visit: int, message: Activations | Gradients) -> Mail:
        queue = queues[visit]
        if not self.grouped:
            return queue.popleft()
        mail = next(each for each in queue if _moment_of(each) == _moment(message))
        queue.remove(mail)
        return mail

    def _matching(self, message: Activations | Gradients, more: list[Mail]) -> list[Mail]:
        for each in more:
            other = cast(Activations | Gradients, each.message)
            if _moment(other) != _moment(message):
                raise Misconduct(f"sent microbatch {other.microbatch} of pass {other.turn} out of turn", each.sender)
        return more

    def _may_go_forward(self, message: Activations, settled: bool) -> bool:
        if not settled and (not message.training or (message.keep and self.speaks)):
            return False  # what is asked for, and kept, is a whole state
        if not self.passes or self.passes[-1].turn == message.turn:
            return True
        if message.keep:
            return False  # a snapshot is of a stage at rest
        return message.training and self.passes[-1].training and len(self.passes) <= self.staleness


def _moment(message: Activations | Gradients) -> tuple[int, int, int]:
    """What is said alike of all that belongs to a microbatch, whichever way it goes."""
    return message.turn, message.step, message.microbatch


def _moment_of(mail: Mail) -> tuple[int, int, int]:
    return _moment(cast(Activations | Gradients, mail.message))


def _agree(edges: Sequence[Edge], mail: Sequence[Mail]) -> None:
    """All that enters with a microbatch has as many samples. Who differs from most of the others is to blame; of two, the
    one that sent past a visit."""
    rows = [
        {
            len(tensor)
            for tensor, what in zip(each.tensors, edge.crossings, strict=False)
            if tensor is not None and what.per_sample
        }
        for edge, each in zip(edges, mail, strict=True)
    ]
    known = [found for found in rows if found]
    for found, each in reversed(list(zip(rows, mail, strict=True))):
        alike = known.count(found)
        if len(found) > 1 or (found and alike < len(known) and 2 * alike <= len(known)):
            raise Misconduct("sent another number of samples than came with the microbatch", each.sender)
