"""Frozen parameters and adapters: the bits of eager mode on any number of nodes, and nothing spent on what is not trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness import Built, recipe, ring_in_memory
from oracle import plain_loop, state_sha256
from ordinary_models import TiedLanguageModel, class_loss, targets_for, tokens
from ringtmp import Ring, api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model.lora import Lora, LoraLinear, add_adapters, parse_lora

BATCH, STEPS, PARTS = 6, 2, 3
SETTINGS: dict[str, Any] = {"lr": 0.01}


class Trunk(nn.Module):
    """A trunk of four layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        return self.head(x)


def frozen() -> nn.Module:
    model = TiedLanguageModel()
    model.requires_grad_(False)
    for block in model.blocks[1:]:
        block.down.requires_grad_(True)
    return model


def tied_and_frozen() -> nn.Module:
    """The weight that two ends share is frozen; all between is trained."""
    model = TiedLanguageModel()
    model.embed.weight.requires_grad_(False)
    return model


def adapted() -> nn.Module:
    model = TiedLanguageModel()
    add_adapters(model, Lora(("qkv", "up"), r=3, alpha=6.0, dropout=0.1))
    for each in model.modules():
        if isinstance(each, LoraLinear):
            nn.init.normal_(each.lora_B.weight, std=0.1)  # else the first gradient of A is zero
    return model


QUICK = {(adapted, "zero-bubble")}


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        pytest.param(make, schedule, marks=[pytest.mark.long] * ((make, schedule) not in QUICK))
        for make in (frozen, tied_and_frozen, adapted)
        for schedule in ("1f1b", "zero-bubble")
    ],
)
def test_frozen_and_adapted_models_have_the_bits_of_eager(make: Any, schedule: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = make()
    inputs = tokens(30, 20)(BATCH * STEPS)
    targets = targets_for(copy.deepcopy(model), inputs)
    parts = [slice(BATCH * step, BATCH * (step + 1)) for step in range(STEPS)]
    batches = [(inputs[rows].clone(), targets[rows].clone()) for rows in parts]
    built = Built(tmp_path, copy.deepcopy(model), tokens(30, 20), [BATCH // PARTS])
    plain_loop(
        model, batches, PARTS, class_loss, lambda found: torch.optim.Adam(found, **SETTINGS, fused=True), clip_norm=0.5
    )
    copies = [
        each.full for layer in built.layers for each in layer.tensors if each.kind == "constant" and each.rank >= 0
    ]
    assert copies == ["embed.weight"] * (not model.embed.weight.requires_grad), "what two ends share, and nothing else"
    for nodes in (1, 2, 3, 4):
        found, _ = ring_in_memory(
            built, recipe("adam", SETTINGS, clip_norm=0.5), batches, PARTS, class_loss, nodes, schedule
        )
        assert found == state_sha256(model), nodes


def fit(model: nn.Module, folder: Path, **more: Any) -> Any:
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return Ring(nodes=1, progress=False).fit(
        model, (x, torch.arange(48) % 3), steps=3, batch_size=12, microbatches=2, run_dir=folder, **more
    )


def test_patterns_choose_what_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Trunk()
    before = copy.deepcopy(model.state_dict())
    after = fit(model, tmp_path / "run", train="head|*.3.bias").model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias", "trunk.3.bias"}


def test_adapters_begin_as_nothing_and_alone_are_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Trunk()
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    result = fit(model, tmp_path / "run", lora="r=2,alpha=4,on=0,trunk.2", lr_schedule="constant")
    after = result.model.state_dict()
    adapters = {name for name in after if "lora" in name}
    assert adapters == {f"trunk.{at}.lora_{which}.weight" for at in (0, 2) for which in "AB"}
    for name, tensor in plain.state_dict().items():
        layer, _, kind = name.rpartition(".")
        kept = after.get(name, after.get(f"{layer}.base_layer.{kind}"))
        assert torch.equal(kept, tensor), name
    torch.manual_seed(0)
    fresh = Trunk()
    add_adapters(fresh, Lora(("0", "trunk.2"), r=2))
    assert torch.equal(fresh(x), plain(x))
    first = after["trunk.0.lora_B.weight"] @ after["trunk.0.lora_A.weight"] * 2.0
    merged = F.linear(x, plain.trunk[0].weight + first, plain.trunk[0].bias)  # type: ignore[arg-type,operator,union-attr]
    torch.testing.assert_close(result.model.trunk[0](x), merged)


def test_nothing_goes_back_past_the_last_needed_gradient(tmp_path: Path) -> None:
    """Of three nodes the master trains its tail alone: what the others answer is empty."""
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = tensors("t", x, torch.arange(48) % 3), None
    sent: dict[str | None, list[int]] = {}
    for train in (None, "head"):
        torch.manual_seed(0)
        config = RunConfig(
            training=TrainingPart(steps=3, batch_size=12, microbatches=2, train=train),
            ring=RingPart(nodes=3, cuts="0-0,1-2,3-3,4-4"),
            keep=KeepPart(protect="off"),
        )
        result = api.start(config, Trunk(), data, run_dir=tmp_path / f"{train}", pool=InMemoryPool(3))
        sent[train] = [each.bytes_sent for each in result.summary.per_node]
    activations = 3 * 12 * 8 * 4  # steps, samples, width, bytes
    for node in range(1, 3):
        assert sent[None][node] - sent["head"][node] > 0.9 * activations, sent


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"train": "hed"}, "train='hed' fits no parameter: the model has trunk.0.weight"),
        ({"train": " | "}, "train= is empty"),
        ({"lora": "r=2"}, "does not say on which layers"),
        ({"lora": "r=2,on=q_proj"}, "lora='on=q_proj' fits no module: there are trunk, 0"),
        ({"lora": "r=2,on=trunk"}, "it is a ModuleList, and adapters go on linear layers"),
        ({"lora": "r=0,on=head"}, "r must be from 1 to 65536"),
        ({"lora": "rank=2,on=head"}, "lora='rank=…' is not known"),
        ({"lora": "r=two,on=head"}, "lora='r=two' must be a number"),
        ({"lora": "r=2,on=0", "train": "head"}, "train='head' would freeze the adapters of lora=: add |lora"),
    ],
)
def test_what_fits_nothing_is_refused_before_the_start(more: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        fit(Trunk(), tmp_path / "run", **more)
    assert says in str(refused.value)


def test_nothing_left_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing is left to train"):
        fit(Trunk().requires_grad_(False), tmp_path / "run")


def test_what_is_written_for_adapters_is_read() -> None:
    assert parse_lora("r=4,alpha=8,dropout=0.1,on=q_proj,v_proj") == Lora(("q_proj", "v_proj"), 4, 8.0, 0.1)
    assert parse_lora("on=a, b ,r=2") == Lora(("a", "b"), 2)


def test_adapters_have_the_kind_of_numbers_of_their_layer() -> None:
    model = Trunk().double()
    add_adapters(model, Lora(("0",)))
    assert {each.dtype for each in model.parameters()} == {torch.float64}


def test_a_module_in_two_places_has_one_adapter() -> None:
    model = Trunk()
    model.trunk.append(model.trunk[0])
    add_adapters(model, Lora(("trunk.0",)))
    assert model.trunk[4] is model.trunk[0]
    assert len([each for each in model.modules() if isinstance(each, LoraLinear)]) == 1
