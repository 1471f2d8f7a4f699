"""A decoder becomes cells: exported in evaluation alone, by the path its library takes when asked, and cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch

from ringtmp.errors import UsageError
from ringtmp.model import export_as_eager_runs
from ringtmp.model.analyse_graph import Fact
from ringtmp.model.build_cells import Cutting, cells_of
from ringtmp.model.call_module import Arguments
from ringtmp.model.check_layer import buffers_kept
from ringtmp.model.cut_cells import CutCell
from ringtmp.model.decoders import CLOSE, Decoder
from ringtmp.model.export import EXAMPLE_BATCH, Exporter
from ringtmp.model.export_cache import ExportCache, module_key
from ringtmp.model.portable_layer import Layer
from ringtmp.model.run_graph import Program


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
        if _agrees(decoder, kept[0].layer, kept[1]):
            return kept[0].layer, (kept[0].train, kept[0].evaluate), kept[1]
        cache.forget(key)
    phase("exporting the model")
    exporter = Exporter(whole=True)
    with export_as_eager_runs.paths()[0]():
        layer, tensors = exporter.evaluation(type(decoder).__name__, decoder, example)
    if not _agrees(decoder, layer, tensors):
        raise UsageError("the model that keeps keys and values computes something else once it is exported")
    cache.put(key, layer, exporter.facts, tensors)
    return layer, exporter.facts, tensors


def _agrees(decoder: Decoder, layer: Layer, tensors: dict[str, torch.Tensor]) -> bool:
    """The graph and eager mode, for several tokens and for one: their scores to rounding."""
    for count in (EXAMPLE_BATCH, 1):
        tokens, places = torch.arange(count), torch.arange(count)
        owned = {each.name: tensors[each.name].detach() for each in layer.tensors}
        owned |= {each.name: owned[each.name].clone() for each in layer.tensors if each.kind == "buffer"}
        with torch.no_grad():
            with buffers_kept(decoder):
                expected = decoder(tokens, places)
            found = Program(layer.evaluate).run([tokens, places], owned)[0]
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=CLOSE, atol=CLOSE):
            return False
    return True
