"""Any model becomes a sequence of named layers, taken one at a time.

Accepted: `nn.Sequential` (nested ones are flattened), any other `nn.Module` (which build_cells.py cuts), a list or
generator of modules or of (name, module) pairs, and a function that returns one of these. A layer's name is the prefix of its
tensors in the model's own `state_dict`. A generator is asked for its next layer only when the one before has been
taken care of, and finds the random generator as it left it, so building lazily gives the weights of building at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ringtmp.errors import DoesNotFit, UsageError
from ringtmp.model.build_larger_than_memory import FACTORIES, BuiltInFiles, planned_tensor
from ringtmp.model.overlapping_memory import named_tensors, overlaps, refuse_overlapping
from ringtmp.model.prepare_weights import Preparation, Preparing
from ringtmp.system.resources import free_memory_bytes
from ringtmp.units import bytes_text

Model = nn.Module | Iterable[Any] | Callable[[], Any]

#: Smaller tensors are made without asking what is free.
LARGE_BYTES = 16 * 2**20
#: What to do about a layer that is too large for the one who builds it.
SMALLER = "make the layer smaller, or let a device with more memory be the master"


@dataclass(frozen=True)
class OpenedModel:
    """What a user's function returned, or the model as it was given, and torch's generator as it was left."""

    given: Any
    state: torch.Tensor
    preparing: Preparing

    @property
    def whole(self) -> nn.Module | None:
        """The model, if it is one module that is no list of layers, or a list in which layers share weights."""
        return self.given if isinstance(self.given, nn.Module) and _is_whole(self.given) else None


def opened_model(
    model: Model, seed: int, folder: Path | None = None, preparation: Preparation | None = None
) -> OpenedModel:
    """Calls the user's function, if the model is one, once. Random initial weights come from `seed`. What does not fit into
    memory beside the rest lies in files in `folder`, which have no name and go with the model."""
    preparing = Preparing(preparation or Preparation(), seed)
    with torch.random.fork_rng(devices=[]), BuiltInFiles(folder):
        torch.manual_seed(seed)
        given = model() if callable(model) and not isinstance(model, nn.Module) else model
        opened = OpenedModel(given, torch.get_rng_state(), preparing)
    if (whole := opened.whole) is not None:
        preparing.take("", whole)
        preparing.finish()
    elif isinstance(given, nn.Module | list | tuple):
        for name, layer in _named(given):
            preparing.take(f"{name}.", layer)
        preparing.finish()
    return opened


def _is_whole(module: nn.Module) -> bool:
    return not (isinstance(module, nn.Sequential) and _may_open(module)) or shares_weights(module)


def shares_weights(module: nn.Module) -> bool:
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    if len({id(tensor) for _, tensor in every}) < len(every):
        return True
    return any(not isinstance(each, nn.Parameter) for pair in overlaps(named_tensors(module)) for _, each in pair)


def layers_of(
    opened: OpenedModel, known: Callable[[list[nn.Module]], None] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """The model's layers in order. `known` is told all layers before the first is given, where they are all there by then:
    not those of a generator."""
    taken: list[str] = []
    owners = _TiedWeights()
    state, preparing = opened.state, opened.preparing
    later = not isinstance(opened.given, nn.Module | list | tuple)  # a generator's layers are prepared as they come
    if not later:
        _look_at_all(list(_named(opened.given)), known)
    iterator = _named(opened.given)
    del opened
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            with _Measured(len(taken)):
                item = next(iterator, None)
            state = torch.get_rng_state()
        if item is None:
            break
        name, module = item
        if name in taken:
            raise UsageError(f"two layers are called {name!r}: give each its own name")
        taken.append(name)
        owners.check(name, module)
        if later:
            preparing.take(f"{name}.", module)
            refuse_overlapping(owners.alive())
        yield name, module
        del item, module  # one layer in memory, not two
    if not taken:
        raise UsageError("the model has no layers")
    if later:
        preparing.finish()


def _look_at_all(layers: list[tuple[str, nn.Module]], known: Callable[[list[nn.Module]], None] | None) -> None:
    """What costs nothing to know comes before the first export, which may take a minute."""
    owners = _TiedWeights()
    for name, module in layers:
        owners.check(name, module)
    refuse_overlapping(owners.alive())
    if known is not None:
        known([module for _, module in layers])


def _named(model: Any) -> Iterator[tuple[str, nn.Module]]:
    if _opens(model):
        yield from _flattened("", model)
    elif isinstance(model, nn.Module):
        yield "0", model
    elif isinstance(model, Iterable):
        for index, item in enumerate(model):
            name, module = item if isinstance(item, tuple) else (str(index), item)
            if not isinstance(module, nn.Module) or not isinstance(name, str):
                raise UsageError(
                    f"item {index} of the model is a {type(module).__name__}: a model is a sequence of nn.Module, "
                    "or of (name, nn.Module)"
                )
            yield name, module
    else:
        if model is None:
            raise UsageError("the function that makes the model returned nothing: does its last line lack a return?")
        raise UsageError(
            f"a {type(model).__name__} is not a model: give an nn.Module, a list or generator of layers, "
            "or a function that returns one"
        )


def _opens(model: Any) -> TypeGuard[nn.Sequential]:
    return isinstance(model, nn.Sequential) and _may_open(model)


def _flattened(prefix: str, model: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    for (
        name,
        module,
    ) in model._modules.items():  # not named_children(), which leaves out a module that stands there twice
        if module is None:
            continue
        if type(module) is nn.Sequential and _may_open(module):
            yield from _flattened(f"{prefix}{name}.", module)
        else:
            yield prefix + name, module


def _may_open(container: nn.Sequential) -> bool:
    """A subclass may have its own forward, and hooks belong to the whole: such a one is a layer."""
    own = "forward" in vars(container) or type(container).forward is not nn.Sequential.forward
    hooks = (
        container._forward_hooks,
        container._forward_pre_hooks,
        container._backward_hooks,
        container._backward_pre_hooks,
    )
    return not own and not any(hooks)


class _Measured(TorchFunctionMode):
    """While the user's code builds a layer: memory that is not there is refused, by name, before it is taken."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES:
            planned = planned_tensor(func, args, kwargs)
            needed = 0 if planned is None else planned.nbytes
            if needed > LARGE_BYTES and needed > (free := free_memory_bytes()):
                raise DoesNotFit(
                    f"layer {self._index} of the model has a tensor of {bytes_text(needed)} ({needed} bytes), and "
                    f"{bytes_text(free)} are free where the model is built: {SMALLER}"
                )
        return func(*args, **kwargs)


class _TiedWeights:
    """Refuses a parameter that has two names, and a buffer that two layers share. Holds no layer alive."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str, str]] = {}

    def check(self, layer: str, module: nn.Module) -> None:
        for local, parameter in module.named_parameters(remove_duplicate=False):
            self._note(layer, local, parameter, within=True)
        for local, buffer in module.named_buffers(remove_duplicate=False):
            self._note(layer, local, buffer, within=False)

    def alive(self) -> list[tuple[str, torch.Tensor]]:
        found = ((name, tensor()) for tensor, name, _ in self._names.values())
        return [(name, tensor) for name, tensor in found if tensor is not None]

    def _note(self, layer: str, local: str, tensor: torch.Tensor, within: bool) -> None:
        name = f"{layer}.{local}"
        known = self._names.get(id(tensor))
        if known is not None and known[0]() is tensor and (within or known[2] != layer):
            raise UsageError(
                f"{known[1]} and {name} are one tensor: give the layers as one nn.Module or nn.Sequential, whose layers may "
                "share weights"
            )
        self._names[id(tensor)] = (weakref.ref(tensor), name, layer)
