"""A run's numbers in other tools: CSV, JSON lines, TensorBoard, MLflow and functions say what the history says."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringtmp import CSVWatcher, JSONLinesWatcher, MLflowWatcher, Result, Ring, TensorBoardWatcher, UsageError, Watcher
from ringtmp.metrics.events import Evaluated, Regrouped, RunEnded, StepDone
from ringtmp.watchers.functions import Calling, Functions
from ringtmp.watchers.watcher_registry import watcher_named
from test_training_loop import blobs, stack


def fitted(folder: Path, watchers: Any = None, **more: Any) -> Result:
    settings = {"epochs": 2, "batch_size": 32, "microbatches": 4, "test_data": blobs(), **more}
    return Ring(nodes=1, progress=False).fit(stack(), blobs(), run_dir=folder, watcher=watchers, **settings)


def step(number: int, epoch: int = 0, loss: float = 1.0) -> StepDone:
    return StepDone(0.0, number, epoch, loss, 0.1, 8, 0.5)


def regrouped(at: int) -> Regrouped:
    return Regrouped(0.0, at, 2, "node 1 is gone", 2, 0.3, lost=(1,))


class Wanting(Watcher):
    """What only a subclass hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def started(self, run_dir: Path, event: Any) -> None:
        self.heard.append(("started", run_dir.name, event.first_step, event.config["training"]["batch_size"]))

    def ended(self, event: RunEnded) -> None:
        self.heard.append((event.outcome, event.step, event.weights_sha256))


def test_every_log_has_the_numbers_of_the_history(tmp_path: Path) -> None:
    wanting, told = Wanting(), []
    logs = [CSVWatcher(tmp_path / "a/steps.csv"), JSONLinesWatcher(tmp_path / "steps.jsonl"), wanting]
    ends: list[RunEnded] = []
    result = fitted(tmp_path / "run", logs, on_epoch=told.append, on_end=ends.append)
    rows = result.history.steps
    with (tmp_path / "a/steps.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(int(each["step"]), float(each["loss"]), each["run"]) for each in table] == [
        (row.step, row.loss, "run") for row in rows
    ]
    assert [each["accuracy"] for each in table] == ["" if row.accuracy is None else str(row.accuracy) for row in rows]
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [each["event"] for each in lines[:2] + lines[-2:]] == ["start", "step", "test", "end"]
    assert [each["loss"] for each in lines if each["event"] == "step"] == [row.loss for row in rows]
    assert lines[-1]["weights_sha256"] == result.summary.weights_sha256
    assert [(row.epoch, row.step, row.loss, row.test_loss, row.accuracy) for row in told] == [
        (row.epoch, row.step, row.loss, row.test_loss, row.accuracy) for row in result.history.epochs
    ]
    assert wanting.heard == [("started", "run", 0, 32), ("done", 4, result.summary.weights_sha256)]
    assert [each.outcome for each in ends] == ["done"]
    columns = result.history.columns()
    assert columns["loss"] == [row.loss for row in rows]
    assert result.history.columns("epochs")["epoch"] == [1, 2]
    with pytest.raises(UsageError, match="not of 'epoch'"):
        result.history.columns("epoch")  # type: ignore[arg-type]


def test_a_resumed_run_goes_on_in_its_file_and_other_columns_are_refused(tmp_path: Path) -> None:
    fitted(tmp_path / "run", CSVWatcher(tmp_path / "steps.csv"), epochs=1)
    again = CSVWatcher(tmp_path / "steps.csv")
    Ring(nodes=1, progress=False).resume(tmp_path / "run", blobs(), test_data=blobs(), epochs=2, watcher=[again])
    with (tmp_path / "steps.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        UsageError, match=r"mine.csv is there already and has other columns: remove it, or choose another"
    ):
        CSVWatcher(tmp_path / "mine.csv")
    with pytest.raises(UsageError, match=r"cannot (write|read) .*No such file|cannot (write|read) .*Not a directory"):
        CSVWatcher(tmp_path / "mine.csv/steps.csv")


class Full(io.StringIO):
    """A disk with room for two lines."""

    def write(self, text: str) -> int:
        if self.getvalue().count("\n") >= 2:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_log_that_fails_is_told_once_and_costs_the_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fitted(tmp_path / "run", JSONLinesWatcher(Full()))
    assert result.summary.outcome == "done"
    said = [line for line in capsys.readouterr().err.splitlines() if "takes no more" in line]
    assert len(said) == 1
    assert "No space left on device; training goes on without it" in said[0]


def test_a_loss_that_is_not_a_number_is_null_in_json() -> None:
    file = io.StringIO()
    JSONLinesWatcher(file).step(1, None, step(0, loss=float("nan")), 0.0)
    assert json.loads(file.getvalue())["loss"] is None


def test_an_epoch_is_told_once_without_a_test_and_again_after_a_loss() -> None:
    told: list[tuple[int, int, float]] = []
    lost: list[tuple[int, ...]] = []
    calling = Calling(
        Functions(on_epoch=lambda row: told.append((row.epoch, row.step, row.loss)), on_recovery=lambda e: lost.append(e.lost))
    )  # fmt: skip
    calling.step(1, 4, step(0, loss=1.0), 0.0)
    calling.step(2, 4, step(1, loss=3.0), 0.0)
    calling.recovered(regrouped(1))
    calling.step(2, 4, step(1, loss=2.0), 0.0)
    calling.step(3, 4, step(2, epoch=1, loss=5.0), 0.0)
    assert told == [(1, 2, 1.5)]
    calling.ended(RunEnded(0.0, 3, "done", None))
    assert told == [(1, 2, 1.5), (2, 3, 5.0)]
    assert lost == [(1,)]


def test_what_cannot_be_called_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for wrong, says in (
        ({"on_epoch": 3}, "on_epoch is a int: give a function of one row of the history"),
        ({"on_end": lambda: None}, "on_end must accept one event"),
        ({"on_recovery": lambda a, b: None}, "on_recovery must accept one event"),
    ):
        with pytest.raises(UsageError, match=says):
            fitted(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


def test_logs_by_name(tmp_path: Path) -> None:
    assert isinstance(watcher_named(f"csv:{tmp_path}/x.csv"), CSVWatcher)
    for wrong, says in (
        ("cvs:x", "unknown log 'cvs': did you mean 'csv'"),
        ("csv", "--log csv needs to know where: --log csv:FILE"),
    ):
        with pytest.raises(UsageError, match=says):
            watcher_named(wrong)


def test_tensorboard_shows_what_the_history_has_and_what_was_done_again_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard (the extra of that name)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watcher = TensorBoardWatcher(tmp_path / "board")
    result = fitted(tmp_path / "run", watcher)
    read = EventAccumulator(str(tmp_path / "board/run"))
    read.Reload()
    steps, tests = read.Scalars("train/loss"), read.Scalars("test/accuracy")
    assert [each.step for each in steps] == [row.step for row in result.history.steps]
    assert [each.value for each in steps] == pytest.approx([row.loss for row in result.history.steps])
    assert [each.step for each in tests] == [row.step for row in result.history.epochs]
    assert [each.value for each in tests] == pytest.approx([row.accuracy for row in result.history.epochs])
    lost = TensorBoardWatcher(tmp_path / "lost")
    lost.started(tmp_path / "run", SimpleNamespace(first_step=0, config={}))  # type: ignore[arg-type]
    for number in range(3):
        lost.step(number + 1, 4, step(number, loss=float(number)), 0.0)
    lost.recovered(regrouped(1))
    lost.step(2, 4, step(1, loss=9.0), 0.0)
    lost.ended(RunEnded(0.0, 2, "failed", None, "why"))
    read = EventAccumulator(str(tmp_path / "lost/run"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("train/loss")] == [(1, 0.0), (2, 9.0)]


def test_mlflow_is_asked_for_a_run_with_settings_numbers_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in with MLflow's calls; the next test has the real one, where it is installed."""
    asked: list[tuple[Any, ...]] = []

    class Client:
        def __init__(self, uri: str | None) -> None:
            asked.append(("at", uri))

        def get_experiment_by_name(self, name: str) -> None:
            asked.append(("experiment", name))

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, number: str, run_name: str) -> Any:
            asked.append(("run", number, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            asked.extend(("metric", name, value, at) for name, value, _, at in metrics)
            asked.extend(("param", *each) for each in params)

        def set_tag(self, run: str, name: str, value: str) -> None:
            asked.append(("tag", name, value))

        def set_terminated(self, run: str, status: str) -> None:
            asked.append(("end", status))

    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.MlflowClient, module.entities = Client, entities  # type: ignore[attr-defined]
    entities.Metric, entities.Param = lambda *each: each, lambda *each: each  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    result = fitted(tmp_path / "run", MLflowWatcher("digits", "file:x"))
    assert asked[:3] == [("at", "file:x"), ("experiment", "digits"), ("run", "7", "run")]
    assert ("param", "training.batch_size", "32") in asked
    assert [each[2:] for each in asked if each[:2] == ("metric", "loss")] == [
        (row.loss, row.step) for row in result.history.steps
    ]
    assert [each[3] for each in asked if each[:2] == ("metric", "accuracy")] == [2, 4]
    assert asked[-2:] == [("tag", "weights_sha256", result.summary.weights_sha256), ("end", "FINISHED")]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow-skinny (the extra mlflow)")
def test_mlflow_itself_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # what is installed without a database
    where = f"sqlite:///{tmp_path}/mlflow.db" if importlib.util.find_spec("sqlalchemy") else f"file:{tmp_path}/mlruns"
    result = fitted(tmp_path / "run", MLflowWatcher("digits", where))
    client: Any = MlflowClient(where)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["training.batch_size"] == "32"
    kept = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in kept] == [(row.step, row.loss) for row in result.history.steps]


def test_a_tool_that_is_not_installed_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.utils.tensorboard", "mlflow", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"pip install 'ringtmp\[tensorboard\]'"):
        TensorBoardWatcher("board")
    with pytest.raises(UsageError, match=r"pip install 'ringtmp\[mlflow\]'"):
        MLflowWatcher()


def test_a_test_that_follows_no_step_adds_no_row(tmp_path: Path) -> None:
    watcher = CSVWatcher(tmp_path / "steps.csv")
    watcher.evaluated(Evaluated(0.0, 0, 0, 10, 0.5, 0.9, None))
    watcher.ended(RunEnded(0.0, 0, "done", None))
    assert (tmp_path / "steps.csv").read_text().count("\n") == 1


def test_a_plot_shows_loss_and_accuracy_and_is_written_where_asked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra plots)")
    result = fitted(tmp_path / "run")
    figure = result.plot(tmp_path / "loss.png")
    assert figure._repr_png_().startswith(b"\x89PNG"), "a notebook shows it, though nobody imported pyplot"
    losses, scores = figure.axes
    assert list(losses.lines[0].get_ydata()) == [row.loss for row in result.history.steps]
    assert list(scores.lines[0].get_ydata()) == [row.accuracy for row in result.history.epochs]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="cannot write the plot to"):
        result.plot(tmp_path / "loss.what")
