"""`ringtmp export`: files that are used without ringtmp, and give what the run predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ordinary_models import TiedLanguageModel, tokens
from ringtmp import Ring
from ringtmp.cli import ringtmp
from ringtmp.errors import UsageError
from ringtmp.run.export_weights import export_weights


def trained(model: nn.Module, data: Any, folder: Path, **more: Any) -> Any:
    return Ring(nodes=1, progress=False).fit(
        model, data, steps=2, batch_size=8, microbatches=2, run_dir=folder / "run", **more
    )


def words(folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    x = tokens(30, 12)(16)
    return trained(TiedLanguageModel(1, 0.0), (x, x), folder, loss=_loss, **more)


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def test_a_file_loads_into_the_plain_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = words(tmp_path)
    to = tmp_path / "out" / "model.safetensors"
    ringtmp.main(["export", str(tmp_path / "run"), "--to", str(to), "--json"], standalone_mode=False)
    said = json.loads(capsys.readouterr().out)
    assert said["difference"] == 0.0
    assert said["step"] == 2
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
    whole = export_weights(tmp_path / "run", tmp_path / "merged.safetensors", merge=True)
    assert whole.difference is not None
    assert whole.difference < 1e-4
    plain = TiedLanguageModel(1, 0.0)
    plain.load_state_dict(load_file(tmp_path / "merged.safetensors"))
    torch.testing.assert_close(plain.eval()(x), result.model(x), rtol=1e-4, atol=1e-5)


def test_a_folder_of_transformers_is_one_again(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    ids = tokens(40, 12)(16)
    data = {"input_ids": ids, "labels": ids}
    result = trained(f"hf:{tmp_path / 'base'}", data, tmp_path, lora="r=2,on=q_proj,v_proj")  # type: ignore[arg-type]
    export_weights(tmp_path / "run", tmp_path / "whole", merge=True)
    export_weights(tmp_path / "run", tmp_path / "adapters")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole").eval()
    with torch.no_grad():
        expected = result.model(input_ids=ids[:2]).logits
        torch.testing.assert_close(again(input_ids=ids[:2]).logits, expected, rtol=1e-4, atol=1e-5)
        peft: Any = pytest.importorskip("peft")
        base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        assert torch.equal(adapted(input_ids=ids[:2]).logits, expected)


@pytest.mark.parametrize(
    ("to", "merge", "says"),
    [
        ("model.bin", False, "ends in .safetensors, or a folder"),
        ("folder", False, "has no configuration of transformers"),
        ("m.safetensors", True, "has no adapters to merge"),
    ],
)
def test_what_cannot_be_written_is_refused(to: str, merge: bool, says: str, tmp_path: Path) -> None:
    trained(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), (torch.randn(16, 8), torch.arange(16) % 3), tmp_path)
    with pytest.raises(UsageError) as refused:
        export_weights(tmp_path / "run", tmp_path / to, merge)
    assert says in str(refused.value)
