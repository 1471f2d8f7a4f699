"""Data on the master: every source, batches as pure functions of seed and step, refusals that say what to do."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ringtmp.data import source_registry
from ringtmp.data.batches import TrainingBatches, evaluation_batches
from ringtmp.data.tables_and_streams import Stream, Table, from_python, tensors
from ringtmp.errors import UsageError


def load(name: str, **settings: Any) -> tuple[Any, Any]:
    return source_registry.load(name, 0, settings)


def test_digits_are_bundled_and_whole() -> None:
    train, test = load("digits")
    assert train.size + test.size == 1797
    assert train.shape.inputs == (1, 8, 8)
    inputs, labels = train.take(torch.arange(train.size))
    assert inputs.min() == 0
    assert inputs.max() == 1
    assert sorted(labels.unique().tolist()) == list(range(10))


def test_random_data_can_be_learnt_and_repeats_with_its_seed() -> None:
    first, again, other = (source_registry.load("random:12x3", seed, {})[0] for seed in (1, 1, 2))
    index = torch.arange(20)
    assert first.take(index)[0].equal(again.take(index)[0])
    assert not first.take(index)[0].equal(other.take(index)[0])
    assert load("random:3x8x8x5")[0].shape.inputs == (3, 8, 8)


def write_idx(path: Path, array: np.ndarray[Any, Any], zipped: bool) -> None:
    raw = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.with_name(path.name + (".gz" if zipped else "")).write_bytes(gzip.compress(raw) if zipped else raw)


@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_as_mnist_has_them(tmp_path: Path, zipped: bool) -> None:
    images = np.arange(30 * 4 * 5, dtype=np.uint8).reshape(30, 4, 5)
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", images, zipped)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", np.arange(30, dtype=np.uint8) % 7, zipped)
    train, test = load(f"idx:{tmp_path}")
    assert (train.size, test.size, train.shape.inputs, train.shape.outputs) == (30, 30, (1, 4, 5), 7)
    assert train.take(torch.tensor([2]))[0].equal(torch.from_numpy(images[2:3, None]).float() / 255)


def test_npz_text_and_pysource(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.zeros((20, 3)), targets=np.arange(20) % 4)
    train, test = load(f"npz:{tmp_path / 'a.npz'}")
    assert (train.size + test.size, train.shape.outputs, train.loss) == (20, 4, "cross_entropy")
    (tmp_path / "b.txt").write_bytes(bytes(range(256)) * 4)
    train, _ = load(f"text:{tmp_path / 'b.txt'}", context=8)
    inputs, targets = train.take(torch.tensor([1]))
    assert inputs.tolist() == [list(range(8, 16))]
    assert targets.tolist() == [list(range(9, 17))]
    assert load("pysource", context=64)[0].size > 10_000


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("digit", "did you mean 'digits'"),
        ("random:", "write it as one of"),
        ("random:0x5", "random:784x10"),
        ("random:7", "random:784x10"),
        ("idx:/nowhere", "no folder /nowhere"),
        ("npz:/nowhere.npz", "no file /nowhere.npz"),
        ("text:/nowhere", "/nowhere cannot be read"),
        ("/nowhere.py:data", "no file /nowhere.py"),
        ("no.such.module:data", "cannot be imported"),
    ],
)
def test_wrong_names_are_refused_with_what_to_write(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load(name)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"no archive")
    with pytest.raises(UsageError, match="cannot be read"):
        load(f"npz:{tmp_path / 'x.npz'}")
    np.savez(tmp_path / "y.npz", images=np.zeros(3))
    with pytest.raises(UsageError, match="must hold the arrays inputs and targets"):
        load(f"npz:{tmp_path / 'y.npz'}")
    np.savez(tmp_path / "z.npz", inputs=np.zeros((4, 2)), targets=np.array([0, 1, -1, 2]))
    with pytest.raises(UsageError, match="sample 2 has label -1: labels start at 0"):
        load(f"npz:{tmp_path / 'z.npz'}")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(struct.pack(">HBB3I", 0, 8, 3, 9, 9, 9) + b"few")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(UsageError, match="is damaged|cannot be read"):
        load(f"idx:{tmp_path}")
    (tmp_path / "tiny.txt").write_bytes(b"few")
    with pytest.raises(UsageError, match="too few"):
        load(f"text:{tmp_path / 'tiny.txt'}")


def table(size: int) -> Table:
    return tensors("t", torch.arange(size * 2.0).reshape(size, 2), torch.arange(size) % 3)


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    forwards = TrainingBatches(table(10), 4, 2, 7)
    backwards = TrainingBatches(table(10), 4, 2, 7)
    steps = range(7)
    one = {step: forwards.batch(step) for step in steps}
    two = {step: backwards.batch(step) for step in reversed(steps)}
    for step in steps:
        assert all(a.equal(b) for a, b in zip(one[step].inputs, two[step].inputs, strict=True))  # type: ignore[union-attr]


def test_an_epoch_sees_every_sample_once_and_ends_with_a_smaller_batch() -> None:
    batches = TrainingBatches(table(10), 4, 3, 0)
    assert batches.steps_per_epoch == 3
    for epoch in range(2):
        made = [batches.batch(epoch * 3 + i) for i in range(3)]
        assert [each.samples for each in made] == [4, 4, 2]  # type: ignore[union-attr]
        assert [len(each.inputs) for each in made] == [3, 3, 2]  # type: ignore[union-attr]
        seen = sorted(int(x[0]) for each in made for piece in each.inputs for x in piece)  # type: ignore[union-attr]
        assert seen == [2 * i for i in range(10)]
        assert {each.epoch for each in made} == {epoch}  # type: ignore[union-attr]
        assert sum(made[2].weights) == 1  # type: ignore[union-attr]


def test_a_data_loader_gives_its_own_batches_pass_after_pass() -> None:
    data = TensorDataset(torch.arange(5.0)[:, None], torch.arange(5) % 2)
    batches = TrainingBatches(from_python(DataLoader(data, batch_size=2)), 2, 1, 0)
    made = [batches.batch(step) for step in range(5)]
    assert [(each.epoch, each.samples) for each in made] == [(0, 2), (0, 2), (0, 1), (1, 2), (1, 2)]  # type: ignore[union-attr]


def test_a_generator_ends_when_it_ends_and_is_never_read_ahead() -> None:
    read = []

    def stream() -> Iterator[Any]:
        for number in range(3):
            read.append(number)
            yield torch.full((2, 1), float(number)), torch.zeros(2)

    source = from_python(stream())
    assert isinstance(source, Stream)
    batches = TrainingBatches(source, 2, 1, 0)
    assert batches.batch(0) is not None
    assert read == [0]
    assert batches.batch(2) is not None, "a resumed run reads what was done before and goes on"
    assert batches.batch(3) is None


def test_datasets_are_collated() -> None:
    source = from_python(TensorDataset(torch.arange(6.0)[:, None], torch.arange(6) % 2))
    assert isinstance(source, Table)
    assert source.take(torch.tensor([4, 1]))[0].tolist() == [[4.0], [1.0]]


def test_evaluation_sees_everything_once_in_order() -> None:
    seen = [int(x[0]) for each in evaluation_batches(table(11), 4, 2) for piece in each.inputs for x in piece]
    assert seen == [2 * i for i in range(11)]


@pytest.mark.parametrize("wrong", [object(), 3, [1, 2, 3], [(torch.zeros(2), torch.zeros(3))], iter([])])
def test_what_is_no_data_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        from_python(wrong)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(UsageError, match="batch size 11 is larger than the 10 training samples"):
        TrainingBatches(table(10), 11, 1, 0)


def test_a_factory_may_return_a_pair_of_arrays(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import numpy as np\ndef data():\n    return np.zeros((10, 3)), np.arange(10)\n")
    train, test = source_registry.load(f"{tmp_path / 'mine.py'}:data", 0, {})
    assert isinstance(train, Table)
    assert isinstance(test, Table)
    assert (train.size, test.size) == (8, 2)


def test_a_generator_function_is_told_to_be_called() -> None:
    def pieces() -> Iterator[Any]:
        yield torch.zeros(2, 1), torch.zeros(2)

    with pytest.raises(UsageError, match=r"call it, pieces\(\)"):
        from_python(pieces)


def test_a_module_that_a_file_imports_is_not_offered_as_its_factory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import datetime as date\ndef data():\n    return None\n")
    with pytest.raises(UsageError) as error:
        source_registry.load(f"{tmp_path / 'mine.py'}:dat", 0, {})
    assert "data" in str(error.value)
    assert "date" not in str(error.value)
