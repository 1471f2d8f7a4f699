"""Which files of a folder are its shards, and which of them are the test part.

What others leave in such folders: Spark and Hadoop name what is no data with `_` or `.` first, and keep unfinished work in
`_temporary`; `save_to_disk` of Hugging Face's datasets lists a split's files in `state.json`, beside caches that are no data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ringtmp.errors import UsageError

#: What the files or folders of the test part are called, as Hugging Face's datasets do.
TEST = re.compile(r"(test|validation|valid|val)\b.*")
ENDINGS = {"parquet": (".parquet",), "arrow": (".arrow", ".feather"), "tar": (".tar",)}
UNFINISHED = "_temporary"
STATE = "state.json"


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct, rename={"files": "_data_files", "rows": "_indices_data_files"}):
    files: list[_File]
    rows: list[_File] | None = None


def find_shards(kind: str, place: Path) -> tuple[list[Path], list[Path]]:
    """(train, test), each in the order of its names."""
    name = f"{kind}:{place}"
    files = sorted(_inside(kind, place)) if place.is_dir() else [place] if place.is_file() else []
    if not files:
        raise UsageError(f"data {name}: there is no {kind} file at {place}")
    test = [each for each in files if any(map(TEST.fullmatch, _names(each, place)))]
    train = [each for each in files if each not in test]
    if not train:
        raise UsageError(f"data {name}: every file is one of a test part ({', '.join(each.name for each in test[:3])})")
    return train, test


def _names(file: Path, place: Path) -> tuple[str, ...]:
    """Of the file and of the folders in `place` it lies in."""
    return file.relative_to(place).parts if place.is_dir() else (file.name,)


def _inside(kind: str, folder: Path) -> Iterator[Path]:
    if (folder / UNFINISHED).is_dir():
        raise UsageError(
            f"data {kind}: whoever writes {folder} has not finished, or has failed: there is {UNFINISHED} in it; wait for it, "
            "or remove that folder if what is there is all there will be"
        )
    if kind == "arrow" and (folder / STATE).is_file():
        yield from _saved_to_disk(folder)
        return
    for each in sorted(folder.iterdir()):
        if each.name.startswith(("_", ".")):
            continue
        if each.is_dir():
            yield from _inside(kind, each)
        elif each.name.endswith(ENDINGS[kind]):
            yield each


def _saved_to_disk(folder: Path) -> Iterator[Path]:
    """The files of one split, as datasets' `save_to_disk` has listed them."""
    path = folder / STATE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=_State)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"data arrow: {path} cannot be read: {error}") from None
    if state.rows:
        raise UsageError(
            f"data arrow: {folder} chooses rows of its files by a list; write it anew with flatten_indices().save_to_disk(…)"
        )
    for each in state.files:
        if Path(each.filename).name != each.filename or not (folder / each.filename).is_file():
            raise UsageError(f"data arrow: {path} names the file {each.filename}, which is not in {folder}")
        yield folder / each.filename
