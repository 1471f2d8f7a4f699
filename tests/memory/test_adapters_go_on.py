"""`--adapter FOLDER`: an adapter of PEFT's layout is trained further; several adapters belong to one base."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from oracle import state_sha256
from ringtmp import Result, Ring
from ringtmp.errors import UsageError
from ringtmp.model.adapter_folder import lora_of
from ringtmp.model.lora import Lora, lora_text, parse_lora
from ringtmp.run.export_run import export_weights

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def base() -> Base:
    torch.manual_seed(3)
    return Base()


def fit(folder: Path, steps: int, *, targets: int = 3, model: nn.Module | None = None, **more: Any) -> Result:
    ring = Ring(nodes=1, progress=False)
    return ring.fit(
        model or base(), (X, torch.arange(24) % targets), steps=steps, batch_size=24, microbatches=2, run_dir=folder,
        optimizer=("sgd", {"lr": 0.1}), **more,
    )  # fmt: skip


def test_an_adapter_is_trained_further_from_where_it_ended(tmp_path: Path) -> None:
    half = fit(tmp_path / "half", 2, lora="r=2,alpha=6,on=second,first")
    export_weights(tmp_path / "half", tmp_path / "adapter")
    rest = fit(tmp_path / "rest", 2, adapter=str(tmp_path / "adapter"))
    again = fit(tmp_path / "again", 2, adapter=str(tmp_path / "adapter"))
    assert rest.summary.weights_sha256 == again.summary.weights_sha256 != half.summary.weights_sha256
    assert rest.summary.loss.first is not None
    assert half.summary.loss.last is not None
    assert rest.summary.loss.first < half.summary.loss.last, "it begins where the other ended"
    begun = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    ended = rest.model.state_dict()
    assert {name.removeprefix("base_model.model.") for name in begun} == {name for name in ended if "lora" in name}
    assert torch.equal(ended["first.base_layer.weight"], base().first.weight)
    for path in (tmp_path / "adapter").iterdir():
        path.unlink()
    done = export_weights(tmp_path / "rest", tmp_path / "further")
    assert done.difference == 0.0, "the folder it began with is not needed any more"
    assert lora_of(tmp_path / "further") == Lora(("first", "second"), 2, 6.0)
    assert state_sha256(Result(tmp_path / "rest").model) == rest.summary.weights_sha256


def spoilt(folder: Path, how: str) -> None:
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    said, tensors = json.loads(config.read_text()), load_file(weights)
    first = "base_model.model.first.lora_A.weight"
    if how == "shapes":
        tensors[first] = torch.zeros(3, 8)
        tensors["base_model.model.third.lora_A.weight"] = torch.zeros(2, 8)
        del tensors["base_model.model.second.lora_B.weight"]
    elif how == "modules":
        said["target_modules"] = ["frist", "secnod"]
    elif how == "kinds":
        said |= {"use_dora": True, "bias": "all", "target_modules": "all-linear", "r": "8"}
    elif how == "base changed":
        said |= {"init_lora_weights": "pissa_niter_4"}
    elif how == "variants":
        tiny = {"tau": 0.5}
        said |= {"alora_invocation_tokens": [1], "use_qalora": True, "use_bdlora": tiny, "arrow_config": tiny}
        said |= {"kasa_config": tiny, "monteclora_config": tiny, "velora_config": tiny, "use_what_comes_next": 1}
    elif how == "rank":
        said["r"] = 0
    elif how == "pickled":
        weights.rename(folder / "adapter_model.bin")
    elif how == "torn":
        config.write_text("{")
    elif how == "gone":
        config.unlink()
    elif how == "no tensors":
        weights.write_bytes(b"not so")
    if weights.exists() and how != "no tensors":
        save_file(tensors, weights)
    if how not in ("torn", "gone"):
        config.write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "shapes",
            (
                "it lacks base_model.model.second.lora_B.weight",
                "first.lora_A.weight (3x8 in the file, 2x8 in the model)",
                "has besides base_model.model.third.lora_A.weight",
            ),
        ),
        ("modules", ("has besides base_model.model.first.lora_A.weight",)),
        ("kinds", ("bias='all'", "use_dora=True", "target_modules='all-linear'", "r='8'")),
        ("base changed", ("init_lora_weights='pissa_niter_4'",)),
        (
            "variants",
            (
                "alora_invocation_tokens=[1]",
                "use_qalora=True",
                "use_bdlora={'tau': 0.5}",
                "arrow_config=",
                "kasa_config=",
                "monteclora_config=",
                "velora_config=",
                "use_what_comes_next=1",
            ),
        ),
        ("rank", ("r must be from 1 to 65536",)),
        ("pickled", ("pickled weights alone",)),
        ("no tensors", (": adapter_model.safetensors cannot be read as safetensors",)),
        ("torn", ("is no JSON",)),
        ("gone", ("No such file",)),
    ],
)
def test_what_does_not_fit_is_listed_at_once(how: str, says: tuple[str, ...], tmp_path: Path) -> None:
    fit(tmp_path / "half", 1, lora="r=2,on=first,second")
    export_weights(tmp_path / "half", tmp_path / "adapter")
    spoilt(tmp_path / "adapter", how)
    with pytest.raises(UsageError) as refused:
        fit(tmp_path / "run", 1, adapter=str(tmp_path / "adapter"))
    assert all(each in str(refused.value) for each in says), refused.value
    assert str(refused.value).startswith(f"adapter='{tmp_path / 'adapter'}'"), "as the user wrote it"
    assert not (tmp_path / "run" / "checkpoints").exists()


#: What PEFT 0.21 writes of a plain LoRA.
PLAIN: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": {"base_model_class": "Sequential", "parent_library": "torch.nn"}, "base_model_name_or_path": "base",
    "bias": "none", "corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "kasa_config": None,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8,
    "lora_bias": False, "lora_dropout": 0.0, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None, "peft_type": "LORA",
    "peft_version": "0.21.2", "qalora_group_size": 16, "r": 2, "rank_pattern": {}, "revision": None,
    "target_modules": ["first"], "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None,
    "use_bdlora": None, "use_dora": False, "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_how_an_adapter_began_does_not_matter_where_the_base_stayed(start: Any, tmp_path: Path) -> None:
    config = {**PLAIN, "init_lora_weights": start, "eva_config": {"rho": 2.0} if start == "eva" else None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert lora_of(tmp_path) == Lora(("first",), 2, 8.0)


@pytest.mark.parametrize("start", ["pissa", "olora", "corda", "loftq", "lora_ga", "mica", "unheard of", 1])
def test_an_adapter_that_began_with_a_changed_base_is_refused(start: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PLAIN, "init_lora_weights": start}))
    with pytest.raises(UsageError, match=f"init_lora_weights={start!r}"):
        lora_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({**PLAIN, "r": 2.5}), "r=2.5, which must be a whole number"),
        (json.dumps({**PLAIN, "r": math.inf}), "r=inf, which must be a whole number"),
        (json.dumps({**PLAIN, "r": math.nan}), "r=nan, which must be a whole number"),
        (json.dumps({**PLAIN, "r": 2**70}), "r must be from 1 to 65536"),
        (json.dumps({**PLAIN, "lora_alpha": math.nan}), "alpha above 0"),
        ("[" * 10**5, "is no JSON"),
    ],
)
def test_numbers_that_mean_no_adapter_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UsageError, match=says):
        lora_of(tmp_path)


def test_two_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    fit(tmp_path / "half", 1, lora="r=2,on=first")
    export_weights(tmp_path / "half", tmp_path / "adapter")
    with pytest.raises(UsageError, match=r"which was made with r=2,alpha=16.0,on=first"):
        fit(tmp_path / "run", 1, adapter=str(tmp_path / "adapter"), lora="r=4,on=first")
    with pytest.raises(UsageError, match="would freeze the adapters"):
        fit(tmp_path / "run", 1, adapter=str(tmp_path / "adapter"), train="head")
    with pytest.raises(UsageError, match="frist,secnod.* fit no module: did you mean 'first', 'second'"):
        fit(tmp_path / "run", 1, lora="on=frist,secnod")


def test_what_is_written_of_adapters_is_read_again() -> None:
    for lora in (Lora(("a", "b"), 2, 3.0, 0.1), Lora(("q",))):
        assert parse_lora(lora_text(lora)) == lora


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        return self.head(self.attention(x, x, x)[0].squeeze(1))


class Counting(Base):
    def get_extra_state(self) -> Any:
        return {"calls": 0}

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "more", "says"),
    [
        (Attention, {"lora": "on=out_proj"}, "attention.out_proj.*nn.MultiheadAttention takes the weight out"),
        (Counting, {}, r"the model \(Counting\) has a get_extra_state"),
    ],
)
def test_modules_that_would_end_in_raw_errors_are_refused(make: Any, more: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        fit(tmp_path / "run", 1, model=make(), **more)


@pytest.mark.long
def test_two_runs_on_one_base_give_two_adapters_of_one_peft_model(tmp_path: Path) -> None:
    """Quick: the layout and what is read of it are tested above."""
    peft: Any = pytest.importorskip("peft")
    results = {}
    for name, targets in (("one", 3), ("two", 2)):
        results[name] = fit(tmp_path / name, 4, targets=targets, lora="r=2,alpha=6,on=first,second")
        export_weights(tmp_path / name, tmp_path / f"adapter-{name}")
    model = peft.PeftModel.from_pretrained(base(), str(tmp_path / "adapter-one"), adapter_name="one").eval()
    model.load_adapter(str(tmp_path / "adapter-two"), adapter_name="two")
    for name, result in results.items():
        model.set_adapter(name)
        with torch.no_grad():
            assert torch.equal(model(X), result.model(X)), name
    # And back: what PEFT writes is trained further.
    model.save_pretrained(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "two" / "adapter_config.json").read_text()).keys() <= PLAIN.keys()
    further = fit(tmp_path / "further", 1, adapter=str(tmp_path / "saved" / "two"), targets=2)
    assert further.summary.loss.first is not None
    assert results["two"].summary.loss.last is not None
    assert further.summary.loss.first < results["two"].summary.loss.last


def test_the_base_of_several_adapters_is_on_the_disk_once(tmp_path: Path) -> None:
    files: dict[str, list[int]] = {}
    for name, targets in (("one", 3), ("two", 2)):
        done = fit(tmp_path / name, 1, targets=targets, lora="r=2,on=first,second")
        folder = tmp_path / name / "checkpoints" / "frozen"
        files[name] = [each.stat().st_ino for each in sorted(folder.glob("*.safetensors"))]
    assert files["one"] == files["two"] != []
    assert not list(folder.glob(".*"))
    shutil.rmtree(tmp_path / "one")
    assert state_sha256(Result(tmp_path / "two").model) == done.summary.weights_sha256
    torch.manual_seed(4)
    fit(tmp_path / "other", 1, model=Base(), lora="r=2,on=first,second")
    other = [each.stat().st_ino for each in (tmp_path / "other" / "checkpoints" / "frozen").glob("*.safetensors")]
    assert not set(other) & set(files["two"]), "another base"
