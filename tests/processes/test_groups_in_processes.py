"""Rings of groups in processes, from the command line: one digest with one process, all-reduce and a parameter server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import assert_all_gone, begin, here, ringtmp, wait_for_step, workers_of
from ringtmp.metrics import events

GPT = (
    "--model", "gpt", "--set", "depth=3", "--set", "width=32", "--set", "heads=2", "--set", "dropout=0.1",
    "--data", "pysource",
    "--context", "16", "--steps", "6", "--batch-size", "22", "--microbatches", "8", "--optimizer", "adamw",
    "--clip-norm", "0.5",
    "--sum-tree", "4", "--json", "--quiet",
)  # fmt: skip
WAYS = {
    "one process": ("--nodes", "1"),
    "M-2-2-M": ("--nodes", "5", "--groups", "2,2", "--schedule", "zero-bubble"),
    "M-4-M": ("--nodes", "5", "--groups", "4"),
    "ring of 4": ("--nodes", "4", "--schedule", "zero-bubble"),
    "halving": ("--nodes", "4", "--strategy", "allreduce:halving"),
    "server": ("--nodes", "5", "--strategy", "ps:bsp"),
}


@pytest.mark.long
def test_one_digest_for_every_synchronous_way_in_processes(tmp_path: Path) -> None:
    found = {name: json.loads(here("train", *GPT, *way, cwd=tmp_path).stdout) for name, way in WAYS.items()}
    digests = {name: summary["weights_sha256"] for name, summary in found.items()}
    assert len(set(digests.values())) == 1, digests
    assert {summary["exactness"] for summary in found.values()} == {"bits"}
    assert [len(each["segments"]) for each in found["M-4-M"]["per_node"]] == [2, 1, 1, 1, 1]


#: Seconds from a member's death to the first step that is done again. The bar on quiet devices is 1 s; tests run beside others.
AGAIN_S = 20.0


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("more", "sources"),
    [
        (("--checkpoint-every", "1000"), ("survivors", "snapshot")),  # the latter if some had ended the step
        (("--checkpoint-every", "1000", "--share-optimizer"), ("snapshot",)),
    ],
)
def test_a_killed_member_of_a_group_is_replaced_soon(
    more: tuple[str, ...], sources: tuple[str, ...], tmp_path: Path
) -> None:
    steps = ("--steps", "60")
    calm = json.loads(here("train", *GPT, *steps, "--nodes", "1", cwd=tmp_path).stdout)
    run = tmp_path / "run"
    process = begin("train", *GPT, *steps, *WAYS["M-2-2-M"], *more, "--run-dir", run, cwd=tmp_path)
    try:
        wait_for_step(run, 10, process, 200)
        workers = workers_of(process)
        workers[2].kill()
        out, said = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    summary = json.loads(out)
    assert summary["weights_sha256"] == calm["weights_sha256"]
    recovery, *joined = summary["recoveries"]
    assert recovery["lost"] == [2]
    assert [each["lost"] for each in joined] in ([], [[]]), "a fresh process that its siblings did not wait for"
    assert recovery["source"] in sources
    told = list(events.read(run / "events.jsonl"))
    gone = next(each for each in told if isinstance(each, events.NodeGone))
    laid_out = next(at for at, each in enumerate(told) if isinstance(each, events.Regrouped))
    done = next(each for each in told[laid_out:] if isinstance(each, events.StepDone))
    died_at = gone.at - summary["recoveries"][0]["notice_s"]
    print(f"trained again {done.at - died_at:.2f} s after the loss, laid out after {told[laid_out].at - died_at:.2f} s")
    assert done.at - died_at < AGAIN_S
    assert_all_gone(list(workers.values()))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_members_that_share_the_optimizer_state_take_less_memory(tmp_path: Path) -> None:
    """Six layers of 9.4 MB on two nodes: each does without about 56 MB of Adam's 113, as was forecast."""
    wide = (
        "--model", "mlp", "--set", "depth=7", "--set", "width=1536", "--data", "digits", "--steps", "3", "--batch-size", "8",
        "--microbatches", "2", "--sum-tree", "2", "--nodes", "3", "--groups", "2", "--cuts", "0,1-6,7", "--optimizer", "adam",
        "--protect", "checkpoint", "--json", "--quiet",
    )  # fmt: skip
    digests, peaks, forecasts = [], [], []
    for name, more in (("alone", ()), ("shared", ("--share-optimizer",))):
        summary = json.loads(ringtmp("train", *wide, *more, "--run-dir", name, cwd=tmp_path, timeout=500).stdout)
        digests.append(summary["weights_sha256"])
        peaks.append([each["peak_rss_bytes"] for each in summary["per_node"][1:]])
        begun = next(
            each for each in events.read(tmp_path / name / "events.jsonl") if isinstance(each, events.RunStarted)
        )
        forecasts.append([each["memory_bytes"] for each in begun.facts["forecast"]["per_node"][1:]])
    assert digests[0] == digests[1]
    for node in range(2):
        told = forecasts[0][node] - forecasts[1][node]
        fell = peaks[0][node] - peaks[1][node]
        print(f"node {node + 1}: forecast {told / 2**20:.0f} MiB less, measured {fell / 2**20:.0f} MiB less")
        assert told > 40e6
        assert fell > told / 2
