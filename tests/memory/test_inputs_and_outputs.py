"""Models as people have them: several inputs, dicts, objects as outputs, a loss of their own; the bits of a plain loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oracle import state_sha256
from ringtmp import Result, Ring, api
from ringtmp.config import RingPart, RunConfig, TrainingPart
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.tables_and_streams import from_python, with_loss
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model import export_as_eager_runs

X, Y = torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.arange(72.0).view(24, 3) / 72
LABELS = torch.arange(24) % 3
PAIRS = ({"x": X, "y": Y}, LABELS)
LABELLED = {"x": X, "labels": LABELS, "y": Y}


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 8), nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.head(torch.relu(self.left(x) + self.right(y)))


class Answers(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Answer:
        return Answer(super().forward(x, y))


class OwnLoss(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor | None = None) -> Answer:
        logits = super().forward(x, y)
        return Answer(logits, None if labels is None else F.cross_entropy(logits, labels))


class Features(nn.Module):
    """The first layer of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(3, 8)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": self.left(batch["x"]) + self.right(batch["y"]), "y": batch["y"]}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": batch["y"], "sum": self.linear(batch["sum"])}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(11, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> Answer:
        return Answer(self.linear(torch.cat([batch["sum"].relu(), batch["y"]], 1)))


def logits_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    assert type(outputs) is Answer, "the model's own object"
    return F.cross_entropy(outputs.logits, targets)


def eager(
    model: nn.Module, data: Any, loss: str | None, value: Callable[[Any, torch.Tensor], torch.Tensor], steps: int = 4
) -> str:
    """A plain loop over the same batches, in microbatches of two; `value`: the loss of a microbatch."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = TrainingBatches(with_loss(from_python(data), loss)[0], 8, 4, 0)
    for step in range(steps):
        batch = batches.batch(step)
        assert batch is not None
        for inputs, targets, share in zip(batch.inputs, batch.targets, batch.weights, strict=True):
            outputs = model(inputs) if isinstance(model, nn.Sequential) else model(**inputs)
            (value(outputs, targets) * share).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_sha256(model)


def fit(model: nn.Module, data: Any, folder: Path, *, nodes: int = 1, strategy: str = "ring", **more: Any) -> Result:
    config = RunConfig(
        training=TrainingPart(steps=4, batch_size=8, microbatches=4, optimizer="sgd", optimizer_settings={"lr": 0.1}),
        ring=RingPart(nodes=nodes, strategy=strategy),
    )
    test = more.pop("test", None)
    sources = from_python(data), None if test is None else from_python(test)
    return api.start(config, model, sources, run_dir=folder / "run", pool=InMemoryPool(nodes), **more)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, Callable[..., torch.Tensor]]] = {
    "keywords": (Net, PAIRS, None, F.cross_entropy),
    "labels as targets": (Net, LABELLED, "cross_entropy", F.cross_entropy),
    "an object and a loss of one's own": (Answers, PAIRS, logits_loss, logits_loss),
    "the model's own loss": (OwnLoss, LABELLED, None, lambda outputs, targets: outputs.loss),
    "a row of layers": (lambda: nn.Sequential(Features(), Middle(), Head()), PAIRS, logits_loss, logits_loss),
}


@pytest.mark.parametrize("case", CASES)
def test_every_way_has_the_bits_of_a_plain_loop(case: str, tmp_path: Path) -> None:
    make, data, loss, value = CASES[case]
    torch.manual_seed(3)
    model = make()
    expected = eager(model, data, "callable" if callable(loss) else loss, value)
    nodes = 2 if isinstance(model, nn.Sequential) else 1
    result = fit(model, data, tmp_path, nodes=nodes, loss=loss)
    assert state_sha256(result.model) == expected
    assert type(result.model) is type(model)


@pytest.mark.parametrize("case", ["an object and a loss of one's own", "the model's own loss"])
def test_workers_that_hold_the_whole_model_need_no_class_of_the_users(case: str, tmp_path: Path) -> None:
    make, data, loss, _ = CASES[case]
    model = make()
    result = fit(model, data, tmp_path, nodes=2, strategy="allreduce", loss=loss, test=data)
    assert result.summary.outcome == "done"
    assert result.history.epochs[-1].accuracy is not None


def test_keys_in_another_order_are_arranged_and_labels_are_not_needed_to_predict(tmp_path: Path) -> None:
    result = fit(OwnLoss(), LABELLED, tmp_path, test={"labels": LABELS, "y": Y, "x": X})
    ring = Ring(nodes=1, progress=False)
    with torch.no_grad():
        expected = result.model(X, Y, LABELS)
    score = ring.evaluate(result.run_dir, {"y": Y, "x": X, "labels": LABELS})
    assert score["loss"] == pytest.approx(float(expected.loss), rel=1e-5)
    assert score["accuracy"] == pytest.approx(float((expected.logits.argmax(1) == LABELS).float().mean()))
    predicted = ring.predict(result.run_dir, {"y": Y, "x": X})
    assert type(predicted) is Answer
    torch.testing.assert_close(predicted.logits, expected.logits)
    assert predicted.loss is None
    with pytest.raises(UsageError, match="the input lacks 'x' and has 'z': every batch must have 'x', 'labels', 'y'"):
        ring.predict(result.run_dir, {"y": Y, "z": X})


@pytest.mark.parametrize("keep", ["memory", "disk"])
def test_a_stream_of_dicts_trains_as_a_table_does(tmp_path: Path, keep: str) -> None:
    torch.manual_seed(3)
    model = OwnLoss()
    found = [{key: each[first : first + 8] for key, each in LABELLED.items()} for first in (0, 8, 16)]
    turned = [dict(sorted(each.items(), reverse=place == 1)) for place, each in enumerate(found)]
    digests = [
        Ring(nodes=1, progress=False)
        .fit(model, data, epochs=2, run_dir=tmp_path / name, optimizer="sgd", stream_keep=keep)
        .summary.weights_sha256
        for name, data in (("as", found), ("turned", turned))
    ]
    assert digests[0] == digests[1] is not None


def test_a_resumed_run_takes_the_same_dicts(tmp_path: Path) -> None:
    whole = fit(OwnLoss(), LABELLED, tmp_path)
    turned = {"y": Y, "labels": LABELS, "x": X}
    more = Ring(nodes=1, progress=False).resume(whole.run_dir, turned, steps=6, model=OwnLoss())
    assert more.summary.steps == 6


class Number(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return {"logits": super().forward(x, y), "count": 3}


class Optional(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return super().forward(x, Y[: len(x)] if y is None else y)


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


BAD: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "a sample of another shape": (Net, ({"x": Y, "y": Y}, LABELS), None, r"refuses a microbatch of shape \(2, 3\), \(2, 3\)"),
    "a key that forward lacks": (Net, ({"x": X, "z": Y}, LABELS), None, "the data has 'z', but Net.forward takes no such"),
    "an argument that is missing": (Net, ({"x": X}, LABELS), None, "Net.forward needs 'y'"),
    "a tuple for one argument": (Optional, ((X, Y), LABELS), None, "was given all inputs as one tuple: to name its arguments"),
    "different lengths": (Net, ({"x": X[:5], "y": Y}, LABELS), None, "different lengths: x 5, y 24, targets 24"),
    "an object and a loss of tensors": (
        Answers, PAIRS, "cross_entropy", "takes one tensor, and the model returns a Answer with logits: give",
    ),
    "a loss that finds no field": (Net, PAIRS, lambda o, t: o.loss, r"the model's outputs: .*\(the model returns a ten"),
    "no loss of its own": (Net, PAIRS, "model", 'loss="model" needs a model.* this one returns a tensor of shape 2x3'),
    "labels and no loss": (Answers, ({"x": X, "y": Y}, LABELS), "model", "this one returns a Answer with logits"),
    "a number among the outputs": (Number, PAIRS, lambda o, t: o["logits"].sum(), "returns a int in 'count'"),
    "complex parameters": (Complex, PAIRS, None, "phase is complex"),
    "a lazy module": (lambda: nn.Sequential(nn.LazyLinear(3)), (X, LABELS), None, "is lazy and has no shape yet"),
    "another device": (lambda: nn.Linear(4, 3, device="meta"), (X, LABELS), None, "is on meta: move the model to the CPU"),
    "an object between layers": (
        lambda: nn.Sequential(Features(), Head(), nn.Identity()), PAIRS, None, "is given a Answer with logits by the layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_named_before_anything_starts(case: str, tmp_path: Path) -> None:
    make, data, loss, says = BAD[case]
    with pytest.raises(UsageError, match=says):
        fit(make(), data, tmp_path, loss=loss)


def test_a_model_of_transformers_computes_its_own_loss(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 40, (24, 12))
    labels = ids.clone()
    labels[:, :2] = -100
    data = transformers.BatchEncoding({"input_ids": ids, "labels": labels})
    expected = eager(model, data, None, lambda outputs, targets: outputs.loss)
    result = fit(model, data, tmp_path, test=data)
    assert state_sha256(result.model) == expected
    assert result.history.epochs[-1].accuracy is None  # labels are shifted within the model
    assert config.use_cache is True
    predicted = Ring(nodes=1, progress=False).predict(result.run_dir, {"input_ids": ids})
    assert type(predicted) is transformers.modeling_outputs.CausalLMOutputWithCrossAttentions
    with torch.no_grad():
        torch.testing.assert_close(predicted.logits, result.model(input_ids=ids).logits)


def _llama(transformers: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_that_is_given_makes_it_the_path_with_the_mask_and_one_is_told(padded: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = _llama(transformers)
    ids = torch.randint(0, 40, (24, 12))
    mask = torch.ones_like(ids)
    mask[::3, 9:] = 0 if padded else 1
    data = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    told: list[str] = []

    class Listening(api.Watcher):
        def tell(self, text: str) -> None:
            told.append(text)

    with export_as_eager_runs.paths()[1]():
        expected = eager(model, data, None, lambda outputs, targets: outputs.loss)
    result = fit(model, data, tmp_path, nodes=2, watcher=Listening())
    assert state_sha256(result.model) == expected
    assert result.summary.checked == "traced"
    assert any("--leave-out" in text for text in told)


class Wrapper(nn.Module):
    """As libraries write them: whatever it is given it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_wrapper_that_hands_on_whatever_it_is_given_has_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Wrapper()
    expected = eager(model, PAIRS, None, F.cross_entropy)
    result = fit(model, PAIRS, tmp_path, nodes=2)
    assert state_sha256(result.model) == expected
    assert "forward" not in vars(model)


def test_a_model_with_adapters_of_peft_has_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = _llama(transformers)
    how = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, how)
    ids = torch.randint(0, 40, (24, 12))
    data = {"input_ids": ids, "labels": ids}
    expected = eager(model, data, None, lambda outputs, targets: outputs.loss)
    for nodes in (1, 2, 3):
        result = fit(copy.deepcopy(model), data, tmp_path / str(nodes), nodes=nodes)
        assert state_sha256(result.model) == expected
