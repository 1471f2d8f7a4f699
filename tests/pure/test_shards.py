"""Data in shards and on standard input: order, memory, and what is refused."""

from __future__ import annotations

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
from ringtmp.data.shards import Shards, open_shards
from ringtmp.data.standard_input import standard_input
from ringtmp.data.tables_and_streams import Stream
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
    with pytest.raises(UsageError, match="--columns is for --data parquet:PATH"):
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
