"""Checkpoints: one safetensors file per layer for weights and one for optimizer state, keyed by the model's own names.

    checkpoints/step-00000120/manifest.json            step, progress, SHA-256 of every file and of itself
                              weights-0003.safetensors  parameters and persistent buffers: plain PyTorch loads these
                              state-0003.safetensors    optimizer state, other buffers, constants
                frozen/weights-0003.safetensors        parameters that nothing changes: written once, with the first one

Written layer by layer into a hidden folder, synced, renamed: a checkpoint is there whole or not at all. Two whole ones are
kept. What counts is what a manifest says and whether the digests are right; a folder with any other name, of another run or
of another step than its name says is somebody else's: never used, never removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ringtmp.data.stream_batches import StreamPlace
from ringtmp.errors import CheckpointError
from ringtmp.model.portable_layer import Layer
from ringtmp.model.shrink_frozen_weights import enlarged
from ringtmp.runtime import json_with_checksum
from ringtmp.runtime.frozen_files import FOLDER, MANIFEST, FrozenFiles, digest_of, read_frozen, share_with_others
from ringtmp.system.files import sync, write_atomic
from ringtmp.wire.tensors import raw_bytes

FORMAT = 1
#: A tensor's numbers are believed to lie at most this far apart on average: it may be a column of a wide matrix.
MOST_SPREAD = 4096
_strides = msgspec.json.Decoder(dict[str, list[int]])
#: The folder of what all checkpoints of a run share.
_NAME = re.compile(r"step-(\d{8,})")
StateName = tuple[str, str]
#: Files of a checkpoint as they were when their digests were right: name, inode, size, time of the last change.
Stamp = frozenset[tuple[str, int, int, int]]
#: A model's `state_dict` as names: each, and the first one that the same tensor has.
State = Sequence[tuple[str, str]]
LayerTensors = tuple[list[torch.Tensor], dict[StateName, torch.Tensor]]


class Progress(msgspec.Struct, frozen=True):
    """What a run must remember besides tensors."""

    step: int
    best_loss: float | None = None
    epochs_without_gain: int = 0
    epochs_done: int = 0
    stream: StreamPlace = StreamPlace()
    outer_round: int = 0  # exchanges with another home so far

    def after_epoch(self, epoch: int, loss: float | None) -> Progress:
        """`loss` on the test part, if there is one."""
        if loss is None:
            return msgspec.structs.replace(self, epochs_done=epoch + 1)
        gained = self.best_loss is None or loss < self.best_loss
        return Progress(
            self.step, loss if gained else self.best_loss, 0 if gained else self.epochs_without_gain + 1, epoch + 1,
            outer_round=self.outer_round,
        )  # fmt: skip


class Manifest(msgspec.Struct, frozen=True):
    format: int
    run: str
    progress: Progress
    files: dict[str, str]  # name -> SHA-256
    frozen: dict[str, str] = {}  # of those in the folder `frozen`, which all checkpoints of a run share


class CheckpointWriter:
    """One checkpoint being written. `add` every layer, then `commit`."""

    def __init__(
        self, folder: Path, run: str, progress: Progress, sound: set[Stamp] | None = None, *, behind: bool = False
    ) -> None:
        """`sound`: checkpoints that need not be read again to know it; this one is added when it is there. `behind`: `add`
        leaves what waits for the disk to `commit`, which another thread may call, while layers change again."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._parent = folder
        self._final = folder / _name(progress.step)
        self._hidden = folder / f".{self._final.name}.{os.getpid()}"
        self._sound = set() if sound is None else sound
        for left in folder.glob(".step-*"):  # of a master that was killed while it saved; a run has one master
            shutil.rmtree(left, ignore_errors=True)
        for left in (folder / FOLDER).glob(".weights-*"):
            left.unlink(missing_ok=True)
        self._hidden.mkdir()
        self._run = run
        self._progress = progress
        self._files: dict[str, str] = {}
        self._behind = behind
        self._unsettled: list[str] = []  # written, and perhaps not on the disk
        self._frozen = {} if progress.step == 0 else read_frozen(folder, run)
        self._aside = folder / FOLDER
        self.bytes = 0

    def add(
        self,
        index: int,
        layer: Layer,
        tensors: Sequence[torch.Tensor | None],
        state: dict[StateName, torch.Tensor],
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        """`frozen`: names of tensors that never change. They are written with the first checkpoint, and may be None later."""
        weights: dict[str, torch.Tensor] = {}
        rest: dict[str, torch.Tensor] = {}
        still: dict[str, torch.Tensor] = {}
        for each, tensor in zip(layer.tensors, tensors, strict=True):
            if each.name in frozen and _weights_file(index) in self._frozen:
                continue
            assert tensor is not None, "it is nowhere else"
            if each.name in frozen and self._progress.step == 0:
                still[layer.full_name(each)] = tensor
            elif each.saved:
                weights[layer.full_name(each)] = tensor
            else:
                rest[f"{each.kind}/{layer.full_name(each)}"] = tensor
        names = {each.name: layer.full_name(each) for each in layer.tensors}
        for (parameter, key), tensor in state.items():
            rest[f"optimizer/{names[parameter]}/{key}"] = tensor
        self.add_beside(_weights_file(index), weights)
        if rest:
            self.add_beside(f"state-{index:04d}.safetensors", rest)
        if still:
            self._aside.mkdir(mode=0o700, exist_ok=True)
            self._write(self._aside / _weights_file(index), still)
            self._frozen[_weights_file(index)] = _settled(self._aside / _weights_file(index))

    def add_beside(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """A file of this name, whatever it is of."""
        self._write(self._hidden / name, tensors)
        self._unsettled.append(name)
        if not self._behind:
            self._settle()

    def _settle(self) -> None:
        for name in self._unsettled:
            self._files[name] = _settled(self._hidden / name)
        self._unsettled.clear()

    def begin_again(self) -> None:
        """Nothing that was added counts."""
        for name in (*self._files, *self._unsettled):
            (self._hidden / name).unlink()
        self._files.clear()
        self._unsettled.clear()
        self.bytes = 0

    def commit(self) -> Path:
        self._settle()
        if self._frozen and self._progress.step == 0:
            share_with_others(self._aside, self._frozen)
            write_atomic(self._aside / MANIFEST, json_with_checksum.encode(FrozenFiles(self._run, self._frozen)))
            sync(self._aside)
        manifest = Manifest(FORMAT, self._run, self._progress, self._files, self._frozen)
        path = self._hidden / "manifest.json"
        path.write_bytes(json_with_checksum.encode(manifest))
        sync(path)
        sync(self._hidden)
        aside = self._hidden.with_suffix(".before")
        if self._final.exists():
            self._final.rename(aside)
        self._hidden.rename(self._final)
        sync(self._parent)
        shutil.rmtree(aside, ignore_errors=True)
        self._sound.add(_stamp(self._final))
        self._prune()
        return self._final

    def _prune(self) -> None:
        """Beside this one, whose digests were taken from the disk, the newest whole one before it stays. What is older
        than that is not needed any more, nor what is damaged."""
        kept = False
        for step, path in _own(self._parent):
            if step >= self._progress.step or _whose(path) not in (None, (self._run, step)):
                continue
            if not kept and self._is_sound(path):
                kept = True
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _is_sound(self, path: Path) -> bool:
        if _stamp(path) in self._sound:
            return True
        try:
            Checkpoint(path)
        except CheckpointError:
            return False
        self._sound.add(_stamp(path))
        return True

    def abandon(self) -> None:
        shutil.rmtree(self._hidden, ignore_errors=True)
        if self._progress.step == 0:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _write(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Never into a file that is there: another run may have a link to it."""
        strides = {key: list(tensor.stride()) for key, tensor in tensors.items() if not tensor.is_contiguous()}
        spare = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(
                {key: tensor.detach().contiguous() for key, tensor in tensors.items()},
                str(spare),
                metadata={"strides": json.dumps(strides)} if strides else None,
            )
            spare.rename(path)
        except SafetensorError as error:  # its only trouble with sound tensors is the disk
            said = re.search(r"os error (\d+)", str(error))
            code = int(said[1]) if said else errno.EIO
            raise OSError(code, os.strerror(code)) from error
        finally:
            spare.unlink(missing_ok=True)
        self.bytes += path.stat().st_size


def _settled(path: Path) -> str:
    """When it is on the disk: its digest."""
    sync(path)
    return digest_of(path)


class Weights(Protocol):
    """What a ring is laid out from."""

    def layer(self, index: int, layer: Layer) -> LayerTensors: ...
    def frozen(self, index: int, layer: Layer) -> dict[str, torch.Tensor]: ...


class Mapped(Protocol):
    """What a model's weights are read from without taking memory of their own."""

    def mapped_layer(self, index: int, layer: Layer) -> LayerTensors: ...


class Checkpoint:
    """A checkpoint on disk whose digests were right when it was opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest = json_with_checksum.decode((folder / "manifest.json").read_bytes(), Manifest)
        except OSError as error:
            raise CheckpointError(f"{folder.name}: the manifest cannot be read: {error.strerror}") from error
        except json_with_checksum.Broken as error:
            raise CheckpointError(f"{folder.name}: the manifest {error}") from error
        if self.manifest.format != FORMAT:
            raise CheckpointError(f"{folder.name}: format {self.manifest.format}, this version reads {FORMAT}")
        if _weights_file(0) not in self.manifest.files:
            raise CheckpointError(f"{folder.name}: the manifest is damaged: it has no {_weights_file(0)}")
        files = {name: (folder / name, digest) for name, digest in self.manifest.files.items()}
        aside = folder.parent / FOLDER
        files |= {f"{FOLDER}/{name}": (aside / name, digest) for name, digest in self.manifest.frozen.items()}
        for name, (path, digest) in files.items():
            if not path.is_file():
                raise CheckpointError(f"{folder.name}: {name} is missing")
            if digest_of(path) != digest:
                raise CheckpointError(f"{folder.name}: {name} is damaged (its SHA-256 does not match)")

    @property
    def progress(self) -> Progress:
        return self.manifest.progress

    def layer(self, index: int, layer: Layer) -> LayerTensors:
        """The layer's tensors in its own order, and its optimizer state; freshly allocated, hence aligned."""
        tensors, state = self.mapped_layer(index, layer)
        return [_laid_out(each) for each in tensors], {name: _laid_out(each) for name, each in state.items()}

    def mapped_layer(self, index: int, layer: Layer) -> LayerTensors:
        """The same as the files' own pages, which take no memory of their own: to be read, not to be computed with."""
        still = self._read_frozen(index)
        weights = self._read(_weights_file(index)) | still
        rest = self._read(f"state-{index:04d}.safetensors")
        tensors: list[torch.Tensor] = []
        for each in layer.tensors:
            name = layer.full_name(each)
            aside = each.saved or name in still
            source, key = (weights, name) if aside else (rest, f"{each.kind}/{name}")
            if key not in source or tuple(source[key].shape) != each.shape:
                raise CheckpointError(f"{self.folder.name}: {name} is missing or has another shape")
            tensors.append(source[key])
        local = {layer.full_name(each): each.name for each in layer.tensors if each.kind == "parameter"}
        state: dict[StateName, torch.Tensor] = {}
        for key, tensor in rest.items():
            parameter, _, what = key.removeprefix("optimizer/").rpartition("/")
            if key.startswith("optimizer/") and parameter in local:
                state[local[parameter], what] = tensor
        return tensors, state

    def beside(self, name: str) -> dict[str, torch.Tensor]:
        """A file that belongs to no layer; empty if there is none."""
        return self._read(name)

    def frozen(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        """The layer's tensors that never change, by its own names."""
        found = self._read_frozen(index)
        return {each.name: _laid_out(found[name]) for each in layer.tensors if (name := layer.full_name(each)) in found}

    def _read_frozen(self, index: int) -> dict[str, torch.Tensor]:
        there = _weights_file(index) in self.manifest.frozen
        return self._opened(self.folder.parent / FOLDER / _weights_file(index)) if there else {}

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        return self._opened(self.folder / name) if name in self.manifest.files else {}

    def _opened(self, path: Path) -> dict[str, torch.Tensor]:
        try:
            with safe_open(str(path), framework="pt") as file:
                strides = _strides.decode((file.metadata() or {}).get("strides", "{}"))
                return {key: _strided(file.get_tensor(key), strides.get(key)) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, msgspec.DecodeError, _NoLayout) as error:
            raise CheckpointError(f"{self.folder.name}: {path.name} cannot be read: {error}") from error


class _NoLayout(ValueError):  # noqa: N818
    pass


def _strided(tensor: torch.Tensor, strides: list[int] | None) -> torch.Tensor:
    """As it was laid out when it was written."""
    if strides is None:
        return tensor
    if len(strides) != tensor.dim() or min(strides, default=0) < 0:
        raise _NoLayout(f"strides {strides} for a tensor of shape {tuple(tensor.shape)}")
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    if spanned > MOST_SPREAD * tensor.numel() + 2**20:
        raise _NoLayout(f"strides {strides} spread {tensor.numel()} numbers over the room of {spanned}")
    return torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype).copy_(tensor)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def latest(folder: Path, run: str | None = None) -> tuple[Checkpoint, list[str]]:
    """The newest checkpoint that is whole, of this run if it is named, and a word on each newer one that is not."""
    warnings: list[str] = []
    for step, path in _own(folder):
        try:
            found = Checkpoint(path)
            if found.progress.step != step:
                held = found.progress.step
                raise CheckpointError(
                    f"{path.name}: it holds the checkpoint of step {held}, which belongs in {_name(held)}"
                )
            if run not in (None, found.manifest.run):
                raise CheckpointError(f"{path.name}: it belongs to another run")
            return found, warnings
        except CheckpointError as error:
            warnings.append(str(error))
    detail = "; ".join(warnings) or "there is none"
    raise CheckpointError(f"no usable checkpoint in {folder}: {detail}")


def _weights_file(index: int) -> str:
    return f"weights-{index:04d}.safetensors"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _own(folder: Path) -> list[tuple[int, Path]]:
    """Folders with the very name a checkpoint gets, by step, the newest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(((step, path) for step, path in found if path.is_dir() and path.name == _name(step)), reverse=True)


def _whose(path: Path) -> tuple[str, int] | None:
    """The run and step a checkpoint says it is of; None where it cannot be read."""
    try:
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return manifest.run, manifest.progress.step


def _stamp(folder: Path) -> Stamp:
    files = ((path.name, path.stat()) for path in folder.iterdir())
    return frozenset((name, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in files)


def weights_sha256(checkpoint: Checkpoint, layers: Sequence[Layer], state: State = ()) -> str:
    """SHA-256 over every parameter and persistent buffer in `state_dict` order: name, dtype, shape, bytes."""
    digest = hashlib.sha256()
    for name, tensor in named_weights(checkpoint, layers, state):
        update_digest(digest, name, tensor)
    return digest.hexdigest()


def named_weights(checkpoint: Mapped, layers: Sequence[Layer], state: State = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's `state_dict`, its tensors as they lie in the files. `state`: its names, and of each the tensor's first name;
    empty: layer by layer."""
    where = {
        layer.full_name(each): (at, layer)
        for at, layer in enumerate(layers)
        for each in layer.tensors
        if each.saved and each.kind != "scale"
    }
    opened, held = -1, dict[str, torch.Tensor]()
    for name, first in state or [(name, name) for name in where]:
        at, layer = where[first]
        if at != opened:
            (whole, given), opened = enlarged(layer, checkpoint.mapped_layer(at, layer)[0]), at
            held = {layer.full_name(each): tensor for each, tensor in zip(whole.tensors, given, strict=True)}
        yield name, held[first]


def update_digest(digest: Any, name: str, tensor: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = ",".join(map(str, tensor.shape))
    digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
    digest.update(raw_bytes(tensor.detach().contiguous()))
