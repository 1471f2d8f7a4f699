"""Is the page smooth with many nodes? A made run, replayed and followed live in headless Chromium; what its main thread took.

    python scripts/measure_page.py --nodes 64

Printed for either: pictures drawn, how far they were apart, tasks longer than 50 ms (the browser's own observer tells of
them), and the processor's time of the main thread a picture, by what it did. The browser paints in software here.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from browser import Browser  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[1]
LOOK_S, APPEND_S = 10.0, 0.25
OBSERVE = """window.long = []; window.pictures = [];
  new PerformanceObserver(list => { for (const each of list.getEntries()) long.push(Math.round(each.duration)); })
    .observe({type: 'longtask'});
  (function next(now) { pictures.push(now); requestAnimationFrame(next); })(performance.now()); 0"""
PARTS = ("TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--width", type=int, default=1280)
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests/support"))
    import many_nodes  # type: ignore[import-not-found]
    from browser import Browser
    from watched import shown, until, watching  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        whole, live = Path(folder) / "whole", Path(folder) / "live"
        many_nodes.write(whole, asked.nodes, 300)
        lines = (whole / "events.jsonl").read_bytes().splitlines(keepends=True)
        live.mkdir()
        there = 2 * len(lines) // 3
        (live / "events.jsonl").write_bytes(b"".join(lines[:there]))
        for name, run in (("replayed in 20 s", whole), ("four steps a second", live)):
            with watching(run, cwd=Path(folder)) as addresses, Browser(Path(folder) / "browser") as browser:
                shown(browser, addresses["look"], asked.width)
                until(browser, "ringtmp.state().summary != null")
                if run is whole:
                    browser.evaluate("document.querySelector('#play').click()")
                print(
                    f"{asked.nodes} nodes, {name}: {_looked(browser, run, lines[there:] if run is live else [], asked.nodes)}"
                )


def _looked(browser: Browser, run: Path, lines: list[bytes], nodes: int) -> str:
    """Lines are appended meanwhile, a step at a time."""
    browser.send("Performance.enable", timeDomain="threadTicks")
    browser.evaluate(OBSERVE)
    before, limit = _spent(browser), time.monotonic() + LOOK_S
    while time.monotonic() < limit:
        step, lines = lines[: nodes + 1], lines[nodes + 1 :]
        with (run / "events.jsonl").open("ab") as log:
            log.write(b"".join(step))
        time.sleep(APPEND_S)
    after, pictures, long = _spent(browser), browser.evaluate("pictures"), browser.evaluate("long")
    apart = sorted(later - each for each, later in itertools.pairwise(pictures))
    middle, most = apart[len(apart) // 2], apart[int(0.95 * len(apart))]
    spent = ", ".join(
        f"{name[:-8].lower()} {1000 * (after[name] - before[name]) / len(pictures):.1f}" for name in PARTS
    )
    return (
        f"{len(pictures)} pictures, {middle:.0f} ms apart (95 %: {most:.0f}, most {apart[-1]:.0f}); "
        f"{len(long)} tasks over 50 ms {sorted(long)[-3:]}; processor's ms a picture: {spent}"
    )


def _spent(browser: Browser) -> dict[str, float]:
    return {each["name"]: each["value"] for each in browser.send("Performance.getMetrics")["metrics"]}


if __name__ == "__main__":
    main()
