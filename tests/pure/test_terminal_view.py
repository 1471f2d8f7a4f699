"""The ring in a terminal, and in lines where there is none."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from known_run import known_events
from ringtmp.dashboard.run_view import RunView
from ringtmp.dashboard.terminal_view import drawing, watch
from ringtmp.metrics.events import NodeGone
from test_followed_events import write


def drawn(folder: Path) -> str:
    view = RunView(folder)
    while view.look():
        pass
    out = io.StringIO()
    Console(file=out, width=140).print(drawing(view.everything()))
    return out.getvalue()


def test_every_node_has_a_row_with_its_busy_share_and_what_it_waits_for(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", known_events())
    text = drawn(tmp_path)
    assert "done  step 3  loss 1.0000  accuracy 90.0%" in text
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "75%" in rows["master"]
    assert "gradients" in rows["master"]
    assert "50%" in rows["node 1"]
    assert "activations" in rows["node 1"]
    assert "The run ended: done" in text


def test_a_lost_node_is_marked_and_what_another_node_wrote_moves_no_cursor(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", [*known_events()[:6], NodeGone(4.0, 2, 1, "node 1 \x1b[2J is gone")])
    text = drawn(tmp_path)
    assert "lost; its place is being taken" in text
    assert "\x1b[2J" not in text
    assert "\\x1b[2J" in text


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", known_events())
    out = io.StringIO()
    watch(tmp_path, out, sleep=lambda seconds: None)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("The run began")
    assert lines[-1].startswith("done  step 3")
    assert "\x1b" not in out.getvalue()
