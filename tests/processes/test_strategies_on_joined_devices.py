"""Every strategy trains on devices that join over TCP on loopback, and ends as it does on local processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import here
from ringtmp.strategies import registry
from test_joining import FLAGS, Ring

#: With settings that make them exchange something within a few steps.
SETTINGS = {
    "ps": "ps:bsp", "averaging": "averaging:2", "block-momentum": "block-momentum:2", "easgd": "easgd:2", "mpca": "mpca:2",
    "tree-easgd": "tree-easgd:2", "gosgd": "gosgd:1", "gadmm": "gadmm:0.2:passes=4", "scheduled": "scheduled:600",
}  # fmt: skip
LINEAR = """
from torch import nn

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
#: Ways of the server that send other messages, or at other moments.
MORE = (
    "ps:ssp:1:eager=true", "ps:bsp:factors=true", "ps:asp:0.01", "ps:value:0.05", "ps:async:n_push=2:n_fetch=2",
    "ps:bsp:teams=1", "ps:bsp:teams=1:team_sum=all-reduce", "allreduce:tree", "allreduce:halving", "ensemble:stacking",
)  # fmt: skip
#: What needs no messages of its own kind is in the quick suite (test_joining.py: the ring), a few are long, the others nightly.
LONG = {"tensor", "allreduce", "gadmm"}


def every() -> list[object]:
    names = [name for name in registry.OURS if name != "ring"]
    found = [(name, SETTINGS.get(name, name)) for name in names] + [(text, text) for text in MORE]
    return [
        pytest.param(text, id=name, marks=pytest.mark.long if name in LONG else pytest.mark.nightly)
        for name, text in found
    ]


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    made = Ring(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("text", every())
def test_it_trains_on_joined_devices_as_on_local_processes(text: str, ring: Ring) -> None:
    strategy = registry.get(registry.parse(text).name)
    settings = strategy.read(registry.parse(text).settings)
    (ring.folder / "linear.py").write_text(LINEAR)
    samples = 1438 if strategy.full_batch else 48
    alike = strategy.exactness(settings) != "steps"
    steps = 6 if alike else 60  # where nobody waits, a loss is of whichever samples came first
    what = [
        "--strategy", text, "--steps", steps, "--batch-size", samples, "--microbatches", 6,
        *(["--model", "linear.py:model"] if strategy.full_batch else ["--set", "width=96", "--set", "depth=2"]),
    ]  # fmt: skip
    ring.master(3, *what)
    for device in ("alpha", "beta"):
        ring.device(device)
    found = ring.result(300)
    assert found["nodes"] == 3, ring.said("master")
    assert found["steps"] == steps
    losses = found["loss"]
    assert isinstance(losses, dict)
    assert losses["last"] < losses["first"]
    if alike:
        local = here("train", "--nodes", 3, *what, *FLAGS, "--run-dir", "local", cwd=ring.folder)
        assert found["weights_sha256"] == json.loads(local.stdout)["weights_sha256"]
