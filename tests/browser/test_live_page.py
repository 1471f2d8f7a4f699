"""The live page in a real browser: the numbers of --json, replay, phones, both colour schemes, what axe says."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("uvicorn")

from pathlib import Path

from browser import TOO_WIDE, Browser, chromium
from ringtmp.metrics.summary import Summary
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
