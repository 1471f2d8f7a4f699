"""Layers come to a node and leave it: from the master, from the node's own snapshots, and back to the master."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from ringtmp.errors import ProtocolError, SnapshotUnusable
from ringtmp.model import portable_layer
from ringtmp.model.frozen_parameters import frozen_names, with_frozen, without_frozen
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.route import MASTER
from ringtmp.runtime.checkpoint import LayerTensors
from ringtmp.runtime.mailbox import Endpoint
from ringtmp.strategies.ring.exchange_snapshots import NodeSnapshots
from ringtmp.strategies.ring.segment_queue import VisitState
from ringtmp.wire.messages import Fetch, LayerState, Missing, Place, Placed, Restore, Setup


class NodeLayers:
    """The layers of every visit on one node."""

    def __init__(
        self, endpoint: Endpoint, setup: Setup, visits: Mapping[int, VisitState], snapshots: NodeSnapshots
    ) -> None:
        self._endpoint = endpoint
        self._route, self._aside, self._first_step = setup.route, setup.aside, setup.step
        #: Where members of a group each have all of a stage, and only then, it may go on without the one that is lost.
        self._hands_over = setup.route.grouped and not (setup.late or setup.shares_state or setup.recipe.staleness)
        self._visits = visits
        self._snapshots = snapshots
        self._fetches: deque[Fetch] = deque()

    def fetch(self, message: Fetch) -> None:
        """The layer goes to the master when the updates before the message's step are made."""
        self._fetches.append(message)

    def place(self, message: Place, tensors: Sequence[torch.Tensor | None]) -> None:
        layer = portable_layer.decode(message.graph)
        given = [each for each in tensors if each is not None]
        own = len(layer.tensors)
        if len(given) != own + len(message.state):
            raise ProtocolError(
                f"layer {layer.name} came with {len(given)} tensors instead of {own + len(message.state)}"
            )
        self._move_in(message.layer, layer, (given[:own], dict(zip(message.state, given[own:], strict=True))))

    def _move_in(self, index: int, layer: Layer, given: LayerTensors) -> None:
        stage = self._visits[self._route.holder(index).index].stage
        stage.place(index, layer, *given)
        if self._aside:
            self._endpoint.snapshots.keep_frozen(index, stage.frozen(index))
        self._endpoint.post(MASTER, Placed(index))

    def hand_over(self) -> None:
        """This generation ends. What lies here is left to the next as it is, unless it is on its way into a step or out of one:
        then what the generation before left still stands, if there is any."""
        states: dict[tuple[int, int], LayerTensors] = {}
        for state in self._visits.values():
            stage = state.stage
            if not self._hands_over or stage.changes is None or (state.passes and stage.changes):
                return
            for index in stage.visit.layers:
                frozen = stage.frozen_of(index) if self._aside else ()
                states[self._first_step + state.updates, index] = stage.layer_state(index, frozen)
        self._endpoint.snapshots.hand_over(states)

    def begin_work(self) -> None:
        """From here on what the generation before left is changed."""
        self._endpoint.snapshots.claim()

    def restore(self, message: Restore) -> None:
        layer = portable_layer.decode(message.graph)
        frozen = frozen_names(layer, self._aside)
        kept = self._endpoint.snapshots.frozen(message.layer)
        try:
            if kept.keys() != frozen:
                raise SnapshotUnusable(
                    f"node {self._endpoint.node} has not the frozen parameters of layer {message.layer}"
                )
            others = without_frozen(layer, frozen)
            tensors, state = self._snapshots.recalled(message.step, message.layer) if others else ([], {})
            if len(tensors) != len(others):
                raise SnapshotUnusable(
                    f"node {self._endpoint.node} has {len(tensors)} tensors of layer {message.layer}"
                )
        except SnapshotUnusable as error:
            self._endpoint.post(MASTER, Missing(message.layer, str(error)))
            return
        self._move_in(message.layer, layer, (with_frozen(layer, tensors, kept), state))

    def answer_fetches(self, step: int) -> None:
        """The master's step ends with its own update. Where the last gradient has only just left, the update here is
        still to be made, and a layer sent before it would be one of the step before."""
        while self._fetches and self._fetches[0].step <= step:
            self._send_layer(self._fetches.popleft().layer)

    def _send_layer(self, index: int) -> None:
        stage = self._visits[self._route.holder(index).index].stage
        tensors, state = stage.layer_state(index, stage.frozen_of(index) if self._aside else ())
        self._endpoint.post(MASTER, LayerState(index, tuple(state)), [*tensors, *state.values()])
