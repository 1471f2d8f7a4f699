"""evaluate, predict and generate on processes, on devices that join and in the lab give what one node gives."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import CLI, begin, here, ringtmp
from ringtmp.lab.devices_file import Device, toml

PROMPT = ("--prompt", "the quick ", "--max-new-tokens", 8, "--json")
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    sizes = ("--set", "depth=2", "--set", "width=16", "--set", "heads=2", "--set", "context=32")
    here(
        "train", "--model", "gpt", "--data", "text:words.txt", *sizes, "--steps", 4, "--batch-size", 8, "--nodes", 1,
        "--threads", 1, "--quiet", "--run-dir", "run", cwd=folder,
    )  # fmt: skip
    return folder


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def tokens(out: str) -> list[int]:
    found: list[int] = json.loads(out)["tokens"]
    return found


@pytest.mark.long  # in memory: tests/memory/test_generate.py
def test_processes_write_what_one_node_writes(folder: Path) -> None:
    alone = here("generate", "run", *PROMPT, cwd=folder)
    assert tokens(here("generate", "run", *PROMPT, "--nodes", 3, cwd=folder).stdout) == tokens(alone.stdout)


@pytest.mark.long  # the pool of devices: tests/processes/test_joining.py
def test_devices_that_join_evaluate_and_generate(folder: Path, started: list[subprocess.Popen[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = ("--listen", f"127.0.0.1:{free.getsockname()[1]}", "--nodes", 2)
    for verb, more in (("evaluate", ("--json",)), ("generate", PROMPT)):
        master = begin(verb, "run", *more, *where, cwd=folder)
        started.append(master)
        token = joining(master)
        node = subprocess.Popen(
            [*CLI, "node", "--join", "-", "--once"], cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        started.append(node)
        assert node.stdin is not None
        node.stdin.write(token + "\n")
        node.stdin.close()
        node.stdin = None
        out, err = master.communicate(timeout=LIMIT_S)
        assert master.returncode == 0, err
        alone = json.loads(here(verb, "run", *more, cwd=folder).stdout)
        if verb == "evaluate":
            assert json.loads(out)["loss"] == alone["loss"]
        else:
            assert json.loads(out)["tokens"] == alone["tokens"]
            assert json.loads(out)["nodes"] == 2


def joining(master: subprocess.Popen[str]) -> str:
    """The token it prints."""
    assert master.stderr is not None
    for line in master.stderr:
        if found := re.search(r"--join (rt1\.\S+)", line):
            return found[1]
    raise AssertionError(f"no token, exit {master.wait()}")


@pytest.mark.long
def test_the_lab_runs_them(folder: Path) -> None:
    (folder / "devices.toml").write_text(toml([Device(f"d{each}", 0.5, 0.5, 2000, 100) for each in range(2)]))
    alone = here("generate", "run", *PROMPT, cwd=folder)
    lab = ringtmp(
        "lab", "--no-isolation", "--devices", "devices.toml", "--", "generate", "run", *PROMPT, cwd=folder, timeout=LIMIT_S
    )  # fmt: skip
    assert tokens(lab.stdout) == tokens(alone.stdout)
    assert "all joined" in lab.stderr
