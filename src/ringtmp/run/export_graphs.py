"""What a run's model computes, as a file for other programs: ONNX, or a program of torch.export. Any number of samples.

from                 the run's own evaluation graphs; the model's class is not needed
inputs, outputs      by the names the data and the model had; a tensor alone is "input", "output"
merged               adapters are added to the weights, and their operators are gone
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn

from ringtmp.errors import DoesNotFit, RingError, UsageError
from ringtmp.model.output_tree import leaves_of, names_of
from ringtmp.model.run_graph import dtype_of
from ringtmp.model.whole_graph import depends_on, name_before, without_adapters
from ringtmp.model.whole_module import WholeModule, call, exported, plain_name
from ringtmp.run.saved_model import Named, SavedModel, largest_difference, predicted, require_known_inputs
from ringtmp.run.write_safetensors import add_adapter
from ringtmp.system.resources import free_memory_bytes
from ringtmp.system.write_files_together import require_room
from ringtmp.units import bytes_text

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
#: Beyond this the weights lie beside the .onnx file, written one by one: in one message they would be in memory twice, and
#: a message has 2 GiB at most.
_IN_ONE_FILE = 256 * 1024 * 1024
Written = tuple[int, float | None, str]


def beside(model: SavedModel, to: Path) -> list[Path]:
    """The other files that are written with this one."""
    return [to.with_name(f"{to.name}.data")] if to.suffix == ".onnx" and model.weight_bytes > _IN_ONE_FILE else []


def require_packages(to: Path) -> None:
    missing = [each for each in PACKAGES if importlib.util.find_spec(each) is None]
    if missing:
        raise UsageError(f"--to {to} needs {', '.join(missing)}: pip install 'ringtmp[onnx]'")


def write_onnx(model: SavedModel, path: Path, merge: bool) -> Written:
    expected, batches, program = _prepared(model, path, merge)
    changed = list(program.graph_signature.buffers_to_mutate.values())
    if changed:
        raise UsageError(f"--to {path.name}: the model changes {changed[0]} when it predicts, which ONNX cannot")
    names = [plain_name(each) or "input" for each in batches[0]]
    leaving = [plain_name(each, "output") or "output" for each in expected[0]]
    try:
        with _quiet():
            found: Any = torch.onnx.export(
                program, input_names=names, output_names=leaving, dynamo=True, verbose=False, optimize=True
            )
            found.save(path, external_data=bool(beside(model, path)))
    except torch.onnx.errors.OnnxExporterError as error:
        raise UsageError(f"--to {path.name}: {_refused(error)}; give a .pt2 or .safetensors file") from error
    tensors = len(program.state_dict)
    del program, found  # one of the two is in memory at a time
    return tensors, *_compared(model, expected, _run_onnx(path, names, leaving, batches), "ONNX Runtime")


def write_program(model: SavedModel, path: Path, merge: bool) -> Written:
    expected, batches, program = _prepared(model, path, merge)
    program._example_inputs = None  # they would be pickled; without them the file holds JSON and plain bytes alone
    with path.open("wb", buffering=0) as file, _quiet():
        keeping = _KeepsErrors(file)
        torch.export.save(program, cast(IO[bytes], keeping))
        keeping.tell_error()
    tensors = len(program.state_dict)
    del program
    # torch.export.load unpickles whatever a file holds, so it is for no file but this one: written a moment ago by this
    # process, in a folder that no other user may enter. Nothing else is ever read with it.
    again = torch.export.load(path).module()
    with torch.no_grad():
        found = [leaves_of(call(again, each)) for each in batches]
    return tensors, *_compared(model, expected, found, "the program")


class _KeepsErrors:
    """A file whose writes never raise: torch ends the whole process with a C++ exception where a disk is full. What went wrong
    first is told afterwards."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._error: OSError | None = None

    def write(self, content: bytes) -> int:
        rest = memoryview(content)
        try:
            while rest and self._error is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._error = error
        return len(content)

    def tell_error(self) -> None:
        if self._error is not None:
            raise self._error


def _compared(
    model: SavedModel, expected: list[Named], found: Sequence[Sequence[Any]], what: str
) -> tuple[float | None, str]:
    """`found`: the values in the order of the names expected."""
    if (reason := model.why_not_predicted()) is not None:
        return None, f"predictions not compared: {reason}"
    named = [dict(zip(names, values, strict=True)) for names, values in zip(expected, found, strict=True)]
    return largest_difference(expected, named, what), f"predictions of {what}"


def _prepared(model: SavedModel, path: Path, merge: bool) -> tuple[list[Named], list[Named], Any]:
    """What the run predicts for made-up batches, those, and the exported program. The tensors are in memory once."""
    require_known_inputs(model, path)
    if (needed := model.weight_bytes) > (free := free_memory_bytes()):
        raise DoesNotFit(
            f"--to {path.name} takes the whole model in memory: {bytes_text(needed)}, and {bytes_text(free)} are free; a "
            ".safetensors file is written tensor by tensor"
        )
    require_room(path.parent, model.weight_bytes)
    tensors, module = model.loaded()
    batches = model.batches()
    outputs = _wanted(model)
    expected = [{name: given[name] for name in outputs} for given in (predicted(module, each) for each in batches)]
    graph = model.graph
    owned = _owned(model, tensors)
    if merge:
        for name, tensor in owned.items():
            add_adapter(model, name, tensor, owned)
        graph, owned = without_adapters(graph), {name_before(name): each for name, each in owned.items()}
    whole = WholeModule(graph, owned, list(batches[0]), outputs, zeros=_zeros(model)).eval()
    per_sample = [each.per_sample for place, each in enumerate(model.index.inputs) if place != model.labels]
    try:
        with _quiet():
            return expected, batches, exported(whole, batches[0], per_sample)
    except Exception as error:  # torch.export has many kinds
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"--to {path.name}: torch.export cannot write this model for any number of samples: {reason}"
        ) from error


def _owned(model: SavedModel, tensors: Sequence[Sequence[torch.Tensor]]) -> Named:
    """By name. What is frozen may lie in several cells; one copy of it does."""
    found: Named = {}
    for layer, own in zip(model.layers, tensors, strict=True):
        for each, tensor in zip(layer.tensors, own, strict=True):
            name = layer.full_name(each)
            if each.kind == "parameter":
                found[name] = nn.Parameter(tensor, each.trainable)
            else:
                found.setdefault(name, tensor)
    return found


def _wanted(model: SavedModel) -> dict[str, int]:
    """Name and place of the outputs that need no labels where nobody gives any."""
    names = names_of(model.layers[-1].output)
    if model.labels is None:
        return {name: place for place, name in enumerate(names)}
    with_labels = depends_on(model.graph, model.labels)
    return {name: place for place, name in enumerate(names) if not with_labels[place]}


def _zeros(model: SavedModel) -> tuple[int, tuple[int, ...], torch.dtype] | None:
    """Where the graph takes labels that its outputs do not need."""
    if model.labels is None:
        return None
    given = model.index.inputs[model.labels]
    return model.labels, given.rest, dtype_of(given.dtype)


def _run_onnx(path: Path, names: Sequence[str], leaving: Sequence[str], batches: Sequence[Named]) -> list[list[Any]]:
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors alone
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return [
            session.run(list(leaving), {name: each.numpy() for name, each in zip(names, batch.values(), strict=True)})
            for batch in batches
        ]
    except Exception as error:  # its errors have no common class
        raise RingError(f"ONNX Runtime cannot run what was written: {error}") from error


def _refused(error: BaseException) -> str:
    """The operator that the converter has no word for, or what it stumbled over."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    told = "\n".join(map(str, chain))
    named = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>", told)
    if named:
        return f"ONNX has no way to say {named[1]}.{named[2]}"
    node = re.search(r"translating node .*\[target=torch\.ops\.([\w.]+)\]", told)
    reason = next((line for line in str(chain[-1]).splitlines() if line.strip()), type(chain[-1]).__name__)
    return f"{node[1] if node else 'this model'} cannot be converted to ONNX: {reason[:300]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the exporters tell their own developers stays out of the way."""
    loggers = [logging.getLogger(each) for each in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
