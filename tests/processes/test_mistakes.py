"""What a user gets wrong in the first hour: one sentence that says what to do, exit 2, and nothing started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from commands import here
from ringtmp import Ring
from ringtmp.data.tables_and_streams import Table, from_python
from ringtmp.errors import UsageError
from ringtmp.runtime.losses import LabelRange, Score, check_loss, mse
from ringtmp.runtime.run_directory import LayerIndex
from ringtmp.wire.messages import Crossing

MINE = """
from torch import nn

def build(width=8, depth=1):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))

def needy(width):
    return build(width)

def broken():
    raise KeyError("no such key")
"""


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--set wdith=3", "unknown setting of mlp 'wdith': did you mean 'width'?"),
        ("--model mine.py:build --set wdith=3", "unknown setting of mine.py:build 'wdith': did you mean 'width'?"),
        ("--model mine.py:needy", "needs a value for width: give it with --set width=VALUE"),
        ("--model mine.py:broken", "model 'mine.py:broken' raised KeyError: 'no such key' (mine.py, line 11)"),
        ("--model mine.py", "needs the name of a function: write --model mine.py:build; it has build, needy, broken"),
        ("--model gone.py", "no file gone.py"),
        ("--data mine.py", "write --data mine.py:build"),
        ("--data table.npz", "unknown data 'table.npz': write --data npz:table.npz"),
        (
            "--data csv:t.csv",
            "write a function that returns (inputs, targets) and give --data FILE.py:NAME, or save npz:FILE",
        ),
        ("--optimizer adamW", "did you mean 'adamw'?"),
        ("--stream-keep flash", "unknown stream-keep 'flash': choose from disk, memory, none"),
        (
            "--schedule zerobubble",
            "unknown schedule 'zerobubble': did you mean 'zero-bubble'? choose from 1f1b, auto, gpipe,",
        ),
        ("--learning-rate 0.1", "no option --learning-rate: did you mean --lr?"),
        ("--momentum 0.9", "did you mean --opt momentum=…?"),
        ("--nodez 3", "no option --nodez: did you mean --nodes?"),
        ("run.toml --steps 4 --epochs 1", "give --epochs or --steps, not both"),
    ],
)
def test_a_mistake_gets_one_sentence_that_says_what_to_do(tmp_path: Path, args: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "run.toml").write_text("[training]\nepochs = 2\n")
    done = here("train", "--nodes", "1", *args.split(), cwd=tmp_path, code=2)
    assert says in done.stderr.replace(str(tmp_path) + "/", "")
    assert len(done.stderr.strip().splitlines()) == 1


def test_steps_on_the_command_line_take_the_place_of_epochs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text("[training]\nepochs = 2\n")
    done = here("train", "run.toml", "--steps", 2, "--nodes", 1, "--run-dir", "run", cwd=tmp_path)
    assert ", 2 steps in" in done.stdout
    monkeypatch.setenv("RINGTMP_TRAIN_EPOCHS", "3")
    done = here("train", "--steps", 3, "--nodes", 1, "--run-dir", "again", cwd=tmp_path)
    assert ", 3 steps in" in done.stdout


def test_help_has_its_options_in_groups(tmp_path: Path) -> None:
    text = here("train", "--help", cwd=tmp_path).stdout
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:3] == ["Model and data:", "Training:", "Nodes:"]
    assert text.index("--lr FLOAT") > text.index("Training:")
    assert text.index("--cuts") > text.index("leave these to the plan")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"test": None}, "fit has no argument 'test': did you mean test_data?"),
        ({"bacth_size": 3}, "did you mean batch_size?"),
        ({"lr": 0.1}, r'lr belongs to the optimizer: write optimizer=\("adam", {"lr": 0.1}\)'),
        ({"dashboard": True}, r"give fit a run_dir, and in a terminal type ringtmp watch RUN_DIR"),
        ({"nodes": 4}, r"nodes is an argument of Ring: write Ring\(nodes=...\).fit\(...\)"),
        ({"test_data": (torch.zeros(1, 1), torch.zeros(1))}, "digits already includes test data"),
    ],
)
def test_an_argument_fit_does_not_take_gets_the_one_that_was_meant(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Ring(nodes=1).fit("mlp", "digits", **arguments)  # type: ignore[arg-type]


def test_resuming_with_an_unknown_setting_names_the_nearest(tmp_path: Path) -> None:
    here("train", "--steps", 2, "--nodes", 1, "--run-dir", "run", "--quiet", cwd=tmp_path)
    with pytest.raises(UsageError, match="unknown setting to change on resume 'epohcs': did you mean 'epochs'"):
        Ring(nodes=1).resume(tmp_path / "run", epohcs=3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"epochs": 1.5}, "epochs= must be a whole number, not a number with a fraction"),
        ({"optimizer": torch.optim.AdamW}, r'write optimizer=\("adamw", {"lr": 0.001}\)'),
        ({"optimizer": ("adam", 0.1)}, r'write optimizer=\("adam", {"lr": 0.001}\)'),
        ({"lr_schedule": 3}, "lr_schedule is text such as"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_before_the_start(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Ring(nodes=1).fit("mlp", "digits", **arguments)


def test_inputs_and_targets_apart_and_a_number_as_text_are_refused() -> None:
    with pytest.raises(UsageError, match="give inputs and targets as one pair"):
        Ring(nodes=1).fit("mlp", torch.zeros(2, 2), torch.zeros(2))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2, 2), torch.zeros(2)))
    with pytest.raises(UsageError, match=r"test data and the rest go by name: fit\(model, train_data, test_data=...\)"):
        Ring(nodes=1).fit("mlp", loader, loader)
    with pytest.raises(UsageError, match="nodes= must be a whole number, not text"):
        Ring(nodes="3").fit("mlp", "digits")  # type: ignore[arg-type]


def test_other_data_on_resume_is_said_and_the_run_is_no_longer_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(64, 4), torch.randint(3, (64,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    first = Ring(nodes=1).fit(model, (inputs, labels), epochs=1, run_dir=tmp_path / "run")
    same = Ring(nodes=1).resume(tmp_path / "run", (inputs, labels), epochs=2)
    assert (first.summary.exactness, same.summary.exactness, same.summary.warnings) == ("bits", "bits", ())
    other = Ring(nodes=1).resume(tmp_path / "run", (inputs * 100, labels), epochs=3)
    assert other.summary.exactness == "stream"
    assert "is not what it was before step 4" in other.summary.warnings[0]
    assert Ring(nodes=1).resume(tmp_path / "run", (inputs * 100, labels), epochs=4).summary.exactness == "stream"


def test_numpy_arrays_are_data_and_a_module_with_its_own_forward_is_told_why_it_is_not_cut() -> None:
    source = from_python((np.zeros((4, 3)), np.array([0, 1, 2, 0])))
    assert isinstance(source, Table)
    assert source.take(torch.tensor([1]))[0].dtype == torch.float32
    with pytest.raises(
        UsageError, match="the model has 1. This module could not be cut, because it has only one operator"
    ):
        Ring(nodes=3).fit(nn.Linear(3, 3), (torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)), batch_size=8)


def test_targets_that_would_be_broadcast_are_refused() -> None:
    with pytest.raises(UsageError, match=r"they are \(4, 1\) and \(4,\): reshape the targets"):
        check_loss(mse, "mse", torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(UsageError, match=r"make them whole numbers \(targets.long\(\)\)"):
        check_loss(mse, "mse", torch.zeros(4, 3), torch.zeros(4))


# -- labels and shapes ------------------------------------------------------------------------------------------------


def _fit(labels: torch.Tensor, tmp_path: Path, outputs: int = 3, **options: object) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, outputs))
    inputs = torch.randn(len(labels), 4)
    Ring(nodes=1).fit(model, (inputs, labels), batch_size=4, epochs=1, run_dir=tmp_path / "run", **options)  # type: ignore[arg-type]


def test_a_label_out_of_range_is_named_with_its_sample_and_the_outputs(tmp_path: Path) -> None:
    labels = torch.zeros(40, dtype=torch.long)
    labels[37] = 7
    with pytest.raises(
        UsageError, match=r"sample 37 of given has label 7, and the model has 3 outputs, for labels 0 to 2"
    ):
        _fit(labels, tmp_path)


def test_a_label_out_of_range_in_a_stream_and_in_the_test_part_is_named_too(tmp_path: Path) -> None:
    good, bad = torch.zeros(4, dtype=torch.long), torch.tensor([0, 1, 9, 0])
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    batches = [(torch.randn(4, 4), good), (torch.randn(4, 4), bad)]
    with pytest.raises(UsageError, match="sample 2 of the batch of step 2 has label 9"):
        Ring(nodes=1).fit(model, batches, epochs=1, microbatches=2, run_dir=tmp_path / "a")
    with pytest.raises(UsageError, match="sample 2 of the test part of given has label 9"):
        Ring(nodes=1).fit(model, batches[0], test_data=batches[1], batch_size=4, epochs=1, run_dir=tmp_path / "b")


def test_labels_are_counted_along_the_dimension_of_the_classes() -> None:
    pictures = torch.zeros(2, 3, 4, 5)
    pictures[:, 1] = 1.0
    score = Score()
    targets = torch.ones(2, 4, 5, dtype=torch.long)
    targets[0, 0] = -100
    score.add(0.5, pictures, targets)
    assert (score.right, score.guesses) == (35, 35), "what the loss ignores is no guess"
    LabelRange.of("cross_entropy", (2, 3, 4, 5)).check(targets, "here")
    with pytest.raises(UsageError, match="sample 1 of here has label 3"):
        LabelRange.of("cross_entropy", (2, 3, 4, 5)).check(torch.tensor([[[2]], [[3]]]), "here")
    with pytest.raises(UsageError, match=r"sample 0 of here has label -1: labels are 0 to 2 \(-100 is ignored\)"):
        LabelRange.of("cross_entropy", (2, 3)).check(torch.tensor([-1, 0]), "here")


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        ((8, 8), torch.float32, "has shape 8x8, but the model was built for 1x8x8: .* add it, as in x\\[:, None\\]"),
        ((1, 1, 8, 8), torch.float32, r"take it out, as in x.squeeze\(1\)"),
        ((1, 8, 9), torch.float32, "has shape 1x8x9, but the model was built for 1x8x8"),
        ((1, 8, 8), torch.int64, "holds int64 numbers, but the model was built for float32"),
    ],
)
def test_inputs_of_another_shape_are_refused_by_it(shape: tuple[int, ...], dtype: torch.dtype, says: str) -> None:
    index = LayerIndex("run", (), (), inputs=(Crossing("float32", (1, 8, 8), True),))
    with pytest.raises(UsageError, match=says):
        index.check_inputs(torch.zeros(3, *shape, dtype=dtype), "the input")
    index.check_inputs(torch.zeros(3, 1, 8, 8), "the input")


def test_predict_and_evaluate_refuse_inputs_of_another_shape(tmp_path: Path) -> None:
    here("train", "--model", "convnet", "--steps", 2, "--nodes", 1, "--run-dir", "run", "--quiet", cwd=tmp_path)
    np.save(tmp_path / "x.npy", np.zeros((3, 8, 8), np.float32))
    assert "misses a dimension of size 1" in here("predict", "run", "x.npy", cwd=tmp_path, code=2).stderr
    said = here("evaluate", "run", "--data", "random:64x10", cwd=tmp_path, code=2).stderr
    assert said == "ringtmp: a sample of random:64x10 has shape 64, but the model was built for 1x8x8\n"
