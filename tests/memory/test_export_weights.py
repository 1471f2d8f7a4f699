"""`ringtmp export`: files that are used without ringtmp, and give what the run predicts."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ordinary_models import TiedLanguageModel, tokens
from ringtmp import Ring
from ringtmp.cli import ringtmp
from ringtmp.errors import RingError, UsageError
from ringtmp.model.tensor_file import Described, TensorFile
from ringtmp.run import saved_model
from ringtmp.run.export_run import export_weights
from ringtmp.run.saved_model import SavedModel, largest_difference
from ringtmp.system.write_files_together import staged


def trained(model: nn.Module | str, data: Any, folder: Path, **more: Any) -> Any:
    return Ring(nodes=1, progress=False).fit(
        model, data, steps=2, batch_size=8, microbatches=2, run_dir=folder / "run", **more
    )


def words(folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    x = tokens(30, 12)(16)
    return trained(TiedLanguageModel(1, 0.0), (x, x), folder, loss=_loss, **more)


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def classes(folder: Path) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return trained(model, (torch.randn(16, 8), torch.arange(16) % 3), folder)


def test_what_is_no_number_in_both_is_alike_and_hides_no_other_difference() -> None:
    """A run that ended in nan is exported as it is."""
    nan, inf = float("nan"), float("inf")
    expected = [{"y": torch.tensor([nan, inf, 1.0])}]
    assert largest_difference(expected, [{"y": torch.tensor([nan, inf, 1.0])}], "x") == 0
    for other in ([0.0, inf, 1.0], [nan, -inf, 1.0], [nan, inf, 1.5], [nan, inf, nan]):
        with pytest.raises(RingError, match="more than rounding"):
            largest_difference(expected, [{"y": torch.tensor(other)}], "x")


def test_a_file_loads_into_the_plain_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = words(tmp_path)
    to = tmp_path / "out" / "model.safetensors"
    ringtmp.main(["export", str(tmp_path / "run"), "--to", str(to), "--json"], standalone_mode=False)
    said = json.loads(capsys.readouterr().out)
    assert said["difference"] == 0.0
    assert said["step"] == 2
    assert said["files"] == [str(to)]
    assert said["compared"] == "every tensor read back, and predictions"
    plain, x = TiedLanguageModel(1, 0.0), tokens(30, 12)(3)
    plain.load_state_dict(load_file(to))
    assert torch.equal(plain.eval()(x), result.model(x))


def test_adapters_alone_and_merged(tmp_path: Path) -> None:
    result = words(tmp_path, lora="r=2,alpha=6,on=qkv,up")
    x = tokens(30, 12)(3)
    alone = export_weights(tmp_path / "run", tmp_path / "adapters")
    assert alone.difference == 0.0
    names = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert set(names) == {
        f"base_model.model.blocks.0.{layer}.lora_{which}.weight" for layer in ("qkv", "up") for which in "AB"
    }
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 6.0, ["qkv", "up"])
    whole = result.export(tmp_path / "merged.safetensors", merge=True)
    assert whole.difference is not None
    assert 0 < whole.difference < 1e-4
    plain = TiedLanguageModel(1, 0.0)
    plain.load_state_dict(load_file(tmp_path / "merged.safetensors"))
    torch.testing.assert_close(plain.eval()(x), result.model(x), rtol=1e-4, atol=1e-5)


def test_what_was_trained_beside_adapters_goes_with_them(tmp_path: Path) -> None:
    words(tmp_path, lora="r=2,on=qkv", train="lora|norm1")
    export_weights(tmp_path / "run", tmp_path / "adapters")
    names = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert {"base_model.model.blocks.0.norm1.weight", "base_model.model.blocks.0.norm1.bias"} < set(names)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["blocks.0.norm1"]


def test_a_bias_that_was_trained_inside_an_adapted_layer_is_refused_by_name(tmp_path: Path) -> None:
    words(tmp_path, lora="r=2,on=qkv", train="lora|*.bias")
    with pytest.raises(UsageError, match=r"blocks\.0\.qkv\.bias was trained beside its adapter.* add --merge"):
        export_weights(tmp_path / "run", tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize(
    ("to", "merge", "says"),
    [
        ("model.bin", False, "ends in .safetensors, .onnx or .pt2, or a folder"),
        ("folder", False, "has no configuration of transformers"),
        ("m.safetensors", True, "has no adapters to merge"),
        ("taken.safetensors", False, "exists already: choose another name, or replace it with --force"),
        ("run", False, "is the run itself: choose another folder"),
        ("taken.safetensors/m.pt2", False, "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused(to: str, merge: bool, says: str, tmp_path: Path) -> None:
    classes(tmp_path)
    (tmp_path / "taken.safetensors").write_text("mine")
    with pytest.raises(UsageError) as refused:
        export_weights(tmp_path / "run", tmp_path / to, merge)
    assert says in str(refused.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "taken.safetensors"]
    assert (tmp_path / "taken.safetensors").read_text() == "mine"


def test_force_replaces_a_file(tmp_path: Path) -> None:
    result = classes(tmp_path)
    (tmp_path / "m.safetensors").write_text("mine")
    result.export(tmp_path / "m.safetensors", force=True)
    assert set(load_file(tmp_path / "m.safetensors")) == set(result.model.state_dict())


def test_an_export_that_fails_on_the_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders it made included; a file that was there stays as it was."""
    classes(tmp_path)
    kept = tmp_path / "kept.safetensors"
    kept.write_text("mine")
    monkeypatch.setattr(saved_model, "LARGEST_DIFFERENCE", -1.0)  # no prediction is near enough
    for to, force in ((tmp_path / "new" / "deep" / "m.safetensors", False), (kept, True)):
        with pytest.raises(RingError, match="gives other numbers than the run predicts"):
            export_weights(tmp_path / "run", to, force=force)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept.safetensors", "run"]
    assert kept.read_text() == "mine"


def test_predictions_are_compared_only_where_the_model_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes(tmp_path)
    monkeypatch.setattr(saved_model, "free_memory_bytes", lambda: 100)
    monkeypatch.setattr(SavedModel, "loaded", None)  # nobody asks for the whole model
    done = export_weights(tmp_path / "run", tmp_path / "m.safetensors")
    assert done.difference is None
    assert "every tensor read back; predictions not compared: the model takes" in done.compared


@pytest.mark.parametrize("force", [False, True])
def test_no_file_is_moved_before_all_names_are_known_to_be_free(force: bool, tmp_path: Path) -> None:
    """A folder is never replaced, a file with --force alone."""
    taken = tmp_path / "m.onnx.data"
    taken.mkdir() if force else taken.write_text("mine")
    writing = staged(tmp_path / "m.onnx", force, folder=False)
    aside = writing.__enter__()
    for name in ("a", "m.onnx", "m.onnx.data"):
        (aside / name).write_text("new")
    with pytest.raises(UsageError, match=r"m\.onnx\.data (exists already|is a folder)"):
        writing.__exit__(None, None, None)
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx.data"]
    assert force or taken.read_text() == "mine"


def test_a_folder_export_never_goes_into_the_run_itself(tmp_path: Path) -> None:
    words(tmp_path, lora="r=2,on=qkv")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="is the run itself: choose another folder"):
        export_weights(tmp_path / "run", tmp_path / "run", force=True)
    assert sorted(tmp_path.rglob("*")) == before


# -- the file itself ----------------------------------------------------------------------------------------------------


def test_a_file_written_tensor_by_tensor_in_any_order_reads_as_any_other(tmp_path: Path) -> None:
    tensors = {
        "flag": torch.tensor([True, False, True]),
        "wide": torch.arange(3, dtype=torch.int64),
        "half": torch.randn(2, 3).to(torch.bfloat16),
        "none": torch.empty(0, 4),
        "number": torch.tensor(2.5),
        "turned": torch.randn(4, 3).T,
    }
    described = {
        name: Described(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()
    }
    file = TensorFile(tmp_path / "m.safetensors", described)
    for name in reversed(tensors):
        file.put(name, tensors[name])
    file.close()
    file.check()
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("where", [b'"w"', b"F32", b"\0\0\x80?"])
def test_a_file_that_reads_back_otherwise_is_an_error(where: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    file = TensorFile(path, {"w": Described("float32", (2, 2))})
    file.put("w", torch.ones(2, 2))
    file.close()
    content = bytearray(path.read_bytes())
    assert struct.unpack("<Q", content[:8])[0] % 8 == 0
    content[content.index(where) + 1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RingError, match="read back"):
        file.check()


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt2", "m.onnx"])
def test_a_disk_that_is_full_in_the_middle_leaves_nothing_and_is_told(name: str, tmp_path: Path) -> None:
    """By the limit on the size of a file (ulimit -f), which writes meet as they meet a full disk."""
    if name.endswith(".onnx"):
        for each in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(each)
    data = torch.ones(16, 4), torch.zeros(16, dtype=torch.long)
    trained(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4)), data, tmp_path)
    (tmp_path / "out").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(RingError, match="m.(safetensors|pt2|onnx)"):
            export_weights(tmp_path / "run", tmp_path / "out" / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "out").iterdir())
