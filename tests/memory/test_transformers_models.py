"""Models of transformers, as that library builds them: on the ring they train with the bits of a plain eager loop.

Sequences are 256 long: from 130 or so transformers takes other ways through attention than for short ones.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oracle import RandomByOperator, state_sha256
from ringtmp import Result, api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import from_python
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model.call_module import call_arguments, without_cache
from ringtmp.model.lora import Lora, LoraLinear, add_adapters
from ringtmp.model.portable_layer import Layer
from ringtmp.runtime.run_directory import RunDirectory

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, CLASSES = 64, 256, 3
BATCH, STEPS, PARTS, RATE = 4, 2, 2, 1e-3
Made = tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]]]
ATTENTION = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
QUICK = {("qwen2", 2, "zero-bubble")}


def words(samples: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, WORDS, (samples, length), generator=torch.Generator().manual_seed(samples + length))


def classes(samples: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, (samples,), generator=torch.Generator().manual_seed(samples))


def text(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": words(samples), "labels": words(samples)}


def texts_with_classes(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": words(samples), "labels": classes(samples)}


def pictures(samples: int) -> dict[str, torch.Tensor]:
    pixels = torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(samples))
    return {"pixel_values": pixels, "labels": classes(samples)}


def gpt2() -> Made:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=3, n_head=2, resid_pdrop=0.1, embd_pdrop=0.1,
        attn_pdrop=0.1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), text


def llama() -> Made:
    """Grouped heads."""
    config = transformers.LlamaConfig(**ATTENTION, num_key_value_heads=2, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config), text


def qwen2() -> Made:
    config = transformers.Qwen2Config(**ATTENTION, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config), text


def bert() -> Made:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**ATTENTION, num_labels=CLASSES)
    ), texts_with_classes


def vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=4,
        num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), pictures


def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), lambda samples: {
        "input_ids": words(samples),
        "labels": words(samples, 24),
    }


def convnext() -> Made:
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[8, 16], depths=[2, 2], num_labels=CLASSES, image_size=16
    )
    return transformers.ConvNextForImageClassification(config), pictures


def resnet() -> Made:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    return transformers.ResNetForImageClassification(config), pictures


def _frozen(made: Made, trained: str) -> Made:
    """All but what is named so, in every block but the first."""
    model, data = made
    for name, each in model.named_parameters():
        each.requires_grad_(trained in name and ".0." not in name)
    return model, data


def _adapted(made: Made, *on: str) -> Made:
    model, data = made
    add_adapters(model, Lora(on, r=3, alpha=6.0, dropout=0.1))
    for each in model.modules():
        if isinstance(each, LoraLinear):
            nn.init.normal_(each.lora_B.weight, std=0.1)  # otherwise the first gradient of A is zero
    return model, data


def gpt2_frozen() -> Made:
    return _frozen(gpt2(), "mlp.c_proj")


def gpt2_adapted() -> Made:
    return _adapted(gpt2(), "c_attn")


def llama_frozen() -> Made:
    return _frozen(llama(), "down_proj")


def llama_adapted() -> Made:
    return _adapted(llama(), "q_proj", "v_proj")


FROM_NOTHING = (gpt2, llama, qwen2, bert, vit, t5, convnext, resnet)
IN_PART = (gpt2_frozen, llama_frozen, gpt2_adapted, llama_adapted)
MODELS = {each.__name__: each for each in (*FROM_NOTHING, *IN_PART)}


@pytest.fixture(scope="module")
def ready() -> Any:
    """The model, its data, and what a plain loop makes of it."""

    @cache
    def made(name: str) -> tuple[nn.Module, Any, str]:
        torch.manual_seed(1)
        model, sample = MODELS[name]()
        model.train()
        every = sample(BATCH * STEPS)
        batches = [{key: value[at * BATCH : (at + 1) * BATCH] for key, value in every.items()} for at in range(STEPS)]
        return model, batches, plain(copy.deepcopy(model), batches)

    return made


def plain(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> str:
    updates = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    for step, batch in enumerate(batches):
        for number in range(PARTS):
            part = {key: value.tensor_split(PARTS)[number].clone() for key, value in batch.items()}
            with without_cache(model), RandomByOperator(0, step, number):
                loss = model(**part).loss
            (loss * (len(part["labels"]) / BATCH)).backward()
        updates.step()
        updates.zero_grad()
    return state_sha256(model)


def fitted(folder: Path, model: nn.Module, batches: Any, nodes: int, schedule: Any) -> Result:
    training = TrainingPart(
        data="given", epochs=1, batch_size=BATCH, microbatches=PARTS, optimizer_settings={"lr": RATE}
    )
    ring = RingPart(nodes=nodes, schedule=schedule, all_devices=True)
    config, data = RunConfig(training=training, ring=ring, keep=KeepPart()), (from_python(list(batches)), None)
    return api.start(config, model, data, None, run_dir=folder, watcher=api.Watcher(), pool=InMemoryPool(nodes))


def _tier(name: str, nodes: int, schedule: str) -> list[pytest.MarkDecorator]:
    """Every model on one ring in `make long`; what is left at night."""
    if (name, nodes, schedule) in QUICK:
        return []
    ring = ((2, "1f1b"), (4, "zero-bubble"))[list(MODELS).index(name) % 2]
    return [pytest.mark.long if (nodes, schedule) == ring else pytest.mark.nightly]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "nodes", "schedule"),
    [
        pytest.param(*case, marks=_tier(*case))
        for case in itertools.product(MODELS, (1, 2, 3, 4), ("1f1b", "zero-bubble"))
    ],
)
def test_it_trains_with_the_bits_of_eager(
    name: str, nodes: int, schedule: str, ready: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, batches, expected = ready(name)
    done = fitted(tmp_path / "run", model, batches, nodes, schedule)
    shares = _parameters_by_node(done)
    with capsys.disabled():
        print(f"\n{name}: {len(_layers(done))} cells, parameters by node {shares}")
    assert sum(each > 0 for each in shares) >= min(nodes, 2), "too few stages have parameters"
    assert done.summary.weights_sha256 == expected
    assert state_sha256(done.model) == expected
    _check_without_its_class(done, model, batches[0])


def _layers(done: Result) -> list[Layer]:
    return list(RunDirectory(done.run_dir).read_layers()[1])


def _parameters_by_node(done: Result) -> list[int]:
    """Segments are told as '#4-7 first to last'."""
    layers, found = _layers(done), []
    for node in done.summary.per_node:
        ends = [re.match(r"#(\d+)(?:-(\d+))? ", each) for each in node.segments]
        held = [range(int(each[1]), int(each[2] or each[1]) + 1) for each in ends if each]
        found.append(sum(layers[at].parameters for each in held for at in each))
    return found


def _check_without_its_class(done: Result, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    own, other = done.model, Result(done.run_dir).model
    assert type(own) is type(model)
    assert list(other.state_dict()) == list(own.state_dict())
    with torch.no_grad(), without_cache(own):
        whole, alone = own(**batch), other(**batch)
        assert alone.loss.equal(whole.loss)
        assert alone.logits.equal(whole.logits)
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        found = other(**inputs)
        assert found.loss is None
        assert found.logits.equal(whole.logits) or "decoder_start_token_id" in vars(own.config)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_a_misspelt_key_is_refused_before_anything_starts(name: str) -> None:
    """It would go through their `**kwargs` without a word, and the model be trained without labels."""
    model, data = MODELS[name]()
    inputs = data(2)
    assert call_arguments(model, inputs).kwargs.keys() == inputs.keys()
    inputs["labelz"] = inputs.pop("labels", torch.zeros(2))
    with pytest.raises(UsageError, match=r"'labelz', but \w+.forward takes no such argument: did you mean 'labels'\?"):
        call_arguments(model, inputs)


def test_a_misspelt_key_is_refused_behind_adapters_too() -> None:
    peft = pytest.importorskip("peft")
    model, data = llama()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    positions = torch.arange(LENGTH).repeat(2, 1)
    inputs = data(2) | {"position_ids": positions}  # which PEFT hands on
    assert call_arguments(adapted, inputs).kwargs.keys() == inputs.keys()
    with pytest.raises(UsageError, match=r"'position_idz', .*did you mean 'position_ids'\?"):
        call_arguments(adapted, data(2) | {"position_idz": positions})
