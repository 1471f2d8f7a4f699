"""The table of docs/strategies.md: what a lossy wire saves on the ring, and what it does to training.

    sudo python scripts/measure_wire_formats.py [--seeds 2] [--models convnet,gpt] [--mbps 100,10]    (a quarter of an hour)

Four emulated devices of 0.45 core; wires in turns, so that all of them see the same machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from ringtmp.bench.analysis.per_step_values import sent_bytes, step_s
from ringtmp.bench.measuring.run_record import Record, record
from ringtmp.bench.training_runs.device_setups import Setting
from ringtmp.lab.devices_file import toml
from ringtmp.metrics import events
from ringtmp.metrics.fold_events import parts_of
from ringtmp.units import bytes_text, seconds_text

WIRES = ("float32", "bfloat16", "float16", "int8")
WORKS = {
    "convnet": "--model convnet --data digits --batch-size 64 --microbatches 8 --steps 138 --lr 0.002",
    "gpt": "--model gpt --set depth=4 --set width=128 --set context=128 --data pysource --batch-size 32 --microbatches 8 "
    "--steps 100 --lr 0.002",
}
LIMIT_S = 600.0
WARM_UP = 2


def run(model: str, wire: str, seed: int, mbps: float) -> tuple[Record, dict[str, Any]]:
    """What one training did step by step, and its summary."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "devices.toml").write_text(toml(Setting("wires", 4, 0.45, mbps, emulated=True).devices))
        command = f"lab --devices devices.toml -- train {WORKS[model]} --wire {wire} --seed {seed}"
        options = "--all-devices --no-rebalance --protect off --run-dir run --json --quiet"
        words = [sys.executable, "-m", "ringtmp", *command.split(), *options.split()]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise SystemExit(f"{model} with {wire}: {done.stderr.strip()}")
        return record(parts_of(events.read(Path(folder) / "run" / "events.jsonl"))[-1]), json.loads(done.stdout)


def row(model: str, mbps: float, wire: str, runs: list[tuple[Record, dict[str, Any]]]) -> str:
    def spread(key: str, form: str) -> str:
        values = sorted(summary[key] for _, summary in runs)
        return " to ".join(dict.fromkeys(form.format(each) for each in (values[0], values[-1])))

    cells = [
        model,
        f"{mbps:g}",
        wire,
        bytes_text(median(median(sent_bytes(made, WARM_UP)) for made, _ in runs)),
        seconds_text(median(median(step_s(made, WARM_UP)) for made, _ in runs)),
        spread("test_loss", "{:.3f}"),
        spread("accuracy", "{:.1%}"),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--models", default=",".join(WORKS))
    parser.add_argument("--mbps", default="100")
    arguments = parser.parse_args()
    print("| model | Mbit/s | wire | bytes per step, all links | step | test loss | accuracy |\n" + "|---" * 7 + "|")
    for model in arguments.models.split(","):
        for mbps in map(float, arguments.mbps.split(",")):
            found = defaultdict(list)
            for seed in range(arguments.seeds):
                for wire in WIRES:
                    found[wire].append(run(model, wire, seed, mbps))
            for wire, runs in found.items():
                print(row(model, mbps, wire, runs), flush=True)


if __name__ == "__main__":
    main()
