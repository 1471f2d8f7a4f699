"""The folder `frozen` beside a run's checkpoints: parameters that nothing changes, written once.

Runs in one folder that train adapters of the same base have the same files there. The later run gives up its own and takes
those of the earlier one by a hard link: they are on the disk once, and each run may be deleted without harm to the others.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ringtmp.errors import CheckpointError
from ringtmp.runtime import json_with_checksum

FOLDER = "frozen"
MANIFEST = "manifest.json"


class FrozenFiles(msgspec.Struct, frozen=True):
    """What lies in the folder."""

    run: str
    files: dict[str, str]  # name -> SHA-256


def read_frozen(checkpoints: Path, run: str) -> dict[str, str]:
    """Name -> SHA-256; nothing where the run has frozen nothing, or began before that was so."""
    try:
        found = json_with_checksum.decode((checkpoints / FOLDER / MANIFEST).read_bytes(), FrozenFiles)
    except FileNotFoundError:
        return {}
    except (OSError, json_with_checksum.Broken) as error:
        raise CheckpointError(f"{FOLDER}: the manifest cannot be read: {error}") from error
    return found.files if found.run == run else {}


def share_with_others(folder: Path, files: Mapping[str, str]) -> None:
    """Where a run beside this one has a file of the same bytes, ours becomes a link to it. Where that cannot be, ours stays."""
    run = folder.parent.parent
    others = {
        digest: path
        for digest, path in _of_others(run)
        if path.parent != folder and digest in set(files.values())
    }  # fmt: skip
    for name, digest in files.items():
        own, spare = folder / name, folder / f".{name}.{os.getpid()}"
        try:
            if digest not in others or digest_of(others[digest]) != digest or os.stat(own).st_uid != os.geteuid():
                continue
            if not stat.S_ISREG(os.lstat(others[digest]).st_mode):  # a link to a link would lead elsewhere from here
                continue
            os.link(others[digest], spare)
            os.replace(spare, own)
        except OSError:  # another disk, or one without links, or somebody else's file
            spare.unlink(missing_ok=True)


def _of_others(run: Path) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for manifest in sorted(run.parent.glob(f"*/checkpoints/{FOLDER}/{MANIFEST}")):
        try:
            if manifest.stat().st_uid == os.geteuid():
                files = json_with_checksum.decode(manifest.read_bytes(), FrozenFiles).files
                found += [(digest, manifest.parent / name) for name, digest in files.items() if Path(name).name == name]
        except (OSError, json_with_checksum.Broken):  # somebody else's trouble
            continue
    return found


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
