"""`ringtmp train --dashboard` with a browser: it follows, shows a loss and its healing, acts, has the numbers of --json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

pytest.importorskip("uvicorn")

from browser import Browser, chromium
from commands import REMEMBERING, begin, remembering_model, ringtmp, wait_for_step, workers_of
from ringtmp.metrics import events
from ringtmp.metrics.summary import Summary
from watched import shown, state, until

needs_browser = pytest.mark.skipif(
    chromium() is None, reason="there is no chromium here (Debian: apt-get install chromium)"
)


RING = (*REMEMBERING, "--nodes", 3)
#: M-2-2-M. Nothing in the model remembers what it has seen, so members may share the microbatches of a step.
GROUPS = ("--nodes", 5, "--groups", "2,2", "--sum-tree", 4, "--json", "--quiet")


def started(folder: Path, steps: int, what: tuple[object, ...] = RING) -> tuple[subprocess.Popen[str], dict[str, str]]:
    (folder / "mine.py").write_text(remembering_model(128))
    process = begin("train", *what, "--steps", steps, "--run-dir", folder / "run", "--dashboard", cwd=folder)
    assert process.stderr is not None
    found: dict[str, str] = {}
    while "act" not in found:
        line = process.stderr.readline()
        assert line, process.wait(5)
        if match := re.match(r"(watch|and act) +(https?://\S+)", line):
            found["look" if match[1] == "watch" else "act"] = match[2]
    return process, found


def page_of(process: subprocess.Popen[str]) -> psutil.Process:
    return next(each for each in psutil.Process(process.pid).children() if "watch" in each.cmdline())


def click(browser: Browser, *ids: str) -> None:
    for each in ids:
        browser.evaluate(f"document.getElementById('{each}').click()")


@pytest.mark.long
@needs_browser
@pytest.mark.timeout(180)
def test_a_killed_worker_appears_and_heals_on_screen_and_the_end_has_the_numbers_of_json(tmp_path: Path) -> None:
    """Quick twins: test_followed_events.py has the losses, test_live_page.py the numbers."""
    process, addresses = started(tmp_path, 240)
    try:
        with Browser(tmp_path / "browser") as browser:
            shown(browser, addresses["look"])
            wait_for_step(tmp_path / "run", 60, process)
            until(browser, "ringtmp.state().status === 'running' && ringtmp.state().step > 5")
            assert browser.evaluate("document.getElementById('acts').hidden"), "with this address nobody acts"
            browser.evaluate("window.seen = []; setInterval(() => seen.push(ringtmp.state().status), 20)")
            victim = next(each for each in workers_of(process).values() if "watch" not in each.cmdline())
            victim.kill()
            until(browser, "document.querySelector('#log').textContent.includes('Healed in')", 60)
            assert "lost" in browser.evaluate("document.querySelector('#log').innerHTML")
            click(browser, "gantt-detail")
            until(browser, "ringtmp.state().status === 'done'", 120)
            told = msgspec.convert(state(browser)["summary"], Summary, str_keys=True)
            assert browser.problems == []
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        summary = msgspec.json.decode(out, type=Summary)
        assert told == msgspec.structs.replace(summary, run_dir=told.run_dir)
        assert any(isinstance(each, events.NodeGone) for each in events.of_run(tmp_path / "run"))
        detailed = {
            each.step for each in events.of_run(tmp_path / "run") if isinstance(each, events.NodeStep) and each.spans
        }
        assert {each for each in detailed if each > 40 and each % 100} - set(range(33)), "a viewer wanted detail"
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@needs_browser
@pytest.mark.timeout(300)
def test_a_killed_member_of_a_group_appears_and_heals_on_screen(tmp_path: Path) -> None:
    """Quick twins: test_group_members_lost.py has the loss, test_followed_events.py the groups."""
    process, addresses = started(tmp_path, 120, GROUPS)
    bands = "document.querySelectorAll('#ring-drawing .group:not(.edge)').length"
    try:
        with Browser(tmp_path / "browser") as browser:
            shown(browser, addresses["look"])
            wait_for_step(tmp_path / "run", 40, process)
            until(browser, f"ringtmp.state().status === 'running' && {bands} === 2")
            assert "M-2-2-M" in browser.evaluate("document.getElementById('lead').textContent")
            workers = [each for each in workers_of(process).values() if "watch" not in each.cmdline()]
            workers[1].kill()
            until(browser, "document.querySelector('#log').textContent.includes('Healed in')", 60)
            assert "lost" in browser.evaluate("document.querySelector('#log').innerHTML")
            until(browser, "document.querySelectorAll('#ring-drawing .out').length === 0")
            until(browser, "ringtmp.state().status === 'done'", 120)
            told = msgspec.convert(state(browser)["summary"], Summary, str_keys=True)
            browser.screenshot(tmp_path / "groups.png")
            assert browser.problems == []
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        summary = msgspec.json.decode(out, type=Summary)
        assert told == msgspec.structs.replace(summary, run_dir=told.run_dir)
        lost = [len(each.lost) for each in summary.recoveries]
        assert lost == [1, 0], "a fresh process takes the place as soon as it can"
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@needs_browser
@pytest.mark.timeout(120)
def test_who_has_the_address_to_act_saves_a_checkpoint_and_stops_the_run_after_being_asked(tmp_path: Path) -> None:
    """Quick twin: test_asked_of_a_run.py."""
    process, addresses = started(tmp_path, 100_000)
    try:
        page = page_of(process)
        with Browser(tmp_path / "browser") as browser:
            shown(browser, addresses["act"])
            until(browser, "!document.getElementById('acts').hidden && !!document.getElementById('act-stop')", 60)
            click(browser, "act-checkpoint")
            assert browser.evaluate("document.getElementById('ask').open"), "it asks first"
            click(browser, "ask-yes")
            until(browser, "document.querySelector('#log').textContent.includes('Checkpoint of step')", 60)
            click(browser, "act-stop", "ask-no")
            time.sleep(1.5)
            assert state(browser)["status"] == "running", "nothing was asked"
            click(browser, "act-stop", "ask-yes")
            until(browser, "ringtmp.state().status === 'interrupted'", 60)
            until(browser, "document.getElementById('notice').textContent.includes('ended with the run')", 20)
            assert browser.problems == []
        assert process.wait(20) == 130
        assert page.wait(10) in (0, None), "the page ends a moment after the run"
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    """Quick twin: test_followed_events.py."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = ringtmp(
            "train", "--dashboard", "--dashboard-port", port, "--run-dir", "run", cwd=tmp_path, code=2
        ).stderr
    assert f"port {port} is in use by process" in said
    assert len(said.strip().splitlines()) == 1, "the page's process ended without a word of its own"
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(7200)
def test_fifty_viewers_that_never_read_do_not_slow_training(tmp_path: Path) -> None:
    """Quick twin: test_viewers.py."""
    script = Path(__file__).parents[2] / "scripts/measure_viewers.py"
    done = subprocess.run(
        [sys.executable, script, "--pairs", "12", "--steps", "600", "--out", tmp_path / "viewers.json", "--json"],
        capture_output=True, text=True, timeout=7000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    print(told["ratio"], told["page_share"], told["page_share_alone"], file=sys.stderr)
    assert told["ratio"]["middle"] >= 0.98, told
    assert told["page_share"] < 0.02, told
