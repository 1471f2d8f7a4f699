"""Groups on emulated devices: a silent member, and a killed master that nobody starts again by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from test_lab import needs_isolation
from test_lab_failures import Lab

from commands import ringtmp
from ringtmp.launch.supervise import SUPERVISED
from ringtmp.metrics import events
from ringtmp.runtime.checkpoint import latest
from ringtmp.runtime.run_directory import RunDirectory

pytestmark = [needs_isolation, pytest.mark.alone, pytest.mark.timeout(600), pytest.mark.long]

NOTICE_S = 1.0
#: The bar of a quiet machine is --notice and one more; tests run beside others.
AGAIN_S = NOTICE_S + 5
GPT = (
    "--model", "gpt", "--set", "depth=4", "--set", "width=32", "--set", "heads=2", "--set", "dropout=0.1", "--data",
    "pysource", "--context", 16, "--batch-size", 16, "--microbatches", 8, "--optimizer", "adamw", "--clip-norm", 0.5,
    "--sum-tree", 4, "--threads", 1,
)  # fmt: skip


class GroupLab(Lab):
    flags, cpu = GPT, 0.3

    def assert_bits_of_one_process(self) -> None:
        self.stop()
        reached = latest(self.folder / "run" / "checkpoints")[0].progress.step
        ringtmp("train", *GPT, "--nodes", 1, "--steps", reached, "--run-dir", "calm", "--quiet", cwd=self.folder)
        for hit, calm in zip(weights(self.folder / "run"), weights(self.folder / "calm"), strict=True):
            assert torch.equal(hit, calm)


def weights(run: Path) -> list[torch.Tensor]:
    layers, checkpoint = RunDirectory(run).read_layers()[1], latest(run / "checkpoints")[0]
    return [each.clone() for index, layer in enumerate(layers) for each in checkpoint.layer(index, layer)[0]]


@pytest.fixture
def labs(tmp_path: Path) -> Iterator[Callable[..., GroupLab]]:
    made: list[GroupLab] = []

    def make(*more: object) -> GroupLab:
        made.append(GroupLab(tmp_path, 5, "--groups", "2,2", "--no-rebalance", *more))
        made[0].until(lambda: made[0].steps_done() >= 10, "step 10")
        return made[0]

    yield make
    for each in made:
        each.close()


@contextlib.contextmanager
def stopped(lab: Lab, name: str) -> Iterator[None]:
    family = lab.processes(name)
    for each in family:
        each.suspend()
    yield
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.resume()


@contextlib.contextmanager
def unplugged(lab: Lab, name: str) -> Iterator[None]:
    lab.ip(name, "link", "set", "eth0", "down")
    yield
    lab.ip(name, "link", "set", "eth0", "up")


@pytest.mark.parametrize("silent", [stopped, unplugged])
def test_a_silent_member_of_a_group_is_done_without_soon_after_it_is_noticed(
    silent: Callable[[Lab, str], contextlib.AbstractContextManager[None]], labs: Callable[..., GroupLab]
) -> None:
    """Its siblings have its layers; it is back when it is heard again."""
    lab = labs("--notice", NOTICE_S, "--checkpoint-every", 1000)
    name = lab.node(2)
    since = time.monotonic()
    with silent(lab, name):
        lost = lab.until_regrouped(1)
        told = list(events.read(lab.log))
        done = next(each for each in told if isinstance(each, events.StepDone) and each.at > lost.at)
        print(
            f"trained again {done.at - since:.2f} s after the device fell silent: noticed within {lost.notice_s:.2f} s, "
            f"healed in {lost.seconds:.2f} s from {lost.source}, {lost.repeated} steps repeated, {lab.cpu} core a device"
        )
        assert (lost.lost, lost.nodes, lost.source in ("survivors", "snapshot")) == ((2,), 4, True)
        assert done.at - since < AGAIN_S
    assert lab.until_regrouped(2).nodes == 5
    lab.assert_bits_of_one_process()


def test_a_killed_master_of_groups_is_started_again_and_nobody_types_anything(labs: Callable[..., GroupLab]) -> None:
    """There is no checkpoint but the first: the snapshot that the devices hold."""
    lab = labs("--supervised", "--protect", "memory", "--checkpoint-every", 100000)
    lab.train_on(15)
    (master,) = [each for each in lab.processes("desk") if SUPERVISED in each.environ() and "train" in each.cmdline()]
    master.kill()
    reached = lab.steps_done()
    lab.until(lambda: len(started(lab)) == 2, "second master")
    lab.until(lambda: lab.steps_done() >= reached + 20, "steps after the kill")
    first, then = started(lab)
    assert (first.first_step, then.first_step > 0) == (0, True), "snapshots outlived the master"
    assert {each.facts["groups"] for each in (first, then)} == {"M-2-2-M"}
    lab.assert_bits_of_one_process()


def started(lab: Lab) -> list[events.RunStarted]:
    return [each for each in events.read(lab.log) if isinstance(each, events.RunStarted)]
