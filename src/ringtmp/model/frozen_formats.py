"""The ways in which frozen weights can be kept. small_frozen_weights.py does it; this file needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32 = "float32"


@dataclass(frozen=True)
class FrozenAs:
    name: str  # of the kind of number, as torch has it
    small: bool = True  # converted where it is used
    scaled: bool = False  # whole numbers, with a scale for each output channel

    @property
    def aside(self) -> str:
        """What the numeric mode of a run says of it."""
        return f"frozen weights {self.name}" if self.small else ""


WHOLE = FrozenAs(FLOAT32, small=False)
FROZEN_AS = {each.name: each for each in (WHOLE, FrozenAs("bfloat16"), FrozenAs("int8", scaled=True))}
