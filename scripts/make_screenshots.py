"""Pictures of the live page for docs/: `make screenshots`. Trains a few times for some seconds, then looks with Chromium.

The browser is the one of the tests (tests/support), so nothing else need be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs/dashboard"
#: name, runs, width, height, dark
PICTURES = (
    ("page-light", ("ring",), 1280, 1180, False),
    ("page-dark", ("ring",), 1280, 1180, True),
    ("page-phone", ("ring",), 390, 1560, True),
    ("page-compare", ("ring", "ps"), 1280, 1420, False),
    ("page-groups", ("groups",), 1280, 860, False),
)
RUNS = {
    "ring": ("--nodes", "4"),
    "ps": ("--nodes", "4", "--strategy", "ps:bsp"),
    "groups": ("--nodes", "5", "--groups", "2,2", "--sum-tree", "4"),
}


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests/support"))
    from browser import Browser  # type: ignore[import-not-found]

    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in RUNS.items():
            command = ["train", *settings, "--epochs", "4", "--run-dir", f"{folder}/{name}"]
            subprocess.run([sys.executable, "-m", "ringtmp", *command], check=True)
        with Browser(Path(folder) / "browser") as browser:
            for name, runs, width, height, dark in PICTURES:
                with subprocess.Popen(
                    [sys.executable, "-m", "ringtmp", "watch", *(f"{folder}/{run}" for run in runs)],
                    stdout=subprocess.PIPE, text=True,
                ) as server:  # fmt: skip
                    assert server.stdout is not None
                    found = re.search(r"http\S+", server.stdout.readline())
                    assert found is not None
                    browser.open(found[0], width, height=height, dark=dark)
                    _settle(browser)
                    shot(browser, OUT / f"{name}.png", width, height)
                    server.terminate()


def _settle(browser) -> None:  # type: ignore[no-untyped-def]
    for _ in range(100):
        time.sleep(0.2)
        if browser.evaluate("!!window.ringtmp && ringtmp.state().summary != null"):
            break
    time.sleep(2)


def shot(browser, path: Path, width: int, height: int) -> None:  # type: ignore[no-untyped-def]
    import base64

    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    found = browser.send("Page.captureScreenshot", format="png", clip=clip)
    path.write_bytes(base64.b64decode(found["data"]))


if __name__ == "__main__":
    main()
