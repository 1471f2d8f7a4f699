"""What a stage and the master do differently where an accelerator works behind them, tried on the processor: fewer waits, the
same bits. On a GPU: tests/processes/test_accelerators.py, scripts/measure_gpu.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ringtmp.data.batches import Batch
from ringtmp.errors import LossNotFinite
from ringtmp.runtime import compute_device
from ringtmp.runtime.gradients_at_segment_edges import add_together, run_backward
from ringtmp.strategies.ring.diagnose_failure import NotFinite
from ringtmp.strategies.ring.step_under_way import StepUnderWay

WIDTH, PARTS = 6, 4


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_device, "works_behind", lambda: True)


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(4)
    return [(torch.randn(7, WIDTH, generator=draw), torch.randn(7, WIDTH, generator=draw)) for _ in range(3)]


@pytest.mark.parametrize("nodes", [1, 3])
def test_losses_read_together_and_gradients_added_by_one_call_change_no_bit(
    nodes: int, behind: None, tmp_path: Path
) -> None:
    built = Built(tmp_path, layers, lambda count: torch.zeros(count, WIDTH), [2])
    plain = nn.Sequential(*layers())
    losses = plain_loop(plain, batches(), PARTS, F.mse_loss, lambda each: torch.optim.SGD(each, lr=0.1, fused=True))
    assert ring_in_memory(built, recipe(), batches(), PARTS, F.mse_loss, nodes) == (state_sha256(plain), losses)


def test_gradients_are_added_to_those_before_them_and_to_no_others() -> None:
    def through(way: Any) -> list[torch.Tensor | None]:
        torch.manual_seed(5)
        used, once, never = (torch.randn(3, requires_grad=True) for _ in range(3))
        for scale in (1.0, 0.3, 0.7):
            roots = [(used * scale + (once if scale == 0.3 else 0.0)).sin().sum() + (used * used).sum()]
            backward = partial(run_backward, roots, [torch.ones(())])
            way([used, once, never], backward)
        return [used.grad, once.grad, never.grad]

    expected = through(lambda parameters, backward: backward())
    found = through(add_together)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2] is expected[2] is None


def test_no_loss_is_read_before_the_last_of_a_step_and_then_the_latest_that_is_no_number_is_told(behind: None) -> None:
    batch = Batch(0, (), (torch.zeros(1), torch.zeros(1), torch.zeros(2)), 4)
    step = StepUnderWay(batch, 1)
    for microbatch, value in enumerate((1.0, 3.0)):
        assert float(step.came(7, microbatch, torch.tensor(value))) == value * 0.25
    assert not step.losses
    step.came(7, 2, torch.tensor(2.0))
    assert step.loss == 2.0
    broken = StepUnderWay(batch, 1)
    broken.came(7, 0, torch.tensor(float("nan")))
    broken.came(7, 2, torch.tensor(float("inf")))
    with pytest.raises(NotFinite) as caught:
        broken.came(7, 1, torch.tensor(1.0))
    assert (caught.value.step, caught.value.microbatch) == (7, 2)


def test_a_loss_that_is_no_number_ends_the_run_before_anything_is_updated(behind: None, tmp_path: Path) -> None:
    built = Built(tmp_path, layers, lambda count: torch.zeros(count, WIDTH), [2])
    given = batches()
    given[1][0][0] = float("nan")  # the first microbatch of the second step
    with pytest.raises(LossNotFinite, match="the loss is nan in step 1"):
        ring_in_memory(built, recipe(), given, PARTS, F.mse_loss, 2)
