"""`ringtmp compare`: which run was better and why, and where runs did not do the same."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from commands import here
from known_run import known_events
from ringtmp.metrics import events
from ringtmp.metrics.compare import Comparison, compare
from ringtmp.metrics.fold_events import parts_of
from ringtmp.metrics.history import history_of
from ringtmp.metrics.summary import Summary, of_parts


def changed(speed: float = 1.0, accuracy: float = 0.9, strategy: str = "ring", sent: float = 1.0) -> list[events.Event]:
    """The known run, `speed` times as fast, with other bytes and another score."""
    found: list[events.Event] = []
    for event in known_events():
        if isinstance(event, events.RunStarted):
            ring = {**event.config["ring"], "strategy": strategy}
            event = msgspec.structs.replace(event, config={**event.config, "ring": ring})
        elif isinstance(event, events.StepDone):
            event = msgspec.structs.replace(event, at=event.at / speed, wall_s=event.wall_s / speed)
        elif isinstance(event, events.NodeStep):
            event = msgspec.structs.replace(event, sent_bytes=int(event.sent_bytes * sent))
        elif isinstance(event, events.Evaluated):
            event = msgspec.structs.replace(event, at=event.at / speed, accuracy=accuracy)
        elif isinstance(event, events.RunEnded):
            event = msgspec.structs.replace(event, at=event.at / speed, weights_sha256=f"{accuracy}")
        found.append(event)
    return found


def of(*runs: list[events.Event]) -> Comparison:
    found = []
    for number, each in enumerate(runs):
        parts = parts_of(each)
        found.append((f"runs/{'abc'[number]}", of_parts(parts, "x"), history_of(parts)))
    return compare(found)


def test_each_number_has_its_best_run_and_the_verdict_says_why() -> None:
    made = of(changed(), changed(speed=2.0, accuracy=0.8, strategy="ps", sent=3.0))
    assert made.runs == ("a", "b")
    best = {each.name: each.best for each in made.measures}
    assert best == {
        "accuracy": 0, "test loss": None, "training loss": None, "time": 1, "time to test loss 0.5": 1, "step": 1,
        "samples per second": 1, "idle": None, "bytes": 0, "energy": 0,
    }  # fmt: skip
    values = {each.name: each.values for each in made.measures}
    assert values["time"] == (7.0, 3.5)
    assert values["bytes"] == (4500.0, 13500.0)
    assert values["idle"] == (0.375, 0.375)
    assert made.verdict[:3] == (
        "a learned better: accuracy 90.0% against 80.0% (b)",
        "b was faster: 3.5 s against 7.0 s (a)",
        "a sent less: 4.4 KiB against 13.2 KiB (b)",
    )
    assert made.differences == ()


def test_equal_weights_are_said_and_unlike_work_too() -> None:
    same = of(changed(), changed(speed=1.001))
    assert same.verdict == ("all ended with the same weights, bit for bit",)
    started, *rest = changed()
    assert isinstance(started, events.RunStarted)
    other = msgspec.structs.replace(started, facts={**started.facts, "batch_size": 64})
    cut = [other, *[each for each in rest if not isinstance(each, events.RunEnded | events.NodeEnded)]]
    assert of(changed(), cut).differences == ("batch size: 16, 64", "outcome: done, unfinished")


def interrupted(stream: list[events.Event]) -> list[events.Event]:
    """Two of its three steps."""
    done = [each for each in stream if not (isinstance(each, events.StepDone | events.NodeStep) and each.step == 2)]
    done = [each for each in done if not isinstance(each, events.Evaluated | events.RunEnded)]
    return [*done, events.RunEnded(4.0, 2, "interrupted", None)]


def test_a_run_that_did_not_finish_is_never_called_better_and_that_is_said_first() -> None:
    made = of(changed(), interrupted(changed(speed=4.0, sent=0.1)))
    assert made.verdict == (
        "b was not finished (interrupted) after 2 steps: its numbers are shown, and it is not called better or worse",
        "so no run is called better",
    )
    assert [each.best for each in made.measures] == [None] * len(made.measures)
    assert {each.name: each.texts[1] for each in made.measures}["step"] == "500.0 ms", "it is shown all the same"
    three = of(changed(), interrupted(changed(speed=4.0)), changed(speed=2.0))
    assert three.verdict[0].startswith("b was not finished")
    assert three.verdict[1:] == (
        "a and c ended with the same weights, bit for bit",
        "c was faster: 3.5 s against 7.0 s (a)",
    )
    assert {each.name: each.best for each in three.measures}["time"] == 2
    going_on = of(changed(), [each for each in changed() if not isinstance(each, events.RunEnded)])
    assert going_on.verdict[0].startswith("b is still going on, or was cut off, after 3 steps")


def test_runs_of_other_work_are_compared_by_their_pace_alone() -> None:
    short = [each for each in interrupted(changed(speed=4.0)) if not isinstance(each, events.RunEnded)]
    made = of(changed(), [*short, events.RunEnded(4.0, 2, "done", "cd" * 32)])
    assert (
        made.verdict[0] == "the runs did not do the same work: time, bytes and energy are not held against each other"
    )
    assert made.verdict[-1] == "b was faster (samples per second): 32 against 8 (a)"
    assert {each.name: each.best for each in made.measures if each.name in ("time", "bytes", "energy")} == {
        "time": None, "bytes": None, "energy": None,
    }  # fmt: skip


def test_what_a_run_lacks_is_left_empty() -> None:
    tested = changed()
    untested = [each for each in tested if not isinstance(each, events.Evaluated)]
    made = of(tested, untested)
    assert {each.name: each.texts for each in made.measures}["accuracy"] == ("90.0%", "")
    assert "time to test loss 0.5" not in {each.name for each in made.measures}


def written(folder: Path, stream: list[events.Event]) -> Path:
    folder.mkdir()
    (folder / "events.jsonl").write_bytes(b"".join(events.encode(each) + b"\n" for each in stream))
    return folder


def test_the_command_prints_a_table_or_json_and_refuses_what_is_no_comparison(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", changed()), written(tmp_path / "b", changed(speed=2.0))
    out = here("compare", a, b, cwd=tmp_path).stdout
    assert "3.5 s *" in out
    assert "b was faster: 3.5 s against 7.0 s (a)" in out
    c = written(tmp_path / "c", interrupted(changed(speed=4.0)))
    warned = here("compare", a, c, cwd=tmp_path).stdout
    assert warned.startswith("not the same in all runs")
    assert "outcome: done, interrupted" in warned
    assert "faster" not in warned
    assert "*" not in warned
    made = json.loads(here("compare", a, b, "--json", cwd=tmp_path).stdout)
    assert made["measures"][0] == {
        "name": "accuracy", "better": "higher", "values": [0.9, 0.9], "texts": ["90.0%", "90.0%"], "best": None,
        "note": "on the test part",
    }  # fmt: skip
    for wrong, says in (
        ((a,), "compare needs two runs or more"),
        ((a, tmp_path / "a/."), "one run is named twice"),
        ((a, tmp_path), "is not a run directory"),
        ((a, written(tmp_path / "empty", [])), "was never started"),
    ):
        assert says in here("compare", *wrong, cwd=tmp_path, code=2).stderr


def test_three_runs_are_compared_at_once() -> None:
    made = of(changed(), changed(speed=2.0), changed(speed=4.0))
    assert {each.name: each.best for each in made.measures}["time"] == 2
    assert "c was faster: 1.8 s against 7.0 s (a) and 3.5 s (b)" in made.verdict


def test_a_summary_without_nodes_has_no_idle_time() -> None:
    started = changed()[0]
    parts = parts_of([started])
    summary: Summary = of_parts(parts, "x")
    made = compare([("a", summary, history_of(parts)), ("b", summary, history_of(parts))])
    assert "idle" not in {each.name for each in made.measures}
