"""How the layers of a segment hand tensors to each other: in a list everything goes to the next layer, in general a tensor
goes to whichever layers take it, or leaves. Pure: layers in, steps out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringtmp.errors import ProtocolError
from ringtmp.model.memory_aliases import Memory
from ringtmp.model.portable_layer import Layer, Value, slots


@dataclass(frozen=True)
class Crossings:
    """What enters a segment, in order, and what leaves it. Something may do both."""

    entering: tuple[Value, ...]
    leaving: tuple[Value, ...]


@dataclass(frozen=True)
class Step:
    """One layer of the segment."""

    index: int
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    done: tuple[Value, ...]  # not needed after it


@dataclass(frozen=True)
class SegmentRun:
    crossings: Crossings
    steps: tuple[Step, ...]
    written: frozenset[int]  # positions of what enters and may be changed in place
    lends: bool = False  # something that leaves may lie in the memory of a parameter of these layers


def segment_run(layers: Sequence[tuple[int, Layer]], training: bool, crossings: Crossings | None = None) -> SegmentRun:
    """`crossings` None: everything the last layer gives leaves, and what the first takes enters."""
    if not layers:
        assert crossings is None or crossings.entering == crossings.leaving
        return SegmentRun(crossings or Crossings((), ()), (), frozenset())
    takes = [layer.takes(index, training) for index, layer in layers]
    gives = [_gives(index, layer, training) for index, layer in layers]
    crossings = crossings or Crossings(takes[0], gives[-1])
    known = set(crossings.entering)
    for (_, layer), needed, given in zip(layers, takes, gives, strict=True):
        if not known.issuperset(needed):
            raise ProtocolError(
                f"layer {layer.name} takes {len(needed)} tensors, not all of which the layers before it give"
            )
        known.update(given)
    if not known.issuperset(crossings.leaving):
        raise ProtocolError("a segment is told to send on a tensor it does not have")
    needed_later = set(crossings.leaving)
    done: list[tuple[Value, ...]] = []
    for needed, given in zip(reversed(takes), reversed(gives), strict=True):
        done.append(tuple(each for each in dict.fromkeys((*needed, *given)) if each not in needed_later))
        needed_later |= set(needed)
    steps = tuple(
        Step(index, *each) for (index, _), *each in zip(layers, takes, gives, reversed(done), strict=True)
    )  # fmt: skip
    written = _written(layers, steps, training, crossings.entering)
    return SegmentRun(crossings, steps, written, not _lent(layers, steps, training).isdisjoint(crossings.leaving))


def _gives(index: int, layer: Layer, training: bool) -> tuple[Value, ...]:
    return tuple((index + 1, place) for place in range(len(layer.graph(training).outputs)))


def _written(
    layers: Sequence[tuple[int, Layer]], steps: Sequence[Step], training: bool, entering: Sequence[Value]
) -> frozenset[int]:
    """Positions of the tensors entering that one of the layers may write into."""
    written: set[int] = set()
    origins = {
        value: frozenset([at]) for at, value in enumerate(entering)
    }  # the entering tensors it may share memory with
    for (_, layer), step in zip(layers, steps, strict=True):
        memory = Memory(layer.graph(training))
        taken = [origins[value] for value in step.takes]
        written.update(at for position in memory.written_inputs() for at in taken[position])
        for value, sources in zip(step.gives, memory.outputs_from(), strict=True):
            origins[value] = frozenset().union(*(taken[at] for at in sources))
    return frozenset(written)


def _lent(layers: Sequence[tuple[int, Layer]], steps: Sequence[Step], training: bool) -> set[Value]:
    """What may lie in the memory of one of the layers' parameters."""
    lent: set[Value] = set()
    for (_, layer), step in zip(layers, steps, strict=True):
        graph = layer.graph(training)
        memory = Memory(graph)
        own = {memory.group(slot) for slot in memory.owned("parameter")}
        for value, output, sources in zip(step.gives, graph.outputs, memory.outputs_from(), strict=True):
            if any(memory.group(slot) in own for slot in slots(output)) or any(
                step.takes[at] in lent for at in sources
            ):
                lent.add(value)
    return lent
