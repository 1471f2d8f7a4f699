"""What is done to a model before it is read: weights from a file, adapters, and which parameters are trained."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from ringtmp.errors import UsageError, some_of
from ringtmp.model.adapter_folder import lora_of, weights_of
from ringtmp.model.frozen_formats import WHOLE, FrozenAs
from ringtmp.model.lora import Lora, add_adapters, lora_text, parse_lora, refuse_unmatched
from ringtmp.model.shrink_frozen_weights import channel_axes
from ringtmp.model.weights_file import WeightsFile


@dataclass(frozen=True)
class Preparation:
    weights: str | None = None
    lora: Lora | None = None
    train: tuple[str, ...] = ()  # patterns of names; empty: as the model says, or the adapters alone
    frozen_as: FrozenAs = WHOLE
    adapter: str | None = None  # a folder of PEFT with the first weights of the adapters

    @staticmethod
    def of(
        weights: str | None,
        lora: str | None,
        train: str | None,
        frozen_as: FrozenAs = WHOLE,
        adapter: str | None = None,
    ) -> Preparation:
        patterns = tuple(each.strip() for each in (train or "").split("|") if each.strip())
        if train is not None and not patterns:
            raise UsageError("--train is empty: give names of parameters, such as 'head|*.bias', or leave it out")
        adapters = None if lora is None else parse_lora(lora)
        if adapter is not None:
            known = lora_of(Path(adapter))
            if adapters not in (None, known):
                raise UsageError(
                    f"--lora {lora} and --adapter {adapter}, which was made with {lora_text(known)}: leave --lora out to train "
                    "it further, or --adapter to begin a new one"
                )
            adapters = known
        return Preparation(weights, adapters, patterns, frozen_as, adapter)


class Preparing:
    """`take` every layer in order, or the whole module under the prefix ""; then `finish`, which refuses what fitted none."""

    def __init__(self, preparation: Preparation, seed: int) -> None:
        self._how = preparation
        weights = preparation.weights
        self._file = None if weights is None else WeightsFile(Path(weights), f"--weights {weights}")
        self._adapter = None if preparation.adapter is None else weights_of(Path(preparation.adapter))
        self._seed = seed
        self._adapted: set[str] = set()
        self._fitted: set[str] = set()
        self._modules: list[str] = []
        self._parameters: list[str] = []
        self._trained = self._adapters_trained = self._small = False

    def take(self, prefix: str, module: nn.Module) -> None:
        if self._file is not None:
            self._file.fill(prefix, module)
        if self._how.lora is not None:
            self._modules += [f"{prefix}{name}" for name, _ in module.named_modules() if name]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed + len(self._modules))
                self._adapted |= add_adapters(module, self._how.lora, prefix)
        if self._adapter is not None:
            self._adapter.fill(prefix, module)
        for name, parameter in module.named_parameters():
            full = f"{prefix}{name}"
            self._parameters.append(full)
            if self._how.train:
                fitting = {each for each in self._how.train if fits(each, full)}
                self._fitted |= fitting
                parameter.requires_grad_(bool(fitting))
            self._trained = self._trained or parameter.requires_grad
            self._adapters_trained = self._adapters_trained or (parameter.requires_grad and ".lora_" in name)
        self._small = self._small or bool(channel_axes(module))

    def finish(self) -> None:
        """UsageError for what fits nothing, and where nothing is left to train."""
        if self._file is not None:
            self._file.finish()
        if self._adapter is not None:
            self._adapter.finish()
        if self._how.lora is not None:
            refuse_unmatched(self._how.lora, self._adapted, self._modules)
        for each in self._how.train:
            if each not in self._fitted:
                raise UsageError(f"--train {each!r} fits no parameter: the model has {some_of(self._parameters)}")
        if self._how.lora is not None and self._how.train and not self._adapters_trained:
            raise UsageError(
                f"--train {'|'.join(self._how.train)!r} would freeze the adapters of --lora: add |lora to it"
            )
        if self._parameters and not self._trained:
            raise UsageError(
                "every parameter of the model is frozen (requires_grad=False), so nothing is left to train: choose some with "
                "--train"
            )
        if self._how.frozen_as.small and not self._small:
            raise UsageError(
                f"--frozen-as {self._how.frozen_as.name}: no linear, embedding or convolution layer of the model has a frozen "
                "float32 weight; freeze some with --lora or --train, or leave --frozen-as out"
            )


def fits(pattern: str, name: str) -> bool:
    """'*.bias' is compared with the whole name; a pattern without * may stand anywhere in it."""
    return fnmatchcase(name, pattern) if any(each in pattern for each in "*?[") else pattern in name
