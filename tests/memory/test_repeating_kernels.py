"""Kernels that may give other bits the next time: allowed by a setting, which the summary names, and in that run alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringtmp import Ring


def test_kernels_that_may_not_repeat_are_allowed_when_asked_for_and_said(tmp_path: Any) -> None:
    data = torch.randn(16, 4), torch.arange(16) % 3
    seen: list[bool] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return F.cross_entropy(outputs, targets)

    def fit(name: str, **more: Any) -> tuple[bool, str, str]:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        seen.clear()
        ring = Ring(nodes=1, progress=False)
        told = ring.fit(model, data, loss=loss, steps=2, batch_size=8, run_dir=tmp_path / name, **more).summary
        return seen[-1], told.exactness, told.numeric_mode

    assert fit("free", deterministic=False) == (False, "steps", "float32, kernels that may not repeat")
    assert fit("usual") == (True, "bits", "float32")
