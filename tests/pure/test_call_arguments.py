"""Inputs become a call as the module's author would write it."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.call import Arguments, call_arguments, called

X, Y = torch.zeros(2, 3), torch.ones(2, 3)


class One(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


class Two(nn.Module):
    def forward(self, x: Any, y: Any, scale: Any = None) -> Any:
        return x, y, scale


class Optional(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return x, mask


class Open(nn.Module):
    def forward(self, x: Any, **more: Any) -> Any:
        return x, more


class KeywordOnly(nn.Module):
    def forward(self, x: Any, *, mask: Any) -> Any:
        return x, mask


@pytest.mark.parametrize(
    ("module", "inputs", "args", "kwargs"),
    [
        (One(), X, (X,), {}),
        (Two(), X, (X,), {}),  # which eager mode refuses in its own words
        (One(), (X, Y), ((X, Y),), {}),
        (Optional(), (X, Y), ((X, Y),), {}),  # one argument is enough, so a tuple is that argument
        (Two(), (X, Y), (X, Y), {}),
        (Two(), [X, Y, X], (X, Y, X), {}),
        (Two(), {"y": Y, "x": X}, (), {"y": Y, "x": X}),
        (Two(), UserDict({"x": X, "y": Y}), (), {"x": X, "y": Y}),
        (One(), {"batch": X}, (), {"batch": X}),
        (One(), {"x": X, "y": Y}, ({"x": X, "y": Y},), {}),
        (Open(), {"x": X, "other": Y}, (), {"x": X, "other": Y}),
        (KeywordOnly(), {"x": X, "mask": Y}, (), {"x": X, "mask": Y}),
    ],
)
def test_a_mapping_gives_names_and_a_tuple_places(module: nn.Module, inputs: Any, args: Any, kwargs: Any) -> None:
    found = call_arguments(module, inputs)
    assert str(found) == str(Arguments(args, kwargs))


@pytest.mark.parametrize(
    ("module", "inputs", "says"),
    [
        (Two(), {"x": X, "yy": Y}, r"'yy', but Two.forward takes no such argument: did you mean 'y'\? it takes x, y, scale"),
        (Two(), {"x": X}, r"Two.forward needs 'y', but the data has only 'x'"),
        (KeywordOnly(), {"x": X}, "needs 'mask'"),
        (Two(), (X, Y, X, Y), r"Two.forward takes 2 to 3 inputs \(x, y, scale\), but the data has 4"),
    ],
)  # fmt: skip
def test_what_forward_has_no_place_for_is_refused_by_name(module: nn.Module, inputs: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call_arguments(module, inputs)


def test_a_layer_of_a_row_gets_what_the_one_before_returned() -> None:
    assert called(One(), {"batch": X}) == {"batch": X}
    assert called(Two(), call_arguments(Two(), {"y": Y, "x": X}))[1] is Y


def test_keys_and_values_for_the_next_token_are_not_asked_for() -> None:
    class Config:
        use_cache = True

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(self, x: Any) -> Any:
            return x, self.config.use_cache

    model = Model()
    assert called(model, X)[1] is False
    assert model.config.use_cache is True
