"""ringtmp predict"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import click

from ringtmp.cli.node_options import nodes_of, where_options
from ringtmp.errors import UsageError

#: The array of a .npz file that is meant where a model takes one tensor.
INPUTS = "inputs"
#: Of several outputs, what a class is read off.
LOGITS = "logits"


@click.command("predict")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("inputs", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the outputs here (.npy; .npz for several).  [print the classes]",
)
@where_options("predict")
def command(
    run: Path, inputs: Path, out: Path | None, nodes: int | None, listen: str | None, ring_name: str
) -> None:  # fmt: skip
    """Predict from the newest checkpoint of RUN.

    INPUTS is a .npy file, or a .npz file with an array called inputs or with arrays called like the model's inputs
    (input_ids, attention_mask); their first dimension counts samples. Prints the number of the largest output for every
    sample, one line each, or writes all outputs to --out. Of several outputs, logits are printed and written to a .npy file;
    a .npz file gets all of them.
    """
    from ringtmp.system.resources import loading

    with loading(nothing_started=True):
        from ringtmp.run import evaluate_predict_generate
        from ringtmp.runtime.run_directory import RunDirectory
    import numpy as np

    from ringtmp.model.output_tree import named_tensors, names_of
    from ringtmp.system.files import write_atomic

    directory = RunDirectory(run)
    directory.open()
    index, layers = directory.read_layers()
    given = _as_inputs(_read(inputs), index.input_names, inputs)
    if out is None or out.suffix != ".npz":
        _require_one(index.predicted(names_of(layers[-1].output)))
    count, pool = nodes_of(run, nodes, listen, ring_name)
    found = {
        name: each.numpy()
        for name, each in named_tensors(evaluate_predict_generate.predict(run, given, count, pool)).items()
    }
    if out is not None and out.suffix == ".npz":
        arrays: dict[str, Any] = {name or "outputs": each for name, each in found.items()}
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_atomic(out, content.getvalue())
        return
    _require_one(list(found))  # a run of an older version did not say what is predicted
    outputs = found[LOGITS] if LOGITS in found else next(iter(found.values()))
    if out is not None:
        content = io.BytesIO()
        np.save(content, outputs)
        write_atomic(out if out.suffix == ".npy" else out.with_name(f"{out.name}.npy"), content.getvalue())
    else:
        np.savetxt(sys.stdout, outputs.argmax(-1).reshape(len(outputs), -1), fmt="%d")


def _require_one(names: list[str]) -> None:
    """UsageError where there are several outputs, and none that is meant."""
    if len(names) > 1 and LOGITS not in names:
        raise UsageError(f"this model returns {', '.join(names)}: write them all to a file with --out FILE.npz")


def _as_inputs(arrays: dict[str, Any], names: tuple[str, ...], path: Path) -> Any:
    """As the model takes them: one tensor, or several by name."""
    import numpy as np
    import torch

    from ringtmp.data.nested_inputs import arranged
    from ringtmp.data.sample_or_batch import LABELS

    tensors = {name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in arrays.items()}
    wanted = [name for name in names if name != LABELS]
    if len(wanted) <= 1 and INPUTS in tensors and not tensors.keys() & set(wanted):
        return {wanted[0]: tensors[INPUTS]} if wanted and wanted[0] else tensors[INPUTS]
    if len(wanted) <= 1 and not any(wanted):
        raise UsageError(f"{path} has no array called {INPUTS}; it has {', '.join(tensors) or 'none'}")
    positional = {f"arr_{name}": name for name in wanted if name.isdecimal()}  # as np.savez calls them
    tensors = {positional.get(name, name): each for name, each in tensors.items()}
    return arranged(tensors, [*wanted, *(LABELS for _ in range(LABELS in tensors))], str(path))


def _read(path: Path) -> dict[str, Any]:
    """By name; the one array of a .npy file is called inputs."""
    import zipfile

    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {INPUTS: loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        why = error if path.suffix in {".npy", ".npz"} else "write them as .npy or .npz, with numpy.save or numpy.savez"
        raise UsageError(f"the inputs {path} cannot be read: {why}") from error
