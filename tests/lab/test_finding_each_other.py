"""Devices in network namespaces of their own find a ring on their switch and join it by its code: nobody types an address."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_lab import needs_isolation

pytest.importorskip("spake2", reason="needs spake2 (the extra discovery)")
pytest.importorskip("zeroconf", reason="needs zeroconf (the extra discovery)")

from commands import CLI
from ringtmp.lab import networks
from ringtmp.lab.networks import Port

NAMES = ("master", "one", "two", "three")


@contextlib.contextmanager
def switch() -> Iterator[int]:
    lab = os.getpid()
    try:
        networks.build(lab, [Port(name, number, 100.0) for number, name in enumerate(NAMES, start=1)])
        yield lab
    finally:
        networks.remove(lab)


class Devices:
    """Each with a namespace and a config directory of its own; what they say on stderr is in files."""

    def __init__(self, lab: int, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, name: str, *words: str, said: str = "") -> subprocess.Popen[str]:
        (self.folder / name).mkdir(exist_ok=True)
        typed = self.folder / f"{name}.in"
        typed.write_text(said)
        with (self.folder / f"{name}.err").open("a") as errors, typed.open() as keyboard:
            process = subprocess.Popen(
                ["ip", "netns", "exec", networks.namespace(self.lab, name), *CLI, *words], cwd=self.folder / name, text=True,
                stdin=keyboard, stdout=subprocess.PIPE, stderr=errors,
                env={**os.environ, "RINGTMP_CONFIG": str(self.folder / name / "config")},
            )  # fmt: skip
        self.processes.append(process)
        return process

    def heard(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def await_text(self, name: str, pattern: str, limit_s: float = 60.0) -> re.Match[str]:
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            if found := re.search(pattern, self.heard(name)):
                return found
            time.sleep(0.1)
        raise AssertionError(f"{name} did not say {pattern!r}: {self.heard(name)}")

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.long  # over real sockets on loopback: tests/processes/test_pairing_by_code.py
@pytest.mark.timeout(240)
@needs_isolation
def test_three_devices_join_by_code_without_an_address_and_wrong_codes_only_change_it(tmp_path: Path) -> None:
    with switch() as lab:
        devices = Devices(lab, tmp_path)
        try:
            master = devices.start(
                "master", "train", "--discovery", "--listen", "10.77.0.1", "--nodes", "4", "--steps", "2", "--threads", "1",
                "--json", "--quiet", "--run-dir", "run",
            )  # fmt: skip
            code = devices.await_text("master", r"type the code (\d{3}-\d{3}) of ring home")[1]
            wrong = "000-000" if code != "000-000" else "111-111"
            guesser = devices.start("one", "node", said=f"{wrong}\n" * 3)
            assert guesser.wait(60) == 2
            assert "that is not the code the master shows now" in devices.heard("one")
            fresh = devices.await_text("master", r"the code is now (\d{3}-\d{3}), and pairing pauses for 5 s")[1]
            assert fresh != code
            time.sleep(5.5)
            for name in NAMES[1:]:
                devices.start(name, "node", "--once", "--name", name, said=f"{fresh}\n")
            out, _ = master.communicate(timeout=150)
            assert master.returncode == 0, devices.heard("master")
            summary = json.loads(out)
            assert (summary["nodes"], summary["steps"]) == (4, 2)
            assert sorted(each["device"] for each in summary["per_node"][1:]) == ["one", "three", "two"]
            for name in NAMES[1:]:
                assert "joined ring home at 10.77.0.1:47100" in devices.heard(name)
            assert fresh not in (tmp_path / "master/run/events.jsonl").read_text()
        finally:
            devices.stop()
