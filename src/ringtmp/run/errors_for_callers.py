"""What somebody who calls us from Python sees of an error in what they gave: the call, the sentence, and their own line where
it went wrong, if there is one. Not where in here, nor where in torch: that is hundreds of lines in a notebook."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
_OURS = Path(__file__).parents[1]
_LIBRARIES = tuple({Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def without_inside(error: E) -> E:
    """To be raised `from None`."""
    line = _line_of_caller(error)
    if line and line not in getattr(error, "__notes__", ()):
        error.add_note(line)
    return error.with_traceback(None)


def _line_of_caller(error: BaseException) -> str:
    """Of what caused it, innermost first."""
    found = ""
    cause, seen = error.__cause__, set[int]()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        for frame in traceback.extract_tb(cause.__traceback__):
            if _of_caller(frame.filename):
                found = f"In your code: {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
        cause = cause.__cause__
    return found


def _of_caller(file: str) -> bool:
    """Not ours, of no library, and no code that was made while it ran; a cell of a notebook is a file in a temporary folder."""
    path = Path(file)
    return (
        not file.startswith("<")
        and "site-packages" not in path.parts
        and not any(path.is_relative_to(each) for each in (_OURS, *_LIBRARIES))
    )
