"""A ring from a plain script without a `__main__` guard, from standard input, and from a notebook's kernel."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from ringtmp import Interrupted, Ring
from ringtmp.errors import UsageError

#: Everything at the top: were a node to import this file again, it would start rings without end.
PLAIN = """
import torch
from torch import nn
from ringtmp import Ring

print("read")
inputs = torch.randn(64, 6)
targets = inputs[:, :3].argmax(1)
result = Ring(nodes=2).fit(
    nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), DATA, steps=2, run_dir="run"
)
print(result.summary.nodes, result.summary.outcome)
"""


def run(folder: Path, *words: str, text: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, input=text, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_script_needs_no_guard_even_from_standard_input(tmp_path: Path) -> None:
    assert run(tmp_path, "-", text=PLAIN.replace("DATA", "(inputs, targets)")).split("\n")[:2] == ["read", "2 done"]


@pytest.mark.long  # the quick twin is above: torch's own workers are what is new
def test_nor_does_a_script_whose_dataloader_has_workers(tmp_path: Path) -> None:
    loader = "torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), 32, num_workers=2)"
    (tmp_path / "plain.py").write_text(PLAIN.replace("DATA", loader))
    said = run(tmp_path, "plain.py").splitlines()
    if sys.version_info < (3, 14) and sys.platform == "linux":  # there torch forks its workers
        assert said == ["read", "2 done"]
    else:
        assert said[-1] == "2 done"


@pytest.mark.parametrize(("step", "says"), [(2, "interrupted after step 2; the checkpoint is saved"), (0, "")])
def test_ctrl_c_shows_the_call_and_one_useful_line(tmp_path: Path, step: int, says: str) -> None:
    """In training, and where it cannot stop between two steps yet; either way nobody wants to see how a ring is made."""

    def press(number: int) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGINT)

    class Pressed(nn.Linear):
        """Read before the first step."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if step == 0:
                press(0)
            return super().forward(x)

    data = torch.randn(16, 6), torch.zeros(16, dtype=torch.long)
    with pytest.raises((Interrupted, KeyboardInterrupt)) as told:
        Ring(nodes=1, progress=False).fit(
            Pressed(6, 3),
            data,
            steps=4,
            batch_size=8,
            run_dir=tmp_path / "run",
            on_step=lambda number, loss: press(number),
        )
    assert told.type is (Interrupted if step else KeyboardInterrupt)
    assert says in str(told.value)
    frames = traceback.extract_tb(told.value.__traceback__)
    assert [Path(each.filename).name for each in frames] == [Path(__file__).name, "api.py"], "the call, and no more"
    assert told.value.__suppress_context__
    assert told.value.__cause__ is None


def test_a_mistake_shows_the_call_the_sentence_and_the_line_of_ones_own_where_it_went_wrong(tmp_path: Path) -> None:
    """In a notebook it was 157 lines of ours and of torch, for data of a wrong width."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # my line

    data = torch.randn(16, 5), torch.zeros(16, dtype=torch.long)
    with pytest.raises(UsageError, match="refuses a microbatch of shape") as told:
        Ring(nodes=1, progress=False).fit(Mine(), data, steps=1, batch_size=8, run_dir=tmp_path / "run")
    frames = traceback.extract_tb(told.value.__traceback__)
    assert [Path(each.filename).name for each in frames] == [Path(__file__).name, "api.py"], "the call, and no more"
    shown = "".join(traceback.format_exception(told.value))
    assert shown.count("Traceback") == 1
    assert "In your code: " in shown
    assert "in forward: return self.layer(x)  # my line" in shown


NOTEBOOK = importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel")


@pytest.mark.long  # the quick twin is in tests/memory/test_result.py, with a stand-in for the kernel
@pytest.mark.skipif(not NOTEBOOK, reason="needs nbclient and ipykernel (pip install nbclient ipykernel)")
def test_a_notebook_trains_a_ring_of_processes_and_shows_a_bar(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(PLAIN.replace("DATA", "(inputs, targets)")),
            nbformat.v4.new_code_cell("result"),
            nbformat.v4.new_code_cell("result.plot()"),
        ]
    )
    NotebookClient(book, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    drawn = [each for each in book.cells[0].outputs if each.output_type == "display_data"]
    assert len(drawn) == 1
    assert '<progress value="2" max="2"' in drawn[0].data["text/html"]
    assert "done after step 2" in drawn[0].data["text/plain"]
    assert book.cells[1].outputs[0].data["text/plain"].startswith("done: ")
    if importlib.util.find_spec("matplotlib"):
        assert "image/png" in book.cells[2].outputs[0].data
