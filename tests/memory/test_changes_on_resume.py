"""What a resumed run may change, from the command line and from Python: the bits stay those of a run never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from commands import here
from ringtmp import Ring, UsageError, api
from ringtmp.launch.ring_in_one_process import InMemoryPool

#: New values for a run of three nodes, of the usual cuts, window, schedule, route and protection.
CHANGES: dict[str, Any] = {
    "recompute": "all", "protect": "disk", "window": 2, "schedule": "zero-bubble", "laps": 2, "route": "v",
    "cuts": "0-1,2-4,5-7,8", "nodes": 2,
}  # fmt: skip
STEPS = 5


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        api, "processes_here", lambda nodes, threads, *_rest, **_more: InMemoryPool(nodes, threads=threads)
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that was stopped after three of its steps, and the digest of one that was not."""
    folder = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            api, "processes_here", lambda nodes, threads, *_rest, **_more: InMemoryPool(nodes, threads=threads)
        )
        usual = ("train", "--set", "depth=8", "--set", "dropout=0.1", "--json", "--quiet")
        whole = here(*usual, "--steps", STEPS, "--run-dir", "whole", cwd=folder)
        here(*usual, "--steps", 3, "--run-dir", "half", cwd=folder)
    return folder / "half", json.loads(whole.stdout)["weights_sha256"]


def _saved(run: Path) -> dict[str, Any]:
    config = json.loads((run / "config.json").read_text())["config"]
    return {**config["ring"], **config["keep"]}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.long] * (name == "recompute" or (number + other) % 2))
        for number, name in enumerate(CHANGES)
        for other, way in enumerate(("command line", "Python"))
    ],
)
def test_a_resumed_run_may_change_it_and_keeps_its_bits(
    name: str, way: str, parts: tuple[Path, str], tmp_path: Path
) -> None:
    run, value = tmp_path / "run", CHANGES[name]
    shutil.copytree(parts[0], run)
    if way == "command line":
        here("train", "--resume", run, f"--{name}", value, "--steps", STEPS, "--quiet", cwd=tmp_path)
        digest = api.Result(run).summary.weights_sha256
    else:
        ring, changes = ({}, {name: value}) if name == "protect" else ({name: value}, {})
        digest = Ring(**ring).resume(run, steps=STEPS, **changes).summary.weights_sha256
    assert _saved(run)[name] == value
    assert digest == parts[1]


def test_steps_that_are_all_made_already_are_told(parts: tuple[Path, str], tmp_path: Path) -> None:
    """`--resume RUN --epochs 3` after eight epochs, meant as three more, ended at once as if all were well."""
    shutil.copytree(parts[0], tmp_path / "run")
    done = here("train", "--resume", "run", "--steps", 2, "--quiet", cwd=tmp_path)
    assert (
        "nothing is left to train: this run has made 3 steps of 2; --epochs and --steps count from its" in done.stderr
    )


def test_what_is_not_given_stays_as_the_run_had_it(parts: tuple[Path, str]) -> None:
    saved = api.settings_of(parts[0], {"laps": 2, "window": 3})
    assert (saved.ring.nodes, saved.ring.laps, saved.ring.window, saved.ring.cuts) == (3, 2, 3, None)
    assert api.settings_of(parts[0], {"schedule": "gpipe"}).ring.nodes == 3


def test_a_route_takes_the_place_of_laps_and_laps_that_of_a_route(parts: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(parts[0], run)
    Ring().resume(run, steps=4, laps=2)
    assert api.settings_of(run, {"route": "v"}).ring.laps == 1
    Ring(route="v").resume(run, steps=5)
    assert api.settings_of(run, {"laps": 2}).ring.route == "ring"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"threads": 2},
            "^resume cannot change threads= .it is 1 in that run.: it would change the weights. It may change bad_lines=, epo",
        ),
        ({"strategy": "allreduce:tree"}, "cannot change strategy="),
        ({"wire": "int8"}, "cannot change wire="),
        ({"optimizer": ("adam", {"lr": 0.1})}, r"^resume cannot change lr of optimizer= \(it is 0.002 in that run\)"),
        ({"lr": 0.1}, r"^resume cannot change lr of optimizer= \(it is 0.002 in that run\)"),
        ({"optimizer": "sgd"}, r"^resume cannot change optimizer= \(it is 'adam' in that run\)"),
        ({"optimizer": ("adam", {"eps": 0.1})}, r"cannot change eps of optimizer= \(it is not set in that run\)"),
        ({"lr_schedule": "cosine"}, r"cannot change kind of lr_schedule= \(it is 'constant' in that run\)"),
        ({"epochs": 2, "steps": 9}, "give epochs= or steps=, not both"),
    ],
)
def test_what_would_change_the_bits_is_refused_from_ring_and_resume(
    given: dict[str, Any], says: str, parts: tuple[Path, str]
) -> None:
    with pytest.raises(UsageError, match=says):
        Ring().resume(parts[0], **given)


def test_saying_again_what_the_run_has_is_no_change(parts: tuple[Path, str]) -> None:
    again = {"strategy": "ring", "optimizer_settings": {"lr": 0.002}, "lr_schedule": {"kind": "constant"}, "seed": 0}
    assert api.settings_of(parts[0], again).training.seed == 0
    assert api.settings_of(parts[0], {"lr": 0.002}).training.optimizer_settings == {"lr": 0.002}


def test_the_command_line_is_told_which_setting_of_the_optimizer_and_by_its_options(parts: tuple[Path, str]) -> None:
    refused = here("train", "--resume", parts[0], "--lr", 0.1, cwd=parts[0].parent, code=2).stderr
    assert "--resume cannot change lr of --opt (it is 0.002 in that run): it would change the weights" in refused
    assert "It may change --bad-lines, --epochs, --steps" in refused
