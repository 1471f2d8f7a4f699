"""Inputs become a call as the module's author would write it."""

from __future__ import annotations

from collections import UserDict
from typing import Any, TypedDict, Unpack

import pytest
import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.call_module import Arguments, call_arguments, called

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


class Extras(TypedDict, total=False):
    length: Any


class Typed(nn.Module):
    def forward(self, x: Any, labels: Any = None, **more: Unpack[Extras]) -> Any:
        return x, labels, more


class OfLibrary(nn.Module):
    """As models of transformers are: what is not named goes on to where nobody looks at it."""

    def forward(self, x: Any, labels: Any = None, **more: Any) -> Any:
        return x, labels, more


class Wrapped(nn.Module):
    """As PEFT does it."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def get_base_model(self) -> nn.Module:
        return self.inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)


Typed.forward.__annotations__["more"] = Unpack[Extras]
OfLibrary.forward.__module__ = "transformers.models.some.modeling_some"
Wrapped.forward.__module__ = "peft.peft_model"


def test_what_a_kwargs_has_no_use_for_is_refused_where_its_names_are_known() -> None:
    for module in (Typed(), OfLibrary(), Wrapped(OfLibrary()), Wrapped(Typed())):
        says = r"'labelz', but \w+.forward takes no such argument: did you mean 'labels'\?"
        with pytest.raises(UsageError, match=says):
            call_arguments(module, {"x": X, "labelz": Y})
        assert call_arguments(module, {"x": X, "labels": Y}).kwargs == {"x": X, "labels": Y}
    assert "length" in call_arguments(Typed(), {"x": X, "length": Y}).kwargs
    assert "length" in call_arguments(Wrapped(Typed()), {"x": X, "length": Y}).kwargs


def test_a_kwargs_of_the_users_own_takes_any_name() -> None:
    class Own(OfLibrary):
        def forward(self, x: Any, **more: Any) -> Any:
            return super().forward(x, **more)

    for module in (Open(), Own(), Wrapped(Open())):
        assert "labelz" in call_arguments(module, {"x": X, "labelz": Y}).kwargs
