"""The live page in a real browser: the numbers of --json, replay, phones, both colour schemes, what axe says."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("uvicorn")

from pathlib import Path

from browser import TOO_WIDE, Browser, chromium
from known_run import started, step
from ringtmp.metrics.events import Event, NodeStarted, NodeStep, Reading, RunEnded
from ringtmp.metrics.summary import Summary
from test_followed_events import write
from test_training_loop import train
from watched import SERIOUS, axe, shown, state, tiles, until, watching

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="there is no chromium here (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, train(folder, 3, steps=6).summary


def shots(request: pytest.FixtureRequest) -> Path:
    assert request.config.cache is not None
    return request.config.cache.mkdir("screenshots")


def test_an_ended_run_is_shown_with_the_numbers_of_json_and_replayed(
    run: tuple[Path, Summary], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, summary = run
    with watching(folder, cwd=tmp_path) as addresses, Browser(tmp_path / "browser") as browser:
        shown(browser, addresses["look"])
        until(
            browser, "ringtmp.state().summary != null && document.querySelectorAll('#nodes-table tbody tr').length == 3"
        )
        told = msgspec.convert(state(browser)["summary"], Summary, str_keys=True)
        assert told == msgspec.structs.replace(summary, run_dir=told.run_dir)
        seen = tiles(browser)
        assert (seen["Step"], seen["Loss"]) == ("6", f"{summary.loss.last:.4f}")
        assert seen["Test accuracy"] == f"{100 * (summary.accuracy or 0):.1f} %"
        until(browser, "document.querySelector('#gantt').getAttribute('aria-label').startsWith('Step 6')")
        read_out(browser)
        browser.evaluate(
            "const s = document.querySelector('#slider'); s.value = 1; s.dispatchEvent(new Event('input'))"
        )
        until(browser, "document.querySelector('#moment').textContent.startsWith('0:00 of')")
        until(browser, "Number(document.querySelector('#tiles dd').textContent) < 6")
        assert "The run ended" not in browser.evaluate("document.querySelector('#log').textContent")
        browser.evaluate("document.querySelector('#speed').value = '100'; document.querySelector('#play').click()")
        until(browser, "document.querySelector('#tiles dd').textContent == '6'")
        assert "The run ended" in browser.evaluate("document.querySelector('#log').textContent")
        assert all(each.startswith(addresses["look"].split("?")[0]) for each in browser.fetched()), (
            "nothing from elsewhere"
        )
        assert browser.evaluate("location.search") == "", "the token has left the address"
        assert browser.problems == []


def read_out(browser: Browser) -> None:
    """The Gantt chart as one hears it: its keys say what they do, and a table has its numbers."""
    names = browser.evaluate("[...document.querySelectorAll('#gantt-table tbody th')].map(each => each.textContent)")
    assert names == ["master", "node 1", "node 2"]
    said = "document.getElementById('gantt-where').textContent"
    for key, beginning in (
        ("ArrowDown", "master: busy "),
        ("ArrowDown", "node 1: busy "),
        ("+", "From "),
        ("0", "The whole step"),
    ):
        browser.evaluate(
            f"document.getElementById('gantt').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', cancelable: true}}))"
        )
        assert browser.evaluate(said).startswith(beginning), (key, browser.evaluate(said))


def test_it_fits_a_phone_in_both_colour_schemes_and_axe_finds_nothing_serious(
    run: tuple[Path, Summary], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = axe(shots(request))
    with watching(run[0], cwd=tmp_path) as addresses, Browser(tmp_path / "browser") as browser:
        for width, dark in ((390, True), (1280, False)):
            shown(browser, addresses["look"], width, dark=dark)
            until(browser, "ringtmp.state().summary != null && document.querySelectorAll('canvas').length >= 4")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            wide = [each for each in browser.evaluate(TOO_WIDE) if "skip" not in each]
            assert wide == []
            if source is not None:
                browser.evaluate(source + ";0")
                browser.evaluate(SERIOUS)
                until(browser, "window.found !== undefined")
                assert browser.evaluate("window.found") == []
            browser.screenshot(shots(request) / f"live-{width}.png")
        assert browser.problems == []
    if source is None:
        pytest.skip("axe-core could not be had (npm pack axe-core): contrast and roles were not looked at")


HELD = (("#0 embed", "#3 head"), ("#1 block",), ("#1 block",), ("#2 block",))
#: Who sends to whom: from the master to the group of two, from either to the next, on to the master; and within the group.
SPOKEN = {0: (1, 2, 3), 1: (0, 2, 3), 2: (0, 1, 3), 3: (0, 1, 2)}


def grouped(first: int, stop: int) -> list[Event]:
    """Steps of M-2-1-M, half a second each."""
    found: list[Event] = []
    for number in range(first, stop):
        for node in range(4):
            told = Reading((number + 1) / 2, 2**28, dict.fromkeys(SPOKEN[node], 1000 * (number + 1)))
            found.append(
                NodeStep(node, number, number / 2, number / 2 + 0.5, 0.3, 0.2, {"activations": 0.2}, 3000, 3000, (),
                         {"forward": 0.3}, reading=told)
            )  # fmt: skip
        found.append(step(number, (number + 1) / 2, 0.5))
    return found


@pytest.mark.long  # quick twins: test_followed_events.py, test_terminal_view.py
def test_groups_are_drawn_while_they_train_and_in_the_replay(tmp_path: Path) -> None:
    nodes = [NodeStarted(0.0, node, "worker" if node else "master", 1, 1, held, 10) for node, held in enumerate(HELD)]
    write(tmp_path / "events.jsonl", [started(), *nodes, *grouped(0, 8)])
    band = "document.querySelectorAll('#ring-drawing .group:not(.edge)').length === 1"
    sums = "document.querySelectorAll('#ring-drawing .lane.dots.s[style*=visible]').length === 2"
    with watching(tmp_path, cwd=tmp_path) as addresses, Browser(tmp_path / "browser") as browser:
        shown(browser, addresses["look"])
        until(browser, "ringtmp.state().status === 'running' && ringtmp.state().step === 8")
        until(browser, f"{band} && {sums}")
        until(browser, "document.getElementById('lead').textContent.includes('4 nodes as M-2-1-M')")
        labels = browser.evaluate(
            "[...document.querySelectorAll('#ring-drawing [role=button]')].map(each => each.getAttribute('aria-label'))"
        )
        assert [("shared with" in each) for each in labels] == [False, True, True, False], labels
        held = browser.evaluate("document.querySelectorAll('#nodes-table tbody small')[1].textContent")
        assert held == "layer 1, shared with node 2"
        write(tmp_path / "events.jsonl", [*grouped(8, 12), RunEnded(6.5, 12, "done", "ab" * 32)])
        until(browser, "ringtmp.state().status === 'done' && ringtmp.state().step === 12")
        browser.evaluate(
            "const s = document.querySelector('#slider'); s.value = 500; s.dispatchEvent(new Event('input'))"
        )
        until(browser, "document.querySelector('#moment').textContent.startsWith('0:03 of')")
        until(browser, f"{band} && {sums}")
        assert browser.problems == []
