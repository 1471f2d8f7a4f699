"""What a node keeps from one generation to the next: parcels of snapshots, its own and its neighbour's; under all-reduce,
where every worker has the whole model, what it had in hand when the generation ended.

In memory where there is room, else in files of a private folder. Files are not synced: a machine that lost its power has
lost its snapshots, and its neighbour has them.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ringtmp.resources import free_memory_bytes
from ringtmp.ring.checkpoint import LayerTensors
from ringtmp.ring.parcel import Label, Parcel
from ringtmp.wire.tensors import raw_bytes

#: Kept in memory only if so much stays free for every byte of it: the next snapshot, and the training itself.
ROOM_FACTOR = 4


class Shelf:
    def __init__(self, folder: Path | None = None, free_bytes: Callable[[], int] = free_memory_bytes) -> None:
        """Without a folder everything is in memory. The folder is made when it is first needed."""
        self._folder = folder
        self._free_bytes = free_bytes
        self._parcels: dict[tuple[int, int], Parcel] = {}
        self._files: dict[tuple[int, int], Label] = {}
        self._in_hand: dict[tuple[int, int], LayerTensors] = {}

    def put(self, parcel: Parcel, mode: str) -> str | None:
        """Why it could not be kept; None if it is."""
        key = (parcel.label.step, parcel.label.layer)
        in_memory = mode == "memory" or (mode == "auto" and self._free_bytes() > ROOM_FACTOR * parcel.label.size)
        if in_memory:
            if mode == "memory" and self._free_bytes() < parcel.label.size:
                return "no memory is free"
            self._parcels[key] = parcel
            return None
        if self._folder is None:
            return "there is neither memory nor a disk for it"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path(*key).write_bytes(raw_bytes(parcel.body) if parcel.body.numel() else b"")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path(*key).unlink(missing_ok=True)
            return error.strerror or str(error)
        self._files[key] = parcel.label
        return None

    def get(self, step: int, layer: int) -> Parcel | None:
        parcel = self._parcels.get((step, layer))
        label = self._files.get((step, layer))
        if parcel is not None or label is None:
            return parcel
        try:
            content = bytearray(self._path(step, layer).read_bytes())
        except OSError:
            return None
        body = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return Parcel(label, body)

    def contents(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted({**self._parcels, **self._files, **self._in_hand}))

    def hand_over(self, states: dict[tuple[int, int], LayerTensors]) -> None:
        """Layers as a member leaves them to the next generation's, by step and layer. Nothing is copied."""
        self._in_hand = states

    def claim(self) -> dict[tuple[int, int], LayerTensors]:
        """What the generation before left."""
        states, self._in_hand = self._in_hand, {}
        return states

    def free(self, before: int) -> None:
        """Older snapshots are needed no more."""
        self._drop(lambda step: step < before)

    def keep_only(self, step: int) -> None:
        """The run is back at this step: what came later will come again."""
        self._drop(lambda at: at != step)

    def close(self) -> None:
        self._drop(lambda step: True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _drop(self, unwanted: Callable[[int], bool]) -> None:
        for key in [each for each in self._parcels if unwanted(each[0])]:
            del self._parcels[key]
        for key in [each for each in self._files if unwanted(each[0])]:
            del self._files[key]
            with contextlib.suppress(OSError):
                self._path(*key).unlink(missing_ok=True)

    def _path(self, step: int, layer: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{step}-{layer}"
