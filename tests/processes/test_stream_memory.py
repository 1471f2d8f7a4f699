"""Data larger than memory: a stream of a million samples that nobody stores, shards of two gigabytes. Memory stays flat, and
nothing but the event log grows on the disk."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str) -> ModuleType:
    with mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]):
        return importlib.import_module(name)


@pytest.mark.nightly  # quick: tests/pure/test_shards.py, tests/memory/test_test_then_train.py
@pytest.mark.alone
def test_a_million_samples_leave_memory_and_disk_as_they_were() -> None:
    measured = script("measure_stream").measure(1_000_000)
    assert measured["samples"] == 1_000_000
    assert measured["bad_lines"] == 100
    settled, late = measured["memory_mib"][3], measured["memory_mib"][9]
    assert late <= settled * 1.1 + 20
    assert measured["other_files_kib"][9] <= measured["other_files_kib"][3] + 64
    assert measured["wrong_first_and_last"][1] < measured["wrong_first_and_last"][0]


@pytest.mark.nightly  # quick: tests/pure/test_shards.py, tests/memory/test_runs_on_shards.py
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_two_gigabytes_of_shards_leave_memory_as_it_was_and_resume_in_the_same_order(kind: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    measured = script("measure_shards").measure(kind, 2.0)
    assert measured["gib"] > 1.9
    assert measured["same_after_resuming"]
    highest = measured["highest_memory_mib"]
    assert max(highest[5:]) <= max(highest[1:5]) * 1.1 + 20
