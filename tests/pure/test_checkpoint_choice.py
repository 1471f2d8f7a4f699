"""Checkpoints on disk among damaged, foreign and hand-made folders: which one is used, and which may be removed."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ringtmp.errors import CheckpointError
from ringtmp.model.portable_layer import Graph, Layer, OutputTree, OwnedTensor
from ringtmp.runtime import json_with_checksum
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter, Manifest, Progress, latest, weights_sha256

_NOTHING = Graph((), (), (), False)
LAYER = Layer(
    "layer", _NOTHING, _NOTHING, (OwnedTensor("w", "parameter", "float32", (3,), True, True),), OutputTree("*")
)


def saved(folder: Path, step: int, run: str = "run") -> Path:
    writer = CheckpointWriter(folder, run, Progress(step))
    writer.add(0, LAYER, [torch.full((3,), float(step))], {})
    return writer.commit()


def damage(checkpoint: Path, file: str = "weights-0000.safetensors") -> None:
    path = checkpoint / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def copy(checkpoint: Path, name: str) -> Path:
    return Path(shutil.copytree(checkpoint, checkpoint.parent / name))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("file", ["weights-0000.safetensors", "manifest.json"])
def test_damaged_newer_checkpoints_never_cost_a_sound_one(tmp_path: Path, file: str) -> None:
    for newer in [saved(tmp_path, step) for step in (80, 90)]:
        damage(newer, file)
    for step in (10, 20, 30):
        saved(tmp_path, step)
        found, problems = latest(tmp_path)
        assert found.progress.step == step
        assert len(problems) == 2
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000080", "step-00000090"]


def test_the_older_of_two_that_are_kept_is_a_sound_one(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    damage(saved(tmp_path, 20))
    saved(tmp_path, 30)
    damage(tmp_path / "step-00000030")
    found, _ = latest(tmp_path)
    assert found.progress.step == 10, "the one of step 20 is damaged, so that of step 10 had to stay"


def test_folders_made_by_hand_are_neither_used_nor_removed(tmp_path: Path) -> None:
    first = saved(tmp_path, 20)
    by_hand = ["step-best", "step-99", "step-00000020-old", "step-00000099.bak"]
    for name in by_hand:
        copy(first, name)
    (tmp_path / "step-00000098").write_text("a file")
    for step in (25, 30, 45):
        saved(tmp_path, step)
    found, problems = latest(tmp_path)
    assert (found.progress.step, problems) == (45, [])
    assert names(tmp_path) == sorted([*by_hand, "step-00000098", "step-00000030", "step-00000045"])


def test_a_name_that_says_another_step_than_the_manifest_is_told_of_and_not_used(tmp_path: Path) -> None:
    copy(saved(tmp_path, 20), "step-00000099")
    saved(tmp_path, 45)
    found, problems = latest(tmp_path)
    assert found.progress.step == 45
    assert problems == ["step-00000099: it holds the checkpoint of step 20, which belongs in step-00000020"]
    for name in ("step-00000020", "step-00000045"):
        shutil.rmtree(tmp_path / name)
    with pytest.raises(CheckpointError, match="which belongs in step-00000020"):
        latest(tmp_path)


def test_a_checkpoint_of_another_run_is_neither_used_nor_removed(tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 99, "other")
    saved(tmp_path / "run", 20)
    shutil.copytree(other, tmp_path / "run" / other.name)
    shutil.copytree(saved(tmp_path / "other", 7, "other"), tmp_path / "run" / "step-00000007")
    saved(tmp_path / "run", 30)
    saved(tmp_path / "run", 40)
    found, problems = latest(tmp_path / "run", "run")
    assert (found.progress.step, problems) == (40, ["step-00000099: it belongs to another run"])
    assert names(tmp_path / "run") == ["step-00000007", "step-00000030", "step-00000040", "step-00000099"]


def test_steps_beyond_eight_digits_are_in_order(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000):
        saved(tmp_path, step)
    assert latest(tmp_path)[0].progress.step == 100_000_000
    assert names(tmp_path) == ["step-100000000", "step-99999999"]


def test_a_checkpoint_written_again_takes_the_place_of_the_damaged_one(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    damage(saved(tmp_path, 6))
    sound = Checkpoint(saved(tmp_path, 6))
    assert names(tmp_path) == ["step-00000003", "step-00000006"]
    assert weights_sha256(sound, [LAYER]) == weights_sha256(latest(tmp_path)[0], [LAYER])


def test_writing_a_frozen_file_anew_leaves_the_one_that_another_run_shares(tmp_path: Path) -> None:
    def begun(run: str, value: float) -> Path:
        folder = tmp_path / run / "checkpoints"
        writer = CheckpointWriter(folder, run, Progress(0))
        writer.add(0, LAYER, [torch.full((3,), value)], {}, frozenset({"w"}))
        writer.commit()
        return folder / "frozen" / "weights-0000.safetensors"

    one, two = begun("one", 1.0), begun("two", 1.0)
    before, content = one.stat(), one.read_bytes()
    assert two.samefile(one), "shared"
    (two.parent / ".weights-0000.safetensors.1").touch()  # of a master that was killed while it wrote
    begun("two", 2.0)
    assert one.read_bytes() == content != two.read_bytes()
    assert (one.stat().st_ino, one.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert latest(tmp_path / "one" / "checkpoints")[1] == []
    assert names(two.parent) == ["manifest.json", "weights-0000.safetensors"]


@pytest.mark.parametrize(
    "strides", ["{", '{"layer.w": [-1]}', '{"layer.w": [1, 1]}', '{"layer.w": ["1"]}', '{"layer.w": [8000000000]}']
)
def test_how_a_tensor_is_laid_out_is_not_believed_unchecked(tmp_path: Path, strides: str) -> None:
    """The file has the digest its manifest names: whoever wrote it wrote that, too."""
    folder = saved(tmp_path, 10)
    path = folder / "weights-0000.safetensors"
    tensors = load_file(path)
    assert list(tensors) == ["layer.w"]
    save_file(tensors, path, metadata={"strides": strides})
    manifest = folder / "manifest.json"
    found = json_with_checksum.decode(manifest.read_bytes(), Manifest)
    found.files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_bytes(json_with_checksum.encode(found))
    with pytest.raises(CheckpointError, match=r"step-00000010: weights-0000.safetensors cannot be read"):
        latest(tmp_path)[0].layer(0, LAYER)
