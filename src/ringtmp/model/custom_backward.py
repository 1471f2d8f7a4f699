"""Export the user's own backward code: custom autograd functions and hooks on parameters.

`torch.export` follows the forward pass and drops every backward that somebody wrote: a gradient reversal would train
like the identity. So while a layer is traced, `autograd.Function.apply` is ours. It lets the function's forward be traced
and, right after it, its backward on stand-ins for the gradients, all between marks that regions.py finds again. A hook on a
parameter is the backward of a function that does nothing. What cannot be traced is refused with its name and line.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.find_source_line import is_library


@contextmanager
def traced_along(label: str, module: nn.Module) -> Iterator[list[str]]:
    """While `module` is exported: custom functions are marked, hooks on its parameters too, other hooks refused. Gives the
    lines at which the user's code branches on a size."""
    watch = _Watch(label)
    base: Any = torch.autograd.function._SingleLevelFunction  # what every Function inherits `apply` from, bound or not
    hooks = {name: list((each._backward_hooks or {}).values()) for name, each in module.named_parameters()}

    def before(root: nn.Module, inputs: Any) -> None:
        for name, functions in hooks.items():
            if functions:
                watch.hook(name, root.get_parameter(name), functions)

    handle = module.register_forward_pre_hook(before, prepend=True) if any(hooks.values()) else None
    registering = {name: getattr(torch.Tensor, name) for name in _REGISTERS}
    base.apply = classmethod(watch.apply)
    for name in _REGISTERS:
        setattr(torch.Tensor, name, lambda tensor, hook, **_: watch.refuse_registering(hook))
    symbolic: Any = torch.SymBool
    ask = symbolic.__bool__
    branches: list[str] = []

    def asked(condition: Any) -> bool:
        frame = sys._getframe(1)
        if not is_library(frame.f_code.co_filename):
            branches.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return bool(ask(condition))

    symbolic.__bool__ = asked
    try:
        yield branches
    finally:
        symbolic.__bool__ = ask
        for name, original in registering.items():
            setattr(torch.Tensor, name, original)
        del base.apply
        if handle is not None:
            handle.remove()


_REGISTERS = ("register_hook", "register_post_accumulate_grad_hook")


class _Watch:
    def __init__(self, label: str) -> None:
        self._label = label
        self._inside = False

    def apply(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Instead of `function.apply`, on stand-ins."""
        if function.__module__ == "torch.utils.checkpoint":
            return args[0](*args[2:])  # it stores less and computes the same; --recompute does it here
        places = [place for place, each in enumerate(args) if isinstance(each, torch.Tensor)]
        if self._inside or not places or not torch.is_grad_enabled():
            return _forward(function, _Context(args), args, kwargs)
        marks = _marks()
        entered = marks.begin([args[place] for place in places])
        arguments = list(args)
        for place, each in zip(places, entered, strict=True):
            arguments[place] = each
        ctx = _Context(arguments)
        self._inside = True
        try:
            with torch.no_grad():
                results = _forward(function, ctx, arguments, kwargs)
                flat = list(results) if isinstance(results, tuple) else [results]
                self._refuse_odd(function, ctx, flat, entered)
                gradients = marks.middle(flat)
                returned = self._backward(function, ctx, gradients, len(args))
        finally:
            self._inside = False
        wanted = [(number, returned[place]) for number, place in enumerate(places) if returned[place] is not None]
        differentiable = [not any(each is one for one in ctx.constants) for each in flat]
        given = marks.end(
            entered, flat, gradients, [each for _, each in wanted], [number for number, _ in wanted], function.__qualname__,
            differentiable, False,
        )  # fmt: skip
        return tuple(given) if isinstance(results, tuple) else given[0]

    def hook(self, name: str, parameter: torch.Tensor, functions: Sequence[Callable[..., Any]]) -> None:
        """A hook on a parameter: the backward of a function that gives what it gets."""
        marks = _marks()
        entered = marks.begin([parameter])
        self._inside = True
        try:
            with torch.no_grad():
                (gradient,) = gradients = marks.middle(entered)
                for function in functions:
                    changed = gradient._version
                    try:
                        returned = function(gradient)
                    except Exception as error:  # the user's code: whatever it raises on a stand-in
                        raise UsageError(self._cannot(f"the hook on {name}", function, error)) from error
                    if returned is None and gradient._version == changed:
                        raise UsageError(
                            f"{self._label}: the hook on its parameter {name} ({where(function)}) returns nothing, so it "
                            "only observes the gradient, and nobody can see that on the node that runs the layer: remove "
                            "the hook"
                        )
                    gradient = gradient if returned is None else returned
        finally:
            self._inside = False
        marks.end(entered, entered, gradients, [gradient], [0], f"the hook on {name}", [True], True)

    def refuse_registering(self, hook: Callable[..., Any]) -> Any:
        raise UsageError(
            f"{self._label} registers a hook on a tensor in its forward ({caller()}): the hook {where(hook)} would not "
            "run where the layer will live; write it as a torch.autograd.Function that returns its input and changes the "
            "gradient in backward"
        )

    def _backward(self, function: Any, ctx: _Context, gradients: list[torch.Tensor], count: int) -> list[Any]:
        own = function.vjp if function.vjp is not torch.autograd.Function.vjp else function.backward
        arguments = [list(gradients)] if getattr(function, "boxed_grads_call", False) else gradients
        try:
            returned = own(ctx, *arguments)
        except UsageError:
            raise
        except Exception as error:  # the user's code: whatever it raises on a stand-in
            raise UsageError(self._cannot(f"the backward of {function.__qualname__}", function, error)) from error
        found = list(returned) if isinstance(returned, tuple | list) else [returned]
        return [*found, *[None] * (count - len(found))]

    def _refuse_odd(self, function: Any, ctx: _Context, results: list[Any], entered: list[torch.Tensor]) -> None:
        named = f"{self._label}: {function.__qualname__} ({where(function)})"
        if not all(isinstance(each, torch.Tensor) for each in results):
            raise UsageError(f"{named} returns something that is not a tensor: return tensors only")
        if ctx.dirty or any(each._version for each in entered):
            raise UsageError(f"{named} changes what it is given in place: work on a clone instead")
        if not ctx.materialized and len(results) > 1:
            raise UsageError(
                f"{named} has several results and asks for gradients that may be None (set_materialize_grads): "
                "leave that out; missing gradients are then zeros"
            )

    def _cannot(self, what: str, function: Any, error: Exception) -> str:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return (
            f"{self._label}: {what} ({where(function)}) cannot be exported: {first.strip()[:200]}. It must be a fixed "
            "sequence of tensor operations: no branch on tensor values, no tensor converted to a number or a NumPy array"
        )


class _Context:
    """What a custom function's forward and backward know of each other."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(
            isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()) for each in args
        )
        self.saved_tensors: tuple[Any, ...] = ()
        self.dirty: tuple[Any, ...] = ()
        self.constants: tuple[Any, ...] = ()
        self.materialized = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """For forward-mode derivatives, which training does not use."""

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constants = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialized = value


def _forward(function: Any, ctx: _Context, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if function.setup_context is torch.autograd.Function.setup_context:
        return function.forward(ctx, *args, **kwargs)
    results = function.forward(*args, **kwargs)
    function.setup_context(ctx, tuple(args), results)
    return results


class _Marks:
    """Operators that exist while a layer is traced, to be found again in its graph. They compute nothing."""

    def __init__(self) -> None:
        make: Any = torch.library.Library
        self._library: Any = make("ringtmp", "DEF")
        self._library.define("begin(Tensor[] entering) -> Tensor[]")
        self._library.define("middle(Tensor[] results) -> Tensor[]")
        self._library.define(
            "end(Tensor[] entered, Tensor[] results, Tensor[] gradients, Tensor[] returned, int[] positions, str name, "
            "bool[] differentiable, bool hook) -> Tensor[]"
        )
        for name in ("begin", "middle"):
            self._library.impl(name, _alike, "CompositeExplicitAutograd")
        self._library.impl("end", lambda entered, results, *rest: _alike(results), "CompositeExplicitAutograd")
        self.begin: Callable[..., list[torch.Tensor]] = torch.ops.ringtmp.begin.default
        self.middle: Callable[..., list[torch.Tensor]] = torch.ops.ringtmp.middle.default
        self.end: Callable[..., list[torch.Tensor]] = torch.ops.ringtmp.end.default


@cache
def _marks() -> _Marks:
    return _Marks()


def _alike(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.new_empty_strided(each.shape, each.stride()) for each in tensors]


def where(function: Any) -> str:
    """File and line of something the user wrote."""
    function = getattr(function, "__func__", inspect.unwrap(function) if callable(function) else function)
    try:
        file, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
    except (TypeError, OSError):
        return getattr(function, "__qualname__", type(function).__qualname__)
    return f"{Path(file or '?').name}:{line}"


def caller() -> str:
    """File and line of the innermost frame that is neither a library's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
