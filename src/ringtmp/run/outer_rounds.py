"""What the rounds of two homes begin with, on the disk: shared weights and the velocity of the outer step, layer by layer.

    homes/round-00000003/manifest.json       round, step, SHA-256 of every file and of all that it holds together
                         0003.safetensors    begun/NAME and velocity/NAME

A checkpoint says of which round it is (`Progress.outer_round`). The newest two rounds are kept, as are checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ringtmp.errors import CheckpointError
from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.model.portable_layer import Layer, OwnedTensor
from ringtmp.runtime import json_with_checksum
from ringtmp.runtime.checkpoint import update_digest
from ringtmp.runtime.frozen_files import digest_of
from ringtmp.system.files import sync

KEPT = 2
_NAME = re.compile(r"round-(\d{8,})")


class Manifest(msgspec.Struct, frozen=True):
    run: str
    round: int
    step: int  # the round began with
    state: str
    files: dict[str, str]  # name -> SHA-256


def shared(layer: Layer, aside: bool) -> list[OwnedTensor]:
    """What both homes have alike after an exchange: all that is part of the model and may change."""
    frozen = frozen_names(layer, aside)
    return [each for each in layer.tensors if each.saved and each.name not in frozen]


def trained(tensors: Sequence[OwnedTensor]) -> list[OwnedTensor]:
    """Those that an outer step is made for; of the others that are floating point the mean is taken as it is."""
    return [each for each in tensors if each.kind == "parameter" and each.trainable]


class Begun:
    """What a round begins with. `layers`: the shared tensors of each."""

    def __init__(self, folder: Path, layers: Sequence[Sequence[OwnedTensor]]) -> None:
        self._folder = folder
        self._layers = layers
        try:
            self.manifest = json_with_checksum.decode((folder / "manifest.json").read_bytes(), Manifest)
        except OSError as error:
            raise CheckpointError(f"{folder.name}: the manifest cannot be read: {error.strerror}") from error
        except json_with_checksum.Broken as error:
            raise CheckpointError(f"{folder.name}: the manifest {error}") from error
        for name, digest in self.manifest.files.items():
            if not (folder / name).is_file() or digest_of(folder / name) != digest:
                raise CheckpointError(f"{folder.name}: {name} is missing or damaged")

    def weights(self, layer: int) -> list[torch.Tensor]:
        return self._read(layer, "begun", self._layers[layer])

    def velocity(self, layer: int) -> list[torch.Tensor]:
        return self._read(layer, "velocity", trained(self._layers[layer]))

    def _read(self, layer: int, part: str, tensors: Sequence[OwnedTensor]) -> list[torch.Tensor]:
        if not tensors:
            return []
        try:
            with safe_open(str(self._folder / _file(layer)), framework="pt") as file:
                return [file.get_tensor(f"{part}/{each.name}") for each in tensors]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._folder.name}: {_file(layer)} cannot be read: {error}") from error


class BegunWriter:
    """One round's beginning being written. `add` every layer in order, then `commit`."""

    def __init__(self, rounds: Rounds, number: int, step: int) -> None:
        self._rounds = rounds
        self._number, self._step = number, step
        self._final = rounds.folder / _name(number)
        self._hidden = rounds.folder / f".{self._final.name}.{os.getpid()}"
        rounds.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in rounds.folder.glob(".round-*"):  # of a master that was killed; a run has one
            shutil.rmtree(left, ignore_errors=True)
        self._hidden.mkdir()
        self._files: dict[str, str] = {}
        self._digest = hashlib.sha256()

    def add(self, layer: int, weights: Sequence[torch.Tensor], velocity: Sequence[torch.Tensor]) -> None:
        tensors = self._rounds.layers[layer]
        if not tensors:
            return
        held = {f"begun/{each.name}": value for each, value in zip(tensors, weights, strict=True)}
        held |= {f"velocity/{each.name}": value for each, value in zip(trained(tensors), velocity, strict=True)}
        held = {name: value.detach().contiguous() for name, value in held.items()}
        for name, value in held.items():
            update_digest(self._digest, f"{layer}/{name}", value)
        path = self._hidden / _file(layer)
        try:
            save_file(held, str(path))
            sync(path)
        except (SafetensorError, OSError) as error:  # with sound tensors the disk is its only trouble
            raise CheckpointError(f"{self._final} cannot be written: {error}") from error
        self._files[path.name] = digest_of(path)

    def commit(self) -> Begun:
        state = self._digest.hexdigest()
        manifest = Manifest(self._rounds.run, self._number, self._step, state, self._files)
        try:
            (self._hidden / "manifest.json").write_bytes(json_with_checksum.encode(manifest))
            sync(self._hidden / "manifest.json")
            shutil.rmtree(self._final, ignore_errors=True)
            self._hidden.rename(self._final)
            sync(self._final.parent)
        except OSError as error:
            raise CheckpointError(f"{self._final} cannot be written: {error.strerror}") from error
        self._rounds.prune(self._number)
        return self._rounds.read(self._number)

    def abandon(self) -> None:
        shutil.rmtree(self._hidden, ignore_errors=True)


class Rounds:
    def __init__(self, folder: Path, run: str, layers: Sequence[Layer], aside: bool) -> None:
        self.folder = folder
        self.run = run
        self.layers = [shared(each, aside) for each in layers]

    def read(self, number: int) -> Begun:
        """CheckpointError: it is not there, damaged, or of another run."""
        found = Begun(self.folder / _name(number), self.layers)
        if (found.manifest.run, found.manifest.round) != (self.run, number):
            raise CheckpointError(f"{_name(number)} belongs to another run or round")
        return found

    def prune(self, newest: int) -> None:
        for path in self.folder.glob("round-*"):
            match = _NAME.fullmatch(path.name)
            if match and not newest - KEPT < int(match[1]) <= newest:
                shutil.rmtree(path, ignore_errors=True)


def _name(number: int) -> str:
    return f"round-{number:08d}"


def _file(layer: int) -> str:
    return f"{layer:04d}.safetensors"
