"""Contract 3: a layer as data trains with the bits of the live module, and nothing unsafe can be written as a layer."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ringtmp.errors import DoesNotFit, ProtocolError, UsageError
from ringtmp.model import portable_layer
from ringtmp.model.allowed_operators import ATEN_OVERLOADS, resolve
from ringtmp.model.build import build_layers
from ringtmp.model.export import Exporter
from ringtmp.model.layers import layers_of, opened_model
from ringtmp.model.portable_layer import Graph, Input, Items, Op, Ref
from ringtmp.model.run_graph import Program
from ringtmp.model.to_module import revive


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner = kind(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


SEQUENCE = lambda n: torch.randn(n, 5, 8)  # noqa: E731
PICTURE = lambda n: torch.randn(n, 4, 8, 8)  # noqa: E731
FLAT = lambda n: torch.randn(n, 8)  # noqa: E731
LAYERS: dict[str, tuple[Any, Any]] = {
    "linear": (lambda: nn.Linear(8, 3), FLAT),
    "bilinear path": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GLU(), nn.SiLU(), nn.Softplus()), FLAT),
    "activations": (lambda: nn.Sequential(nn.ELU(), nn.LeakyReLU(), nn.Hardswish(), nn.Mish(), nn.PReLU()), FLAT),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), PICTURE),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2), PICTURE),
    "batch norm": (lambda: nn.BatchNorm2d(4), PICTURE),
    "group norm": (lambda: nn.GroupNorm(2, 4), PICTURE),
    "pooling": (
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        PICTURE,
    ),
    "dropout": (lambda: nn.Dropout(0.4), FLAT),
    "dropout 2d": (lambda: nn.Dropout2d(0.4), PICTURE),
    "layer norm": (lambda: nn.LayerNorm(8), SEQUENCE),
    "rms norm": (lambda: nn.RMSNorm(8), SEQUENCE),
    "attention": (Attention, SEQUENCE),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), SEQUENCE),
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCE),
    "gru": (lambda: Recurrent(nn.GRU), SEQUENCE),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="nearest"), PICTURE),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), PICTURE),
}


@pytest.mark.parametrize("kind", list(LAYERS))
def test_an_exported_layer_trains_and_evaluates_with_the_bits_of_the_live_one(kind: str) -> None:
    make, sample = LAYERS[kind]
    torch.manual_seed(0)
    live = make()
    layer, tensors = Exporter().export("x", copy.deepcopy(live), sample(3))
    layer = portable_layer.decode(portable_layer.encode(layer))
    data = revive([(layer, [tensors[each.name].clone() for each in layer.tensors])])
    x = sample(6)
    for training in (True, False):
        live.train(training)
        data.train(training)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = []
        for module, entering in zip((live, data), inputs, strict=True):
            torch.default_generator.manual_seed(7)
            outputs.append(module(entering))
            outputs[-1].square().sum().backward()
        assert outputs[0].equal(outputs[1])
        assert inputs[0].grad.equal(inputs[1].grad)
    for (name, left), (other, right) in zip(live.state_dict().items(), data.state_dict().items(), strict=True):
        assert other == f"x.{name}"
        assert left.equal(right)
    for left, right in zip(live.parameters(), data.parameters(), strict=True):
        assert left.grad.equal(right.grad)


def test_alike_layers_share_one_export_and_unlike_ones_do_not() -> None:
    exporter = Exporter()
    first, _ = exporter.export("0", nn.Linear(8, 8), FLAT(3))
    second, _ = exporter.export("1", nn.Linear(8, 8), FLAT(3))
    third, _ = exporter.export("2", nn.Linear(8, 8, bias=False), FLAT(3))
    assert second.train is first.train
    assert third.train is not first.train


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class FixedBatch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(3, 8)


class ReadsFile(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ops.aten.from_file.default("/etc/hostname", False, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Branching(), "layer 'odd' .Branching. cannot be exported"),
        (FixedBatch(), "fixes the batch size"),
        (ReadsFile(), "aten.from_file|cannot be exported"),
    ],
)
def test_a_layer_that_cannot_travel_is_named_with_the_reason(module: nn.Module, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Exporter().export("odd", module, FLAT(3))


def test_a_batch_norm_on_single_values_is_refused_before_the_start() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    with pytest.raises(
        UsageError, match="layer '1' .BatchNorm1d. refuses a microbatch of shape .1, 4.*fewer --microbatches"
    ):
        list(build_layers(model, 0, lambda count: torch.zeros(count, 8), [1, 2]))


def test_inputs_of_the_wrong_shape_are_refused_before_the_start() -> None:
    with pytest.raises(UsageError, match="layer '0' .Linear. refuses a microbatch of shape .2, 9."):
        list(build_layers(nn.Sequential(nn.Linear(8, 4)), 0, lambda count: torch.zeros(count, 9), [2]))


def test_tied_weights_are_refused_by_name() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with pytest.raises(UsageError, match="0.weight and 1.weight are one tensor"):
        list(layers_of(opened_model(nn.Sequential(first, second), 0)))


def test_building_leaves_no_trace_in_the_users_model() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(1)
    list(build_layers(model, 0, lambda count: torch.randn(count, 1, 8, 8), [2, 4]))
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_nested_containers_are_flattened_with_the_models_own_names() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
    assert [name for name, _ in layers_of(opened_model(model, 0))] == ["0.0", "0.1", "1"]


def test_a_lazy_generator_gets_the_weights_of_building_at_once() -> None:
    def lazily() -> Any:
        for _ in range(3):
            yield nn.Linear(4, 4)

    torch.manual_seed(9)
    at_once = [nn.Linear(4, 4) for _ in range(3)]
    one_by_one = []
    for _, module in layers_of(opened_model(lazily, 9)):
        one_by_one.append(module)
        torch.randn(10)  # whoever takes the layer may use randomness
    assert all(a.weight.equal(b.weight) for a, b in zip(at_once, one_by_one, strict=True))


def graph(*ops: Op, outputs: tuple[Any, ...] = (Ref(0),)) -> Graph:
    return Graph((Input("input", "0"),), ops, outputs, False)


@pytest.mark.parametrize(
    "target",
    [
        "aten.from_file.default",
        "aten.set_.source_Storage",
        "aten.empty.memory_format",
        "os.system",
        "eval",
        "aten.add",
        "",
        "a.b.c.d",
    ],
)
def test_operators_off_the_list_are_refused(target: str) -> None:
    with pytest.raises(ProtocolError, match="not on the list"):
        Program(graph(Op(target, (), {})))


def test_references_to_values_not_made_yet_are_refused() -> None:
    with pytest.raises(ProtocolError, match="slot 5"):
        Program(graph(Op("aten.relu.default", (Ref(5),), {})))


def test_sizes_are_numbers_and_nothing_else() -> None:
    program = Program(graph(Op("mul", ("a", 10**9), {}), outputs=(Ref(1),)))
    with pytest.raises(ProtocolError, match="not a number"):
        program.run([torch.zeros(1)], {})


def test_every_listed_operator_exists_in_this_torch() -> None:
    assert all(resolve(target) for target in ATEN_OVERLOADS)


def test_a_layer_of_another_format_is_refused() -> None:
    layer, _ = Exporter().export("x", nn.Linear(8, 8), FLAT(3))
    with pytest.raises(ProtocolError, match="layer format 99"):
        portable_layer.decode(portable_layer.encode(msgspec.structs.replace(layer, format=99)))
    for wrong in (b"", b"\x80", b"\xc1" * 50, portable_layer.encode(layer)[:-3]):
        with pytest.raises(ProtocolError):
            portable_layer.decode(wrong)


@pytest.mark.parametrize(
    "ops",
    [
        (Op("aten.zeros.default", (Items((2**40,)),), {}),),
        (Op("aten.expand.default", (Ref(0), Items((2**26, 3, 8))), {}), Op("aten.clone.default", (Ref(1),), {})),
        (Op("aten.repeat.default", (Ref(0), Items((2**30, 1))), {}),),
        tuple(Op("aten.cat.default", (Items((Ref(i), Ref(i))),), {}) for i in range(40)),
    ],
)
def test_a_graph_that_asks_for_more_memory_than_there_is_is_refused_before_any_is_taken(ops: tuple[Op, ...]) -> None:
    program = Program(graph(*ops, outputs=(Ref(len(ops)),)), "meta")
    with pytest.raises(DoesNotFit, match="this node allows 1.0 GiB"):
        program.forecast([torch.empty(3, 8, device="meta")], {}, 2**30)


def test_an_honest_layer_is_weighed_by_what_it_keeps() -> None:
    layer, tensors = Exporter().export("x", nn.Sequential(nn.Linear(8, 64), nn.ReLU()), FLAT(3))
    program = Program(layer.train, "meta")
    owned = {name: tensor.to("meta") for name, tensor in tensors.items()}
    needed = 2 * 10 * 64 * 4  # the product and its ReLU
    assert program.forecast([torch.empty(10, 8, device="meta")], owned, needed)[0].shape == (10, 64)
    with pytest.raises(DoesNotFit):
        program.forecast([torch.empty(10, 8, device="meta")], owned, needed - 1)


def test_a_node_with_a_memory_limit_refuses_what_a_graph_would_take_beyond_it() -> None:
    """In a process of its own: zeros of 8 TiB, and a product that grows out of small inputs."""
    script = """
import torch
from ringtmp.model.run_graph import Program
from ringtmp.model.portable_layer import Graph, Input, Items, Op, Ref
from ringtmp.system.resources import limit_memory, peak_rss_bytes
limit_memory(64 * 2**20)
before = peak_rss_bytes()
for op in (Op("aten.zeros.default", (Items((2**41,)),), {}), Op("aten.repeat.default", (Ref(0), Items((2**20, 8))), {})):
    try:
        Program(Graph((Input("input", "0"),), (op,), (Ref(1),), False)).run([torch.zeros(3, 8)], {})
    except RuntimeError as error:
        print("refused" if "allocate memory" in str(error) else error)
print(peak_rss_bytes() - before < 32 * 2**20)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused", "refused", "True"]
