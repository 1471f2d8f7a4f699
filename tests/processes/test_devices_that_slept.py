"""All that runs is stopped for a while, and the master is the first to wake: nobody is lost. In memory, over minutes:
test_machine_that_slept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from commands import wait_for_step
from test_joining import PACED_STEPS, Ring

SLEPT_S = 5.0
#: Between one device and the next; less than a device has time to say that it is there.
APART_S = 0.5


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    made = Ring(tmp_path)
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ring", "tree-easgd:2"])
def test_devices_that_wake_after_the_master_are_not_taken_for_lost(strategy: str, ring: Ring) -> None:
    master = ring.paced("--strategy", strategy)
    for name in ("alpha", "beta"):
        ring.device(name)
    wait_for_step(ring.folder / "run", 31, master)  # from here on batches come slowly
    families = []
    for name in ("master", "alpha", "beta"):
        found = psutil.Process(ring.processes[name].pid)
        families.append([found, *found.children(recursive=True)])
    for each in (process for family in families for process in family):
        each.suspend()
    time.sleep(SLEPT_S)
    for family in families:
        for each in family:
            each.resume()
        time.sleep(APART_S)
    (ring.folder / "joined").touch()
    found = ring.result()
    assert found["recoveries"] == [], ring.said("master")
    assert found["steps"] == PACED_STEPS
