"""`--model hf:…`: a directory, a configuration; from files alone, without code or pickles that came with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from oracle import state_sha256
from ringtmp import Result, api
from ringtmp.config import ModelPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import from_python
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model.layers import opened_model
from ringtmp.model.pretrained import pretrained

transformers: Any = pytest.importorskip("transformers")


def llama(tied: bool = True) -> Any:
    torch.manual_seed(4)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def gpt2() -> Any:
    torch.manual_seed(4)
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pieces", ["5GB", "4KB"])
def test_a_directory_gives_the_model_that_was_saved_in_it(tied: bool, pieces: str, tmp_path: Path) -> None:
    model = llama(tied)
    model.save_pretrained(tmp_path, max_shard_size=pieces)
    assert bool(list(tmp_path.glob("*.index.json"))) is (pieces == "4KB")
    found = opened_model(pretrained(f"hf:{tmp_path}"), 0).given
    assert type(found) is type(model)
    assert state_sha256(found) == state_sha256(model)


def vit() -> Any:
    torch.manual_seed(4)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
            num_labels=3,
        )
    )  # fmt: skip


def mixtral() -> Any:
    torch.manual_seed(4)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2, max_position_embeddings=32,
        )
    )  # fmt: skip


@pytest.mark.parametrize("made", [vit, mixtral])
def test_names_that_the_library_writes_otherwise_than_it_builds_are_found(made: Any, tmp_path: Path) -> None:
    model = made()
    model.save_pretrained(tmp_path)
    if int(transformers.__version__.partition(".")[0]) >= 5:
        with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
            assert set(file.keys()) != set(model.state_dict()), "or this says nothing"
    assert state_sha256(pretrained(f"hf:{tmp_path}")()) == state_sha256(model)


def test_weights_of_a_bare_model_and_masks_of_old_files_are_taken_as_the_library_takes_them(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path)
    state = {
        name.removeprefix("transformer."): each.clone() for name, each in model.state_dict().items() if name != "lm_head.weight"
    }  # fmt: skip
    state["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # a causal mask, which files of 2019 have
    save_file(state, tmp_path / "model.safetensors")
    assert state_sha256(pretrained(f"hf:{tmp_path}")()) == state_sha256(model)
    state["transformer.wte.weight"] = state["wte.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="has transformer.wte.weight and wte.weight, which are both transformer.wte.w"):
        pretrained(f"hf:{tmp_path}")()


def test_a_renamed_tensor_of_another_shape_is_told_by_its_name_in_the_file(tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path)
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
    name = "vit.encoder.layer.1.intermediate.dense.bias"
    if name not in state:
        pytest.skip("this version of transformers writes it under another name")
    state[name] = torch.zeros(5)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=f"has otherwise {name} [(]5 in the file, 24 in the model[)]"):
        pretrained(f"hf:{tmp_path}")()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells what is mapped on Linux alone")
def test_the_weights_of_a_directory_are_the_files_own_pages(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    found = pretrained(f"hf:{tmp_path}")()
    at = found.model.embed_tokens.weight.data_ptr()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    spans = [[int(each, 16) for each in line[0].split("-")] for line in lines]
    assert any(first <= at < last for first, last in spans), "nothing was copied"
    with torch.no_grad():
        found.model.embed_tokens.weight.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == content, "and the file stays as it was"


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    found = pretrained(f"hf:{tmp_path}")()
    assert {each.dtype for each in found.parameters()} == {torch.float32}
    expected = llama().to(torch.bfloat16).float().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())


def test_a_configuration_gives_first_weights_by_the_seed(tmp_path: Path) -> None:
    config = {**json.loads(llama().config.to_json_string()), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "c.json").write_text(json.dumps(config))
    one, two, other = (
        state_sha256(opened_model(pretrained(f"hf:{tmp_path / 'c.json'}"), seed).given) for seed in (1, 1, 2)
    )
    assert one == two != other


def test_it_is_adapted_and_trained_by_name(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    ids = torch.randint(0, 40, (24, 12), generator=torch.Generator().manual_seed(1))
    config = RunConfig(
        model=ModelPart(name=f"hf:{tmp_path / 'model'}"),
        training=TrainingPart(data="given", steps=3, batch_size=8, microbatches=2, lora="r=2,on=q_proj,v_proj"),
        ring=RingPart(nodes=2),
    )
    data = from_python({"input_ids": ids, "labels": ids}), None
    done: Result = api.start(config, None, data, run_dir=tmp_path / "run", pool=InMemoryPool(2))
    alone = api.start(
        RunConfig(config.model, config.training, RingPart(nodes=1)), None, data, run_dir=tmp_path / "alone",
        pool=InMemoryPool(1),
    )  # fmt: skip
    assert done.summary.weights_sha256 == alone.summary.weights_sha256
    trained = {name for name, each in done.model.named_parameters() if each.requires_grad}
    assert len(trained) == 8
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"auto_map": {"AutoModel": "m.py"}}, "wants code of its own"),
        ({"architectures": ["Nobody"]}, "'Nobody', which this version"),
        ({"architectures": None}, "no architecture"),
        ({"architectures": ["AutoConfig"]}, "'AutoConfig', which"),
        (None, "No such file"),
        ("[", "is no configuration"),
    ],
)
def test_what_is_no_model_is_refused(change: Any, says: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    if change is None:
        path.unlink()
    elif isinstance(change, str):
        path.write_text(change)
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError) as refused:
        pretrained(f"hf:{tmp_path}")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_act": "nobody's"}, "nobody's"),
        ({"vocab_size": -3}, "negative"),
        ({"num_attention_heads": 0}, ""),
        ({"model_type": "nobody's"}, "nobody's"),
    ],
)
@pytest.mark.parametrize("filled", [True, False])
def test_a_wrong_value_is_told_with_its_file(change: Any, says: str, filled: bool, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError) as refused:
        opened_model(pretrained(f"hf:{tmp_path}", filled), 0)
    assert str(refused.value).startswith(f"--model hf:{tmp_path} cannot be read: ")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_pickled_weights_and_missing_files_are_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=f"^--model hf:{tmp_path} has only pickled weights"):
        pretrained(f"hf:{tmp_path}")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle, which may run code"):
        pretrained(f"hf:{tmp_path / 'pytorch_model.bin'}")
    with pytest.raises(UsageError, match="no such file"):
        pretrained(f"hf:{tmp_path / 'm.gguf'}")
    with pytest.raises(UsageError, match=r"nothing is fetched; to fetch it: hf download some/Model-1\.7B --local-dir"):
        pretrained("hf:some/Model-1.7B")
    with pytest.raises(
        UsageError, match=r"^--model hf:\./gone: there is no such file or directory, and nothing is fetched$"
    ):
        pretrained("hf:./gone")
    with pytest.raises(UsageError, match="^--model hf: names nothing"):
        pretrained("hf:")
    (tmp_path / "model.safetensors").write_bytes(b"not so")
    with pytest.raises(UsageError, match=f"^--model hf:{tmp_path}: model.safetensors cannot be read as safetensors"):
        pretrained(f"hf:{tmp_path}")
