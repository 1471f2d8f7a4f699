"""A meeting of two homes: who has what, who gives it to whom, and how long one waits for the other.

Both say `Here` twice a second for as long as they are at the meeting. What each is to do follows from the two words alone
(`verdict`, pure). Everything is pulled: a home asks for parts of tensors and asks again for those that do not come, so a line
that breaks and comes back costs time and nothing else. At most a layer, and a few pieces, lie in memory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from ringtmp import untrusted
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.wire.home_messages import HOMES, PIECE_BYTES, Differ, Give, Here, HomeMessage, Part, Piece, Terms, encode

SAY_EVERY_S = 0.5
WAIT_S = 0.05
#: Parts that are asked for at once.
WINDOW = 8
#: After so long without any they are asked for again: for a line of 0.1 Mbit/s a piece takes 10 s.
ASK_AGAIN_S = 15.0
#: One that has all it wants waits this long for the other to have it too.
LAST_WORD_S = 30.0
#: Where the other was lost before, this is how long an exchange waits for a word of it.
GRACE_S = 1.5


class Verdict(Enum):
    GO = "on with the steps"
    WAIT = "the other is on its way"
    MIX = "each takes what the other has made of the round"
    ALONE = "the other has nothing to do with this round: end it alone"
    SERVE = "the other takes what the round begins with"
    ADOPT = "take what the other's round begins with"


def verdict(mine: Here, theirs: Here) -> Verdict:
    """Of two that stand apart the one with the later round is right, and of two in the same round the one that listens."""
    starts = theirs.at == "start"
    if (mine.round, mine.state) == (theirs.round, theirs.state):
        if mine.at == "start":
            return Verdict.GO
        return Verdict.WAIT if starts else Verdict.MIX
    if (mine.round, -mine.home) > (theirs.round, -theirs.home):
        return Verdict.SERVE if mine.at == "start" else Verdict.ALONE
    return Verdict.ADOPT if starts else Verdict.WAIT


class Line(Protocol):
    """A home's end of the connection to the other."""

    home: int

    @property
    def connected(self) -> bool:
        """Whether the other is there, though it may say nothing while it is at its steps."""
        ...

    def send(self, message: bytes, payload: bytes | memoryview = b"") -> bool:
        """Whether it is on its way. Never blocks."""
        ...

    def receive(self, timeout_s: float) -> list[tuple[HomeMessage, memoryview]]: ...

    def close(self) -> None: ...


class Store(Protocol):
    """What a home gives, and what it expects: both have tensors of the same sizes."""

    layers: int

    def sizes(self, part: Part, layer: int) -> Sequence[int]:
        """Bytes of each tensor."""
        ...

    def bytes_of(self, part: Part, layer: int, tensor: int) -> memoryview: ...


class Taking(Protocol):
    def add(self, layer: int, parts: dict[Part, list[bytearray]]) -> None:
        """Layers come in order, each once."""
        ...


class OtherLost(Exception):  # noqa: N818
    """The other home was waited for as long as was allowed."""


class NoWord(OtherLost):
    """It says nothing: it is at its steps, or not there."""


@dataclass(frozen=True)
class Limits:
    away_s: float  # without a connection
    patience_s: float  # with one, and nothing that moves


@dataclass
class Met:
    verdict: Verdict
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    theirs: Here | None = None


class Meeting:
    """One meeting, from its first word to its last."""

    def __init__(
        self, line: Line, standing: Here, store: Store, begin_taking: Callable[[Verdict], Taking], limits: Limits,
        *, idle: Callable[[], None], lost_before: bool = False, word_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`idle` is called again and again: it may raise. `lost_before`: no wait for a word of the other. `word_s`: as long as
        that, and then NoWord."""
        self._word_s = word_s
        self._line = line
        self._mine = msgspec.structs.replace(standing, visit=secrets.token_hex(8))
        self._store = store
        self._begin_taking = begin_taking
        self._limits = limits
        self._idle = idle
        self._clock = clock
        self._lost_before = lost_before
        self._theirs: Here | None = None
        self._pull: _Pull | None = None
        self._left = False
        self._met = Met(Verdict.ALONE)
        self._begun = self._moved = clock()
        self._away_since: float | None = None
        self._said = -SAY_EVERY_S

    @property
    def theirs(self) -> Here | None:
        """What the other has said."""
        return self._theirs

    def hold(self) -> Met:
        """OtherLost: it did not come, or went. UsageError: the two cannot train together. And whatever `idle` raises."""
        while True:
            self._say()
            for message, payload in self._line.receive(WAIT_S):
                self._heed(message, payload)
            self._idle()
            if self._over():
                self._said = -SAY_EVERY_S
                self._say()
                self._met.seconds, self._met.theirs = self._clock() - self._begun, self._theirs
                return self._met
            self._give_up_in_time()

    def _say(self) -> None:
        now = self._clock()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            self._line.send(encode(self._mine))

    # -- what the other says ------------------------------------------------------------------------------------------

    def _heed(self, message: HomeMessage, payload: memoryview) -> None:
        if isinstance(message, Here):
            self._heed_here(message)
        elif isinstance(message, Give):
            if message.visit == self._mine.visit:
                self._give(message)
        elif isinstance(message, Piece):
            if self._pull is not None and self._theirs is not None and message.visit == self._theirs.visit:
                self._met.received_bytes += len(payload)
                self._pull.put(message, payload, self._clock())
                self._moved = self._clock()
        else:
            raise UsageError(f"the other home refuses: {untrusted.line(message.why)}")

    def _heed_here(self, here: Here) -> None:
        if (why := _differ(self._mine, here)) is not None:
            self._line.send(encode(Differ(why[1])))
            raise UsageError(f"the two homes cannot train together: {why[0]}")
        new = self._theirs is None or self._theirs.visit != here.visit
        if new and self._pull is not None and self._pull.done:
            self._left = True  # it has gone on, so it had all of mine
            return
        if here.visit != self._mine.heard:
            self._mine, self._said = msgspec.structs.replace(self._mine, heard=here.visit, has_all=False), -SAY_EVERY_S
        if here.heard != self._mine.visit:
            return  # said before it knew of this meeting, or at an earlier one
        if new:
            self._pull, self._moved = None, self._clock()
        self._theirs = here

    def _give(self, asked: Give) -> None:
        sizes = self._store.sizes(asked.part, asked.layer) if 0 <= asked.layer < self._store.layers else ()
        if not (0 <= asked.tensor < len(sizes) and 0 <= asked.start < sizes[asked.tensor]):
            raise ProtocolError("the other home asked for what no model of this kind has")
        piece = self._store.bytes_of(asked.part, asked.layer, asked.tensor)[asked.start : asked.start + PIECE_BYTES]
        answer = Piece(self._mine.visit, asked.part, asked.layer, asked.tensor, asked.start)
        if self._line.send(encode(answer), piece):
            self._met.sent_bytes += len(piece)
        self._moved = self._clock()

    # -- what follows from it -----------------------------------------------------------------------------------------

    def _over(self) -> bool:
        if self._theirs is None:
            patient = self._line.connected and self._clock() - self._begun <= GRACE_S
            return self._lost_before and not patient
        found = self._met.verdict = verdict(self._mine, self._theirs)
        if found in (Verdict.GO, Verdict.ALONE):
            return True
        if found is Verdict.WAIT:
            return False
        theirs_done = self._theirs.has_all or self._left
        if found is Verdict.SERVE:
            return theirs_done
        if not self._has_all(found):
            return False
        return found is Verdict.ADOPT or theirs_done or self._clock() - self._moved > LAST_WORD_S

    def _has_all(self, found: Verdict) -> bool:
        assert self._theirs is not None
        if self._pull is None:
            parts: tuple[Part, ...] = ("own",) if found is Verdict.MIX else ("begun", "velocity")
            self._pull = _Pull(self._store, parts, self._begin_taking(found))
        for ask in self._pull.to_ask(self._clock(), self._away_since is not None):
            asked = Give(self._theirs.visit, ask.part, ask.layer, ask.tensor, ask.start)
            if not self._line.send(encode(asked)):
                self._pull.not_asked(ask)
        if self._pull.done and not self._mine.has_all:
            self._mine, self._said = msgspec.structs.replace(self._mine, has_all=True), -SAY_EVERY_S
            self._moved = self._clock()
        return self._pull.done

    def _give_up_in_time(self) -> None:
        now = self._clock()
        if self._word_s is not None and self._theirs is None and now - self._begun > self._word_s:
            raise NoWord(f"the other home has said nothing for {self._word_s:.0f} s")
        if self._line.connected:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = now
        away_s = 0.0 if self._away_since is None else now - self._away_since
        if away_s > self._limits.away_s:
            raise OtherLost(f"the other home was not reached for {self._limits.away_s:.0f} s")
        if now - self._moved > self._limits.patience_s + self._limits.away_s:
            raise OtherLost(
                f"the other home is connected, and has not come to the exchange for {now - self._moved:.0f} s"
            )


def _differ(mine: Here, theirs: Here) -> tuple[str, str] | None:
    """Why these two cannot meet, for this home and for the other."""
    if theirs.homes != HOMES:
        text = "they are of versions that speak differently: install the same version in both"
        return text, text
    if theirs.home == mine.home:
        text = "both listen, or both join: one listens (--home-listen), the other joins (--home-join)"
        return text, text
    for name in Terms.__struct_fields__:
        here, there = getattr(mine.terms, name), getattr(theirs.terms, name)
        if here != there and name == "model":
            text = "the models are not the same: give both the same --model, --set, --train and first frozen weights"
            return text, text
        if here != there:
            option = "--steps" if name == "total_steps" else f"--{name.replace('_', '-')}"
            return f"{option} is {here} here and {there} there", f"{option} is {there} here and {here} there"
    return None


# -- taking -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ask:
    part: Part
    layer: int
    tensor: int
    start: int
    length: int


@dataclass
class _Pull:
    """All of the parts, layer by layer, a few pieces at a time."""

    store: Store
    parts: tuple[Part, ...]
    taking: Taking
    done: bool = False
    _asked: dict[tuple[Part, int, int, int], _Ask] = field(default_factory=dict)
    _again: list[_Ask] = field(default_factory=list)
    _ahead: _Ask | None = None  # the next that nobody has asked for yet
    _held: dict[Part, list[bytearray]] = field(default_factory=dict)
    _layer: int = 0
    _missing: int = 0  # bytes of the layer that is being taken
    _came: float | None = None

    def __post_init__(self) -> None:
        self._rest = self._all()
        self._next_layer(0)

    def _all(self) -> Iterator[_Ask]:
        for layer in range(self.store.layers):
            for part in self.parts:
                for tensor, size in enumerate(self.store.sizes(part, layer)):
                    for start in range(0, size, PIECE_BYTES):
                        yield _Ask(part, layer, tensor, start, min(PIECE_BYTES, size - start))

    def _next_layer(self, layer: int) -> None:
        """Layers without a byte are passed on at once."""
        while layer < self.store.layers:
            self._layer = layer
            self._held = {part: [bytearray(size) for size in self.store.sizes(part, layer)] for part in self.parts}
            self._missing = sum(len(each) for held in self._held.values() for each in held)
            if self._missing:
                return
            self.taking.add(layer, self._held)
            layer += 1
        self._held, self.done = {}, True

    def to_ask(self, now: float, broken: bool) -> list[_Ask]:
        """What to ask for now: only of the layer that is being taken, so that no other lies in memory."""
        if self._came is None:
            self._came = now
        if self._asked and (broken or now - self._came > ASK_AGAIN_S):
            self._again += [each for each in self._asked.values() if each not in self._again]
            self._asked.clear()
            self._came = now
        found: list[_Ask] = []
        while len(self._asked) < WINDOW and not self.done:
            if self._ahead is None:
                self._ahead = next(self._rest, None)
            if self._again:
                ask = self._again.pop(0)
            elif self._ahead is not None and self._ahead.layer == self._layer:
                ask, self._ahead = self._ahead, None
            else:
                break
            self._asked[ask.part, ask.layer, ask.tensor, ask.start] = ask
            found.append(ask)
        return found

    def not_asked(self, ask: _Ask) -> None:
        del self._asked[ask.part, ask.layer, ask.tensor, ask.start]
        self._again.append(ask)

    def put(self, piece: Piece, payload: memoryview, now: float) -> None:
        """What nobody asked for, or comes twice, is passed over."""
        ask = self._asked.pop((piece.part, piece.layer, piece.tensor, piece.start), None)
        if ask is None:
            return
        if len(payload) != ask.length:
            raise ProtocolError(f"the other home sent {len(payload)} bytes of a piece of {ask.length}")
        self._came = now
        self._held[ask.part][ask.tensor][ask.start : ask.start + ask.length] = payload
        self._missing -= ask.length
        if not self._missing:
            self.taking.add(self._layer, self._held)
            self._next_layer(self._layer + 1)
