"""A ring of 64 nodes on the page: every word can be read, and what does not change is not drawn again."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")

from pathlib import Path

import many_nodes
from browser import TOO_WIDE, Browser, chromium
from watched import shown, until, watching

pytestmark = [
    pytest.mark.long,  # quick twins: test_live_page.py with 3 nodes, test_thinned_history.py with 64
    pytest.mark.skipif(chromium() is None, reason="there is no chromium here (Debian: apt-get install chromium)"),
]

#: The texts of the ring that overlap another one, and how small the smallest is.
TEXTS = """(() => { const texts = [...document.querySelectorAll('#ring-drawing text')].filter(t => t.textContent.trim());
  const boxes = texts.map(t => t.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  const over = texts.filter((t, i) => boxes.some((b, k) => k !== i && meet(boxes[i], b)));
  return {texts: texts.length, over: over.map(t => t.textContent),
    smallest: Math.min(...texts.map(t => parseFloat(getComputedStyle(t).fontSize)))}; })()"""
#: How far apart neighbours are, from the closest to the farthest.
APART = """(() => { const at = [...document.querySelectorAll('#ring-drawing .node')].map(n => n.transform.baseVal[0].matrix);
  const gaps = at.map((a, i) => { const b = at[(i + 1) % at.length]; return Math.hypot(a.e - b.e, a.f - b.f); });
  return [Math.min(...gaps), Math.max(...gaps)]; })()"""
#: What is written into the ring and the table from now on.
COUNT = """window.written = 0; window.watcher = new MutationObserver(list => { written += list.length; });
  for (const id of ['ring-drawing', 'nodes-table', 'charts'])
    watcher.observe(document.getElementById(id), {subtree: true, childList: true, attributes: true, characterData: true}); 0"""
#: Drawings that are asked for, and where the moment stands. The slider goes a hair on each time, within one stretch.
DRAW = """(async () => { const s = document.querySelector('#slider');
  for (let i = 0; i < 20; i++) { s.value = 500; s.dispatchEvent(new Event('input')); await new Promise(requestAnimationFrame); }
  window.drawn = true; })(); 0"""


@pytest.mark.parametrize(("width", "least_texts"), [(1280, 66), (390, 10)])
def test_64_nodes_can_be_read(tmp_path: Path, width: int, least_texts: int) -> None:
    many_nodes.write(tmp_path / "run", 64, 40)
    with watching(tmp_path / "run", cwd=tmp_path) as addresses, Browser(tmp_path / "browser") as browser:
        shown(browser, addresses["look"], width)
        until(browser, "document.querySelectorAll('#ring-drawing .node').length === 64")
        seen = browser.evaluate(TEXTS)
        assert seen["over"] == []
        assert seen["texts"] >= least_texts
        assert seen["smallest"] >= 8.5
        least, most = browser.evaluate(APART)
        assert most < 1.4 * least, "nodes stand at equal distances along the ellipse"
        assert [each for each in browser.evaluate(TOO_WIDE) if "skip" not in each] == []
        assert browser.problems == []


def test_a_moment_that_stays_is_not_drawn_again(tmp_path: Path) -> None:
    many_nodes.write(tmp_path / "run", 64, 40)
    with watching(tmp_path / "run", cwd=tmp_path) as addresses, Browser(tmp_path / "browser") as browser:
        shown(browser, addresses["look"])
        until(browser, "document.querySelectorAll('#nodes-table tbody tr').length === 64 && ringtmp.state().summary")
        browser.evaluate(DRAW)
        until(browser, "window.drawn")
        browser.evaluate(COUNT)
        browser.evaluate(f"window.drawn = false; {DRAW}")
        until(browser, "window.drawn")
        assert browser.evaluate("written") <= 20 * 3, "a line in each of three charts may be put where it stands"
        browser.evaluate("written = 0; document.querySelector('#slider').value = 100;"
                         "document.querySelector('#slider').dispatchEvent(new Event('input'))")  # fmt: skip
        until(browser, "written > 64", 10)
