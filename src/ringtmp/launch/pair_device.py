"""A device's side of joining without a token: which ring, which code, and the token that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from ringtmp import untrusted
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch import agent_messages as messages
from ringtmp.launch.agent import at_the_door
from ringtmp.launch.announce import Found
from ringtmp.launch.join_token import Token
from ringtmp.launch.key_store import SECRET_BYTES
from ringtmp.launch.pairing_code import DeviceSide, typed
from ringtmp.transport.encryption import KeyPair

#: A crowded door drops requests: an exchange that is not answered is begun anew, so often.
ANSWER_LIMIT_S = 4.0
EXCHANGES = 3
#: Codes a person may try before the command ends.
TRIES = 3


class WrongCode(UsageError):  # noqa: N818
    """The master refused; what it said is the text."""


def choose(found: Sequence[Found], wanted: str | None, ask: Callable[[str], str], say: Callable[[str], None]) -> Found:
    """The ring that was named, the only one, or the one a person picks."""
    if wanted is not None:
        found = [each for each in found if each.ring == wanted]
    if not found:
        named = f" called {wanted}" if wanted is not None else ""
        raise UsageError(
            f"no ring{named} answers on this network: is a master waiting (ringtmp train --listen ADDRESS)? Multicast may be "
            "blocked (UDP port 5353): then use the line the master prints, ringtmp node --join TOKEN"
        )
    if len(found) == 1:
        say(f"found ring {found[0].ring} at {found[0].address}")
        return found[0]
    for number, each in enumerate(found, start=1):
        say(f"{number}: ring {each.ring} at {each.address}")
    answer = ask(f"which ring (1 to {len(found)})")
    if not (answer.strip().isdigit() and 1 <= int(answer) <= len(found)):
        raise UsageError(f"{untrusted.line(answer)!r} is not a number from 1 to {len(found)}")
    return found[int(answer) - 1]


def pair_with(ring: Found, keys: KeyPair, ask: Callable[[str], str], say: Callable[[str], None]) -> Token:
    """Asks for the code, and again if it was wrong."""
    for left in reversed(range(TRIES)):
        try:
            return pair(ring, typed(ask("pairing code the master shows")), keys)
        except WrongCode as error:
            if not left:
                raise
            say(str(error))
    raise AssertionError("unreachable")


class _Unanswered(Exception):  # noqa: N818
    pass


def pair(ring: Found, code: str, keys: KeyPair) -> Token:
    """A token for this device. Neither the code nor anything that tells it leaves this device."""
    for _ in range(EXCHANGES):
        try:
            return _paired(ring, code, keys)
        except _Unanswered:
            continue
    limit_s = EXCHANGES * ANSWER_LIMIT_S
    raise UsageError(f"the master at {ring.address} does not answer within {limit_s:.0f} s: is it still waiting?")


def _paired(ring: Found, code: str, keys: KeyPair) -> Token:
    side = DeviceSide(code, ring.ring, keys.public, ring.key)
    place = Token(ring.ring, ring.address, ring.key, bytes(SECRET_BYTES))
    try:
        with at_the_door(place, keys, zmq.EVENT_HANDSHAKE_SUCCEEDED) as (door, _):
            reply = _asked(door, side.begin, ring)
            if not isinstance(reply, messages.PairReply):
                raise ProtocolError(f"the master at {ring.address} answered with {type(reply).__name__}")
            done = _asked(door, side.confirm(reply), ring)
    except zmq.ZMQError as error:
        raise UsageError(f"cannot reach the master at {ring.address}: {error.strerror or error}") from error
    if not isinstance(done, messages.PairDone):
        raise ProtocolError(f"the master at {ring.address} answered with {type(done).__name__}")
    secret = side.secret(done)
    if len(secret) != SECRET_BYTES:
        raise ProtocolError(f"the master at {ring.address} sent a secret of {len(secret)} bytes")
    return Token(ring.ring, ring.address, ring.key, secret)


def _asked(
    door: zmq.Socket[bytes], question: messages.PairBegin | messages.PairConfirm, ring: Found
) -> messages.FromMaster:
    door.send(messages.encode(question))
    if not door.poll(round(ANSWER_LIMIT_S * 1000)):
        raise _Unanswered
    answer = messages.decode(messages.from_master, door.recv(), messages.Heard.STRANGER)
    if isinstance(answer, messages.Refused):
        raise WrongCode(f"the master at {ring.address} says: {untrusted.line(answer.reason)}")
    return answer
