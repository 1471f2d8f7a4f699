"""Groups of nodes that hold the same layers and share a step's microbatches: the bits of one process with the same tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics.events import NodeStep, StepDone, Warned, read
from ringtmp.model import deferred_gradients
from ringtmp.plan.node_groups import members_of
from ringtmp.runtime import stage, worker
from ringtmp.strategies.ring import gradient_buckets
from ringtmp.transport.faults import Faults, Shaped
from test_group_members_lost import run
from test_rings_sum_tree import plain
from test_same_bits_as_one_process import MICROBATCHES
from test_schedules import CLIP, SEED, SETTINGS, Case

#: Values that travel together: a few tensors of these small models, so that there are many messages.
SMALL = 128


@pytest.fixture(scope="module")
def built_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    return cache(lambda model: Case(model).build(tmp_path_factory.mktemp(model)))


@pytest.mark.parametrize(
    ("model", "groups", "schedule", "recompute", "values"),
    [
        ("gpt", (2, 2), "zero-bubble", "none", SMALL),
        ("gpt", (4,), "1f1b", "all", SMALL),
        ("mlp", (3, 1, 2), "gpipe", "none", gradient_buckets.BUCKET),
        pytest.param("gpt", (1, 3), "zero-bubble", "all", gradient_buckets.BUCKET, marks=pytest.mark.long),
    ],
)
def test_groups_end_in_the_bits_of_one_process(
    model: str, groups: tuple[int, ...], schedule: str, recompute: str, values: int,
    built_of: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With dropout, clipping, packets lost and out of order, and a last batch in which a member has nothing to do; a stage's
    gradients in many messages, and in one."""
    monkeypatch.setattr(gradient_buckets, "BUCKET", values)
    case, built, nodes = Case(model), built_of(model), 1 + sum(groups)
    how = recipe("sgd", SETTINGS, seed=SEED, clip_norm=CLIP, sum_tree=4)
    window = MICROBATCHES if schedule == "gpipe" else 5
    rough = Faults(drop=0.02, duplicate=0.02, reorder=0.05)
    got = ring_in_memory(
        built, how, case.batches, MICROBATCHES, case.loss, nodes, schedule, window=window, recompute=recompute,
        members=members_of(groups, range(nodes)), wrap=lambda t: Shaped(t, rough, 7 + t.node),
    )  # fmt: skip
    assert got == plain(model, 4)


@pytest.mark.parametrize("shares_state", [False, True])
def test_a_weight_that_lies_otherwise_in_memory_gets_a_gradient_that_lies_as_it_does(
    shares_state: bool, tmp_path: Path
) -> None:
    """A sum came back in rows, and fused optimizers go through memory: each value got the gradient of another."""

    def model() -> nn.Sequential:
        torch.manual_seed(1)
        turned, last = nn.Linear(8, 8), nn.Conv1d(2, 4, 2)
        turned.weight = nn.Parameter(torch.randn(8, 8).t() * 0.2)
        last.weight = nn.Parameter(last.weight.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1))
        return nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), turned, nn.Unflatten(1, (2, 4)), last, nn.Flatten(), nn.Linear(12, 3)
        )

    batches = [(torch.randn(8, 6), torch.arange(8) % 3) for _ in range(2)]
    alone = model()
    losses = plain_loop(
        alone, batches, 4, F.cross_entropy, lambda each: torch.optim.AdamW(each, lr=1e-2, fused=True), sum_tree=4
    )
    got = ring_in_memory(
        Built(tmp_path, model(), lambda count: torch.randn(count, 6), [2]), recipe("adamw", {"lr": 1e-2}, sum_tree=4),
        batches, 4, F.cross_entropy, 3, members=[(0,), (1, 2), (0,)], bounds=[(0, 1), (1, 6), (6, 7)],
        shares_state=shares_state,
    )  # fmt: skip
    assert got == (state_sha256(alone), losses)


@pytest.mark.parametrize(
    ("schedule", "work", "large_bytes"),
    [("1f1b", "backward", 64), ("1f1b", "backward", 1 << 30), ("zero-bubble", "weights", 64)],
)
def test_sums_leave_while_the_last_microbatch_goes_backward(
    schedule: str, work: str, large_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen in what every member records: in the trace a sum is on its way before the work it stands behind has ended."""
    monkeypatch.setattr(gradient_buckets, "BUCKET", SMALL)
    monkeypatch.setattr(stage, "PIECE_OF_WORK", 1)
    monkeypatch.setattr(
        deferred_gradients, "REUSED_UP_TO_BYTES", large_bytes
    )  # above: gradients that autograd does not make
    run(tmp_path, InMemoryPool(5), "4", schedule)
    early: set[int] = set()
    for event in read(tmp_path / "events.jsonl"):
        if isinstance(event, NodeStep):
            sends = [each.start for each in event.spans if each.kind == "send"]
            spans = [each for each in event.spans if each.kind == work]
            while_working = spans[-1:] if work == "backward" else spans[:-1]
            if any(span.start < start < span.end for span in while_working for start in sends):
                early.add(event.node)
    assert early == {1, 2, 3, 4}


def test_a_member_that_computes_otherwise_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members make the same update each on its own: on another processor its last bits may differ."""
    said = worker.Hello
    monkeypatch.setattr(
        worker,
        "Hello",
        lambda pid, torch, capability, *more: said(pid, torch, "NEON" if next(turn) == 2 else capability, *more),
    )
    turn = iter(range(1, 100))
    run(tmp_path, InMemoryPool(5), "2,2")
    told = list(read(tmp_path / "events.jsonl"))
    named = next(at for at, each in enumerate(told) if isinstance(each, Warned) and "has torch" in each.text)
    first = next(at for at, each in enumerate(told) if isinstance(each, NodeStep | StepDone))
    assert named < first
    assert "NEON" in told[named].text  # type: ignore[union-attr]
    assert "last bits" in told[named].text  # type: ignore[union-attr]
