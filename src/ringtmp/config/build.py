"""Settings put together, checked one by one, and changed for a resumed run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ringtmp.config.setting_declaration import Setting, listed, settings_of
from ringtmp.config.settings import DEFAULT_MICROBATCHES, RunConfig, TrainingPart
from ringtmp.errors import UsageError, unknown

PARTS: dict[str, type[msgspec.Struct]] = {
    field.name: type(field.default) for field in msgspec.structs.fields(RunConfig)
}
#: Every setting by the name of its field, in the order of `--help`.
SETTINGS: dict[str, Setting] = settings_of(PARTS)


def value_of(config: RunConfig, name: str) -> Any:
    return getattr(getattr(config, SETTINGS[name].part), name)


def replaced(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """The settings with other values in the fields that `given` names."""
    parts = {
        part: msgspec.structs.replace(
            getattr(config, part), **{key: value for key, value in given.items() if SETTINGS[key].part == part}
        )
        for part in PARTS
    }
    return msgspec.structs.replace(config, **parts)


def checked(config: RunConfig) -> RunConfig:
    """The settings, each of its type and in its range: from Python anything may come."""
    try:
        config = from_tree(msgspec.to_builtins(config))
    except TypeError as error:
        raise UsageError(str(error)) from error
    for setting in SETTINGS.values():
        setting.check(value_of(config, setting.name))
    return config


def from_tree(tree: Mapping[str, Any], where: str = "") -> RunConfig:
    """Values by section and field, as a file has them; `where`: the file, for errors."""
    try:
        return msgspec.convert(tree, RunConfig, strict=True)
    except msgspec.ValidationError as error:
        raise _refused(str(error), where) from error


_WORDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "object": "a table",
    "array": "a list", "null": "nothing",
}  # fmt: skip


def _refused(said: str, where: str) -> UsageError:
    """What msgspec says of a value, with the setting's own name and, of a choice, the choices."""
    found = re.fullmatch(r"(.*) - at `\$\.(\w+)\.(\w+)(.*)`", said)
    if found is None:
        return UsageError(f"{said}{where}")
    what, part, field, deeper = found.groups()
    wrong = re.fullmatch(r"Invalid enum value '?(.*?)'?", what)
    if wrong is not None and SETTINGS[field].choices:
        setting = SETTINGS[field]
        return unknown(setting.option if setting.said.option else field.replace("_", "-"), wrong[1], setting.choices)
    kinds = re.fullmatch(r"Expected `(.*)`, got `(.*)`", what)
    if kinds is not None:
        wanted = tuple(_WORDS.get(each, each) for each in kinds[1].split(" | ") if each != "null")
        got = "a number with a fraction" if kinds[2] == "float" else _WORDS.get(kinds[2], kinds[2])
        what = f"must be {listed(wanted, 'or')}, not {got}"
    return UsageError(f"{part}.{field}{deeper} {what}{where}")


def usual_microbatches(training: TrainingPart) -> int:
    """The number that was given, else the usual one; never more than there are samples."""
    given = training.microbatches
    return min(given if isinstance(given, int) else DEFAULT_MICROBATCHES, training.batch_size)


def _cannot(setting: Setting, before: Any, after: Any) -> str:
    """Of a setting that is a table of others, the first that differs is named."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in after.items():
            if before.get(key) != value:
                was = f"it is {before[key]!r}" if key in before else "it is not set"
                return f"--resume cannot change {key} of {setting.title} ({was} in that run)"
    return f"--resume cannot change {setting.title} (it is {before!r} in that run)"


def merge_for_resume(saved: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """The saved settings with what the user gave anew; refuses what would change the bits."""
    of_optimizer = {key: value for key, value in given.items() if key in saved.training.optimizer_settings}
    if of_optimizer:  # lr=0.1, say, which Python's resume takes like any other name
        given = {key: value for key, value in given.items() if key not in of_optimizer}
        given["optimizer_settings"] = {**given.get("optimizer_settings", {}), **of_optimizer}
    changed = dict(given)
    resumable = [setting for setting in SETTINGS.values() if setting.resumable]
    for key, value in given.items():
        if key not in SETTINGS:
            raise unknown("setting to change on resume", key, [setting.name for setting in resumable])
        before = value_of(saved, key)
        if isinstance(before, dict) and isinstance(value, Mapping):  # what is not named stays
            value = changed[key] = {**before, **value}
        again = key == "data" and before == "given"  # nobody can name what Python gave
        if not SETTINGS[key].resumable and not again and before != value:
            why = (
                "it would change the weights"
                if SETTINGS[key].said.bits
                else "the run directory has the model as it was cut"
            )
            raise UsageError(
                f"{_cannot(SETTINGS[key], before, value)}: {why}. "
                f"It may change {listed(tuple(each.title for each in resumable), 'and')}"
            )
    if "epochs" in given:
        changed.setdefault("steps", None)
    elif given.get("steps"):
        changed["epochs"] = None
    # What was made for the ring of before is the plan's again, and a new route goes before the laps of before.
    if given.get("route") == "v":
        changed.setdefault("laps", 1)
    if given.get("laps", 1) != 1:
        changed.setdefault("route", SETTINGS["route"].default)
    if {"nodes", "laps", "route"} & given.keys():
        changed.setdefault("cuts", None)
    if {"nodes", "laps", "route", "schedule"} & given.keys():
        changed.setdefault("window", None)
    return replaced(saved, changed)
