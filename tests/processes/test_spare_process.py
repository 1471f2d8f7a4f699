"""A compute process that waits for the place of one that dies: real processes, and a clock and a memory that are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ringtmp.launch.compute_process import Orders
from ringtmp.launch.spare_process import AFTER_S, AGAIN_S, LOOK_EVERY_S, ROOM, Spare
from ringtmp.launch.start_process import end
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.transport.zeromq import ipc_address


class World:
    now = 0.0
    free_bytes = ROOM * PROCESS_BYTES

    def spare(self) -> Spare:
        return Spare(1, free_bytes=lambda: self.free_bytes, clock=lambda: self.now)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def spare(world: World) -> Iterator[Spare]:
    made = world.spare()
    yield made
    made.end()


def processes() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "spare" in command_of(each)]


def command_of(process: psutil.Process) -> list[str]:
    """The kernel tells a parent that its child has begun a program a moment before it knows the program's words."""
    limit = time.monotonic() + 10
    while not (found := process.cmdline()) and runs(process) and time.monotonic() < limit:
        time.sleep(0.001)
    return list(found)


def runs(process: psutil.Process) -> bool:
    """One that has ended and that nobody has asked about yet does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def started(world: World, spare: Spare) -> psutil.Process:
    spare.mind()
    world.now += AFTER_S
    spare.mind()
    (waiting,) = processes()
    return waiting


def test_a_spare_process_comes_after_a_while_where_there_is_room_and_goes_when_memory_is_short(
    world: World, spare: Spare
) -> None:
    world.now = 2 * AFTER_S
    spare.mind()
    assert processes() == [], "however long the run took to begin: the wait is one of training"
    world.now, world.free_bytes = 3 * AFTER_S, ROOM * PROCESS_BYTES - 1
    spare.mind()
    assert processes() == []
    world.now, world.free_bytes = world.now + LOOK_EVERY_S, ROOM * PROCESS_BYTES
    spare.mind()
    (waiting,) = processes()
    world.now, world.free_bytes = world.now + LOOK_EVERY_S, PROCESS_BYTES
    spare.mind()
    assert processes() == [waiting], "what it was started for is still there"
    world.now, world.free_bytes = world.now + LOOK_EVERY_S, PROCESS_BYTES - 1
    spare.mind()
    assert processes() == []


def test_a_spare_process_that_something_ends_is_not_started_again_and_again(world: World, spare: Spare) -> None:
    waiting = started(world, spare)
    for pause_s in (AGAIN_S, 2 * AGAIN_S):
        waiting.kill()
        os.waitid(os.P_PID, waiting.pid, os.WEXITED | os.WNOWAIT)
        world.now += LOOK_EVERY_S
        spare.mind()
        world.now += pause_s - 1
        spare.mind()
        assert processes() == []
        world.now += 1
        spare.mind()
        (waiting,) = processes()


def hit(process: psutil.Process, number: int) -> None:
    """Until it shows."""
    process.send_signal(number)
    limit = time.monotonic() + 10
    while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_spare_process_that_is_stopped_or_killed_gets_no_orders_and_does_not_stay(
    world: World, spare: Spare, number: int
) -> None:
    """It would be noticed only as a second loss, seconds later."""
    waiting = started(world, spare)
    hit(waiting, number)
    assert spare.take(Orders("r", 1, 1, ("", "", ""), ipc_address("/nowhere", 0), 1), Path(os.devnull)) is None
    assert processes() == []


def test_a_spare_process_that_is_stopped_while_nobody_needs_it_makes_way_for_another(
    world: World, spare: Spare
) -> None:
    waiting = started(world, spare)
    hit(waiting, signal.SIGSTOP)
    world.now += LOOK_EVERY_S
    spare.mind()
    assert processes() == []
    world.now += AGAIN_S
    spare.mind()
    (another,) = processes()
    assert another.pid != waiting.pid


def test_a_spare_process_gets_orders_once_and_writes_to_the_log_of_the_node_it_becomes(
    world: World, spare: Spare, tmp_path: Path
) -> None:
    waiting = started(world, spare)
    log = tmp_path / "node-1.log"
    log.write_text("of the one before\n")
    # A folder that is not there: it says so, and ends.
    orders = Orders("r", 1, 1, ipc_address(str(tmp_path / "none"), 1).endpoints, ipc_address(str(tmp_path), 0), 1)
    child = spare.take(orders, log)
    assert child is not None
    assert child.pid == waiting.pid
    assert spare.take(orders, log) is None
    child.wait(30)
    end(child)
    said = log.read_text()
    assert said.startswith("of the one before\n")
    assert "ZMQError" in said


def test_a_spare_process_ends_with_its_parent_however_that_went() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", "import time, ringtmp.launch.spare_process as it; it.AFTER_S = 0.0; it.ROOM = 0; "
         "it.Spare(1).mind(); print(flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdout is not None
    try:
        parent.stdout.readline()
        (waiting,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
        limit = time.monotonic() + 20  # while it loads it does not look
        while runs(waiting):
            assert time.monotonic() < limit, "it lives on"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_one_that_is_needed_at_once_says_when_it_has_loaded(world: World, spare: Spare, tmp_path: Path) -> None:
    assert not spare.loaded
    spare.hurry()
    (waiting,) = processes()
    spare.hurry()
    assert processes() == [waiting]
    limit = time.monotonic() + 60
    while not spare.loaded:
        assert time.monotonic() < limit
        time.sleep(0.05)
    hit(waiting, signal.SIGSTOP)
    assert not spare.loaded, "it could take no orders"
