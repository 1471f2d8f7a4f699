"""What is still in memory when a round of work is over."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def assert_lets_go(living: Callable[[], int]) -> None:
    """What lives after a round of work is no more than after the one before, without a garbage collection."""
    living()  # the optimizer's and the parameters' own
    gc.collect()
    gc.disable()
    try:
        before = living()
        assert living() == before
    finally:
        gc.enable()


def living_tensors() -> int:
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
