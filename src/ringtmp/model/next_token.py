"""Which token comes next, of the scores a model gives: the best, or drawn by chance. Pure but for its generator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ringtmp.errors import UsageError


@dataclass(frozen=True)
class Choice:
    """All None: the best token always. Otherwise tokens are drawn: of the `top_k` best, of the fewest whose chances add up
    to `top_p`, and the more evenly the higher the `temperature`."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature is not None and not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UsageError(f"--temperature {self.temperature:g} must be at least 0; 0 takes the best token always")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p:g} must be above 0 and at most 1")

    @property
    def best(self) -> bool:
        return self.temperature == 0 or (self.temperature is None and self.top_k is None and self.top_p is None)


class Chooser:
    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._generator = torch.Generator().manual_seed(choice.seed)

    def __call__(self, scores: torch.Tensor) -> int:
        """`scores`: (vocabulary,)."""
        if self._choice.best:
            return int(scores.argmax())
        return int(torch.multinomial(chances(scores, self._choice), 1, generator=self._generator))


def chances(scores: torch.Tensor, choice: Choice) -> torch.Tensor:
    scores = scores.double() / (1.0 if choice.temperature is None else choice.temperature)
    if choice.top_k is not None and choice.top_k < len(scores):
        least = scores.topk(choice.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -math.inf)
    found = scores.softmax(0)
    if choice.top_p is not None:
        ordered, places = found.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        found = found.index_fill(0, places[before >= choice.top_p], 0.0)
    return found
