"""Data by name, for the command line: digits, random:IxO, idx:DIR, npz:FILE, text:PATH, jsonl:PATH, pysource, parquet:PATH,
arrow:PATH, tar:PATH, - for standard input, FILE.py:factory."""

from __future__ import annotations

import gzip
import os
import re
import struct
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringtmp.data import standard_input
from ringtmp.data.shards import KINDS, USUAL_COLUMNS, WITH_COLUMNS, open_shards
from ringtmp.data.tables_and_streams import Shape, Source, Table, from_python, split, subset, tensors
from ringtmp.data.text_samples import DEFAULT_CONTEXT, Reading, read_files, read_text, tested
from ringtmp.data.user_factories import call_factory, is_factory, refuse_file_alone
from ringtmp.errors import UsageError, unknown

KNOWN = (
    "digits", "random:IxO", "idx:DIR", "npz:FILE", "text:PATH", "jsonl:PATH", "pysource", "parquet:PATH", "arrow:PATH",
    "tar:PATH", "-", "FILE.py:factory",
)  # fmt: skip
#: Without a colon and more behind it.
ALONE = ("digits", "pysource", standard_input.NAME)
TEST_SHARE = 0.2
RANDOM_SAMPLES = 8192


def is_text(name: str) -> bool:
    """Data that a tokeniser can read."""
    kind, _, rest = name.partition(":")
    return not is_factory(name) and (kind in ("text", "jsonl") if rest else kind == "pysource")


def load(
    name: str, seed: int, settings: Mapping[str, Any], tokens: Reading | None = None, *, batch_size: int = 32,
    columns: str | None = None, bad_lines: str = standard_input.REFUSE,
) -> tuple[Source, Source | None]:  # fmt: skip
    """(train, test) for a name. `settings` are the model's: a byte model's `context` is the length of a sample. With
    `tokens` text is read by a tokeniser; without, as bytes."""
    kind, _, rest = name.partition(":")
    context = int(settings.get("context", 0)) or DEFAULT_CONTEXT
    makers: dict[str, Callable[[], tuple[Source, Source | None]]] = {
        "digits": lambda: _digits(seed),
        "random": lambda: _random(rest, seed),
        "idx": lambda: _idx(Path(rest), seed),
        "npz": lambda: _npz(Path(rest), seed),
        "text": lambda: (
            read_text(name, Path(rest), False, tokens) if tokens else _bytes_of(name, _read_text(Path(rest)), context)
        ),
        "jsonl": lambda: read_text(name, Path(rest), True, _needed(name, tokens)),
        "pysource": lambda: (
            read_files(name, _python_sources(), tokens) if tokens else _bytes_of(name, _python_source(), context)
        ),
    }
    for shards in KINDS:
        makers[shards] = partial(open_shards, kind, Path(rest), seed, batch_size, _named(name, columns))
    makers[standard_input.NAME] = lambda: (standard_input.standard_input(batch_size, bad_lines=bad_lines), None)
    if bad_lines != standard_input.REFUSE and name != standard_input.NAME:
        raise UsageError(f"--bad-lines is for --data -, not for data {name}")
    if is_factory(name):
        return _factory(name, seed)
    refuse_file_alone("data", name)
    if kind not in makers:
        raise _unknown(name)
    if bool(rest) != (kind not in ALONE):
        raise UsageError(f"data {name!r}: write it as one of {', '.join(KNOWN)}")
    return makers[kind]()


#: How files are called that one of the names reads.
_BY_SUFFIX = {
    ".npz": "npz", ".txt": "text", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow",
    ".tar": "tar",
}  # fmt: skip


def _unknown(name: str) -> UsageError:
    suffix = Path(name).suffix.lower()
    if suffix in _BY_SUFFIX:
        path = name.partition(":")[2] or name
        return UsageError(f"unknown data {name!r}: write --data {_BY_SUFFIX[suffix]}:{path}")
    if suffix == ".jsonl":
        return UsageError(f"unknown data {name!r}: write --data jsonl:{name} for text, --data - < {name} for samples")
    if suffix in (".csv", ".tsv"):
        return UsageError(
            f"unknown data {name!r}: for CSV write a function that returns (inputs, targets) and give --data FILE.py:NAME, or "
            "save npz:FILE or parquet:FILE"
        )
    return unknown("data", name, KNOWN)


def _named(name: str, columns: str | None) -> tuple[str, ...]:
    if columns is None:
        return USUAL_COLUMNS
    found = tuple(each.strip() for each in columns.split(","))
    if name.partition(":")[0] not in WITH_COLUMNS:
        raise UsageError(f"--columns is for --data parquet:PATH and arrow:PATH, not for data {name}")
    if len(found) < 2 or not all(found):
        raise UsageError(
            f"--columns {columns}: name at least one input and, last, the target, such as height,weight,label"
        )
    return found


def _digits(seed: int) -> tuple[Table, Table]:
    with (files("ringtmp.data") / "digits" / "digits.npz").open("rb") as file, np.load(file) as archive:
        images = torch.from_numpy(archive["images"].astype(np.float32) / 16)[:, None]
        labels = torch.from_numpy(archive["labels"].astype(np.int64))
    return split(tensors("digits", images, labels), TEST_SHARE, seed)


def _random(size: str, seed: int) -> tuple[Table, Table]:
    match = re.fullmatch(r"(\d+(?:x\d+)*)x(\d+)", size)
    if not match or "0" in size.split("x"):
        raise UsageError(
            f"data 'random:{size}': write random:INPUTSxOUTPUTS, for instance random:784x10 or random:3x32x32x10"
        )
    shape = [int(part) for part in match[1].split("x")]
    classes = int(match[2])
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(RANDOM_SAMPLES, *shape, generator=generator)
    # Labels follow from the inputs through a random linear map, so that there is something to learn.
    teacher = torch.randn(inputs[0].numel(), classes, generator=generator)
    labels = (inputs.flatten(1) @ teacher).argmax(1)
    return split(tensors(f"random:{size}", inputs, labels, classes), TEST_SHARE, seed)


def _idx(folder: Path, seed: int) -> tuple[Table, Table]:
    """MNIST's own format: four files, gzipped or not."""

    def part(prefix: str) -> Table | None:
        images, labels = (_find_idx(folder, f"{prefix}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        if images is None or labels is None:
            return None
        pixels = torch.from_numpy(_read_idx(images)).to(torch.float32)[:, None] / 255
        return tensors(f"idx:{folder}", pixels, torch.from_numpy(_read_idx(labels)).long())

    if not folder.is_dir():
        raise UsageError(f"data idx: no folder {folder}")
    train, test = part("train"), part("t10k")
    if train is None:
        raise UsageError(
            f"data idx: {folder} must hold train-images-idx3-ubyte and train-labels-idx1-ubyte (or the same with .gz)"
        )
    return (train, test) if test is not None else split(train, TEST_SHARE, seed)


def _find_idx(folder: Path, stem: str) -> Path | None:
    names = (stem, stem.replace("-idx", ".idx"))
    return next(
        (folder / (name + end) for name in names for end in ("", ".gz") if (folder / (name + end)).exists()), None
    )


def _read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, dims = struct.unpack(">HBB", raw[:4])
        shape = struct.unpack(f">{dims}I", raw[4 : 4 + 4 * dims])
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise UsageError(f"data idx: {path} cannot be read: {error}") from error
    body = raw[4 + 4 * dims :]
    if zeros or kind != 8 or dims not in (1, 3) or int(np.prod(shape)) != len(body):
        raise UsageError(
            f"data idx: {path} is damaged: its header says {shape}, which is {int(np.prod(shape))} bytes, "
            f"and {len(body)} follow"
        )
    return np.frombuffer(body, np.uint8).reshape(shape).copy()


def _npz(path: Path, seed: int) -> tuple[Table, Table]:
    if not path.is_file():
        raise UsageError(f"data npz: no file {path}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"data npz: {path} cannot be read: {error}") from error
    if "inputs" not in arrays or "targets" not in arrays:
        raise UsageError(
            f"data npz: {path} must hold the arrays inputs and targets (and test_inputs, test_targets if it has a "
            f"test part); it holds {', '.join(sorted(arrays)) or 'nothing'}"
        )

    def part(prefix: str) -> Table:
        inputs, targets = (
            torch.from_numpy(np.ascontiguousarray(arrays[prefix + key])) for key in ("inputs", "targets")
        )
        if inputs.is_floating_point():
            inputs = inputs.float()
        return tensors(f"npz:{path}", inputs, targets.float() if targets.is_floating_point() else targets)

    whole = part("")
    return (whole, part("test_")) if "test_inputs" in arrays else split(whole, TEST_SHARE, seed)


def _read_text(path: Path) -> bytes:
    try:
        if path.is_dir():
            return b"\n".join(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file())
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"data text: {path} cannot be read: {error.strerror}") from error


def _needed(name: str, tokens: Reading | None) -> Reading:
    if tokens is None:
        raise UsageError(
            f"data {name} needs a tokeniser: give one with --tokenizer PATH, or a model that has one beside it "
            "(--model hf:PATH)"
        )
    return tokens


def _python_source() -> bytes:
    return b"\n".join(path.read_bytes() for path in _python_sources())


def _python_sources() -> list[Path]:
    """The running Python's own standard library, tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths = []
    for folder, inside, names in os.walk(root):
        inside[:] = set(inside) - skipped  # not even looked into: installed packages are many times the rest
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths.sort()
    if not paths:
        raise UsageError(f"data pysource: no Python source under {root}; use --data text:PATH")
    return paths


def _bytes_of(name: str, raw: bytes, context: int) -> tuple[Table, Table]:
    """Consecutive samples of `context` bytes, each with its next bytes as targets.

    The last tenth is kept for the test; at most 512 samples of it, evenly spread, are tested on.
    """
    size = (len(raw) - 1) // context
    if size < 2:
        raise UsageError(f"data {name} has {len(raw)} bytes, too few for two samples of {context} bytes")
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    offsets = torch.arange(context + 1)

    def take(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        window = text[index[:, None] * context + offsets].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    whole = Table(name, size, Shape((context,), False, 256), take, "next_byte")
    train, test = tested(size)
    return subset(whole, train), subset(whole, test)


def _factory(name: str, seed: int) -> tuple[Source, Source | None]:
    """The factory returns data, or (train, test)."""
    made = call_factory("data", name, {})()
    pair = (
        isinstance(made, tuple)
        and len(made) == 2
        and not all(isinstance(each, torch.Tensor | np.ndarray) for each in made)
    )
    if pair:
        return from_python(made[0], name, seed), from_python(made[1], name, seed)
    source = from_python(made, name, seed)
    return split(source, TEST_SHARE, seed) if isinstance(source, Table) else (source, None)
