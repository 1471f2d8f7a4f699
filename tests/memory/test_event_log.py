"""The record of a run on a disk that takes no more: nothing is lost while there is memory, and what is missing is said."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ringtmp.api import Result, Watcher
from ringtmp.errors import CheckpointError, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.metrics.event_log import EventLog
from ringtmp.metrics.events import NodeStarted, NodeStep, RunStarted, Span, StepDone, Warned
from ringtmp.runtime.checkpoint import latest
from test_training_loop import blobs, settings, stack, start, tensors


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system's own limit, as of `ulimit -f`: a write beyond it is cut short, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def step(number: int) -> StepDone:
    return StepDone(float(number), number, 0, 1.0, 0.1, 8, 0.5)


def test_a_line_the_disk_cut_short_is_completed_before_the_next_is_written(tmp_path: Path) -> None:
    whole = len(events.encode(step(0))) + 1
    for size in range(2 * whole + 1):
        log = EventLog(tmp_path / f"{size}.jsonl")
        with files_of_at_most(size):
            for number in range(2):
                log.write(step(number))
                log.flush()
        said = log.news()
        log.write(step(2))
        log.close()
        assert list(events.read(tmp_path / f"{size}.jsonl")) == [step(0), step(1), step(2)], size
        assert (said is not None) == (size < 2 * whole)
        assert log.unwritten == []


def test_trouble_and_its_end_are_news_once_each(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    said = []
    for number in range(9):
        with files_of_at_most(10 if 2 <= number < 6 else 100_000):
            log.write(step(number))
            log.flush()
        said += [news] if (news := log.news()) else []
    log.close()
    assert said == [
        "events cannot be written: File too large; they are kept in memory until there is room",
        "events are written again, none is missing",
    ]


def test_what_never_found_room_is_still_there_as_the_rest_of_the_file(tmp_path: Path) -> None:
    for size in (0, 30, 200):
        log = EventLog(tmp_path / f"{size}.jsonl")
        with files_of_at_most(size):
            for number in range(4):
                log.write(step(number))
            log.close()
        found = [*events.read(tmp_path / f"{size}.jsonl"), *log.unwritten]
        assert found == [step(number) for number in range(4)], size


def test_a_line_torn_by_a_crash_does_not_swallow_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(events.encode(step(0)) + b"\n" + events.encode(step(1))[:20])
    log = EventLog(path)
    log.write(step(5))
    log.close()
    assert list(events.read(path)) == [step(0), step(5)]


@pytest.mark.parametrize("gone", ["file", "folder", "moved", "replaced"])
def test_a_record_that_was_removed_is_written_again_whole(tmp_path: Path, gone: str) -> None:
    path = tmp_path / "run/log"
    path.parent.mkdir()
    log = EventLog(path)
    for number in range(3):
        log.write(step(number))
        log.flush()
    assert log.news() is None
    if gone == "file":
        path.unlink()
    elif gone == "replaced":
        (tmp_path / "other").write_text("{}")
        (tmp_path / "other").rename(path)
    else:
        path.parent.rename(tmp_path / "elsewhere")
        if gone == "folder":
            shutil.rmtree(tmp_path / "elsewhere")
    log.write(step(3))
    log.flush()
    assert log.news() == f"{path} was removed or replaced; it has been rewritten with every event"
    log.close()
    assert list(events.read(path)) == [step(number) for number in range(4)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert (log.unwritten, log.gone) == ([], False)


def test_a_record_that_cannot_be_written_again_is_still_there_whole(tmp_path: Path) -> None:
    path = tmp_path / "run/log"
    path.parent.mkdir()
    log = EventLog(path)
    log.write(step(0))
    log.flush()
    shutil.rmtree(path.parent)
    path.parent.write_text("a file where the folder was")
    log.write(step(1))
    log.flush()
    log.write(step(2))
    log.close()
    assert log.gone
    assert log.unwritten == [step(0), step(1), step(2)]


def test_a_record_that_was_emptied_begins_again_with_how_the_run_began(tmp_path: Path) -> None:
    path = tmp_path / "log"
    began = RunStarted(0.0, "", events.SCHEMA, "run", "0", {}, {}, 1, 0), NodeStarted(0.0, 1, "worker", 7, 1, (), 3)
    log = EventLog(path)
    for each in (*began, step(0), step(1)):
        log.write(each)
        log.flush()
    os.truncate(path, 0)
    log.write(step(2))
    log.flush()
    assert log.news() == f"{path} was emptied: earlier events are missing from it"
    log.write(step(3))
    log.close()
    assert list(events.read(path)) == [*began, step(2), step(3)]
    assert log.news() is None


def test_memory_for_what_the_disk_does_not_take_has_a_limit_and_steps_and_recoveries_stay(tmp_path: Path) -> None:
    """What nodes did goes first: its spans, then all of it, the oldest first."""
    log = EventLog(tmp_path / "log", kept_bytes=25_000)
    spans = tuple(Span("forward", 0, index, 1.0, 2.0) for index in range(50))
    with files_of_at_most(0):
        for number in range(100):
            log.write(NodeStep(0, number, 0.0, 1.0, 0.5, 0.5, {}, 0, 0, spans))
            log.write(step(number))
            log.flush()
            assert log.waiting_bytes <= 25_000
    log.close()
    found = list(events.read(tmp_path / "log"))
    assert [each for each in found if isinstance(each, StepDone)] == [step(number) for number in range(100)]
    kept = [each.step for each in found if isinstance(each, NodeStep)]
    assert 0 < len(kept) < 100
    assert kept[-1] == 99
    (said,) = [each.text for each in found if isinstance(each, Warned)]
    assert said.startswith(f"{100 - len(kept)} records of what nodes did in a step were dropped")


def run(folder: Path, watcher: Any) -> Result:
    data = tensors("t", *blobs()), tensors("t", *blobs(30))
    return start(settings(2, steps=9), stack(), data, None, run_dir=folder, watcher=watcher, pool=InMemoryPool(2))


class Meddles(Watcher):
    """No file may grow beyond `size` from the third step on; of the seventh the limit is gone, if it ever goes."""

    def __init__(self, ends: bool) -> None:
        self.said: list[str] = []
        self._ends = ends

    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        if done == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, hard))
        if done == 7 and self._ends:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def warn(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("ends", [True, False])
def test_the_summary_of_a_run_whose_disk_was_full_is_true(tmp_path: Path, ends: bool) -> None:
    whole = run(tmp_path / "whole", Watcher()).summary
    meddles = Meddles(ends)
    with files_of_at_most(2**30):
        hit = run(tmp_path / "run", meddles)
        summary = hit.summary
    assert (summary.outcome, summary.steps, summary.weights_sha256) == ("done", 9, whole.weights_sha256)
    assert (summary.bytes_total, summary.test_loss, summary.loss) == (whole.bytes_total, whole.test_loss, whole.loss)
    assert meddles.said[0].startswith("events cannot be written: File too large")
    left = Result(tmp_path / "run").summary
    if ends:
        assert (left.outcome, left.weights_sha256) == ("done", whole.weights_sha256)
    else:
        assert meddles.said[-1].startswith(f"{tmp_path}/run/events.jsonl lacks the last ")
        assert meddles.said[-1] in summary.warnings
        assert (left.outcome, left.weights_sha256) == ("unfinished", None)
        assert left.warnings[-1].startswith("the event log has no end")


def test_a_damaged_record_gives_a_summary_or_a_sentence(tmp_path: Path) -> None:
    """One bit flipped, here and there in the lines that begin and end a run."""
    run(tmp_path / "run", Watcher())
    path = tmp_path / "run/events.jsonl"
    whole = path.read_bytes()
    kept = [line for line in whole.splitlines(keepends=True) if not line.startswith(b'{"type":"node_step"')]
    short = b"".join(kept)
    said = set()
    for place in range(0, len(short), 9):
        path.write_bytes(short[:place] + bytes([short[place] ^ 1 << place % 8]) + short[place + 1 :])
        try:
            str(Result(tmp_path / "run"))
        except UsageError as error:
            said.add(str(error).split(" (")[0])
    assert f"the line of events.jsonl that begins part 1 of {tmp_path}/run is damaged" in said
    assert len(said) <= 2, "the other: nothing was started"


class Removes(Watcher):
    """After the fifth step the run directory is gone; with `for_good` nothing can take its place."""

    def __init__(self, folder: Path, for_good: bool) -> None:
        self.said: list[str] = []
        self._folder = folder
        self._for_good = for_good

    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        if done == 5:
            shutil.rmtree(self._folder)
            if self._for_good:
                self._folder.write_text("a file")

    def warn(self, text: str) -> None:
        self.said.append(text)


def test_a_run_whose_directory_was_removed_has_its_summary_and_digest_all_the_same(tmp_path: Path) -> None:
    removes = Removes(tmp_path / "run", for_good=False)
    summary = run(tmp_path / "run", removes).summary
    assert (summary.outcome, summary.steps) == ("done", 9)
    assert summary.weights_sha256 is not None
    assert Result(tmp_path / "run").summary == summary
    assert latest(tmp_path / "run/checkpoints")[0].progress.step == 9
    assert removes.said[0].endswith("was removed or replaced; it has been rewritten with every event")
    assert "lacks config.json and layers" in removes.said[-1]
    assert removes.said[-1] in summary.warnings


def test_a_run_that_can_save_nothing_any_more_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint of step 9 cannot be written"):
        run(tmp_path / "run", Removes(tmp_path / "run", for_good=True))
