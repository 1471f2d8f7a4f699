"""What a model returns is flat tensors and a tree, and comes back as the object it was."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.export import AGAIN_BATCH, EXAMPLE_BATCH, Exporter
from ringtmp.model.output_tree import Output, described, flattened, is_plain, joined, map_outputs, nest
from ringtmp.model.portable_layer import OutputTree


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] = ()


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


A, B = torch.zeros(2, 3), torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [A, (A, B), [A, [B]], {"b": B, "a": (A, None)}, Answer(A, None, (B, A)), Pair(A, None), {"x": Answer(A, B)}],
)
def test_every_kind_comes_back_as_it_was(value: Any) -> None:
    tree, tensors = flattened(value)
    again = nest(msgspec.json.decode(msgspec.json.encode(tree), type=OutputTree), tensors, own=True)
    assert type(again) is type(value)
    assert str(again) == str(value)


def test_a_node_that_does_not_own_the_loss_looks_for_no_class() -> None:
    tree, tensors = flattened(Answer(A, B))
    stand_in = nest(tree, tensors)
    assert type(stand_in) is Output
    assert stand_in.logits is stand_in["logits"] is stand_in[0] is A
    assert "loss" in stand_in
    assert flattened(stand_in) == (tree, tensors)
    with pytest.raises(AttributeError, match="has no field 'logit'"):
        _ = stand_in.logit


@pytest.mark.parametrize(
    "named", ["turtle:Turtle", "os:system", "builtins:dict", "ringtmp:nobody", f"{__name__}:Answer.__init__"]
)
def test_nothing_is_imported_and_nothing_but_a_dataclass_called(named: str) -> None:
    made = nest(OutputTree("object", (OutputTree("*"),), ("logits",), named), [A], own=True)
    assert type(made) is Output
    assert "turtle" not in sys.modules


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"logits": A, "count": 3}, "returns a int in 'count', which is neither a tensor nor made of tensors"),
        ((A, ("x",)), "returns a str in '1.0'"),
        (Answer(A, None, (object(),)), "returns a object in 'hidden.0'"),  # type: ignore[arg-type]
        (None, "returns None"),
        ({1: A}, "keys are not all strings"),
    ],
)  # fmt: skip
def test_what_is_no_tensor_is_refused_by_its_place(value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        flattened(value)


def test_outputs_are_described_mapped_and_joined() -> None:
    assert described(A) == "a tensor of shape 2x3"
    assert described(Answer(A)) == "a Answer with logits, hidden"
    assert not is_plain(flattened(Answer(A))[0])
    assert is_plain(flattened({"a": (A, B)})[0])
    assert type(map_outputs(torch.clone, Answer(A, B))) is Answer
    whole = joined([Answer(A, torch.tensor(1.0)), Answer(A, torch.tensor(2.0))])
    assert whole.logits.shape == (4, 3)
    assert whole.loss is None
    with pytest.raises(UsageError, match="nothing to predict"):
        joined([torch.tensor(1.0)])


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Answer:
        y = self.linear(x)
        return Answer(y, None, (x, y.sum()))


def test_a_dataclass_is_exported_without_being_registered_anywhere() -> None:
    layer, _ = Exporter().export("0", Module(), torch.zeros(EXAMPLE_BATCH, 3), torch.zeros(AGAIN_BATCH, 3))
    assert layer.output.kind == "object"
    assert layer.output.names == ("logits", "loss", "hidden")
    assert [each.kind for each in layer.output.children] == ["*", "none", "tuple"]
    assert len(layer.train.outputs) == 3
