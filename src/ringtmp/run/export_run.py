"""A run's result taken away: files that are used without ringtmp, read back and compared with what the run predicts.

    model.safetensors    every weight under its name in the model's state_dict
    model.onnx           what the model computes, for ONNX Runtime and others
    model.pt2            the same as a program of torch.export
    FOLDER/              as transformers has it; of a run with adapters those alone, as PEFT has them

With `merge`, adapters are added to the weights beside which they were trained. Files are written aside and renamed: they are
there whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ringtmp.errors import UsageError
from ringtmp.run.export_adapters import write_adapters
from ringtmp.run.export_folder import refuse_other_kind, refuse_own_files, require_source, write_transformers
from ringtmp.run.export_graphs import beside, require_packages, write_onnx, write_program
from ringtmp.run.saved_model import SavedModel
from ringtmp.run.write_safetensors import all_names, compare_weights, require_mergeable, write_weights
from ringtmp.system.write_files_together import refuse_existing, staged

SUFFIXES = (".safetensors", ".onnx", ".pt2")


@dataclass(frozen=True)
class Exported:
    files: tuple[Path, ...]
    step: int
    tensors: int
    difference: float | None  # the largest between what the run predicts and what the files give; None: not compared
    compared: str  # what was, in words


def export_weights(run_dir: Path, to: Path, merge: bool = False, force: bool = False) -> Exported:
    folder = to.suffix not in SUFFIXES
    if folder and to.suffix and not to.is_dir():
        raise UsageError(f"--to {to}: give a file that ends in .safetensors, .onnx or .pt2, or a folder")
    model = SavedModel(run_dir)
    if merge and not model.has_adapters:
        raise UsageError(f"--merge: {run_dir} has no adapters to merge")
    adapters = folder and model.has_adapters and not merge
    refuse_own_files(model, to, folder)
    for each in (to, *beside(model, to)):
        refuse_existing(each, force, folder)
    if folder:
        refuse_other_kind(to, adapters)
    if merge:
        require_mergeable(model)
    source = require_source(model, to) if folder and not adapters else to
    if to.suffix == ".onnx":
        require_packages(to)
    with staged(to, force, folder=folder) as aside:
        if adapters:
            tensors, difference, compared = write_adapters(model, aside)
        elif folder:
            tensors, difference, compared = write_transformers(model, aside, source, merge)
        elif to.suffix == ".safetensors":
            names = all_names(model, merge)
            tensors = write_weights(model, aside / to.name, names, merge)
            difference, compared = compare_weights(model, aside / to.name, names, merge)
        else:
            write = write_onnx if to.suffix == ".onnx" else write_program
            tensors, difference, compared = write(model, aside / to.name, merge)
        written = sorted(each.name for each in aside.iterdir())
    return Exported(
        tuple((to if folder else to.parent) / name for name in written), model.step, tensors, difference, compared
    )
