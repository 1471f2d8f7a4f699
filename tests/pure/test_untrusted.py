"""Text from outside is text, and numbers from outside are in their ranges; files that hold data are the user's own."""

from __future__ import annotations

import io
import math
import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ringtmp import untrusted
from ringtmp.errors import NodeFailed, ProtocolError
from ringtmp.launch.device_facts import checked, device_facts
from ringtmp.launch.start_process import last_words
from ringtmp.run import progress
from ringtmp.runtime import check_node_replies
from ringtmp.wire.messages import Hello
from test_training_loop import train

NASTY = "pi\x1b[2J\x1b]0;owned\x07\r\nwarning: all is well\u202e\u2028\x9b31m"


@given(st.text())
def test_a_line_is_printable_one_line_and_no_longer_than_its_limit(text: str) -> None:
    for limit in (1, 7, 200):
        shown = untrusted.line(text, limit)
        assert shown.isprintable()
        assert len(shown) <= limit
    if text.isprintable() and len(text) <= 200:
        assert untrusted.line(text) == text, "what is only text stays as it is"


@given(st.text())
def test_every_line_of_several_is_set_in(text: str) -> None:
    rows = untrusted.lines(text).split("\n")
    assert len(rows) <= untrusted.MOST_LINES + 1
    assert all(not row or (row.startswith("    ") and row.isprintable()) for row in rows)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, 1e300])
def test_numbers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(ProtocolError, match="its time"):
        untrusted.number(value, "its time")


def test_what_a_device_says_of_itself_is_text() -> None:
    facts = device_facts("board")
    nasty = dict.fromkeys(("cpu", "torch", "version", "address"), NASTY)
    shown = checked(msgspec.structs.replace(facts, **nasty))
    assert all(getattr(shown, name).isprintable() and len(getattr(shown, name)) <= 80 for name in nasty)
    hello = check_node_replies.hello(Hello(1, NASTY, NASTY))
    assert hello.torch.isprintable()
    assert hello.capability.isprintable()


@pytest.mark.parametrize("quiet", [True, False])
def test_no_escape_reaches_the_terminal(quiet: bool, capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    shown = progress.Telling() if quiet else progress.Bar(Console(file=stream, width=200), None)
    for say in (shown.warn, shown.tell, lambda text: shown.expect([text])):
        say(f"[bold]{NASTY}[/bold]")
    out = stream.getvalue() + capfd.readouterr().err
    assert not {"\x1b", "\r", "\x07", "\x9b", "\u202e"} & set(out)
    assert "[bold]" in out, "and what looks like markup is text"


def test_last_words_are_a_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"fine\n\x1b[31m{'x' * 1000}\x07")
    assert last_words(tmp_path / "log").isprintable()
    assert len(last_words(tmp_path / "log")) <= 300


def test_a_failed_nodes_traceback_makes_no_line_that_looks_like_ours() -> None:
    text = str(NodeFailed(f"node 1 failed: {untrusted.line(NASTY)}\n{untrusted.lines(NASTY)}"))
    assert not any(row.startswith("warning") for row in text.splitlines())


def test_a_run_directory_and_what_is_in_it_are_the_users_own(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        made = train(tmp_path / "made", 1, steps=1).run_dir
        (tmp_path / "there").mkdir()
        there = train(tmp_path / "there", 1, steps=1).run_dir
    finally:
        os.umask(umask)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert stat.S_IMODE(there.stat().st_mode) == 0o755, "a folder of the user's keeps its mode"
    for run in (made, there):
        for folder in ("checkpoints", "logs", "layers"):
            assert stat.S_IMODE((run / folder).stat().st_mode) == 0o700
        for file in ("config.json", "events.jsonl", "lock"):
            assert stat.S_IMODE((run / file).stat().st_mode) == 0o600, file
