"""Which weight an adapter is added to, and which way round: read off the operators of the run's graph."""

from __future__ import annotations

import pytest

from ringtmp.errors import UsageError
from ringtmp.model.portable_layer import Graph, Input, Op, Ref
from ringtmp.model.whole_graph import Adapted, adapted_weights, adapter_tensor, adapters_in

WEIGHT, A, B = "up.base_layer.weight", "up.lora_A.weight", "up.lora_B.weight"
LINEAR = Op("aten.linear.default", (Ref(0), Ref(1)), {})
TURNED = Op("aten.addmm.default", (Ref(4), Ref(0), Ref(1)), {})


def graph(base: Op, *more: Op, weight: str = WEIGHT) -> Graph:
    """x, the weight, A, B and a bias enter; the adapter's operators are those after `base`."""
    inputs = Input("input", "0"), *(Input("parameter", name) for name in (weight, A, B, "up.base_layer.bias"))
    adapter = (
        Op("aten.linear.default", (Ref(0), Ref(2)), {}),
        Op("aten.linear.default", (Ref(6), Ref(3)), {}),
        Op("aten.mul.Tensor", (Ref(7), 2.0), {}),
        Op("aten.add.Tensor", (Ref(5), Ref(8)), {}),
    )
    return Graph(inputs, (base, *adapter, *more), (Ref(9),), False)


def test_the_operator_says_which_way_round_a_weight_is() -> None:
    """A square one looks the same both ways."""
    assert adapted_weights(graph(LINEAR)) == {WEIGHT: Adapted("up", A, B, 2.0, turned=False)}
    assert adapted_weights(graph(TURNED)) == {WEIGHT: Adapted("up", A, B, 2.0, turned=True)}
    assert adapted_weights(graph(Op("aten.mm.default", (Ref(0), Ref(1)), {}))) == {
        WEIGHT: Adapted("up", A, B, 2.0, turned=True)
    }


def test_the_names_and_the_scale_of_an_adapter_are_read_off_its_operators() -> None:
    """PEFT puts the adapter's own name into those of its tensors."""
    (used,) = adapters_in(graph(LINEAR))
    assert (used.layer, used.a, used.b, used.scale) == ("up", A, B, 2.0)
    assert adapter_tensor("h.0.up.lora_B.mine.weight") == ("h.0.up", "B", "mine")
    assert adapter_tensor(A) == ("up", "A", "")
    assert adapter_tensor("up.lora_embedding_A.default") is None
    assert adapter_tensor("up.lora_A.bias") is None


def test_what_is_not_scaled_by_a_number_is_no_plain_adapter() -> None:
    plain = graph(LINEAR)
    ops = [Op("aten.mul.Tensor", (Ref(7), Ref(4)), {}) if op.target == "aten.mul.Tensor" else op for op in plain.ops]
    with pytest.raises(UsageError, match=r"the graph of up is not that of a plain adapter.*without --merge"):
        list(adapters_in(Graph(plain.inputs, tuple(ops), plain.outputs, False)))


def test_a_weight_has_the_first_of_its_names() -> None:
    assert adapted_weights(graph(LINEAR, weight="other.weight")) == {
        "other.weight": Adapted("up", A, B, 2.0, turned=False)
    }


@pytest.mark.parametrize(
    "other",
    [
        Op("aten.embedding.default", (Ref(1), Ref(0)), {}),  # a tied embedding
        Op("aten.linear.default", (Ref(9), Ref(1)), {}),  # the same weight without the adapter
    ],
)
def test_a_weight_that_something_else_uses_is_refused_by_name(other: Op) -> None:
    with pytest.raises(UsageError, match=r"--merge: up\.base_layer\.weight, .* of up .* leave --merge out"):
        adapted_weights(graph(LINEAR, other))


def test_two_adapters_on_one_weight_are_refused() -> None:
    one = graph(LINEAR)
    inputs = (*one.inputs, Input("parameter", "down.lora_B.weight"))
    again = (Op(each.target, tuple(_moved(arg) for arg in each.args), {}) for each in (LINEAR, *one.ops[1:]))
    ops = *(Op(each.target, tuple(_past(arg) for arg in each.args), {}) for each in one.ops), *again
    with pytest.raises(UsageError, match=r"--merge: up\.base_layer\.weight"):
        adapted_weights(Graph(inputs, ops, (Ref(15),), False))


def _past(arg: object) -> object:
    """One input more comes before the operators."""
    return Ref(arg.slot + 1) if isinstance(arg, Ref) and arg.slot >= 5 else arg


def _moved(arg: object) -> object:
    """The second adapter has a B of its own, and its operators come after the first's."""
    if isinstance(arg, Ref):
        return Ref(5) if arg.slot == 3 else Ref(arg.slot + 6) if arg.slot >= 5 else arg
    return arg


def test_an_adapter_beside_a_computed_weight_is_refused() -> None:
    computed = graph(Op("aten.linear.default", (Ref(0), Ref(0)), {}))
    with pytest.raises(
        UsageError, match="--merge: what up gives is not that of a linear layer with a weight of its own"
    ):
        adapted_weights(computed)
