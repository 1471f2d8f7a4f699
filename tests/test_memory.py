"""A node's peak memory, in real processes, is what the plan said it would be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import ringtmp

#: So large that the process itself, which takes the same whatever it holds, does not decide.
WORK = (
    "--model", "gpt", "--set", "depth=8", "--set", "width=384", "--set", "context=128", "--data", "pysource", "--nodes", 3,
    "--batch-size", 24, "--microbatches", 6, "--steps", 3, "--no-rebalance", "--protect", "off", "--json", "--quiet",
)  # fmt: skip
PROCESS_BYTES = 230 * 2**20
WITHIN = 0.15


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "how",
    [
        ("--schedule", "1f1b"),
        ("--schedule", "zero-bubble"),
        ("--recompute", "all"),
    ],
    ids=" ".join,
)
def test_a_nodes_peak_memory_is_within_15_percent_of_the_forecast(how: tuple[str, ...], tmp_path: Path) -> None:
    summary = json.loads(ringtmp("train", *WORK, *how, "--run-dir", tmp_path / "run", cwd=tmp_path).stdout)
    said = {each["node"]: each["memory_bytes"] for each in summary["forecast"]["per_node"]}
    peaks = {each["node"]: each["peak_rss_bytes"] for each in summary["per_node"]}
    assert max(peaks.values()) > 2 * PROCESS_BYTES, "the process itself must not decide"
    off = {node: said[node] / peak - 1 for node, peak in peaks.items()}
    assert all(abs(each) <= WITHIN for each in off.values()), f"forecast over peak, less one: {off}"
