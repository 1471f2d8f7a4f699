"""Where in the user's own code something happened: file, line and what is written there; in place of what torch prints."""

from __future__ import annotations

import importlib
import linecache
import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent)


def is_library(file: str) -> bool:
    """Torch's own code, and ours."""
    return file.startswith((_TORCH, _OURS, "<"))


def of_error(error: BaseException) -> str:
    """' (mine.py:12: if x.sum() > 0:)', the innermost line of the user's on the way to an error; empty: there is none."""
    frames = [(each.filename, each.lineno or 0) for each in traceback.extract_tb(error.__traceback__)]
    return _innermost(frames)


def of_node(node: Node) -> str:
    """' in layers.0.attention (mine.py:12: return x @ y)': the module and the line that an operator comes from."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    found = re.findall(r'File "(.*?)", line (\d+)', node.meta.get("stack_trace") or "")
    return (f" in {path}" if path else "") + _innermost([(file, int(line)) for file, line in found])


def _innermost(frames: list[tuple[str, int]]) -> str:
    for file, line in reversed(frames):
        if not is_library(file):
            code = linecache.getline(file, line).strip()
            return f" ({Path(file).name}:{line}{': ' if code else ''}{code[:80]})"
    return ""


@contextmanager
def instead_of_torch() -> Iterator[None]:
    """While a module is exported, torch does not print the graph so far, nor warn that it knows no line; we say the line."""
    trace: Any = importlib.import_module("torch.export._trace")
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = shapes.level
    trace.print = lambda *_, **__: None
    shapes.setLevel(logging.ERROR)
    try:
        yield
    finally:
        del trace.print
        shapes.setLevel(level)
