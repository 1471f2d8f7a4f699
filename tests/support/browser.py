"""A headless Chromium for tests, spoken to over a pipe (its DevTools protocol): no driver, no library."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

LIMIT_S = 40.0


def chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class PageWentOnError(AssertionError):
    """The page went on to another address while it was asked something, as one that refreshes does."""


class Browser:
    """Use as a context. One page. `folder` is the browser's own: it is made, and DELETED with all that is in it at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._rest = b""
        self.problems: list[str] = []  # console errors, exceptions, things that were fetched and did not come
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None

    def __enter__(self) -> Browser:
        program = chromium()
        assert program is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [
                "/bin/bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "chromium", program, "--headless",
                "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
                "--remote-debugging-pipe", f"--user-data-dir={self._folder}", "about:blank",
            ],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(self._folder)},
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        target = next(each for each in self.send("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Page.setLifecycleEventsEnabled", enabled=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + LIMIT_S
        while True:
            answer = self._receive(limit)
            if answer.get("id") == self._number:
                if (error := answer.get("error")) is not None:
                    went = "navigated" in error["message"] or "context was destroyed" in error["message"]
                    raise (PageWentOnError if went else AssertionError)(f"{method}: {error}")
                return dict(answer["result"])
            self._notice(answer)

    def open(self, path: Path | str, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file, or an address, at this size and in this colour scheme, and wait until it is there."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._events.clear()
        started = self.send("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        limit = time.monotonic() + LIMIT_S
        # The page before may still tell that it has loaded, so the load waited for is of this navigation.
        while not any(self._loaded(each, started["loaderId"]) for each in self._events):
            self._notice(self._receive(limit))

    @staticmethod
    def _loaded(event: dict[str, Any], loader: str) -> bool:
        about = event.get("params", {})
        return event["method"] == "Page.lifecycleEvent" and about["name"] == "load" and about["loaderId"] == loader

    def evaluate(self, script: str) -> Any:
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, from top to bottom."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        whole = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def fetched(self) -> list[str]:
        """Addresses asked for since the page was opened."""
        asked = [each for each in self._events if each["method"] == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in asked]

    def _notice(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        method, about = event.get("method", ""), event.get("params", {})
        if method == "Runtime.exceptionThrown" or (method == "Runtime.consoleAPICalled" and about["type"] == "error"):
            self.problems.append(json.dumps(about)[:500])
        if method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])

    def _receive(self, limit: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"chromium said nothing for {LIMIT_S:.0f} s"
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "chromium is gone"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


#: Every figure that is shown, with the drawing of it that is: its size, how many texts, how small the smallest is.
LOOK = """[...document.querySelectorAll('figure')].map(figure => {
  const svg = [...figure.querySelectorAll('.plot svg')].find(each => each.getBoundingClientRect().width > 0);
  const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll('text')].filter(each => each.textContent.trim());
  const outside = texts.filter(each => { const b = each.getBoundingClientRect();
    return b.left < box.left - 2 || b.right > box.right + 2 || b.top < box.top - 2 || b.bottom > box.bottom + 2; });
  return {name: figure.id.slice(7), width: box.width, height: box.height, texts: texts.length,
    smallest: Math.min(...texts.map(each => parseFloat(getComputedStyle(each).fontSize) * scale)),
    outside: outside.map(each => each.textContent), said: figure.querySelector('[role=img]').getAttribute('aria-label')};
})"""
#: What is wider than the screen and not in a box that scrolls.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(each => !each.closest('.scroll, nav, svg') &&
  each.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5).map(each => each.outerHTML.slice(0, 80))"""
#: Contrast of the page's words against what is behind them, at worst.
COLOURS_SEEN = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"


def luminance(text: str) -> float:
    parts = [int(each) / 255 for each in re.findall(r"\d+", text)[:3]]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def legible(browser: Browser, page: Path, width: int, dark: bool) -> set[str]:
    """Opens a report and holds every figure of it to what can be read on such a screen; the names of the figures."""
    browser.open(page, width, dark=dark)
    assert browser.fetched() == [page.as_uri()], "it fetched something"
    looks = browser.evaluate(LOOK)
    for each in looks:
        assert each["width"] > 250, each
        assert each["height"] > 60, each
        assert each["texts"] >= 3, each
        assert each["smallest"] >= 8.5, each
        assert not each["outside"], each
        assert len(each["said"]) > 3, each
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(TOO_WIDE) == []
    ink, ground = sorted(map(luminance, browser.evaluate(COLOURS_SEEN)), reverse=True)
    assert (ink + 0.05) / (ground + 0.05) > 7
    return {each["name"] for each in looks}
