"""How long a home waits for another that says nothing, and what one may not say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from ringtmp.errors import ProtocolError
from ringtmp.run.meet_home import Limits, Meeting, NoWord, OtherLost
from ringtmp.run.other_home import of_a_round
from ringtmp.wire.home_messages import HOMES, Here, Part, Terms, decode, encode

HERE = Here(HOMES, 1, "", Terms("model", 500, 0.7, 0.9, 1000), at="start", round=1, begun=500, state="")


class Silent:
    """A line on which nothing comes; every look at it takes a second."""

    home, connected, now_s = 1, True, 0.0

    def send(self, message: bytes, payload: bytes | memoryview = b"") -> bool:
        return True

    def receive(self, timeout_s: float) -> list[Any]:
        self.now_s += 1
        return []

    def close(self) -> None:
        return


class Empty:
    layers = 0

    def sizes(self, part: Part, layer: int) -> Sequence[int]:
        return ()

    def bytes_of(self, part: Part, layer: int, tensor: int) -> memoryview:
        raise AssertionError("nobody asks")


@pytest.mark.parametrize(("word_s", "lost", "after_s"), [(20.0, NoWord, 21), (None, OtherLost, 1101)])
def test_a_word_is_waited_for_as_long_as_was_said(word_s: float | None, lost: type[OtherLost], after_s: int) -> None:
    line = Silent()
    meeting = Meeting(
        line, HERE, Empty(), lambda found: pytest.fail("nothing is taken"), Limits(600.0, 500.0),
        idle=lambda: None, word_s=word_s, clock=lambda: line.now_s,
    )  # fmt: skip
    with pytest.raises(OtherLost) as caught:
        meeting.hold()
    assert type(caught.value) is lost
    assert line.now_s == after_s


def test_patience_is_that_of_a_whole_round_whatever_part_of_it_was_made() -> None:
    assert of_a_round(30.0, 5, 500) == 3000.0
    assert of_a_round(3.0, 0, 500) == 3.0


@pytest.mark.parametrize("change", [{"home": 2}, {"round": -1}, {"round": 1001}, {"begun": -1}, {"begun": 2**60}])
def test_a_home_cannot_stand_where_the_run_does_not_go(change: dict[str, int]) -> None:
    """Who adopted a round of step 2**60 was done with its run at once."""
    assert decode(encode(HERE)) == HERE
    with pytest.raises(ProtocolError, match="which is not from 0 to"):
        decode(encode(msgspec.structs.replace(HERE, **change)))
