"""Wire formats: tensors that travel with fewer bits than they are computed with. To add one, write its entry in WIRE_FORMATS.

float32   as it is, 4 bytes a value          bfloat16, float16   rounded to nearest, 2 bytes
int8      1 byte and a float32 scale for every 256 values: value = scale * q, scale = max|block| / 127
1bit      gradients only: a sign, and two float32 means for every 512 values
topk      gradients only: the largest of every 32 values, with its place
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringtmp.errors import unknown
from ringtmp.wire.format_type import PLAIN, ErrorFeedback, WireFormat
from ringtmp.wire.gradient_formats import OneBit, TopK

if TYPE_CHECKING:
    import torch

__all__ = ["PLAIN", "WIRE_FORMATS", "ErrorFeedback", "WireFormat", "wire_format"]
_FLOAT16_LARGEST = 65504.0


def _to_float16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clamp(
        -_FLOAT16_LARGEST, _FLOAT16_LARGEST
    ).half()  # beyond its largest number it would become infinite


def _to_int8(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.round_().clamp_(-127, 127).nan_to_num_(0.0).char()


WIRE_FORMATS: dict[str, WireFormat] = {
    each.name: each
    for each in (
        PLAIN,
        WireFormat("bfloat16", 2, lambda tensor: tensor.bfloat16()),
        WireFormat("float16", 2, _to_float16),
        WireFormat("int8", 1, _to_int8, block=256, carries_error=True),
        OneBit("1bit", 0, block=512, carries_error=True, gradients_only=True),
        TopK("topk", 8, block=32, carries_error=True, gradients_only=True),
    )
}


def wire_format(name: str) -> WireFormat:
    if name not in WIRE_FORMATS:
        raise unknown("wire format", name, WIRE_FORMATS)
    return WIRE_FORMATS[name]
