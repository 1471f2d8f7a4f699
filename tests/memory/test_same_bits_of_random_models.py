"""Contract 1 on models nobody thought of: random stacks, cuts, microbatches, windows; several tensors across a cut."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp.errors import UsageError

WIDTH = 6


class Fork(nn.Module):
    """One tensor becomes two; the second is kept for later: a skip across cuts."""

    def forward(self, x: Any) -> Any:
        return (x, x) if isinstance(x, torch.Tensor) else (*x, x[0])


class Join(nn.Module):
    """The newest skip is added back."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x
        head, *rest = x
        joined = head + rest.pop()
        return (joined, *rest) if rest else joined


class OnHead(nn.Module):
    """Apply a layer to the first tensor and let the others pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.layer(x)
        return (self.layer(x[0]), *x[1:])


class Turned(nn.Module):
    """Leaves a tensor whose strides are not those of a fresh one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()


class Strided(nn.Module):
    """Leaves every second column of a wider tensor: strides with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x)[:, 1::2]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("hidden", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * self.hidden


class Moving(nn.Module):
    """Reads a buffer it has just changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(1.01)
        return x * self.scale


class Narrowed(nn.Module):
    """Changes a part of what enters in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.narrow(1, 1, 3).mul_(0.5)
        return x * 1.5


KINDS = {
    "linear": lambda: OnHead(nn.Linear(WIDTH, WIDTH)),
    "relu in place": lambda: OnHead(nn.ReLU(inplace=True)),
    "tanh": lambda: OnHead(nn.Tanh()),
    "dropout": lambda: OnHead(nn.Dropout(0.3)),
    "norm": lambda: OnHead(nn.LayerNorm(WIDTH)),
    "identity": lambda: OnHead(nn.Identity()),
    "turned": lambda: OnHead(Turned()),
    "strided": lambda: OnHead(Strided()),
    "counting": lambda: OnHead(Counting()),
    "moving": lambda: OnHead(Moving()),
    "narrow in place": lambda: OnHead(Narrowed()),
    "frozen": lambda: OnHead(_frozen()),
    "fork": Fork,
    "join": Join,
}


def _frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    parts = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return sum(((part - targets) ** 2).mean() for part in parts)


@st.composite
def rings(draw: st.DrawFn) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=7))
    nodes = draw(st.integers(1, min(4, len(kinds) + 1)))
    # One layer with parameters at each end, as the plan demands of front and tail.
    stack = ["linear", *kinds, "linear"]
    cuts = sorted(draw(st.sets(st.integers(1, len(stack) - 1), min_size=nodes, max_size=nodes))) if nodes > 1 else []
    edges = [0, *cuts, len(stack)]
    batch = draw(st.integers(1, 9))
    return {
        "stack": stack,
        "nodes": nodes,
        "bounds": list(itertools.pairwise(edges)),
        "batch": batch,
        "microbatches": draw(st.integers(1, 10)),
        "window": draw(st.integers(1, 12)),
        "rule": draw(st.sampled_from(["1f1b", "gpipe", "zero-bubble"])),
        "delayed": draw(st.booleans()),
        "clip": draw(st.sampled_from([None, 0.1])),
        "recompute": draw(st.sampled_from(["none", "all"])),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(rings())
def test_random_stacks_cuts_and_windows_give_the_bits_of_a_plain_loop(case: dict[str, Any]) -> None:
    compare(case)


@pytest.mark.long
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(rings())
def test_more_random_stacks_cuts_and_windows_give_the_bits_of_a_plain_loop(case: dict[str, Any]) -> None:
    compare(case)


def compare(case: dict[str, Any]) -> None:
    def build() -> list[nn.Module]:
        return [KINDS[kind]() for kind in case["stack"]]

    seed = case["seed"]
    generator = torch.Generator().manual_seed(seed)
    batches = [
        (torch.randn(case["batch"], WIDTH, generator=generator), torch.randn(case["batch"], WIDTH, generator=generator))
        for _ in range(2)
    ]
    torch.manual_seed(seed)
    plain = nn.Sequential(*build())
    try:
        losses = plain_loop(
            plain,
            batches,
            case["microbatches"],
            loss,
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
            seed,
            case["clip"],
            delayed=case["delayed"],
        )
    except RuntimeError as error:  # two changes in place that autograd itself refuses: no model at all
        assume("inplace operation" not in str(error))
        raise
    microbatches = min(case["microbatches"], case["batch"])
    # gpipe keeps every microbatch in flight; a smaller window would wait for a backward that never comes.
    window = microbatches if case["rule"] == "gpipe" else case["window"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            built = Built(
                Path(folder), build, lambda count: torch.zeros(count, WIDTH), [case["batch"] // microbatches], seed
            )
        except UsageError as error:  # refused by name; see test_a_change_in_place_of_shared_memory_is_refused
            assume("changes its input in place while another" not in str(error))
            raise
        how = recipe(
            "sgd", {"lr": 0.05, "momentum": 0.9}, seed=seed, clip_norm=case["clip"], staleness=int(case["delayed"])
        )
        got = ring_in_memory(
            built, how, batches, microbatches, loss, case["nodes"], case["rule"], case["bounds"], window, seed,
            recompute=case["recompute"],
        )  # fmt: skip
    assert got == (state_sha256(plain), losses)


def test_a_change_in_place_of_shared_memory_is_refused(tmp_path: Path) -> None:
    model = [nn.Linear(WIDTH, WIDTH), Fork(), OnHead(nn.ReLU(inplace=True)), Join()]
    with pytest.raises(UsageError, match="layer '2' .* use inplace=False"):
        Built(tmp_path, model, lambda count: torch.zeros(count, WIDTH), [2])
