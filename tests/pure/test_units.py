"""Numbers are written as people write them."""

from __future__ import annotations

import pytest

from ringtmp.units import joules_text, rate_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (59.9, "59.9 s"), (90, "1 min 30 s"), (3599.4, "59 min 59 s"), (12_000, "3 h 20 min")],
)
def test_a_length_of_time_is_told_in_its_largest_units(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_rates_and_joules_have_no_powers_of_ten() -> None:
    assert [rate_text(each) for each in (0.254, 43.21, 999.4, 999.6, 2043)] == [
        "0.254",
        "43.2",
        "999",
        "1000",
        "2.04k",
    ]
    assert [joules_text(each) for each in (0.5, 99.97, 6371, 45_678)] == ["0.5 J", "100 J", "6371 J", "45.7 kJ"]
