"""Between a step's last gradient and its update: groups add up their gradients, and norms go round for clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringtmp.plan.route import Route
from ringtmp.runtime.clipping import total_norm
from ringtmp.strategies.ring.group_sums import GroupSums
from ringtmp.strategies.ring.segment_queue import Pass, VisitState
from ringtmp.wire.messages import Norms, Scale


class SumsAndNorms:
    """On one node, for all its visits."""

    def __init__(
        self,
        node: int,
        route: Route,
        groups: Mapping[int, GroupSums],
        clip: bool,
        *,
        post: Callable[[int, Any, Sequence[torch.Tensor | None]], None],
        parameter_order: Sequence[int],
    ) -> None:
        """`parameter_order`: of the norms that reach the front, where layers do not go by it."""
        self._me, self._route = node, route
        self._groups = groups
        self._clip = clip
        self._post = post
        self._parameter_order = parameter_order

    def last_backward(self, state: VisitState, current: Pass) -> None:
        """The last microbatch here is about to go backward, or there is none: a group begins to add up."""
        group = self._groups.get(state.visit.index)
        if group is not None:
            group.begin(current.turn, current.step)

    def add_up_if_complete(self, state: VisitState, current: Pass) -> None:
        """A group adds up what its members have, when all of it is there; then norms may go on."""
        group = self._groups.get(state.visit.index)
        complete = current.answered and not state.stage.has_deferred(current.step)
        if group is not None and complete and not current.adding_up:
            current.adding_up = True
            if group.finish():
                self.summed(state, current)
        elif group is None and self._clip:
            self.pass_norms_on(state, current)

    def summed(self, state: VisitState, current: Pass) -> None:
        current.summed = True
        if self._clip:
            self.pass_norms_on(state, current)

    def pass_norms_on(self, state: VisitState, current: Pass) -> None:
        """Norms travel anticlockwise behind the last gradients; the front adds them up and sends the total clockwise."""
        at_tail = state.visit.index == self._route.last
        if current.norms_sent or not current.answered or state.stage.has_deferred(current.step):
            return
        if not current.summed or state.visit.node != self._me:  # of a group the first speaks for all
            return
        if current.deeper_norms is None and not at_tail:
            return
        own = state.stage.gradient_norms(current.step)
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
