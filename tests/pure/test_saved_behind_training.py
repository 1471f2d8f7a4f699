"""Checkpoints that go to the disk while training goes on: what counts as the newest meanwhile, and what goes wrong."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringtmp.data.stream_batches import StreamPlace
from ringtmp.metrics import events
from ringtmp.run.save_checkpoints import Saving
from ringtmp.runtime import checkpoint
from ringtmp.runtime.checkpoint import CheckpointWriter, Progress
from test_checkpoint_choice import LAYER, saved


class Leader:
    """Its layer changes with every step."""

    weight = torch.zeros(3)

    def save(self, writer: CheckpointWriter) -> None:
        writer.add(0, LAYER, [self.weight], {})


class Slow:
    """A disk that is as fast as it is let; `error`: what it ends in."""

    def __init__(self) -> None:
        self.free, self.error = threading.Event(), 0

    def sync(self, path: Path) -> None:
        assert self.free.wait(20)
        if self.error:
            raise OSError(self.error, "no room")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    monkeypatch.setattr(checkpoint, "sync", slow.sync)
    return slow


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Any]:
    saved(tmp_path, 10)
    told: list[Any] = []
    record: Any = SimpleNamespace(write=told.append, warn=told.append)
    batches: Any = SimpleNamespace(place=lambda step: StreamPlace(), forget=lambda step: None)
    each: Any = Saving(tmp_path, "run", batches, record, ThreadPoolExecutor(1))
    each.told = told
    yield each
    each.close()


def test_training_goes_on_and_the_newest_is_the_one_before_until_it_is_on_the_disk(saving: Any, disk: Slow) -> None:
    leader = Leader()
    leader.weight = torch.full((3,), 20.0)
    assert saving.begin(leader, Progress(20))
    leader.weight.fill_(21)  # the next step
    saving.settle(wait=False)
    assert (saving.step, saving.told) == (10, [])
    disk.free.set()
    assert saving.newest().progress.step == saving.step == 20
    assert saving.newest().layer(0, LAYER)[0][0].tolist() == [20.0] * 3
    (event,) = saving.told
    assert isinstance(event, events.CheckpointSaved)
    assert saving.save(leader, Progress(20)), "it is there"


def test_the_next_one_waits_for_it_and_a_full_disk_costs_one_checkpoint(saving: Any, disk: Slow) -> None:
    disk.error = errno.ENOSPC
    assert saving.begin(Leader(), Progress(20))
    disk.free.set()
    saving.settle()
    assert saving.step == 10
    assert saving.told == ["no checkpoint of step 20: no room; the one before is kept"]
    disk.error = 0
    assert saving.begin(Leader(), Progress(30))
    assert saving.begin(Leader(), Progress(40))
    assert saving.step == 30, "one at a time"
    assert saving.save(Leader(), Progress(50), needed=True)
    assert saving.step == 50
    assert not [path.name for path in saving.newest().folder.parent.glob(".step-*")]


@pytest.mark.parametrize("behind", [False, True])
def test_what_was_added_before_beginning_again_is_in_no_checkpoint(tmp_path: Path, behind: bool) -> None:
    """An ensemble that loses a worker while it saves has fewer members than it began with."""
    writer = CheckpointWriter(tmp_path, "run", Progress(20), behind=behind)
    for index in (0, 1):
        writer.add(index, LAYER, [torch.zeros(3)], {})
    writer.begin_again()
    writer.add(0, LAYER, [torch.ones(3)], {})
    (kept,) = writer.commit().glob("*.safetensors")
    assert writer.bytes == kept.stat().st_size
