"""`ringtmp watch` in a process of its own, and its page in a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import Browser, PageWentOnError
from commands import CLI

AXE = "axe-core@4.14.0"
LIMIT_S = 30.0


@contextmanager
def watching(*args: object, cwd: Path) -> Iterator[dict[str, str]]:
    """The addresses it prints: `look` and, where viewers may act, `act`."""
    process = subprocess.Popen(
        [*CLI, "watch", *map(str, args)], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield addresses(process)
    finally:
        process.terminate()
        assert process.wait(10) in (0, -15), "it ends when it is told to"
        assert process.stdout is not None
        process.stdout.close()


def addresses(process: subprocess.Popen[str]) -> dict[str, str]:
    """From what a process prints, until it has said where to look and where to act."""
    pipe, found, said = process.stdout, dict[str, str](), ""
    assert pipe is not None
    while "act" not in found:
        line = pipe.readline()
        said += line
        assert line, f"it ended with code {process.wait(5)}: {said}"
        if match := re.match(r"(watch|and act) +(https?://\S+)", line):
            found["look" if match[1] == "watch" else "act"] = match[2]
    return found


def until(browser: Browser, condition: str, limit_s: float = LIMIT_S) -> None:
    """Until a script of the page is true; the page may go on to another address meanwhile, as the one with the token does."""
    limit = time.monotonic() + limit_s
    while not _holds(browser, condition):
        assert time.monotonic() < limit, f"not within {limit_s} s: {condition}: {state(browser)}"
        time.sleep(0.1)


def _holds(browser: Browser, condition: str) -> bool:
    try:
        return bool(browser.evaluate(condition))
    except PageWentOnError:
        return False


def shown(browser: Browser, address: str, width: int = 1280, dark: bool = False, height: int = 900) -> None:
    """Opens the page and waits until it has read everything there is."""
    browser.open(address, width, height=height, dark=dark)
    until(browser, "!!window.ringtmp && ringtmp.state().status !== undefined && ringtmp.state().status !== 'reading'")


def state(browser: Browser) -> Any:
    return browser.evaluate("window.ringtmp ? ringtmp.state() : null")


def tiles(browser: Browser) -> dict[str, str]:
    pairs = browser.evaluate(
        "[...document.querySelectorAll('#tiles div')].map(each => [...each.children].slice(0, 2).map(e => e.textContent))"
    )
    return dict(pairs)


def axe(cache: Path) -> str | None:
    """The source of axe-core, from the cache or the npm registry; None where neither has it."""
    file = cache / "axe.min.js"
    if not file.exists() and shutil.which("npm") is not None:
        try:
            subprocess.run(
                ["npm", "pack", AXE, "--silent"], cwd=cache, check=True, capture_output=True, timeout=60,
                env={**os.environ, "HOME": os.environ.get("HOME", str(cache))},
            )  # fmt: skip
            with tarfile.open(next(cache.glob("axe-core-*.tgz"))) as packed:
                source = packed.extractfile("package/axe.min.js")
                assert source is not None
                file.write_bytes(source.read())
        except (subprocess.SubprocessError, OSError, StopIteration, KeyError):
            return None
    return file.read_text() if file.exists() else None


#: Everything axe calls serious or worse, in a line each.
SERIOUS = """axe.run({resultTypes: ['violations']}).then(found => { window.found = found.violations
  .filter(each => ['serious', 'critical'].includes(each.impact))
  .map(each => each.id + ': ' + each.nodes.map(n => n.html.slice(0, 120) + ' ' + n.any[0]?.message).join(' | ')); }); 0"""
