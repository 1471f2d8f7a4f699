"""What a transport does: hand packets to a peer, never block, never promise delivery (links do that)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ringtmp.wire.address import Address
from ringtmp.wire.channel import Channel as Channel

Frame = bytes | memoryview


class Arrival(NamedTuple):
    peer: int
    channel: Channel
    frames: Sequence[Frame]


class Transport(Protocol):
    """A node's end of all its connections.

    `send` queues and returns; packets to an unreachable peer may be lost. `receive` returns what is there, in order per
    (peer, channel), without waiting. `wait` returns as soon as something is there or the time is over.
    """

    node: int

    def connect(self, peer: int, address: Address) -> None: ...

    def hang_up(self, peer: int) -> None: ...

    def listen_again(self) -> None:
        """Where nobody could connect any more, make it possible; who is connected stays."""
        ...

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None: ...

    def receive(self) -> list[Arrival]: ...

    def wait(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


class TransportWrapper:
    """A transport around another: what it does not do in a way of its own is passed on."""

    def __init__(self, inner: Transport) -> None:
        self.node = inner.node
        self._inner = inner

    def connect(self, peer: int, address: Address) -> None:
        self._inner.connect(peer, address)

    def hang_up(self, peer: int) -> None:
        self._inner.hang_up(peer)

    def listen_again(self) -> None:
        self._inner.listen_again()

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        self._inner.send(peer, channel, frames)

    def receive(self) -> list[Arrival]:
        return self._inner.receive()

    def wait(self, timeout_s: float) -> bool:
        return self._inner.wait(timeout_s)

    def close(self) -> None:
        self._inner.close()
