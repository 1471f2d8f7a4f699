"""Ranks meet in torch's store, which may be older than they are; whoever does not fit is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from torch._C._distributed_c10d import TCPStore

from ringtmp.errors import UsageError
from ringtmp.launch.meeting_of_ranks import FIRST, Facts, Meeting, Orders
from ringtmp.launch.rank_environment import Rank
from test_torchrun import free_port

ALL_EQUAL = Facts("2.13.0", "1.0", 1, 2**30, "here")


@pytest.fixture
def _kept_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torchrun keeps one for all starts of its ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield
    del store


def rank(number: int, facts: Facts = ALL_EQUAL, limit_s: float = 20, world: int = 2) -> Meeting:
    return Meeting(Rank(number, world, world), limit_s, lambda: facts)


def asked(times: int = 100) -> Callable[[], bool]:
    """Whether who started this rank is gone: not before it was asked so often (five times a second)."""
    left = iter(range(times))
    return lambda: next(left, None) is None


@pytest.mark.usefixtures("_kept_store")
def test_ranks_that_count_restarts_differently_meet_in_the_newest_meeting() -> None:
    """Of two torchruns the one that lost a rank counts a restart, the other one none."""
    with ThreadPoolExecutor(1) as beside:
        lead, other = rank(0), rank(1)
        heard = beside.submit(other.told, FIRST, asked())
        assert len(lead.everyone()) == 2
        lead.tell(Orders("first"), FIRST)
        told = heard.result(30)
        assert told is not None
        assert (told.ring, lead.rank.restarts) == ("first", 0)

        early = rank(1)  # all were started again, and this one is here before rank 0
        assert early.told(FIRST, asked(3)) is None, "took orders of a meeting that has ended"
        heard = beside.submit(early.told, FIRST, asked())
        again = rank(0)
        assert again.rank.restarts == 1, "its own torchrun has counted none"
        assert len(again.everyone()) == 2
        again.tell(Orders("second"), FIRST)
        told = heard.result(30)
        assert told is not None
        assert told.ring == "second"


@pytest.mark.usefixtures("_kept_store")
def test_a_rank_that_waits_in_a_meeting_whose_master_died_comes_to_the_next() -> None:
    with ThreadPoolExecutor(1) as beside:
        _, other = rank(0), rank(1)
        assert other.told(FIRST, asked(2)) is None
        again = rank(0)
        heard = beside.submit(other.told, FIRST, asked())
        assert len(again.everyone()) == 2
        again.tell(Orders("next"), FIRST)
        told = heard.result(30)
        assert told is not None
        assert told.ring == "next"


@pytest.mark.usefixtures("_kept_store")
@pytest.mark.parametrize("what", ["torch", "ringtmp"])
def test_a_rank_with_another_version_is_refused_by_name_on_both_sides(what: str) -> None:
    odd = msgspec.structs.replace(ALL_EQUAL, host="there", **{what: "0.9"})
    with ThreadPoolExecutor(1) as beside:
        lead = rank(0)
        heard = beside.submit(rank(1, odd).told, FIRST, asked())
        its = f"torch {odd.torch} and ringtmp {odd.ringtmp}"
        expected = rf"rank 1 \(there\) has {its}, rank 0 has torch 2\.13\.0 and ringtmp 1\.0: install the same"
        with pytest.raises(UsageError, match=expected):
            lead.everyone()
        with pytest.raises(UsageError, match=expected):
            heard.result(30)


@pytest.mark.usefixtures("_kept_store")
def test_who_came_hears_who_did_not() -> None:
    with ThreadPoolExecutor(1) as beside:
        lead = rank(0, limit_s=1, world=4)
        heard = beside.submit(rank(2, world=4).told, FIRST, asked())
        with pytest.raises(UsageError, match=r"rank 1, rank 3 of 4 did not come within 1 s"):
            lead.everyone()
        with pytest.raises(UsageError, match=r"rank 1, rank 3 of 4 did not come"):
            heard.result(30)


#: Says that it has another torch than it has.
WITH_TORCH = """
import sys, torch
torch.__version__ = sys.argv.pop(1)
from ringtmp.__main__ import main
main()
"""


@pytest.mark.long  # quick: the meeting, above
def test_two_machines_with_unequal_torch_end_with_both_versions_told(tmp_path: Path) -> None:
    port = free_port()
    started = []
    for number, version in enumerate(("2.13.0", "2.4.1")):
        place = dict(os.environ, RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        command = [sys.executable, "-c", WITH_TORCH, version, "train", "--steps", "2", "--quiet"]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=place, stderr=subprocess.PIPE, text=True))
    try:
        for each in started:
            _, err = each.communicate(timeout=110)
            assert each.returncode == 2, err
            assert "has torch 2.4.1" in err
            assert "rank 0 has torch 2.13.0" in err
            assert "Traceback" not in err
    finally:
        for each in started:
            each.kill()
    assert not list(tmp_path.glob("runs/*")), "nothing has begun"
