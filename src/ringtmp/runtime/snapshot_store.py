"""What a node keeps from one generation to the next: snapshots of snapshots, its own and its neighbour's; under all-reduce,
where every worker has the whole model, what it had in hand when the generation ended.

In memory where there is room, else in files of a private folder. Files are not synced: a machine that lost its power has
lost its snapshots, and its neighbour has them.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import torch

from ringtmp.errors import ProtocolError
from ringtmp.runtime.checkpoint import LayerTensors
from ringtmp.runtime.layer_snapshot import Label, LayerSnapshot, Writing
from ringtmp.system.resources import free_memory_bytes
from ringtmp.units import bytes_text
from ringtmp.wire.tensors import raw_bytes

#: Kept in memory only if so much stays free for every byte of it: the next snapshot, and the training itself.
ROOM_FACTOR = 4


class SnapshotStore:
    def __init__(
        self, folder: Path | None = None, free_bytes: Callable[[], int] = free_memory_bytes, taken_up: bool = False
    ) -> None:
        """Without a folder everything is in memory. The folder is made when it is first needed. `taken_up`: with what another
        process has left there."""
        self._folder = folder
        self._free_bytes = free_bytes
        self._held: dict[tuple[int, int], LayerSnapshot] = {}
        self._files: dict[tuple[int, int], Label] = {}
        self._writing: dict[tuple[int, int], Writing] = {}
        #: By step and layer: what the generation before left.
        self.in_hand: dict[tuple[int, int], LayerTensors] = {}
        self._frozen: dict[int, dict[str, torch.Tensor]] = {}  # by layer: in no snapshot, since nothing changes it
        #: What must stay free whatever is kept. The master's checkpoints pass through its memory layer by layer.
        self.reserve_bytes = 0
        if taken_up:
            self._take_up()

    def put(self, label: Label, views: Sequence[memoryview], mode: str) -> str | None:
        """Why it could not be kept; None if it is. The label that is kept has the digest."""
        trouble = self.begin(label, mode)
        for view in views:
            trouble = trouble or self.add(label, view)
        return trouble or self.finish(label)

    def begin(self, label: Label, mode: str) -> str | None:
        """Of one that comes piece by piece: in memory where it may be, else into a file, of which no more than a piece is
        in memory. Returns why it cannot be kept."""
        key = (label.step, label.layer)
        self._abandon(key)
        spare = room_bytes(self)
        in_memory = mode == "memory" or (mode == "auto" and spare > ROOM_FACTOR * label.size)
        if not in_memory and self._folder is not None:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._writing[key] = Writing(label, self._path(*key).open("wb"))
            except OSError as error:
                return error.strerror or str(error)
            return None
        if spare < label.size:
            beside = f" beside the {bytes_text(self.reserve_bytes)} of a checkpoint" if self.reserve_bytes else ""
            left, size = bytes_text(max(0, spare)), bytes_text(label.size)
            return f"{left} of memory are left{beside}, and a layer of {size} does not fit in"
        if not in_memory:
            return "there is neither memory nor a disk for it"
        self._writing[key] = Writing(label)
        return None

    def awaits(self, label: Label) -> bool:
        """Whether it has begun and is neither finished nor given up."""
        return (label.step, label.layer) in self._writing

    def add(self, label: Label, piece: memoryview) -> str | None:
        """The next piece. Returns why it cannot be kept, and then it is forgotten."""
        key = (label.step, label.layer)
        try:
            self._writing[key].add(piece)
        except (OSError, ProtocolError) as error:
            self._abandon(key)
            return getattr(error, "strerror", None) or str(error)
        return None

    def finish(self, label: Label) -> str | None:
        """All has come. If the label has a digest it must be that of what came."""
        key = (label.step, label.layer)
        writing = self._writing[key]
        sealed = writing.sealed()
        if not writing.whole or (label.digest and label.digest != sealed.digest):
            self._abandon(key)
            return f"layer {label.layer} in the snapshot of step {label.step} does not match its digest"
        if writing.file is None:
            self._held[key] = writing.finished()
        else:
            try:
                writing.file.close()
            except OSError as error:
                self._abandon(key)
                return error.strerror or str(error)
            self._files[key] = sealed
        del self._writing[key]
        return None

    def label(self, step: int, layer: int) -> Label | None:
        held = self._held.get((step, layer))
        return self._files.get((step, layer)) if held is None else held.label

    def piece(self, label: Label, start: int, size: int) -> torch.Tensor | None:
        """Some of its bytes; None if they cannot be had."""
        size = min(size, label.size - start)
        held = self._held.get((label.step, label.layer))
        if held is not None:
            return held.body[start : start + size]
        if (label.step, label.layer) not in self._files:
            return None
        content = bytearray(size)
        try:
            with self._path(label.step, label.layer).open("rb") as file:
                file.seek(start)
                came = file.readinto(content)
        except OSError:
            return None
        return torch.frombuffer(content, dtype=torch.uint8) if came == size else None

    def get(self, step: int, layer: int) -> LayerSnapshot | None:
        """All of it, in memory."""
        held = self._held.get((step, layer))
        label = self._files.get((step, layer))
        if held is not None or label is None:
            return held
        body = self.piece(label, 0, label.size)
        return None if body is None else LayerSnapshot(label, body)

    def contents(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted({**self._held, **self._files, **self.in_hand}))

    def hand_over(self, states: dict[tuple[int, int], LayerTensors]) -> None:
        """Layers as a member leaves them to the next generation's, by step and layer. Nothing is copied."""
        self.in_hand = states

    def claim(self) -> dict[tuple[int, int], LayerTensors]:
        """What the generation before left."""
        states, self.in_hand = self.in_hand, {}
        return states

    def keep_frozen(self, layer: int, tensors: dict[str, torch.Tensor]) -> None:
        """Nothing is copied."""
        self._frozen[layer] = tensors

    def frozen(self, layer: int) -> dict[str, torch.Tensor]:
        return self._frozen.get(layer, {})

    @property
    def frozen_bytes(self) -> int:
        return sum(each.nbytes for layer in self._frozen.values() for each in layer.values())

    def forget_frozen(self, but: Collection[int]) -> None:
        """Of layers that are elsewhere now."""
        self._frozen = {layer: found for layer, found in self._frozen.items() if layer in but}

    def leave(self) -> None:
        """Everything into the folder, each with its label, for the process that takes this one's place. What does not get there
        is missing later, and what gets there in part does not match its digest."""
        assert self._folder is not None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for key, held in list(self._held.items()):
            self._path(*key).write_bytes(raw_bytes(held.body) if held.label.size else b"")
        for key in [*self._held, *self._files]:
            if (label := self.label(*key)) is not None:
                self._label_path(*key).write_bytes(msgspec.msgpack.encode(label))

    def _take_up(self) -> None:
        """What the process before this one left in the folder."""
        for path in sorted(self._folder.glob("*.label")) if self._folder is not None else ():
            with contextlib.suppress(OSError, msgspec.DecodeError):
                label = msgspec.msgpack.decode(path.read_bytes(), type=Label)
                if self._path(label.step, label.layer).stat().st_size == label.size:
                    self._files[label.step, label.layer] = label
            path.unlink(missing_ok=True)

    def free(self, before: int) -> None:
        """Older snapshots are needed no more."""
        self._drop(lambda step: step < before)

    def discard(self, step: int) -> None:
        """This snapshot will not be whole."""
        self._drop(lambda at: at == step)

    def keep_only(self, step: int) -> None:
        """The run is back at this step: what came later will come again."""
        self._drop(lambda at: at != step)

    def close(self) -> None:
        self._drop(lambda step: True)
        self._frozen = {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _drop(self, unwanted: Callable[[int], bool]) -> None:
        for key in [each for each in self._held if unwanted(each[0])]:
            del self._held[key]
        for key in [each for each in self._files if unwanted(each[0])]:
            del self._files[key]
            with contextlib.suppress(OSError):
                self._path(*key).unlink(missing_ok=True)

        for key in [each for each in self._writing if unwanted(each[0])]:
            self._abandon(key)

    def _abandon(self, key: tuple[int, int]) -> None:
        """What has come of it goes."""
        writing = self._writing.pop(key, None)
        if writing is not None and writing.file is not None:
            with contextlib.suppress(OSError):
                writing.file.close()
            with contextlib.suppress(OSError):
                self._path(*key).unlink(missing_ok=True)

    def _label_path(self, step: int, layer: int) -> Path:
        return self._path(step, layer).with_suffix(".label")

    def _path(self, step: int, layer: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{step}-{layer}"


def room_bytes(store: SnapshotStore) -> int:
    """Memory that may be taken for snapshots."""
    return store._free_bytes() - store.reserve_bytes
