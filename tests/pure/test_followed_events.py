"""Following a run's events: news add up to the whole, damage is passed over and said, a replaced file is read again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from known_run import known_events, started, step
from ringtmp.cli.watch import command
from ringtmp.dashboard import listen_until_stopped
from ringtmp.dashboard.listen_until_stopped import Place, listening
from ringtmp.dashboard.messages_to_browser import News
from ringtmp.dashboard.run_view import RunView
from ringtmp.dashboard.shared_layers import groups_of
from ringtmp.dashboard.step_detail import detail_of
from ringtmp.errors import UsageError
from ringtmp.metrics.events import Event, NodeGone, NodeStarted, Regrouped, encode
from ringtmp.metrics.fold_events import parts_of
from ringtmp.metrics.summary import of_parts


def write(path: Path, events: list[Event]) -> None:
    with path.open("ab") as file:
        for each in events:
            file.write(encode(each) + b"\n")


def all_of(view: RunView) -> None:
    while view.look():
        pass


class Browser:
    """Adds news to what it has, as the page's runs.js does."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {"points": [], "frames": [], "tests": [], "log": []}
        self.summary: Any = None

    def take(self, news: News | None) -> None:
        if news is None:
            return
        told = msgspec.json.decode(msgspec.json.encode(news))
        for key, rows in self.rows.items():
            if told.get("whole"):
                rows.clear()
            if key in told:
                del rows[told[key]["since"] :]
                rows += told[key]["rows"]
        self.summary = told.get("summary", self.summary)


def test_news_piece_by_piece_are_the_whole(tmp_path: Path) -> None:
    view, page, log = RunView(tmp_path), Browser(), tmp_path / "events.jsonl"
    assert view.news() is not None, "that it waits is news once"
    for each in known_events():
        write(log, [each])
        all_of(view)
        page.take(view.news())
    late = Browser()
    late.take(view.everything())
    assert page.rows == late.rows
    assert view.news() is None
    expected = of_parts(parts_of(known_events()), str(tmp_path))
    assert msgspec.convert(page.summary, type(expected), str_keys=True) == expected, "the numbers of --json"
    assert view.status == "done"


def test_a_viewer_before_the_first_step_sees_who_has_joined_and_that_it_waits(tmp_path: Path) -> None:
    view = RunView(tmp_path / "not-there-yet")
    all_of(view)
    assert view.everything().status == "waiting"
    write(tmp_path / "events.jsonl", known_events()[:3])
    view = RunView(tmp_path)
    all_of(view)
    told = view.everything()
    assert (told.status, [each.name for each in told.memberships[0].members]) == ("running", ["master", "node 1"])
    assert told.now is None


def test_damaged_and_cut_lines_are_passed_over_and_counted_and_later_kinds_apart(tmp_path: Path) -> None:
    log, events = tmp_path / "events.jsonl", known_events()
    write(log, events[:6])
    with log.open("ab") as file:
        file.write(b'{"type":"step","at":1.0,"st\n\xff\xfe\x00\n[1,2]\n{"type":"weather","at":1}\n')
    write(log, events[6:])
    with log.open("ab") as file:
        file.write(b'{"type":"step","at"')  # still being written
    view = RunView(tmp_path)
    all_of(view)
    told = view.everything()
    assert (told.damaged, told.unknown) == (3, 1)
    assert told.summary == of_parts(parts_of(events), str(tmp_path))


def test_a_file_that_was_replaced_or_emptied_is_read_from_its_beginning(tmp_path: Path) -> None:
    view, page, log = RunView(tmp_path), Browser(), tmp_path / "events.jsonl"
    write(log, known_events())
    all_of(view)
    page.take(view.news())
    log.unlink()
    write(log, known_events()[:6])
    all_of(view)
    page.take(view.news())
    assert len(page.rows["points"]) == 1
    assert view.status == "running"


def test_nodes_that_hold_the_same_layers_are_a_group_until_one_of_them_goes(tmp_path: Path) -> None:
    held = {0: ("#0 a", "#3 d"), 1: ("#1 b",), 2: ("#1 b",), 3: ("#2 c",)}

    def told(at: float, generation: int, nodes: list[int]) -> list[Event]:
        return [NodeStarted(at, node, "worker", 1, generation, held[node], 10) for node in nodes]

    lost = Regrouped(4.0, 1, 2, "node 2 is gone", 3, 0.5, lost=(2,))
    write(
        tmp_path / "events.jsonl",
        [started(), *told(0.0, 1, [0, 1, 2, 3]), step(0, 2.0), lost, *told(4.1, 2, [0, 1, 3])],
    )
    view = RunView(tmp_path)
    all_of(view)
    shapes = {each.generation: each.groups for each in view.everything().memberships}
    assert shapes == {1: ((1, 2), (3,)), 2: ()}


@pytest.mark.parametrize("held", [("whole model",), ("3 keys", "whole model"), ("#0-1 a", "#3 d"), ()])
def test_trainers_and_servers_are_no_group_however_alike_they_are(held: tuple[str, ...]) -> None:
    expected = ((1, 2),) if held and held[0][0] == "#" else ()
    assert groups_of({0: ("#9 z",), 1: held, 2: held}) == expected


def test_a_lost_node_is_out_until_the_ring_has_healed(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", [*known_events()[:9], NodeGone(4.0, 2, 1, "node 1 is gone")])
    view = RunView(tmp_path)
    all_of(view)
    assert (view.status, view.everything().outages[0].node) == ("healing", 1)
    write(
        tmp_path / "events.jsonl",
        [
            *(NodeStarted(4.5, node, "worker", 1, 2, ("0-1",), 10) for node in (0, 1)),
            Regrouped(5.0, 1, 2, "lost", 2, 1.0, lost=(1,), repeated=1),
            step(1, 6.0),
        ],
    )
    all_of(view)
    told = view.everything()
    assert view.status == "running"
    assert (told.outages[0].from_s, told.outages[0].to_s) == (4.0, 5.0)
    assert [row[0] for row in told.points.rows] == [1, 2], "the step done again is there once"  # type: ignore[union-attr]
    assert told.memberships[-1].generation == 2
    assert [each.kind for each in told.log.rows][-4:] == ["lost", "join", "join", "healed"]  # type: ignore[union-attr]


def test_a_step_recorded_in_full_is_found_again_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", known_events())
    view = RunView(tmp_path)
    all_of(view)
    assert view.everything().detailed == [0, 1, 2]
    found = detail_of(view.follower, 1)
    assert found is not None
    assert (found.step, found.seconds, len(found.nodes)) == (2, 2.0, 2)
    assert [(bar.kind, bar.lane) for bar in found.nodes[0].bars] == [("forward", 0), ("send", 1)]


def test_a_run_whose_process_is_gone_without_a_word_was_cut_off(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", known_events()[:6])
    (tmp_path / "lock").write_text(str(os.getpid()))
    view = RunView(tmp_path)
    all_of(view)
    assert view.status == "running"
    (tmp_path / "lock").write_text("4194303")
    assert view.status == "cut off"


# -- what cannot be shown ------------------------------------------------------------------------------------------------


def watch(*args: object) -> None:
    CliRunner().invoke(command, [str(each) for each in args], catch_exceptions=False, standalone_mode=False)


def test_a_folder_that_is_no_run_is_refused_with_the_runs_in_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such folder"):
        watch(tmp_path / "nowhere")
    (tmp_path / "mine.py").touch()
    with pytest.raises(UsageError, match="mine.py is a file, not a run directory: give the folder of a run"):
        watch(tmp_path / "mine.py")
    (tmp_path / "monday").mkdir()
    (tmp_path / "monday/events.jsonl").touch()
    with pytest.raises(UsageError, match="it has no events.jsonl; the runs in it are monday"):
        watch(tmp_path)
    with pytest.raises(UsageError, match="9 runs are too many"):
        watch(*[tmp_path / "monday"] * 9)


def test_a_run_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", [msgspec.structs.replace(started(), schema=2, version="9.0")])
    with pytest.raises(UsageError, match=r"was written by ringtmp 9.0, whose events \(schema 2\)"):
        watch(tmp_path)


@pytest.mark.parametrize("in_the_terminal", [None, "lynx", "w3m"])
def test_where_no_browser_has_a_window_that_is_said_and_none_is_started(
    in_the_terminal: str | None, tmp_path: Path
) -> None:
    if in_the_terminal is not None:
        (tmp_path / in_the_terminal).write_text("#!/bin/sh\n: > started\n")
        (tmp_path / in_the_terminal).chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", "from ringtmp.cli.watch import _open; _open('http://127.0.0.1:1/')"], cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/nothing", "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "there is no browser here: open the address yourself" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_port_in_use_names_its_process_and_the_next_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "events.jsonl").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"port {port} is in use by process {os.getpid()} \(.*\): --port \d+ is free"
        ):
            watch(tmp_path, "--port", port)
        monkeypatch.setattr(listen_until_stopped, "PORT", port)
        with listening(Place()) as found:
            assert port < found.getsockname()[1] <= port + listen_until_stopped.MORE_PORTS, (
                "the usual port gives way to the next"
            )


def test_without_starlette_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "starlette", None)
    with pytest.raises(UsageError, match=r"pip install 'ringtmp\[web\]'"):
        watch(tmp_path)
