"""Every listed operator: a pass that stores nothing has the bits of one that does, and results lie where we think."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from operator_arguments import BY_HAND, Drawn
from ringtmp.model.allowed_operators import ATEN_OVERLOADS, resolve
from ringtmp.model.memory_aliases import UNDECLARED
from ringtmp.runtime.gradients_at_segment_edges import nothing_saved


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def ran(target: str, seed: int, gradients: bool = True) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Results and arguments; None where the operator refuses what was drawn."""

    def wanting(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        # `* 1`: what is changed in place must not be a leaf
        return each.clone().requires_grad_() * 1 if each.is_floating_point() else each.clone()

    drawn = Drawn(seed).call(target)
    torch.manual_seed(seed)
    try:
        with torch.set_grad_enabled(gradients):
            args, kwargs = pytree.tree_map(wanting, drawn)
            return tensors_of(resolve(target)(*args, **kwargs)), tensors_of((args, kwargs))
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    if not a.numel():
        return True
    left, right = (each.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for each in (a, b))
    return left.view(torch.uint8).equal(right.view(torch.uint8))


def findings(targets: Collection[str], seeds: range) -> tuple[set[str], set[str], set[str]]:
    """The operators that took what was drawn; that gave other bits; that returned an argument's memory unannounced."""
    took, differ, shared = set(), set(), set()
    for target in sorted(targets):
        announced = any(each.alias_info is not None for each in resolve(target)._schema.returns)  # type: ignore[attr-defined]
        for seed in seeds:
            stored = ran(target, seed)
            if stored is None:
                continue
            took.add(target)
            with nothing_saved():
                again = ran(target, seed)
            assert again is not None
            if not all(same_bits(a, b) for a, b in zip(stored[0], again[0], strict=True)):
                differ.add(target)
            memory = {each.untyped_storage()._cdata for each in stored[1]}
            if not announced and any(each.untyped_storage()._cdata in memory for each in stored[0]):
                shared.add(target.split(".")[1])
    return took, differ, shared


def test_a_pass_that_stores_nothing_has_the_bits_of_one_that_does() -> None:
    # arguments written by hand have numbers for padding; the long test draws words
    hand = {each for each in ATEN_OVERLOADS if each.split(".")[1] in BY_HAND}
    targets = {each for each in hand if not each.endswith(".padding")}
    took, differ, _ = findings(targets, range(3))
    assert took == targets
    assert not differ


@pytest.mark.nightly  # some of them above
@pytest.mark.timeout(900)
def test_so_has_every_operator_and_those_that_return_an_argument_are_known() -> None:
    took, differ, shared = findings(ATEN_OVERLOADS, range(60))
    assert len(took) >= 500, "too few operators took what was drawn for them"
    assert not differ
    assert shared == UNDECLARED, "what returns an argument's memory without its schema saying so"


def test_a_pass_without_gradients_is_another_one() -> None:
    """Why recomputing does not simply switch gradients off."""
    stored = [ran("aten.lstm.input", seed) for seed in range(8)]
    without = [ran("aten.lstm.input", seed, gradients=False) for seed in range(8)]
    pairs = [(a[0][0], b[0][0]) for a, b in zip(stored, without, strict=True) if a is not None and b is not None]
    assert pairs
    assert not all(same_bits(a, b) for a, b in pairs)
