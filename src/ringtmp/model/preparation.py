"""What is done to a model before it is read: weights from a file, adapters, and which parameters are trained."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from ringtmp.errors import UsageError, some_of
from ringtmp.model.lora import Lora, add_adapters, parse_lora, refuse_unmatched
from ringtmp.model.weights_file import WeightsFile


@dataclass(frozen=True)
class Preparation:
    weights: str | None = None
    lora: Lora | None = None
    train: tuple[str, ...] = ()  # patterns of names; empty: as the model says, or the adapters alone

    @staticmethod
    def of(weights: str | None, lora: str | None, train: str | None) -> Preparation:
        patterns = tuple(each.strip() for each in (train or "").split("|") if each.strip())
        if train is not None and not patterns:
            raise UsageError("--train is empty: give names of parameters, such as 'head|*.bias', or leave it out")
        return Preparation(weights, None if lora is None else parse_lora(lora), patterns)


class Preparing:
    """`take` every layer in order, or the whole module under the prefix ""; then `finish`, which refuses what fitted none."""

    def __init__(self, preparation: Preparation, seed: int) -> None:
        self._how = preparation
        self._file = None if preparation.weights is None else WeightsFile(Path(preparation.weights))
        self._seed = seed
        self._adapted: set[str] = set()
        self._fitted: set[str] = set()
        self._modules: list[str] = []
        self._parameters: list[str] = []
        self._trained = self._adapters_trained = False

    def take(self, prefix: str, module: nn.Module) -> None:
        if self._file is not None:
            self._file.fill(prefix, module)
        if self._how.lora is not None:
            self._modules += [f"{prefix}{name}" for name, _ in module.named_modules() if name]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed + len(self._modules))
                self._adapted |= add_adapters(module, self._how.lora, prefix)
        for name, parameter in module.named_parameters():
            full = f"{prefix}{name}"
            self._parameters.append(full)
            if self._how.train:
                fitting = {each for each in self._how.train if fits(each, full)}
                self._fitted |= fitting
                parameter.requires_grad_(bool(fitting))
            self._trained = self._trained or parameter.requires_grad
            self._adapters_trained = self._adapters_trained or (parameter.requires_grad and ".lora_" in name)

    def finish(self) -> None:
        """UsageError for what fits nothing, and where nothing is left to train."""
        if self._file is not None:
            self._file.finish()
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


def fits(pattern: str, name: str) -> bool:
    """'*.bias' is compared with the whole name; a pattern without * may stand anywhere in it."""
    return fnmatchcase(name, pattern) if any(each in pattern for each in "*?[") else pattern in name
