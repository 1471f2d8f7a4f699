"""What a supervised master writes down when it takes the place of one that is gone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from ringtmp.launch import supervise
from ringtmp.launch.supervise import RESTARTED, Restarted, Silence
from test_training_loop import resume, train


def test_a_restart_is_among_the_recoveries_with_what_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are taken every three steps."""
    train(tmp_path / "run", steps=7)
    told = Restarted("the master was killed by SIGKILL after step 9", time.monotonic() - 5, 9)
    monkeypatch.setenv(RESTARTED, msgspec.json.encode(told).decode())
    summary = resume(tmp_path / "run", 2, steps=12).summary
    (found,) = summary.recoveries
    assert (found.kind, found.lost, found.source) == ("restarted", (0,), "checkpoint")
    assert (found.step, found.repeated, found.reason) == (7, 2, told.reason)
    assert 5 <= found.seconds < 600
    assert summary.steps == 12
    assert supervise.restarted() is None, "told once"
    assert not resume(tmp_path / "run", 2, steps=13).summary.recoveries[1:], "and the next start is not one"


def test_silence_is_counted_while_it_is_watched_and_nothing_at_all_is_none(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    silence = Silence(log, 3)
    assert silence.seconds(100.0) == 0.0
    log.write_bytes(b"old")
    assert silence.seconds(200.0) == 0.0
    assert silence.seconds(300.0) == 0.0, "it has not begun, and may wait for its nodes"
    log.write_bytes(b"old and new")
    assert silence.seconds(300.2) == 0.0
    assert [silence.seconds(at) for at in (300.4, 300.6)] == pytest.approx([0.2, 0.4])
    assert silence.seconds(900.0) == pytest.approx(1.4), "whoever looks was stopped, too"
    last = log.stat().st_mtime_ns
    os.utime(log, ns=(last, last + 10**9))
    assert silence.seconds(900.2) == 0.0, "it waits, and means to"
