"""Every strategy on emulated devices that join: a network stack, a share of a processor and a slow link for each."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from test_lab import device, devices_file, left, needs_isolation

from commands import begin
from ringtmp.strategies import registry
from test_strategies_on_joined_devices import LINEAR, MORE, SETTINGS

pytestmark = [needs_isolation, pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(400)]

NAMES = ("desk", "shelf", "attic", "shed", "porch")
#: What needs more workers than three.
LARGER = ("ps:bsp:teams=3/2", "ps:async:teams=2:team_sum=all-reduce")
WAYS = (*(SETTINGS.get(name, name) for name in registry.OURS), *MORE, *LARGER)


@pytest.mark.parametrize("text", WAYS)
def test_it_trains_in_the_lab(text: str, tmp_path: Path) -> None:
    strategy = registry.get(registry.parse(text).name)
    nodes = 5 if text in LARGER else 4
    (tmp_path / "linear.py").write_text(LINEAR)
    file = devices_file(tmp_path, *(device(name, 1.6 / nodes, memory_mb=1500) for name in NAMES[:nodes]))
    exact = strategy.exactness(strategy.read(registry.parse(text).settings)) != "steps"
    steps = 20 if exact else 60  # where nobody waits, a loss is of whichever samples came first
    lab = begin(
        "lab", "--devices", file, "--", "train", "--all-devices", "--strategy", text, "--steps", steps, "--json", "--quiet",
        "--batch-size", 1438 if strategy.full_batch else 48, "--microbatches", 8, "--run-dir", "run",
        *(["--model", "linear.py:model"] if strategy.full_batch else ["--set", "width=96", "--set", "depth=4"]), cwd=tmp_path,
    )  # fmt: skip
    try:
        out, err = lab.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        lab.terminate()
        out, err = lab.communicate()
        raise AssertionError(f"still running after 300 s\n{out}\n{err}") from None
    assert lab.returncode == 0, err
    found = json.loads(out)
    assert (found["nodes"], found["steps"], found["recoveries"]) == (nodes, steps, []), err
    assert found["loss"]["last"] < found["loss"]["first"]
    assert sorted(each["device"] for each in found["per_node"]) == sorted(["master", *NAMES[1:nodes]])
    assert (found["bytes_total"] > 0) == (strategy.name != "ensemble")
    assert left(lab.pid) == []
