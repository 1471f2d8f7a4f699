"""Contract 1 where layers return a tensor twice, change tensors in place, share memory, or keep state they read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp import Ring
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.model.export import Exporter
from ringtmp.model.overlapping_memory import overlapping
from ringtmp.plan.route import Visit
from ringtmp.runtime.clipping import norms_of, total_norm
from ringtmp.runtime.gradients_at_segment_edges import copied_alike, once_each, whole
from ringtmp.runtime.stage import Stage

WIDTH = 8


class Does(nn.Module):
    """A function as a layer, with a buffer `k` and what else it needs."""

    def __init__(self, function: Callable[[Any, Any], Any], **inner: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("k", torch.ones(WIDTH))
        for name, module in inner.items():
            setattr(self, name, module)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Gives(nn.Module):
    """Returns its own parameter, twice, beside what it does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Any) -> Any:
        return x * self.own, self.own, self.own


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def three_ways(self: Any, x: Any) -> Any:
    return torch.tanh(self.a(x[0])) * self.b(x[1]) + torch.sigmoid(x[2]) * x[0], x[1], x[2]


def through_narrow(self: Any, x: Any) -> Any:
    x.narrow(1, 0, 3).mul_(2.0)
    return x * 1.5


def through_chunks_of_a_copy_and_reshape(self: Any, x: Any) -> Any:
    x.reshape(-1, 2, WIDTH // 2).select(1, 1).mul_(0.5)
    return x


def moves_and_reads(self: Any, x: Any) -> Any:
    self.k.add_(0.1)
    return x * self.k


def moves_and_returns(self: Any, x: Any) -> Any:
    self.k.mul_(1.1)
    return x, self.k


def scaled(self: Any, x: Any) -> Any:
    return x[0] * x[1]


#: Layers between a first and a last linear one.
STACKS: dict[str, Callable[[], list[nn.Module]]] = {
    "one tensor three times": lambda: [
        Does(lambda self, x: (x, x, x)),
        Does(three_ways, a=linear(), b=linear()),
        Does(lambda self, x: x[0] + x[1] * torch.tanh(x[2])),
    ],
    "its own parameter": lambda: [Gives(), Does(lambda self, x: x[0] * x[1] + torch.tanh(x[2]) * x[1])],
    "its own buffer, changed": lambda: [Does(moves_and_returns), Does(scaled)],
    "a buffer changed and read": lambda: [Does(moves_and_read) for moves_and_read in (moves_and_reads,) * 2],
    "in place through views of what enters": lambda: [
        Does(through_narrow),
        linear(),
        Does(through_chunks_of_a_copy_and_reshape),
    ],
    "in place on a part": lambda: [
        Does(lambda self, x: (x[:, :4], x[:, 4:])),
        Does(lambda self, x: (x[0].mul_(2.0), x[1])),
        Does(lambda self, x: torch.cat(x, 1)),
    ],
    "in place where columns have holes": lambda: [
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH + 1), Does(lambda self, x: x[:, 1::2])),
        nn.ReLU(inplace=True),
    ],
    "a tensor and its beginning": lambda: [
        Does(lambda self, x: (x, x[:, :3])),
        Does(lambda self, x: torch.cat((x[0], x[1] * x[0][:, 5:]), 1)),
        nn.Linear(WIDTH + 3, WIDTH),
    ],
}


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.sub_(targets) ** 2).mean()  # in place: what leaves the last layer is the loss's to change


def trained(
    build: Callable[[], list[nn.Module]], dtype: torch.dtype = torch.float32, clip: float | None = None
) -> tuple[list[Any], tuple[str, list[float]]]:
    generator = torch.Generator().manual_seed(3)
    batches = [tuple(torch.randn(9, WIDTH, generator=generator).to(dtype) for _ in range(2)) for _ in range(2)]
    torch.manual_seed(1)
    plain = nn.Sequential(*build())
    copies = [(x.clone(), y) for x, y in batches]  # a layer that changes its input changes the batch
    losses = plain_loop(plain, copies, 3, loss, lambda p: torch.optim.SGD(p, lr=0.05, fused=True), 1, clip)
    return batches, (state_sha256(plain), losses)


def each_alone(layers: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(range(layers + 1)))


@pytest.mark.parametrize("name", list(STACKS))
def test_no_cut_schedule_or_second_run_changes_a_bit(name: str, tmp_path: Path) -> None:
    def build() -> list[nn.Module]:
        return [*([] if "what enters" in name else [linear()]), *STACKS[name](), linear()]

    batches, expected = trained(build)
    built = Built(tmp_path, build, lambda count: torch.zeros(count, WIDTH), [3], 1)
    cut = each_alone(len(built.layers))
    for bounds, schedule, recompute in (
        (None, "1f1b", "none"),
        (None, "1f1b", "all"),
        (cut, "1f1b", "none"),
        (cut, "zero-bubble", "none"),
        (cut, "1f1b", "all"),
    ):
        nodes = 1 if bounds is None else len(cut) - 1
        how = recipe("sgd", {"lr": 0.05}, seed=1)
        got = ring_in_memory(built, how, batches, 3, loss, nodes, schedule, bounds, recompute=recompute)
        assert got == expected, (bounds, schedule, recompute)


class Both(nn.Module):
    """A recurrent layer whose output alone goes on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


#: Whose kernels depend on strides, on what wants gradients, or on how it is evaluated.
ORDINARY: dict[str, Callable[[], list[nn.Module]]] = {
    "gru": lambda: [Both(nn.GRU(WIDTH, WIDTH, num_layers=2, bias=False, batch_first=True))],
    "rnn both ways": lambda: [
        Both(nn.RNN(WIDTH, WIDTH // 2, nonlinearity="relu", bidirectional=True, batch_first=True))
    ],
    "transposed": lambda: [Does(lambda self, x: x.transpose(1, 2)), nn.Linear(5, WIDTH)],
    "transformer": lambda: [nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)],
    "one norm for a weight": lambda: [nn.utils.parametrizations.weight_norm(linear(), dim=None)],
    "gumbel": lambda: [Does(lambda self, x: nn.functional.gumbel_softmax(x))],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ("gru", "rnn both ways", "transformer")))
        for name in ORDINARY
    ],
)
def test_ordinary_layers_pass_the_check_and_train_with_the_bits_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    def build() -> list[nn.Module]:
        return [linear(), *ORDINARY[name](), linear()]

    generator = torch.Generator().manual_seed(3)
    batches = [tuple(torch.randn(9, 5 if name != "transposed" or i == 0 else WIDTH, WIDTH, generator=generator)
                     for i in range(2)) for _ in range(2)]  # fmt: skip
    torch.manual_seed(1)
    plain = nn.Sequential(*build())
    losses = plain_loop(plain, batches, 3, loss, lambda p: torch.optim.SGD(p, lr=0.05, fused=True), 1, None)
    sample = torch.randn(9, 5, WIDTH, generator=generator)
    built = Built(tmp_path, build, lambda count: sample[torch.arange(count) % 9], [3], 1)
    cut = each_alone(len(built.layers))
    for schedule, recompute in (("zero-bubble", "none"), ("1f1b", "all")):
        how = recipe("sgd", {"lr": 0.05}, seed=1)
        got = ring_in_memory(built, how, batches, 3, loss, len(cut) - 1, schedule, cut, recompute=recompute)
        assert got == (state_sha256(plain), losses), (schedule, recompute)


def test_a_loss_may_change_the_outputs_in_place(tmp_path: Path) -> None:
    def clamped(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.clamp_(-3, 3), targets)

    data = torch.randn(40, WIDTH), torch.randint(3, (40,))
    model = nn.Sequential(linear(), nn.ReLU(), nn.Linear(WIDTH, 3))
    done = Ring(nodes=1).fit(model, data, loss=clamped, epochs=1, run_dir=tmp_path / "run")
    assert done.summary.steps == 2


@pytest.mark.long
def test_an_lstm_computed_a_second_time_has_the_bits_of_the_first(tmp_path: Path) -> None:
    """The pass before, which stores nothing, took no gradients either: for an LSTM that is another kernel."""

    def build() -> list[nn.Module]:
        return [
            nn.Unflatten(1, (2, WIDTH // 2)),
            nn.Linear(WIDTH // 2, WIDTH),
            Recurrent(),
            nn.Flatten(),
            nn.Linear(16, WIDTH),
        ]

    batches, expected = trained(build)
    built = Built(tmp_path, build, lambda count: torch.zeros(count, WIDTH), [3], 1)
    how = recipe("sgd", {"lr": 0.05}, seed=1)
    for schedule in ("1f1b", "zero-bubble"):
        assert ring_in_memory(built, how, batches, 3, loss, 1, schedule, recompute="all") == expected


# -- what is refused -------------------------------------------------------------------------------------------------------


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.ones(WIDTH)

    def forward(self, x: Any) -> Any:
        self.seen.add_(1)
        return x * self.seen


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.BatchNorm1d(WIDTH, affine=False)
        self.b = self.a

    def forward(self, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x)))


def parts(self: Any, x: Any) -> Any:
    return x[:, :6], x[:, 2:]


def changes(self: Any, x: Any) -> Any:
    return x[0].mul_(2.0), x[1]


REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "parts that overlap": (lambda: [Does(parts), Does(changes)], "layer '1' .* in place while another tensor shares"),
    "parts that overlap, later": (
        lambda: [Does(parts), nn.Identity(), Does(changes)],
        "layer '2' .* in place while another tensor shares",
    ),
    "only in training": (
        lambda: [Does(lambda self, x: parts(self, x) if self.training else (x * 1, x * 2)), Does(changes)],
        "layer '1' .* in place while another tensor shares",
    ),
    "the buffer of another layer": (
        lambda: [Does(lambda self, x: (self.k, x)), Does(changes)],
        r"layer '1' .* in the memory of 0\.k.*clone",
    ),
    "a constant": (lambda: [Constant()], "layer '0' .* changes seen .*register_buffer"),
    "a buffer with two names": (lambda: [Twice()], r"0\.a\.running_mean and 0\.b\.running_mean share memory"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_would_depend_on_the_cut_is_refused_by_name(name: str, tmp_path: Path) -> None:
    build, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        Built(tmp_path, build, lambda count: torch.zeros(count, WIDTH), [3])


def test_sparse_gradients_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layer '0' .* asks embedding for sparse gradients.*sparse=False"):
        Built(tmp_path, [nn.Embedding(9, 4, sparse=True)], lambda count: torch.zeros(count, 2, dtype=torch.long), [3])


def test_buffers_that_share_memory_and_stay_as_they_are_are_told_apart(tmp_path: Path) -> None:
    def build() -> list[nn.Module]:
        layer = Does(lambda self, x: x * self.k + self.other)
        layer.register_buffer("other", layer.k)
        return [linear(), layer, linear()]

    batches, expected = trained(build)
    built = Built(tmp_path, build, lambda count: torch.zeros(count, WIDTH), [3], 1)
    assert ring_in_memory(built, recipe("sgd", {"lr": 0.05}, seed=1), batches, 3, loss, 2) == expected


def test_tensors_overlap_where_an_element_of_both_lies() -> None:
    base = torch.zeros(4, 8)
    assert overlapping(base[:, :6], base[:, 2:])
    assert overlapping(base, base[2:3, 7])
    assert not overlapping(base[:, :4], base[:, 4:])
    assert not overlapping(base[:, ::2], base[:, 1::2])
    assert not overlapping(base[:2], base[2:])
    assert not overlapping(base, base.clone())
    assert not overlapping(base[:0], base)
    assert overlapping(base.view(torch.int16)[:, :2], base)


# -- clipping --------------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def test_norms_taken_apart_and_put_together_are_those_of_torch_for_any_dtypes() -> None:
    generator = torch.Generator().manual_seed(0)
    for case in range(200):
        kinds = DTYPES[: 1 + case % 4]
        pick = torch.randint(0, len(kinds), (12,), generator=generator).tolist()
        parameters = []
        for kind in pick:
            parameter = nn.Parameter(torch.zeros(7, dtype=kinds[kind]))
            parameter.grad = torch.randn(7, generator=generator).to(kinds[kind])
            parameters.append(parameter)
        first, second = sorted(torch.randint(0, 13, (2,), generator=generator).tolist())
        visits = [parameters[:first], parameters[first:second], parameters[second:]]
        got = total_norm([norm for visit in visits for norm in norms_of(visit)])
        expected = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        assert got.dtype == expected.dtype
        assert got.equal(expected), [str(kinds[each]) for each in pick]
    assert total_norm([]).equal(nn.utils.get_total_norm([]))


def test_a_parameter_without_a_gradient_leaves_the_norm_and_its_order_alone() -> None:
    """A model that was cut has its norms put into the model's order; one was missing, and the wrong ones were taken."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(7)) for _ in range(9)]
    for at, each in enumerate(parameters):
        each.grad = None if at in (2, 5) else torch.randn(7, generator=generator) * 10.0**at
    order = torch.randperm(9, generator=generator).tolist()
    held = [parameters[order.index(at)] for at in range(9)]  # parameter n lies in place order[n]
    expected = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    assert total_norm(norms_of(held), order).equal(expected)
    assert total_norm(norms_of(parameters)).equal(expected)
    assert total_norm(norms_of([nn.Parameter(torch.zeros(3))])).equal(nn.utils.get_total_norm([]))


def test_a_bfloat16_model_is_clipped_alike_where_a_node_has_no_parameters(tmp_path: Path) -> None:
    """That node once added no norms of float32, and the total was a float32 too."""

    def build() -> list[nn.Module]:
        return [each.bfloat16() for each in (linear(), nn.Tanh(), linear())]

    batches, expected = trained(build, torch.bfloat16, clip=0.4)
    built = Built(tmp_path, build, lambda count: torch.zeros(count, WIDTH, dtype=torch.bfloat16), [3], 1)
    how = recipe("sgd", {"lr": 0.05}, seed=1, clip_norm=0.4)
    assert ring_in_memory(built, how, batches, 3, loss, 2, bounds=each_alone(3)) == expected


# -- edges -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base,
        lambda base: base[:, 1:5],
        lambda base: base[:, 1::2],
        lambda base: base.t(),
        lambda base: base[3:, :1].expand(3, 5),
        lambda base: base[:0],
        lambda base: base[2, 3],
    ],
)
def test_a_copy_lies_in_memory_as_the_original_does(make: Any) -> None:
    original = make(torch.randn(6, 9))
    copy = copied_alike(original)
    assert copy.equal(original)
    assert copy.stride() == original.stride()
    assert not copy.numel() or copy.data_ptr() % 64 == original.data_ptr() % 64
    assert not overlapping(copy, original)


def test_what_is_one_tensor_travels_once_and_is_one_again() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    assert once_each([a, b]) == ((), [a, b])
    same, sent = once_each([a, b, a, b])
    assert (same, sent) == ((0, 1, 0, 1), [a, b, None, None])
    back = whole(sent, same, [True] * 4)
    assert back[0] is back[2] is a
    assert back[1] is back[3] is b


@pytest.mark.parametrize(
    ("same", "wants"),
    [
        ((0, 2, 0), (True, True, True)),
        ((0, -1, 0), (True, True, True)),
        ((0, 1, 1), (True, False, True)),
        ((0, 1), (True, True, True)),
        ((), (True, True, True)),
    ],
)
def test_a_neighbour_cannot_claim_that_just_anything_is_the_same(same: Any, wants: Any) -> None:
    with pytest.raises(ProtocolError):
        whole([torch.zeros(2), torch.ones(2), None], same, wants)


# -- evaluation ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        Recurrent,
        pytest.param(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), marks=pytest.mark.long),
        pytest.param(lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Dropout()), marks=pytest.mark.long),
    ],
    ids=["lstm", "attention", "norm"],
)
def test_an_evaluation_has_the_bits_of_eager_mode_without_gradients(make: Any) -> None:
    torch.manual_seed(0)
    module, x = make(), torch.randn(4, 5, WIDTH)
    layer, tensors = Exporter().export("it", module, x[:3].clone())
    stage = Stage(Visit(0, 0, 0, 1), recipe())
    stage.place(0, layer, [tensors[each.name].clone() for each in layer.tensors], {})
    (got,) = stage.forward(0, 0, [x], [False], training=False)
    torch.backends.mha.set_fastpath_enabled(False)  # a kernel of eager mode alone, for inference
    try:
        with torch.no_grad():
            assert got.equal(module.eval()(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
