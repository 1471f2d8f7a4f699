"""Trouble around any transport: packets lost, doubled, out of order, by a seed; lines cut; an ear that hears everything."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ringtmp.transport.base import Arrival, Channel, Frame, Transport, TransportWrapper


@dataclass(frozen=True)
class Faults:
    """Probabilities per packet."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0


class Shaped(TransportWrapper):
    """A transport whose sending suffers `faults`, decided by `seed`."""

    def __init__(self, inner: Transport, faults: Faults, seed: int) -> None:
        super().__init__(inner)
        self._faults = faults
        self._random = random.Random(seed)
        self._held: list[tuple[int, Channel, list[Frame]]] = []

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        luck = self._random
        if luck.random() < self._faults.drop:
            return
        if luck.random() < self._faults.reorder:
            self._held.append((peer, channel, [bytes(frame) for frame in frames]))
            return
        for _ in range(2 if luck.random() < self._faults.duplicate else 1):
            self._inner.send(peer, channel, frames)
        self._release()

    def receive(self) -> list[Arrival]:
        self._release()
        return self._inner.receive()

    def _release(self) -> None:
        held, self._held = self._held, []
        for peer, channel, frames in held:
            self._inner.send(peer, channel, frames)


class Severed(TransportWrapper):
    """A transport on a network where some do not hear some others. `cuts`: pairs of sender and receiver, as of now."""

    def __init__(self, inner: Transport, cuts: Collection[tuple[int, int]]) -> None:
        super().__init__(inner)
        self._cuts = cuts

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        if (self.node, peer) not in self._cuts:
            self._inner.send(peer, channel, frames)


class Tapped(TransportWrapper):
    """A transport that shows every packet it sends to a listener."""

    def __init__(self, inner: Transport, listener: Callable[[int, int, Channel, Sequence[Frame]], None]) -> None:
        super().__init__(inner)
        self._listener = listener

    def send(self, peer: int, channel: Channel, frames: Sequence[Frame]) -> None:
        self._listener(self.node, peer, channel, frames)
        self._inner.send(peer, channel, frames)
