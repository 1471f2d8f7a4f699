"""ringtmp predict"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ringtmp.cli.where import nodes_of, where_options
from ringtmp.errors import UsageError


@click.command("predict")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("inputs", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write the outputs here (.npy).  [print the classes]")
@where_options("predict")
def command(
    run: Path, inputs: Path, out: Path | None, nodes: int | None, listen: str | None, ring_name: str
) -> None:  # fmt: skip
    """Predict from the newest checkpoint of RUN.

    INPUTS is a .npy file, or a .npz file with an array called inputs; its first dimension counts samples. Prints the
    number of the largest output for every sample, one per line, or writes all outputs to --out.
    """
    from ringtmp.system.resources import loading

    with loading(nothing_started=True):
        from ringtmp import api
    import numpy as np
    import torch

    array = _read(inputs)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.is_floating_point():
        tensor = tensor.float()
    count, pool = nodes_of(run, nodes, listen, ring_name)
    outputs = api.predict(run, tensor, count, pool)
    if not isinstance(outputs, torch.Tensor):
        raise UsageError("this model returns several tensors: use predict from Python")
    if out is not None:
        np.save(out, outputs.numpy())
    else:
        np.savetxt(sys.stdout, outputs.argmax(-1).reshape(len(outputs), -1).numpy(), fmt="%d")


def _read(path: Path):  # type: ignore[no-untyped-def]
    import zipfile

    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            if "inputs" not in loaded.files:
                raise UsageError(f"{path} has no array called inputs; it has {', '.join(loaded.files) or 'none'}")
            return loaded["inputs"]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"the inputs {path} cannot be read: {error}") from error
