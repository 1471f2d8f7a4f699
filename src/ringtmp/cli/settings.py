"""Settings from a file, the environment and flags become a RunConfig; the later wins."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ringtmp.config import SETTINGS, RunConfig, from_tree
from ringtmp.errors import UsageError, unknown

#: Of settings that say the same in two ways, which one a flag takes the place of.
_INSTEAD = {"steps": "epochs", "epochs": "steps"}


def build(file: Path | None, flags: dict[str, Any]) -> RunConfig:
    """Defaults < file < environment and flags (click has merged the last two already)."""
    tree: dict[str, dict[str, Any]] = {setting.part: {} for setting in SETTINGS.values()}
    for part, values in _read(file).items() if file is not None else ():
        if part not in tree or not isinstance(values, dict):
            raise unknown(f"section in {file}", part, tree)
        for key in values:
            _check_key(key, part, file)
        tree[part].update(values)
    for name, value in flags.items():
        section = tree[SETTINGS[name].part]
        if _INSTEAD.get(name, name) not in flags:
            section.pop(_INSTEAD[name], None)  # a flag wins over the file
        section[name] = {**section.get(name, {}), **value} if isinstance(value, dict) else value
    return from_tree(tree, f" ({file})" if file is not None else "")


def _check_key(key: str, part: str, file: Path | None) -> None:
    """Refuses a key that is none of the section's, and says where it belongs or which one was meant."""
    names = {setting.name: setting for setting in SETTINGS.values()}
    options = {setting.said.option: setting for setting in SETTINGS.values() if setting.said.option}
    meant = names.get(key) or options.get(key)
    if meant is not None and (meant.part, meant.name) != (part, key):
        raise UsageError(f"{key} is not a setting in [{part}] of {file}: write it as {meant.name} in [{meant.part}]")
    if meant is None:
        raise unknown(
            f"setting in [{part}] of {file}", key, [each.name for each in names.values() if each.part == part]
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"the settings file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the settings file {file} is not TOML: {error}") from error
