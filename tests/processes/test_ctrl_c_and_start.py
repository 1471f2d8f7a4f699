"""The command before and after a verb does its work: Ctrl-C while modules load, output nobody takes, memory nobody has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import pytest

from commands import CLI
from ringtmp.system.resources import loading
from ringtmp.system.signals import on_signals

#: Whatever is raised in it is lost, as in some of torch's modules.
SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException:
    pass
"""


def test_ctrl_c_ends_a_command_that_loads_a_module_which_swallows_it(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    load = "from ringtmp.system.resources import loading\nwith loading(nothing_started=True): import swallows\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", load], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ringtmp: interrupted\n")


def test_ctrl_c_in_a_run_is_granted_when_the_module_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    monkeypatch.syspath_prepend(tmp_path)
    heard: list[bool] = []

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append("swallows" in sys.modules)
        raise KeyboardInterrupt

    with on_signals(handle):
        with pytest.raises(KeyboardInterrupt), loading():
            import swallows  # type: ignore[import-not-found]  # noqa: F401
        assert heard == [True]


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has loaded is read from /proc")
def test_ctrl_c_while_torch_loads_ends_the_command_with_a_sentence(tmp_path: Path) -> None:
    process = subprocess.Popen([*CLI, "train"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "ringtmp: interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_finds_no_room_is_a_sentence_and_exit_1(tmp_path: Path, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*CLI, "strategies"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    said = "ringtmp: cannot write the output or a file of the run: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is counted on Linux")
@pytest.mark.parametrize("kibibytes", [300_000, pytest.param(700_000, marks=pytest.mark.long)])
def test_too_little_address_space_is_a_sentence_and_exit_1(tmp_path: Path, kibibytes: int) -> None:
    command = ["bash", "-c", f'ulimit -v {kibibytes}; exec "$@"', "-", *CLI, "train", "--nodes", "1", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("ringtmp: too little memory for this process (ulimit -v, the container's limit")
    assert done.stderr.count("\n") == 1
