"""Weights of one GGUF file, tensor by tensor: quantised numbers become float32 and go straight into the model's own memory.

Names and layouts are those of the transformers library: its map from one set of names to the other, and what it does to each
tensor (a Llama file has the rows of q and k in another order). So the model is, bit for bit, the one that the library loads,
which holds all of it twice while it does.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ringtmp.data.gguf_header import StoredTensor, check_gguf
from ringtmp.errors import UsageError, reason_of, some_of, told_as_usage
from ringtmp.model.weights_file import own_tensors

#: Of quantised numbers that are converted at once.
PIECE_BYTES = 2**20
#: Tables of the positions, which the library computes from the configuration instead.
_UNUSED = re.compile(r"(blk\.\d+\.)?(rope_freqs|rope_factors_long|rope_factors_short|attn_rot_embd)(\.weight)?")
_PARTS = "transformers.modeling_gguf_pytorch_utils"


class GgufFile:
    """UsageError for an architecture or a quantisation that cannot be read, before anything is built."""

    def __init__(self, library: Any, path: Path) -> None:
        self._path = path
        self._said = f"--model hf:{path}"
        self._gguf = importlib.import_module("gguf")
        self._parts = importlib.import_module(_PARTS)
        with told_as_usage(self._said):
            self._header = check_gguf(path)
            if not self._header.own_order:
                raise ValueError("its numbers are written in the order of other machines: convert it on one of those")
            self._read, self._architecture = self._described()
            self.config = library.CONFIG_MAPPING[self._read["model_type"]].from_dict(dict(self._read))
        self._refuse_unknown_kinds()

    def _described(self) -> tuple[dict[str, Any], str]:
        """The model's settings and its architecture, as the library reads them. Not from the file itself: for its vocabulary,
        which nobody asks for here, each of the library's readers would take more memory than many a device has left."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / self._path.name
            copy.write_bytes(self._header.without_words)
            read = dict(self._parts.load_gguf_checkpoint(str(copy), return_tensors=False)["config"])
            (architecture,) = self._parts.read_field(self._gguf.GGUFReader(str(copy)), "general.architecture")
        if self._header.vocabulary:
            read.setdefault("vocab_size", self._header.vocabulary)
        return read, str(architecture)

    def _refuse_unknown_kinds(self) -> None:
        """A row of zeros is tried in each kind of quantisation."""
        unknown: dict[str, str] = {}
        for kind, name in {each.kind: each.name for each in reversed(self._header.tensors)}.items():
            _, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
            quantisation = self._gguf.GGMLQuantizationType(kind)
            try:
                self._gguf.dequantize(np.zeros((1, block_bytes), np.uint8), quantisation)
            except Exception:  # NotImplementedError, or whatever comes of bytes that are no such rows
                unknown[quantisation.name] = name
        if unknown:
            listed = some_of([f"{kind} ({name})" for kind, name in unknown.items()])
            raise UsageError(
                f"{self._said} has tensors in a quantisation that the gguf package does not read: {listed}"
            )

    @property
    def one_by_one(self) -> bool:
        """Whether each tensor of the file is one of the model: not where those of all experts of a layer are put together."""
        return not any("_exps." in each.name for each in self._header.tensors)

    def _float32(self, tensor: StoredTensor) -> Any:
        """Some rows at a time: on the way a number takes several times its size. Read, not mapped: pages of the file would
        count as this process's memory."""
        whole = np.empty(tensor.shape, dtype=np.float32)
        rows = whole.reshape(-1, whole.shape[-1] if whole.ndim else 1)
        row_bytes = tensor.size_bytes // len(rows)
        kind, at_once = self._gguf.GGMLQuantizationType(tensor.kind), max(1, PIECE_BYTES // row_bytes)
        with self._path.open("rb") as file:
            file.seek(tensor.begin)
            for start in range(0, len(rows), at_once):
                piece = rows[start : start + at_once]
                read = np.frombuffer(file.read(len(piece) * row_bytes), np.uint8)
                piece[:] = self._gguf.dequantize(read.reshape(len(piece), row_bytes), kind)
        return whole

    def fill(self, module: nn.Module) -> None:
        """UsageError that lists all names that the file lacks, has besides or has in another shape."""
        kind = self._parts.TENSOR_PROCESSORS.get(self._architecture, self._parts.TensorProcessor)
        processor = kind(config=self._read)
        names = self._parts.get_gguf_hf_weights_map(module, processor)
        own = own_tensors(module)
        filled: set[int] = set()
        wrong: list[str] = []
        extra: list[str] = []
        for each in self._header.tensors:
            try:
                given = self._given(each, processor, names)
            except (
                ArithmeticError,
                LookupError,
                TypeError,
                ValueError,
            ) as error:  # the library turns and splits it blindly
                wrong.append(f"{each.name} ({_sizes(each.shape)} in the file: {reason_of(error)})")
                filled.add(id(own.get(names.get(each.name, ""))))  # told once is enough
                continue
            if not given and not _UNUSED.fullmatch(each.name):
                extra.append(each.name)
            for name, tensor in given.items():
                target = own.get(name)
                if target is not None:
                    filled.add(id(target))
                if target is None or target.shape != tensor.shape:
                    there = "nothing of that name" if target is None else _sizes(target.shape)
                    wrong.append(f"{name} ({_sizes(tensor.shape)} in the file, {there} in the model)")
                    continue
                with torch.no_grad():
                    target.copy_(tensor)
        missing = list(dict.fromkeys(name for name, each in own.items() if id(each) not in filled))
        listed = (("it lacks", missing), ("has otherwise", wrong), ("has besides", extra))
        said = [f"{what} {some_of(each)}" for what, each in listed if each]
        if said:
            raise UsageError(f"{self._said} does not fit the model it describes: {'; '.join(said)}")

    def _given(self, tensor: StoredTensor, processor: Any, names: dict[str, str]) -> dict[str, torch.Tensor]:
        """A tensor of the file under its names in the model, by the library's rules; none: the model has no place for it."""
        aside: dict[str, torch.Tensor] = {}
        result = processor.process(
            weights=self._float32(tensor), name=tensor.name, tensor_key_mapping=names,
            parsed_parameters={"config": self._read, "tensors": aside},
        )  # fmt: skip
        if result.name in names:
            aside[names[result.name]] = torch.from_numpy(result.weights)
        return aside


def _sizes(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))
