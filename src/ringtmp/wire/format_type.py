"""What a wire format is: how a tensor travels, how much it takes, what is lost; and how what is lost is made up for.

Only float32 tensors are changed; indices, masks and halves travel as they are. Torch is loaded by the first tensor: what a
format is called and how much it takes is known without.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WireFormat:
    """Its name is the dtype of values that travel."""

    name: str
    value_bytes: int
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None  # None: nothing is lost
    block: int = 0  # values that share a float32 scale, which travels beside them; 0: there are none
    #: So coarse that what rounding takes away is made up for by the next tensor, and parameters travel as changes.
    carries_error: bool = False
    #: Right only where the next tensor under the same name makes up for it: gradients that add up, and no activations.
    gradients_only: bool = False

    @property
    def exact(self) -> bool:
        """Whether a run has the bits it has in one process."""
        return self.rounded is None

    @property
    def width(self) -> int:
        """Tensors that travel for each: values, and their scales."""
        return 2 if self.block else 1

    def payload_bytes(self, values: int) -> int:
        """Of so many float32 numbers."""
        return values * self.value_bytes + (4 * -(-values // self.block) if self.block else 0)

    def travels(self, dtype: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]] | None]:
        """Types and shapes of what `encode` makes of a tensor, None where `pack` leaves a hole."""
        if dtype != PLAIN.name:
            return [(dtype, shape), *[None] * (self.width - 1)]
        values = 1
        for size in shape:
            values *= size
        scales = [(PLAIN.name, (-(-values // self.block),))] if self.block else []
        return [(self.name, shape), *scales]

    def encode(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What to send for a tensor: itself, its half, or (int8 values, scales)."""
        import torch

        if self.rounded is None or tensor.dtype != torch.float32:
            return [tensor]
        if not self.block:
            return [self.rounded(tensor)]
        blocks = self._blocks(tensor)
        scales = blocks.abs().amax(1) / 127
        steps = torch.where(scales > 0, scales, torch.ones_like(scales))  # a block of zeros; NaN stays in the scale
        return [self.rounded(blocks / steps[:, None]).reshape(-1)[: tensor.numel()].reshape(tensor.shape), scales]

    def decode(self, sent: Sequence[torch.Tensor], size: int | None = None) -> torch.Tensor:
        """The float32 tensor a peer meant, as near as the format lets it be. `size`: how many values it has, which a
        format for gradients alone must be told."""
        import torch

        first = sent[0]
        if self.rounded is None or first.dtype != getattr(torch, self.name) or len(sent) != self.width:
            return first
        if not self.block:
            return first.to(torch.float32)
        blocks = self._blocks(first.to(torch.float32))
        return (blocks * sent[1][:, None]).reshape(-1)[: first.numel()].reshape(first.shape)

    def pack(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """A message's tensors for the wire, holes included: `width` for each."""
        packed: list[torch.Tensor | None] = []
        for tensor in tensors:
            sent = [] if tensor is None else self.encode(tensor)
            packed += [*sent, *[None] * (self.width - len(sent))]
        return packed

    def unpack(self, packed: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What `pack` was given, as near as the format lets it be."""
        found: list[torch.Tensor | None] = []
        for start in range(0, len(packed), self.width):
            sent = [each for each in packed[start : start + self.width] if each is not None]
            found.append(self.decode(sent) if sent else None)
        return found

    def _blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        flat = tensor.reshape(-1)
        missing = -flat.numel() % self.block
        if missing:
            flat = torch.cat([flat, flat.new_zeros(missing)])
        return flat.view(-1, self.block)


class ErrorFeedback:
    """Encodes what goes out under one name time after time: what a coarse format takes away is added to the next."""

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire
        self._taken_away: dict[Hashable, torch.Tensor] = {}

    def encode(self, name: Hashable, values: torch.Tensor) -> list[torch.Tensor]:
        if not self._wire.carries_error:
            return self._wire.encode(values)
        before = self._taken_away.get(name)
        wanted = values if before is None else values + before
        sent = self._wire.encode(wanted)
        self._taken_away[name] = wanted - self._wire.decode(sent, wanted.numel())
        return sent


#: As it is computed with.
PLAIN = WireFormat("float32", 4)
