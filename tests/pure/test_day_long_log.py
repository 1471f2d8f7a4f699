"""The events of a run that lasted for days: opened whole, with little memory, and their numbers are those of --json."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pytest

import day_long_log
from ringtmp.dashboard.decimated_history import MOST_FRAMES, MOST_POINTS
from ringtmp.dashboard.messages_to_browser import News
from ringtmp.dashboard.run_view import LEAST_RECENT, RECENT_NODE_STEPS, RunView
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
    kept = [len(done) for part in view._fold.parts() for done in part.node_steps.values()]
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
    assert view._fold.recent is not None
    assert view._fold.recent > steps // 2


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
    print(f"{log.stat().st_size / 1e6:.0f} MB, {steps} steps: {used_s:.2f} s of the processor", file=sys.stderr)
    assert (told.status, told.damaged, told.unknown) == ("done", 2, 1)
    assert told.points is not None
    assert told.frames is not None
    assert told.points.rows[-1][0] == steps
    assert len(told.points.rows) <= MOST_POINTS
    assert len(told.frames.rows) <= MOST_FRAMES
    assert len(message) < 1e6, "what a browser is sent"
