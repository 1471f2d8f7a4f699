"""Types, layouts and memory formats by the names they have in a graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ringtmp.errors import ProtocolError
from ringtmp.model.portable_layer import Named

#: Numbers of whole bytes. Quantized and packed kinds are for operators that are not listed.
_PLAIN = re.compile(r"torch\.(bool|bfloat16|u?int(8|16|32|64)|(float|complex)(8_\w+|16|32|64|128))")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and _PLAIN.fullmatch(str(dtype))
}
_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def dtype_of(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ProtocolError(f"unknown dtype {name!r}")
    return _DTYPES[name]


def torch_constant(value: Named, device: torch.device) -> Any:
    if value.kind == "device":
        return device
    tables: dict[str, Mapping[str, Any]] = {"dtype": _DTYPES, "layout": _LAYOUTS, "memory_format": _FORMATS}
    table = tables[value.kind]
    if value.name not in table:
        raise ProtocolError(f"unknown {value.kind} {value.name!r}")
    return table[value.name]
