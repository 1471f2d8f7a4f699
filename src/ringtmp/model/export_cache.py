"""What a module was exported to, kept for the next run of the same module.

A module is the same when its classes' source files, its plain attributes, the shapes of its tensors, the shapes of the
sample and the versions in use are. That is a good guess and no proof, so what comes from here is compared with eager mode
like a fresh export, and forgotten if it differs. That compares the whole and not how it is cut, so a file begins with a digest
of the rest: one that was damaged is forgotten. A file that cannot be read or written is no cache, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn
from torch.utils import _pytree as pytree

from ringtmp.model.analyse_graph import Fact
from ringtmp.model.portable_layer import Layer
from ringtmp.system.files import cache_folder, write_atomic

#: Of all files together; the oldest go first.
MOST_BYTES = 256 * 2**20
DIGEST_BYTES = hashlib.sha256().digest_size


class Exported(msgspec.Struct, frozen=True):
    layer: Layer
    train: tuple[Fact, ...]
    evaluate: tuple[Fact, ...]
    constants: bytes  # safetensors


class ExportCache:
    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder() / "export"

    def get(self, key: str, module: nn.Module) -> tuple[Exported, dict[str, torch.Tensor]] | None:
        """What is known, and the tensors of the layer: the module's own, and constants."""
        path = self._folder / key
        try:
            content = path.read_bytes()
            digest, exported = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if digest != _digest(key, exported):
                self.forget(key)
                return None
            found = msgspec.msgpack.decode(exported, type=Exported)
            constants = load(found.constants)
            path.touch()
        except (OSError, msgspec.DecodeError, SafetensorError):
            return None
        own = {name: each.detach() for name, each in (*module.named_parameters(), *module.named_buffers())}
        own |= {name: each for name, each in module.state_dict().items() if name not in own}
        there = {**own, **constants}
        if any(each.name not in there or there[each.name].shape != each.shape for each in found.layer.tensors):
            return None
        return found, {each.name: there[each.name] for each in found.layer.tensors}

    def put(
        self, key: str, layer: Layer, facts: tuple[Iterable[Fact], Iterable[Fact]], tensors: dict[str, torch.Tensor]
    ) -> None:
        constants = {
            each.name: tensors[each.name].clone().contiguous() for each in layer.tensors if each.kind == "constant"
        }
        exported = msgspec.msgpack.encode(Exported(layer, tuple(facts[0]), tuple(facts[1]), save(constants)))
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._folder / key, _digest(key, exported) + exported, durable=False)
            self._make_room()

    def forget(self, key: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / key).unlink()

    def _make_room(self) -> None:
        files = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in files:
            total += path.stat().st_size
            if total > MOST_BYTES:
                path.unlink()


def _digest(key: str, exported: bytes) -> bytes:
    return hashlib.sha256(key.encode() + exported).digest()


def module_key(module: nn.Module, example: Any, path: int) -> str:
    """`path`: by which of the ways a model may go it is exported."""
    digest = hashlib.sha256()
    files: dict[str, str] = {}

    def add(*values: object) -> None:
        digest.update("\0".join(map(str, values)).encode())

    transformers = getattr(sys.modules.get("transformers"), "__version__", "")
    add(_exporting(), torch.__version__, transformers, sys.version, path, pytree.tree_structure(example))
    add(*((tuple(leaf.shape), leaf.dtype, leaf.stride()) for leaf in pytree.tree_leaves(example)))
    for name, each in module.named_modules(remove_duplicate=False):
        add(name, type(each).__module__, type(each).__qualname__, _source(type(each), files))
        for attribute, value in sorted(vars(each).items()):
            if attribute not in ("_parameters", "_buffers", "_modules", "training"):
                add(attribute, _text(value))
    numbers: dict[int, int] = {}  # which of the names are one tensor
    owned = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in owned:
        shared = numbers.setdefault(id(tensor), len(numbers))
        add(name, shared, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
    return digest.hexdigest()[:40]


@cache
def _exporting() -> str:
    """A digest of the code that exports: what another version of it wrote is not taken."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _source(kind: type, files: dict[str, str]) -> str:
    """A digest of the file a class is written in; of one that has none, its methods' code."""
    try:
        file = inspect.getsourcefile(kind) or ""
        if file not in files:
            files[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        return files[file]
    except (OSError, TypeError):
        return repr([getattr(value, "__code__", None) and value.__code__.co_code for value in vars(kind).values()])


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, list | tuple | set | frozenset):
        items = [_text(item) for item in value]
        return f"{type(value).__name__} {items if isinstance(value, list | tuple) else sorted(items)}"
    if isinstance(value, dict):
        return f"dict {[(_text(key), _text(item)) for key, item in value.items()]}"
    if callable(getattr(value, "to_dict", None)):  # a configuration
        with contextlib.suppress(Exception):  # somebody else's code
            return f"{type(value).__qualname__} {sorted(map(str, value.to_dict().items()))}"
    return f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__qualname__', '')}"
