"""A node's peak memory, in real processes, is what the plan said it would be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import ringtmp
from ringtmp.plan.memory_forecast import PROCESS_BYTES

#: So large that the process itself, which takes the same whatever it holds, does not decide.
GPT = "--model gpt --set depth=8 --set width=384 --set context=128 --data pysource --batch-size 24 --steps 3"
CONVNET = "--model convnet --set depth=6 --set width=48 --data random:3x32x32x10 --batch-size 192 --steps 3"
RUN = "--nodes 3 --microbatches 6 --no-rebalance --json --quiet"
#: So long that every node has sent and kept a snapshot.
PROTECTED = "--protect memory --steps 16"
WITHIN = 0.15


@pytest.mark.alone
@pytest.mark.timeout(900)  # on a busy machine; how long it takes is no part of the claim
@pytest.mark.parametrize(
    ("work", "how"),
    [
        pytest.param(GPT, "--schedule 1f1b --protect off", marks=pytest.mark.nightly),
        pytest.param(GPT, "--schedule zero-bubble --protect off", marks=pytest.mark.nightly),
        pytest.param(GPT, "--recompute all --protect off", marks=pytest.mark.nightly),
        pytest.param(GPT, PROTECTED, marks=pytest.mark.nightly),
        pytest.param(CONVNET, "--protect off", marks=pytest.mark.nightly),
        pytest.param(CONVNET, f"{PROTECTED} --optimizer adam", marks=pytest.mark.long),
    ],
    ids=lambda words: words.removeprefix("--model ").split(" --set")[0],
)
def test_a_nodes_peak_memory_is_within_15_percent_of_the_forecast(work: str, how: str, tmp_path: Path) -> None:
    words = f"{work} {RUN} {how}".split()
    summary = json.loads(ringtmp("train", *words, "--run-dir", tmp_path / "run", cwd=tmp_path, timeout=800).stdout)
    said = {each["node"]: each["memory_bytes"] for each in summary["forecast"]["per_node"]}
    peaks = {each["node"]: each["peak_rss_bytes"] for each in summary["per_node"]}
    assert max(peaks.values()) > 2 * PROCESS_BYTES, "the process itself must not decide"
    off = {node: said[node] / peak - 1 for node, peak in peaks.items()}
    assert all(abs(each) <= WITHIN for each in off.values()), f"forecast over peak, less one: {off}"


FROZEN = (
    "--model mlp --set width=2048 --set depth=10 --data random:784x10 --batch-size 64 --steps 3 --train dense0|head"
)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_frozen_weights_kept_small_take_the_memory_that_was_forecast(tmp_path: Path) -> None:
    """Quick: `test_frozen_weights_kept_small.py` counts bytes placed, on disk, in the plan and saved by autograd."""
    workers: dict[str, int] = {}
    for kept in ("float32", "int8"):
        words = f"{FROZEN} {RUN} --protect off --cuts 0-1,2-5,6-9,10-10 --frozen-as {kept}".split()
        summary = json.loads(ringtmp("train", *words, "--run-dir", tmp_path / kept, cwd=tmp_path, timeout=800).stdout)
        said = {each["node"]: each["memory_bytes"] for each in summary["forecast"]["per_node"]}
        peaks = {each["node"]: each["peak_rss_bytes"] for each in summary["per_node"]}
        off = {node: said[node] / peaks[node] - 1 for node in (1, 2)}
        assert all(abs(each) <= WITHIN for each in off.values()), f"forecast over peak, less one: {off}"
        workers[kept] = peaks[1] + peaks[2]
    weights = 2 * 4 * 2048**2 * 4
    print(f"peak of both workers {workers}, float32 weights on them {weights}")
    # Three quarters of the weights less, one of them more while it is used.
    assert workers["float32"] - workers["int8"] > 0.3 * weights
