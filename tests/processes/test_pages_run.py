"""What README and the tutorial tell people to type is typed here, in order, in an empty folder.

A fence says what it is: `sh` lines end well one after the other; `sh root` needs root on Linux; `sh master` stays in the
background until its devices, `sh device`, have come, and must end well; `device code` gets the pairing code by its standard
input; `python` is a script; `file=NAME` is written to that file. Fences without a name are pictures and output.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from test_join_security import free_port

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/tutorial.md")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.S | re.M)
ADDRESS = "192.168.1.10"


class Fence(NamedTuple):
    kind: str
    text: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


def fences(page: str) -> list[Fence]:
    return [Fence(kind, text) for kind, text in FENCE.findall((ROOT / page).read_text())]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_to_type_is_marked_as_such(page: str) -> None:
    """The quick twin: every fence is of a kind that is run, or has no command; what is installed has its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for kind, text in fences(page):
        if not kind:
            assert not re.search(r"^(\$ )?(ringtmp|pip|python) ", text, re.M), f"not run by any test: {text}"
        else:
            assert kind.split()[0] in ("sh", "python", "toml"), kind
        for wheel, extras in re.findall(r"dist/([\w.-]+\.whl)(?:\[([\w,]+)\])?", text):
            assert wheel == f"ringtmp-{project['version']}-py3-none-any.whl"
            assert set(extras.split(",")) <= set(project["optional-dependencies"])


class Reader:
    """Somebody who types."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.environment = {
            **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RINGTMP_CONFIG": str(folder / "config"), "MPLBACKEND": "agg", "RINGTMP_TRAIN_DISCOVERY": "1",
        }  # fmt: skip
        self.background: list[subprocess.Popen[str]] = []
        self.master: subprocess.Popen[str] | None = None
        self.heard = folder / "heard"

    def type(self, fence: Fence) -> None:
        kind, *words = fence.kind.split()
        for word in words:
            if word.startswith("file="):
                (self.folder / word.removeprefix("file=")).write_text(fence.text)
                return
        if kind == "python":
            self._run([sys.executable, "-c", fence.text])
        elif words[:1] == ["master"]:
            self._lead(fence.lines[0])
        elif words[:1] == ["device"]:
            self._join(fence.lines[0], "code" in words)
        elif words[:1] != ["root"] or can_isolate():
            for line in fence.lines:
                if not line.startswith("pip install"):  # in an empty environment: test_wheel.py
                    self._run(["sh", "-c", line])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"

    def _lead(self, line: str) -> None:
        self.heard.write_text("")
        with self.heard.open("a") as errors:
            words = line.replace(ADDRESS, f"127.0.0.1:{self.port}").split()
            self.master = subprocess.Popen(
                words, cwd=self.folder, env=self.environment, stderr=errors, text=True, stdout=subprocess.DEVNULL
            )
        self.background.append(self.master)
        self.nodes = int(words[words.index("--nodes") + 1])

    def _join(self, line: str, by_code: bool) -> None:
        token, code = self._await(r"--join (rt1\.\S+)"), ""
        if by_code:
            pytest.importorskip("spake2", reason="needs spake2 (the extra discovery)")
            code = self._await(r"type the code (\d+-\d+)")
        for number in range(1, self.nodes):
            there = {**self.environment, "RINGTMP_CONFIG": str(self.folder / f"device-{number}-{by_code}")}
            words = line.replace("TOKEN", token).split()
            # Other rings may be announced on this machine while the tests run.
            device = subprocess.Popen(
                [*words, *(("--listen", "127.0.0.1") if by_code else ())], cwd=self.folder, env=there, text=True,
                stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self.background.append(device)
            assert device.stdin is not None
            device.stdin.write(f"{code}\n")
            device.stdin.close()
        assert self.master is not None
        assert self.master.wait(120) == 0, self.heard.read_text()

    def _await(self, pattern: str) -> str:
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            if found := re.search(pattern, self.heard.read_text()):
                return found[1]
            time.sleep(0.1)
        raise AssertionError(self.heard.read_text())

    def close(self) -> None:
        for process in self.background:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def can_isolate() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("tc"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra plots)")
    reader = Reader(tmp_path)
    try:
        for fence in fences(page):
            if fence.kind:
                reader.type(fence)
    finally:
        reader.close()
