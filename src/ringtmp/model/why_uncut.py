"""Why a module has no more cells than it has, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from ringtmp.model.analyse_graph import Anatomy
from ringtmp.model.cut_places import FEW, barriers, legal, weighty


def why_uncut(anatomy: Anatomy, cells: int, blocks: Sequence[str], labels: Collection[int]) -> str:
    """In words that go on after "because": what stands between most of the operators with parameters. `anatomy`: of
    training."""
    heavy = [at for at, has in enumerate(weighty(anatomy)) if has]
    if len(heavy) <= cells:
        count = {0: "no operator", 1: "only one operator"}.get(len(heavy), f"only {len(heavy)} operators")
        return f"it has {count} with parameters, and every cell needs one: use a larger model"
    places = legal(anatomy, labels)
    if blocks and len(places) >= cells:
        names = ",".join(blocks)
        return f"--blocks {names!r} leaves no more places between such modules: give patterns of smaller ones, or leave it out"
    closed = [(a, b) for a, b in pairwise(heavy) if not any(a < place <= b for place in places)]
    if not closed and cells >= FEW:
        return (
            f"of its places only those are kept that little crosses, {cells - 1} of them: give --blocks smaller modules"
        )
    if not closed:
        return "evaluation mode uses its parameters in another order: use them in the same order in both modes"
    return f"{what_bars(anatomy, closed, labels)}: {_DO}"


def what_bars(anatomy: Anatomy, closed: Sequence[tuple[int, int]], labels: Collection[int]) -> str:
    """What stands in most of these gaps between two operations, in which no place lies, and in which modules."""
    found: dict[tuple[str, str], float] = {}
    for each in barriers(anatomy, labels):
        covered = sum(max(0, min(b, each.last) - max(a + 1, each.first) + 1) / (b - a) for a, b in closed)
        where = _where(anatomy, each.first - 1, min(each.last, len(anatomy.graph.ops) - 1))
        found[each.why, where] = max(covered, found.get((each.why, where), 0))
    why, where = max(found, key=lambda key: found[key], default=("", ""))
    if not why or not found[why, where]:
        first, last = closed[0]
        why = "two of its tensors may be the very same object, whose gradients must be added up in one place"
        where = _where(anatomy, first, last)
    return f"{why}{where}"


_DO = "change that part of the model, or give the model as nn.Sequential or a list of layers, which is cut between them"


def _where(anatomy: Anatomy, first: int, last: int) -> str:
    """The modules of two operations."""
    one, other = (anatomy.facts[anatomy.start + at].path for at in (first, last))
    if not (one or other):
        return " (in its own forward)"
    if one == other:
        return f" (in {one})"
    return f" (from {one or 'its own forward'} to {other or 'its own forward'})"
