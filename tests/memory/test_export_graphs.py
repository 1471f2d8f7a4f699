"""`ringtmp export --to model.onnx | model.pt2`: what the model computes, for any number of samples, without ringtmp."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ordinary_models import ResNet, TiedLanguageModel, UNet, tokens
from ringtmp import Ring, UsageError
from ringtmp.cli import ringtmp
from ringtmp.run import export_graphs
from ringtmp.run.export_run import export_weights
from test_export_weights import classes, trained, words

WITHIN = 1e-4


def onnx_outputs(path: Path, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    runtime: Any = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    found = session.run(names, {name: each.numpy() for name, each in inputs.items()})
    return {name: torch.from_numpy(each) for name, each in zip(names, found, strict=True)}


def needs_onnx() -> None:
    for each in export_graphs.PACKAGES:
        pytest.importorskip(each)


def test_a_program_predicts_with_any_number_of_samples_and_holds_no_pickle(tmp_path: Path) -> None:
    result = classes(tmp_path)
    done = result.export(tmp_path / "m.pt2")
    assert (done.difference, done.compared) == (0.0, "predictions of the program")
    again = torch.export.load(tmp_path / "m.pt2").module()
    for samples in (1, 2, 5):
        x = torch.randn(samples, 8)
        assert torch.equal(again(x), result.model(x))
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        for each in archive.infolist():
            assert "sample_inputs" not in each.filename or each.file_size == 0
            assert b'"use_pickle": true' not in archive.read(each) or not each.filename.endswith(".json")


def test_adapters_are_merged_and_their_operators_are_gone(tmp_path: Path) -> None:
    result = words(tmp_path, lora="r=2,alpha=6,on=qkv,up")
    done = result.export(tmp_path / "m.pt2", merge=True)
    assert done.difference is not None
    assert 0 < done.difference < WITHIN
    program = torch.export.load(tmp_path / "m.pt2")
    assert set(program.state_dict) == {
        name for name, _ in TiedLanguageModel(1, 0.0).named_parameters()
    }  # a tied weight is there once
    x = tokens(30, 12)(2)
    torch.testing.assert_close(program.module()(x), result.model(x), rtol=WITHIN, atol=WITHIN)


def test_onnx_is_the_model_for_any_number_of_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs_onnx()
    result = classes(tmp_path)
    to = tmp_path / "m.onnx"
    ringtmp.main(["export", str(tmp_path / "run"), "--to", str(to), "--json"], standalone_mode=False)
    said = json.loads(capsys.readouterr().out)
    assert said["difference"] < WITHIN
    assert said["compared"] == "predictions of ONNX Runtime"
    for samples in (1, 5):
        x = torch.randn(samples, 8)
        torch.testing.assert_close(onnx_outputs(to, input=x)["output"], result.model(x), rtol=WITHIN, atol=WITHIN)


class Named(nn.Module):
    """Takes names, gives names, and a loss from labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, ids: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embed(ids)) * weight[:, None, None])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_inputs_and_outputs_keep_their_names_and_nobody_needs_labels(tmp_path: Path) -> None:
    ids = torch.randint(0, 9, (16, 4))
    result = trained(Named(), {"ids": ids, "weight": torch.rand(16), "labels": ids}, tmp_path)
    result.export(tmp_path / "m.pt2")
    given = torch.export.load(tmp_path / "m.pt2").module()(ids=ids[:5], weight=torch.ones(5))
    assert list(given) == ["logits"]
    expected = result.model.head(torch.tanh(result.model.embed(ids[:5])))
    assert torch.equal(given["logits"], expected)
    if importlib.util.find_spec("onnxruntime"):
        result.export(tmp_path / "m.onnx")
        found = onnx_outputs(tmp_path / "m.onnx", ids=ids[:5], weight=torch.ones(5))
        torch.testing.assert_close(found["logits"], expected, rtol=WITHIN, atol=WITHIN)


class WithoutWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(self.linear(x).abs() + 1)


def test_an_operator_that_onnx_lacks_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    needs_onnx()
    trained(WithoutWords(), (torch.randn(16, 4), torch.randn(16, 4)), tmp_path)
    with pytest.raises(UsageError, match=r"ONNX has no way to say (aten|prims)\.lgamma\.default"):
        export_weights(tmp_path / "run", tmp_path / "m.onnx")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    assert export_weights(tmp_path / "run", tmp_path / "m.pt2").difference == 0.0


def test_without_the_packages_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes(tmp_path)
    monkeypatch.setattr(export_graphs, "PACKAGES", ("onnx_of_nobody", "torch"))
    with pytest.raises(UsageError, match=r"m\.onnx needs onnx_of_nobody: pip install 'ringtmp\[onnx\]'"):
        export_weights(tmp_path / "run", tmp_path / "m.onnx")


def test_weights_that_are_many_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_onnx()
    result = classes(tmp_path)
    monkeypatch.setattr(export_graphs, "_IN_ONE_FILE", 0)
    done = result.export(tmp_path / "m.onnx")
    assert [each.name for each in done.files] == ["m.onnx", "m.onnx.data"]
    x = torch.randn(3, 8)
    torch.testing.assert_close(onnx_outputs(tmp_path / "m.onnx", input=x)["output"], result.model(x))
    (tmp_path / "m.onnx").unlink()
    (tmp_path / "m.onnx.data").write_text("mine")
    with pytest.raises(
        UsageError, match=r"m\.onnx\.data exists already: choose another name, or replace it with --force"
    ):
        result.export(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
    assert (tmp_path / "m.onnx.data").read_text() == "mine"


# -- every kind of model; the quick tests above say the same of small ones ------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["mlp", "convnet", "resnet", "gpt"])
def test_the_zoo(name: str, tmp_path: Path) -> None:
    needs_onnx()
    data = "pysource" if name == "gpt" else "digits"
    result = Ring(nodes=1, progress=False).fit(name, data, steps=2, batch_size=4, run_dir=tmp_path / "run")
    _near(result, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", [ResNet, UNet])
def test_images(make: type[nn.Module], tmp_path: Path) -> None:
    needs_onnx()
    torch.manual_seed(0)
    unet = make is UNet
    targets = torch.randint(0, 2, (16, 16, 16)) if unet else torch.arange(16) % 10
    _near(trained(make(), (torch.randn(16, 1 if unet else 3, 16, 16), targets), tmp_path), tmp_path)


SMALL: dict[str, Any] = {"vocab_size": 40, "max_position_embeddings": 32}
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
IDS = torch.randint(0, 40, (16, 12), generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(16) % 3
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "GPT2LMHeadModel": (
        "GPT2Config", {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2},
        {"input_ids": IDS, "labels": IDS},
    ),
    "LlamaForCausalLM": (
        "LlamaConfig", {**SMALL, **SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS},
    ),
    "BertForSequenceClassification": (
        "BertConfig", {**SMALL, **SIZES, "num_labels": 3}, {"input_ids": IDS, "labels": CLASSES},
    ),
    "ViTForImageClassification": (
        "ViTConfig", {**SIZES, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3},
        {"pixel_values": torch.randn(16, 1, 8, 8), "labels": CLASSES},
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str, tmp_path: Path) -> None:
    needs_onnx()
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config, sizes, data = TRANSFORMERS[name]
    _near(trained(getattr(transformers, name)(getattr(transformers, config)(**sizes)), data, tmp_path), tmp_path)


def _near(result: Any, folder: Path) -> None:
    program = result.export(folder / "m.pt2")
    assert program.difference is not None
    assert program.difference < WITHIN
    done = result.export(folder / "m.onnx")
    assert done.difference is not None
    assert done.difference < WITHIN
