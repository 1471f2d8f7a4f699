"""A stranger must not end a run: connections are capped, descriptors are kept back, and a shortage is called by its name."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import ringtmp
from ringtmp.system.resources import file_limit, open_files
from ringtmp.transport.encryption import new_key_pair
from ringtmp.transport.zeromq import ZeroMQTransport
from test_join_security import ANY, Master, greet, join
from test_join_security import master as master
from test_joining import Ring
from test_joining import ring as ring

LIMIT = 1024
#: Connects so often to each port, says a byte on every other connection, says that it is done, and waits for its end.
CROWD = """
import resource, socket, sys, time
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
made = []
for number in range(int(sys.argv[1])):
    for port in sys.argv[2:]:
        each = socket.socket()
        each.setblocking(False)
        each.connect_ex(("127.0.0.1", int(port)))
        made.append(each)
        if number % 2:
            try:
                each.send(b"\\xff")
            except OSError:
                pass
    time.sleep(0.0002)
print("done", flush=True)
sys.stdin.read()
"""


class Crowd:
    """So many strangers at each of some ports, in a process of their own."""

    def __init__(self, count: int, *ports: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CROWD, str(count), *map(str, ports)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"done\n"

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(b"")


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="the gate is Linux's")
def test_a_crowd_at_every_port_leaves_files_to_open_and_the_admitted_connected(few_files: None, master: Master) -> None:
    listening = ZeroMQTransport(0, ANY, new_key_pair())
    links = [int(each.rpartition(":")[2]) for each in listening.address.endpoints]
    keys = new_key_pair()
    join(master.token(), keys)
    assert greet(master, keys, 5.0)
    with Crowd(1100, master.port, master.port + 1, *links):
        used = open_files()
        assert used < LIMIT - 300, f"{used} of {LIMIT} are gone"
        assert used > 100, "nobody got in: this says nothing"
        assert master.hub._gatekeeper.listeners[0].times_shut
        assert keys.public in master.hub.devices
    listening.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the gate is Linux's")
def test_the_gate_opens_again_when_strangers_are_gone(few_files: None, master: Master) -> None:
    with Crowd(300, master.port + 1):
        pass
    keys = new_key_pair()
    join(master.token(), keys)
    assert greet(master, keys, 15.0)
    assert not master.hub._gatekeeper.listeners[0].is_shut


SHORTAGE = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
from ringtmp.errors import UsageError
from ringtmp.system.resources import out_of_files, require_files
try:
    require_files(3)
except UsageError as error:
    print(error)
try:
    while True:
        os.open("/dev/null", os.O_RDONLY)
except OSError as error:
    wrapped = RuntimeError("a layer's trouble")
    wrapped.__cause__ = error
    print(out_of_files(wrapped))
print(out_of_files(ValueError("something else")))
"""


def test_a_shortage_of_files_is_called_by_its_name() -> None:
    done = subprocess.run([sys.executable, "-c", SHORTAGE], capture_output=True, text=True, check=True)
    refused, shortage, other = done.stdout.splitlines()
    assert refused == "this process may open 24 files and a ring of 3 takes up to 56: raise ulimit -n"
    assert shortage.startswith("too many open files: 24 of 24 file descriptors in use; raise ulimit -n")
    assert other == "None"


def test_the_soft_limit_is_raised_as_far_as_the_system_lets_us() -> None:
    script = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from ringtmp.system.resources import ENOUGH_FILES, file_limit, raise_file_limit
raise_file_limit()
print(file_limit() == min(hard, ENOUGH_FILES) if hard != resource.RLIM_INFINITY else file_limit() == ENOUGH_FILES)
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"True\n"
    assert file_limit() > 0


def limited(files: int, command: list[str]) -> list[str]:
    return ["/bin/sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]


@pytest.mark.long
def test_with_24_files_a_run_says_so_and_blames_no_layer(tmp_path: Path) -> None:
    command = limited(24, [sys.executable, "-m", "ringtmp", "train", "--nodes", "3", "--steps", "1", "--quiet"])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "ringtmp: this process may open 24 files and a ring of 3 takes up to 56: raise ulimit -n\n"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the gate is Linux's")
def test_1100_strangers_at_each_port_of_a_master_with_1024_files_change_nothing(
    ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ringtmp("train", "--nodes", 1, "--steps", 60, "--threads", 1, "--quiet", "--json", cwd=tmp_path)
    monkeypatch.setattr("test_joining.CLI", limited(LIMIT, [sys.executable, "-m", "ringtmp"]))
    ring.master(2, "--steps", 60)
    with Crowd(1100, ring.port, ring.port + 1):  # while it waits, and while it exports
        board, limit = ring.device("board"), time.monotonic() + 300
        while not (
            tmp_path / "run/config.json"
        ).exists():  # a device that the crowd keeps out for too long gives up, and asks again
            assert time.monotonic() < limit, ring.said("board")
            if board.poll() is not None:
                board = ring.device("board")
            time.sleep(0.2)
        result = ring.result(300)
    assert result["weights_sha256"] == json.loads(alone.stdout)["weights_sha256"]
    assert os.path.exists(tmp_path / "run")
