"""`kill -9` of a group's members at named moments of a step, one after another in one run: the bits of one process, and soon.

M-2-2-M in local processes, once with a spare process for each loss and once with none. The seconds from the kill to the end of
the next step are shown; docs/resilience.md has those of a quiet machine.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from commands import CLI, here, wait_for_step
from failpoints.points import MEMBERS
from ringtmp.metrics import events
from ringtmp.runtime.checkpoint import latest
from ringtmp.runtime.run_directory import RunDirectory

GPT = (
    "--model", "gpt", "--set", "depth=3", "--set", "width=32", "--set", "heads=2", "--set", "dropout=0.1",
    "--data", "pysource", "--context", "16", "--batch-size", "16", "--microbatches", "8", "--optimizer", "adamw",
    "--clip-norm", "0.5", "--sum-tree", "4", "--json", "--quiet",
)  # fmt: skip
#: The bar of a quiet machine is 1 s; tests run beside others.
AGAIN_S = 20.0
SOME = [name for number, name in enumerate(MEMBERS) if number % 9 == 4]
LOADED_BYTES = 100e6
#: After a healing, so that no two losses are of one.
PAUSE_S = 1.5


class Disturbed:
    """A run that goes on until it is interrupted."""

    def __init__(self, folder: Path, names: list[str], *more: str) -> None:
        self.run, self.marks, self._next = folder / "run", folder / "marks", folder / "next"
        self.marks.mkdir()
        failpoints = str(Path(__file__).parent.parent / "support" / "failpoints")
        path = [failpoints, *filter(None, [os.environ.get("PYTHONPATH")])]
        told = {"FAILPOINTS": "|".join(names), "FAILPOINT_MARKS": str(self.marks), "FAILPOINT_NEXT": str(self._next)}
        self.process = subprocess.Popen(
            [*CLI, "train", *GPT, "--nodes", "5", "--groups", "2,2", "--steps", "1000000", *more, "--run-dir", str(self.run)],
            cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **told}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def has_spare(self) -> bool:
        """Whether one is there that waits: it has loaded what it needs, and takes no more of the processor."""
        named = [each for each in psutil.Process(self.process.pid).children() if "spare" in each.cmdline()]
        before = [sum(each.cpu_times()[:2]) for each in named]  # one that has taken a place works
        time.sleep(0.5)
        return any(
            sum(each.cpu_times()[:2]) == spent and each.memory_info().rss > LOADED_BYTES
            for each, spent in zip(named, before, strict=True)
        )

    def kill_at(self, name: str) -> tuple[float, events.Regrouped]:
        """Seconds from the kill to the end of the next step, and the healing."""
        mark = self.marks / name
        self._next.write_text(name)
        self.until(mark.exists, f"nobody came to {name!r}")
        self._next.unlink()
        killed = float(mark.read_text())
        self.until(lambda: self._after(killed) is not None, f"no step after {name!r}")
        found = self._after(killed)
        assert found is not None
        return found[1] - killed, found[0]

    def _after(self, killed: float) -> tuple[events.Regrouped, float] | None:
        healed: events.Regrouped | None = None
        for each in events.read(self.run / "events.jsonl"):
            if isinstance(each, events.Regrouped) and each.at > killed and healed is None:
                healed = each
            if isinstance(each, events.StepDone) and healed is not None:
                return healed, each.at
        return None

    def until(self, true: Any, what: str, limit_s: float = 60) -> None:
        until = time.monotonic() + limit_s
        while not true():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < until, what
            time.sleep(0.05)

    def interrupt(self) -> int:
        """The steps it made."""
        self.end()
        assert self.process.returncode == 130
        return latest(self.run / "checkpoints")[0].progress.step

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()


def weights(run: Path) -> list[torch.Tensor]:
    layers, checkpoint = RunDirectory(run).read_layers()[1], latest(run / "checkpoints")[0]
    return [each.clone() for index, layer in enumerate(layers) for each in checkpoint.layer(index, layer)[0]]


@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("spare", [True, False], ids=["with a spare process", "without"])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME, id="some", marks=pytest.mark.long),
        pytest.param(list(MEMBERS), id="all", marks=pytest.mark.nightly),
    ],
)
def test_a_member_killed_at_a_named_moment_changes_no_bit_and_the_ring_trains_again(
    names: list[str], spare: bool, tmp_path: Path
) -> None:
    told: list[tuple[str, float, events.Regrouped]] = []
    run = Disturbed(tmp_path, names)
    try:
        wait_for_step(run.run, 10, run.process)
        for name in names:
            if spare:
                run.until(run.has_spare, "no spare process came")
            else:
                time.sleep(PAUSE_S)
            told.append((name, *run.kill_at(name)))
        steps = run.interrupt()
    finally:
        run.end()
    for name, again_s, healed in told:
        print(
            f"{again_s:6.2f} s  noticed {healed.notice_s:.2f}, healed {healed.seconds:.2f}, {healed.nodes} nodes, "
            f"{healed.source}, {healed.repeated} repeated  {name}  {healed.reason}"
        )
    print(f"median {statistics.median(each[1] for each in told):.2f} s, longest {max(each[1] for each in told):.2f} s")
    assert [healed.lost for name, _, healed in told] == [(MEMBERS[name].node,) for name in names]
    here("train", *GPT, "--nodes", "1", "--steps", steps, "--run-dir", tmp_path / "calm", cwd=tmp_path)
    for hit, calm in zip(weights(run.run), weights(tmp_path / "calm"), strict=True):
        assert torch.equal(hit, calm)
    assert max(each[1] for each in told) < AGAIN_S
