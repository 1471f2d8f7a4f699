"""Training on shards: one that is gone in mid-epoch ends the run and is named; put back, the run ends with the same bits."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ringtmp import api
from ringtmp.data import shards
from ringtmp.data.shards import open_shards
from ringtmp.data.tables_and_streams import Stream
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from test_healing import STEPS, run
from test_training_loop import blobs

SHARDS = 2  # so that a checkpoint is there before the second one is opened
A_SHARD = 16 * STEPS // SHARDS


def folder_of_shards(folder: Path) -> None:
    folder.mkdir()
    inputs, labels = blobs(16 * STEPS)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(shard * A_SHARD, (shard + 1) * A_SHARD):
                array = io.BytesIO()
                np.save(array, inputs[number].numpy())
                for ending, content in (("npy", array.getvalue()), ("cls", b"%d" % int(labels[number]))):
                    member = tarfile.TarInfo(f"{number}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def test_a_shard_that_is_gone_ends_the_run_and_put_back_it_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BUFFER", 20)
    folder_of_shards(tmp_path / "shards")

    def data() -> tuple[Stream, None]:
        return open_shards("tar", tmp_path / "shards", 0, 16, ())[0], None

    whole = run(tmp_path / "whole", InMemoryPool(3), data=data()).summary
    given = data()  # its first batch is read, of the first shard
    away = tmp_path / "away"
    (tmp_path / "shards").rename(away)
    with pytest.raises(
        UsageError, match=r"shard .*\d.tar cannot be read: No such file .*; put it back and resume the run"
    ):
        run(tmp_path / "run", InMemoryPool(3), data=given)
    away.rename(tmp_path / "shards")
    assert 0 < _newest_step(tmp_path / "run") < STEPS
    resumed = api.resume(tmp_path / "run", {}, data(), None, watcher=api.Watcher(), pool=InMemoryPool(2)).summary
    assert (resumed.steps, resumed.exactness) == (STEPS, "bits")
    assert resumed.weights_sha256 == whole.weights_sha256 is not None


def _newest_step(run_dir: Path) -> int:
    return max(int(each.name.removeprefix("step-")) for each in (run_dir / "checkpoints").glob("step-*"))
