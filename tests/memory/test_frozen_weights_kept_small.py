"""Frozen weights in bfloat16 or int8: the bits of eager mode with weights rounded first, less memory, less on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from oracle import plain_loop, state_sha256
from ordinary_models import TiedLanguageModel, tokens
from ringtmp import Result, api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.batches import TrainingBatches
from ringtmp.data.tables_and_streams import Table, tensors
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.model.export import Exporter
from ringtmp.model.frozen_formats import FROZEN_AS, WHOLE
from ringtmp.model.lora import Lora, add_adapters
from ringtmp.model.portable_layer import decode, encode
from ringtmp.model.run_graph import Program
from ringtmp.model.shrink_frozen_weights import channel_axes, check_kept, enlarged, shrink
from ringtmp.model.small_frozen_weights import kept_small
from ringtmp.run.export_run import export_weights
from ringtmp.runtime.gradients_at_segment_edges import saved_bytes
from ringtmp.runtime.run_directory import RunDirectory
from test_healing import Death, Mortal

BATCH, STEPS, PARTS = 6, 3, 3


class Picture(nn.Module):
    """Convolutions there and back, then a head; the first bias and the head are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 4, 3)
        self.two = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.back = nn.ConvTranspose2d(6, 4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 25, 3)
        self.requires_grad_(False)
        self.one.bias.requires_grad_(True)  # type: ignore[union-attr]
        self.head.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.two(torch.relu(self.one(x.view(-1, 1, 8, 8)))))
        return self.head(torch.tanh(self.norm(self.back(x))).flatten(1))


def stack() -> nn.Module:
    """Layers in a list: trained before, between and behind what is frozen."""
    layers: list[nn.Module] = []
    for at in range(5):
        layer = nn.Linear(64 if at == 0 else 24, 24)
        layer.weight.requires_grad_(at == 0)
        layer.bias.requires_grad_(at != 3)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(24, 3))


def adapted() -> nn.Module:
    """An embedding and a head that are one weight, attention, adapters."""
    model = TiedLanguageModel(blocks=1)
    add_adapters(model, Lora(("qkv", "up"), r=3, alpha=6.0, dropout=0.1))
    return model


def made(make: Any) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = make()
    return model


def rounded(model: nn.Module, kept: str) -> nn.Module:
    """What the run is defined as: the same model, with its weights rounded first."""
    axes = {} if kept == WHOLE.name else channel_axes(model)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name in axes:
                each.copy_(kept_small(name, each, FROZEN_AS[kept], axes[name]).converted())
    return model


def data(make: Any) -> Table:
    count = BATCH * STEPS
    if make is adapted:
        inputs = tokens(30, 20)(count)
        return tensors("t", inputs, inputs)
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(1))
    return tensors("t", x, torch.arange(count) % 3)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    flat = outputs.reshape(-1, outputs.shape[-1])
    return nn.functional.cross_entropy(flat, targets.reshape(-1))


def run(
    make: Any, folder: Path, pool: InMemoryPool, frozen_as: Any, *, steps: int = STEPS, keep: KeepPart | None = None,
    **ring: Any,
) -> Result:  # fmt: skip
    config = RunConfig(
        training=TrainingPart(
            data="given", steps=steps, batch_size=BATCH, microbatches=PARTS, optimizer="adam",
            optimizer_settings={"lr": 0.01}, frozen_as=frozen_as, clip_norm=0.5,
        ),
        ring=RingPart(**{"nodes": pool.nodes, "all_devices": True, **ring}),
        keep=keep or KeepPart(checkpoint_every=2),
    )  # fmt: skip
    return api.start(config, made(make), (data(make), None), loss, run_dir=folder, watcher=api.Watcher(), pool=pool)


def oracle(make: Any, kept: str) -> str:
    model = rounded(made(make), kept)
    batches = TrainingBatches(data(make), BATCH, PARTS, 0)
    whole = []
    for step in range(STEPS):
        batch = batches.batch(step)
        assert batch is not None
        whole.append((torch.cat(list(batch.inputs)), torch.cat(list(batch.targets))))
    plain_loop(
        model, whole, PARTS, loss, lambda found: torch.optim.Adam(found, lr=0.01, fused=True), clip_norm=0.5
    )  # fmt: skip
    return state_sha256(model)


QUICK = {(adapted, "int8")}


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        pytest.param(make, kept, marks=[pytest.mark.long] * ((make, kept) not in QUICK))
        for make in (stack, adapted, Picture)
        for kept in ("int8", "bfloat16")
    ],
)
def test_bits_are_those_of_eager_with_rounded_weights(make: Any, kept: str, tmp_path: Path) -> None:
    expected = oracle(make, kept)
    for nodes in (1, 2, 3):
        done = run(make, tmp_path / str(nodes), InMemoryPool(nodes), kept)
        assert done.summary.weights_sha256 == expected, nodes
        assert done.summary.numeric_mode == f"float32, frozen weights {kept}"
    assert state_sha256(done.model) == expected
    assert state_sha256(Result(tmp_path / "3").model) == expected
    assert expected != oracle(make, WHOLE.name), "the rounding shows"


@pytest.mark.parametrize(
    "ring",
    [
        {"recompute": "all", "schedule": "zero-bubble"},
        pytest.param({"recompute": "auto"}, marks=pytest.mark.long),
        pytest.param({"strategy": "allreduce"}, marks=pytest.mark.long),
    ],
)
def test_what_else_runs_a_layer_gives_the_same(ring: dict[str, Any], tmp_path: Path) -> None:
    one = run(adapted, tmp_path / "one", InMemoryPool(2), "int8")
    other = run(adapted, tmp_path / "other", InMemoryPool(2), "int8", **ring)
    assert (other.summary.weights_sha256 == one.summary.weights_sha256) is (ring.get("strategy") is None)
    frozen = [name for name, each in one.model.named_parameters() if not each.requires_grad]
    assert all(torch.equal(one.model.get_parameter(name), other.model.get_parameter(name)) for name in frozen)


@pytest.mark.long
def test_a_lost_node_keeps_the_bits(tmp_path: Path) -> None:
    calm = run(adapted, tmp_path / "calm", InMemoryPool(3), "int8", steps=8, keep=KeepPart(protect="off"))
    hit = run(adapted, tmp_path / "hit", Mortal(3, Death(1, 5, 3)), "int8", steps=8, keep=KeepPart(protect="memory"))
    assert hit.summary.recoveries
    assert hit.summary.weights_sha256 == calm.summary.weights_sha256


@pytest.mark.long  # resumed with other kinds of frozen weights: test_frozen_parts_kept_once
def test_a_resumed_run_keeps_the_bits(tmp_path: Path) -> None:
    calm = run(adapted, tmp_path / "calm", InMemoryPool(3), "int8", steps=8, keep=KeepPart(protect="off"))
    run(adapted, tmp_path / "half", InMemoryPool(2), "int8", steps=3)
    rest = api.resume(
        tmp_path / "half", {"steps": 8}, (data(adapted), None), loss, watcher=api.Watcher(), pool=InMemoryPool(3)
    )  # fmt: skip
    assert rest.summary.weights_sha256 == calm.summary.weights_sha256
    assert rest.summary.numeric_mode == "float32, frozen weights int8"


def on_disk(folder: Path) -> dict[str, str]:
    """Kinds of numbers by name."""
    found: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            found |= {name: str(file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118
    return found


def wide() -> nn.Module:
    layers = [each for _ in range(6) for each in (nn.Linear(192, 192), nn.Tanh())]
    model = nn.Sequential(nn.Linear(64, 192), *layers, nn.Linear(192, 3)).requires_grad_(False)
    model[0].requires_grad_(True)
    return model


def test_the_wire_the_disk_and_the_plan_have_the_small_size(tmp_path: Path) -> None:
    """Of the checkpoint: the copy of a weight that two cells read is there once, not in every checkpoint."""
    placed: dict[str, int] = {}
    stored: dict[str, int] = {}
    planned: dict[str, int] = {}
    for kept in ("float32", "bfloat16", "int8"):
        keep = KeepPart(protect="off", checkpoint_every=2)
        done = run(wide, tmp_path / kept, InMemoryPool(3), kept, keep=keep, cuts="0,1-6,7-12,13")
        folder = tmp_path / kept / "checkpoints" / "frozen"
        placed[kept], stored[kept] = done.summary.placement_bytes, sum(each.stat().st_size for each in folder.iterdir())
        index, _ = RunDirectory(tmp_path / kept).read_layers()
        planned[kept] = sum(each.weight_bytes for each in index.costs)
        assert max(each.converted_bytes for each in index.costs) == (0 if kept == "float32" else 4 * 192**2)
    print(f"placed {placed}, on disk {stored}, in the plan {planned}")
    for found in (placed, stored, planned):
        assert found["bfloat16"] < 0.6 * found["float32"], found
        assert found["int8"] < 0.4 * found["float32"], found


def test_a_tied_weight_is_small_in_both_its_places(tmp_path: Path) -> None:
    run(adapted, tmp_path / "run", InMemoryPool(2), "int8")
    folder = tmp_path / "run" / "checkpoints"
    kinds = on_disk(folder / "frozen")
    assert kinds["embed.weight"] == "torch.int8"
    assert kinds["embed.weight.scale"] == "torch.float32"
    assert kinds["position"] == "torch.float32", "it belongs to no such layer"
    for step in folder.glob("step-*"):
        assert not [name for name in on_disk(step) if "embed" in name], "neither it nor its copy changes"


def test_autograd_keeps_no_large_weight(tmp_path: Path) -> None:
    frozen = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)).requires_grad_(False)
    layer, own = Exporter().export("x", frozen, torch.randn(4, 64))
    sizes = {}
    for kept in (WHOLE, FROZEN_AS["int8"]):
        small, tensors = shrink(layer, own, kept, channel_axes(frozen))
        x = torch.randn(4, 64, requires_grad=True)
        with saved_bytes(tensors.values()) as saved:
            (y,) = Program(small.train).run([x], tensors)
        y.sum().backward()
        sizes[kept.name] = saved.total
        assert x.grad is not None
    assert sizes["int8"] == sizes["float32"] < 64 * 512, "what the activations take, and no copy of a weight"


@pytest.mark.parametrize("kept", ["int8", "bfloat16"])
def test_a_layer_is_what_it_was_when_it_is_whole_again(kept: Any) -> None:
    table = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5)).requires_grad_(False)
    table[1].weight.data[2] = 0.0  # a channel of zeros has no scale of its own
    table[1].weight.data[3] = 1e-44
    layer, own = Exporter().export("x", table, torch.arange(6).view(3, 2))
    small, tensors = shrink(layer, own, FROZEN_AS[kept], channel_axes(table))
    check_kept(decode(encode(small)))
    again, whole = enlarged(small, list(tensors.values()))
    assert again == layer
    x = torch.arange(6).view(3, 2)
    expected = rounded(table, kept)
    for one, two in zip(whole, expected.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(Program(small.evaluate).run([x], tensors)[0], expected(x))
    if kept == "int8":
        largest = expected[1].weight.abs().amax(dim=1)
        assert torch.allclose(largest, torch.tensor([each.abs().max() for each in whole[1]]))


@pytest.mark.parametrize("bend", ["no scale", "another kind", "trained", "scale of another shape", "of a scale"])
def test_a_received_layer_that_lies_about_its_weights_is_refused(bend: str) -> None:
    table = nn.Linear(4, 5).requires_grad_(False)
    layer, own = Exporter().export("x", table, torch.randn(3, 4))
    small, _ = shrink(layer, own, FROZEN_AS["int8"], channel_axes(table))
    change = msgspec.structs.replace
    tensors = {each.name: each for each in small.tensors}
    if bend == "no scale":
        del tensors["weight.scale"]
    elif bend == "another kind":
        tensors["weight"] = change(tensors["weight"], dtype="float32")
    elif bend == "trained":
        tensors["weight"] = change(tensors["weight"], trainable=True)
    elif bend == "scale of another shape":
        tensors["weight.scale"] = change(tensors["weight.scale"], shape=(4, 1))
    else:
        tensors["weight.scale"] = change(tensors["weight.scale"], kind="parameter")
    with pytest.raises(ProtocolError, match="kept as int8, and it is not"):
        check_kept(change(small, tensors=tuple(tensors.values())))


def nothing_frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))


def all_frozen() -> nn.Module:
    return nothing_frozen().requires_grad_(False)


def not_finite() -> nn.Module:
    model = nothing_frozen()
    model[2].requires_grad_(False).weight.data[1, 1] = float("nan")  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    ("make", "kept", "says"),
    [
        (nothing_frozen, "int8", "--frozen-as int8: no linear, embedding or convolution layer"),
        (all_frozen, "int8", "nothing is left to train"),
        (not_finite, "int8", "--frozen-as int8: 2.weight has values that are not finite"),
        (stack, "int4", "unknown frozen-as 'int4'"),
    ],
)
def test_what_cannot_be_kept_so_is_refused_before_the_start(make: Any, kept: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        run(make, tmp_path / "run", InMemoryPool(2), kept)
    assert says in str(refused.value)


def test_it_does_not_change_on_resume(tmp_path: Path) -> None:
    run(stack, tmp_path / "run", InMemoryPool(1), "int8")
    with pytest.raises(UsageError, match="frozen-as"):
        api.resume(tmp_path / "run", {"frozen_as": "float32"}, (data(stack), None), loss, pool=InMemoryPool(1))


def test_it_is_exported_as_float32(tmp_path: Path) -> None:
    done = run(adapted, tmp_path / "run", InMemoryPool(2), "int8")
    exported = export_weights(tmp_path / "run", tmp_path / "model.safetensors")
    assert exported.difference == 0.0
    state = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(state[name], each) for name, each in done.model.state_dict().items() if name in state)
    assert {each.dtype for each in state.values()} == {torch.float32}


def test_looking_for_weights_computes_nothing_and_takes_any_class() -> None:
    """Reading the attribute of a parametrised weight would do a step of its power iteration."""

    class Conv1D(nn.Module):
        """A wrapper, as many have one: without a weight of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv1d(2, 3, 1)

    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).requires_grad_(False).train()
    before = {name: each.clone() for name, each in normed.state_dict().items()}
    assert channel_axes(nn.Sequential(normed, Conv1D().requires_grad_(False))) == {"1.inner.weight": 0}
    assert all(torch.equal(each, before[name]) for name, each in normed.state_dict().items())
