"""Export takes the path that eager mode takes.

The transformers library asks whether it is being traced, and if so builds explicit attention masks and repeats heads where
eager mode leaves that to the kernel: other operators, other bits. So while a model is exported the answer is no, and the
graph is compared with eager mode as it is. If a mask is given, eager mode looks at its values to choose a path, which no
graph can do. Then the answer is yes both for the export and for the eager mode it is compared with, and the model is
defined as the path with the mask (docs/models.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import CodeType, FunctionType
from typing import Any

#: The functions that transformers asks whether it is being traced, and one that looks at the values of positions, which
#: follow from shapes. Other modules have imported them by name, so it is their code that is replaced.
_UTILS, _MASKS = "transformers.utils.import_utils", "transformers.masking_utils"
_ASKED = ("is_torchdynamo_compiling", "is_torchdynamo_exporting", "is_tracing")


def _no(*args: Any, **kwargs: Any) -> Any:
    return False


def _yes(*args: Any, **kwargs: Any) -> Any:
    return True


def _nothing(*args: Any, **kwargs: Any) -> Any:
    return None


def paths() -> list[Callable[[], AbstractContextManager[None]]]:
    """The ways a model may go, the one eager mode goes first. Both the export and eager mode go it."""
    if _UTILS not in sys.modules:
        return [nullcontext]
    plain = {(_UTILS, name): _no for name in _ASKED} | {(_MASKS, "find_packed_sequence_indices"): _nothing}
    traced = {(_UTILS, name): _yes for name in _ASKED}
    return [partial(_answered, plain), partial(_answered, traced)]


@contextmanager
def _answered(answers: dict[tuple[str, str], Any]) -> Iterator[None]:
    kept: list[tuple[FunctionType, CodeType]] = []
    for (module, name), answer in answers.items():
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, FunctionType) and not found.__closure__:
            kept.append((found, found.__code__))
            found.__code__ = answer.__code__
    try:
        yield
    finally:
        for found, code in kept:
            found.__code__ = code
