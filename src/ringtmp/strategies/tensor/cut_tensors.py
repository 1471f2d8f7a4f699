"""How a tensor is cut over the workers, taken apart and put together again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Cut(NamedTuple):
    """A dimension that lies in `groups` equal blocks, each of which is shared out evenly, in the order of the workers.

    With 2 workers, 12 rows and 3 groups (queries, keys and values of an attention) worker 0 has rows 0 1, 4 5 and 8 9.
    """

    dim: int
    groups: int = 1

    def divides(self, size: int, workers: int) -> bool:
        return size % (self.groups * workers) == 0


def part(tensor: torch.Tensor, cut: Cut, rank: int, workers: int) -> torch.Tensor:
    """What a worker has of it; freshly allocated."""
    before, after = tensor.shape[: cut.dim], tensor.shape[cut.dim + 1 :]
    blocks = tensor.reshape(*before, cut.groups, workers, -1, *after).select(cut.dim + 1, rank)
    return blocks.reshape(*before, -1, *after).clone(memory_format=torch.contiguous_format)


def part_shape(shape: Sequence[int], cut: Cut | None, workers: int) -> tuple[int, ...]:
    return tuple(size // workers if cut and dim == cut.dim else size for dim, size in enumerate(shape))


def joined(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """The whole of all parts, in the order of the workers."""
    before, after = parts[0].shape[: cut.dim], parts[0].shape[cut.dim + 1 :]
    blocks = [each.reshape(*before, cut.groups, -1, *after) for each in parts]
    return torch.stack(blocks, cut.dim + 1).reshape(*before, -1, *after)
