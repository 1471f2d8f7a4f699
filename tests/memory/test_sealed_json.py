"""What lies on the disk between a stop and a resumption may have been damaged: it is never believed, and always a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ringtmp.errors import CheckpointError, UsageError
from ringtmp.plan.devices import LayerCost, Measured
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter, Manifest, Progress, latest
from ringtmp.runtime.run_directory import LayerIndex, RunDirectory, SavedConfig
from test_checkpoint_choice import LAYER
from test_training_loop import settings

COST = LayerCost("layer", (Measured(4, 0.5, 1.0, 8.0, 4.0),), 12, 12, 24)
SAVED = SavedConfig("0", settings(2), "mse")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two layers, a checkpoint of step 3 and one of step 6."""
    found = RunDirectory(tmp_path / "run")
    found.create()
    found.write_config(SAVED)
    digests = tuple(found.write_layer(index, LAYER) for index in range(2))
    found.write_index(LayerIndex("name", ("layer", "layer"), (COST, COST), ((), ()), digests=digests))
    for step in (3, 6):
        writer = CheckpointWriter(found.checkpoints, "name", Progress(step, 0.25))
        for index in range(2):
            writer.add(index, LAYER, [torch.ones(3)], {("w", "exp_avg"): torch.full((3,), float(step))})
        writer.commit()
    return found


def damaged(path: Path) -> Iterator[int]:
    """The file with one bit flipped, here and there in turn and each of a byte's eight; at the end it is as it was."""
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        yield place
    path.write_bytes(whole)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def without_seal(document: dict[str, Any]) -> None:
    """As a version without seals wrote it."""
    del document["seal"], document["sealed"]


def test_no_flipped_bit_of_the_settings_is_believed(run: RunDirectory) -> None:
    for _ in damaged(run.path / "config.json"):
        with pytest.raises(UsageError, match=r"config\.json.*To change settings, pass them with --resume"):
            run.read_config()
    assert run.read_config() == SAVED


@pytest.mark.parametrize("file", ["index.json", "0001.layer"])
def test_no_flipped_bit_of_the_layers_is_believed(run: RunDirectory, file: str) -> None:
    for _ in damaged(run.layers / file):
        with pytest.raises(CheckpointError, match=rf"the layers of .* cannot be read: {file} .*put a copy of it back"):
            run.read_layers()
    assert run.read_layers()[1] == [LAYER, LAYER]


def test_no_flipped_bit_of_a_manifest_is_believed_and_the_checkpoint_before_is_used(run: RunDirectory) -> None:
    for _ in damaged(run.checkpoints / "step-00000006/manifest.json"):
        found, problems = latest(run.checkpoints, "name")
        assert (found.progress.step, len(problems)) == (3, 1)
    assert latest(run.checkpoints, "name")[0].progress == Progress(6, 0.25)


def without_state(document: dict[str, Any]) -> None:
    document["files"] = {name: digest for name, digest in document["files"].items() if "state" not in name}


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(files={}),
        without_state,
        lambda document: document["progress"].update(step=5),
        lambda document: (document.pop("seal"), without_state(document)),
        lambda document: (document.pop("sealed"), without_state(document)),
        lambda document: (without_seal(document), document.update(files={})),
        lambda document: (without_seal(document), document["files"].pop("weights-0000.safetensors")),
    ],
)
def test_a_manifest_that_lost_an_entry_is_not_a_whole_checkpoint(
    run: RunDirectory, change: Callable[[dict[str, Any]], object]
) -> None:
    changed(run.checkpoints / "step-00000006/manifest.json", change)
    with pytest.raises(CheckpointError, match="step-00000006: the manifest"):
        Checkpoint(run.checkpoints / "step-00000006")
    assert latest(run.checkpoints, "name")[0].progress.step == 3


def test_a_run_of_a_version_without_seals_is_read_as_before(run: RunDirectory) -> None:
    (run.path / "config.json").write_bytes(msgspec.json.encode(SAVED))
    index = LayerIndex("name", ("layer", "layer"), (COST, COST))
    (run.layers / "index.json").write_bytes(msgspec.json.encode(index))
    newest = run.checkpoints / "step-00000006"
    manifest = Checkpoint(newest).manifest
    (newest / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    assert run.read_config() == SAVED
    assert run.read_layers() == (index, [LAYER, LAYER])
    found, problems = latest(run.checkpoints, "name")
    assert (found.manifest, problems) == (manifest, [])
    assert isinstance(found.manifest, Manifest)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda document: document["costs"].pop(), "index.json has 2 names, 1 costs"),
        (lambda document: document["outputs"].pop(), "index.json has 2 names, 2 costs, 1 outputs"),
        (lambda document: document.update(names=[], costs=[], outputs=[], digests=[]), "index.json has no layers"),
        (lambda document: document["costs"][0].update(measured=[]), "index.json has no measured cost of layer"),
    ],
)
def test_an_index_that_does_not_add_up_is_refused_without_a_seal_too(
    run: RunDirectory, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    changed(run.layers / "index.json", lambda document: (without_seal(document), change(document)))
    with pytest.raises(CheckpointError, match=says):
        run.read_layers()


def test_settings_of_another_seed_are_refused_unless_the_run_wrote_them(run: RunDirectory) -> None:
    changed(run.path / "config.json", lambda document: document["config"]["training"].update(seed=4))
    with pytest.raises(UsageError, match="the settings of this run were changed or damaged"):
        run.read_config()
    run.write_config(SAVED)  # as on healing
    assert run.read_config() == SAVED
