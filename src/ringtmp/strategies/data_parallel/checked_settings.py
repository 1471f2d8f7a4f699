"""What several strategies refuse of their settings, in one wording. Pure, and loads no torch."""

from __future__ import annotations

from ringtmp.errors import UsageError
from ringtmp.wire.formats import PLAIN, wire_format


def refuse_too_short(name: str, steps: int) -> None:
    if steps < 1:
        raise UsageError(f"{name}={steps} must be a whole number of at least 1")


def refuse_outside(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name}={value:g} must be from {low:g} to {high:g}")


def refuse_rounding(strategy: str, wire: str) -> None:
    """Where parameters travel as they are, a coarse wire would round the model itself at every exchange."""
    if not wire_format(wire).exact:
        raise UsageError(
            f"{strategy} sends parameters, which {wire} would round at every exchange: use --wire {PLAIN.name}"
        )
