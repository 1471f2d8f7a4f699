"""Run a layer's graph under autograd, operator by operator, with the bits and about the speed of eager mode.

A graph is compiled once into a list of calls with their argument slots; running it fills a list of values and drops
each value after its last use, as Python's own reference counts would have done in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ringtmp.errors import DoesNotFit, ProtocolError
from ringtmp.model.allowed_operators import GRAD_MODE, resolve
from ringtmp.model.compiled_graph import Piece, compilable, takes_device
from ringtmp.model.deferred_gradients import Job, Recording, waiting_variants
from ringtmp.model.large_cross_entropy import IN_SLICES
from ringtmp.model.operator_arguments import check_arguments
from ringtmp.model.operator_contracts import under_contract
from ringtmp.model.portable_layer import (
    CUSTOM,
    Argument,
    Custom,
    Graph,
    Items,
    Layer,
    Named,
    Op,
    Ref,
    count,
    references,
    slots,
)
from ringtmp.model.random_operators import draws, random_count
from ringtmp.model.small_frozen_weights import Converted, KeptSmall, of_owned
from ringtmp.model.torch_constants import dtype_of as dtype_of
from ringtmp.model.torch_constants import torch_constant as torch_constant
from ringtmp.units import bytes_text

#: Of one layer. The largest of the models tried has 2,000; a hundred thousand cheap ones take a second.
MAX_OPERATIONS = 100_000
EMBEDDING = "aten.embedding.default"


#: An operation: its function, what packs its arguments, its keyword arguments, the slots nobody needs after it.
_Call = tuple[Callable[..., Any], Any, Any, tuple[int, ...]]
#: Seeds the generator for the random operation of this number, counted within the graph.
Reseed = Callable[[int], None]


def layer_bytes(layer: Layer) -> int:
    """Of its parameters and buffers."""
    return sum(count(each.shape) * dtype_of(each.dtype).itemsize for each in layer.tensors)


class Program:
    """A compiled graph. `run(inputs, owned)` returns its flat outputs."""

    def __init__(
        self, graph: Graph, device: str = "cpu", compiled: bool = False, recording: Recording | None = None
    ) -> None:
        """`compiled`: `run` hands the operations to torch.compile, if that is possible; `forecast` never does. `recording`:
        what becomes of operators whose weight gradients may wait, if not work for later."""
        where = torch.device(device)
        if len(graph.ops) > MAX_OPERATIONS:
            raise ProtocolError(f"a graph of {len(graph.ops)} operations; at most {MAX_OPERATIONS} are run")
        self.changes_inputs = graph.changes_inputs
        self._input_count = sum(1 for each in graph.inputs if each.kind == "input")
        self._inputs = [(each.kind == "input", each.name) for each in graph.inputs]
        self._small = {slot: each.name for slot, each in enumerate(graph.inputs) if each.kept}
        self._converted = Converted()
        small = dict.fromkeys(self._small, self._converted)
        self._slots = len(graph.inputs) + len(graph.ops)
        self._outputs = [_compile_value(value, self._slots, where, small) for value in graph.outputs]
        self._switches = any(op.target == GRAD_MODE for op in graph.ops)
        customs = [_CustomCall(each, device) for each in graph.customs]
        last_use = _last_uses(graph)
        self._calls: list[_Call] = []
        #: Where to stop for a random operation: its position, its number in the graph, the custom function it may be.
        self._random: list[tuple[int, int, _CustomCall | None]] = []
        numbered = 0
        for index, op in enumerate(graph.ops):
            slot = len(graph.inputs) + index
            kwargs = {name: _compile_value(value, slot, where, small) for name, value in op.kwargs.items()}
            function: Callable[..., Any]
            if op.target == CUSTOM:
                function, args = _chosen(customs, op)
            else:
                check_arguments(op)
                function, args = IN_SLICES.get(op.target) or resolve(op.target), op.args
            table = args[0].slot if op.target == EMBEDDING and args and isinstance(args[0], Ref) else -1
            if drawn := draws(op, graph.customs):
                self._random.append((index, numbered, function if isinstance(function, _CustomCall) else None))
                numbered += drawn
            pack = _packer(args, slot, where, {each: small[each] for each in small if each != table})
            if device != "cpu" and takes_device(function):
                # A tensor made from nothing would otherwise be made in the processor's memory.
                kwargs["device"] = lambda values: where
            function = under_contract(op.target, function)
            if table in small:
                function = _Rows(function)
            self._calls.append((function, pack, kwargs or None, last_use.get(slot, ())))
        self._pieces = self._compiled(graph, where) if compiled and compilable(graph) else []
        self._recording = Recording() if recording is None else recording
        waiting = waiting_variants(graph, self._recording)
        self._waiting_calls = [(waiting.get(index, call[0]), *call[1:]) for index, call in enumerate(self._calls)]

    def _compiled(self, graph: Graph, where: torch.device) -> list[Piece | tuple[int, int]]:
        """What to do in order: compiled operations, or a random one by its position and number."""
        found: list[Piece | tuple[int, int]] = []
        done = 0
        for position, number, _ in self._random:
            found += [Piece(graph, done, position, where)] if position > done else []
            found.append((position, number))
            done = position + 1
        return [*found, Piece(graph, done, len(graph.ops), where)] if done < len(graph.ops) else found

    def forecast(
        self, inputs: Sequence[torch.Tensor], owned: Mapping[str, torch.Tensor], limit_bytes: int
    ) -> list[Any]:
        """The outputs' shapes, computed on torch's meta device: no memory is taken. DoesNotFit as soon as the results
        of the operations so far, all kept as training may keep them, would exceed the limit."""
        total = 0

        def weigh(function: Any, result: Any) -> None:
            nonlocal total
            if _returns_a_view(function):
                return
            for each in result if isinstance(result, tuple | list) else [result]:
                total += each.nbytes if isinstance(each, torch.Tensor) else 0
            if total > limit_bytes:
                raise DoesNotFit(
                    f"{function} would bring the layer to {bytes_text(total)}; this node allows {bytes_text(limit_bytes)}"
                )

        return self._run(self._calls, inputs, owned, weigh)

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        owned: Mapping[str, torch.Tensor],
        later: list[Job] | None = None,
        reseed: Reseed | None = None,
    ) -> list[Any]:
        """With `later`, backward leaves the weight gradients that can wait there instead of computing them. `reseed` is
        called before every random operation; without it they draw one after the other, as in eager mode."""
        if self._pieces:
            return self._run_pieces(inputs, owned, reseed)
        if later is None:
            return self._run(self._calls, inputs, owned, None, reseed)
        self._recording.jobs = later
        return self._run(self._waiting_calls, inputs, owned, None, reseed)

    def _run_pieces(
        self, inputs: Sequence[torch.Tensor], owned: Mapping[str, torch.Tensor], reseed: Reseed | None
    ) -> list[Any]:
        values = self._values(inputs, owned)
        for each in self._pieces:
            if isinstance(each, Piece):
                each.extend(values)
            else:
                position, number = each
                if reseed is not None:
                    reseed(number)
                self._extend(self._calls[position : position + 1], values, None)
        return [make(values) for make in self._outputs]

    def _values(self, inputs: Sequence[torch.Tensor], owned: Mapping[str, torch.Tensor]) -> list[Any]:
        if len(inputs) != self._input_count:
            raise ProtocolError(f"the layer takes {self._input_count} tensors and got {len(inputs)}")
        arriving = iter(inputs)
        return [next(arriving) if own else owned[name] for own, name in self._inputs]

    def _run(
        self,
        calls: Sequence[_Call],
        inputs: Sequence[torch.Tensor],
        owned: Mapping[str, torch.Tensor],
        weigh: Callable[[Any, Any], None] | None,
        reseed: Reseed | None = None,
    ) -> list[Any]:
        values = self._values(inputs, owned)
        call = self._call if reseed is None or not self._random else partial(self._call_seeded, reseed)
        if self._small:
            for slot, name in self._small.items():
                values[slot] = of_owned(name, owned)
            call = partial(self._call_small, call)
        if not self._switches:
            return call(calls, values, weigh)
        before = torch.is_grad_enabled()
        try:
            return call(calls, values, weigh)
        finally:
            torch._C._set_grad_enabled(before)

    def _call_small(
        self, call: Callable[..., list[Any]], calls: Sequence[_Call], values: list[Any], weigh: Any
    ) -> list[Any]:  # fmt: skip
        with self._converted.nothing_large_saved():
            return call(calls, values, weigh)

    def _call_seeded(
        self, reseed: Reseed, calls: Sequence[_Call], values: list[Any], weigh: Callable[[Any, Any], None] | None
    ) -> list[Any]:
        """From one random operation to the next."""
        done = 0
        for position, number, custom in self._random:
            self._extend(calls[done:position], values, weigh)
            if custom is None:
                reseed(number)
                self._extend(calls[position : position + 1], values, weigh)
            else:
                with custom.seeded(partial(_further, reseed, number)):
                    self._extend(calls[position : position + 1], values, weigh)
            done = position + 1
        self._extend(calls[done:], values, weigh)
        return [make(values) for make in self._outputs]

    def _call(
        self, calls: Sequence[_Call], values: list[Any], weigh: Callable[[Any, Any], None] | None
    ) -> list[Any]:  # fmt: skip
        self._extend(calls, values, weigh)
        return [make(values) for make in self._outputs]

    def _extend(
        self, calls: Sequence[_Call], values: list[Any], weigh: Callable[[Any, Any], None] | None
    ) -> None:  # fmt: skip
        for function, pack, kwargs, done in calls:
            if weigh is not None and isinstance(function, _CustomCall):
                result = function.weighed(pack(values), weigh)
            elif kwargs is None:
                result = function(*pack(values))
            else:
                result = function(*pack(values), **{name: make(values) for name, make in kwargs.items()})
            if weigh is not None:
                weigh(function, result)
            values.append(result)
            for slot in done:
                values[slot] = None


def _further(reseed: Reseed, before: int, number: int) -> None:
    reseed(before + number)


class _CustomCall:
    """A custom function ready to be called: autograd uses its own backward."""

    def __init__(self, custom: Custom, device: str) -> None:
        if custom.forward.customs or custom.backward.customs:
            raise ProtocolError(f"the custom function {custom.name!r} contains another")  # which export never writes
        self.forward = Program(custom.forward, device)
        self.backward = Program(custom.backward, device)
        self.differentiable = custom.differentiable
        self.gradients = len(custom.backward.outputs)
        self.reseed: Reseed | None = None
        self._drawn_forward = random_count(custom.forward)
        if len(custom.forward.outputs) < len(custom.differentiable):
            raise ProtocolError(f"the custom function {custom.name!r} gives fewer results than it says")

    def __call__(self, *values: Any) -> Any:
        function: Any = _WithOwnBackward
        return function.apply(self, *values)

    @contextmanager
    def seeded(self, reseed: Reseed) -> Iterator[None]:
        """While it is called. Its backward, which comes later, goes on with the numbers behind those of its forward."""
        self.reseed = reseed
        try:
            yield
        finally:
            self.reseed = None

    def reseed_backward(self) -> Reseed | None:
        return None if self.reseed is None else partial(_further, self.reseed, self._drawn_forward)

    def weighed(self, values: Sequence[Any], weigh: Callable[[Any, Any], None]) -> tuple[Any, ...]:
        """As `Program.forecast` does, backward included."""
        made = self.forward._run(self.forward._calls, values, {}, weigh)
        count = len(self.differentiable)
        results, kept = made[:count], made[count:]
        self.backward._run(self.backward._calls, [*kept, *map(torch.empty_like, results)], {}, weigh)
        return tuple(results)


class _WithOwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _CustomCall, *values: Any) -> Any:
        made = call.forward.run(values, {}, None, call.reseed)
        count = len(call.differentiable)
        results, kept = made[:count], made[count:]
        tensors = [each for each in kept if isinstance(each, torch.Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.kept = [None if isinstance(each, torch.Tensor) else each for each in kept]
        ctx.call, ctx.arguments, ctx.reseed = call, len(values), call.reseed_backward()
        ctx.mark_non_differentiable(
            *(each for each, flag in zip(results, call.differentiable, strict=True) if not flag)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        kept = [next(tensors) if each is None else each for each in ctx.kept]
        found = ctx.call.backward.run([*kept, *gradients], {}, None, ctx.reseed)
        return None, *found, *[None] * (ctx.arguments - len(found))


def _chosen(customs: Sequence[_CustomCall], op: Op) -> tuple[_CustomCall, tuple[Argument, ...]]:
    number = op.args[0] if op.args else None
    if type(number) is not int or not 0 <= number < len(customs) or op.kwargs:
        raise ProtocolError(f"the layer calls a custom function it does not bring: {number!r}")
    if len(op.args) - 1 < customs[number].gradients:
        raise ProtocolError("a custom function gives more gradients than it has arguments")
    return customs[number], op.args[1:]


_Make = Callable[[list[Any]], Any]


def _returns_a_view(function: Any) -> bool:
    """Of its argument, or the argument itself: no memory of its own."""
    schema = getattr(function, "_schema", None)
    return schema is None or any(each.alias_info is not None for each in schema.returns)


class _Rows:
    """An embedding of a weight that is kept small: the rows asked for are converted, and no others."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        self._schema = embedding._schema

    def __call__(self, weight: KeptSmall, *rest: Any, **named: Any) -> torch.Tensor:
        return weight.rows(partial(self._embedding, **named), *rest)


def _packer(
    values: Sequence[Argument], before: int, device: torch.device, small: Mapping[int, Converted]
) -> Callable[[list[Any]], list[Any]]:
    """The arguments of an operation: constants are there already, values so far are put in their places, those of `small`
    slots are converted."""
    template = [None if isinstance(each, Ref | Items) else _compile_value(each, before, device)([]) for each in values]
    made = [isinstance(each, Items) or (isinstance(each, Ref) and each.slot in small) for each in values]
    makers = [(i, _compile_value(each, before, device, small)) for i, each in enumerate(values) if made[i]]
    references = [(i, each.slot) for i, each in enumerate(values) if isinstance(each, Ref) and not made[i]]
    for each in values:
        _compile_value(each, before, device)  # refuses a reference to what is not filled yet

    def pack(so_far: list[Any]) -> list[Any]:
        arguments = template.copy()
        for position, slot in references:
            arguments[position] = so_far[slot]
        for position, make in makers:
            arguments[position] = make(so_far)
        return arguments

    return pack


def _compile_value(
    value: Argument, before: int, device: torch.device, small: Mapping[int, Converted] | None = None
) -> _Make:
    """A function from the values so far to the argument."""
    if isinstance(value, Ref):
        slot = value.slot
        if not 0 <= slot < before:
            raise ProtocolError(f"an operation refers to slot {slot}, before it is filled")
        if small and slot in small:
            convert = small[slot].of
            return lambda values: convert(values[slot])
        return lambda values: values[slot]
    if isinstance(value, Items):
        makers = [_compile_value(item, before, device, small) for item in value.values]
        return lambda values: [make(values) for make in makers]
    constant = torch_constant(value, device) if isinstance(value, Named) else value
    return lambda values: constant


def _last_uses(graph: Graph) -> dict[int, tuple[int, ...]]:
    """For each operation's slot: the slots nobody needs after it, itself included when nobody reads it."""
    kept = {slot for value in graph.outputs for slot in slots(value)}
    last: dict[int, int] = {slot: slot for slot in range(len(graph.inputs), len(graph.inputs) + len(graph.ops))}
    for index, op in enumerate(graph.ops):
        for used in references(op):
            last[used] = len(graph.inputs) + index
    done: dict[int, list[int]] = {}
    for slot, user in last.items():
        if slot not in kept:
            done.setdefault(user, []).append(slot)
    return {user: tuple(unneeded) for user, unneeded in done.items()}
