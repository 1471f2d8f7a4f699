"""Two parameters, or a parameter and something else, in the same bytes: eager training changes both, a ring only one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.build import build_layers
from ringtmp.model.overlapping_memory import overlaps

WIDTH = 6


class Own(nn.Module):
    """Layers behind a forward of their own, which also reads what else the module keeps."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept = torch.ones(WIDTH)
        change(self)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.tanh(self.a(x))) * self.kept


def chain(change: Callable[[Any], None]) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    change(model)
    return model


def one_memory(first: nn.Linear, second: nn.Linear) -> None:
    second.weight = nn.Parameter(first.weight.data)


def by_numpy(model: Any) -> None:
    model.b.weight = nn.Parameter(torch.from_numpy(model.a.weight.detach().numpy()))


def a_row(model: Any) -> None:
    model.b.bias = nn.Parameter(model.a.weight.data[1])


def frozen_view(model: Any) -> None:
    model.b.bias = nn.Parameter(model.a.weight.data[:, 1], requires_grad=False)


def view_as_buffer(model: Any) -> None:
    model.register_buffer("view", model.b.weight.data[0])


def view_as_attribute(model: Any) -> None:
    model.kept = model.b.weight.data[0]


def built(model: Any) -> list[Any]:
    return list(build_layers(model, 0, lambda count: torch.ones(count, WIDTH), [2]))


def lazily() -> Iterator[nn.Module]:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    one_memory(first, second)
    yield first
    yield second


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "in a chain": (lambda: chain(lambda m: one_memory(m[0], m[2])), r"^0\.weight and 2\.weight are two tensors in the same"),
    "in a list": (lambda: list(chain(lambda m: one_memory(m[0], m[2]))), r"^0\.weight and 2\.weight are two tensors"),
    "layer by layer": (lambda: lazily, r"^0\.weight and 1\.weight are two tensors"),
    "in a module": (lambda: Own(lambda m: one_memory(m.a, m.b)), r"^a\.weight and b\.weight .*share the Parameter .*clone"),
    "by way of NumPy": (lambda: Own(by_numpy), r"^a\.weight and b\.weight are two tensors"),
    "in a part": (lambda: Own(a_row), r"^a\.weight and b\.bias are two tensors"),
    "one of them frozen": (lambda: Own(frozen_view), r"^a\.weight and b\.bias are two tensors"),
    "as a buffer": (lambda: Own(view_as_buffer), r"^b\.weight and view are two tensors"),
    "as an attribute": (lambda: Own(view_as_attribute), r"Own\.kept lies in the memory of the parameter Own\.b\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_training_changes_may_not_lie_where_another_tensor_does(kind: str) -> None:
    make, says = REFUSED[kind]
    with pytest.raises(UsageError, match=says):
        built(make())


def one_parameter(model: Any) -> None:
    model.b.weight = model.a.weight


def flat(model: Any) -> None:
    """Every parameter a part of one buffer, none in another's."""
    memory = torch.zeros(sum(each.numel() for each in model.parameters()))
    for each in model.parameters():
        part, memory = memory[: each.numel()], memory[each.numel() :]
        each.data = part.copy_(each.detach().reshape(-1)).view_as(each)


def both_frozen(model: Any) -> None:
    one_memory(model.a, model.b)
    model.a.requires_grad_(False)
    model.b.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [one_parameter, flat, both_frozen])
def test_memory_that_is_shared_without_harm_is_taken(change: Callable[[Any], None]) -> None:
    assert built(Own(change))


def test_buffers_of_two_layers_in_one_memory_that_one_changes_are_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model[2].running_mean = model[0].running_mean.view(-1)
    with pytest.raises(
        UsageError, match=r"0\.running_mean and .*2\.running_mean share memory, and the layer changes it"
    ):
        built(model)


def test_overlaps_names_every_pair_in_the_order_given_and_nothing_that_lies_nowhere() -> None:
    base = torch.zeros(8)
    named = {"end": base[4:], "all": base, "start": base[:4], "odd": base[1::2], "meta": torch.zeros(8, device="meta")}
    named["empty"] = base[:0]
    found = [(one, other) for (one, _), (other, _) in overlaps(named.items())]
    assert sorted(found) == [("all", "odd"), ("all", "start"), ("end", "all"), ("end", "odd"), ("start", "odd")]
    assert not list(overlaps([("one", base), ("same", base)]))
    assert not list(overlaps([("even", base[::2]), ("odd", base[1::2])]))
