"""The events of a run that lasted for days: opened whole, with little memory, and their numbers are those of --json."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pytest

import day_long_log
from ringtmp.dashboard import kept_view, run_view
from ringtmp.dashboard.decimated_history import MOST_FRAMES, MOST_POINTS
from ringtmp.dashboard.kept_view import kept
from ringtmp.dashboard.messages_to_browser import News
from ringtmp.dashboard.run_view import RunView
from ringtmp.dashboard.seen_so_far import LEAST_RECENT, RECENT_NODE_STEPS
from ringtmp.metrics import events
from ringtmp.metrics.fold_events import parts_of
from ringtmp.metrics.summary import of_parts


def opened(run: Path) -> tuple[RunView, News]:
    view = RunView(run)
    while view.look():
        pass
    return view, view.everything()


def damage(log: Path) -> None:
    """Halfway: a line that is bent, one that is cut short, one of a kind nobody knows. At the end: one still being written."""
    whole = log.read_bytes()
    half = whole.index(b"\n", len(whole) // 2) + 1
    bent = b'{"type":"step","at":1.0,"st\n\xff\xfe\x00\n{"type":"weather","at":1}\n'
    log.write_bytes(whole[:half] + bent + whole[half:] + b'{"type":"st')


def test_a_long_log_is_thinned_while_it_is_read_and_its_totals_are_those_of_json(tmp_path: Path) -> None:
    """More than 2 * 512 / 4 steps of each node, so that older ones were added up. Long twin below."""
    steps = day_long_log.write(tmp_path, 1)
    assert steps > 2 * RECENT_NODE_STEPS // 4 + 1
    damage(tmp_path / "events.jsonl")
    view, told = opened(tmp_path)
    assert (told.status, told.damaged, told.unknown) == ("done", 2, 1)
    assert told.now is not None
    assert told.now.step == steps
    assert told.summary == of_parts(parts_of(events.of_run(tmp_path)), str(tmp_path))
    kept = [len(done) for part in view._seen.fold.parts() for done in part.node_steps.values()]
    assert max(kept) <= 2 * max(LEAST_RECENT, RECENT_NODE_STEPS // 4) + 1


def test_a_run_resumed_from_far_back_is_read_again_and_counted_once(tmp_path: Path) -> None:
    """The second start begins with step 10: what was done of it and after it counts where it was done last."""
    steps = day_long_log.write(tmp_path, 1)
    log = tmp_path / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    first = next(each for each in events.decoded(lines[:1]) if isinstance(each, events.RunStarted))
    again = msgspec.structs.replace(first, first_step=10, at=1e6)
    log.write_bytes(b"".join(lines[:-1]) + events.encode(again) + b"\n")
    view, told = opened(tmp_path)
    assert told.summary is not None
    assert told.summary == of_parts(parts_of(events.of_run(tmp_path)), str(tmp_path))
    assert told.points is not None
    assert told.points.rows[-1][0] == 10
    assert view._seen.fold.recent is not None
    assert view._seen.fold.recent > steps // 2


@pytest.fixture
def short_logs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "KEEP_EVERY_BYTES", 1)


@pytest.mark.usefixtures("short_logs_are_kept")
def test_the_second_page_of_a_long_run_begins_where_the_first_left_off_and_tells_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on: its index is of the first two thirds, and half a line was written when it was made."""
    day_long_log.write(tmp_path, 1)
    log = tmp_path / "events.jsonl"
    damage(log)
    whole = log.read_bytes()
    log.write_bytes(whole[: 2 * len(whole) // 3])
    opened(tmp_path)
    assert (tmp_path / kept_view.NAME).stat().st_mode & 0o777 == 0o600
    log.write_bytes(whole)  # as appended: the same file
    decoded = count_decoded(monkeypatch)
    view, told = opened(tmp_path)
    assert 0 < sum(decoded) < 0.4 * len(whole), "only what was new"
    (tmp_path / kept_view.NAME).unlink()
    again, afresh = opened(tmp_path)
    assert msgspec.json.encode(told) == msgspec.json.encode(afresh)
    assert told.summary == of_parts(parts_of(events.of_run(tmp_path)), str(tmp_path))
    step = sorted(again.follower.mark.detailed)[-1]
    assert view.follower.spans_of(step) == again.follower.spans_of(step) != []


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    real = events.decode

    def counted(line: bytes) -> events.Event:
        found.append(len(line))
        return real(line)

    monkeypatch.setattr(events, "decode", counted)
    return found


def bent(index: bytes) -> bytes:
    half = len(index) // 2
    return index[:half] + bytes([index[half] ^ 1]) + index[half + 1 :]


@pytest.mark.usefixtures("short_logs_are_kept")
def test_an_index_that_disagrees_with_the_log_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One digit of the log changed in its middle; a log cut short; the index bent, cut, empty, of another version."""
    day_long_log.write(tmp_path, 0.2)
    log, place = tmp_path / "events.jsonl", tmp_path / kept_view.NAME
    _, told = opened(tmp_path)
    whole, index = log.read_bytes(), place.read_bytes()
    assert kept(tmp_path) is not None
    at = whole.index(b'"loss":', len(whole) // 2) + 7
    changed = whole[:at] + (b"9" if whole[at : at + 1] != b"9" else b"8") + whole[at + 1 :]
    for other in (changed, whole[: len(whole) // 2]):
        log.write_bytes(other)
        place.write_bytes(index)
        assert kept(tmp_path) is None
        assert opened(tmp_path)[1].summary == of_parts(parts_of(events.of_run(tmp_path)), str(tmp_path))
    log.write_bytes(whole)
    for damaged in (bent(index), index[: len(index) // 2], b"", index + b"x"):
        place.write_bytes(damaged)
        assert kept(tmp_path) is None
        assert opened(tmp_path)[1] == told
    place.write_bytes(index)
    monkeypatch.setattr(kept_view, "__version__", "0.0")
    assert kept(tmp_path) is None


@pytest.mark.usefixtures("short_logs_are_kept")
def test_without_room_on_the_disk_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    day_long_log.write(tmp_path, 0.1)
    monkeypatch.setattr(kept_view, "ROOM_BYTES", 2**62)
    opened(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["events.jsonl"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_log_of_144_megabytes_opens(tmp_path: Path) -> None:
    """Prints the processor's seconds, which docs/benchmarks.md keeps. Quick twin above."""
    steps = day_long_log.write(tmp_path, 170)
    log = tmp_path / "events.jsonl"
    assert log.stat().st_size > 144e6
    damage(log)
    before = time.process_time()
    _, told = opened(tmp_path)
    message = msgspec.json.encode(told)
    used_s = time.process_time() - before
    before = time.process_time()
    assert msgspec.json.encode(opened(tmp_path)[1]) == message
    again_s = time.process_time() - before
    size = f"{log.stat().st_size / 1e6:.0f} MB, {steps} steps"
    print(f"{size}: {used_s:.2f} s of the processor, {again_s:.2f} s the second time", file=sys.stderr)
    assert (told.status, told.damaged, told.unknown) == ("done", 2, 1)
    assert told.points is not None
    assert told.frames is not None
    assert told.points.rows[-1][0] == steps
    assert len(told.points.rows) <= MOST_POINTS
    assert len(told.frames.rows) <= MOST_FRAMES
    assert len(message) < 1e6, "what a browser is sent"
