"""Numbers are written as people write them."""

from __future__ import annotations

import pytest

from ringtmp.units import seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (59.9, "59.9 s"), (90, "1 min 30 s"), (3599.4, "59 min 59 s"), (12_000, "3 h 20 min")],
)
def test_a_length_of_time_is_told_in_its_largest_units(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
