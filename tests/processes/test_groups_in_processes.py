"""Rings of groups in processes, from the command line: one digest with one process, all-reduce and a parameter server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import here

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
