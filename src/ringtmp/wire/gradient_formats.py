"""Formats for gradients that add up: so coarse that only the next gradient under the same name makes up for what they lose.

1bit    F. Seide et al., 1-bit Stochastic Gradient Descent, Interspeech 2014: a value travels as its sign, and stands for the
        mean of the values of its sign in its block. (A block is 512 values in a row, where the paper has a column.)
topk    A. Aji, K. Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017: of every `block` values one
        travels, the largest of them all, with its place; the others stand for zero.

Error bounds, for x of n values and y what arrives. 1bit: y is the projection of x on what signs and blocks can say, so
|x - y|^2 = |x|^2 - |y|^2, and every block keeps its sum. topk: |x - y|^2 <= (1 - k/n) |x|^2, and no value that is left out is
larger than one that is sent. With error feedback the sum of all that arrived differs from the sum of all that was meant by
the last remainder alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringtmp.errors import ProtocolError
from ringtmp.wire.format_type import PLAIN, WireFormat

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OneBit(WireFormat):
    """Signs, eight to a byte, and for every block the means of its negative values and of the others."""

    exact = False
    width = 2

    def payload_bytes(self, values: int) -> int:
        return -(-values // 8) + 8 * -(-values // self.block)

    def travels(self, dtype: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]] | None]:
        values = _vector(dtype, shape)
        return [("uint8", (-(-values // 8),)), ("float32", (-(-values // self.block), 2))]

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        import numpy as np
        import torch

        positive = tensor >= 0  # what is not a number is not, and its block's mean shows it
        bits = torch.from_numpy(np.packbits(positive.numpy()))
        values, signs = self._blocks(tensor), self._blocks(positive)
        above, below = signs.sum(1), self._blocks(~positive).sum(1)
        high = values.where(signs, 0.0).sum(1) / above.clamp(min=1)
        low = values.where(~signs, 0.0).sum(1) / below.clamp(min=1)
        return [bits, torch.stack([low, high], 1)]

    def decode(self, sent: Sequence[torch.Tensor], size: int | None = None) -> torch.Tensor:
        import numpy as np
        import torch

        if len(sent) != self.width:  # it came whole
            return sent[0]
        assert size is not None, "the last byte of signs may have room to spare"
        bits, means = sent
        signs = self._blocks(torch.from_numpy(np.unpackbits(bits.numpy(), count=size)).bool())
        return torch.where(signs, means[:, 1:], means[:, :1]).reshape(-1)[:size].contiguous()


@dataclass(frozen=True)
class TopK(WireFormat):
    """The values, and where they belong."""

    exact = False
    width = 2

    def kept(self, values: int) -> int:
        return -(-values // self.block)

    def payload_bytes(self, values: int) -> int:
        return 8 * self.kept(values)

    def travels(self, dtype: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]] | None]:
        kept = self.kept(_vector(dtype, shape))
        return [("float32", (kept,)), ("int32", (kept,))]

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        import torch

        # What is not a number counts as the largest, so that it arrives and is seen.
        size = tensor.abs().nan_to_num(nan=torch.inf)
        places = size.topk(self.kept(tensor.numel()), sorted=False).indices.sort().values
        return [tensor[places], places.int()]

    def decode(self, sent: Sequence[torch.Tensor], size: int | None = None) -> torch.Tensor:
        import torch

        if len(sent) != self.width:  # it came whole
            return sent[0]
        assert size is not None, "what is left out says nothing of how much it is"
        values, places = sent[0], sent[1].long()
        if places.numel() and (int(places.min()) < 0 or int(places.max()) >= size):
            raise ProtocolError(f"sent a value for place {int(places.max())} of a gradient of {size} values")
        return torch.zeros(size).index_put_((places,), values)


def _vector(dtype: str, shape: tuple[int, ...]) -> int:
    """Gradients travel as flat vectors of float32."""
    assert (dtype, len(shape)) == (PLAIN.name, 1), (dtype, shape)
    return shape[0]
