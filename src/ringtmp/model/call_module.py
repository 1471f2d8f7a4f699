"""How inputs become a call of the user's module.

A layer of an `nn.Sequential`, or of a list, is called with whatever the one before it returned, as torch does. A module that
is a model by itself is called as its author would: a mapping gives keyword arguments, a tuple positional ones where
`forward` needs several.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, get_args

from torch import nn

from ringtmp.errors import UsageError, nearest

_Parameter = inspect.Parameter
_BY_PLACE = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (_Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY)


class Arguments(NamedTuple):
    """What a module is called with. Its tensors come in the order in which they lie in the inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_arguments(module: nn.Module, inputs: Any) -> Arguments:
    """Refuses inputs that `forward` has no place for."""
    try:
        takes = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # forward is not a Python function
        return Arguments((inputs,), {})
    if isinstance(inputs, Mapping):
        return _by_name(type(module).__name__, takes, inputs, _names_beyond(module, takes))
    if isinstance(inputs, tuple | list):
        return _by_place(type(module).__name__, takes, inputs)
    return Arguments((inputs,), {})


def unpacked(value: Any) -> Arguments:
    """The arguments of a layer: those it was given, or the value as the only one."""
    return value if isinstance(value, Arguments) else Arguments((value,), {})


def called(module: nn.Module, value: Any) -> Any:
    args, kwargs = unpacked(value)
    with without_cache(module):
        return module(*args, **kwargs)


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Language models return keys and values for the next token unless told not to, in objects that are no tensors. Nobody
    needs them in training: `config.use_cache` is False meanwhile."""
    configs = {id(config): config for each in module.modules() if (config := vars(each).get("config")) is not None}
    switched = [each for each in configs.values() if getattr(each, "use_cache", None) is True]
    for each in switched:
        with suppress(AttributeError, TypeError):
            each.use_cache = False
    try:
        yield
    finally:
        for each in switched:
            with suppress(AttributeError, TypeError):
                each.use_cache = True


def _by_name(
    label: str, takes: Sequence[_Parameter], inputs: Mapping[str, Any], beyond: Sequence[str] | None
) -> Arguments:
    """`beyond`: names that a `**kwargs` takes; None: any."""
    known = [each.name for each in takes if each.kind in _BY_NAME]
    if len(takes) == 1 and takes[0].kind in _BY_PLACE and takes[0].name not in inputs:
        return Arguments((dict(inputs),), {})
    if beyond is not None:
        for key in inputs:
            if key not in known and key not in beyond:
                near = nearest(key, [*known, *beyond])
                hint = f"did you mean {near!r}? " if near else ""
                raise UsageError(
                    f"the data has {key!r}, but {label}.forward takes no such argument: {hint}it takes "
                    f"{', '.join(known) or 'none by name'}; rename it in the data, or leave it out"
                )
    lacking = [each.name for each in takes if _is_required(each) and each.name not in inputs]
    if lacking:
        raise UsageError(
            f"{label}.forward needs {', '.join(map(repr, lacking))}, but the data has only {', '.join(map(repr, inputs))}: "
            "name the inputs as forward does"
        )
    return Arguments((), dict(inputs))


#: Packages whose models take a `**kwargs` only to hand it on: a misspelt name goes all the way through without a word.
_HANDING_ON = ("transformers", "peft")


def _names_beyond(module: nn.Module, takes: Sequence[_Parameter]) -> Sequence[str] | None:
    """What may be named beside the parameters of `forward`. None: anything, as where the user wrote a `**kwargs` to use it.
    Where its author has said which names it may hold (`**kwargs: Unpack[...]`), those; where a library hands it on, what
    the model inside has by name."""
    rest = next((each for each in takes if each.kind is _Parameter.VAR_KEYWORD), None)
    if rest is None:
        return ()
    said = getattr(next(iter(get_args(rest.annotation)), None), "__annotations__", {})  # of a TypedDict
    if getattr(module.forward, "__module__", "").partition(".")[0] not in _HANDING_ON:
        return list(said) if said else None
    inside = getattr(module, "get_base_model", lambda: module)()  # the model that PEFT has put adapters into
    if inside is module:
        return list(said)
    takes = list(inspect.signature(inside.forward).parameters.values())
    more = _names_beyond(inside, takes)
    return None if more is None else [*said, *(each.name for each in takes if each.kind in _BY_NAME), *more]


def _by_place(label: str, takes: Sequence[_Parameter], inputs: Sequence[Any]) -> Arguments:
    places = [each for each in takes if each.kind in _BY_PLACE]
    needed = sum(_is_required(each) for each in places)
    if needed <= 1:
        return Arguments((inputs,), {})
    most = None if any(each.kind is _Parameter.VAR_POSITIONAL for each in takes) else len(places)
    if len(inputs) < needed or (most is not None and len(inputs) > most):
        wanted = f"{needed}" if most == needed else f"at least {needed}" if most is None else f"{needed} to {most}"
        raise UsageError(
            f"{label}.forward takes {wanted} inputs ({', '.join(each.name for each in places)}), but the data has "
            f"{len(inputs)}: give as many, or a dict with the names of those you have"
        )
    return Arguments(tuple(inputs), {})


def _is_required(each: _Parameter) -> bool:
    return each.default is each.empty and each.kind in (*_BY_PLACE, _Parameter.KEYWORD_ONLY)
