"""Where a graph may be cut, by tiny modules: every kind of barrier, and what is handed over at the places that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.build_cells import Cutting, chosen_places
from ringtmp.model.call_module import call_arguments
from ringtmp.model.cut_cells import Whole, _latest, cut
from ringtmp.model.cut_places import barriers, legal
from ringtmp.model.export import AGAIN_BATCH, EXAMPLE_BATCH, Exporter
from ringtmp.model.portable_layer import Layer

WIDTH = 6
Forward = Callable[[Any, torch.Tensor], Any]


class Tiny(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self._steps = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._steps(self, x)


def whole_of(forward: Forward | nn.Module) -> Whole:
    module = forward if isinstance(forward, nn.Module) else Tiny(forward)
    example, again = (call_arguments(module, torch.randn(each, WIDTH)) for each in (EXAMPLE_BATCH, AGAIN_BATCH))
    exporter = Exporter()
    layer, _ = exporter.export("tiny", module, example, again)
    return Whole(layer, *exporter.facts)


def told(forward: Forward) -> tuple[list[str], list[int], list[str]]:
    """The operators by their short names, the legal places, and why others are none."""
    anatomy = whole_of(forward).anatomies[0]
    names = [op.target.removeprefix("aten.").split(".")[0] for op in anatomy.graph.ops]
    return names, legal(anatomy), [each.why for each in barriers(anatomy)]


def test_a_chain_is_cut_anywhere() -> None:
    names, places, why = told(lambda m, x: m.linear(x).tanh().relu())
    assert (names, places, why) == (["linear", "tanh", "relu"], [1, 2], [])


def test_what_split_gives_is_taken_apart_in_one_cell() -> None:
    def steps(m: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = x.tanh().split(3, 1)
        return a.relu() + b

    names, places, why = told(steps)
    assert names == ["tanh", "split", "getitem", "getitem", "relu", "add"]
    assert places == [1, 4, 5]
    assert why == ["an operator's results are being taken apart"]


def test_no_place_lies_between_a_view_and_the_last_change_of_its_memory() -> None:
    def steps(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        z = y.t()
        w = z + 1
        y.mul_(2)
        return z.relu() + w.sum() + y.sum()

    names, places, why = told(steps)
    assert names[:4] == ["tanh", "t", "add", "mul_"]
    assert not {2, 3} & set(places)
    assert {1, 4} <= set(places)  # before the view, and behind the change
    assert why == ["a tensor is changed in place after a view of it was taken"]


def test_a_tensor_of_which_there_is_no_view_is_changed_behind_a_cut() -> None:
    names, places, _ = told(lambda m, x: x.tanh().relu_().mul_(2))
    assert (names, places) == (["tanh", "relu_", "mul_"], [1, 2])


def test_what_may_be_a_view_of_something_within_an_operator_is_changed_in_the_same_cell() -> None:
    """`linear` of three dimensions gives a view: changed in place behind a cut, its gradients added up in another order."""
    names, places, why = told(lambda m, x: m.linear(x[:, None]).relu_().mul_(2).tanh())
    assert names[-4:] == ["linear", "relu_", "mul_", "tanh"]
    assert places[-1] == len(names) - 1
    assert not {len(names) - 2, len(names) - 3} & set(places)
    assert "a tensor is changed in place after a view of it was taken" in why


def test_all_who_touch_a_buffer_that_is_written_twice_are_in_one_cell() -> None:
    def steps(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        m.seen.add_(1)
        y = y.relu()
        m.seen.add_(2)
        return y.exp()

    names, places, why = told(steps)
    assert names == ["tanh", "add_", "relu", "add_", "exp"]
    assert places == [1, 4]
    assert why == ["seen is changed by one operator and used by others"]


def test_a_buffer_that_is_only_read_stands_in_nobodys_way() -> None:
    whole = whole_of(lambda m, x: (x + m.seen).tanh() * m.seen)
    assert legal(whole.anatomies[0]) == [1, 2]
    first, _, last = (each.layer for each in cut(whole, [1, 2]))
    assert [each.saved for each in first.tensors if each.kind == "buffer"] == [True]
    assert [(each.kind, each.saved) for each in last.tensors] == [("constant", False)]


def test_labels_stay_with_whoever_reads_them_first() -> None:
    class Labelled(nn.Module):
        def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            x, labels = inputs
            return (x.tanh().exp() - labels).square().mean(1)

    module = Labelled()
    exporter = Exporter()
    example, again = (
        call_arguments(module, (torch.randn(each, WIDTH), torch.randn(each, WIDTH)))
        for each in (EXAMPLE_BATCH, AGAIN_BATCH)
    )
    layer, _ = exporter.export("labelled", module, example, again)
    anatomy = Whole(layer, *exporter.facts).anatomies[0]
    assert legal(anatomy) == [1, 2, 3, 4]
    assert legal(anatomy, labels=[1]) == [1, 2]


def test_two_that_may_be_one_tensor_do_not_travel_side_by_side() -> None:
    def steps(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh().t()
        z = y.contiguous()  # the very same where there is one sample
        return (z + 1).relu() + y

    names, places, _ = told(steps)
    assert names == ["tanh", "t", "contiguous", "add", "relu", "add"]
    assert places == [1, 2, 4, 5]  # behind the addition only one of them is needed


def test_what_depends_on_sizes_alone_is_made_where_it_is_used() -> None:
    whole = whole_of(lambda m, x: x.tanh().exp() * torch.arange(x.shape[0])[:, None])
    anatomy = whole.anatomies[0]
    names = [op.target for op in anatomy.graph.ops]
    behind_range = 1 + names.index("aten.arange.default")
    assert {anatomy.facts[slot].dtype for slot in anatomy.crossings[behind_range]} == {"float32"}
    last = cut(whole, [names.index("aten.mul.Tensor")])[-1].layer
    assert "aten.arange.default" in [op.target for op in last.train.ops]


def test_places_by_hand_that_are_none_are_refused_by_name() -> None:
    def steps(m: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = x.tanh().split(3, 1)
        return a + b

    whole = whole_of(steps)
    assert chosen_places(whole.anatomies[0], Cutting(places=(1,))) == [1]
    with pytest.raises(UsageError, match="before its operation 2: an operator's results are being taken apart"):
        chosen_places(whole.anatomies[0], Cutting(places=(1, 2)))
    with pytest.raises(UsageError, match="before its operation 99: the model ends there"):
        chosen_places(whole.anatomies[0], Cutting(places=(99,)))


def test_evaluation_has_a_place_for_every_place_of_a_model_without_dropout() -> None:
    """It took the narrowest place for the first cut, far behind, and had none left for the cuts after it."""
    whole = whole_of(lambda m, x: m.linear(x).tanh().exp().relu().sum(1))
    places = legal(whole.anatomies[0])
    assert places == [1, 2, 3, 4]
    layers: list[Layer] = [each.layer for each in cut(whole, places)]
    assert [len(each.train.ops) for each in layers] == [1] * 5
    assert [len(each.evaluate.ops) for each in layers] == [1] * 5


def test_a_model_that_returns_its_own_weight_is_cut_all_the_same() -> None:
    """Evaluation was asked to read it last where training does, which is behind its last operation: no place was left."""
    whole = whole_of(lambda m, x: (m.linear(x).tanh().exp(), m.linear.bias))
    layers = [each.layer for each in cut(whole, [1, 2])]
    assert [len(each.evaluate.ops) for each in layers] == [1, 1, 1]
    assert layers[2].train_takes == layers[2].evaluate_takes == ((2, 0), (1, 1))


def test_as_many_windows_as_possible_get_a_place_of_their_own() -> None:
    assert _latest([(1, 9), (1, 9), (1, 9)], [2, 5, 7]) == [2, 5, 7]
    assert _latest([(1, 5), (1, 5), (6, 9)], [2, 8]) == [2, None, 8]
    assert _latest([(1, 9), (3, 4)], [1, 3, 9]) == [1, 3]
    assert _latest([], []) == []
