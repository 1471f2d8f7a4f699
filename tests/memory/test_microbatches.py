"""`--microbatches auto`: chosen by simulation before the first step, and from then on a number like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from costs import devices
from ringtmp import Watcher, api
from ringtmp.cli import train
from ringtmp.cli.settings import build
from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import DoesNotFit, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.plan.devices import Device, LayerCost, Measured
from ringtmp.plan.microbatches import COUNTS, best_plan, microbatch_sizes, sizes
from ringtmp.plan.planner import PlanOptions, plan
from ringtmp.run.check_settings import resolve
from ringtmp.runtime.run_directory import RunDirectory


def with_calls(call_s: float, sample_s: float = 1.0) -> list[LayerCost]:
    """Every layer costs something per call and something per sample."""
    points = tuple(Measured(n, call_s + n * sample_s, call_s + n * sample_s, 0.0, 0.0) for n in (1, 32))
    return [LayerCost(f"layer{index}", points, 0, 0, 0) for index in range(5)]


@pytest.mark.parametrize("call_s", [0.0, 0.3, 2.0, 100.0])
def test_the_search_finds_what_trying_every_number_finds(call_s: float) -> None:
    model, there, options = with_calls(call_s), devices(4), PlanOptions(64, 8, keep_all=True)
    made = best_plan(model, there, options, lambda count: True)
    steps = {count: plan(model, there, PlanOptions(64, count, keep_all=True)).step_s for count in COUNTS if count <= 64}
    assert made.step_s <= 1.01 * min(steps.values())
    assert made.options.microbatches in steps


def test_dear_calls_make_for_few_microbatches_and_free_ones_for_many() -> None:
    there, options = devices(4), PlanOptions(64, 8, keep_all=True)
    few = best_plan(with_calls(20.0), there, options, lambda count: True)
    many = best_plan(with_calls(0.0), there, options, lambda count: True)
    assert few.options.microbatches <= 6 < 24 <= many.options.microbatches


def test_only_allowed_numbers_are_taken_and_one_is_always_left() -> None:
    model, there, options = with_calls(0.0), devices(2), PlanOptions(64, 8)
    assert best_plan(model, there, options, lambda count: count <= 6).options.microbatches <= 6
    assert best_plan(model, there, options, lambda count: False).options.microbatches == 1


def test_where_no_number_fits_the_missing_bytes_are_told() -> None:
    small = [Device(f"small{index}", memory_bytes=1000.0) for index in range(2)]
    with pytest.raises(DoesNotFit, match="bytes"):
        best_plan(with_calls(0.0), small, PlanOptions(64, 8), lambda count: True)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 32, 100, 1024])
def test_measured_sizes_reach_from_half_a_batch_to_the_most_slices(batch_size: int) -> None:
    found = sizes(batch_size)
    assert found == sorted(set(found))
    assert found[0] >= 1
    assert found[-1] == max(1, batch_size // 2)
    assert len(found) <= 7
    assert batch_size / found[0] <= max(64, 2)


def stack() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))


def run(folder: Path, microbatches: Any, nodes: int = 3, watcher: Any = None) -> api.Result:
    torch.manual_seed(1)
    data = tensors("t", torch.randn(60, 6), torch.arange(60) % 3)
    config = RunConfig(
        training=TrainingPart(data="given", batch_size=16, microbatches=microbatches, steps=5),
        ring=RingPart(nodes=nodes),
    )
    return api.start(
        config, stack(), (data, None), None, run_dir=folder, watcher=watcher or Watcher(), pool=InMemoryPool(nodes)
    )


class Reader(Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def expect(self, lines: Any) -> None:
        self.lines += lines


def test_auto_gives_the_bits_of_the_same_number_by_hand_and_is_recorded(tmp_path: Path) -> None:
    reader = Reader()
    chosen = run(tmp_path / "auto", "auto", watcher=reader)
    summary = chosen.summary
    count = summary.microbatches
    by_hand = run(tmp_path / "hand", count)
    assert summary.weights_sha256 == by_hand.summary.weights_sha256
    assert summary.microbatches_chosen
    assert not by_hand.summary.microbatches_chosen
    # A BatchNorm needs two samples; the last batch of an epoch has 12.
    assert min(microbatch_sizes({16, 12}, count)) >= 2
    assert RunDirectory(tmp_path / "auto").read_config().config.training.microbatches == count
    started = next(
        each for each in events.read(tmp_path / "auto" / "events.jsonl") if isinstance(each, events.RunStarted)
    )
    assert started.facts["microbatches_chosen"] is True
    assert f"{count} microbatch" in reader.lines[0]
    assert "(auto)" in reader.lines[0]


def test_a_resumed_run_keeps_the_number_that_was_chosen_and_notices_other_data(tmp_path: Path) -> None:
    first = run(tmp_path / "run", "auto")
    data = (tensors("t", torch.randn(60, 6), torch.arange(60) % 3), None)
    again = api.resume(tmp_path / "run", {"steps": 7, "nodes": 2}, data, None, watcher=Watcher(), pool=InMemoryPool(2))
    assert again.summary.microbatches == first.summary.microbatches
    assert any("the data (t) is not what it was" in text for text in again.summary.warnings)
    with pytest.raises(UsageError, match="cannot change --microbatches"):
        api.resume(tmp_path / "run", {"microbatches": "auto"}, data, None, watcher=Watcher(), pool=InMemoryPool(2))


def test_auto_is_for_the_ring_and_other_words_are_refused() -> None:
    with pytest.raises(UsageError, match="auto works with --strategy ring only"):
        resolve(RunConfig(training=TrainingPart(microbatches="auto"), ring=RingPart(strategy="ps")))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"microbatches": "many"}, TrainingPart)


def test_auto_comes_from_a_flag_or_a_file_and_other_words_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[training]\nmicrobatches = "auto"\n')
    assert build(file, {}).training.microbatches == "auto"
    assert build(file, {"microbatches": 4}).training.microbatches == 4
    asked = CliRunner().invoke(train.command, ["--microbatches", "many"])
    assert asked.exit_code == 2
    assert "'many' is neither a number nor 'auto'" in asked.output
