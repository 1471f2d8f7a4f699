"""Functions of the user's own, named as FILE.py:factory or package.module:factory. They run on the master
alone."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ringtmp.errors import RingError, UsageError, unknown


def is_factory(name: str) -> bool:
    where, separator, what = name.rpartition(":")
    looks = where.endswith(".py") or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", where) is not None
    return bool(separator and looks and what.isidentifier())


def refuse_file_alone(kind: str, name: str) -> None:
    """A file without the function to call in it: says which it has."""
    if not name.removesuffix(":").endswith(".py"):
        return
    path = Path(name.removesuffix(":"))
    if not path.is_file():
        raise UsageError(f"no file {path}")
    try:
        top = ast.parse(path.read_text()).body
    except (OSError, ValueError, SyntaxError) as error:
        raise UsageError(f"{kind} {name!r}: {path} cannot be read: {error}") from error
    has = [each.name for each in top if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name[0] != "_"]
    choice = f"it has {', '.join(has)}" if has else "it has no function yet"
    raise UsageError(
        f"{kind} {name!r} needs the name of a function: write --{kind} {path}:{(has or ['NAME'])[0]}; {choice}"
    )


def call_factory(kind: str, name: str, settings: Mapping[str, Any]) -> Callable[[], Any]:
    """The user's function with its settings, ready to be called; settings it does not take are refused at once."""
    factory = load_factory(kind, name)
    try:
        takes = tuple(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # some callables have none
        takes = ()
    if takes and not any(each.kind is each.VAR_KEYWORD for each in takes):
        known = [each.name for each in takes if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        for key in settings:
            if key not in known:
                raise unknown(f"setting of {name}", key, known)
        for each in takes:
            if each.name in known and each.default is each.empty and each.name not in settings:
                raise UsageError(f"{kind} {name!r} needs a value for {each.name}: give it with --set {each.name}=VALUE")
    elif settings and not takes:
        raise UsageError(f"{kind} {name!r} takes no settings: leave out --set {next(iter(settings))}")

    def call() -> Any:
        try:
            return factory(**settings)
        except RingError:
            raise
        except Exception as error:  # the user's own code may raise anything
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise UsageError(
                f"{kind} {name!r} raised {type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
            ) from error

    return call


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
        has = [each for each, item in vars(module).items() if each[0] != "_" and callable(item)]
        raise unknown(f"name in {where}", what, has)
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
