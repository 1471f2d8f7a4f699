"""The number of the protocol and the names of its wires, apart from the rest: they are named without loading torch."""

from __future__ import annotations

PROTOCOL = 7
#: How float32 tensors may travel; see lossy.py.
WIRES = ("float32", "bfloat16", "float16", "int8")
