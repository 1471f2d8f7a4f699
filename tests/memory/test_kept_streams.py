"""A stream that gives every batch once, and the loss of nodes that knew what nobody else did: batches are kept to the last
checkpoint, in memory or on disk, or skipped, and that is said."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from commands import assert_all_gone, begin, here, wait_for_step, workers_of
from ringtmp import api
from ringtmp.config import KeepPart, StreamKeep
from ringtmp.data import batches as data_batches
from ringtmp.data import stream_store as spools
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.stream_batches import Arrivals, StreamPlace
from ringtmp.data.stream_store import Kept, Spool, kept_copy
from ringtmp.data.tables_and_streams import Stream, from_python
from ringtmp.errors import RingError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.run import session
from test_healing import STEPS, Ticking, run
from test_training_loop import blobs

CUTS = "0-0,1-2,3-3,4-4,5-5"  # nodes 1 and 2 have parameters
MORE = 8  # batches beyond the run's steps, for one that skips


def one_pass(first: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every batch in the same memory, as a driver's buffer."""
    inputs, labels = blobs(16 * (STEPS + MORE))
    buffer = torch.empty(16, 6)
    for step in range(STEPS + MORE):
        buffer.copy_(inputs[16 * step : 16 * step + 16] if step >= first else torch.zeros(16, 6))
        yield buffer, labels[16 * step : 16 * step + 16]


class Both(InMemoryPool):
    """Two neighbours die in the same moment: an owner, and the holder of its snapshot."""

    def __init__(self, nodes: int, *moments: int) -> None:
        super().__init__(nodes, clock=Ticking())
        self._moments = list(moments)

    def advance(self) -> bool:
        if self._moments and any(each.step >= self._moments[0] for each in self._workers):
            del self._moments[0]
            self.kill(1)
            self.kill(2)
        return super().advance()


def trained(folder: Path, pool: InMemoryPool, keep: StreamKeep = "memory", data: Any = None, **more: Any) -> api.Result:
    part = KeepPart(checkpoint_every=more.pop("every", 5), stream_keep=keep)
    return run(folder, pool, part, (from_python(data or one_pass()), None), cuts=CUTS, **more)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    digest = trained(tmp_path_factory.mktemp("calm"), InMemoryPool(4)).summary.weights_sha256
    assert digest is not None
    return digest


@pytest.mark.parametrize("keep", ["memory", "disk"])
def test_owner_and_holder_die_together_and_no_bit_changes(keep: StreamKeep, tmp_path: Path, expected: str) -> None:
    hit = trained(tmp_path / "run", Both(4, 4, 9), keep)
    assert [each.source for each in hit.summary.recoveries] == ["checkpoint", "checkpoint"]
    assert hit.summary.weights_sha256 == expected
    assert hit.summary.skipped_samples == 0
    assert hit.summary.exactness == "stream", "a generator's order cannot be reproduced"
    assert not (tmp_path / "run/stream").exists(), "nobody needs them any more"


def test_with_nothing_kept_the_run_goes_on_with_the_next_batch_and_says_what_it_skipped(tmp_path: Path) -> None:
    given: list[int] = []

    def counted() -> Iterator[Any]:
        for number, batch in enumerate(one_pass()):
            given.append(number)
            yield batch

    hit = trained(tmp_path / "run", Both(4, 9), "none", counted())
    summary = hit.summary
    (healed,) = summary.recoveries
    assert (summary.outcome, summary.steps, healed.source) == ("done", STEPS, "checkpoint")
    assert len(given) == STEPS + healed.repeated + 1, "those of the lost steps and the one under way are gone"
    assert summary.skipped_samples == 16 * (healed.repeated + 1)
    assert summary.exactness == "stream"
    (told,) = [text for text in summary.warnings if "skipped" in text]
    assert f"{summary.skipped_samples} samples" in told
    (stray,) = [each for each in events.read(tmp_path / "run/events.jsonl") if isinstance(each, events.StreamStrayed)]
    assert (stray.step, stray.skipped) == (healed.step, summary.skipped_samples)
    again = (from_python(one_pass()), None)
    more = api.resume(tmp_path / "run", {"steps": STEPS + 1}, again, None, watcher=api.Watcher(), pool=InMemoryPool(4))
    assert (more.summary.skipped_samples, more.summary.exactness) == (summary.skipped_samples, "stream")


def test_with_nothing_kept_what_can_be_read_again_is_read_again(tmp_path: Path) -> None:
    batches = [(x.clone(), y) for x, y in one_pass()]
    calm = trained(tmp_path / "calm", InMemoryPool(4), "none", batches)
    hit = trained(tmp_path / "hit", Both(4, 9), "none", batches)
    assert hit.summary.recoveries
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256
    assert (hit.summary.exactness, hit.summary.skipped_samples) == ("bits", 0)


def test_a_checkpoint_is_taken_when_what_is_kept_fills_its_room(tmp_path: Path, expected: str) -> None:
    size = 16 * (6 * 4 + 8)
    with mock.patch.object(session, "MEMORY_LIMIT_BYTES", 3 * size):
        full = trained(tmp_path / "run", Both(4, 10), every=None)
    assert full.summary.weights_sha256 == expected
    saved = [
        each.step for each in events.read(tmp_path / "run/events.jsonl") if isinstance(each, events.CheckpointSaved)
    ]
    assert saved == [4, 8, 12]


class NoDisk(api.Watcher):
    """Nothing can be saved from step 1 to the last but one; notes how much is kept meanwhile."""

    def __init__(self, checkpoints: Path, spools: list[Spool]) -> None:
        self._checkpoints, self._aside, self._spools = checkpoints, checkpoints.with_name("aside"), spools
        self.kept: list[int] = []

    def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
        self.kept.append(self._spools[-1].memory_bytes)
        if done == 1:
            self._checkpoints.rename(self._aside)
            self._checkpoints.touch()
        if done == STEPS - 1:
            self._checkpoints.unlink()
            self._aside.rename(self._checkpoints)


def test_while_no_checkpoint_can_be_saved_a_whole_snapshot_lets_batches_go(tmp_path: Path, expected: str) -> None:
    size, made = 16 * (6 * 4 + 8), []

    def spool(*given: Any, **more: Any) -> Spool:
        made.append(Spool(*given, **more))
        return made[-1]

    watcher = NoDisk(tmp_path / "run/checkpoints", made)
    with (
        mock.patch.object(session, "MEMORY_LIMIT_BYTES", 3 * size),
        mock.patch.object(data_batches, "Spool", spool),
        mock.patch.object(api, "Watcher", return_value=watcher),
    ):
        done = trained(tmp_path / "run", InMemoryPool(4), every=None)
    assert done.summary.weights_sha256 == expected
    assert any(after < before for before, after in pairwise(watcher.kept[:-1]))
    assert [text.partition(":")[0] for text in done.summary.warnings] == ["no checkpoint of step 4"], (
        "tried again later"
    )


class Stopping(api.Watcher):
    """Ends the master at a step, without a word to anybody."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, done: int, total: int | None, event: events.StepDone, idle: float) -> None:
        if done == self._step:
            raise RingError("stopped")


def test_a_resumed_master_finds_the_batches_it_left_on_disk(tmp_path: Path, expected: str) -> None:
    keep = KeepPart(checkpoint_every=5, stream_keep="disk")
    with pytest.raises(RingError, match="stopped"), mock.patch.object(api, "Watcher", return_value=Stopping(9)):
        run(tmp_path / "run", InMemoryPool(4), keep, (from_python(one_pass()), None))
    left = sorted((tmp_path / "run/stream").iterdir())
    assert [path.name for path in left] == [f"{step:012d}.batch" for step in range(5, 9)]
    assert {path.stat().st_mode & 0o777 for path in left} == {0o600}
    assert (tmp_path / "run/stream").stat().st_mode & 0o777 == 0o700
    # What the stream gave for the first nine steps is gone, as at a sensor; the files have what is needed of it.
    source = from_python(one_pass(first=9))
    resumed = api.resume(tmp_path / "run", {}, (source, None), None, watcher=api.Watcher(), pool=InMemoryPool(4))
    assert resumed.summary.weights_sha256 == expected
    assert any("gives other batches than before" in text for text in resumed.summary.warnings)
    assert not (tmp_path / "run/stream").exists()


# -- the parts --------------------------------------------------------------------------------------------------------


def awkward() -> list[torch.Tensor]:
    base = torch.arange(240.0)
    return [
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        base.view(20, 12)[3:7],
        base[:48].view(12, 4).t(),
        base.view(20, 12)[:4, 2:10],
        torch.randn(4).bfloat16(),
        torch.tensor([True, False, True, True]),
        torch.zeros(4, 0),
        torch.tensor([1, -2, 3, 4]),
        torch.ones(1).expand(4, 5),
    ]


def test_a_batch_comes_back_from_the_disk_as_it_lay(tmp_path: Path) -> None:
    inputs = tuple(map(kept_copy, awkward()))
    spool = Spool(tmp_path / "stream", disk=True)
    spool.put(7, Kept(9, 2, 77, (inputs[0], inputs[1:]), torch.arange(4)))
    assert (spool.memory_bytes, spool.disk_bytes > 0) == (0, True)
    again = Spool(tmp_path / "stream", disk=True)
    assert again.open(7) == {7: (9, 77)}
    found = again.get(7)
    assert found is not None
    assert (found.arrival, found.epoch, found.mark) == (9, 2, 77)
    for before, after, given in zip(inputs, (found.inputs[0], *found.inputs[1]), awkward(), strict=True):
        assert (after.dtype, after.stride()) == (before.dtype, before.stride())
        assert after.equal(before)
        assert after.data_ptr() % 64 == 0
        assert before.shape == given.shape


def test_a_torn_file_a_gap_and_older_ones_are_not_taken_for_batches(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "stream", disk=True)
    for step in (2, 3, 4, 5, 7):
        spool.put(step, Kept(step, 0, step, torch.full((2, 3), float(step)), torch.zeros(2)))
    (tmp_path / "stream/readme").write_text("by hand")
    torn = tmp_path / "stream/000000000005.batch"
    torn.write_bytes(torn.read_bytes()[:-5])
    assert list(Spool(tmp_path / "stream", disk=True).open(3)) == [3, 4]
    assert sorted(path.name for path in (tmp_path / "stream").iterdir()) == ["000000000003.batch", "000000000004.batch"]
    Spool(tmp_path / "stream").open(3)
    assert not (tmp_path / "stream").exists(), "who keeps them in memory has no use for files"


def test_no_flipped_bit_of_a_kept_batch_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "000000000003.batch"
    spools.write(path, 3, Kept(5, 1, 77, (torch.ones(2, 3), torch.zeros(2, 1)), torch.tensor([1, 2])))
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert spools.read(path) is None, place
    path.write_bytes(whole)
    assert spools.read(path) is not None


def test_a_kept_batch_under_the_name_of_another_step_is_not_that_step_s(tmp_path: Path) -> None:
    spool = Spool(tmp_path, disk=True)
    for step in (3, 4):
        spool.put(step, Kept(step, 0, step, torch.full((2, 3), float(step)), torch.zeros(2)))
    (tmp_path / "000000000004.batch").rename(tmp_path / "000000000003.batch")
    again = Spool(tmp_path, disk=True)
    assert (again.open(4), again.get(3)) == ({}, None)


def test_a_full_disk_costs_memory_alone_and_files_are_written_again_when_there_is_room(tmp_path: Path) -> None:
    source = from_python([(torch.full((2, 3), float(step)), torch.zeros(2)) for step in range(9)])
    batches = TrainingBatches(source, 2, 1, 0, keep="disk", folder=tmp_path / "stream", memory_bytes=70)
    batches.go_on(0, StreamPlace())
    batches.batch(0)
    with mock.patch.object(spools, "write", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        batches.batch(1)
        assert batches.trouble() == "No space left on device"
        assert not batches.full
        batches.batch(2)
        batches.batch(3)
        assert batches.trouble() is None, "said once"
        assert batches.full, "a checkpoint would help"
    batches.batch(4)
    for step in range(5):
        found = batches.batch(step)
        assert found is not None
        assert found.inputs[0].unique().tolist() == [step]
    names = [path.name for path in sorted((tmp_path / "stream").iterdir())]
    assert names == ["000000000000.batch", "000000000004.batch"]
    batches.forget(5)
    assert not list((tmp_path / "stream").iterdir())
    assert not batches.full


def test_batches_that_were_let_go_are_skipped_once_and_counted_by_their_own_sizes() -> None:
    source = from_python((torch.full((n % 3 + 1, 1), float(n)), torch.zeros(n % 3 + 1)) for n in range(20))
    assert isinstance(source, Stream)
    arrivals = Arrivals(source, Spool())
    for step in range(7):
        arrivals.get(step)
    arrivals.forget(3)  # no checkpoint was possible, and the snapshot of step 3 was whole
    found = arrivals.get(3)
    assert found is not None
    assert found.inputs[0].item() == 3
    arrivals.get(2)  # but then nobody had it
    (stray,) = arrivals.strays
    assert (stray.step, stray.skipped) == (2, source.batch_size + 1 + 2 + 3 + 1)
    taken = [arrivals.get(step) for step in (2, 3, 4)]
    assert [each.inputs[0].item() for each in taken if each is not None] == [7, 8, 9]
    assert arrivals.place(5).arrived == 10
    assert arrivals.strayed


# -- real processes ---------------------------------------------------------------------------------------------------

STREAM = """
import time
import torch
from torch import nn

def model():
    yield nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32))
    for _ in range(4):
        yield nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.2))
    yield nn.Linear(32, 3)

def data():
    generator = torch.Generator().manual_seed(1)
    for _ in range(400):
        time.sleep(0.01)  # a sensor has a pace
        inputs = torch.randn(32, 20, generator=generator)
        yield inputs, inputs[:, :3].argmax(1)
"""
FLAGS = (
    "--model",
    "mine.py:model",
    "--data",
    "mine.py:data",
    "--steps",
    160,
    "--checkpoint-every",
    25,
    "--json",
    "--quiet",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alone")
    (folder / "mine.py").write_text(STREAM)
    digest: str = json.loads(here("train", "--nodes", 1, *FLAGS, cwd=folder).stdout)["weights_sha256"]
    return digest


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("keep", ["memory", "disk", "none"])
def test_owner_and_holder_killed_together_in_real_processes(keep: str, tmp_path: Path, alone: str) -> None:
    (tmp_path / "mine.py").write_text(STREAM)
    process = begin("train", *FLAGS, "--nodes", 4, "--run-dir", "run", "--stream-keep", keep, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 60, process)
    workers = workers_of(process)
    for node in (1, 2):
        os.kill(workers[node].pid, signal.SIGSTOP)
    for node in (1, 2):
        os.kill(workers[node].pid, signal.SIGKILL)
    out, said = process.communicate(timeout=90)
    assert process.returncode == 0, said
    summary = json.loads(out)
    assert "checkpoint" in [each["source"] for each in summary["recoveries"]]
    if keep == "none":
        assert summary["skipped_samples"] > 0
        assert f"{summary['skipped_samples']} samples of mine.py:data are skipped" in said
        assert summary["weights_sha256"] != alone
    else:
        assert summary["weights_sha256"] == alone
        assert summary["skipped_samples"] == 0
    assert (summary["steps"], summary["exactness"]) == (160, "stream")
    assert not (tmp_path / "run" / "stream").exists()
    assert_all_gone(list(workers.values()))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_master_resumes_with_the_batches_on_disk(tmp_path: Path, alone: str) -> None:
    (tmp_path / "mine.py").write_text(STREAM)
    process = begin("train", *FLAGS, "--nodes", 2, "--run-dir", "run", "--stream-keep", "disk", cwd=tmp_path)
    wait_for_step(tmp_path / "run", 60, process)
    workers = list(workers_of(process).values())
    process.kill()
    process.communicate()
    left = sorted((tmp_path / "run" / "stream").iterdir())
    newest = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert int(left[-1].stem) > newest
    done = json.loads(here("train", "--resume", "run", "--json", "--quiet", cwd=tmp_path).stdout)
    assert done["weights_sha256"] == alone
    assert not (tmp_path / "run" / "stream").exists()
    assert_all_gone(workers)
