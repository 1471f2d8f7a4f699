"""Where a graph may be cut, and which of these places are worth planning for. Pure.

Place p lies before operation p. There is no place where something is under way that cannot be handed over:

    several values in one           between `split` and the taking apart of what it gives
    an alias and a later change     between the making of a view and the last change in place of its memory
    the model's own state           between the first and the last use of a buffer that a run changes
    one tensor, twice               where two that travel may be the very same object, whose gradients are added together
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ringtmp.model.analyse_graph import Anatomy, hides_a_view, maybe_same
from ringtmp.model.memory_aliases import aliases

#: With fewer cells than this every place is kept, however much crosses it.
FEW = 24
#: A place is dropped if this many times as much crosses it as one of its neighbours.
WIDER = 1.34
#: More cells than this make planning and measuring slow, and no plan better.
MOST = 128


@dataclass(frozen=True)
class Barrier:
    """No place from `first` to `last`, both included."""

    first: int
    last: int
    why: str


def barriers(anatomy: Anatomy, labels: Collection[int] = ()) -> list[Barrier]:
    """`labels`: positions of inputs that must not leave the node that has the last cell."""
    found = [*_state(anatomy), *_changes(anatomy), *_several(anatomy), *_labels(anatomy, labels)]
    return [each for each in found if each.first <= each.last]


def legal(anatomy: Anatomy, labels: Collection[int] = ()) -> list[int]:
    """The places, both ends excluded."""
    blocked = [False] * (len(anatomy.graph.ops) + 1)
    for each in barriers(anatomy, labels):
        for place in range(each.first, min(each.last, len(anatomy.graph.ops)) + 1):
            blocked[place] = True
    twice = _twins(anatomy)
    crossing = anatomy.crossings
    return [
        place
        for place in range(1, len(anatomy.graph.ops))
        if not blocked[place] and not _has_twins(crossing[place], twice)
    ]


def widths(anatomy: Anatomy) -> list[float]:
    """Bytes that cross each place for one sample. The model's inputs, which the master has anyway, are not counted."""
    return [
        sum(anatomy.facts[slot].sample_bytes for slot in each if slot >= anatomy.start) for each in anatomy.crossings
    ]


def _state(anatomy: Anatomy) -> list[Barrier]:
    """A buffer or parameter that a run changes: everything that touches it lies in one cell."""
    groups, found = anatomy.groups, []
    for slot, each in enumerate(anatomy.graph.inputs):
        if each.kind == "input" or each.name not in anatomy.written:
            continue
        group = groups[slot]
        touching = [
            at
            for at, used in enumerate(anatomy.reads)
            if any(groups[one] == group for one in (*used, anatomy.start + at))
        ]
        if not touching:  # under another of its names
            continue
        found.append(
            Barrier(min(touching) + 1, max(touching), f"{each.name} is changed by one operator and used by others")
        )
    return found


def _changes(anatomy: Anatomy) -> list[Barrier]:
    made: dict[int, int] = {}
    for at, op in enumerate(anatomy.graph.ops):
        slot = anatomy.start + at
        if (aliases(op)[0] or hides_a_view(op)) and anatomy.same[slot] == slot:
            made.setdefault(anatomy.groups[slot], at)
    return [
        Barrier(made[group] + 1, changes[-1], "a tensor is changed in place after a view of it was taken")
        for group, changes in anatomy.changes.items()
        if group in made
    ]


def _several(anatomy: Anatomy) -> list[Barrier]:
    """What is neither a tensor nor made again cannot travel. (A block without gradients is opened again in each cell.)"""
    handled = anatomy.sizes | anatomy.again | {one for each in anatomy.open_modes for one in each}
    return [
        Barrier(anatomy.position(slot) + 1, last, "an operator's results are being taken apart")
        for slot, last in anatomy.last_use.items()
        if not (anatomy.facts[slot].is_tensor or slot in handled)
    ]


def _labels(anatomy: Anatomy, labels: Collection[int]) -> list[Barrier]:
    entering = [slot for slot, each in enumerate(anatomy.graph.inputs) if each.kind == "input"]
    wanted = {entering[each] for each in labels}
    sizes = anatomy.sizes  # whoever asks for the size of one can ask another tensor
    first = next(
        (at for at, used in enumerate(anatomy.reads) if wanted & set(used) and anatomy.start + at not in sizes), None
    )
    return [] if first is None else [Barrier(first + 1, len(anatomy.graph.ops), _LABELS)]


_LABELS = "labels are used, which stay on the master with all that comes after"


def _twins(anatomy: Anatomy) -> dict[int, int]:
    """Slots that may be one object, by a common number."""
    found: dict[int, int] = {}
    for at, op in enumerate(anatomy.graph.ops):
        if maybe_same(op) and anatomy.reads[at]:
            first = anatomy.reads[at][0]
            found[anatomy.start + at] = found.setdefault(first, first)
    return found


def _has_twins(crossing: set[int], twice: dict[int, int]) -> bool:
    there = [twice[slot] for slot in crossing if slot in twice]
    return len(there) != len(set(there))


# -- which are kept -----------------------------------------------------------------------------------------------------


def worth_planning(anatomy: Anatomy, places: Sequence[int]) -> list[int]:
    """The narrowest place between any two operators with parameters. If that makes many cells, wide places are dropped
    (so cuts lie between attention and MLP, and not within either)."""
    width = widths(anatomy)
    heavy = weighty(anatomy)
    kept: list[int] = []
    for place in places:
        if any(heavy[kept[-1] if kept else 0 : place]):
            kept.append(place)
        elif kept and width[place] <= width[kept[-1]]:
            kept[-1] = place
    if kept and not any(heavy[kept[-1] :]):
        kept.pop()  # a cell without parameters at the end belongs to the one before
    return _fewer(_narrowest(kept, width), width)


def weighty(anatomy: Anatomy) -> list[bool]:
    """Which operations read parameters."""
    return [
        any(anatomy.is_own(slot) and anatomy.graph.inputs[slot].kind == "parameter" for slot in used)
        for used in anatomy.reads
    ]


def _narrowest(kept: list[int], width: Sequence[float]) -> list[int]:
    kept = list(kept)
    while len(kept) + 1 > FEW:
        wider = [
            (width[place], at)
            for at, place in enumerate(kept)
            if width[place] > WIDER * min(width[each] for each in (*kept[at - 1 : at], *kept[at + 1 : at + 2]))
        ]
        if not wider:
            break
        del kept[max(wider)[1]]
    return kept


def _fewer(kept: list[int], width: Sequence[float]) -> list[int]:
    if len(kept) < MOST:
        return kept
    return sorted(sorted(kept, key=lambda place: width[place])[: MOST - 1])
