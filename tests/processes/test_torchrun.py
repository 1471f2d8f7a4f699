"""Ranks that torchrun starts: the same bits as a ring of our own processes, without ZeroMQ; restarts; refusals."""

from __future__ import annotations

import html
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from commands import assert_all_gone, here, wait_for_step
from ringtmp.cli.ranks import as_rank, goes_on_in
from ringtmp.errors import UsageError
from ringtmp.launch.meeting_of_ranks import Facts, Meeting
from ringtmp.launch.rank_environment import KeptIn, Rank, this_rank
from ringtmp.launch.threads_of_ranks import threads_for, told

#: What a rank runs: the command line, which must not need ZeroMQ.
PROGRAM = """
import os, sys
open(f"started-{os.environ['RANK']}-{os.getpid()}", "w").close()
from ringtmp.__main__ import main
try:
    main()
finally:
    assert "zmq" not in sys.modules and "ringtmp.launch.agent" not in sys.modules
"""
ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def torchrun(
    ranks: int, *args: object, cwd: Path, more: tuple[str, ...] = (), meet: tuple[str, ...] = ("--standalone",)
) -> subprocess.Popen[str]:
    (cwd / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", *meet, "--nproc-per-node", str(ranks), *more]
    return subprocess.Popen(
        [*command, "program.py", "train", *map(str, args)],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def summary(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    found: dict[str, object] = json.loads(out)
    return found


def digest(*args: object, cwd: Path) -> str:
    return str(json.loads(here("train", *args, "--json", "--quiet", cwd=cwd).stdout)["weights_sha256"])


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, ("--schedule", "zero-bubble")),
        pytest.param(4, ("--schedule", "1f1b"), marks=pytest.mark.long),
        pytest.param(2, ("--model", "convnet", "--optimizer", "adamw", "--clip-norm", 1), marks=pytest.mark.long),
    ],
)
def test_ranks_have_the_bits_of_one_process_and_need_no_zeromq(
    ranks: int, settings: tuple[object, ...], tmp_path: Path
) -> None:
    given = ("--steps", 6, *settings)
    told = summary(torchrun(ranks, *given, "--json", cwd=tmp_path))
    assert told["nodes"] == ranks
    assert told["weights_sha256"] == digest(*given, "--nodes", 1, cwd=tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_by_all_reduce_with_the_bits_of_our_own_processes(ranks: int, tmp_path: Path) -> None:
    given = ("--steps", 6, "--strategy", "allreduce")
    told = summary(torchrun(ranks, *given, "--json", cwd=tmp_path))
    assert told["weights_sha256"] == digest(*given, "--nodes", ranks, cwd=tmp_path)


@pytest.mark.long
def test_ranks_choose_how_to_train_and_the_report_says_why(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told = summary(torchrun(2, "--steps", 6, "--strategy", "auto", "--json", "--run-dir", "run", cwd=tmp_path))
    why = str(told["strategy_chosen"])
    assert why.startswith("auto: ")
    assert told["exactness"] == "bits"
    assert told["weights_sha256"] == digest("--steps", 6, "--nodes", 1, cwd=tmp_path)
    here("report", "run", cwd=tmp_path)
    assert html.escape(why.partition(",")[0]) in (tmp_path / "run/report/report.html").read_text()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_rank_is_restarted_with_all_others_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Its quick twin is `test_after_a_restart_the_run_of_the_ranks_before_goes_on`."""
    given = ("--steps", 150, "--checkpoint-every", 20)
    started = torchrun(2, *given, "--json", "--run-dir", "run", cwd=tmp_path, more=("--max-restarts", "1"))
    wait_for_step(tmp_path / "run", 45, started)
    ranks = [each for each in psutil.Process(started.pid).children() if "program.py" in each.cmdline()]
    (victim,) = [each for each in ranks if each.environ()["RANK"] == "1"]
    victim.kill()
    told = summary(started)
    assert told["weights_sha256"] == digest(*given, "--nodes", 1, cwd=tmp_path)
    assert_all_gone(ranks)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_torchruns_that_count_restarts_differently_meet_again_at_once(tmp_path: Path) -> None:
    """The torchrun of rank 0 loses nothing and counts nothing. The quick twin is in `test_meeting_of_ranks.py`."""
    given = ("--steps", 150, "--checkpoint-every", 20, "--threads", 2)  # of every rank, whatever torchrun sets
    where = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1")
    meet = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", *where)
    both = [torchrun(1, *given, "--json", cwd=tmp_path, more=("--max-restarts", "3"), meet=meet) for _ in range(2)]
    wait_for_step(tmp_path / "runs/torchrun-job", 45, both[0])
    ranks = [rank for each in both for rank in psutil.Process(each.pid).children() if "program.py" in rank.cmdline()]
    (victim,) = [each for each in ranks if each.environ()["RANK"] == "1"]
    victim.kill()
    said = [each.communicate(timeout=200) for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["torchrun-job"], "the run went on where it was"
    (told,) = [json.loads(out) for out, _ in said if out]
    assert told["weights_sha256"] == digest(*given, "--nodes", 1, cwd=tmp_path)
    starts = sorted(each.name.split("-")[1] for each in tmp_path.glob("started-*"))
    assert starts == ["0", "0", "1", "1"], "one restart was enough"
    assert_all_gone(ranks)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_interrupted_torchrun_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    started = torchrun(2, "--steps", 5000, "--run-dir", "run", cwd=tmp_path)
    wait_for_step(tmp_path / "run", 5, started)
    ranks = psutil.Process(started.pid).children()
    started.send_signal(signal.SIGINT)
    started.communicate(timeout=60)
    assert_all_gone(ranks)
    saved = sorted(int(each.name.removeprefix("step-")) for each in (tmp_path / "run/checkpoints").glob("step-*"))
    assert saved[-1] >= 5
    assert digest("--resume", "run", "--steps", saved[-1] + 2, cwd=tmp_path) == digest(
        "--steps", saved[-1] + 2, "--nodes", 1, cwd=tmp_path
    )


@pytest.mark.long
def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    code = (
        "from ringtmp.launch.rank_environment import this_rank\nfrom ringtmp.launch.torchrun_ranks import RankPool\n"
        "from ringtmp.launch.meeting_of_ranks import Meeting\nRankPool(Meeting(this_rank(), 1.0)).start('ring', 1)"
    )
    environment = dict(os.environ, RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert "rank 1, rank 2 of 3 did not come within 1 s" in done.stderr, done.stderr


def test_a_rank_is_read_from_the_environment() -> None:
    assert this_rank({}) is None
    assert this_rank({**ENVIRONMENT, "WORLD_SIZE": "1", "RANK": "0"}) is None
    assert this_rank({**ENVIRONMENT, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}) == Rank(1, 4, 2, 3)
    with pytest.raises(UsageError, match="RANK=4 is not one of 0 to 3"):
        this_rank({**ENVIRONMENT, "RANK": "4"})
    with pytest.raises(UsageError, match="must be numbers"):
        this_rank({**ENVIRONMENT, "RANK": "first"})


def test_what_contradicts_the_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="--nodes 3, but there are 4 ranks"):
        as_rank({"nodes": 3}, None)
    with pytest.raises(UsageError, match="--listen is for devices that join"):
        as_rank({}, "127.0.0.1")
    chosen: dict[str, object] = {}
    assert as_rank(chosen, None) == Rank(1, 4)
    assert chosen == {"nodes": 4}


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Meeting]]:
    """Rank 0 as it is started again and again beside the store that torchrun keeps."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield lambda: Meeting(Rank(0, 2, 2))
    del store


def make_run(folder: Path) -> None:
    here("train", "--steps", 2, "--nodes", 1, "--quiet", "--run-dir", folder, cwd=folder.parent)


def test_after_a_restart_the_run_of_the_ranks_before_goes_on(lead: Callable[[], Meeting], tmp_path: Path) -> None:
    run, late = tmp_path / "run", tmp_path / "run-restart-1"
    assert goes_on_in(lead(), run, None) == (run, None)
    run.mkdir()  # they ended while the model was being read
    assert goes_on_in(lead(), run, None) == (late, None)
    make_run(late)
    for _ in range(2):
        assert goes_on_in(lead(), run, None) == (None, late), "a second restart goes on where the first began"
    assert goes_on_in(lead(), None, None) == (None, late), "by whatever name this rank would call it"
    assert goes_on_in(lead(), None, run) == (None, run)


def test_a_restart_does_not_go_on_with_the_run_of_others(lead: Callable[[], Meeting], tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    for _ in range(2):
        assert goes_on_in(lead(), tmp_path / "run", None) == (tmp_path / "run", None), "where it is refused"
    assert not lead().kept_in


def test_rank_0_on_another_machine_that_does_not_see_the_run_is_refused(
    lead: Callable[[], Meeting], tmp_path: Path
) -> None:
    lead().keep_in(KeptIn(str(tmp_path / "run"), "there"))
    with pytest.raises(UsageError, match=r"is kept in .*/run on there, and rank 0 has been started again on"):
        goes_on_in(lead(), tmp_path / "run", None)
    make_run(tmp_path / "run")
    assert goes_on_in(lead(), tmp_path / "run", None) == (None, tmp_path / "run")


def test_ranks_that_share_cores_share_threads_and_a_number_that_was_chosen_stays() -> None:
    def rank(*cores: int, host: str = "here", chosen: int = 0) -> Facts:
        return Facts("2", "1", chosen or len(cores), 1, host, cores=cores, chosen=bool(chosen))

    shared = [rank(0, 1, 2, 3), rank(0, 1, 2, 3), rank(0, 1, 2, 3, host="there")]
    assert threads_for(shared) == 2
    assert told(shared, 2) == "every rank computes with 2 threads: up to 2 ranks share a machine's cores"
    bound = [rank(0, 1), rank(2, 3)]
    assert (threads_for(bound), told(bound, 2)) == (2, "")
    by_torchrun = [rank(0, 1, 2, 3, chosen=1)] * 2
    assert threads_for(by_torchrun) == 1
    assert "there are cores for 2: --threads 2 uses them" in told(by_torchrun, 1)
    assert told([rank(0, chosen=1)] * 2, 1) == "", "nothing is left over"


@pytest.mark.long  # quick: test_gpus_of_ranks.py
def test_nccl_is_refused_on_every_rank_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTMP_BACKEND", "nccl")
    started = torchrun(2, "--steps", 2, "--run-dir", "run", cwd=tmp_path)
    _, err = started.communicate(timeout=110)
    assert started.returncode != 0
    assert err.count("RINGTMP_BACKEND=nccl needs a GPU for every rank, which rank 0 and rank 1 lack") >= 1, err
