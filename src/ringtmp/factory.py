"""User code by name: FILE.py:factory or package.module:factory. Runs on the master, never on a worker."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringtmp.errors import UsageError, unknown


def is_factory(name: str) -> bool:
    where, separator, what = name.rpartition(":")
    looks = where.endswith(".py") or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", where) is not None
    return bool(separator and looks and what.isidentifier())


def load_factory(kind: str, name: str) -> Callable[..., Any]:
    where, _, what = name.rpartition(":")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except UsageError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise UsageError(f"{kind} {name!r}: {where} cannot be imported: {type(error).__name__}: {error}") from error
    made = getattr(module, what, None)
    if made is None:
        raise unknown(f"name in {where}", what, [each for each in vars(module) if not each.startswith("_")])
    if not callable(made):
        raise UsageError(f"{kind} {name!r}: {what} is a {type(made).__name__}, not a function")
    factory: Callable[..., Any] = made
    return factory


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Neighbouring files are importable, as when the file is run by hand.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
