"""What two homes say to each other: few, small, typed messages. Numbers travel beside a `Piece`, as bytes of their own.

Here    a home is at a meeting, with what, and whether it has all of the other's     Give    send this part of a tensor
Piece   the part, and behind it its bytes                                            Differ  we cannot train together, and why
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ringtmp import untrusted

#: Another number: another way to meet.
HOMES = 1
MAX_BYTES = 4096
#: What travels in one go. On a slow line a larger one would hold up the signs of life behind it.
PIECE_BYTES = 128 * 1024

#: Where a home stands: before the steps of a round, or behind them.
At = Literal["start", "exchange"]
#: The weights a home has made of its steps; those its round began with; the velocity of the outer step then.
Part = Literal["own", "begun", "velocity"]


class Terms(msgspec.Struct, frozen=True):
    """What both homes must have alike."""

    model: str  # SHA-256 over names, types and shapes of all that is shared, and over what is frozen
    local_steps: int
    outer_lr: float
    outer_momentum: float
    total_steps: int


class Here(msgspec.Struct, frozen=True, tag="here"):
    homes: int
    home: int  # 0 listens, 1 joins
    visit: str  # of this very meeting: what was asked for at another is not answered
    terms: Terms
    at: At
    round: int
    begun: int  # the step the round began with
    state: str  # SHA-256 over weights and velocity the round began with
    heard: str = ""  # the other's visit: what it says counts from then on, and nothing it said at an earlier meeting
    has_all: bool = False  # of what it takes from that visit


class Give(msgspec.Struct, frozen=True, tag="give"):
    visit: str  # of whom is asked
    part: Part
    layer: int
    tensor: int
    start: int


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    visit: str  # of whom it is from
    part: Part
    layer: int
    tensor: int
    start: int


class Differ(msgspec.Struct, frozen=True, tag="differ"):
    why: str


HomeMessage = Here | Give | Piece | Differ
_decoder: msgspec.msgpack.Decoder[HomeMessage] = msgspec.msgpack.Decoder(HomeMessage)
encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes | memoryview) -> HomeMessage:
    """ProtocolError: no home of this version says so."""
    message = untrusted.decode(_decoder, data, "what a home says", MAX_BYTES)
    if isinstance(message, Here):
        untrusted.whole(message.home, "the number of a home", 0, 1)
        untrusted.whole(message.terms.total_steps, "the number of steps", 1)
        untrusted.whole(message.round, "the number of a round", 0, message.terms.total_steps)
        untrusted.whole(message.begun, "the step that a round began with", 0, message.terms.total_steps)
    return message
