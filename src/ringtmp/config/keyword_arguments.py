"""Settings as keywords of `Ring` and `fit`: who takes which, what help() shows, and a sentence for what nobody takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from ringtmp.config.build import SETTINGS
from ringtmp.config.setting_declaration import Setting
from ringtmp.errors import UsageError, nearest

Call = Literal["Ring", "fit"]
F = TypeVar("F", bound=Callable[..., Any])
#: What people call an argument elsewhere.
_ELSEWHERE = {
    "test": "test_data", "val_data": "test_data", "validation_data": "test_data", "valid_data": "test_data",
    "data": "train_data", "criterion": "loss", "loss_fn": "loss", "callbacks": "watcher",
    "strategy_settings": "settings",
}  # fmt: skip
#: Options of the command line that are no argument, and what to do instead.
_COMMANDS = {
    "dashboard": "the page of a run from Python is a command beside it: give fit a run_dir, and in a terminal type "
    "ringtmp watch RUN_DIR",
}


def taken_by(call: Call) -> dict[str, Setting]:
    """The settings that a call takes, by keyword."""
    return {setting.keyword: setting for setting in SETTINGS.values() if setting.keyword_of == call}


def shows_settings(call: Call) -> Callable[[F], F]:
    """Lets help() and editors see the settings a call takes, with their defaults, in place of `**settings`."""

    def shown(function: F) -> F:
        signature, taken = inspect.signature(function), taken_by(call)
        plain = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        named = [each.replace(default=taken[each.name].default) if each.name in taken else each for each in plain]
        names = {each.name for each in plain}
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=setting.kind)
            for name, setting in taken.items()
            if name not in names
        ]
        function.__signature__ = signature.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return function

    return shown


def fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords become the names of the settings' fields."""
    names = {setting.keyword: setting.name for setting in SETTINGS.values() if setting.keyword_of}
    found = {names.get(key, key): dict(value) if isinstance(value, Mapping) else value for key, value in given.items()}
    return {key: value for key, value in found.items() if key != "strategy_settings" or value is not None}


def checked_keywords(call: Call, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, by field; a sentence for an argument that the call does not take."""
    other: Call = "fit" if call == "Ring" else "Ring"
    for name in given:
        if name in taken_by(call):
            continue
        if name in taken_by(other):
            how = f"Ring({name}=...).fit(...)" if other == "Ring" else f"Ring(...).fit(..., {name}=...)"
            raise UsageError(f"{name} is an argument of {other}: write {how}")
        if name in ("lr", "learning_rate", "momentum", "weight_decay"):
            key = "lr" if name == "learning_rate" else name
            raise UsageError(f'{name} belongs to the optimizer: write optimizer=("adam", {{"{key}": {given[name]!r}}})')
        if name in _COMMANDS:
            raise UsageError(f"{call} has no argument {name!r}: {_COMMANDS[name]}")
        takes = inspect.signature(function).parameters.values()
        known = [each.name for each in takes if each.kind is not each.VAR_POSITIONAL][1:]
        meant = _ELSEWHERE.get(name) if _ELSEWHERE.get(name) in known else nearest(name, known)
        hint = f"did you mean {meant}? " if meant else ""
        if call == "Ring" and not meant:
            hint = f"if it is a setting of the strategy, write settings={{{name!r}: {given[name]!r}}}; "
        raise UsageError(f"{call} has no argument {name!r}: {hint}it takes {', '.join(known)}")
    return fields(given)
