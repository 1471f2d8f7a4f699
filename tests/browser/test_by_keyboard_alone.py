"""The whole page by keyboard: every control can be reached and left, is seen when it has the focus, has a name, and does its
thing by Enter, Space or arrows; nothing moves for who wants less of that."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import Browser, chromium
from known_run import known_events
from ringtmp.metrics.events import Regrouped, RunEnded
from test_followed_events import write
from watched import SERIOUS, axe, shown, until, watching

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="there is no chromium here (Debian: apt-get install chromium)"
)

KEYS = {"Tab": 9, "Enter": 13, " ": 32, "Escape": 27, "ArrowLeft": 37, "ArrowDown": 40, "End": 35}
TEXTS = {"Enter": "\r", " ": " "}
CONTROLS = "a[href], button, select, input, summary, [tabindex='0']"
#: What can have the focus now, each with a number; how many.
NUMBERED = f"""[...document.querySelectorAll("{CONTROLS}")].filter(each => each.checkVisibility() && !each.disabled)
  .map((each, i) => {{ each.dataset.place = i; return (each.id || each.outerHTML.slice(0, 90)); }})"""
#: The number of what has it, how thick its outline is (or that of the node in the ring), and what lies over its middle.
FOCUSED = """(() => { const has = document.activeElement;
  if (!has || has === document.body) return null;
  const look = getComputedStyle(has), body = has.querySelector('.body'), box = has.getBoundingClientRect();
  const outline = look.outlineStyle === 'none' ? 0 : parseFloat(look.outlineWidth);
  const x = box.left + box.width / 2, y = box.top + Math.min(box.height, 60) / 2, over = document.elementFromPoint(x, y);
  return [Number(has.dataset.place), Math.max(outline, body ? parseFloat(getComputedStyle(body).strokeWidth) : 0),
    over && (has.contains(over) || over.contains(has)) ? '' : (over?.outerHTML ?? 'outside').slice(0, 80)]; })()"""


@contextmanager
def page(folder: Path) -> Iterator[Browser]:
    """Of two runs, the first of which goes on, for one who may act: everything a page can have."""
    going = [each for each in known_events() if not isinstance(each, RunEnded)]
    *before, end = known_events()
    moved = Regrouped(end.at, end.step, 2, "node 1 takes twice as long as planned", 2, 0.1, kind="rebalanced")
    for name, found in (("goes-on", going), ("ended", [*before, moved, end])):
        (folder / name).mkdir()
        write(folder / name / "events.jsonl", found)
    with watching("goes-on", "ended", cwd=folder) as addresses, Browser(folder / "browser") as browser:
        shown(browser, addresses["act"])
        until(
            browser, "document.querySelectorAll('#runs button').length == 2 && !document.querySelector('#acts').hidden"
        )
        until(browser, "document.querySelector('#gantt').getAttribute('aria-label').startsWith('Step ')")
        yield browser
        assert browser.problems == []


def layers_that_were_moved_are_no_loss(browser: Browser) -> None:
    rows = "[...document.querySelectorAll('tr')].map(each => each.textContent)"
    assert "losses healed00" in browser.evaluate(rows)


def press(browser: Browser, *keys: str) -> None:
    for key in keys:
        about = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": TEXTS[key]} if key in TEXTS else {}
        browser.send("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        browser.send("Input.dispatchKeyEvent", type="keyUp", **about)


def focus(browser: Browser, selector: str) -> None:
    browser.evaluate(f"document.querySelector({selector!r}).focus()")


def focused(browser: Browser) -> Any:
    return browser.evaluate("document.activeElement.id || document.activeElement.textContent")


def tab_reaches_every_control_and_leaves_it_and_it_is_seen(browser: Browser) -> None:
    names = browser.evaluate(NUMBERED)
    reached: dict[int, tuple[float, str]] = {}
    for _ in range(2 * len(names) + 2):
        press(browser, "Tab")
        found = browser.evaluate(FOCUSED)
        if found is not None:
            place, outline, over = found
            if place == 0 and reached:
                break  # around, and not held anywhere
            reached[place] = (outline, over)
    assert [names[each] for each in sorted(set(range(len(names))) - set(reached))] == [], "never reached"
    assert len(names) >= 18
    assert {names[each]: told for each, told in reached.items() if told[0] < 2 or told[1]} == {}, "not to be seen"


#: (what has the focus, the key, what is so then)
DOES = (
    ("[data-axis=step]", "Enter", "document.querySelector('[data-axis=step]').ariaPressed == 'true'"),
    (".press", "Enter", "document.querySelector('#nodes-table tr.chosen') != null"),
    (".press", " ", "document.querySelector('#nodes-table tr.chosen') == null"),
    ("summary", "Enter", "document.querySelector('#gantt-numbers').open"),
    ("#gantt-step", "ArrowDown", "document.querySelector('#gantt-step').selectedIndex == 1"),
    ("#gantt-mail", " ", "document.querySelector('#gantt-mail').checked"),
    ("#gantt-detail", " ", "document.querySelector('#gantt-detail').checked"),
    ("#gantt-in", "Enter", "true"),
    ("#slider", "ArrowLeft", "document.querySelector('#live').ariaPressed == 'false'"),
    ("#live", " ", "document.querySelector('#live').ariaPressed == 'true'"),
    ("#play", " ", "document.querySelector('#play').ariaLabel == 'Pause'"),
    ("#play", "Enter", "document.querySelector('#play').ariaLabel == 'Play'"),
    ("#runs button:last-child", " ", "document.querySelector('#runs button:last-child').ariaPressed == 'true'"),
    ("#runs button", "Enter", "document.querySelector('#runs button').ariaPressed == 'true'"),
)


def keys_do_what_a_click_does_and_the_focus_stays(browser: Browser) -> None:
    for control, key, condition in DOES:
        focus(browser, control)
        before = focused(browser)
        press(browser, key)
        until(browser, condition)
        assert focused(browser) == before, f"{control}: the focus went elsewhere"
    focus(browser, ".skip")
    press(browser, "Enter")
    assert browser.evaluate("location.hash") == "#ring"


def a_question_takes_the_focus_and_gives_it_back(browser: Browser) -> None:
    focus(browser, "#act-stop")
    press(browser, "Enter")
    assert focused(browser) == "ask-no", "what changes nothing comes first"
    press(browser, "Escape")
    assert focused(browser) == "act-stop"
    press(browser, " ")
    press(browser, "Enter")
    assert browser.evaluate("document.querySelector('#ask').open") is False
    assert focused(browser) == "act-stop"


def everything_that_can_have_the_focus_has_a_name_and_a_role(browser: Browser) -> None:
    nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
    found = {}
    for each in nodes:
        able = any(one["name"] == "focusable" and one["value"].get("value") for one in each.get("properties", ()))
        role = each.get("role", {}).get("value", "")
        if able and not each.get("ignored") and role != "RootWebArea":
            found[each["nodeId"]] = (role, each.get("name", {}).get("value", ""))
    assert len(found) >= 18
    assert [each for each in found.values() if not each[1].strip() or each[0] in ("generic", "none", "")] == []
    loud = browser.evaluate(
        "[...document.querySelectorAll('output, [aria-live], [role=status]')].filter(e => e.closest('.player') && "
        "e.getAttribute('aria-live') !== 'off').map(e => e.id)"
    )
    assert loud == [], "a replay would be read out sixty times a second"


def nothing_moves_for_who_wants_less_motion_and_axe_finds_nothing_serious_in_either_theme(
    browser: Browser, request: pytest.FixtureRequest
) -> None:
    dots = """(() => { const made = document.createElementNS('http://www.w3.org/2000/svg', 'path');
      made.setAttribute('class', 'dots'); document.querySelector('#ring-drawing').append(made);
      const name = getComputedStyle(made).animationName; made.remove(); return name; })()"""
    moves = "document.getAnimations().filter(each => each.playState === 'running').length"
    assert browser.evaluate(dots) == "flow"
    assert request.config.cache is not None
    source = axe(request.config.cache.mkdir("screenshots"))
    for scheme in ("light", "dark"):
        features = [("prefers-reduced-motion", "reduce"), ("prefers-color-scheme", scheme)]
        browser.send("Emulation.setEmulatedMedia", features=[{"name": name, "value": to} for name, to in features])
        assert browser.evaluate(dots) == "none"
        assert browser.evaluate(moves) == 0
        if source is not None:
            browser.evaluate(source + ";delete window.found;0")
            browser.evaluate(SERIOUS)
            until(browser, "window.found !== undefined")
            assert browser.evaluate("window.found") == []


def test_the_page_can_be_used_by_keyboard_alone_and_read_out(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with page(tmp_path) as browser:
        layers_that_were_moved_are_no_loss(browser)
        tab_reaches_every_control_and_leaves_it_and_it_is_seen(browser)
        everything_that_can_have_the_focus_has_a_name_and_a_role(browser)
        keys_do_what_a_click_does_and_the_focus_stays(browser)
        a_question_takes_the_focus_and_gives_it_back(browser)
        nothing_moves_for_who_wants_less_motion_and_axe_finds_nothing_serious_in_either_theme(browser, request)
