"""Files that are written aside, in a folder that nobody else may enter, and put in their place together when they are whole."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ringtmp.errors import UsageError
from ringtmp.system.files import sync
from ringtmp.units import bytes_text


@contextlib.contextmanager
def staged(to: Path, force: bool, *, folder: bool) -> Iterator[Path]:
    """A folder in which to write `to.name`, with whatever belongs beside it, or the files of the folder `to`. When the block
    ends they are synced and renamed; when it fails, nothing is left. `force`: files of the same names are replaced; nothing
    else ever is."""
    refuse_existing(to, force, folder)
    made: list[Path] = []
    hidden: Path | None = None
    try:
        made = _make(to.parent)
        hidden = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))  # mode 0700
        inner = hidden / "files"
        inner.mkdir()
        yield inner
        for file in sorted(inner.iterdir()):
            sync(file)
        sync(inner)
        _move(inner, to, force, folder)
        sync(to.parent)
        made = []
    except OSError as error:
        raise UsageError(f"--to {to} cannot be written: {error.strerror or error}") from error
    finally:
        if hidden is not None:
            shutil.rmtree(hidden, ignore_errors=True)
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()


def refuse_existing(to: Path, force: bool, folder: bool) -> None:
    """UsageError where something is there that may not be replaced."""
    if to.is_dir() != folder and to.exists():
        raise UsageError(f"--to {to} is {'a folder' if to.is_dir() else 'a file'}: choose another name")
    if force or not to.exists() or (folder and not any(to.iterdir())):
        return
    raise UsageError(
        f"--to {to} {'is not empty' if folder else 'exists already'}: choose another name, or replace it with --force"
    )


def require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UsageError(f"{folder.resolve()} has {bytes_text(free)} free, and the files take {bytes_text(needed)}")


def _make(folder: Path) -> list[Path]:
    """The folders that were not there, innermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _move(inner: Path, to: Path, force: bool, folder: bool) -> None:
    if folder and not (to.exists() and any(to.iterdir())):
        inner.rename(to)  # an empty folder is replaced
        return
    target = to if folder else to.parent
    files = sorted(inner.iterdir(), key=lambda each: each.name == to.name)  # what others refer to comes first
    for file in files:  # all of them before the first is moved
        refuse_existing(target / file.name, force, folder=False)
    for file in files:
        file.replace(target / file.name)
    sync(target)
