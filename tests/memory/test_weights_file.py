"""`--weights`: first weights from safetensors files; what does not fit is told all at once, and a pickle is never read."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ordinary_models import TiedLanguageModel
from ringtmp import Ring
from ringtmp.errors import UsageError
from ringtmp.model.layers import layers_of, opened_model
from ringtmp.model.prepare_weights import Preparation


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def saved(model: nn.Module, path: Path, **changes: torch.Tensor | None) -> Path:
    state = {name.replace(".", "."): tensor.clone() for name, tensor in model.state_dict().items()}
    state |= {name.replace("__", "."): tensor for name, tensor in changes.items() if tensor is not None}
    gone = [name.replace("__", ".") for name, tensor in changes.items() if tensor is None]
    save_file({name: tensor for name, tensor in state.items() if name not in gone}, path)
    return path


def filled(make: Any, path: Path) -> dict[str, torch.Tensor]:
    opened = opened_model(make, 5, preparation=Preparation(str(path)))
    if isinstance(opened.given, nn.Module):
        return opened.given.state_dict()
    return {
        f"{name}.{key}": each for name, layer in layers_of(opened) for key, each in layer.state_dict().items()
    }  # fmt: skip


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def listed() -> Any:
    return list(small())  # type: ignore[call-overload]


def one_by_one() -> Any:
    yield from small()  # type: ignore[misc]


@pytest.mark.parametrize("make", [small, listed, one_by_one])
def test_a_model_begins_with_the_weights_of_a_file(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(9)
    model = small()
    model[1].num_batches_tracked += 7  # type: ignore[operator,index]
    assert equal(filled(make, saved(model, tmp_path / "w.safetensors")), model.state_dict())


def test_a_folder_with_an_index_and_a_tensor_with_two_names(tmp_path: Path) -> None:
    torch.manual_seed(9)
    model = TiedLanguageModel()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    names = list(state)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, own in parts.items():
        save_file({name: state[name] for name in own}, tmp_path / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert equal(filled(TiedLanguageModel, tmp_path), model.state_dict())
    index["weight_map"][names[0]] = "../b.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=f"not where it says: {names[0]}"):
        filled(TiedLanguageModel, tmp_path)


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    path = saved(
        small(), tmp_path / "w.safetensors", **{"0__bias": None, "0__weight": None, "1__running_mean": None,
        "1__bias": torch.ones(6, dtype=torch.uint8), "3__weight": torch.ones(3, 7)}, other=torch.ones(1),
    )  # fmt: skip
    with pytest.raises(UsageError) as refused:
        filled(small, path)
    said = str(refused.value)
    assert "it lacks 0.weight, 0.bias, 1.running_mean; " in said
    assert "1.bias (uint8 in the file, float32 in the model)" in said
    assert "3.weight (3x7 in the file, 3x6 in the model)" in said
    assert said.endswith("has besides other")


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.safetensors")
    for path in (tmp_path / "w.safetensors", tmp_path):
        with pytest.raises(UsageError, match="is no file"):
            filled(small, path)


def test_damaged_files_are_told_or_read_and_never_end_in_raw_errors(tmp_path: Path) -> None:
    """A flipped bit in a number is a number: a file of safetensors has no checksum."""
    path, chance = saved(small(), tmp_path / "w.safetensors"), random.Random(0)
    sound = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(sound)
        match chance.randrange(4):
            case 0:
                damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            case 1:
                del damaged[chance.randrange(len(damaged)) :]
            case 2:
                damaged += bytes(chance.randrange(1, 40))
            case _:
                damaged[chance.randrange(8 + int.from_bytes(sound[:8], "little"))] = chance.choice(
                    b'0123456789[]{},:"-.F'
                )
        path.write_bytes(damaged)
        with contextlib.suppress(UsageError):
            filled(small, path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("w.bin", b"\x80", "is a pickle, which may run code"),
        ("w.safetensors", b"not so", "cannot be read as safetensors"),
        ("nowhere.safetensors", None, "cannot be read as safetensors"),
        ("folder", {}, "has no weights: it needs"),
        ("folder", {"pytorch_model.bin": b"\x80"}, "only pickled weights (pytorch_model.bin)"),
        (
            "folder",
            {"m.safetensors": b"", "m.safetensors.index.json": b"[" * 10**5},
            "is no index of safetensors files",
        ),
    ],
)
def test_what_is_no_weights_file_is_refused(name: str, content: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
        for file, inside in content.items():
            (path / file).write_bytes(inside)
    with pytest.raises(UsageError) as refused:
        filled(small, path)
    assert says in str(refused.value)


def test_a_run_begins_with_them(tmp_path: Path) -> None:
    torch.manual_seed(9)
    model = small()
    path = saved(model, tmp_path / "w.safetensors")
    data = torch.randn(12, 8), torch.arange(12) % 3
    how: dict[str, Any] = {"steps": 2, "batch_size": 6, "microbatches": 2}
    given = Ring(nodes=1, progress=False).fit(model, data, run_dir=tmp_path / "given", **how)
    read = Ring(nodes=1, progress=False).fit(small, data, run_dir=tmp_path / "read", weights=str(path), **how)
    assert given.summary.weights_sha256 == read.summary.weights_sha256


class Copying(nn.Linear):
    """Whose state_dict is made of copies."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.register_state_dict_post_hook(lambda module, state, prefix, local: state.update(
            {name: tensor.clone() for name, tensor in state.items()}))  # fmt: skip


def test_values_reach_the_modules_own_tensors(tmp_path: Path) -> None:
    torch.manual_seed(9)
    model = Copying()
    path = saved(model, tmp_path / "w.safetensors")
    assert torch.equal(filled(Copying, path)["weight"], model.weight)


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    model = TiedLanguageModel()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["head.weight"] += 1
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match="head.weight .other values than embed.weight, which is the same tensor"):
        filled(TiedLanguageModel, tmp_path / "w.safetensors")
    (tmp_path / "both").mkdir()
    for file in ("a", "b"):
        saved(small(), tmp_path / "both" / f"{file}.safetensors")
    with pytest.raises(UsageError, match="is in a.safetensors and in b.safetensors"):
        filled(small, tmp_path / "both")
