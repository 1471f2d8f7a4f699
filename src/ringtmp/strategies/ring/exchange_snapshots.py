"""A node's part in snapshots: copy its stages at a step boundary, send the copies on in the gaps, hold its neighbour's.

owner                          holder (clockwise neighbour)          master
take: copy of every layer
Keep, piece by piece  -------> puts the pieces together
                               checks the digest    Held ----------> of every layer: the snapshot is whole
free older <-------------------------------------------- Whole(step), to everyone
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ringtmp.errors import ProtocolError, SnapshotUnusable
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.route import MASTER, Route, holder_of
from ringtmp.runtime.checkpoint import LayerTensors
from ringtmp.runtime.layer_snapshot import Label, laid_out
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.optimizers import state_values
from ringtmp.runtime.snapshot_store import room_bytes
from ringtmp.runtime.stage import Stage
from ringtmp.strategies.ring.gather_state import GatheredState
from ringtmp.transport.base import Channel
from ringtmp.units import bytes_text
from ringtmp.wire.messages import Held, Keep, LayerState, Missing, Recall, Recipe, Void, Whole
from ringtmp.wire.tensors import raw_bytes

#: A piece takes a line about PIECE_S, so that activations behind it wait no longer.
PIECE_S = 0.005
LEAST_PIECE_BYTES = 16 * 1024
MOST_PIECE_BYTES = 256 * 1024
#: Of a line's time pieces take at most this share. What an answer takes says little of the line: a holder may be busy.
LINE_SHARE = 0.25
#: A node that is never idle still sends a large piece this often, and a smaller one more often.
BUSY_PIECE_S = 0.05


def checkpoint_bytes(layers: Sequence[Layer], recipe: Recipe) -> int:
    """What the largest layer takes while it passes through on its way to a checkpoint: parameters, optimizer state and delayed
    weights, and the latter two once more as the bytes of a file."""

    def state(layer: Layer) -> int:
        kept = state_values(recipe.optimizer, recipe.optimizer_settings, layer)
        return kept + recipe.staleness * layer.trained

    return max(4 * (layer.parameters + 2 * state(layer)) for layer in layers)


@dataclass
class _Going:
    """A snapshot on its way to the holder, from where it is kept."""

    label: Label
    seconds: float
    sent: int = 0


class Pace:
    """How large a piece the line to the holder takes, and when the next may go. Pure. `rate`: bytes per second.

    Pieces are as small as they may be, so that activations wait little; after a long piece of work, when there was no turn
    to send, one is as large as the line's share in that time."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._least = min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, PIECE_S * rate))
        self._posted_at: float | None = None
        self._size = 0

    def may_send(self, now: float) -> bool:
        return self._posted_at is None or now >= self._posted_at + self._size / self._rate / LINE_SHARE

    def piece_bytes(self, now: float) -> int:
        if self._posted_at is None:
            return int(self._least)
        return int(min(MOST_PIECE_BYTES, max(self._least, LINE_SHARE * self._rate * (now - self._posted_at))))

    def posted(self, now: float, size: int) -> None:
        self._posted_at, self._size = now, size


@dataclass
class _Coming:
    """A neighbour's snapshot on its way into the store."""

    label: Label
    arrived: int = 0
    seconds: float = 0.0


class NodeSnapshots:
    def __init__(
        self, endpoint: Endpoint, route: Route, mode: str, rate: float = math.inf, aside: bool = False
    ) -> None:
        """`rate`: bytes per second that the line to the holder carries. `aside`: frozen parameters are left out."""
        self._aside = aside
        self._endpoint = endpoint
        self._mode = mode
        self.holder = holder_of(route, endpoint.node)
        self._going: deque[_Going] = deque()
        self._coming: dict[tuple[int, int], _Coming] = {}
        self._gathered: dict[int, GatheredState] = {}  # by visit
        self._last_at = self._last_share = 0.0
        self._pace = Pace(rate)

    def take(self, step: int, stage: Stage) -> None:
        """Copy what lies here, as it is before `step`."""
        self._going = deque(each for each in self._going if each.label.step == step)
        for layer in stage.visit.layers:
            began = self._endpoint.clock()
            if not self._put(step, layer, stage.layer_state(layer, self.left_out(stage, layer)), began):
                return

    def gather(self, step: int, stage: Stage, gathered: GatheredState) -> None:
        """The same, where other members of the group keep some of it, which is still on its way."""
        self._going = deque(each for each in self._going if each.label.step == step)
        needed, room = 2 * (stage.parameter_bytes + stage.state_bytes), room_bytes(self._endpoint.snapshots)
        if needed > room:
            why = f"{bytes_text(max(0, room))} of memory are left, and to gather a shared optimizer state takes "
            gathered.drop(step)
            self._give_up(step, stage.visit.first, 0.0, why + bytes_text(needed))
            return
        self._gathered[stage.visit.index] = gathered
        gathered.take(step, stage, lambda layer: self.left_out(stage, layer))
        self.put_gathered(gathered)

    def put_gathered(self, gathered: GatheredState) -> None:
        """What has come in of a snapshot, layer by layer."""
        for step, layer, given in gathered.whole():
            if not self._put(step, layer, given, self._endpoint.clock()):
                gathered.drop(step)
                return

    def left_out(self, stage: Stage, layer: int) -> frozenset[str]:
        return stage.frozen_of(layer) if self._aside else frozenset()

    def _put(self, step: int, layer: int, given: LayerTensors, began: float) -> bool:
        """False: it could not be kept, and the snapshot is given up."""
        label, views = laid_out(step, layer, *given)
        if not label.size:
            return True
        trouble = self._endpoint.snapshots.put(label, views, self._mode)
        del views
        seconds = self._endpoint.clock() - began
        if trouble is not None:
            self._give_up(step, layer, seconds, trouble)
        elif self.holder is None:
            self._endpoint.post(MASTER, Held(step, layer, self._endpoint.node, seconds, 0.0, ""))
        else:
            kept = self._endpoint.snapshots.label(step, layer)
            assert kept is not None
            self._going.append(_Going(kept, seconds))
        return trouble is None

    def _give_up(self, step: int, layer: int, seconds: float, trouble: str) -> None:
        self._endpoint.snapshots.discard(step)
        self._going.clear()
        self._endpoint.post(MASTER, Held(step, layer, self._endpoint.node, seconds, 0.0, trouble))

    def send_some(self, idle: bool) -> bool:
        """The next piece, if the one before has arrived and training has a gap. True if one went out."""
        if not self._going or self.holder is None:
            return False
        now = self._endpoint.clock()
        if not self._pace.may_send(now) or (not idle and now - self._last_at < BUSY_PIECE_S * self._last_share):
            return False
        if self._endpoint.in_flight_bytes(self.holder, Channel.BULK):
            return False
        going = self._going[0]
        label, start = going.label, going.sent
        piece = self._endpoint.snapshots.piece(label, start, self._pace.piece_bytes(now))
        if piece is None:
            self._going.clear()
            trouble = f"layer {label.layer} as of step {label.step} cannot be read back"
            self._endpoint.post(MASTER, Held(label.step, label.layer, self._endpoint.node, 0.0, 0.0, trouble))
            return False
        going.sent += piece.numel()
        going.seconds += self._endpoint.clock() - now
        last = going.sent == label.size
        message = Keep(
            label.step, label.layer, start, going.seconds, msgspec.msgpack.encode(label) if not start else b""
        )
        self._endpoint.post(self.holder, message, [piece])
        self._pace.posted(now, piece.numel())
        if last:
            self._going.popleft()
        self._last_at, self._last_share = now, piece.numel() / MOST_PIECE_BYTES
        return True

    def handle(self, mail: Mail) -> bool:
        message = mail.message
        if isinstance(message, Keep):
            self._receive(message, mail)
        elif isinstance(message, Whole):
            self._endpoint.snapshots.free(message.step)
        elif isinstance(message, Void):
            self._going.clear()
            self._endpoint.snapshots.discard(message.step)
            for each in self._gathered.values():
                each.drop(message.step)
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
        left = self._endpoint.snapshots.in_hand.get((step, layer))
        if left is not None:
            return left
        snapshot = self._endpoint.snapshots.get(step, layer)
        if snapshot is None:
            raise SnapshotUnusable(f"node {self._endpoint.node} has no layer {layer} as of step {step}")
        return snapshot.unpack()

    def _receive(self, message: Keep, mail: Mail) -> None:
        began = self._endpoint.clock()
        key = (mail.sender, message.layer)
        piece = mail.present()[0]
        trouble: str | None = None
        if message.start == 0:
            label = msgspec.msgpack.decode(message.label, type=Label)  # looked at when it came (scrutiny.py)
            self._coming[key] = _Coming(label)
            trouble = self._endpoint.snapshots.begin(label, self._mode)
        coming = self._coming.get(key)
        if coming is None or not (trouble or self._endpoint.snapshots.awaits(coming.label)):
            return  # of a snapshot that was refused, or of a snapshot that was given up
        if message.start != coming.arrived or message.step != coming.label.step:
            raise ProtocolError(f"sent byte {message.start} of layer {message.layer} after byte {coming.arrived}")
        trouble = trouble or self._endpoint.snapshots.add(coming.label, raw_bytes(piece))
        coming.arrived += piece.numel()
        if trouble is not None or coming.arrived >= coming.label.size:
            del self._coming[key]
            self._hold(message, mail.sender, coming, began, trouble)
        else:
            coming.seconds += self._endpoint.clock() - began

    def _hold(self, message: Keep, owner: int, coming: _Coming, began: float, trouble: str | None) -> None:
        """Whole: say so, or why not."""
        label = coming.label
        if trouble is not None:
            self._endpoint.snapshots.discard(label.step)
        else:
            trouble = self._endpoint.snapshots.finish(label)
        seconds = coming.seconds + self._endpoint.clock() - began
        self._endpoint.post(MASTER, Held(label.step, message.layer, owner, message.seconds, seconds, trouble or ""))
