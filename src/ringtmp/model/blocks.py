"""Blocks by name: modules between which alone a model is cut, because its user says so. Pure.

A pattern is a module's name as in `named_modules`, in which `*` stands for any part between two dots: `model.layers.*`.
Operators with parameters outside every block lie between blocks, such as an embedding before the first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import pairwise

from torch import nn

from ringtmp.errors import UsageError, nearest, some_of
from ringtmp.model.analyse_graph import Anatomy
from ringtmp.model.cut_places import weighty, widths
from ringtmp.model.why_uncut import what_bars


def patterns_of(text: str | None) -> tuple[str, ...]:
    """'model.layers.*, head' -> ('model.layers.*', 'head')"""
    found = tuple(each.strip() for each in (text or "").split(",") if each.strip())
    if text is not None and not found:
        raise UsageError("--blocks is empty: give names of modules, such as 'model.layers.*', or leave it out")
    return found


def refuse_unmatched(module: nn.Module, patterns: Sequence[str]) -> None:
    """UsageError for a pattern that no module's name fits."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    kinds = list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names))
    for pattern in patterns:
        if any(_regex(pattern).fullmatch(name) for name in names):
            continue
        near = nearest(pattern, kinds)
        hint = f"did you mean {near!r}? " if near else ""
        has = f"its modules are {some_of(kinds)}" if kinds else "it has no modules in it"
        raise UsageError(f"--blocks {pattern!r} fits no module of {type(module).__name__}: {hint}{has}")


def at_blocks(
    anatomy: Anatomy, places: Sequence[int], patterns: Sequence[str], labels: Collection[int] = ()
) -> list[int]:
    """Of the places between the last operator with parameters of one block and the first of the next, the narrowest; of
    equally narrow ones one at which a block ends or begins. UsageError where two blocks have none between them."""
    blocks = [_block(fact.path, patterns) for fact in anatomy.facts[anatomy.start :]]
    width = widths(anatomy)
    found: list[int] = []
    for before, after in pairwise(at for at, has in enumerate(weighty(anatomy)) if has):
        fitting = [place for place in places if before < place <= after]
        if blocks[before] != blocks[after] and fitting:
            found.append(min(fitting, key=lambda place: (width[place], blocks[place - 1] == blocks[place], place)))
        elif blocks[before] != blocks[after] and blocks[before] and blocks[after]:
            raise UsageError(
                f"there is no place to cut between the blocks {blocks[before]} and {blocks[after]}, because "
                f"{what_bars(anatomy, [(before, after)], labels)}: change that part of the model, or let --blocks name a "
                "module that holds both"
            )
    return found


def _block(path: str, patterns: Sequence[str]) -> str:
    """The block that a module lies in, the innermost of several; empty: none."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        outer = ".".join(parts[:count])
        if any(_regex(each).fullmatch(outer) for each in patterns):
            return outer
    return ""


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]*"))
