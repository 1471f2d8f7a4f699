"""What cutting a module into cells costs and saves: figures of docs/benchmarks.md.

    sudo python scripts/measure_cells.py pace [--repeats 3] [--steps 20]    (a quarter of an hour)
    python scripts/measure_cells.py start [--blocks 30]                     (two minutes)

`pace`: the `gpt` of the bench as one module on four emulated devices of 0.45 core at 100 Mbit/s, cut into cells or only
between its blocks, in turns. `start`: from `fit` to the end of the first step, for a Llama of many blocks (needs the extra hf),
with a fresh export and with a kept one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from ringtmp.bench.training_runs.device_setups import SETTINGS
from ringtmp.bench.training_runs.workloads import WORKLOADS
from ringtmp.lab.devices_file import toml

MODEL = """
from torch import nn
from ringtmp.data.tables_and_streams import Shape
from ringtmp.model import zoo

class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        layers = list(zoo.gpt(Shape((128,), False, 256), depth=8, width=256, heads=4, context=128))
        self.embed, self.head = layers[0][1], layers[-1][1]
        self.blocks = nn.ModuleList(block for _, block in layers[1:-1])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model(context=128):
    return Gpt()
"""
START = """
import sys, time
import torch, transformers
from ringtmp import Ring

torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers={blocks}, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=64))
ids = torch.randint(0, 1000, (64, 64))
began = time.monotonic()
Ring(nodes=2, progress=False).fit(
    model, {{"input_ids": ids, "labels": ids}}, steps=3, batch_size=8, microbatches=4, run_dir=sys.argv[1],
    on_step=lambda step, loss: print(f"{{time.monotonic() - began:.1f}}") if step == 1 else None)
"""
LIMIT_S = 600.0


def pace(repeats: int, steps: int) -> None:
    work, found = WORKLOADS["gpt"], defaultdict[str, list[float]](list)
    digests: set[str] = set()
    for _ in range(repeats):
        for name, more in (("cells", []), ("blocks", ["--blocks", "embed,blocks.*,head"])):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "mine.py").write_text(MODEL)
                (Path(folder) / "devices.toml").write_text(toml(SETTINGS["lab-100"].devices))
                words = [
                    sys.executable, "-m", "ringtmp", "lab", "--devices", "devices.toml", "--", "train",
                    "--model", "mine.py:model", "--data", work.data, "--set", "context=128", "--loss", "next_byte",
                    "--optimizer", work.optimizer, "--lr", str(work.lr), "--batch-size", str(work.batch_size),
                    "--microbatches", str(work.pipeline_microbatches), "--steps", str(steps), "--all-devices",
                    "--no-rebalance", "--protect", "off", "--run-dir", "run", "--json", "--quiet", *more,
                ]  # fmt: skip
                done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr.strip()}")
            summary = json.loads(done.stdout)
            digests.add(summary["weights_sha256"])
            found[name].append(summary["step_s"]["median"])
            held = [node["params"] for node in summary["per_node"]]
            print(f"{name}: {found[name][-1]:.3f} s a step, parameters {held}", flush=True)
    ratio = median(found["blocks"]) / median(found["cells"])
    print(f"blocks take {ratio:.3f} times as long as cells; {len(digests)} digest(s)")


def start(blocks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "start.py").write_text(START.format(blocks=blocks))
        for name in ("fresh", "kept"):
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "start.py", f"run-{name}"], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
                env={**os.environ, "XDG_CACHE_HOME": str(Path(folder) / "cache")},
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(done.stderr.strip())
            whole = time.monotonic() - began
            print(
                f"{name}: {done.stdout.strip()} s from fit to the end of the first step; {whole:.0f} s in all",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pace", "start"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=30)
    given = parser.parse_args()
    if given.what == "pace":
        pace(given.repeats, given.steps)
    else:
        start(given.blocks)
