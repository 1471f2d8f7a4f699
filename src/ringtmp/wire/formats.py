"""Tensors that travel with fewer bits than they are computed with: bfloat16, float16, int8 with a scale per block.

    float32   as it is, 4 bytes a value          bfloat16, float16   rounded to nearest, 2 bytes
    int8      1 byte and a float32 scale for every 256 values: value = scale * q, scale = max|block| / 127

Only float32 tensors are changed; indices, masks and halves travel as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 256
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT16_LARGEST = 65504.0


def encode(wire: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """What to send for a tensor: itself, its half, or (int8 values, scales)."""
    if wire == "float32" or tensor.dtype != torch.float32:
        return [tensor]
    if wire == "float16":  # beyond its largest number it would become infinite
        return [tensor.clamp(-_FLOAT16_LARGEST, _FLOAT16_LARGEST).to(torch.float16)]
    if wire == "bfloat16":
        return [tensor.to(torch.bfloat16)]
    blocks = _blocks(tensor)
    scales = blocks.abs().amax(1) / 127
    steps = torch.where(scales > 0, scales, torch.ones_like(scales))  # a block of zeros; NaN stays in the scale
    values = (blocks / steps[:, None]).round_().clamp_(-127, 127).nan_to_num_(0.0).to(torch.int8)
    return [values.reshape(-1)[: tensor.numel()].reshape(tensor.shape), scales]


def decode(wire: str, sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """The float32 tensor a peer meant, as near as the wire lets it be."""
    first = sent[0]
    if wire == "int8" and first.dtype == torch.int8 and len(sent) == 2:
        blocks = _blocks(first.to(torch.float32))
        return (blocks * sent[1][:, None]).reshape(-1)[: first.numel()].reshape(first.shape)
    if wire in _HALVES and first.dtype == _HALVES[wire]:
        return first.to(torch.float32)
    return first


def pack(wire: str, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """A message's tensors for the wire, holes included; of int8 every one becomes two: values, and scales or nothing."""
    packed: list[torch.Tensor | None] = []
    for tensor in tensors:
        sent: list[torch.Tensor | None] = [None] if tensor is None else list(encode(wire, tensor))
        packed += sent if wire != "int8" or len(sent) == 2 else [*sent, None]
    return packed


def unpack(wire: str, packed: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """What `pack` was given, as near as the wire lets it be."""
    width = 2 if wire == "int8" else 1
    found: list[torch.Tensor | None] = []
    for start in range(0, len(packed), width):
        sent = [each for each in packed[start : start + width] if each is not None]
        found.append(decode(wire, sent) if sent else None)
    return found


def wire_bytes(wire: str, values: int) -> int:
    """Payload of `values` float32 numbers."""
    if wire == "int8":
        return values + 4 * -(-values // BLOCK)
    return values * (2 if wire in _HALVES else 4)


def _blocks(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    missing = -flat.numel() % BLOCK
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(-1, BLOCK)
