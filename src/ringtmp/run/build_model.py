"""A model becomes data in a run directory: layers, measured costs, and its first weights as the checkpoint of step 0."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from ringtmp.data.tables_and_streams import Source
from ringtmp.errors import UsageError
from ringtmp.model.build import BuiltLayer, Known
from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.model.layers import Model
from ringtmp.run.measure_model import Reading, measure
from ringtmp.runtime.checkpoint import CheckpointWriter, Progress
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory
from ringtmp.system.resources import give_back_memory


def write_model(
    run: RunDirectory, model: Model, train: Source, how: Reading, *, phase: Callable[[str], None],
    known: Known,
) -> None:  # fmt: skip
    """One layer at a time. `known` as for `measure`."""
    phase("reading the model")
    name = secrets.token_hex(8)
    writer = CheckpointWriter(run.checkpoints, name, Progress(0))
    names: list[str] = []
    aside: list[bool] = []
    digests: list[str] = []

    def take(index: int, built: BuiltLayer) -> None:
        digests.append(run.write_layer(index, built.layer))
        frozen = frozen_names(built.layer)
        aside.append(bool(frozen))
        writer.add(index, built.layer, list(built.tensors.values()), {}, frozen)
        names.append(built.layer.name)

    try:
        found = measure(model, train, how, phase, take=take, known=known, folder=run.path)
        run.write_index(
            LayerIndex(
                name, tuple(names), found.costs, found.leaving, least_microbatch=found.least_microbatch,
                inputs=found.entering, checked=found.checked, digests=tuple(digests), evaluated=found.evaluated,
                state=found.state, randomness="operator", input_names=found.input_names,
                aside=any(aside),
            )
        )  # fmt: skip
        writer.commit()
        give_back_memory()  # measuring held more of a layer than training will
    except OSError as error:
        writer.abandon()
        raise UsageError(f"the model's first weights cannot be written to {run.path}: {error.strerror}") from error
    except BaseException:
        writer.abandon()
        raise
