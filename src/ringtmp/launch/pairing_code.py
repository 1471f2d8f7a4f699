"""Pairing: a device that knows the short code the master shows gets a token, and nobody else does.

SPAKE2 (Abdalla and Pointcheval 2005; RFC 9382; PyPI's `spake2`) turns the code into a strong key on both sides. It goes over
the CURVE connection to the master's door, and both public keys of that connection are part of it: whoever stands between has
other keys and ends with another key.

    device                                master
    begin  x = SPAKE2_A(code)   ------->  y = SPAKE2_B(code), key from x
    key from y                  <-------  reply y
    confirm HMAC(key, device)   ------->  right: a token's secret, and HMAC(key, master)
                                <-------  wrong: counted; the third changes the code, and nobody is heard for a while

The device confirms first: a guess is counted before it is answered, and who leaves before has learned nothing. A listener
learns nothing, and what was recorded fits no later exchange: both sides draw anew each time. Pure but for chance: clock and
secrets come in as arguments.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from ringtmp.errors import UsageError
from ringtmp.launch import agent_messages as messages

DIGITS = 6
MOST_WRONG = 3
#: After a code was changed because of guesses, pairing pauses, twice as long each time, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
#: Exchanges that may be under way, how long one may take, and how many may begin in a second: each costs about 20 ms here.
MOST_OPEN, EXCHANGE_LIMIT_S, BEGINS_PER_S = 16, 10.0, 5
MISSING = "pairing needs zeroconf and spake2: pip install 'ringtmp[discovery]', or join with a token"


def new_code() -> str:
    return f"{secrets.randbelow(10**DIGITS):0{DIGITS}d}"


def shown(code: str) -> str:
    """483920 -> 483-920"""
    return f"{code[: DIGITS // 2]}-{code[DIGITS // 2 :]}"


def typed(text: str) -> str:
    """What a person typed, as digits alone."""
    code = "".join(each for each in text if each not in " -.\t\r\n")
    if not (len(code) == DIGITS and code.isascii() and code.isdigit()):
        raise UsageError(f"a pairing code has {DIGITS} digits, such as {shown('0' * DIGITS)}")
    return code


def confirmation(key: bytes, side: bytes) -> bytes:
    return hmac.digest(key, b"ringtmp pairing " + side, "sha256")


def _names(ring: str, device_key: str, master_key: str) -> dict[str, bytes]:
    return {"idA": device_key.encode(), "idB": f"{ring} {master_key}".encode()}


class DeviceSide:
    """One exchange. Make a new one for every try."""

    def __init__(self, code: str, ring: str, device_key: str, master_key: str) -> None:
        self._exchange = _spake2("SPAKE2_A")(code.encode(), **_names(ring, device_key, master_key))
        self.begin = messages.PairBegin(self._exchange.start())
        self._key = b""

    def confirm(self, reply: messages.PairReply) -> messages.PairConfirm:
        try:
            self._key = self._exchange.finish(reply.element)
        except Exception as error:  # of its own kinds, and of the curve's: what was sent is no point of it
            raise UsageError(f"the master's answer makes no sense ({type(error).__name__})") from error
        return messages.PairConfirm(confirmation(self._key, b"device"))

    def secret(self, done: messages.PairDone) -> bytes:
        """Checked: only who knows the code could have sent it."""
        if not hmac.compare_digest(done.proof, confirmation(self._key, b"master")):
            raise UsageError("whoever answered does not know the code: it is not the master that shows it")
        return done.secret


class _Exchange(NamedTuple):
    key: bytes
    began: float


class MasterSide:
    """Every device's exchange, the code, and what became of guesses. `say` shows people a line; `new_secret` makes a token's
    secret for one device."""

    def __init__(
        self,
        ring: str,
        master_key: str,
        new_secret: Callable[[], bytes],
        say: Callable[[str], None],
        *,
        clock: Callable[[], float],
        make_code: Callable[[], str] = new_code,
    ) -> None:
        self._ring = ring
        self._master_key = master_key
        self._new_secret = new_secret
        self._say = say
        self._clock = clock
        self._make_code = make_code
        self._make = _spake2("SPAKE2_B")
        self.code = make_code()
        self._wrong = 0
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0
        self._open: OrderedDict[str, _Exchange] = OrderedDict()  # by the device's key
        self._begun: deque[float] = deque(maxlen=BEGINS_PER_S)

    def answer(
        self, message: messages.PairBegin | messages.PairConfirm, device_key: str
    ) -> messages.PairReply | messages.PairDone | messages.Refused:
        now = self._clock()
        if now < self._not_before:
            return messages.Refused(
                f"too many wrong codes: try again in {self._not_before - now:.0f} s, with the new code"
            )
        if isinstance(message, messages.PairBegin):
            return self._begin(message, device_key, now)
        return self._confirm(message, device_key, now)

    def _begin(self, message: messages.PairBegin, device_key: str, now: float) -> messages.PairReply | messages.Refused:
        if len(self._begun) == BEGINS_PER_S and now - self._begun[0] < 1:
            return messages.Refused("many devices are pairing: try again in a moment")
        self._begun.append(now)
        exchange = self._make(self.code.encode(), **_names(self._ring, device_key, self._master_key))
        element = exchange.start()
        try:
            key = exchange.finish(message.element)
        except Exception:  # of its own kinds, and of the curve's: what was sent is no point of it
            return messages.Refused("that was not the beginning of a pairing")
        self._open.pop(device_key, None)
        while len(self._open) >= MOST_OPEN:
            self._open.popitem(last=False)
        self._open[device_key] = _Exchange(key, now)
        return messages.PairReply(element)

    def _confirm(
        self, message: messages.PairConfirm, device_key: str, now: float
    ) -> messages.PairDone | messages.Refused:
        exchange = self._open.pop(device_key, None)  # one guess for one exchange
        if exchange is None or now - exchange.began > EXCHANGE_LIMIT_S:
            return messages.Refused("that pairing is over: begin again")
        if hmac.compare_digest(message.proof, confirmation(exchange.key, b"device")):
            self._wrong, self._pause_s = 0, FIRST_PAUSE_S
            return messages.PairDone(confirmation(exchange.key, b"master"), self._new_secret())
        self._wrong += 1
        if self._wrong >= MOST_WRONG:
            self._change_code(now)
        return messages.Refused("that is not the code the master shows now")

    def _change_code(self, now: float) -> None:
        self._open.clear()
        self._wrong = 0
        self.code = self._make_code()
        self._not_before, self._pause_s = now + self._pause_s, min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self._say(
            f"{MOST_WRONG} wrong pairing codes: the code is now {shown(self.code)}, and pairing pauses for "
            f"{self._not_before - now:.0f} s"
        )


def _spake2(side: str) -> Callable[..., _Spake2]:
    try:
        import spake2
    except ImportError:
        raise UsageError(MISSING) from None
    found: Callable[..., _Spake2] = getattr(spake2, side)
    return found


class _Spake2:  # what is used of it
    def start(self) -> bytes: ...  # type: ignore[empty-body]

    def finish(self, inbound: bytes) -> bytes: ...  # type: ignore[empty-body]
