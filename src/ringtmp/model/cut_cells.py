"""Cut a whole model into cells: layers of their own, each a run of operators with the tensors it needs.

Pure. Between two cells tensors travel by name: (the cell that made it, its place among what that cell gives). What
depends on shapes alone is made again in every cell that reads it; a parameter that several cells read belongs to the
first of them, which gives it to the others like any tensor, so that its gradient comes back the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import msgspec

from ringtmp.model.analyse_graph import SIZE, Anatomy, Fact
from ringtmp.model.cut_places import legal, widths
from ringtmp.model.memory_aliases import Memory
from ringtmp.model.portable_layer import (
    CUSTOM,
    Argument,
    Custom,
    Graph,
    Input,
    Items,
    Layer,
    Op,
    OutputTree,
    OwnedTensor,
    Ref,
    Value,
)
from ringtmp.model.random_operators import random_count


@dataclass(frozen=True)
class Whole:
    """A model as one layer, with what is known about the slots of its graphs."""

    layer: Layer
    train: tuple[Fact, ...]
    evaluate: tuple[Fact, ...]

    @cached_property
    def anatomies(self) -> tuple[Anatomy, Anatomy]:
        """Of training and of evaluation."""
        both = [Anatomy(self.layer.train, self.train), Anatomy(self.layer.evaluate, self.evaluate)]
        written = both[0].written | both[1].written
        fixed = [each.name for each in self.layer.tensors if not each.trainable and each.name not in written]
        return Anatomy(self.layer.train, self.train, fixed), Anatomy(self.layer.evaluate, self.evaluate, fixed)


@dataclass(frozen=True)
class CutCell:
    """A cell, and what is known about the tensors it gives in training and in evaluation."""

    layer: Layer
    trained: tuple[Fact, ...]
    evaluated: tuple[Fact, ...]


def cut(whole: Whole, places: Sequence[int], labels: Collection[int] = ()) -> list[CutCell]:
    """The model cut at these places of its training graph, except those that the evaluation graph has no place for."""
    train, evaluate = whole.anatomies
    kept = list(places)
    while True:
        owners = _Owners(whole.layer, train, evaluate, kept)
        others = _places_of_evaluation(whole.layer, evaluate, owners, kept, labels)
        if None not in others:
            break
        del kept[others.index(None)]
    found = [each for each in others if each is not None]
    trained = _cells(train, [0, *kept, len(train.graph.ops)], owners)
    evaluated = _cells(evaluate, [0, *found, len(evaluate.graph.ops)], owners)
    names = _names(train, [0, *kept, len(train.graph.ops)])
    last = len(trained) - 1
    drawn = [_before(trained), _before(evaluated)]
    return [
        CutCell(
            msgspec.structs.replace(
                _layer(
                    name, owners.tensors(index), one, other, whole.layer.output if index == last else OutputTree("*")
                ),
                random_before=drawn[0][index],
                random_before_evaluating=drawn[1][index],
            ),
            train.facts_of(one.gives),
            evaluate.facts_of(other.gives),
        )
        for index, (name, one, other) in enumerate(zip(names, trained, evaluated, strict=True))
    ]


def _before(cells: Sequence[_Cell]) -> list[int]:
    """How many random operators come before each cell."""
    return [0, *accumulate(random_count(each.graph) for each in cells)][:-1]


def _layer(name: str, tensors: Sequence[OwnedTensor], train: _Cell, evaluate: _Cell, output: OutputTree) -> Layer:
    """Equal cells get equal graphs: tensors are named by their position in the cell."""
    local = {each.name: f"t{place}" for place, each in enumerate(tensors)}
    owned = tuple(msgspec.structs.replace(each, name=local[each.name], full=each.full or each.name) for each in tensors)
    one, other = (msgspec.structs.replace(each.graph, inputs=_renamed(each.graph, local)) for each in (train, evaluate))
    return Layer(name, one, other, owned, output, train_takes=tuple(train.takes), evaluate_takes=tuple(evaluate.takes))


def _renamed(graph: Graph, local: Mapping[str, str]) -> tuple[Input, ...]:
    return tuple(each if each.kind == "input" else Input(each.kind, local[each.name]) for each in graph.inputs)


# -- who owns what ------------------------------------------------------------------------------------------------------


class _Owners:
    """Which cells read the model's own tensors, and which cell each belongs to."""

    def __init__(self, layer: Layer, train: Anatomy, evaluate: Anatomy, places: Sequence[int]) -> None:
        self._layer = layer
        self._written = train.written | evaluate.written
        self._trained = {each.name for each in layer.tensors if each.trainable}
        self._parameters = {each.name for each in layer.tensors if each.kind == "parameter"}
        self.count = len(places) + 1
        self.users: dict[str, list[int]] = {}
        self._directly: dict[str, list[int]] = {}  # cells whose own operations read it, not those they make again
        bounds = [0, *places, len(train.graph.ops)]
        for cell, (first, stop) in enumerate(pairwise(bounds)):
            for slot in _read_directly(train, first, stop):
                self._directly.setdefault(train.graph.inputs[slot].name, []).append(cell)
            for slot in _own_slots(train, first, stop, cell == self.count - 1):
                cells = self.users.setdefault(train.graph.inputs[slot].name, [])
                if cell not in cells:
                    cells.append(cell)
        self._extra: dict[str, list[int]] = {}  # copies for cells that read one in evaluation alone

    def trained_by_several(self, name: str) -> bool:
        return name in self._trained or name in self._written

    def owner(self, name: str) -> int:
        return self.users[name][0] if name in self.users else self._extra.get(name, [0])[0]

    def read_in_evaluation(self, name: str, cell: int) -> None:
        if name not in self.users and not self._extra.get(name):
            self._extra[name] = [cell]
        elif not self.trained_by_several(name) and cell not in (*self.users.get(name, ()), *self._extra.get(name, ())):
            self._extra.setdefault(name, []).append(cell)

    def bounds(self, name: str) -> tuple[int, int] | None:
        """The first and the last cell in which evaluation may read a tensor. None: in any, each has a copy or makes it again.
        A frozen parameter would travel to one more cell, and lie there once more."""
        cells = (self.users if self.trained_by_several(name) else self._directly).get(name)
        if cells is None or not (self.trained_by_several(name) or name in self._parameters):
            return None
        return cells[0], cells[-1]

    def tensors(self, cell: int) -> list[OwnedTensor]:
        """The tensors of a cell, in the model's order: those it owns, and copies of what others own and nobody changes."""
        found: list[OwnedTensor] = []
        for each in self._layer.tensors:
            if self.owner(each.name) == cell:
                found.append(each)
            elif not self.trained_by_several(each.name) and (
                cell in self.users.get(each.name, ()) or cell in self._extra.get(each.name, ())
            ):
                copied = each.kind == "parameter"
                found.append(
                    msgspec.structs.replace(
                        each, kind="constant", saved=False, full=each.full or each.name, copied=copied
                    )
                )
        return found


def _own_slots(anatomy: Anatomy, first: int, stop: int, last: bool) -> set[int]:
    found = {slot for at in _needed(anatomy, first, stop, last) for slot in anatomy.reads[at] if anatomy.is_own(slot)}
    return found | ({slot for slot in anatomy.outputs if anatomy.is_own(slot)} if last else set())


def _read_directly(anatomy: Anatomy, first: int, stop: int) -> set[int]:
    repeats = anatomy.again | anatomy.sizes
    own = (at for at in range(first, stop) if anatomy.same[anatomy.start + at] not in repeats)
    return {slot for at in own for slot in anatomy.reads[at] if anatomy.is_own(slot)}


def _needed(anatomy: Anatomy, first: int, stop: int, last: bool) -> list[int]:
    """The operations of a cell: its own, and those whose results it reads and makes again, from here or from before it."""
    repeats = anatomy.again | anatomy.sizes
    own = [at for at in range(first, stop) if anatomy.same[anatomy.start + at] not in repeats]
    found = set(own)
    rest = [slot for at in own for slot in anatomy.reads[at]] + (anatomy.outputs if last else [])
    while rest:
        slot = rest.pop()
        if anatomy.position(slot) < 0 or slot not in repeats or anatomy.position(slot) in found:
            continue
        group = {anatomy.position(slot)}
        if slot in anatomy.again:  # with every change in place of its memory
            group.update(at for at in anatomy.changes.get(anatomy.groups[slot], ()) if at < stop)
        found |= group
        rest += [each for at in group for each in anatomy.reads[at]]
    return sorted(found)


# -- evaluation ---------------------------------------------------------------------------------------------------------


def _places_of_evaluation(
    layer: Layer, evaluate: Anatomy, owners: _Owners, places: Sequence[int], labels: Collection[int]
) -> list[int | None]:
    if layer.train != layer.evaluate:
        return _matching(evaluate, owners, len(places), labels)
    return list(places)  # one graph: the same cells, and no tensor in two of them because it is read in another


def _matching(evaluate: Anatomy, owners: _Owners, count: int, labels: Collection[int]) -> list[int | None]:
    """For every place of the training graph one of the evaluation graph at which the same tensors lie on the same side:
    the narrowest. None: there is no such place."""
    low, high = _limits(evaluate, owners)
    places, width = legal(evaluate, labels), widths(evaluate)
    windows: list[tuple[int, int]] = []
    for cell in range(count):
        first = max([at + 1 for at, each in enumerate(high) if each <= cell], default=0)
        last = min([at for at, each in enumerate(low) if each > cell], default=len(low))
        windows.append((first, last))
    latest = _latest(windows, places)
    found: list[int | None] = []
    least = 1
    for (first, _), most in zip(windows, latest, strict=True):
        fitting = [place for place in places if most is not None and max(first, least) <= place <= most]
        found.append(min(fitting, key=lambda place: (width[place], -place)) if fitting else None)
        if found[-1] is not None:
            least = found[-1] + 1
    _note_readers(evaluate, owners, found)
    return found


def _latest(windows: Sequence[tuple[int, int]], places: Sequence[int]) -> list[int | None]:
    """For as many windows as can have a place of their own, in order: the latest that leaves one to those behind."""
    kept: set[int] = set()
    least = 0
    for number, (first, last) in enumerate(windows):
        fitting = [place for place in places if max(first, least) <= place <= last]
        if fitting:
            kept.add(number)
            least = fitting[0] + 1
    found: list[int | None] = [None] * len(windows)
    most = max(places, default=0)
    for number in sorted(kept, reverse=True):
        latest = max(each for each in places if each <= min(windows[number][1], most))
        found[number], most = latest, latest - 1
    return found


def _limits(evaluate: Anatomy, owners: _Owners) -> tuple[list[int], list[int]]:
    """For every operation of evaluation, the first and the last cell it may lie in. The first to read a tensor lies where
    training reads it first, the last where training reads it last."""
    low, high = [0] * len(evaluate.reads), [owners.count - 1] * len(evaluate.reads)
    readers: dict[str, list[int]] = {}
    for at, used in enumerate(evaluate.reads):
        for slot in used:
            if evaluate.is_own(slot) and evaluate.same[evaluate.start + at] not in evaluate.again:
                readers.setdefault(evaluate.graph.inputs[slot].name, []).append(at)
    returned = {evaluate.graph.inputs[slot].name for slot in evaluate.outputs if evaluate.is_own(slot)}
    for name, reading in readers.items():
        bounds = owners.bounds(name)
        if bounds is None:
            continue
        first, last = bounds
        for at in reading:
            low[at], high[at] = max(low[at], first), min(high[at], last)
        high[reading[0]] = min(high[reading[0]], first)
        if name not in returned:  # which is read last behind the last operation
            low[reading[-1]] = max(low[reading[-1]], last)
    return low, high


def _note_readers(evaluate: Anatomy, owners: _Owners, places: Sequence[int | None]) -> None:
    if None in places:
        return
    bounds = [0, *(each for each in places if each is not None), len(evaluate.graph.ops)]
    for cell, (first, stop) in enumerate(pairwise(bounds)):
        for slot in _own_slots(evaluate, first, stop, cell == owners.count - 1):
            owners.read_in_evaluation(evaluate.graph.inputs[slot].name, cell)


# -- graphs -------------------------------------------------------------------------------------------------------------


@dataclass
class _Cell:
    takes: list[Value] = field(default_factory=list)
    graph: Graph = field(default_factory=lambda: Graph((), (), (), False))
    gives: list[int] = field(default_factory=list)  # slots of the whole graph


def _cells(anatomy: Anatomy, bounds: Sequence[int], owners: _Owners) -> list[_Cell]:
    writers = [_Writer(anatomy, first, stop, stop == bounds[-1], cell, owners) for cell, (first, stop) in
               enumerate(pairwise(bounds))]  # fmt: skip
    entering = [slot for slot, each in enumerate(anatomy.graph.inputs) if each.kind == "input"]
    gives: list[list[int]] = [[] for _ in writers]
    takes: list[list[Value]] = []
    for index, writer in enumerate(writers):
        named: list[Value] = []
        for slot in writer.taken:
            maker = _maker(anatomy, bounds, index, slot, owners)
            if maker is None:
                named.append((0, entering.index(slot)))
                continue
            if slot not in gives[maker]:
                gives[maker].append(slot)
            named.append((maker + 1, gives[maker].index(slot)))
        takes.append(named)
    gives[-1] = anatomy.outputs
    return [
        _Cell(named, writer.graph(given), given) for named, writer, given in zip(takes, writers, gives, strict=True)
    ]


def _maker(anatomy: Anatomy, bounds: Sequence[int], cell: int, slot: int, owners: _Owners) -> int | None:
    """The last cell that made a tensor or changed it in place. None: it is an input that nobody has changed."""
    if anatomy.is_own(slot):
        return owners.owner(anatomy.graph.inputs[slot].name)
    made = [anatomy.position(slot)] if anatomy.position(slot) >= 0 else []
    changed = anatomy.changes.get(anatomy.groups[slot], [])
    touched = sorted(at for at in (*made, *changed) if at < bounds[cell])
    if not touched:
        return None
    return next(index for index in range(cell) if bounds[index] <= touched[-1] < bounds[index + 1])


class _Writer:
    """Writes the graph of one cell."""

    def __init__(self, anatomy: Anatomy, first: int, stop: int, last: bool, cell: int, owners: _Owners) -> None:
        self._anatomy = anatomy
        self._last = last
        self._first = first
        self._modes = anatomy.open_modes[first]
        self._steps = _needed(anatomy, first, stop, last)
        inside = {anatomy.start + at for at in self._steps}
        wanted = [slot for at in self._steps for slot in anatomy.reads[at]] + (anatomy.outputs if last else [])
        outside = [slot for slot in dict.fromkeys(wanted) if slot not in inside and slot not in self._modes]
        self._shapes = self._read_off(outside, inside)
        asked = [slot for at in self._shapes for slot in anatomy.reads[at]]
        outside = [slot for slot in outside if wanted.count(slot) > asked.count(slot)]
        self._owned = [slot for slot in outside if anatomy.is_own(slot) and self._is_mine(slot, cell, owners)]
        self.taken = [slot for slot in outside if slot not in self._owned]
        self.taken += [slot for slot, *_ in dict.fromkeys(self._shapes.values()) if slot not in (*outside, *inside)]

    def _is_mine(self, slot: int, cell: int, owners: _Owners) -> bool:
        name = self._anatomy.graph.inputs[slot].name
        return not owners.trained_by_several(name) or owners.owner(name) == cell

    def _read_off(self, outside: Sequence[int], inside: Collection[int]) -> dict[int, tuple[int, int, int]]:
        """Operations before the cell that ask for the size of a tensor this cell does not get: the tensor to ask instead,
        which of its sizes, and by what that is divided. One of the model's inputs is asked only if nothing else can be: it
        would leave the master for that."""
        anatomy, found = self._anatomy, {}
        asking = [at for at in self._steps if anatomy.graph.ops[at].target == SIZE]
        needed = {slot for at in self._steps if at not in asking for slot in anatomy.reads[at]}
        here = [slot for slot in outside if slot in needed and not anatomy.is_own(slot)]
        there = [slot for slot in sorted(anatomy.crossings[self._first]) if slot >= anatomy.start]
        for at in asking:
            slot, size = anatomy.reads[at][0], anatomy.size_asked(at)
            if slot in needed or slot in inside:
                continue
            ways = (anatomy.tells(each, size) for each in (*here, *there, slot))
            found[at] = next(each for each in ways if each is not None)
        return found

    def graph(self, gives: Sequence[int]) -> Graph:
        anatomy = self._anatomy
        self._owned += [slot for slot in gives if anatomy.is_own(slot) and slot not in (*self._owned, *self.taken)]
        inputs = [Input("input", str(place)) for place in range(len(self.taken))]
        inputs += [anatomy.graph.inputs[slot] for slot in self._owned]
        places = {slot: place for place, slot in enumerate((*self.taken, *self._owned))}
        ops: list[Op] = []
        customs: list[Custom] = []
        for opened in self._modes:
            places[opened] = len(inputs) + len(ops)
            ops.append(anatomy.graph.ops[opened - anatomy.start])
        for at in self._steps:
            op = anatomy.graph.ops[at]
            slot = anatomy.start + at
            if at in self._shapes:
                source, dim, divisor = self._shapes[at]
                op = Op(op.target, (Ref(source), dim), {})
                if divisor > 1:
                    ops.append(Op(op.target, (_moved(Ref(source), anatomy, places), dim), {}))
                    places[slot] = len(inputs) + len(ops)
                    ops.append(Op("floordiv", (Ref(places[slot] - 1), divisor), {}))
                    continue
            if op.target == CUSTOM:
                number = op.args[0]
                assert isinstance(number, int)
                customs.append(anatomy.graph.customs[number])
                op = Op(op.target, (len(customs) - 1, *op.args[1:]), op.kwargs)
            args = tuple(_moved(value, anatomy, places) for value in op.args)
            kwargs = {key: _moved(value, anatomy, places) for key, value in op.kwargs.items()}
            places[slot] = len(inputs) + len(ops)
            ops.append(Op(op.target, args, kwargs))
            if anatomy.same[slot] != slot:
                places.setdefault(anatomy.same[slot], places[slot])
        leaving: list[Argument] = [Ref(places[slot]) for slot in gives]
        if self._last:
            leaving = [_moved(value, anatomy, places) for value in anatomy.graph.outputs]
        graph = Graph(tuple(inputs), tuple(ops), tuple(leaving), False, tuple(customs))
        return msgspec.structs.replace(graph, changes_inputs=bool(Memory(graph).written_inputs()))


def _moved(value: Argument, anatomy: Anatomy, places: Mapping[int, int]) -> Argument:
    if isinstance(value, Ref):
        place = places.get(value.slot)
        return Ref(places[anatomy.same[value.slot]] if place is None else place)
    if isinstance(value, Items):
        return Items(tuple(_moved(each, anatomy, places) for each in value.values))
    return value


# -- names --------------------------------------------------------------------------------------------------------------


def _names(anatomy: Anatomy, bounds: Sequence[int]) -> list[str]:
    """The module a cell lies in; several cells in one module are numbered."""
    found: list[str] = []
    for first, stop in pairwise(bounds):
        heavy = [at for at in range(first, stop) if any(anatomy.is_own(slot) for slot in anatomy.reads[at])]
        paths = [anatomy.facts[anatomy.start + at].path for at in heavy or range(first, stop)]
        found.append(_common([path for path in paths if path]))
    return [name if found.count(name) == 1 else f"{name}~{found[:at].count(name)}" for at, name in enumerate(found)]


def _common(paths: Sequence[str]) -> str:
    parts = [path.split(".") for path in paths]
    shared = 0
    while parts and all(len(each) > shared and each[shared] == parts[0][shared] for each in parts):
        shared += 1
    return ".".join(parts[0][:shared]) if shared else paths[0] if paths else "cell"
