"""Train on a stream that nobody stores, and watch memory and disk: python scripts/measure_stream.py [SAMPLES]

Pipes samples into `ringtmp train --data - --stream-keep none --test-then-train`, a few of them malformed, and reads every
second what the processes hold in memory (proportional set size, so that what they share counts once) and what lies in the run
directory. Prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

BATCH = 100
COMMAND = (
    "train", "--data", "-", "--bad-lines", "skip", "--stream-keep", "none", "--test-then-train", "--nodes", "2",
    "--batch-size", str(BATCH), "--microbatches", "2", "--json", "--quiet",
)  # fmt: skip
MODEL = """from torch import nn
def model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
"""
#: One line in so many is no sample.
BAD_EVERY = 10_000


def main() -> None:
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(json.dumps(measure(samples)))


def measure(samples: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ringtmp-stream-") as folder:
        run = Path(folder) / "run"
        (Path(folder) / "small.py").write_text(MODEL)
        process = subprocess.Popen(
            [sys.executable, "-m", "ringtmp", *COMMAND, "--model", f"{folder}/small.py:model", "--run-dir", str(run)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        feeding = threading.Thread(target=_feed, args=(process.stdin, samples), daemon=True)
        feeding.start()
        rows: list[tuple[float, int, int, int]] = []
        began = time.monotonic()
        while process.poll() is None:
            rows.append((time.monotonic() - began, memory(process.pid), _disk(run), _disk(run / "events.jsonl")))
            time.sleep(1.0)
        summary = json.loads(process.stdout.read())
    return {
        "samples": summary["predicted"]["samples"],
        "bad_lines": summary["bad_lines"],
        "seconds": round(rows[-1][0], 1),
        "samples_per_s": round(summary["samples_per_s"], 1),
        "wrong_first_and_last": [round(1 - summary["predicted"]["over_time"][at]["accuracy"], 3) for at in (0, -1)],
        "memory_mib": [round(each / 2**20) for each in at_tenths([row[1] for row in rows])],
        "events_kib": [round(each / 2**10) for each in at_tenths([row[3] for row in rows])],
        "other_files_kib": [round(each / 2**10) for each in at_tenths([row[2] - row[3] for row in rows])],
    }


def _feed(pipe: IO[bytes], samples: int) -> None:
    generator = random.Random(0)
    weights = [[generator.gauss(0, 1) for _ in range(8)] for _ in range(4)]
    with contextlib.suppress(BrokenPipeError), pipe:
        for number in range(samples):
            inputs = [round(generator.gauss(0, 1), 3) for _ in range(8)]
            scores = [sum(a * b for a, b in zip(inputs, row, strict=True)) for row in weights]
            pipe.write(f'{{"inputs": {inputs}, "targets": {scores.index(max(scores))}}}\n'.encode())
            if number % BAD_EVERY == BAD_EVERY - 1:
                pipe.write(b'{"inputs": [1.0\n')


def at_tenths(values: list[int]) -> list[int]:
    return [values[min(len(values) - 1, len(values) * place // 10)] for place in range(11)]


def memory(pid: int) -> int:
    """Of a process and all that it started, in bytes."""
    total = 0
    for each in (pid, *_children(pid)):
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0) * 1024
    return total


def _children(pid: int) -> list[int]:
    try:
        found = [
            int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()
        ]
    except OSError:
        return []
    return [*found, *(below for each in found for below in _children(each))]


def _disk(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    total = 0
    for each in path.rglob("*"):
        try:
            total += each.stat().st_size if each.is_file() else 0
        except OSError:  # removed meanwhile
            continue
    return total


if __name__ == "__main__":
    main()
