"""What members of a group say to each other of a training pass: each thing once, and all of it before anything of a later pass.

A member ends a pass when it has said all that it owes of it, and a link keeps the order. So whoever says something of a later
pass has left out what it still owes of this one: it is named at once, by the member that would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ringtmp.errors import Misconduct, ProtocolError

#: Of how many passes something may be here: this one, and the next of a member that has ended this one.
MOST_PASSES = 2
#: Evaluations that a member may be ahead of another.
MOST_PASSES_AHEAD = 64


class PassOrder:
    """Of one visit, on one member of its group."""

    def __init__(self, owed: Callable[[int], Iterable[str]]) -> None:
        """`owed`: what a member says here of every training pass."""
        self._owed_by = owed
        self._owed: dict[int, frozenset[str]] = {}
        self._said: dict[int, dict[int, set[str]]] = {}  # by sender and pass

    def check(self, sender: int, turn: int, what: str, done_turn: int, under_way: int | None) -> None:
        """ProtocolError: not its to say here, or not now. `under_way`: the training pass this member is in."""
        if what not in self._owed_of(sender):
            raise ProtocolError(f"sent {what} of pass {turn}, which is not its to send here")
        said = {each: found for each, found in self._said.get(sender, {}).items() if each > done_turn}
        newest = max(said, default=done_turn)
        if not max(newest, done_turn + 1) <= turn <= done_turn + MOST_PASSES_AHEAD or what in said.get(turn, ()):
            raise ProtocolError(f"sent {what} of pass {turn} out of turn")
        self._said[sender] = said
        said.setdefault(turn, set()).add(what)
        for each in (newest, under_way):
            if each is not None and done_turn < each < turn and self._lacks(sender, each):
                raise ProtocolError(f"sent {what} of pass {turn} before all of pass {each}")
        if len(said) > MOST_PASSES:
            raise ProtocolError(f"sent {what} of pass {turn}, and has not heard anything of pass {min(said)}")

    def nobody_left_out(self, turn: int) -> None:
        """This member is in a training pass. Misconduct: another has said something of a later one and not all of this."""
        for sender, said in self._said.items():
            if max(said, default=turn) > turn and self._lacks(sender, turn):
                raise Misconduct(f"sent something of pass {max(said)} before all of pass {turn}", sender)

    def _lacks(self, sender: int, turn: int) -> bool:
        return len(self._said[sender].get(turn, ())) < len(self._owed_of(sender))

    def _owed_of(self, sender: int) -> frozenset[str]:
        if sender not in self._owed:
            self._owed[sender] = frozenset(self._owed_by(sender))
        return self._owed[sender]
