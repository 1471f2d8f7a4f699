"""Between a step's last gradient and the end of its update: groups add up their gradients, norms go round for clipping, and
where a group shares the optimizer state its members hand each other what they have updated. Where members do not wait for
each other's gradients, each makes its own update and tells the others what that changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ringtmp.errors import ProtocolError
from ringtmp.runtime.clipping import total_norm
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.stage import layer_of
from ringtmp.strategies.ring.gather_state import GatheredState
from ringtmp.strategies.ring.group_sums import GroupSums
from ringtmp.strategies.ring.late_sums import LateSums
from ringtmp.strategies.ring.pass_order import PassOrder
from ringtmp.strategies.ring.segment_queue import Pass, VisitState
from ringtmp.strategies.ring.shared_state import SharedState
from ringtmp.wire.messages import GroupChange, GroupNorms, GroupSum, GroupWeights, Norms, Scale, Setup


class SumsAndNorms:
    """On one node, for all its visits."""

    def __init__(
        self,
        node: int,
        setup: Setup,
        visits: Mapping[int, VisitState],
        *,
        post: Callable[[int, Any, Sequence[torch.Tensor | None]], None],
        post_sum: Callable[[int, Any, Sequence[torch.Tensor]], None],
        parameter_order: Sequence[int],
    ) -> None:
        """`post_sum`: while a stage goes backward, which has not ended with this. `parameter_order`: of the norms that reach
        the front, where layers do not go by it."""
        self._me, self._route = node, setup.route
        shares = setup.shares_state
        self.groups = {
            index: GroupSums(state.visit, node, setup.tree, state.stage, post_sum, shares)
            for index, state in visits.items()
            if state.share is not None and not setup.late
        }
        self.sharing = {
            index: SharedState(visits[index].visit, node, visits[index].stage, sums, post_sum)
            for index, sums in self.groups.items()
            if shares
        }
        self._orders = {index: PassOrder(partial(self._owed, index)) for index in self.groups}
        #: On the first of a group, whose members each keep some of the optimizer state.
        self.gathered = {
            index: GatheredState(visits[index].visit, partial(layer_of, visits[index].stage))
            for index in self.sharing
            if visits[index].visit.node == node
        }
        self.late = {
            index: LateSums(state.visit, node, state.stage, bound=setup.late, step=setup.step, post=post_sum)
            for index, state in visits.items()
            if state.share is not None and setup.late
        }
        self._clip = setup.recipe.clip_norm is not None
        self._post = post
        self._parameter_order = parameter_order

    def hear(self, state: VisitState, mail: Mail) -> None:
        message: Any = mail.message
        if isinstance(message, GroupChange):
            self._take_change(state, mail)
            return
        sharing, index = self.sharing.get(message.visit), message.visit
        current = next((each for each in state.passes if each.turn == message.turn), None)
        if isinstance(message, GroupSum):
            if self.groups[index].take(mail):
                self.summed(state, state.pass_of(message.turn))
        elif isinstance(message, GroupNorms) and sharing is not None:
            sharing.take_norms(mail)
            if current is not None:
                self.pass_norms_on(state, current)
        elif isinstance(message, GroupWeights) and sharing is not None:
            sharing.take_weights(mail)
            if current is not None:
                current.weights_came = sharing.weights_came(message.turn)
        elif isinstance(message, Norms):
            current = state.pass_of(message.turn)
            current.deeper_norms = [each.reshape(-1) for each in mail.tensors if each is not None]
            self.pass_norms_on(state, current)
        elif isinstance(message, Scale):
            (total,) = mail.present()
            self.scale(state, state.pass_of(message.turn), total)

    def check(self, sender: int, state: VisitState, message: GroupSum | GroupNorms | GroupWeights) -> None:
        """ProtocolError: not what another member owes this one of a pass, or not now."""
        index, current = message.visit, state.current
        if state.stage.changes is None:
            raise ProtocolError(f"sent {type(message).__name__} before there is anything to agree on")
        what = (
            self.groups[index].check(message) if isinstance(message, GroupSum) else self.sharing[index].check(message)
        )
        under_way = current.turn if current is not None and current.training else None
        self._orders[index].check(sender, message.turn, what, state.done_turn, under_way)

    def _owed(self, index: int, sender: int) -> Iterator[str]:
        yield from self.groups[index].owed_by(sender)
        if index in self.sharing:
            yield from self.sharing[index].owed_by(sender, self._clip)

    def _take_change(self, state: VisitState, mail: Mail) -> None:
        late, current = self.late[state.visit.index], state.current
        late.take(mail)
        if current is None:
            late.apply()
        elif current.adding_up:
            current.summed = late.may_update(current.step)

    def settled(self, visit: int | None = None) -> bool:
        """Whether all that other members have made of the steps done here is applied: at a visit, or all of them."""
        return not self.late or all(late.settled for index, late in self.late.items() if visit in (None, index))

    @property
    def oldest(self) -> int | None:
        """Where members do not wait: before this step's work began, all that others made of the steps before this one was
        applied."""
        return min((late.oldest for late in self.late.values()), default=None)

    def leave(self) -> None:
        """Let go of the stages."""
        self.late.clear()
        self.groups.clear()
        self.sharing.clear()
        self.gathered.clear()

    def last_backward(self, state: VisitState, current: Pass) -> None:
        """The last microbatch here is about to go backward, or there is none: a group begins to add up."""
        group = self.groups.get(state.visit.index)
        if group is not None:
            self._orders[state.visit.index].nobody_left_out(current.turn)
            group.begin(current.turn, current.step)

    def add_up_if_complete(self, state: VisitState, current: Pass) -> None:
        """A group adds up what its members have, when all of it is there; then norms may go on."""
        group = self.groups.get(state.visit.index)
        late = self.late.get(state.visit.index)
        complete = current.answered and not state.stage.has_deferred(current.step)
        if group is not None and complete and not current.adding_up:
            current.adding_up = True
            if group.finish():
                self.summed(state, current)
        elif late is not None and complete and not current.adding_up:
            current.adding_up, current.summed = True, late.may_update(current.step)
        elif group is None and self._clip:
            self.pass_norms_on(state, current)

    def summed(self, state: VisitState, current: Pass) -> None:
        current.summed = True
        sharing = self.sharing.get(state.visit.index)
        if self._clip and sharing is not None and state.visit.node != self._me:
            sharing.say_norms(current.turn, current.step)
        if self._clip:
            self.pass_norms_on(state, current)

    def update(self, state: VisitState, current: Pass) -> None:
        """Twice where others update some of the parameters: when the step may end, and when theirs have come."""
        sharing, late = self.sharing.get(state.visit.index), self.late.get(state.visit.index)
        if late is not None:
            late.update(current)
            state.end()
            return
        if not current.updated:
            state.stage.step(current.step, current.total_norm)
            current.updated = True
            if sharing is not None:
                sharing.send_weights(current.turn)
                current.weights_came = sharing.weights_came(current.turn)
                if not current.weights_came:
                    return
        if sharing is not None:
            sharing.put_weights(current.turn)
        state.end()

    def pass_norms_on(self, state: VisitState, current: Pass) -> None:
        """Norms travel anticlockwise behind the last gradients; the front adds them up and sends the total clockwise."""
        at_tail = state.visit.index == self._route.last
        if current.norms_sent or not current.answered or state.stage.has_deferred(current.step):
            return
        if not current.summed or state.visit.node != self._me:  # of a group the first speaks for all
            return
        if current.deeper_norms is None and not at_tail:
            return
        sharing = self.sharing.get(state.visit.index)
        own = state.stage.gradient_norms(current.step) if sharing is None else sharing.norms(current.turn, current.step)
        if own is None:
            return
        norms = [*own, *(current.deeper_norms or ())]
        current.norms_sent = True
        if state.visit.index > 0:
            before = state.visit.index - 1
            self._post(self._route.node(before), Norms(current.turn, before), norms)
        else:
            self.scale(state, current, total_norm(norms, self._parameter_order))

    def scale(self, state: VisitState, current: Pass, total: torch.Tensor) -> None:
        current.total_norm = total
        if state.visit.index < self._route.last and state.visit.node == self._me:
            behind = state.visit.index + 1
            for member in self._route.visits[behind].members:
                self._post(member, Scale(current.turn, behind), [total])
