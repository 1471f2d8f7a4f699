"""What a run computes in: float32, or bfloat16 wherever torch's autocast takes it. The names need no torch.

Under bfloat16 every forward pass, loss included, runs under autocast: products of matrices and convolutions take rounded
copies of their operands, sums that need it stay float32. What goes backward has the type that went forward; weights,
gradients of weights, optimizer and checkpoints stay float32. Autocast's cache of rounded weights is off: with it the
gradients of a weight that is used twice would add up in bfloat16, in an order that a cut would change.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringtmp.model.frozen_formats import FLOAT32

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ComputeIn:
    name: str  # of the kind of number, as torch has it
    mode: str  # the numeric mode of a run

    @property
    def plain(self) -> bool:
        return self.name == FLOAT32


PLAIN_COMPUTE = ComputeIn(FLOAT32, FLOAT32)
COMPUTE_IN = {each.name: each for each in (PLAIN_COMPUTE, ComputeIn("bfloat16", "bfloat16 compute"))}


def going_forward(compute: str, device: str = "cpu") -> AbstractContextManager[object]:
    """For as long as something goes forward; what goes backward stays outside."""
    if COMPUTE_IN[compute].plain:
        return nullcontext()
    import torch

    return torch.autocast(device, getattr(torch, compute), cache_enabled=False)


def as_written(device: str = "cpu") -> AbstractContextManager[object]:
    """For what must not be rounded although it is called while something goes forward."""
    import torch

    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """As autocast gives it to a product of matrices here."""
    import torch

    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
