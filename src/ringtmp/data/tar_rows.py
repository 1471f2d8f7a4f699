"""Samples of tar files as WebDataset writes them: members with one stem are one sample."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ringtmp.data.arrow_rows import Sample, unreadable
from ringtmp.errors import UsageError


def tar_rows(path: Path) -> Iterator[Sample]:
    """KEY.npy is a sample's input, KEY.cls its class or KEY.target.npy its target."""
    try:
        with tarfile.open(path) as archive:
            key, found = "", dict[str, bytes]()
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # else it keeps a description of all that went by
                if not member.isfile():
                    continue
                stem, _, ending = member.name.partition(".")
                if stem != key and found:
                    yield _sample(path, key, found)
                    found = {}
                key = stem
                content = archive.extractfile(member)
                found[ending] = content.read() if content is not None else b""
            if found:
                yield _sample(path, key, found)
    except (OSError, tarfile.TarError) as error:
        raise unreadable(path, error) from error


def _sample(path: Path, key: str, found: dict[str, bytes]) -> Sample:
    if "npy" not in found or not {"cls", "target.npy"} & found.keys():
        raise UsageError(
            f"data tar: sample {key} of {path} has {', '.join(sorted(found))}: it needs {key}.npy and {key}.cls (or "
            f"{key}.target.npy); images must be arrays by now"
        )
    try:
        target = torch.tensor(int(found["cls"])) if "cls" in found else _array(found["target.npy"])
        return _array(found["npy"]), target if target.is_floating_point() else target.long()
    except (ValueError, TypeError, EOFError) as error:
        raise UsageError(f"data tar: sample {key} of {path} cannot be read: {error}") from None


def _array(raw: bytes) -> torch.Tensor:
    tensor = torch.from_numpy(np.load(io.BytesIO(raw), allow_pickle=False))
    return tensor.float() if tensor.is_floating_point() else tensor
