"""Layer costs: what is measured, what is remembered, and what is measured anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from ringtmp.model import profile
from ringtmp.model.build import build_layers
from ringtmp.model.profile import PROCESSOR, ProfileCache, Profiler, Where
from ringtmp.plan.devices import LayerCost
from ringtmp.runtime.optimizers import Optimizer, make_optimizer


def adam(parameters: Sequence[torch.Tensor], matrices: Sequence[bool]) -> Optimizer:
    return make_optimizer("adam", {"lr": 0.1}, parameters)


def costs(*modules: nn.Module, sizes: Sequence[int] = (4, 8), cache: ProfileCache | None = None) -> list[LayerCost]:
    def sample(count: int) -> torch.Tensor:
        return torch.ones(count, 16)

    built = build_layers(list(modules), 0, sample, [max(sizes)])
    profiler = Profiler(
        sample(max(sizes)), sizes, 1, adam, optimizer_name="adam", cache=cache or ProfileCache(Path(os.devnull))
    )
    return [profiler.cost(each) for each in built]


def test_bytes_are_those_of_the_layer_and_of_what_autograd_keeps() -> None:
    first, second, third = costs(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    assert first.weight_bytes == first.gradient_bytes == 4 * (16 * 32 + 32)
    assert first.optimizer_bytes == 2 * first.gradient_bytes + 2 * 4, "two moments, and a step count per tensor"
    assert [each.output_bytes for each in first.measured] == [4 * 32 * 4, 8 * 32 * 4]
    assert first.measured[1].stored_bytes == 8 * 32 * 4, "its output; the input it keeps is the cut's"
    assert second.weight_bytes == 0
    assert not second.has_parameters
    assert third.weight_bytes == 4 * (32 * 10 + 10)


def test_on_an_accelerator_everything_is_brought_there_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: list[torch.Tensor] = []
    waited: list[None] = []

    def bring(tensor: torch.Tensor) -> torch.Tensor:
        brought.append(tensor.clone())
        return brought[-1]

    monkeypatch.setattr("time.perf_counter", lambda: float(len(waited)))  # time passes while one waits, and only then
    (built,) = build_layers([nn.Linear(16, 4)], 0, lambda count: torch.ones(count, 16), [8])
    # Another name of the processor stands for the accelerator.
    there = Where("cpu:0", "an invented accelerator", bring, lambda: waited.append(None))
    cache, found = ProfileCache(tmp_path), {}
    for where in (there, PROCESSOR):
        profiler = Profiler(torch.ones(8, 16), [8], 1, adam, optimizer_name="adam", cache=cache, where=where)
        cost = profiler.with_loss(profiler.cost(built), nn.functional.mse_loss, "mse", torch.ones(8, 4))
        found[where] = cost.measured[0].forward_s
    assert {tuple(each.shape) for each in brought} == {(8, 16), (4, 16), (4,), (8, 4)}
    assert found[there] == 2.0, "the layer, and the loss"
    assert 0 < found[PROCESSOR] < 1
    assert cache.hits == 0, "what was measured on one device says nothing of another"


def test_a_layer_that_keeps_more_than_its_output_says_so() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.down(torch.tanh(self.up(x)))
            return y

    (wide,) = costs(Wide())
    assert wide.measured[1].stored_bytes == 8 * 4 * (64 + 16), "what tanh gave, and the output"


def test_times_grow_with_the_layer() -> None:
    small, large = costs(nn.Linear(16, 16)), costs(nn.Sequential(nn.Linear(16, 2048)), nn.Linear(2048, 2048))
    assert 0 < small[0].measured[1].forward_s < large[1].measured[1].forward_s
    assert 0 < small[0].measured[1].backward_s < large[1].measured[1].backward_s
    assert 0 < small[0].update_s < large[1].update_s


def test_measuring_leaves_weights_and_buffers_as_they_were() -> None:
    model = [nn.Linear(16, 8), nn.BatchNorm1d(8)]
    before = [value.clone() for module in model for value in module.state_dict().values()]
    costs(*model)
    after = [value for module in model for value in module.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = costs(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), cache=ProfileCache(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2, "the first layer's input wants no gradient; the others are alike"
    again = ProfileCache(tmp_path)
    assert [each.measured for each in costs(nn.Linear(16, 16), cache=again)] == [first[0].measured]
    assert (again.hits, again.misses) == (1, 0)


def test_another_size_is_measured_alone_and_kept_beside_those_before(tmp_path: Path) -> None:
    (first,) = costs(nn.Linear(16, 16), sizes=(4, 8), cache=ProfileCache(tmp_path))
    (wider,) = costs(nn.Linear(16, 16), sizes=(4, 6, 8), cache=ProfileCache(tmp_path))
    assert [each.samples for each in wider.measured] == [4, 6, 8]
    assert (wider.measured[0], wider.measured[2], wider.update_s) == (*first.measured, first.update_s)
    again = ProfileCache(tmp_path)
    (one,) = costs(nn.Linear(16, 16), sizes=(6,), cache=again)
    assert one.measured == wider.measured[1:2]
    assert (again.hits, again.misses) == (1, 0)


@pytest.mark.parametrize("change", ["version", "threads", "sizes", "optimizer", "shape", "damage"])
def test_anything_else_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    costs(nn.Linear(16, 16), cache=ProfileCache(tmp_path))
    cache = ProfileCache(tmp_path)
    sizes, threads, name, width = (4, 8), 1, "adam", 16
    if change == "version":
        monkeypatch.setattr(profile, "__version__", "0.0.1")
    elif change == "threads":
        threads = 2
    elif change == "sizes":
        sizes = (4, 6)
    elif change == "optimizer":
        name = "sgd"
    elif change == "shape":
        width = 24
    else:
        next(tmp_path.iterdir()).write_bytes(b'{"points": "many"}')
    built = build_layers([nn.Linear(width, 16)], 0, lambda count: torch.ones(count, width), [max(sizes)])
    profiler = Profiler(torch.ones(max(sizes), width), sizes, threads, adam, optimizer_name=name, cache=cache)
    for each in built:
        profiler.cost(each)
    assert (cache.hits, cache.misses) == (0, 1)


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert costs(nn.Linear(16, 16), cache=ProfileCache(tmp_path / "file" / "profile"))
