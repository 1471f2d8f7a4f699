"""A node's part in snapshots: copy its stages at a step boundary, send the copies on in the gaps, hold its neighbour's.

owner                          holder (clockwise neighbour)          master
take: copy of every layer
Keep, piece by piece  -------> puts the pieces together
                               checks the digest    Held ----------> of every layer: the snapshot is whole
free older <-------------------------------------------- Whole(step), to everyone
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import torch

from ringtmp.errors import SnapshotUnusable
from ringtmp.plan.route import MASTER, Route
from ringtmp.ring.checkpoint import LayerTensors
from ringtmp.ring.endpoint import Endpoint, Mail
from ringtmp.ring.parcel import Label, Parcel, pack
from ringtmp.ring.stage import Stage
from ringtmp.transport.base import Channel
from ringtmp.wire.message import Held, Keep, LayerState, Missing, Recall, Void, Whole
from ringtmp.wire.tensors import raw_bytes

PIECE_BYTES = 256 * 1024
#: A node that is never idle still sends a piece this often.
BUSY_PIECE_S = 0.05


@dataclass
class _Going:
    """A parcel on its way to the holder."""

    parcel: Parcel
    seconds: float
    sent: int = 0


@dataclass
class _Coming:
    label: Label
    body: torch.Tensor
    seconds: float = 0.0


class Keeping:
    def __init__(self, endpoint: Endpoint, route: Route, mode: str) -> None:
        self._endpoint = endpoint
        self._mode = mode
        mine = route.on(endpoint.node)
        #: Who holds this node's parcels. The master's own stay with it: with it the run ends anyway.
        self.holder = route.node(mine[0].index + 1) if endpoint.node != MASTER and mine else None
        self._going: deque[_Going] = deque()
        self._coming: dict[tuple[int, int], _Coming] = {}
        self._last_piece = 0.0

    def take(self, step: int, stage: Stage) -> None:
        """Copy what lies here, as it is before `step`."""
        self._going = deque(each for each in self._going if each.parcel.label.step == step)
        for layer in stage.visit.layers:
            began = self._endpoint.clock()
            parcel = pack(step, layer, *stage.layer_state(layer))
            if not parcel.label.size:
                continue
            parcel = parcel.sealed()
            trouble = self._endpoint.shelf.put(parcel, self._mode)
            seconds = self._endpoint.clock() - began
            if trouble is not None or self.holder is None:
                self._endpoint.post(MASTER, Held(step, layer, self._endpoint.node, seconds, 0.0, trouble or ""))
            else:
                self._going.append(_Going(parcel, seconds))

    def send_some(self, idle: bool) -> bool:
        """The next piece, if the one before has arrived and training has a gap. True if one went out."""
        if not self._going or self.holder is None:
            return False
        now = self._endpoint.clock()
        if not idle and now - self._last_piece < BUSY_PIECE_S:
            return False
        if self._endpoint.in_flight_bytes(self.holder, Channel.BULK):
            return False
        going = self._going[0]
        label, start = going.parcel.label, going.sent
        piece = going.parcel.body[start : start + PIECE_BYTES]
        going.sent += piece.numel()
        going.seconds += self._endpoint.clock() - now
        last = going.sent == label.size
        message = Keep(
            label.step, label.layer, start, going.seconds, msgspec.msgpack.encode(label) if not start else b""
        )
        self._endpoint.post(self.holder, message, [piece])
        if last:
            self._going.popleft()
        self._last_piece = now
        return True

    def handle(self, mail: Mail) -> bool:
        message = mail.message
        if isinstance(message, Keep):
            self._receive(message, mail)
        elif isinstance(message, Whole):
            self._endpoint.shelf.free(message.step)
        elif isinstance(message, Void):
            self._going.clear()
            self._endpoint.shelf.forget(message.step)
        elif isinstance(message, Recall):
            try:
                tensors, state = self.recalled(message.step, message.layer)
            except SnapshotUnusable as error:
                self._endpoint.post(MASTER, Missing(message.layer, str(error)))
            else:
                self._endpoint.post(MASTER, LayerState(message.layer, tuple(state)), [*tensors, *state.values()])
        else:
            return False
        return True

    def recalled(self, step: int, layer: int) -> LayerTensors:
        parcel = self._endpoint.shelf.get(step, layer)
        if parcel is None:
            raise SnapshotUnusable(f"node {self._endpoint.node} has no layer {layer} as of step {step}")
        return parcel.unpack()

    def _receive(self, message: Keep, mail: Mail) -> None:
        began = self._endpoint.clock()
        key = (mail.sender, message.layer)
        piece = mail.present()[0]
        if message.start == 0:
            label = msgspec.msgpack.decode(message.label, type=Label)
            body = piece if label.size == piece.numel() else torch.empty(label.size, dtype=torch.uint8)
            self._coming[key] = _Coming(label, body)
        coming = self._coming[key]
        if coming.body is not piece:
            raw_bytes(coming.body)[message.start : message.start + piece.numel()] = raw_bytes(piece)
        if message.start + piece.numel() == coming.label.size:
            del self._coming[key]
            self._hold(message, mail.sender, coming, began)
        else:
            coming.seconds += self._endpoint.clock() - began

    def _hold(self, message: Keep, owner: int, coming: _Coming, began: float) -> None:
        """Whole: say so, or why not."""
        parcel = Parcel(coming.label, coming.body)
        trouble: str | None
        try:
            parcel.check()
        except SnapshotUnusable as error:
            trouble = str(error)
        else:
            trouble = self._endpoint.shelf.put(parcel, self._mode)
        seconds = coming.seconds + self._endpoint.clock() - began
        self._endpoint.post(
            MASTER, Held(coming.label.step, message.layer, owner, message.seconds, seconds, trouble or "")
        )
