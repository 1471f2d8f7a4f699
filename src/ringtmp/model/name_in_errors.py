"""What an error about a module speaks of: a layer by its name, or the model, of which the user gave no name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Subject:
    name: str
    kind: str  # its class
    whole: bool = False  # the model itself, not one of its layers

    @property
    def noun(self) -> str:
        return "model" if self.whole else "layer"

    def __str__(self) -> str:
        return self.seen()

    def seen(self, more: str = "") -> str:
        """With a word on how it was looked at, such as "training"."""
        kind = f"({self.kind}, {more})" if more else f"({self.kind})"
        return f"the model {kind}" if self.whole else f"layer {self.name!r} {kind}"


def layer_called(name: str, module: nn.Module) -> Subject:
    return Subject(name, type(module).__name__)


def model_itself(module: nn.Module) -> Subject:
    return Subject(type(module).__name__, type(module).__name__, whole=True)
