"""What the master and the agents on its devices say to each other: few, small, typed messages, and where each may be said."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, TypeVar

import msgspec

from ringtmp import untrusted
from ringtmp.errors import ProtocolError
from ringtmp.wire.address import Address

MAX_BYTES = 4096
DEFAULT_PORT = 47100
BEAT_S = 0.5
#: A device silent for this long is taken for lost.
SILENCE_LIMIT_S = 3.0
HUB_PORT_OFFSET = 1


class Heard(Enum):
    """Where a message is heard, and from whom."""

    DOOR = "a stranger with a token or a code, to the door"
    STRANGER = "the door, to a stranger with a token or a code"
    TABLE = "an admitted device, to the table"
    AGENT = "the table, to an admitted device"


class Facts(msgspec.Struct, frozen=True):
    """What a device says of itself."""

    name: str
    cpu: str
    cores: int
    memory_bytes: int
    torch: str
    version: str
    protocol: int
    address: str = ""
    packages: tuple[str, ...] = ()  # with strategies of their own, and their versions


class Join(msgspec.Struct, frozen=True, tag="join"):
    AT: ClassVar = (Heard.DOOR,)
    secret: bytes
    facts: Facts


class JoinCheck(msgspec.Struct, frozen=True, tag="knock"):
    """Would a join with this secret be let in? Admits nobody, uses nothing up."""

    AT: ClassVar = (Heard.DOOR,)
    secret: bytes
    padding: bytes = b""


class PairBegin(msgspec.Struct, frozen=True, tag="pair"):
    """The first half of an exchange that a short code protects (launch/pairing_code.py)."""

    AT: ClassVar = (Heard.DOOR,)
    element: bytes


class PairConfirm(msgspec.Struct, frozen=True, tag="confirm"):
    """This device knows the code."""

    AT: ClassVar = (Heard.DOOR,)
    proof: bytes


class Heartbeat(msgspec.Struct, frozen=True, tag="here"):
    """Said every BEAT_S: I live. `incarnation` tells two processes with one key apart."""

    AT: ClassVar = (Heard.TABLE,)
    incarnation: str
    facts: Facts


class Started(msgspec.Struct, frozen=True, tag="started"):
    AT: ClassVar = (Heard.TABLE,)
    ring: str  # of the order it answers: news may come late, and generations are counted from 1 in every run
    generation: int
    address: Address
    pid: int


class Died(msgspec.Struct, frozen=True, tag="died"):
    AT: ClassVar = (Heard.TABLE,)
    ring: str
    generation: int
    code: int
    last_words: str


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    AT: ClassVar = (Heard.TABLE,)


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    AT: ClassVar = (Heard.STRANGER,)
    hub: str  # endpoint


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    AT: ClassVar = (Heard.STRANGER, Heard.AGENT)
    reason: str


class JoinCheckAnswer(msgspec.Struct, frozen=True, tag="knocked"):
    """The padding comes back to whoever knows a valid secret, so no answer is larger than its question."""

    AT: ClassVar = (Heard.STRANGER,)
    reason: str  # why a join would be refused; empty if it would not
    padding: bytes = b""


class PairReply(msgspec.Struct, frozen=True, tag="paired"):
    AT: ClassVar = (Heard.STRANGER,)
    element: bytes


class PairDone(msgspec.Struct, frozen=True, tag="confirmed"):
    """The master knows the code, too; the secret is that of a token for one device."""

    AT: ClassVar = (Heard.STRANGER,)
    proof: bytes
    secret: bytes


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Start a compute process for this run."""

    AT: ClassVar = (Heard.AGENT,)
    ring: str
    generation: int
    node: int
    master: Address
    threads: int
    before: str = ""  # the ring of a master that was killed: if this device was in it, its snapshots are wanted
    notice_s: float = SILENCE_LIMIT_S  # for how long the process may be stopped


class End(msgspec.Struct, frozen=True, tag="end"):
    AT: ClassVar = (Heard.AGENT,)
    generation: int
    over: bool = False  # the whole run; otherwise only this device's part in it, and it may get another


FromAgent = Join | JoinCheck | PairBegin | PairConfirm | Heartbeat | Started | Died | Leaving
FromMaster = Welcome | Refused | JoinCheckAnswer | PairReply | PairDone | Prepare | End
from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
from_master: msgspec.msgpack.Decoder[FromMaster] = msgspec.msgpack.Decoder(FromMaster)
encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T", bound=FromAgent | FromMaster)


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, at: Heard) -> T:
    """What was said, if it may be said there."""
    message = untrusted.decode(decoder, data, "agent speech", MAX_BYTES)
    if at not in message.AT:
        raise ProtocolError(f"{type(message).__name__} is not said by {at.value}")
    return message
