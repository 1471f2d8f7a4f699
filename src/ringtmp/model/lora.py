"""Low-rank adapters: beside a frozen linear layer two narrow ones are trained, whose product is added to it.

    y = W x + b + (alpha / r) B A dropout(x)         A: r x inputs, as a linear layer begins; B: outputs x r, zeros

Names and order of operations are those of the PEFT library, so its adapters and these are the same numbers.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import torch
from torch import nn

from ringtmp.errors import UsageError, nearest, some_of

#: More than any layer has inputs or outputs.
LARGEST_RANK = 65536


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`on`: last parts of the names of linear layers, such as q_proj."""

    on: tuple[str, ...]
    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0


def parse_lora(text: str) -> Lora:
    """'r=8,alpha=16,on=q_proj,v_proj': what has no = belongs to the name before it."""
    found: dict[str, list[str]] = {}
    key = ""
    for part in (each.strip() for each in text.split(",")):
        name, equals, value = part.partition("=")
        key = name.strip() if equals else key
        if not key or not (value if equals else part):
            raise UsageError(f"--lora {text!r} is not written as r=8,alpha=16,on=q_proj,v_proj")
        found.setdefault(key, []).append((value if equals else part).strip())
    if not found.get("on"):
        raise UsageError(f"--lora {text!r} does not say on which layers: add on=q_proj,v_proj")
    numbers: dict[str, Any] = {}
    for name, kind in (("r", int), ("alpha", float), ("dropout", float)):
        for value in found.pop(name, [])[-1:]:
            try:
                numbers[name] = kind(value)
            except ValueError as error:
                raise UsageError(f"--lora {name}={value} must be a number") from error
    lora = Lora(tuple(found.pop("on")), **numbers)
    if found:
        raise UsageError(f"--lora {next(iter(found))}=… is not known: it takes r, alpha, dropout and on")
    return checked_lora(lora, f"--lora {text!r}")


def checked_lora(lora: Lora, said: str) -> Lora:
    if (
        not 1 <= lora.r <= LARGEST_RANK
        or not lora.alpha > 0
        or not math.isfinite(lora.alpha)
        or not 0 <= lora.dropout < 1
    ):
        raise UsageError(f"{said}: r must be from 1 to {LARGEST_RANK}, alpha above 0 and dropout from 0 to below 1")
    return lora


def lora_text(lora: Lora) -> str:
    """As `parse_lora` reads it."""
    dropout = f",dropout={lora.dropout!r}" if lora.dropout else ""
    return f"r={lora.r},alpha={lora.alpha!r}{dropout},on={','.join(lora.on)}"


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Module, inputs: int, outputs: int, lora: Lora) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        self.lora_A = nn.Linear(inputs, lora.r, bias=False)
        self.lora_B = nn.Linear(lora.r, outputs, bias=False)
        self.scaling = lora.alpha / lora.r
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.to(next(base.parameters()).dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.base_layer(x)
        added: torch.Tensor = self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling
        return given + added


def add_adapters(module: nn.Module, lora: Lora, prefix: str = "") -> set[str]:
    """In place. Everything but the adapters is frozen. Returns the names of `on` that were found."""
    module.requires_grad_(False)
    found: set[str] = set()
    made: dict[int, LoraLinear] = {}  # a module that stands in several places has one adapter, in all of them
    places = [(name, child) for name, child in module.named_modules(remove_duplicate=False)]
    for name, child in places:
        full = f"{prefix}{name}".rstrip(".")
        fitting = {each for each in lora.on if full == each or full.endswith(f".{each}")}
        if not fitting:
            continue
        found |= fitting
        size = _size(child)
        if size is None:
            has = "it has adapters already" if isinstance(child, LoraLinear) else f"it is a {type(child).__name__}"
            raise UsageError(f"--lora on={full}: {has}, and adapters go on linear layers")
        parent = module.get_submodule(name.rpartition(".")[0])
        if name and isinstance(parent, nn.MultiheadAttention):
            raise UsageError(
                f"--lora on={full}: nn.MultiheadAttention takes the weight out of this layer instead of calling it, so an "
                "adapter would do nothing; adapt other layers, or write the attention with nn.Linear for q, k, v and output"
            )
        if not name:
            raise UsageError(f"--lora on={full}: it is a layer of a list; give the model as one nn.Module")
        if id(child) not in made:
            made[id(child)] = LoraLinear(child, *size, lora)
    for name, child in places:
        if id(child) in made:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, made[id(child)])
    return found


def refuse_unmatched(lora: Lora, found: set[str], names: list[str]) -> None:
    """`names`: of all modules."""
    unmatched = [each for each in lora.on if each not in found]
    if unmatched:
        kinds = list(dict.fromkeys(re.sub(r".*\.", "", name) for name in names))
        near = dict.fromkeys(nearest(each, kinds) for each in unmatched)
        hints = [repr(each) for each in near if each]
        hint = f"did you mean {', '.join(hints)}? " if hints else ""
        fit = "fits" if len(unmatched) == 1 else "fit"
        raise UsageError(f"--lora on={','.join(unmatched)} {fit} no module: {hint}there are {some_of(kinds)}")


def _size(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer; of transformers' Conv1D, too, which is one with its weight turned."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return int(weight.shape[0]), int(weight.shape[1])
    return None
