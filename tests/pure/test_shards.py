"""Data in shards and on standard input: order, memory, and what is refused."""

from __future__ import annotations

import gc
import io
import itertools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ringtmp.data import shards, source_registry
from ringtmp.data.arrow_rows import parquet_rows
from ringtmp.data.shard_files import find_shards
from ringtmp.data.shards import Shards, open_shards
from ringtmp.data.standard_input import standard_input
from ringtmp.data.tables_and_streams import Stream
from ringtmp.data.tar_rows import tar_rows
from ringtmp.errors import UsageError

SAMPLES = 10


def tar(path: Path, numbers: range, *, classes: bool = True) -> None:
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            target = f"{number}.cls", str(number).encode()
            if not classes:
                target = f"{number}.txt", b"a word"
            for name, content in ((f"{number}.npy", npy(number)), target):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def npy(number: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.full((2, 3), number, np.float64))
    return file.getvalue()


def folder_of_tars(path: Path) -> Path:
    for shard in range(3):
        tar(path / f"train-{shard}.tar", range(shard * SAMPLES, (shard + 1) * SAMPLES))
    tar(path / "test-0.tar", range(100, 105))
    return path


def labels(stream: Stream) -> list[int]:
    found: list[int] = []
    while (batch := stream.next()) is not None:
        inputs, targets = batch
        assert inputs.dtype == torch.float32
        assert inputs[:, 0, 0].tolist() == targets.tolist(), "an input went with another's label"
        found += targets.tolist()
    return found


def test_every_sample_of_every_shard_comes_once_in_an_order_that_depends_on_the_seed_alone(tmp_path: Path) -> None:
    folder = folder_of_tars(tmp_path)
    orders = []
    for seed in (0, 0, 1):
        train, test = open_shards("tar", folder, seed, 4, ())
        assert train.not_ours is None
        orders.append(labels(train))
        assert sorted(orders[-1]) == list(range(3 * SAMPLES))
        assert test is not None
        assert labels(test) == list(range(100, 105)), "the test part is not shuffled"
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_no_more_than_a_buffer_of_samples_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BUFFER", 50)
    read = itertools.count()
    last = [0]

    def rows(path: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(1000):
            last[0] = next(read)
            yield torch.tensor([number]), torch.tensor(number)

    batches = iter(Shards([Path("a"), Path("b")], rows, 10, shuffled=True))
    for count in range(1, 100):
        next(batches)
        assert last[0] <= count * 10 + 50
    rest = sum(len(targets) for _, targets in batches)
    assert rest == 2000 - 990


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no tar file"):
        open_shards("tar", tmp_path, 0, 4, ())
    tar(tmp_path / "a.tar", range(2), classes=False)
    with pytest.raises(UsageError, match=r"sample 0 of .*a.tar has npy, txt: it needs 0.npy and 0.cls"):
        open_shards("tar", tmp_path, 0, 4, ())
    (tmp_path / "a.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(UsageError, match=r"shard .*a.tar cannot be read"):
        open_shards("tar", tmp_path, 0, 4, ())


def test_a_shard_that_is_gone_in_mid_epoch_is_named(tmp_path: Path) -> None:
    folder = folder_of_tars(tmp_path)
    train, _ = open_shards("tar", folder, 0, 4, ())
    labels(train)
    (folder / "train-1.tar").unlink()
    with pytest.raises(UsageError, match=r"train-1.tar cannot be read: No such file or directory; put it back"):
        labels(train)


def test_columns_are_for_parquet_and_have_a_target(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--columns is for --data parquet:PATH and arrow:PATH, not for data tar"):
        source_registry.load(f"tar:{tmp_path}", 0, {}, columns="a,b")
    with pytest.raises(UsageError, match="name at least one input and, last, the target"):
        source_registry.load(f"parquet:{tmp_path}", 0, {}, columns="a")


def test_parquet_files_are_read_by_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = list(range(SAMPLES))
    table = pyarrow.table({"x": [float(n) for n in rows], "y": rows, "both": [[n, n] for n in rows], "label": rows})
    parquet.write_table(table, tmp_path / "train-0.parquet")
    train, _ = source_registry.load(f"parquet:{tmp_path}", 0, {}, columns="x,y,label", batch_size=SAMPLES)
    inputs, targets = train.example(1) if not isinstance(train, Stream) else train.next() or ([], [])
    assert sorted(targets.tolist()) == rows
    assert inputs.tolist() == [[n, n] for n in targets.tolist()]
    train, _ = source_registry.load(f"parquet:{tmp_path}", 0, {}, columns="both,label", batch_size=SAMPLES)
    assert isinstance(train, Stream)
    assert train.shape.inputs == (2,)
    with pytest.raises(UsageError, match="has no column 'inputs' and no 'targets'; it has x, y, both, label"):
        source_registry.load(f"parquet:{tmp_path}", 0, {})


def test_a_long_tar_file_is_read_without_a_list_of_its_members(tmp_path: Path) -> None:
    tar(tmp_path / "long.tar", range(100))
    for _, target in tar_rows(tmp_path / "long.tar"):
        if int(target) == 98:
            assert sum(type(each) is tarfile.TarInfo for each in gc.get_objects()) < 10


def test_large_samples_fill_the_buffer_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BUFFER_BYTES", 40 * 1016)
    read = [0]

    def rows(path: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(200):
            read[0] = number
            yield torch.zeros(252), torch.tensor(number)

    batches = iter(Shards([Path("a")], rows, 10, shuffled=True))
    first = next(batches)
    assert read[0] <= 40 + 10
    assert sorted(int(each) for _, targets in (first, *batches) for each in targets) == list(range(200))


def test_what_spark_and_others_leave_beside_the_data_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "test-of-mine").mkdir()
    folder = folder_of_tars(tmp_path / "test-of-mine")
    for name in ("_SUCCESS", "._SUCCESS.crc", ".part-0.tar.crc", "_metadata.tar"):
        (folder / name).write_bytes(b"")
    train, test = find_shards("tar", folder)
    assert [each.name for each in train] == ["train-0.tar", "train-1.tar", "train-2.tar"], (
        "the folder's own name is no matter"
    )
    assert [each.name for each in test] == ["test-0.tar"]
    (folder / "_temporary" / "0").mkdir(parents=True)
    with pytest.raises(UsageError, match="has not finished, or has failed: there is _temporary in it"):
        find_shards("tar", folder)


def test_a_directory_of_datasets_is_read_as_its_list_of_files_says(tmp_path: Path) -> None:
    for split, count in (("train", 2), ("test", 1)):
        names = [f"data-{number:05}-of-{count:05}.arrow" for number in range(count)]
        saved_to_disk(tmp_path / split, names)
        for name in (*names, "cache-1f2e.arrow"):
            (tmp_path / split / name).touch()
    train, test = find_shards("arrow", tmp_path)
    assert [each.name for each in train] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert [each.parent.name for each in test] == ["test"]
    train[1].unlink()
    with pytest.raises(UsageError, match="names the file data-00001-of-00002.arrow, which is not in"):
        find_shards("arrow", tmp_path)
    saved_to_disk(tmp_path / "train", ["../elsewhere.arrow"])
    with pytest.raises(UsageError, match="names the file ../elsewhere.arrow, which is not in"):
        find_shards("arrow", tmp_path)


def saved_to_disk(folder: Path, names: list[str]) -> None:
    """What `save_to_disk` of datasets 4 writes beside its files."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "_data_files": [{"filename": each} for each in names], "_fingerprint": "0123456789abcdef",
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": "train",
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def test_arrow_files_and_streams_are_read_alike(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc

    rows = list(range(3000))
    table = pyarrow.table({
        "x": pyarrow.array([[[n, n], [n, n]] for n in rows], pyarrow.list_(pyarrow.list_(pyarrow.float64()))),
        "label": pyarrow.array([n % 7 for n in rows], pyarrow.int32()),
    })  # fmt: skip
    saved_to_disk(tmp_path / "stream", ["data-00000-of-00001.arrow"])
    ways = {
        "stream/data-00000-of-00001.arrow": ipc.new_stream,  # datasets
        "file/part-0.arrow": ipc.new_file,  # Ray, Polars, pandas
        "file.feather": ipc.new_file,
    }
    found = []
    for name, way in ways.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with way(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
        place = (tmp_path / name).parent if "/" in name else tmp_path / name
        train, _ = source_registry.load(f"arrow:{place}", 0, {}, columns="x,label", batch_size=3000)
        assert isinstance(train, Stream)
        inputs, targets = train.next() or ([], [])
        assert inputs.dtype == torch.float32
        assert inputs.shape == (3000, 2, 2)
        assert targets.dtype == torch.int64, "classes, whatever the file's whole numbers are"
        assert (inputs[:, 0, 0] % 7).tolist() == targets.tolist()
        found.append(inputs)
    assert all(torch.equal(each, found[0]) for each in found)


def test_a_parquet_folder_of_spark_is_read(tmp_path: Path) -> None:
    """As Spark 3 writes it: names, empty parts, snappy, optional columns, its own whole numbers, marks of success."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    schema = pyarrow.schema([("features", pyarrow.list_(pyarrow.float64())), ("label", pyarrow.int32())])
    for part, count in enumerate((3, 0, 4)):
        values = {"features": [[float(part), float(n)] for n in range(count)], "label": [part] * count}
        name = f"part-0000{part}-4f1c5e1e-7a0b-4e0f-8f0a-2f6d7a0d9c11-c000.snappy.parquet"
        parquet.write_table(pyarrow.table(values, schema), tmp_path / name, compression="snappy")
        (tmp_path / f".{name}.crc").write_bytes(b"crc")
    (tmp_path / "_SUCCESS").touch()
    train, test = source_registry.load(f"parquet:{tmp_path}", 0, {}, columns="features,label", batch_size=7)
    assert test is None
    assert isinstance(train, Stream)
    inputs, targets = train.next() or ([], [])
    assert sorted(targets.tolist()) == [0, 0, 0, 2, 2, 2, 2]
    assert inputs[:, 0].tolist() == targets.tolist()


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([1.0, None, 2.0], "column 'x' of .* has 1 empty values"),
        ([[1.0, 2.0], [None, 2.0], [1.0, 2.0]], "column 'x' of .* has 1 empty values"),
        ([[1.0], [1.0, 2.0], [1.0]], "column 'x' of .* has lists of different lengths"),
        (["a", "b", "c"], "column 'x' of .* is of type string: it must be numbers"),
        ([{"a": 1}, {"a": 1}, {"a": 1}], r"column 'x' of .* is of type struct<a: int64>: it must be numbers"),
    ],
)
def test_columns_that_are_no_numbers_are_refused(column: list[object], said: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": column, "label": [0, 1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=said):
        source_registry.load(f"parquet:{tmp_path}", 0, {}, columns="x,label")


def test_a_row_that_waits_keeps_no_part_of_the_file_in_memory(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": [[0.5] * 10] * 100, "label": [1] * 100}), tmp_path / "a.parquet")
    for inputs, target in parquet_rows(tmp_path / "a.parquet", ("x", "label")):
        assert inputs.untyped_storage().nbytes() == 40
        assert target.untyped_storage().nbytes() == 8


def line(number: int, **more: object) -> bytes:
    return json.dumps({"inputs": [number, 0.5], "targets": number % 3, **more}).encode() + b"\n"


def test_samples_on_standard_input_become_batches_in_their_order() -> None:
    stream = standard_input(4, [line(number) for number in range(10)])
    assert stream.once
    sizes, first = [], []
    while (batch := stream.next()) is not None:
        sizes.append(len(batch[1]))
        first += batch[0][:, 0].tolist()
    assert sizes == [4, 4, 2]
    assert first == [float(number) for number in range(10)]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"not json\n", "line 3 is no sample"),
        (b'{"inputs": [1, 2]}\n', "line 3 is no sample: Object missing required field `targets`"),
        (b'{"inputs": [[1], [1, 2]], "targets": 0}\n', "line 3 is no sample"),
        (b'{"inputs": [1], "targets": 0}\n', r"line 3 has inputs of shape \(1,\)"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(bad: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        standard_input(4, [line(0), line(1), bad, line(2)])


def test_bad_lines_are_counted_anew_after_every_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtmp.data.standard_input.MOST_BAD_IN_A_ROW", 3)
    stream = standard_input(2, [line(0), b"no\n", b"no\n", line(1), b"no\n", b"no\n", line(2)], bad_lines="skip")
    assert [len(each[1]) for each in iter(stream.next, None)] == [2, 1]
    assert stream.left_out.count == 4
