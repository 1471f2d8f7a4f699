"""Types of settings given by keyword, written by scripts/write_settings_tables.py: change settings.py instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class RingKeywords(TypedDict, total=False):
    threads: int | None
    strategy: str
    settings: Mapping[str, Any] | None
    share_data: bool
    any_bits: bool
    all_devices: bool
    device: Literal["cpu", "cuda", "mps", "auto"]
    cuts: str | None
    blocks: str | None
    groups: str | None
    share_optimizer: bool
    group_sums: str
    minimise: Literal["time", "energy", "memory"]
    window: int | None
    schedule: Literal["auto", "1f1b", "gpipe", "zero-bubble"]
    laps: int
    route: Literal["ring", "v"]
    recompute: Literal["none", "all", "auto"]
    rebalance: bool
    local_steps: int | None
    outer_lr: float
    outer_momentum: float
    home_alone: Literal["wait", "go-on"]
    home_wait_s: float


class FitKeywords(TypedDict, total=False):
    columns: str | None
    bad_lines: Literal["refuse", "skip"]
    tokenizer: str | None
    context: int | None
    attention_mask: bool
    leave_out: str | None
    weights: str | None
    train: str | None
    lora: str | None
    adapter: str | None
    frozen_as: str
    epochs: int | None
    steps: int | None
    batch_size: int
    microbatches: int | Literal["auto"] | None
    clip_norm: float | None
    seed: int
    compute: str
    compile: bool
    deterministic: bool
    wire: str
    staleness: int
    sum_tree: int
    early_stop: int | None
    checkpoint_every: int | None
    detailed_steps: int
    protect: Literal["auto", "memory", "disk", "checkpoint", "off"]
    notice_s: float
    stream_keep: Literal["memory", "disk", "none"]
    test_then_train: bool
