"""A stream of a million samples that nobody stores: memory stays flat, and nothing but the event log grows on the disk."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_stream.py"


@pytest.mark.nightly  # quick: tests/pure/test_shards.py, tests/memory/test_test_then_train.py
@pytest.mark.alone
def test_a_million_samples_leave_memory_and_disk_as_they_were() -> None:
    found = importlib.util.spec_from_file_location("measure_stream", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    measured = module.measure(1_000_000)
    assert measured["samples"] == 1_000_000
    assert measured["bad_lines"] == 100
    settled, late = measured["memory_mib"][3], measured["memory_mib"][9]
    assert late <= settled * 1.1 + 20
    assert measured["other_files_kib"][9] <= measured["other_files_kib"][3] + 64
    assert measured["wrong_first_and_last"][1] < measured["wrong_first_and_last"][0]
