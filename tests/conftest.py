"""One thread, deterministic kernels, and nothing left behind by any test."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
from hypothesis import settings

from ringtmp.system import end_with_parent
from ringtmp.system.resources import set_threads

# The same examples every time: a failure in a clean run is a change of ours, not of the dice.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.load_profile("repeatable")


_LOCK = "lock"


def pytest_configure() -> None:
    """A temporary folder of our own: what a test running beside this one leaves for a moment is not ours to judge."""
    # Under nohup one is ignored, in the background of a shell the other, and then by every command that is tried.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Killed, by a time limit for one, a test run leaves no command behind: a lab takes its networks down and goes.
    os.environ |= end_with_parent.tied({})
    _remove_leftovers(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix="rt-")  # short: Unix sockets live below it
    fcntl.flock(os.open(Path(folder, _LOCK), os.O_WRONLY | os.O_CREAT), fcntl.LOCK_EX)  # while this process lives
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")  # measured costs are no business of another run
    # Masters of tests that run side by side would find each other; those who are to be found say so.
    os.environ.setdefault("RINGTMP_TRAIN_DISCOVERY", "0")
    # Hundreds of processes start: each would compile every file anew.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _remove_leftovers(parent: Path) -> None:
    """The folders of test runs that were killed: nobody holds their locks any more."""
    for path in parent.glob(f"rt-*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def pytest_unconfigure() -> None:
    folder, tempfile.tempdir = tempfile.gettempdir(), None
    del os.environ["TMPDIR"], os.environ["XDG_CACHE_HOME"], os.environ[end_with_parent.VARIABLE]
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _one_exporter() -> Iterator[None]:
    """Layers that are alike are exported once, not once per run: three quarters of what a small run in memory takes."""
    from ringtmp.model import build

    shared = {whole: build.Exporter(whole) for whole in (False, True)}
    with mock.patch.object(build, "Exporter", side_effect=lambda whole=False: shared[whole]):
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_threads(1)


@pytest.fixture
def offenders() -> None:
    """Asked for by tests in which somebody breaks the protocol on purpose."""


@pytest.fixture(autouse=True)
def _nobody_honest_is_blamed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No message that comes late, early or twice is taken for an offence, in any test."""
    from ringtmp.runtime.mailbox import Endpoint

    found: list[str] = []
    offended = Endpoint.offended

    def noted(self: Endpoint, node: int, text: str, sure: bool = True) -> None:
        found.append(f"node {node} at node {self.node}: {text}")
        offended(self, node, text, sure)

    if "offenders" in request.fixturenames:
        yield
        return
    monkeypatch.setattr(Endpoint, "offended", noted)
    yield
    assert not found, "an honest node was blamed"


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """No child process, no socket folder of ours survives a test."""
    before = _socket_folders()
    yield
    children = [child for child in _children() if "ringtmp" in " ".join(_command(child))]
    _gone, alive = psutil.wait_procs(children, timeout=3)
    assert not alive, f"orphan processes: {[_command(each) for each in alive]}"
    assert not _socket_folders() - before, "socket folders left behind"


def _socket_folders() -> set[str]:
    """Folders whose owner is gone, or is this very process."""
    found = set()
    for name in os.listdir(tempfile.gettempdir()):
        if match := re.match(r"ringtmp_(\d+)-", name):
            owner = int(match[1])
            if owner == os.getpid() or not psutil.pid_exists(owner):
                found.add(name)
    return found


def _children() -> list[psutil.Process]:
    """And theirs. To look through every process of the machine takes longer than most tests."""
    return psutil.Process().children(recursive=True) if _may_have_children() else []


def _may_have_children() -> bool:
    try:
        return any((each / "children").read_text() for each in Path("/proc/self/task").iterdir())
    except OSError:  # a thread has just ended, or the system does not tell
        return True


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def factory_file(tmp_path: Path) -> Path:
    """A user's own file with a model and data no worker can import."""
    path = tmp_path / "mine.py"
    path.write_text(
        """
import os
import torch
from torch import nn

# Importing this file leaves a mark, so that a test can see who did.
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "importers"), "a") as marks:
    marks.write(f"{os.getpid()}\\n")


class Odd(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return torch.tanh(x @ self.weight) + x


def model(width=16, depth=4):
    yield nn.Linear(8, width)
    for _ in range(depth):
        yield Odd(width)
    yield nn.Linear(width, 3)


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 8, generator=generator)
    return inputs, inputs[:, :3].argmax(1)
"""
    )
    return path
