"""Train on shards larger than memory should hold, and watch it: python scripts/measure_shards.py parquet|arrow|tar [GIB]

Writes eight shards of random samples, trains three epochs on them, then half of that, and resumes that half. Prints one line of
JSON: the most that the processes hold in memory in every tenth of the time (it goes up and down with the parts of a file), and
whether the resumed run ended with the same weights, as it does only if it had the same batches. Parquet and Arrow need pyarrow.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from measure_stream import memory

SHARDS = 8
VALUES = 4096  # of a sample: 16 KiB
BATCH = 256
EPOCHS = 3  # the first takes seconds, in which the processes start
MODEL = f"""from torch import nn
def model():
    return nn.Sequential(nn.Linear({VALUES}, 8), nn.Tanh(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
"""
COMMAND = (
    "--stream-keep", "none", "--nodes", "2", "--microbatches", "2", "--lr", "0.001", "--json", "--quiet",
)  # fmt: skip


def main() -> None:
    print(json.dumps(measure(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 2.0)))


def measure(kind: str, gib: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ringtmp-shards-") as name:
        folder = Path(name)
        (folder / "small.py").write_text(MODEL)
        (folder / "shards").mkdir()
        a_shard = max(1, int(gib * 2**30 / (VALUES * 4) / SHARDS / BATCH)) * BATCH
        for number in range(SHARDS):
            generator = np.random.default_rng(number)
            inputs = generator.standard_normal((a_shard, VALUES), dtype=np.float32)
            WRITERS[kind](folder / f"shards/train-{number}.{kind}", inputs, generator.integers(0, 4, a_shard))
        samples = SHARDS * a_shard
        steps = EPOCHS * samples // BATCH
        given = ["--data", f"{kind}:{folder}/shards", "--model", f"{folder}/small.py:model", "--batch-size", str(BATCH)]
        given += [] if kind == "tar" else ["--columns", "x,label"]
        whole, rows = _train(*given, "--steps", str(steps), "--run-dir", f"{folder}/whole")
        _train(*given, "--steps", str(steps // 2), "--run-dir", f"{folder}/half")
        resumed, _ = _train("--resume", f"{folder}/half", "--steps", str(steps))
        return {
            "kind": kind,
            "gib": round(sum(each.stat().st_size for each in (folder / "shards").iterdir()) / 2**30, 2),
            "samples": samples,
            "seconds": round(rows[-1][0], 1),
            "samples_per_s": round(whole["samples_per_s"], 1),
            "highest_memory_mib": [round(each / 2**20) for each in highest_of_tenths([row[1] for row in rows])],
            "same_after_resuming": resumed["weights_sha256"] == whole["weights_sha256"],
        }


def highest_of_tenths(values: list[int]) -> list[int]:
    return [max(values[len(values) * at // 10 : max(1, len(values) * (at + 1) // 10)], default=0) for at in range(10)]


def _train(*words: str) -> tuple[dict[str, Any], list[tuple[float, int]]]:
    """The summary, and what was in memory second by second."""
    command = COMMAND if "--resume" not in words else ("--json", "--quiet")
    process = subprocess.Popen(
        [sys.executable, "-m", "ringtmp", "train", *words, *command], stdout=subprocess.PIPE
    )  # fmt: skip
    assert process.stdout is not None
    rows: list[tuple[float, int]] = []
    began = time.monotonic()
    while process.poll() is None:
        rows.append((time.monotonic() - began, memory(process.pid)))
        time.sleep(1.0)
    return json.loads(process.stdout.read()), rows


def _parquet(path: Path, inputs: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
    from pyarrow import parquet

    parquet.write_table(_table(inputs, labels), path, compression="NONE", row_group_size=2048)


def _arrow(path: Path, inputs: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
    from pyarrow import ipc

    table = _table(inputs, labels)
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


def _table(inputs: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Any:
    import pyarrow

    lists = pyarrow.ListArray.from_arrays(np.arange(len(inputs) + 1, dtype=np.int32) * VALUES, inputs.reshape(-1))
    return pyarrow.table({"x": lists, "label": labels})


def _tar(path: Path, inputs: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, (row, label) in enumerate(zip(inputs, labels, strict=True)):
            array = io.BytesIO()
            np.save(array, row)
            for ending, content in (("npy", array.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:06}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


WRITERS = {"parquet": _parquet, "arrow": _arrow, "tar": _tar}

if __name__ == "__main__":
    main()
