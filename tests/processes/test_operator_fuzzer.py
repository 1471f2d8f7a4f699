"""Contract 3: no listed operator, whatever a hostile graph gives it, ends in anything but an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from operator_worker import fuzz
from ringtmp.errors import ProtocolError
from ringtmp.launch.watchdog import TOO_LONG
from ringtmp.model.allowed_operators import ATEN_OVERLOADS
from ringtmp.model.export import Exporter
from ringtmp.model.operator_contracts import CONTRACTS
from ringtmp.model.portable_layer import Graph, Input, Items, Named, Op, Ref
from ringtmp.model.run_graph import Program

#: The fuzzers work through the list in so many parts.
PARTS = 8


def run(target: str, tensors: list[torch.Tensor], args: tuple[Any, ...], **kwargs: Any) -> Any:
    """A graph of one operation. References count the tensors."""
    inputs = tuple(Input("input", str(index)) for index in range(len(tensors)))
    graph = Graph(inputs, (Op(target, args, kwargs),), (Ref(len(tensors)),), False)
    return Program(graph).run(tensors, {})[0]


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def references(count: int, first: int = 0) -> tuple[Ref, ...]:
    return tuple(Ref(first + index) for index in range(count))


# -- what torch's kernels believe ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "g",
    [
        torch.ones(1),
        torch.ones(3, 1),
        torch.ones(4, 4),
        torch.ones(4),
        torch.ones(4, 1, dtype=torch.float64),
        torch.ones(0),
    ],
    ids=lambda g: f"{tuple(g.shape)} {g.dtype}",
)
def test_a_weight_norm_whose_lengths_do_not_fit_is_refused(g: torch.Tensor) -> None:
    with pytest.raises(ProtocolError, match="_weight_norm"):
        run("aten._weight_norm.default", [torch.ones(4, 5), g], (Ref(0), Ref(1), 0))


def test_a_weight_norm_that_fits_has_the_bits_of_the_live_layer() -> None:
    torch.manual_seed(0)
    live = weight_norm(nn.Linear(8, 6))
    layer, tensors = Exporter().export("x", live, torch.randn(3, 8))
    x = torch.randn(5, 8)
    assert any(op.target == "aten._weight_norm.default" for op in layer.train.ops)
    assert Program(layer.train).run([x], tensors)[0].equal(live(x))


@pytest.mark.parametrize("offsets", [(-1, 2), (0, 9), (1, 2), (0, 3, 2), (-(2**40),), (0, 2**62), ()], ids=str)
def test_bags_that_begin_where_no_index_is_are_refused(offsets: tuple[int, ...]) -> None:
    entering = [torch.ones(6, 3), whole(0, 1, 2, 3), whole(*offsets)]
    with pytest.raises(ProtocolError, match="embedding_bag"):
        run("aten.embedding_bag.default", entering, references(3))


def test_bags_of_rows_that_are_not_there_are_refused() -> None:
    for index in (-1, 6, 2**40):
        with pytest.raises(ProtocolError, match="of 6 rows"):
            run("aten.embedding_bag.default", [torch.ones(6, 3), whole(0, index), whole(0)], references(3))


@pytest.mark.parametrize("repeats", [(2**62, 2**62, 2**62, 2**62), (2**63 - 1, 3), (-1, 2), (2**61, 2**61, 1)], ids=str)
def test_repeats_that_overflow_are_refused(repeats: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="repeat_interleave"):
        run("aten.repeat_interleave.Tensor", [whole(*repeats)], (Ref(0),))
    with pytest.raises(ProtocolError, match="repeat_interleave"):
        run("aten.repeat_interleave.self_Tensor", [torch.ones(len(repeats)), whole(*repeats)], (Ref(0), Ref(1), 0))
    with pytest.raises(ProtocolError, match="output size|repeats, not"):
        run("aten.repeat_interleave.Tensor", [whole(2, 3)], (Ref(0),), output_size=2)


RECURRENT = {"lstm": (nn.LSTM, 4), "gru": (nn.GRU, 3), "rnn_tanh": (nn.RNN, 1), "rnn_relu": (nn.RNN, 1)}


def recurrent(name: str, params: list[torch.Tensor], hx: list[torch.Tensor], x: torch.Tensor) -> Any:
    states = references(len(hx), 1)
    weights = Items(references(len(params), 1 + len(hx)))
    state = Items(states) if name == "lstm" else states[0]
    rest = (True, 1, 0.0, False, False, True)
    return run(f"aten.{name}.input", [x, *hx, *params], (Ref(0), state, weights, *rest))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_whose_parameters_do_not_fit_is_refused(name: str) -> None:
    gates = RECURRENT[name][1]
    x, count = torch.randn(2, 3, 5), 2 if name == "lstm" else 1
    good = [torch.randn(gates * 4, 5), torch.randn(gates * 4, 4), torch.randn(gates * 4), torch.randn(gates * 4)]
    hx = [torch.zeros(1, 2, 4) for _ in range(count)]
    assert recurrent(name, good, hx, x)[0].shape == (2, 3, 4)
    for at in range(4):
        for wrong in (good[at][:-1], good[at][:1], torch.randn(2), good[at].double()):
            with pytest.raises(ProtocolError, match=name):
                recurrent(name, [*good[:at], wrong, *good[at + 1 :]], hx, x)
    with pytest.raises(ProtocolError, match=name):
        recurrent(name, good[:-1], hx, x)
    with pytest.raises(ProtocolError, match=name):
        recurrent(name, good, [torch.zeros(1, 1, 4)] * count, x)


@pytest.mark.parametrize(
    "options", [{"proj_size": 3, "num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str
)
def test_every_shape_of_lstm_keeps_its_contract(options: dict[str, Any]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(5, 4, batch_first=True, **options)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    live, x = Recurrent(), torch.randn(6, 3, 5)
    layer, tensors = Exporter().export("x", live, torch.randn(3, 3, 5))
    assert Program(layer.train).run([x], tensors)[0].equal(live(x))


def test_a_median_along_one_repeated_value_is_refused() -> None:
    with pytest.raises(ProtocolError, match="contiguous"):
        run("aten.median.dim", [torch.ones(1).expand(5)], (Ref(0), 0))


def test_scales_of_groups_that_do_not_lie_in_a_row_are_refused() -> None:
    entering = [torch.ones(1, 4, 4), torch.ones(1).expand(4)]
    with pytest.raises(ProtocolError, match="in a row"):
        run("aten.native_group_norm.default", entering, (Ref(0), Ref(1), None, 1, 4, 4, 2, 1e-5))


def test_an_attention_whose_values_are_longer_than_its_keys_is_refused() -> None:
    entering = [torch.ones(1, 2, 5, 2), torch.ones(1, 2, 15, 2), torch.ones(1, 2, 16, 2)]
    with pytest.raises(ProtocolError, match="value .1, 2, 16, 2"):
        run("aten.scaled_dot_product_attention.default", entering, references(3))
    entering = [torch.ones(1, 2, 5, 2), torch.ones(1, 2, 4, 2), torch.ones(1, 2, 4, 2), torch.ones(5, 3)]
    with pytest.raises(ProtocolError, match="mask"):
        run("aten.scaled_dot_product_attention.default", entering, references(4))


def test_a_scale_that_leads_out_of_the_image_is_refused() -> None:
    args = (Ref(0), Items((8, 8)), False, 2.0, 1e-45)
    with pytest.raises(ProtocolError, match="scale of 1"):
        run("aten.upsample_bicubic2d.default", [torch.ones(1, 2, 4, 4)], args)


def test_a_stride_beyond_any_image_is_refused() -> None:
    args = (Ref(0), Ref(1), None, Items((2**62,)))
    with pytest.raises(ProtocolError, match="stride"):
        run("aten.conv_transpose1d.default", [torch.ones(2, 2, 2), torch.ones(2, 1, 2)], args)


def test_every_contract_is_of_a_listed_operator_and_shapes_alone_can_be_checked() -> None:
    assert CONTRACTS.keys() <= ATEN_OVERLOADS
    inputs = tuple(Input("input", str(index)) for index in range(3))
    graph = Graph(inputs, (Op("aten.embedding_bag.default", references(3), {}),), (Ref(3),), False)
    entering = [torch.ones(6, 3, device="meta"), *(torch.zeros(4, dtype=torch.int64, device="meta") for _ in range(2))]
    assert Program(graph, "meta").forecast(entering, {}, 2**20)[0][0].shape == (4, 3)


# -- kinds of arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        ("aten.zeros.default", (Items((2,)),), {"device": "meta"}),
        ("aten.zeros.default", (Items((2,)),), {"device": 0}),
        ("aten.zeros.default", (Items((2,)),), {"layout": 1}),
        ("aten.zeros.default", (Items((2,)),), {"dtype": 6}),
        ("aten.zeros.default", (Items((2,)),), {"dtype": -2}),
        ("aten.zeros.default", (Items((2,)),), {"dtype": "float32"}),
        ("aten.zeros.default", (Items((2,)),), {"dtype": Named("layout", "strided")}),
        ("aten.zeros.default", (Items((2,)),), {"dtype": Named("dtype", "quint8")}),
        ("aten.zeros.default", (Items((2,)),), {"layout": Named("layout", "sparse_coo")}),
        ("aten.zeros.default", (Items((2,)),), {"pin_memory": True}),
        ("aten.zeros.default", (Items((2,)),), {"names": Items(("a",))}),
        ("aten.zeros.default", (Items((Ref(0), "2")),), {}),
        ("aten.clone.default", (Ref(0),), {"memory_format": 2}),
        ("aten.to.dtype", (Ref(0), 7), {}),
        ("aten.to.device", (Ref(0), "meta", Named("dtype", "float32")), {}),
        ("aten.softmax.int", (Ref(0), 0, 2**40), {}),
        ("aten.bernoulli.default", (Ref(0),), {"generator": 1}),
        ("aten.bernoulli.default", (Ref(0),), {"generator": Ref(0)}),
        ("aten.dropout.default", (Ref(0), 0.5, Ref(0)), {}),
        ("aten.embedding.default", (Ref(0), Ref(0), -1, False, True), {}),
        ("aten.gather.default", (Ref(0), 0, Ref(0)), {"sparse_grad": True}),
        ("aten.relu.default", ("x",), {}),
        ("aten.relu.default", (Ref(0), Ref(0)), {}),
        ("aten.relu.default", (Named("dtype", "float32"),), {}),
        ("aten.relu.default", (Ref(0),), {"inplace": True}),
        ("aten.cat.default", (Items((Ref(0), Named("device", "node"))),), {}),
        ("mul", (Named("dtype", "float32"), 2), {}),
        ("getitem", (Ref(0),), {"index": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_of_another_kind_is_refused_before_the_graph_runs(
    target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(ProtocolError):
        Program(Graph((Input("input", "0"),), (Op(target, args, kwargs),), (Ref(1),), False))


def test_sizes_stay_within_63_bits_and_items_are_taken_of_lists_alone() -> None:
    squares = tuple(Op("mul", (Ref(index), Ref(index)), {}) for index in range(1, 40))
    program = Program(
        Graph((Input("input", "0"),), (Op("aten.sym_numel.default", (Ref(0),), {}), *squares), (Ref(1),), False)
    )
    with pytest.raises(ProtocolError, match="63 bits"):
        program.run([torch.ones(10)], {})
    with pytest.raises(ProtocolError, match="of a Tensor"):
        run("getitem", [torch.ones(3)], (Ref(0), 0))


# -- graphs that do not end ---------------------------------------------------------------------------------------------


def test_a_graph_of_a_million_operations_is_refused() -> None:
    ops = (Op("aten.relu.default", (Ref(0),), {}),) * 1_000_000
    with pytest.raises(ProtocolError, match="1000000 operations"):
        Program(Graph((Input("input", "0"),), ops, (Ref(0),), False))


@pytest.mark.parametrize(
    "work",
    [
        pytest.param("while True: pass", marks=pytest.mark.long),
        "torch.ops.aten.sum.default(torch.ones(1).expand(2**46))",
    ],
)
def test_work_that_does_not_end_costs_its_process_and_says_where(work: str) -> None:
    """In Python, and within one call of torch."""
    script = f"""
import torch
from ringtmp.launch.watchdog import Watchdog
with Watchdog(lambda: 7, limit_s=0.4):
    {work}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == TOO_LONG
    assert done.stderr.startswith("step 7: one piece of work took longer than 0.4 s")


# -- fuzzers ------------------------------------------------------------------------------------------------------------


def fuzz_part(part: int, wanted: int, folder: Path) -> None:
    targets = sorted(ATEN_OVERLOADS)[part::PARTS]
    found = fuzz(targets, wanted, folder, limit_s=3600)
    assert set(found) == set(targets)
    deaths = {target: each.deaths for target, each in found.items() if each.deaths}
    assert not deaths, f"calls that ended their process (see operator_calls.call): {deaths}"
    few = {target: (each.reached, each.tries) for target, each in found.items() if each.reached < wanted}
    assert not few, f"operators whose kernel was reached too rarely to say anything: {few}"


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_fifty_odd_calls_of_every_operator_end_in_errors_alone(part: int, tmp_path: Path) -> None:
    fuzz_part(part, 50, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_five_hundred_odd_calls_of_every_operator_end_in_errors_alone(part: int, tmp_path: Path) -> None:
    fuzz_part(part, 500, tmp_path)


@pytest.mark.long
def test_the_fuzzer_notices_a_kernel_that_reads_too_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can find nothing proves nothing: without its contract a weight norm dies, and the call is named."""
    monkeypatch.setenv("RINGTMP_TEST_NO_CONTRACTS", "1")
    found = fuzz(["aten._weight_norm.default"], 30, tmp_path, limit_s=1000, most_deaths=1)["aten._weight_norm.default"]
    assert found.deaths
    assert found.reached
