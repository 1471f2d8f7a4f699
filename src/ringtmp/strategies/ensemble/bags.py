"""How often a sample is in each member's bag. Pure: a function of the run's seed, the member and the sample's number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ringtmp.data.batches import Batch

#: P(k or fewer) of a Poisson distribution of mean 1; a count beyond the last is one in ten million.
_UP_TO = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(10)])
#: Samples of a stream have no numbers: they are counted within their step.
_STEP = 1 << 32


def counts(numbers: torch.Tensor, member: int, members: int, sample: str, seed: int) -> torch.Tensor:
    """Of each of these samples."""
    if sample == "shard":
        return (numbers % members == member).long()
    chance = _uniform(numbers.numpy().astype(np.uint64), np.uint64((seed * 1_000_003 + member) % 2**64))
    return torch.from_numpy(np.searchsorted(_UP_TO, chance))


def numbers_of(batch: Batch, step: int) -> torch.Tensor:
    if batch.numbers is None:
        return torch.arange(batch.samples) + step * _STEP
    return torch.cat(list(batch.numbers))


def pieces(samples: int, microbatches: int, least: int) -> tuple[int, ...]:
    """A bag's part of a batch in at most so many microbatches of at least `least` samples; none where there are fewer."""
    count = min(microbatches, samples // max(1, least))
    return tuple(len(each) for each in torch.arange(samples).tensor_split(count)) if count else ()


def _uniform(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64 (Steele et al. 2014) of each number, as a part of 1."""
    with np.errstate(over="ignore"):
        mixed = _mix(numbers + _mix(np.full_like(numbers, key)))
    found: np.ndarray = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
    return found


def _mix(values: Any) -> Any:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
