"""Settings from a file, the environment and flags become a RunConfig; the later wins."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from ringtmp.config import RunConfig, refused
from ringtmp.errors import UsageError, unknown

#: flag -> (part, field); flags not listed here are handled by their verb.
FIELDS = {
    "model": ("model", "name"),
    "set": ("model", "settings"),
    "data": ("training", "data"),
    "loss": ("training", "loss"),
    "epochs": ("training", "epochs"),
    "steps": ("training", "steps"),
    "batch_size": ("training", "batch_size"),
    "microbatches": ("training", "microbatches"),
    "optimizer": ("training", "optimizer"),
    "opt": ("training", "optimizer_settings"),
    "lr_schedule": ("training", "lr_schedule"),
    "clip_norm": ("training", "clip_norm"),
    "seed": ("training", "seed"),
    "threads": ("training", "threads"),
    "wire": ("training", "wire"),
    "staleness": ("training", "staleness"),
    "early_stop": ("training", "early_stop"),
    "strategy": ("ring", "strategy"),
    "with": ("ring", "strategy_settings"),
    "nodes": ("ring", "nodes"),
    "all_devices": ("ring", "all_devices"),
    "cuts": ("ring", "cuts"),
    "window": ("ring", "window"),
    "schedule": ("ring", "schedule"),
    "laps": ("ring", "laps"),
    "route": ("ring", "route"),
    "recompute": ("ring", "recompute"),
    "rebalance": ("ring", "rebalance"),
    "checkpoint_every": ("keep", "checkpoint_every"),
    "protect": ("keep", "protect"),
    "notice_s": ("keep", "notice_s"),
    "stream_keep": ("keep", "stream_keep"),
}
_PARTS: dict[str, type[msgspec.Struct]] = {
    field.name: type(field.default) for field in msgspec.structs.fields(RunConfig)
}
#: Of settings that say the same in two ways, which one a flag takes the place of.
_INSTEAD = {"steps": ("epochs",), "epochs": ("steps",)}


def build(file: Path | None, flags: dict[str, Any]) -> RunConfig:
    """Defaults < file < environment and flags (click has merged the last two already)."""
    tree: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    if file is not None:
        for part, values in _read(file).items():
            if part not in tree or not isinstance(values, dict):
                raise unknown(f"section in {file}", part, tree)
            fields = [field.name for field in msgspec.structs.fields(_PARTS[part])]
            for key in values:
                if key not in fields:
                    raise unknown(f"setting in [{part}] of {file}", key, fields)
            tree[part].update(values)
    for flag, value in flags.items():
        part, field = FIELDS[flag]
        for other in _INSTEAD.get(flag, ()):
            if other not in flags:
                tree[part].pop(other, None)  # a flag wins over the file
        if isinstance(value, dict):
            value = {**tree[part].get(field, {}), **value}
        tree[part][field] = value
    try:
        return msgspec.convert(tree, RunConfig, strict=True)
    except msgspec.ValidationError as error:
        raise refused(error, f" ({file})" if file is not None else "") from error


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"the settings file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the settings file {file} is not TOML: {error}") from error
