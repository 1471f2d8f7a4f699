"""A decoder becomes cells: exported in evaluation alone, by the path its library takes when asked, and cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch

from ringtmp.model import export_as_eager_runs
from ringtmp.model.analyse_graph import Fact
from ringtmp.model.build_cells import Cutting, cells_of
from ringtmp.model.call_module import Arguments
from ringtmp.model.cut_cells import CutCell
from ringtmp.model.decoders import Decoder
from ringtmp.model.export import EXAMPLE_BATCH, Exporter
from ringtmp.model.export_cache import ExportCache, module_key
from ringtmp.model.portable_layer import Layer


class DecoderCells(NamedTuple):
    cells: list[CutCell]
    entering: tuple[Fact, ...]  # tokens and positions
    others: dict[str, torch.Tensor]  # tensors that are no parameters: the store, tables, constants; by full name


def decoder_cells(decoder: Decoder, phase: Callable[[str], None] = lambda text: None) -> DecoderCells:
    decoder.requires_grad_(True)  # as in training a weight that two cells share has one owner, and is there once
    tokens = torch.zeros(EXAMPLE_BATCH, dtype=torch.int64)
    example = Arguments((), {"tokens": tokens, "positions": torch.arange(EXAMPLE_BATCH)})
    layer, facts, tensors = _exported(decoder, example, phase)
    cells = [_never_trained(each) for each in cells_of(decoder, layer, facts, Cutting())[0]]
    entering = tuple(Fact(("samples",), "int64", sample_bytes=8.0) for _ in range(2))
    others = {each.name: tensors[each.name] for each in layer.tensors if each.kind != "parameter"}
    return DecoderCells(cells, entering, others)


def _never_trained(cell: CutCell) -> CutCell:
    tensors = tuple(msgspec.structs.replace(each, trainable=False) for each in cell.layer.tensors)
    return replace(cell, layer=msgspec.structs.replace(cell.layer, tensors=tensors))


def _exported(
    decoder: Decoder, example: Any, phase: Callable[[str], None]
) -> tuple[Layer, tuple[Any, Any], dict[str, torch.Tensor]]:
    cache, key = ExportCache(), module_key(decoder, example, 0)
    if (kept := cache.get(key, decoder)) is not None:
        return kept[0].layer, (kept[0].train, kept[0].evaluate), kept[1]
    phase("exporting the model")
    exporter = Exporter(whole=True)
    with export_as_eager_runs.paths()[0]():
        layer, tensors = exporter.evaluation(type(decoder).__name__, decoder, example)
    cache.put(key, layer, exporter.facts, tensors)
    return layer, exporter.facts, tensors
