"""Packets over torch.distributed: for clusters that torchrun, Slurm or Kubernetes started. A rank is a node.

Nothing here is encrypted and nobody is authenticated: this transport is for networks whose members trust each other.

A receive must be posted with its size, and cannot be asked whether it is done. So a packet is two sends, its length and
its bytes, and every peer has two threads, which wait outside the interpreter lock: one that receives and one that sends.
What waits to be sent to a peer goes by channel, control first; within a channel it goes in order. A peer that is gone
ends both threads; the packets for it are lost, as `Transport` allows.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from ringtmp.transport.base import Arrival, Channel, Frame
from ringtmp.transport.sums_together import SumsTogether
from ringtmp.wire.address import Address

#: A piece and its header stay far below; a layer's graph is the largest header.
MAX_PACKET_BYTES = 64 * 2**20
CLOSE_LIMIT_S = 5.0
#: For what ends by itself, or at once when connections are cut.
END_LIMIT_S = 1.0
_CLOSING = -1
#: Of messages, and one that nobody sends.
_TAG, _NEVER = 0, 1
_CHANNELS = frozenset(map(int, Channel))
#: Number of frames, then the length of each.
_COUNT, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")


class TorchTransport:
    def __init__(self, group: Any, mesh: Any = None) -> None:
        """`group`: a process group of all nodes, by rank. It must take tensors in the processor's memory (Gloo). `mesh`: the
        same nodes as torch's own default group, for what needs that."""
        self.node = group.rank()
        self._group: Any = group
        self.mesh = mesh
        self._lanes: dict[int, _Lane] = {}
        self._arrived: deque[Arrival] = deque()
        self._news = threading.Condition()
        #: Sums over all nodes that the library makes itself.
        self.sums = SumsTogether(group, self._tell)

    def connect(self, peer: int, address: Address) -> None:
        """The group knows the way; from here on the peer is heard."""
        if peer not in self._lanes and peer < self._group.size():
            self._lanes[peer] = _Lane(self._group, peer, self._take)

    def hang_up(self, peer: int) -> None:
        """What waits for it is forgotten. A receive that is posted cannot be taken back, so it is still heard."""
        if peer in self._lanes:
            self._lanes[peer].forget()

    def listen_again(self) -> None:
        """Nobody can be kept out."""

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        lane = self._lanes.get(peer)
        if lane is not None:
            lane.send(channel, _packed(frames))

    def receive(self) -> list[Arrival]:
        with self._news:
            taken = list(self._arrived)
            self._arrived.clear()
        return taken

    def wait(self, timeout_s: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: bool(self._arrived) or self.sums.any_there, timeout_s)

    def gone(self) -> list[int]:
        """Peers whose connection broke before they said that they would close it."""
        return [peer for peer, lane in self._lanes.items() if lane.broken]

    def close(self) -> None:
        """Both ends say so; whoever does not within a few seconds is cut off.

        Every thread has ended afterwards, the library's own too: one that needs the interpreter while that goes down would
        take the process with it (SIGABRT), after all its work was done.
        """
        limit = time.monotonic() + CLOSE_LIMIT_S
        self.sums.close()
        for lane in self._lanes.values():
            lane.say_closing()
        ended = [lane.ended(limit) for lane in self._lanes.values()]
        if all([*ended, self.sums.ended(END_LIMIT_S)]) or self._cut():
            # The library's own threads, too: the last to let go of a tensor asks for the interpreter's lock.
            self._group = None
            self.sums.forget_group()
        self._lanes.clear()
        if self.mesh is not None:
            self.mesh = None
            distributed.destroy_process_group()

    def _cut(self) -> bool:
        """Gloo cannot take back a receive or a sum; one that is not there in time closes all connections, which ends them.
        Whether it did."""
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.zeros(1)], (self.node + 1) % self._group.size(), _NEVER).wait(
                timedelta(milliseconds=1)
            )
        limit = time.monotonic() + END_LIMIT_S
        ended = [lane.ended(limit) for lane in self._lanes.values()]
        return all([*ended, self.sums.ended(END_LIMIT_S)])

    def _tell(self) -> None:
        with self._news:
            self._news.notify()

    def _take(self, peer: int, channel: Channel, frames: list[Frame]) -> None:
        with self._news:
            self._arrived.append(Arrival(peer, channel, frames))
            self._news.notify()


class _Lane:
    """The way to and from one peer."""

    def __init__(self, group: Any, peer: int, take: Callable[[int, Channel, list[Frame]], None]) -> None:
        self.broken = False
        self._group = group
        self._peer = peer
        self._take = take
        self._queues: dict[Channel, deque[torch.Tensor]] = {channel: deque() for channel in Channel}
        self._closing = False
        self._work = threading.Condition()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._send_all, self._receive_all)]
        for thread in self._threads:
            thread.start()

    def send(self, channel: Channel, packet: torch.Tensor) -> None:
        with self._work:
            if not self.broken:
                self._queues[channel].append(packet)
                self._work.notify()

    def forget(self) -> None:
        with self._work:
            for queue in self._queues.values():
                queue.clear()

    def say_closing(self) -> None:
        with self._work:
            self._closing = True
            self._work.notify()

    def ended(self, limit: float) -> bool:
        """Whether both threads have, waited for until then."""
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _send_all(self) -> None:
        with self._until_broken():
            while (following := self._next()) is not None:
                channel, packet = following
                self._put(torch.tensor([channel, packet.numel()]))
                self._put(packet)
            self._put(torch.tensor([_CLOSING, 0]))

    def _next(self) -> tuple[Channel, torch.Tensor] | None:
        with self._work:
            self._work.wait_for(lambda: self._closing or any(self._queues.values()))
            for channel, queue in self._queues.items():
                if queue:
                    return channel, queue.popleft()
            return None

    def _receive_all(self) -> None:
        header = torch.zeros(2, dtype=torch.int64)
        with self._until_broken():
            while True:
                self._get(header)
                channel, length = header.tolist()
                if channel == _CLOSING:
                    return
                if channel not in _CHANNELS or not 0 <= length <= MAX_PACKET_BYTES:
                    raise RuntimeError(f"rank {self._peer} announced a packet of {length} bytes on channel {channel}")
                packet = torch.empty(length, dtype=torch.uint8)
                self._get(packet)
                self._take(self._peer, Channel(channel), _unpacked(packet))

    def _put(self, tensor: torch.Tensor) -> None:
        self._group.send([tensor], self._peer, _TAG).wait()

    def _get(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], self._peer, _TAG).wait()

    @contextlib.contextmanager
    def _until_broken(self) -> Iterator[None]:
        """Gloo raises when the other process has died."""
        try:
            yield
        except (RuntimeError, ValueError, struct.error):
            self.broken = True
            self.forget()


def _packed(frames: Sequence[Frame]) -> torch.Tensor:
    """One buffer of its own: frames may be views of tensors that change."""
    lengths = b"".join(_LENGTH.pack(len(frame)) for frame in frames)
    return torch.frombuffer(bytearray(b"".join([_COUNT.pack(len(frames)), lengths, *frames])), dtype=torch.uint8)


def _unpacked(packet: torch.Tensor) -> list[Frame]:
    buffer: Any = packet.numpy()
    view = memoryview(buffer)
    (count,) = _COUNT.unpack_from(view)
    at = _COUNT.size + count * _LENGTH.size
    if at > len(view):
        raise ValueError(f"{count} frames do not fit into {len(view)} bytes")
    frames: list[Frame] = []
    for number in range(count):
        (length,) = _LENGTH.unpack_from(view, _COUNT.size + number * _LENGTH.size)
        if at + length > len(view):
            raise ValueError("a frame is longer than its packet")
        frames.append(view[at : at + length])
        at += length
    return frames
