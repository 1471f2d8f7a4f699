"""Cross-entropy in slices: torch's bits both ways, less memory, and whatever is not plain goes to torch itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ringtmp.model import large_cross_entropy
from ringtmp.model.export import Exporter
from ringtmp.model.large_cross_entropy import cross_entropy_loss
from ringtmp.model.run_graph import Program
from ringtmp.runtime import losses
from ringtmp.system.resources import REUSED_UP_TO_BYTES

MEAN, SUM = 1, 2


def both(
    logits: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, gradient: float = 1.0, ignored: int = -100
) -> list[Any]:
    """(loss, gradient) of ours and of torch."""
    found = []
    for function in (cross_entropy_loss, torch.ops.aten.cross_entropy_loss.default):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, target, None, reduction, ignored)
        loss.backward(torch.tensor(gradient))
        found.append((loss.detach(), leaf.grad))
    return found


@pytest.mark.parametrize("rows", [1, 37, 130])
@pytest.mark.parametrize("classes", [50_257, 49_152])
@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_it_has_the_bits_of_torch(rows: int, classes: int, reduction: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rows == 1:
        monkeypatch.setattr(large_cross_entropy, "REUSED_UP_TO_BYTES", 1000)
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, classes, generator=generator) * 5
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[::5] = -100 if rows > 1 else target[0]
    (ours, our_gradient), (plain, plain_gradient) = both(logits, target, reduction, gradient=0.37)
    assert ours.equal(plain)
    assert our_gradient.equal(plain_gradient)


@pytest.mark.parametrize("reduction", [MEAN, SUM])
@pytest.mark.parametrize("ignored", [0, 1, 49_151, -1, 60_000])
def test_any_label_may_be_the_one_that_is_ignored(ignored: int, reduction: int) -> None:
    """With 0, which many tokenisers pad with, every row counted as ignored: no number, and a sum of 0."""
    target = torch.arange(60) * 7
    target[::4], target[1] = ignored, 49_151
    (ours, our_gradient), (plain, plain_gradient) = both(torch.randn(60, 49_152), target, reduction, ignored=ignored)
    assert ours.equal(plain)
    assert plain > 0
    assert our_gradient.equal(plain_gradient)


def test_labels_may_be_bytes() -> None:
    for ours, plain in zip(*both(torch.randn(60, 40_000), torch.arange(60, dtype=torch.uint8)), strict=True):
        assert ours.equal(plain)


@pytest.mark.parametrize("target", [torch.arange(59), torch.arange(60, dtype=torch.int32)], ids=["too few", "int32"])
def test_what_torch_refuses_is_refused_in_its_words(target: torch.Tensor) -> None:
    logits = torch.randn(60, 40_000)
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        torch.ops.aten.cross_entropy_loss.default(logits, target)
    with pytest.raises(type(theirs.value)) as ours:
        cross_entropy_loss(logits, target)
    assert str(ours.value) == str(theirs.value)


def test_infinities_and_ignored_rows_alone_come_out_as_in_torch() -> None:
    logits = torch.randn(80, 40_000)
    logits[3, 7], logits[5] = float("inf"), float("-inf")
    for target in (torch.full((80,), -100), torch.arange(80)):
        for ours, plain in zip(*both(logits, target), strict=True):
            assert torch.equal(ours.nan_to_num(7.0), plain.nan_to_num(7.0))
            assert torch.equal(ours.isnan(), plain.isnan())


def test_a_label_that_no_class_has_is_refused_as_torch_does() -> None:
    logits = torch.zeros(80, 40_000)
    for label in (40_000, -1):
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            cross_entropy_loss(logits, torch.full((80,), label))


def test_nothing_as_large_as_the_logits_is_kept_for_the_way_back() -> None:
    logits = torch.randn(500, 40_000, requires_grad=True)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cross_entropy_loss(logits, torch.randint(0, 40_000, (500,)))
    saved.pop(logits.untyped_storage().data_ptr(), None)
    assert sum(saved.values()) < 10_000, "labels, and how many there are"


@pytest.mark.parametrize(
    ("logits", "target", "settings"),
    [
        (torch.randn(60, 40_000), torch.arange(60), {"label_smoothing": 0.1}),
        (torch.randn(60, 40_000), torch.arange(60), {"weight": torch.rand(40_000)}),
        (torch.randn(60, 40_000), torch.arange(60), {"reduction": 0}),
        (torch.randn(60, 40_000), torch.rand(60, 40_000).softmax(1), {}),
        (torch.randn(2, 40_000, 30), torch.randint(0, 40_000, (2, 30)), {}),
        (torch.randn(40_000, 60).t(), torch.arange(60), {}),
        (torch.randn(40_000 * 60).double().view(60, 40_000), torch.arange(60), {}),
    ],
    ids=["smoothed", "weighted", "not reduced", "probabilities", "places", "turned", "double"],
)
def test_what_is_not_plain_is_left_to_torch(
    logits: torch.Tensor, target: torch.Tensor, settings: dict[str, Any]
) -> None:
    assert logits.nbytes > REUSED_UP_TO_BYTES
    given = {"weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0, **settings}
    expected = torch.ops.aten.cross_entropy_loss.default(logits, target, *given.values())
    assert cross_entropy_loss(logits, target, *given.values()).equal(expected)


class _WithItsLoss(torch.nn.Module):
    labels: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(16, 40_000)
        self.register_buffer("labels", torch.randint(0, 40_000, (80,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).view(-1, 40_000), self.labels)


@pytest.mark.parametrize("of_model", [True, False], ids=["the model's", "the run's"])
def test_a_run_computes_a_large_loss_in_slices(of_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    apply = large_cross_entropy._InSlices.apply

    def counted(*given: Any) -> torch.Tensor:
        called.append(len(given[0]))
        return apply(*given)  # type: ignore[no-any-return, no-untyped-call]

    monkeypatch.setattr(large_cross_entropy._InSlices, "apply", counted)
    model = _WithItsLoss()
    x = torch.randn(80, 16)
    model(x).backward()
    if of_model:
        layer, tensors = Exporter().export("own", model, x)
        owned = {each.name: tensors[each.name].detach().clone() for each in layer.tensors}
        trained = [owned[each.name].requires_grad_() for each in layer.tensors if each.trainable]
        Program(layer.train).run([x], owned)[0].backward()
    else:
        head = copy.deepcopy(model.head)
        head.zero_grad()
        losses.cross_entropy(head(x), model.labels).backward()
        trained = list(head.parameters())
    assert called == [80]
    for mine, plain in zip(trained, model.parameters(), strict=True):
        assert mine.grad is not None
        assert plain.grad is not None
        assert mine.grad.equal(plain.grad)
