"""`--strategy auto` from the command line: processes of this machine that would be in each other's way go home."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from commands import here

DIGITS = ("--steps", "4", "--json", "--quiet")
FOUR = "".join(f'[[device]]\nname = "d{at}"\ncpu = 0.5\nmemory_mb = 2000\nlink_mbps = 100\n' for at in range(4))


def test_small_work_is_done_by_the_master_alone_with_the_same_bits_and_again_on_resume(tmp_path: Path) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    auto = json.loads(here("train", "--strategy", "auto", *DIGITS, "--run-dir", "auto", cwd=tmp_path).stdout)
    one = json.loads(here("train", "--nodes", "1", *DIGITS, cwd=tmp_path).stdout)
    assert auto["strategy_chosen"].startswith("auto: master alone, about ")
    assert (auto["nodes"], auto["strategy"], auto["exactness"]) == (1, "ring", "bits")
    assert auto["weights_sha256"] == one["weights_sha256"]
    assert auto["warnings"] == []
    assert {"ring", "master alone", "allreduce:ring"} <= {each["strategy"] for each in auto["considered"]}
    more = ("--strategy", "auto", "--steps", "6", "--json", "--quiet")
    again = json.loads(here("train", "--resume", "auto", *more, cwd=tmp_path).stdout)
    assert (again["nodes"], again["steps"], again["strategy_chosen"]) == (1, 6, auto["strategy_chosen"])
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


def test_a_plan_on_paper_says_which_way_and_lists_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "four.toml").write_text(FOUR)
    asked = ("plan", "--strategy", "auto", "--devices", "four.toml", "--quiet")
    page = json.loads(here(*asked, "--json", "--share-data", "--sum-tree", "4", cwd=tmp_path).stdout)
    assert (page["strategy"], page["nodes"]) == ("ring", 1)
    assert page["strategy_chosen"].startswith("auto: d0 alone, about ")
    ways = {each["strategy"]: each for each in page["ways"]}
    assert {"ring", "d0 alone", "allreduce:halving", "ps:bsp:servers=workers"} <= set(ways)
    assert ways["allreduce:ring"]["problem"].startswith("--sum-tree 4 keeps the bits of one process")
    told = here(*asked, cwd=tmp_path).stdout
    assert "auto: d0 alone, about" in told, "the digits over 100 Mbit/s"
    assert "ps:bsp:servers=workers (--share-data)" in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--share-data",), "--share-data is not needed: with --strategy ring"),
        (("--any-bits",), "--any-bits goes with --strategy auto"),
        (("--strategy", "auto", "--cuts", "0-1,2-3,4,5"), "--strategy auto cannot keep --cuts"),
    ],
)
def test_leave_that_nobody_asked_for_is_refused_before_anything_starts(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    assert said in here("train", *options, cwd=tmp_path, code=2).stderr
    assert list(tmp_path.iterdir()) == []
