"""The ring in a terminal, and in lines where there is none."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from known_run import known_events, started, step
from ringtmp.dashboard.run_view import RunView
from ringtmp.dashboard.terminal_view import drawing, watch
from ringtmp.metrics.events import Event, NodeGone, NodeStarted
from test_followed_events import write


def drawn(folder: Path, columns: int = 140) -> str:
    view = RunView(folder)
    while view.look():
        pass
    out = io.StringIO()
    Console(file=out, width=columns).print(drawing(view.everything(), columns))
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


def with_groups() -> list[Event]:
    held = [("#0-1 embed to block1", "#5 head"), ("#2 block2",), ("#2 block2",), ("#3-4 block3 to block4",)]
    found = [NodeStarted(0.0, node, "worker", 1, 1, segments, 10) for node, segments in enumerate(held)]
    return [started(), *found, step(0, 2.0)]


def test_nodes_that_hold_the_same_layers_stand_behind_one_bracket(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", with_groups())
    lines = drawn(tmp_path).splitlines()
    assert lines[0].startswith(("running  4 nodes as M-2-1-M", "cut off  4 nodes as M-2-1-M"))
    assert [line[:8] for line in lines if "#" in line[:20]] == ["  master", "┌ node 1", "└ node 2", "  node 3"]


def test_in_eighty_columns_names_and_numbers_are_whole(tmp_path: Path) -> None:
    known = known_events()
    write(tmp_path / "events.jsonl", [*known[:-1], NodeGone(7.0, 2, 1, "node 1 is gone")])
    lines = drawn(tmp_path, 80).splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split("  ")[0]: line for line in lines}
    for part in ("75%", "gradients", "500 B/s"):
        assert part in rows["master"]
    assert "lost" in rows["node 1"]


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
