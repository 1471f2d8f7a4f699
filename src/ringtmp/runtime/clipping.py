"""The norm of all gradients over several nodes: what torch's own clipping computes of them in one process.

Torch takes a norm per parameter, in the parameter's dtype, then the norm of all these in the order of
`_group_tensors_by_device_and_dtype`: parameter order within a dtype, dtypes in an order that depends on which it meets. So
norms travel in parameter order and keep their dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.utils import _foreach_utils

Norms = list[torch.Tensor]


def norms_of(parameters: Iterable[torch.Tensor]) -> Norms:
    """One norm per parameter that has a gradient, in their order: a vector for each run of one dtype."""
    found = [torch.linalg.vector_norm(each.grad) for each in parameters if each.grad is not None]
    return [torch.stack(list(run)) for _, run in groupby(found, key=lambda each: each.dtype)]


def total_norm(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of everything; `parts` as `norms_of` gives them, those of later layers after those of earlier ones."""
    if not parts:
        return torch.tensor(0.0)
    if len({each.dtype for each in parts}) == 1:
        together = torch.cat(list(parts))
    else:
        every: Any = [norm for part in parts for norm in part.unbind()]
        groups: Any = _foreach_utils._group_tensors_by_device_and_dtype([every])
        together = torch.stack([norm for [members], _ in groups.values() for norm in members])
    total: torch.Tensor = torch.linalg.vector_norm(together)
    return total
