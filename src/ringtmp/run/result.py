"""What a run gave: its numbers, how it went, and the trained model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.metrics import events
from ringtmp.metrics.fold_events import Part, parts_of
from ringtmp.metrics.history import History, history_of
from ringtmp.metrics.summary import Summary, of_parts
from ringtmp.model.ensemble import Ensemble
from ringtmp.model.layers import Model
from ringtmp.model.lora import LoraLinear, add_adapters, parse_lora
from ringtmp.model.portable_layer import Layer
from ringtmp.model.portable_model import PortableModel, is_cut
from ringtmp.model.shrink_frozen_weights import enlarged
from ringtmp.model.to_module import in_sequence, revive
from ringtmp.run.ask_ensemble import how_of
from ringtmp.runtime.checkpoint import State, Weights, latest
from ringtmp.runtime.ensemble_members import Member, weights_of
from ringtmp.runtime.losses import class_dim_of
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory
from ringtmp.units import bytes_text, rate_text, seconds_text

if TYPE_CHECKING:
    from ringtmp.run.export_run import Exported


class Result:
    """A run in its directory: `summary` (as `--json` prints it), `history` and `model` are read when asked for.

    `model` is what was trained, or a function that makes it; its weights do not matter. Without it the trained layers
    are modules that need no class.
    """

    def __init__(
        self,
        run_dir: str | Path,
        model: Model | None = None,
        otherwise: Callable[[], Model] | None = None,
        unwritten: Sequence[events.Event] = (),
    ) -> None:
        """`otherwise`: asked for the model, when it is wanted, if it is not given; may fail. `unwritten`: events for which
        there was no room on the disk, or all where their file is gone."""
        self._unwritten = unwritten
        self.run_dir = Path(run_dir)
        self._source = model
        self._otherwise = otherwise

    def __repr__(self) -> str:
        return f"Result({str(self.run_dir)!r})"

    def __str__(self) -> str:
        return "\n".join([_headline(self.summary), *str(self.history).splitlines(), *_last_lines(self.summary)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows."""
        printer.text(str(self))

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        log = self.run_dir / "events.jsonl"
        there = log.is_file()
        if not there and not self._unwritten:
            raise UsageError(f"{self.run_dir} is not a run directory: it has no events.jsonl")
        found = parts_of(chain(events.read(log) if there else (), self._unwritten))
        if not found:
            raise UsageError(f"{self.run_dir} was never started, so it has no result")
        return found

    @cached_property
    def summary(self) -> Summary:
        return of_parts(self._parts, str(self.run_dir))

    @cached_property
    def history(self) -> History:
        """Every step and every epoch: loss, test loss, accuracy, rate, seconds; of a resumed run from its first start."""
        return history_of(self._parts)

    def plot(self, path: str | Path | None = None) -> Any:
        """The loss over steps and the scores on the test part as a matplotlib Figure, which a notebook shows; with `path`
        also written there (.png, .svg, .pdf). Needs the extra `plots`."""
        from ringtmp.report.plot_history import plot_history

        return plot_history(self.history, _headline(self.summary).partition(",")[0], path)

    @cached_property
    def model(self) -> nn.Module:
        """The trained module on the CPU, in evaluation mode: of the user's own class where that is at hand. Of an ensemble one
        whose `members` are such modules."""
        run = RunDirectory(self.run_dir)
        index, layers = run.read_layers()
        checkpoint, _ = latest(self.run_dir / "checkpoints", index.run)
        weights = weights_of(checkpoint)
        if weights is None:
            return self._made(run, index, layers, checkpoint)
        saved = run.read_config()
        members = [self._made(run, index, layers, Member(checkpoint, k, len(layers))) for k in range(len(weights))]
        return Ensemble(members, weights, how_of(saved), class_dim_of(saved.loss)).eval()

    def _made(self, run: RunDirectory, index: LayerIndex, layers: Sequence[Layer], weights: Weights) -> nn.Module:
        if self._source is not None and (own := module_of(self._source)) is not None:
            prepare_as_trained(own, run, layers)
            return _loaded(own, layers, weights, self.run_dir, index.state)
        if self._otherwise is not None:
            with contextlib.suppress(UsageError):  # its name says nothing, or its file is gone or has changed
                if (own := module_of(self._otherwise())) is not None:
                    prepare_as_trained(own, run, layers)
                    return _loaded(own, layers, weights, self.run_dir, index.state)
        tensors = [enlarged(layer, weights.layer(i, layer)[0]) for i, layer in enumerate(layers)]
        shapes = [tuple(each.rest for each in leaving) for leaving in index.outputs]
        if is_cut(layers):
            return PortableModel(tensors, index.state, index.input_names, index.without_targets).eval()
        return revive(tensors, shapes).eval()

    def export(self, path: str | Path, merge: bool = False, force: bool = False) -> Exported:
        """Writes the newest checkpoint to files that are used without ringtmp, as `ringtmp export` does: FILE.safetensors,
        FILE.onnx, FILE.pt2 or a folder. What comes back says how far they are from what the run predicts."""
        from ringtmp.run.export_run import export_weights  # it is seldom wanted, and takes a while to load

        return export_weights(self.run_dir, Path(path), merge, force)


# -- the user's own module ----------------------------------------------------------------------------------------------


def module_of(source: Model) -> nn.Module | None:
    """A module like the one that was trained, sharing nothing with it; None where it cannot be had a second time."""
    if isinstance(source, nn.Module):
        return _copied(source)
    if callable(source):
        with torch.random.fork_rng(devices=[]):
            made = source()
        return made if isinstance(made, nn.Module) else _in_sequence(made)
    copies = [(name, _copied(module)) for name, module in _named(source)]
    return None if any(module is None for _, module in copies) else _in_sequence(copies)


def _named(layers: Iterable[Any]) -> list[tuple[str, nn.Module]]:
    return [item if isinstance(item, tuple) else (str(place), item) for place, item in enumerate(layers)]


def _in_sequence(layers: Iterable[Any]) -> nn.Module:
    return in_sequence(_named(layers))


def _copied(module: nn.Module) -> nn.Module | None:
    try:
        return copy.deepcopy(module)
    except Exception:  # the class is the user's: it may hold a file, a lock, a result of its own
        return None


def prepare_as_trained(own: nn.Module, run: RunDirectory, layers: Sequence[Layer]) -> None:
    """With the run's adapters, unless it has them, and with the same parameters frozen."""
    lora = run.read_config().config.training.lora
    if lora is not None and not any(isinstance(each, LoraLinear) for each in own.modules()):
        add_adapters(own, parse_lora(lora))
    trained = {layer.full_name(each): each.trainable for layer in layers for each in layer.tensors}
    for name, parameter in own.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))


def _loaded(own: nn.Module, layers: Sequence[Layer], checkpoint: Weights, run_dir: Path, state: State) -> nn.Module:
    """With everything that was trained, buffers outside the state_dict included."""
    # Of a run from before modules were cut: one that is no nn.Sequential is one layer, called "0".
    alone = not isinstance(own, nn.Sequential) and not state
    saved: dict[str, torch.Tensor] = {}
    rest: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        whole, tensors = enlarged(layer, checkpoint.layer(index, layer)[0])
        for each, tensor in zip(whole.tensors, tensors, strict=True):
            if each.kind != "constant":
                (saved if each.saved else rest)[each.name if alone else layer.full_name(each)] = tensor
    saved.update({name: saved[first] for name, first in state})
    try:
        own.load_state_dict(saved)
        for name, tensor in rest.items():
            own.get_buffer(name).copy_(tensor)
        return own.eval()
    except (RuntimeError, AttributeError) as error:
        problem = " ".join(str(error).split())
        raise UsageError(
            f"the {type(own).__name__} given is not what {run_dir} trained: {problem[:400]}. Give the model as it was, or "
            f"take Result({str(run_dir)!r}).model, which needs none"
        ) from error


# -- as text ------------------------------------------------------------------------------------------------------------


def _headline(summary: Summary) -> str:
    nodes = f"{summary.nodes} {'nodes' if summary.nodes != 1 else 'node'}"
    parts = f" in {len(summary.parts)} parts" if len(summary.parts) > 1 else ""
    speed = f", {rate_text(summary.samples_per_s)} samples/s" if summary.samples_per_s else ""
    return (
        f"{summary.outcome}: {summary.model} on {summary.data}, {summary.strategy} of {nodes}, {summary.steps} steps in "
        f"{seconds_text(summary.wall_s)}{parts}{speed}, {bytes_text(summary.bytes_total)} sent"
    )


def _last_lines(summary: Summary) -> list[str]:
    lines = [f"weights {summary.weights_sha256}"] if summary.weights_sha256 else []
    if summary.error:
        lines.append(summary.error)
    return [*lines, f"run {summary.run_dir}"]
