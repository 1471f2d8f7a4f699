"""A snapshot of a stage whose optimizer state is shared: every member copies what it keeps, and the first puts it together.

member                              first of the group
before step s: a copy  GroupState   before step s: a copy of the weights and of what it keeps itself
of what it keeps       -----------> all parts of a layer are here: the layer is whole, and goes the way of any snapshot

So there is one snapshot of the stage, with all of its state, and whoever goes back to it may be of groups of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ringtmp.errors import ProtocolError
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.route import Visit
from ringtmp.runtime.check_node_replies import optimizer_state
from ringtmp.runtime.checkpoint import LayerTensors, StateName
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.stage import Stage
from ringtmp.wire.messages import GroupState


def copied(state: dict[StateName, torch.Tensor]) -> dict[StateName, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


@dataclass
class _Parts:
    """Of a layer before a step."""

    own: LayerTensors | None = None
    others: dict[int, dict[StateName, torch.Tensor]] = field(default_factory=dict)  # by member


class GatheredState:
    """Of one visit, on the first of its group."""

    def __init__(self, visit: Visit, layer_of: Callable[[int], Layer]) -> None:
        self._visit, self._layer_of = visit, layer_of
        self._step = -1  # of the newest snapshot that was taken here, or given up
        self._given_up = False
        self._parts: dict[tuple[int, int], _Parts] = {}  # by step and layer
        self._said: dict[int, tuple[int, set[int]]] = {}  # by member: its newest step, and which layers of it

    def take(self, step: int, stage: Stage, frozen: Callable[[int], frozenset[str]]) -> None:
        """A copy of what lies here."""
        self._step, self._given_up = step, False
        self._parts = {key: each for key, each in self._parts.items() if key[0] == step}
        for layer in stage.visit.layers:
            tensors, state = stage.layer_state(layer, frozen(layer))
            self._parts.setdefault((step, layer), _Parts()).own = [each.clone() for each in tensors], copied(state)

    def put(self, mail: Mail) -> None:
        """Of the snapshot taken here, or of the next: a member that is ahead, or says so, takes nothing from this one."""
        message = mail.message
        assert isinstance(message, GroupState)
        if message.step < self._step or (message.step == self._step and self._given_up):
            return
        for (step, layer), each in tuple(self._parts.items()):
            if self._step < step < message.step:  # there was no such snapshot
                each.others.pop(mail.sender, None)
                if not each.others:
                    del self._parts[step, layer]
        parts = self._parts.setdefault((message.step, message.layer), _Parts())
        parts.others[mail.sender] = dict(zip(message.state, mail.present(), strict=True))

    def whole(self) -> Iterator[tuple[int, int, LayerTensors]]:
        """Step, layer and all of it: each once, and then let go."""
        for (step, layer), parts in tuple(self._parts.items()):
            if parts.own is not None and len(parts.others) == len(self._visit.others):
                del self._parts[step, layer]
                tensors, state = parts.own
                for other in parts.others.values():
                    state |= other
                yield step, layer, (tensors, state)

    def drop(self, step: int) -> None:
        """There will be no snapshot of this step."""
        if step >= self._step:
            self._step, self._given_up = step, True
            self._parts = {key: each for key, each in self._parts.items() if key[0] > step}

    def check(self, sender: int, message: GroupState, step: int) -> None:
        """ProtocolError: not now, or not what a member may keep of a layer. `step`: updates done here."""
        if message.layer not in self._visit.layers:
            raise ProtocolError(f"sent the state of layer {message.layer}, which its group does not hold")
        if message.step > step + 1:  # a member may begin a step while this one is still in the step before
            raise ProtocolError(f"sent the state of step {message.step} in step {step}")
        newest, layers = self._said.get(sender, (-1, set()))
        if message.step < newest or (message.step == newest and message.layer in layers):
            raise ProtocolError(f"sent the state of layer {message.layer} twice")
        if message.step > newest >= 0 and len(layers) < len(self._visit.layers):
            raise ProtocolError(f"sent the state of step {message.step} before all of step {newest}")
        optimizer_state(self._layer_of(message.layer), message.state, message.tensors)
        self._said[sender] = message.step, {message.layer, *(layers if message.step == newest else ())}
