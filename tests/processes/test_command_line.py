"""The command line: what it says, what it refuses, how fast it answers."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from commands import here, ringtmp


def test_help_answers_at_once_and_without_torch_and_so_does_catching_an_error(tmp_path: Path) -> None:
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = ringtmp("--help", cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.5, "seconds of a processor: what others do meanwhile does not count"
    assert all(verb in done.stdout for verb in ("train", "evaluate", "predict", "trace"))
    verbs = ", ".join(f"ringtmp.cli.{verb}" for verb in ("train", "evaluate", "predict", "trace"))
    check = f"import sys, ringtmp, {verbs}; ringtmp.DoesNotFit, ringtmp.__version__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trian"], "unknown verb 'trian': did you mean 'train'"),
        (["train", "--nodez", "3"], "--nodez"),
        (["train", "--nodes", "three"], "'three' is not a valid integer"),
        (["train", "--set", "width"], "--set 'width': write it as key=value"),
        (["train", "--with", "servers=2"], "strategy ring takes no settings, so 'servers' is unknown"),
        (["train", "missing.toml"], "missing.toml cannot be read"),
        (["train", "wrong.toml"], "is not TOML"),
        (["train", "unknown.toml"], "unknown section in unknown.toml 'trainig': did you mean 'training'"),
        (["trace", "nowhere"], "nowhere is not a run directory"),
    ],
)
def test_wrong_usage_gets_one_line_and_exit_2(tmp_path: Path, args: list[str], says: str) -> None:
    (tmp_path / "wrong.toml").write_text("= 3")
    (tmp_path / "unknown.toml").write_text("[trainig]\nsteps = 3\n")
    done = (here if "--with" in args else ringtmp)(*args, cwd=tmp_path, code=2)  # a strategy's settings need torch
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["train", "--model", "mlpp"], "unknown model 'mlpp': did you mean 'mlp'"),
        (["train", "--strategy", "rign"], "unknown strategy 'rign': did you mean 'ring'"),
        (["train", "--quiet", "--nodes", "3", "--set", "depth=1"], "3 nodes need at least 4 layers"),
        (["train", "--schedule", "gpipe", "--window", "2"], "too small for gpipe"),
        (["train", "--run-dir", "file/run"], "cannot be written"),
        (["evaluate", "nowhere"], "nowhere is not a run directory"),
    ],
)
def test_refusals_that_need_the_model_start_nothing_and_leave_nothing(
    tmp_path: Path, args: list[str], says: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = (ringtmp if "mlpp" in args else here)(*args, cwd=tmp_path, code=2)
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("runs/*"))


def test_train_trace_evaluate_predict_as_a_user_would(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(
        '[training]\nsteps = 90\nbatch_size = 32\n[ring]\nnodes = 5\n[model]\nname = "mlp"\n'
    )
    done = ringtmp(
        "train", "settings.toml", "--nodes", "2", "--run-dir", "run", cwd=tmp_path,
        env={**__import__("os").environ, "RINGTMP_TRAIN_NODES": "4", "RINGTMP_TRAIN_LR": "0.005"},
    )  # fmt: skip
    assert "test accuracy" in done.stdout
    assert all(word in done.stdout for word in ("master", "node 1", "idle", "peak memory"))
    assert "node 2" not in done.stdout, "a flag wins over the environment and the file"
    saved = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert saved["training"]["optimizer_settings"]["lr"] == 0.005
    assert saved["training"]["steps"] == 90
    assert "events in run/trace.json" in here("trace", "run", cwd=tmp_path).stdout
    score = json.loads(here("evaluate", "run", "--nodes", 2, "--json", cwd=tmp_path).stdout)
    assert score["accuracy"] > 0.5
    np.save(tmp_path / "x.npy", np.zeros((3, 1, 8, 8), np.float32))
    lines = here("predict", "run", "x.npy", cwd=tmp_path).stdout.split()
    assert len(lines) == 3
    assert all(0 <= int(line) <= 9 for line in lines)
