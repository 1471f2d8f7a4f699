"""Whether a module does the same in training as in evaluation, found by running it, so that it is exported once, not twice.

Exporting a model of many blocks takes most of the time before its first step, running it on three samples next to none. What
is compared is every call of torch, with its numbers and with which tensor goes where: a module without dropout, or with a
dropout of its own that is off, calls the same in both. Where anything differs, or is not known, the answer is no. The graph
is compared with eager mode in numbers afterwards, in training and in evaluation, whatever the answer was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ringtmp.model.call_module import called
from ringtmp.model.tensors_sharing_memory import standing_in


def same_in_both_modes(module: nn.Module, sample: Any, keep_parameters: bool) -> bool:
    """Leaves no trace in the module's buffers; with `keep_parameters` in its parameters neither."""
    own = [*module.buffers(), *(module.parameters() if keep_parameters else ())]
    stand_ins = {id(each): each.detach().clone() for each in own}
    was = module.training
    runs: list[list[object]] = []
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), standing_in(module, stand_ins):
            for mode in (True, False):
                module.train(mode)
                inputs = pytree.tree_map(torch.clone, sample)
                with _Calls(pytree.tree_leaves(inputs)) as seen:
                    outputs = called(module, inputs)
                seen.note("returned", outputs)
                runs.append(seen.calls)
        return _equal(runs[0], runs[1])
    except Exception:  # the module is the user's: whoever exports it tells what is wrong
        return False
    finally:
        module.train(was)


def _equal(one: list[object], two: list[object]) -> bool:
    try:
        return one == two
    except Exception:  # what was handed to torch cannot be compared
        return False


class _Calls(TorchFunctionMode):
    """Tensors are numbered: those that enter, then as they come out of calls. A tensor that was there before, a parameter or a
    constant, is the one at its place in memory, the same in both runs."""

    def __init__(self, entering: list[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[object] = []
        self._numbers: Any = WeakTensorKeyDictionary()
        self._count = 0
        self._number(entering)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.note(func, (args, kwargs))
        found = func(*args, **kwargs)
        self._number(pytree.tree_leaves(found))
        return found

    def note(self, what: object, values: Any) -> None:
        flat, form = pytree.tree_flatten(values)
        self.calls.append((what, form, [self._word(each) for each in flat]))

    def _word(self, value: Any) -> object:
        if not isinstance(value, torch.Tensor):
            return type(value), value
        number = self._numbers.get(value)
        return ("tensor", number) if number is not None else ("from before", id(value))

    def _number(self, values: list[Any]) -> None:
        for each in values:
            if isinstance(each, torch.Tensor) and each not in self._numbers:
                self._numbers[each] = self._count
                self._count += 1
