"""The members of an ensemble in a checkpoint: of L layers, layer i of member k has the number k L + i.

Member 0 lies where a single model does. A checkpoint without members (the first, of the model all members begin with) has
one. How much each counts lies beside them, in `members.safetensors`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from ringtmp.errors import CheckpointError, UsageError
from ringtmp.model.portable_layer import Layer
from ringtmp.runtime.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    LayerTensors,
    State,
    named_weights,
    update_digest,
    weights_sha256,
)

_FILE = "members.safetensors"
_WEIGHTS = "weights"


def add_weights(writer: CheckpointWriter, weights: torch.Tensor) -> None:
    writer.add_beside(_FILE, {_WEIGHTS: weights})


def weights_of(checkpoint: Checkpoint) -> torch.Tensor | None:
    """How much each member counts; None: there is one model."""
    found = checkpoint.beside(_FILE).get(_WEIGHTS)
    if found is None:
        return None
    if found.dim() != 1 or not len(found) or not bool((found >= 0).all()) or abs(float(found.sum()) - 1) > 1e-3:
        raise CheckpointError(f"{checkpoint.folder.name}: the weights of its members are damaged")
    return found.clone()


def number_of(member: int, index: int, layers: int) -> int:
    return member * layers + index


class Member:
    """A member's weights, read as those of a single model are."""

    def __init__(self, checkpoint: Checkpoint, member: int, layers: int) -> None:
        weights = weights_of(checkpoint)
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        self._layers = layers
        self._member = member % (1 if weights is None else len(weights))

    def layer(self, index: int, layer: Layer) -> LayerTensors:
        return self._checkpoint.layer(number_of(self._member, index, self._layers), layer)

    def mapped_layer(self, index: int, layer: Layer) -> LayerTensors:
        return self._checkpoint.mapped_layer(number_of(self._member, index, self._layers), layer)

    def frozen(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return self._checkpoint.frozen(index, layer)


def sha256_of_all(checkpoint: Checkpoint, layers: Sequence[Layer], state: State) -> str:
    """Of a single model its `weights_sha256`; of an ensemble that of every tensor as `members.K.NAME`, then of `weights`."""
    weights = weights_of(checkpoint)
    if weights is None:
        return weights_sha256(checkpoint, layers, state)
    digest = hashlib.sha256()
    for number in range(len(weights)):
        for name, tensor in named_weights(Member(checkpoint, number, len(layers)), layers, state):
            update_digest(digest, f"members.{number}.{name}", tensor)
    update_digest(digest, _WEIGHTS, weights)
    return digest.hexdigest()


def refuse_members(checkpoint: Checkpoint, run_dir: Path, what: str) -> None:
    """UsageError for what needs one model."""
    if (weights := weights_of(checkpoint)) is not None:
        raise UsageError(
            f"{run_dir} is an ensemble of {len(weights)} models, and {what} needs one: use Result({str(run_dir)!r}).model, "
            "whose `members` are ordinary modules"
        )
