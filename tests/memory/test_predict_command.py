"""`ringtmp predict`: files of arrays in, classes or files of arrays out; what the model cannot take is told by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringtmp import Ring, UsageError
from ringtmp.cli import ringtmp
from ringtmp.run import evaluate_predict_generate


class Chat(nn.Module):
    """As a language model of transformers is called, and what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = torch.tanh(self.embed(input_ids)) * attention_mask[:, :, None]
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "hidden": hidden}


IDS = np.random.default_rng(0).integers(0, 9, (16, 4))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    ids = torch.from_numpy(IDS)
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    folder = tmp_path_factory.mktemp("chat") / "run"
    return Ring(nodes=1, progress=False).fit(Chat(), data, steps=2, batch_size=8, run_dir=folder)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    data = torch.randn(16, 6), torch.arange(16) % 3
    folder = tmp_path_factory.mktemp("numbers") / "run"
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return Ring(nodes=1, progress=False).fit(model, data, steps=2, batch_size=8, run_dir=folder)


def predict(result: Any, *words: Any) -> None:
    ringtmp.main(["predict", str(result.run_dir), *map(str, words)], standalone_mode=False)


def test_arrays_named_like_the_inputs_and_logits_of_several_outputs(
    chat: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"attention_mask": np.ones_like(IDS[:3], dtype=np.int32), "input_ids": IDS[:3]}  # in another order and type
    np.savez(tmp_path / "x.npz", **given)
    expected = chat.model(
        input_ids=torch.from_numpy(IDS[:3]), attention_mask=torch.ones(3, 4).long(), labels=torch.zeros(3, 4).long()
    )
    predict(chat, tmp_path / "x.npz")
    lines = [[int(each) for each in line.split()] for line in capsys.readouterr().out.splitlines()]
    assert lines == expected["logits"].argmax(-1).tolist()
    predict(chat, tmp_path / "x.npz", "--out", tmp_path / "y.npy")
    assert np.array_equal(np.load(tmp_path / "y.npy"), expected["logits"].detach().numpy())
    predict(chat, tmp_path / "x.npz", "--out", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        assert sorted(found.files) == ["hidden", "logits"]
        assert np.array_equal(found["hidden"], expected["hidden"].detach().numpy())


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"input_ids": IDS}, "x.npz lacks 'attention_mask'"),
        ({"input_ids": IDS, "mask": IDS}, "x.npz lacks 'attention_mask' and has 'mask'"),
        ({"inputs": IDS}, "lacks 'input_ids', 'attention_mask' and has 'inputs'"),
        (
            {"input_ids": np.where(np.arange(64).reshape(16, 4) == 50, 9, IDS), "attention_mask": np.ones_like(IDS)},
            r"sample 12 of the input has 9 at position 2 of input_ids, and the model's embedding has 9 rows, for 0 to 8",
        ),
        (
            {"input_ids": np.where(np.arange(64).reshape(16, 4) == 4, -1, IDS), "attention_mask": np.ones_like(IDS)},
            r"sample 1 of the input has -1 at position 0 of input_ids",
        ),
    ],
)
def test_what_the_model_cannot_take_is_told(arrays: dict[str, Any], says: str, chat: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UsageError) as refused:
        predict(chat, tmp_path / "x.npz")
    assert says in str(refused.value)


def test_float64_is_converted_from_files_and_from_python(numbers: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(5, 6))
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", inputs=x, targets=x)
    expected = Ring(nodes=1).predict(numbers.run_dir, torch.from_numpy(x).float())
    for name in ("x.npy", "x.npz"):
        predict(numbers, tmp_path / name, "--out", tmp_path / "y")
        assert np.array_equal(np.load(tmp_path / "y.npy"), expected.numpy())
    assert torch.equal(Ring(nodes=1).predict(numbers.run_dir, torch.from_numpy(x)), expected)
    np.savez(tmp_path / "other.npz", x=x)
    with pytest.raises(UsageError, match="has no array called inputs; it has x"):
        predict(numbers, tmp_path / "other.npz")
    np.save(tmp_path / "whole.npy", x.astype(np.int64))
    with pytest.raises(UsageError, match="holds int64 numbers, but the model was built for float32"):
        predict(numbers, tmp_path / "whole.npy")


class Pair(nn.Module):
    """Two tensors, neither of which is called logits, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        given = self.up(x)
        return {"mean": given, "spread": given.exp(), "loss": given.square().mean()}


def test_several_outputs_without_logits_are_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 6)
    result = Ring(nodes=1, progress=False).fit(
        Pair(), (x, x), steps=2, batch_size=8, run_dir=tmp_path / "run", loss=lambda given, targets: given["loss"]
    )
    np.save(tmp_path / "x.npy", x.numpy())
    predict(result, tmp_path / "x.npy", "--out", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        assert sorted(found.files) == ["mean", "spread"]
    monkeypatch.setattr(evaluate_predict_generate, "predict", None)  # nobody asks for predictions
    for words in ((), ("--out", tmp_path / "y.npy")):
        with pytest.raises(UsageError, match="returns mean, spread: write them all to a file with --out"):
            predict(result, tmp_path / "x.npy", *words)
