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

from ringtmp.model.portable_layer import Layer

Norms = list[torch.Tensor]
#: In the place of the norm of a parameter that got no gradient, and which torch would leave out.
NO_GRADIENT = -1.0


def norm_of(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return parameter.new_full((), NO_GRADIENT) if gradient is None else torch.linalg.vector_norm(gradient)


def norms_of(parameters: Iterable[torch.Tensor]) -> Norms:
    """One norm per parameter, in their order: a vector for each run of one dtype."""
    found = [norm_of(each.grad, each) for each in parameters]
    return [torch.stack(list(run)) for _, run in groupby(found, key=lambda each: each.dtype)]


def parameter_order(layers: Iterable[Layer]) -> tuple[int, ...]:
    """For every trainable parameter, in the order of the layers, its place among the model's; empty: they agree."""
    ranks = [each.rank for layer in layers for each in layer.tensors if each.trainable]
    return () if ranks == sorted(ranks) else tuple(sorted(range(len(ranks)), key=lambda at: ranks[at]))


def total_norm(parts: Sequence[torch.Tensor], order: Sequence[int] = ()) -> torch.Tensor:
    """Of everything; `parts` as `norms_of` gives them, those of later layers after those of earlier ones. `order`: which of
    them comes first for the model, which second, where that is not the order of its layers."""
    if order:
        norms = [norm for part in parts for norm in part.unbind()]
        parts = [norms[at].reshape(1) for at in order]
    parts = [kept for each in parts if len(kept := each[each != NO_GRADIENT])]
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
