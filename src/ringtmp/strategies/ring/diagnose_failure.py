"""The master asks everyone what is wrong: who holds a pass up, and where values stopped being finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringtmp.errors import LinkLost, LossNotFinite
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.route import MASTER
from ringtmp.runtime.losses import what_to_try_when_not_finite
from ringtmp.strategies.ring.node import Node
from ringtmp.wire.messages import Inspect, Inspected

ANSWER_LIMIT_S = 5.0
ASK_AGAIN_S = 2.0
NO_MICROBATCH = -1


class NotFinite(Exception):  # noqa: N818
    def __init__(self, step: int, microbatch: int, loss: float) -> None:
        super().__init__(step, microbatch, loss)
        self.step, self.microbatch, self.loss = step, microbatch, loss


class WhatIsWrong:
    """`work` takes what has come and does a piece of work; `listen` takes answers and does nothing else."""

    def __init__(
        self, node: Node, layers: Sequence[Layer], work: Callable[[], object], listen: Callable[[], object]
    ) -> None:
        self._endpoint = node.endpoint
        self._node = node
        self._layers = layers
        self._work = work
        self._listen = listen
        self._inspected: dict[int, Inspected] = {}

    def heard(self, sender: int, answer: Inspected) -> None:
        self._inspected[sender] = answer

    def look_for_a_broken_link(self, step: int) -> None:
        """Two that answer the master and not each other. Asked twice: one that was merely busy has answered by then."""
        silent = self._silent_pairs()
        limit = self._endpoint.clock() + ASK_AGAIN_S
        while silent and self._endpoint.clock() < limit:
            self._work()
        for first, second in silent & self._silent_pairs() if silent else ():
            text = (
                f"nodes {first} and {second} cannot reach each other in step {step}, although the master can reach both"
            )
            raise LinkLost(text, first, second)

    def _silent_pairs(self) -> set[tuple[int, int]]:
        mute = self._ask_everyone(NO_MICROBATCH, self._work)
        return {
            (node, peer)
            for node, answer in self._inspected.items()
            for peer in answer.unheard
            if peer != MASTER and peer not in mute
        }

    def silent_node(self) -> int | None:
        """One that does not answer a question any more: it holds the ring up, and is as good as lost."""
        mute = self._ask_everyone(NO_MICROBATCH, self._work)
        return mute[0] if mute else None

    def waiting_for(self, step: int) -> str:
        for index, state in sorted(self._node.visits.items()):
            if state.current is not None:
                current = state.current
                neighbour = min(index + 1, self._node.route.last)
                return (
                    f"node {self._node.route.node(neighbour)} in step {step}: "
                    f"{current.backwarded} of {current.microbatches} microbatches are back at visit {index}"
                )
        return f"node {self._node.route.node(self._node.route.last - 1)} in step {step}"

    def _ask_everyone(self, microbatch: int, meanwhile: Callable[[], object]) -> list[int]:
        """Where are values not finite, and who is not heard? Returns the nodes that do not answer."""
        others = [node for node in self._node.route.nodes() if node != MASTER]
        self._inspected.clear()
        for node in others:
            self._endpoint.post(node, Inspect(microbatch))
        limit = self._endpoint.clock() + ANSWER_LIMIT_S
        while len(self._inspected) < len(others) and self._endpoint.clock() < limit:
            meanwhile()
        return [node for node in others if node not in self._inspected]

    def not_finite(self, found: NotFinite) -> LossNotFinite:
        """Ask everyone where values first stopped being finite."""
        self._ask_everyone(found.microbatch, self._listen)  # nobody works on with such values
        bad = [visit for each in self._inspected.values() for visit in each.bad]
        bad += [index for index, state in self._node.visits.items() if not state.stage.finite(found.microbatch)]
        where = "in the loss itself, on the master"
        if bad:
            visit = self._node.route.visits[min(bad)]
            name = "the master" if visit.node == MASTER else f"node {visit.node}"
            span = f"{self._layers[visit.first].name} to {self._layers[visit.stop - 1].name}"
            where = f"first in what {name} computed (layers {span})"
        return LossNotFinite(
            f"the loss is {found.loss} in step {found.step}, {where}: {what_to_try_when_not_finite(found.step)}"
        )
