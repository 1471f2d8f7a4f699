"""What a run gives back: the user's own class, layers that print what they are, a table, a history; and who looks on."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import ringtmp
from oracle import state_sha256
from ringtmp import Result, Ring, Watcher, api
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics.events import Evaluated, StepDone
from ringtmp.model.to_module import PortableLayer
from ringtmp.run.notebook_bar import Drawing, NotebookBar
from ringtmp.run.progress import Bar, Several, Telling, in_notebook, watching
from ringtmp.watchers.functions import Functions
from test_training_loop import blobs, settings, stack, train


class Net(nn.Module):
    """One layer of its own, with a buffer that is in no state_dict."""

    seen: torch.Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        if self.training:
            self.seen += x.detach().mean(0)
        result: torch.Tensor = self.head(x)
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def fitted(folder: Path, model: Any, **arguments: Any) -> Result:
    return Ring(nodes=1, progress=False).fit(
        model, blobs(), run_dir=folder, batch_size=16, microbatches=4, steps=4, **arguments
    )


# -- the model ----------------------------------------------------------------------------------------------------------


def test_the_model_is_of_the_users_own_class_trained_and_ready_to_use(tmp_path: Path) -> None:
    torch.manual_seed(1)
    mine = Net()
    before = state_sha256(mine)
    result = fitted(tmp_path / "run", mine)
    model = result.model
    assert type(model) is Net
    assert not any(each.training for each in model.modules())
    assert state_sha256(mine) == before
    assert not model.first.weight.equal(mine.first.weight)
    assert model.seen.abs().sum() > 0  # as it was trained, although no state_dict has it
    inputs = blobs()[0]
    assert model(inputs).equal(Ring(nodes=1).predict(tmp_path / "run", inputs))
    assert state_sha256(model) == result.summary.weights_sha256


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        (stack(), [nn.Linear, nn.ReLU, nn.Linear, nn.BatchNorm1d, nn.Dropout, nn.Linear]),
        ([nn.Linear(6, 16), Block(), nn.Linear(16, 3)], [nn.Linear, Block, nn.Linear]),
        ([("in", nn.Linear(6, 16)), ("body.a", Block()), ("out", nn.Linear(16, 3))], [nn.Linear, nn.Sequential, nn.Linear]),
        (lambda: nn.Sequential(nn.Linear(6, 16), Block(), nn.Linear(16, 3)), [nn.Linear, Block, nn.Linear]),
        (lambda: iter([nn.Linear(6, 16), Block(), nn.Linear(16, 3)]), [nn.Linear, Block, nn.Linear]),
    ],
    ids=["sequential", "list", "named", "function", "function of an iterator"],
)  # fmt: skip
def test_layers_are_of_the_classes_they_were_given_as(source: Any, kinds: list[type], tmp_path: Path) -> None:
    result = fitted(tmp_path / "run", source)
    assert [type(each) for each in result.model.children()] == kinds
    assert state_sha256(result.model) == result.summary.weights_sha256


def test_a_function_that_makes_the_users_module_gives_that_class(tmp_path: Path) -> None:
    result = fitted(tmp_path / "run", Net)
    state = torch.get_rng_state()
    assert type(result.model) is Net
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("listed", [False, True])
def test_the_users_own_modules_are_left_in_the_mode_they_were_in(listed: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 16), Block().eval(), nn.Linear(16, 3))
    before = [each.training for each in model.modules()]
    assert len(set(before)) == 2
    fitted(tmp_path / "run", [("a", model[0]), model[1], model[2]] if listed else model)
    assert [each.training for each in model.modules()] == before


def test_a_resumed_run_has_the_class_it_is_given_and_else_modules_that_print_what_they_are(tmp_path: Path) -> None:
    first = fitted(tmp_path / "run", Net()).model
    ring = Ring(nodes=1, progress=False)
    result = ring.resume(tmp_path / "run", blobs(), model=Net(), steps=6)
    assert type(result.model) is Net
    assert not result.model.head.weight.equal(first.head.weight)
    without = Result(str(tmp_path / "run")).model
    x = blobs()[0]
    assert without(x).equal(result.model(x))
    assert not without.training
    text = str(without)
    assert "PortableModel" in text
    assert re.search(
        r"\n +seen 8\n +cell first: linear.*\n +cell norm: batch_norm, relu\n +cell head: detach, mean, add, l", text
    )
    assert "(first): Tensors(weight 8x6, bias 8)" in text
    with pytest.raises(UsageError, match=r"the Net given is not what .* trained: .*size mismatch for first.weight"):
        _ = Result(tmp_path / "run", Net(width=9)).model
    with pytest.raises(UsageError, match=r"the Sequential given is not what .* trained: .*Missing key"):
        _ = Result(tmp_path / "run", nn.Sequential(nn.Linear(6, 3))).model


def test_a_named_model_is_of_its_class_after_a_resumption_too(tmp_path: Path) -> None:
    ring = Ring(nodes=1, progress=False)
    first = ring.fit("mlp", "digits", steps=2, run_dir=tmp_path / "run").model
    resumed = ring.resume(tmp_path / "run", steps=3).model
    assert [type(each) for each in resumed.modules()] == [type(each) for each in first.modules()]
    assert not any(isinstance(each, PortableLayer) for each in resumed.modules())


def test_a_module_that_cannot_be_copied_still_gives_a_model(tmp_path: Path) -> None:
    mine = nn.Sequential(nn.Linear(6, 3))
    mine.lock = threading.Lock()  # type: ignore[assignment]
    result = fitted(tmp_path / "run", mine)
    assert isinstance(result.model[0], PortableLayer)  # type: ignore[index]
    assert str(result.model[0]) == "PortableLayer(linear -> 3; weight 3x6, bias 3)"  # type: ignore[index]


def test_a_run_that_is_none_says_so(tmp_path: Path) -> None:
    assert repr(Result(tmp_path / "no")) == f"Result('{tmp_path}/no')"
    with pytest.raises(UsageError, match="is not a run directory"):
        print(Result(tmp_path / "no"))


def test_a_result_prints_as_a_short_table(tmp_path: Path) -> None:
    result = train(tmp_path / "run", 2, epochs=3)
    lines = str(result).splitlines()
    assert re.fullmatch(r"done: mlp on t, ring of 2 nodes, 12 steps in .*, .* samples/s, .* sent", lines[0])
    assert lines[1].split() == ["epoch", "step", "loss", "test", "loss", "accuracy", "rate", "time"]
    last = result.history.epochs[-1]
    assert [line.split()[:2] for line in lines[2:5]] == [["1", "4"], ["2", "8"], ["3", "12"]]
    assert f"{last.loss:.4f}" in lines[4]
    assert f"{last.test_loss:.4f}" in lines[4]
    assert f"{last.accuracy:.1%}" in lines[4]
    assert last.accuracy == result.summary.accuracy
    assert lines[5:] == [f"weights {result.summary.weights_sha256}", f"run {tmp_path / 'run'}"]


# -- freezing, another head, going on -----------------------------------------------------------------------------------


def test_freezing_and_another_head_as_the_docs_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very code of docs/api.md, with the data it speaks of."""
    text = (Path(__file__).parents[2] / "docs/api.md").read_text()
    (code,) = re.findall(r"<!-- tried by the tests -->\n```python\n(.*?)```", text, re.S)
    torch.manual_seed(0)
    inputs, targets = blobs()
    monkeypatch.chdir(tmp_path)
    ring = Ring(nodes=1, progress=False)
    names: dict[str, Any] = {"nn": nn, "ring": ring, "inputs": inputs, "targets": targets, "new_targets": targets % 2}
    exec(compile(code, "docs/api.md", "exec"), names)
    old, new = Result(names["result"].run_dir).model, names["tuned"].model
    assert old.get_parameter("4.weight").shape == (3, 16)
    for place in (0, 2):
        assert new[place].weight.equal(old.get_parameter(f"{place}.weight")), "a frozen layer has changed"
        assert not new[place].weight.requires_grad
    assert new[4].out_features == 2
    assert not new[4].weight.equal(names["model"][4].weight), "the new head was not trained"


@pytest.mark.parametrize(("strategy", "nodes"), [("ring", 3), ("allreduce", 3), ("ps", 4)])
def test_frozen_parameters_keep_their_bits_whatever_the_strategy(strategy: str, nodes: int, tmp_path: Path) -> None:
    """Three workers: the mean of three equal numbers is another number."""
    model = stack()
    for each in model[:3].parameters():
        each.requires_grad = False
    config = settings(nodes, "auto", optimizer="adamw", steps=3)
    config = msgspec.structs.replace(config, ring=msgspec.structs.replace(config.ring, strategy=strategy))
    data = tensors("t", *blobs()), None
    result = api.start(config, model, data, None, run_dir=tmp_path / "run", watcher=Watcher(), pool=InMemoryPool(nodes))
    trained, given = result.model.state_dict(), model.state_dict()
    same = {name for name in given if trained[name].equal(given[name])}
    assert same == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert not result.model[0].weight.requires_grad  # type: ignore[index]


# -- who looks on -------------------------------------------------------------------------------------------------------


class Noting(Watcher):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int | None, float]] = []
        self.tests: list[int] = []

    def step(self, done: int, total: int | None, event: StepDone, idle: float) -> None:
        self.steps.append((done, total, event.loss))

    def evaluated(self, event: Evaluated) -> None:
        self.tests.append(event.step)


def test_a_watcher_overrides_what_it_wants_and_a_function_is_told_every_step(tmp_path: Path) -> None:
    assert ringtmp.Watcher is Watcher
    noting, told = Noting(), []
    result = fitted(
        tmp_path / "run",
        stack(),
        test_data=blobs(),
        watcher=noting,
        on_step=lambda step, loss: told.append((step, loss)),
    )
    losses = [row.loss for row in result.history.steps]
    assert noting.steps == [(number, 4, loss) for number, loss in enumerate(losses, start=1)]
    assert told == list(enumerate(losses, start=1))
    assert noting.tests == [4]
    resumed = Noting()
    Ring(nodes=1).resume(
        tmp_path / "run", blobs(), steps=5, watcher=resumed, on_step=lambda step, loss: told.append((step, 0))
    )
    assert [each[0] for each in resumed.steps] == [5]
    assert told[-1] == (5, 0)


def test_what_cannot_look_on_is_refused_before_anything_starts(tmp_path: Path) -> None:
    class Half:
        def step(self, *given: object) -> None: ...

    for wrong, says in (
        ({"watcher": Noting}, r"watcher is the class Noting: pass an instance, Noting\(\)"),
        ({"watcher": Half()}, "a Half is not a watcher: it lacks phase, evaluated, warn, expect, tell"),
        ({"on_step": lambda step: None}, "on_step must accept the step number and its loss"),
        ({"on_step": 3}, "on_step is a int"),
    ):
        with pytest.raises(UsageError, match=says):
            fitted(tmp_path / "run", stack(), **wrong)
    assert not (tmp_path / "run").exists()


class Terminal(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def shown_to(progress: bool | None, watcher: Watcher | None = None) -> list[type]:
    with watching(progress, watcher, Functions()) as told:
        assert isinstance(told, Several)
        return [type(each) for each in told.watchers]


def test_progress_is_shown_on_a_terminal_and_in_a_notebook_and_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal(False))
    assert not in_notebook()
    assert (shown_to(None), shown_to(True), shown_to(False)) == ([Telling], [Bar], [Telling])
    assert (shown_to(None, Noting()), shown_to(True, Noting())) == ([Noting], [Noting, Bar])
    monkeypatch.setattr(sys, "stderr", Terminal(True))
    assert (shown_to(None), shown_to(False), shown_to(None, Noting())) == ([Bar], [Telling], [Noting])
    monkeypatch.setattr(sys, "stderr", Terminal(False))
    ipython = ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    ipython.get_ipython = lambda: SimpleNamespace(kernel=None)  # type: ignore[attr-defined]  # its terminal has none
    assert shown_to(None) == [Telling]
    notebook(monkeypatch)
    assert (shown_to(None), shown_to(False)) == ([NotebookBar], [Telling])


def test_a_notebook_has_one_output_with_a_bar_and_a_line_for_every_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn = notebook(monkeypatch)
    monkeypatch.setattr("ringtmp.run.notebook_bar._EVERY_S", -1.0)
    result = Ring(nodes=1).fit(stack(), blobs(), test_data=blobs(), epochs=2, microbatches=4, run_dir=tmp_path / "run")
    tests = [
        f"epoch {row.epoch}  step {row.step}  test loss {row.test_loss:.4f}  accuracy {row.accuracy:.1%}"
        for row in result.history.epochs
    ]
    assert [line for line in drawn[-1][0].splitlines() if line.startswith("epoch")] == tests
    assert drawn[-1][0].splitlines()[0] == f"[{'#' * 30}] done after step 4"
    assert '<progress value="4" max="4"' in drawn[-1][1]
    half = [text for text, _ in drawn if text.startswith(f"[{'#' * 15}{'.' * 15}] epoch 1  step 2 of 4  loss ")]
    assert half
    assert "&lt;b&gt;" in drawn_of("<b>")


def notebook(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a kernel of IPython has, as far as it is asked for; the list gets every state of the output, as text and HTML."""
    drawn: list[tuple[str, str]] = []

    def display(shown: Any, display_id: bool) -> Any:
        drawn.append((repr(shown), shown._repr_html_()))
        return SimpleNamespace(update=lambda again: drawn.append((repr(again), again._repr_html_())))

    ipython, displays = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    displays.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    return drawn


def drawn_of(line: str) -> str:
    drawing = Drawing()
    drawing.lines.append(line)
    return drawing._repr_html_()
