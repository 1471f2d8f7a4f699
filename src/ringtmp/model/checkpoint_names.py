"""Tensors in a folder of transformers do not always have the names of the model that the library builds today.

The library renames a model's parts from one version to the next and keeps writing the old names. Weights of a bare model
lack the prefix that they have in one with a head, and some old files hold tensors that nobody needs. Its own rules say what
belongs where; they are asked for names alone, so that the weights themselves are still read one at a time.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from ringtmp.errors import UsageError


class Names(NamedTuple):
    own: dict[str, str]  # what a tensor of the file is called in the model
    unused: set[str]  # of the file: the library passes over them, too
    put_together: bool  # some tensors of the model are made of several of the file, as those of experts are


def names_in_model(model: nn.Module, names: Iterable[str], said: str) -> Names:
    """`names`: of a file's tensors."""
    state = model.state_dict()
    prefix = str(getattr(model, "base_model_prefix", ""))
    renamings, converters, rename = _rules(model)
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    own: dict[str, str] = {}
    taken: dict[str, str] = {}
    unused: set[str] = set()
    put_together = False
    for name in names:
        given, converter = (name, None) if name in state else rename(name, renamings, converters)
        put_together |= converter is not None
        given = _with_prefix(given, prefix, state)
        if given not in state and any(re.search(each, given) for each in patterns):
            unused.add(name)
            continue
        if given in taken and converter is None:
            raise UsageError(f"{said} does not fit the model: it has {taken[given]} and {name}, which are both {given}")
        own[name] = given
        taken[given] = name
    return Names(own, unused, put_together)


def _with_prefix(name: str, prefix: str, state: dict[str, Any]) -> str:
    """A bare model's weights for one with a head, or the other way round."""
    if not prefix or name in state:
        return name
    if name.removeprefix(f"{prefix}.") in state:
        return name.removeprefix(f"{prefix}.")
    return f"{prefix}.{name}" if f"{prefix}.{name}" in state else name


def _rules(model: nn.Module) -> tuple[list[Any], list[Any], Any]:
    """Renamings, rules that make one tensor of several, and what applies both to a name. Before version 5 there were none."""
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
        rules = mapping.get_model_conversion_mapping(model)
        return (
            [each for each in rules if isinstance(each, loading.WeightRenaming)],
            [each for each in rules if isinstance(each, loading.WeightConverter)],
            loading.rename_source_key,
        )
    except (ImportError, AttributeError):
        return [], [], lambda name, renamings, converters: (name, None)
