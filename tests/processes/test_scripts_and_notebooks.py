"""A ring from a plain script without a `__main__` guard, from standard input, and from a notebook's kernel."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

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
        ]
    )
    NotebookClient(book, timeout=100, resources={"metadata": {"path": str(tmp_path)}}).execute()
    drawn = [each for each in book.cells[0].outputs if each.output_type == "display_data"]
    assert len(drawn) == 1
    assert '<progress value="2" max="2"' in drawn[0].data["text/html"]
    assert "done after step 2" in drawn[0].data["text/plain"]
    assert book.cells[1].outputs[0].data["text/plain"].startswith("done: ")
