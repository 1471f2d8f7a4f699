"""Measure what a GPU makes of a run: figures of docs/benchmarks.md. Needs one NVIDIA GPU, torch with CUDA and a C++ compiler.

    python scripts/measure_gpu.py [--parts base,ring,…] [--seconds 520] [--out gpu.json]     (nine minutes)
    python scripts/measure_gpu.py --tiny --device cpu     (a minute: whether the script works, not how fast anything is)

A `gpt` of 124M parameters (12 blocks, width 768, context 1024, bfloat16). `base`: one plain PyTorch process with torch.compile;
`ring`: two stages in one process, with deterministic kernels and any; `loss`: 50 float32 steps beside the processor's; `mixed`:
a GPU master and two joined devices that have processors alone; `pipelining`: torch.distributed.pipelining, two Gloo ranks that
share the GPU; `more`: what there is time for; `bits`: digests of one and of several nodes; `profile`, which nobody runs unless
asked: where the time of a step goes, for base and ring. Every part has a limit of its own; what went wrong is a row, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gpu_runs import awaited, free_port, run, started

MODEL = """
import torch
from ringtmp.data.tables_and_streams import Shape
from ringtmp.model import zoo

VOCABULARY, CONTEXT, DEPTH, WIDTH, HEADS, SAMPLES = {vocabulary}, {context}, {depth}, {width}, {heads}, {samples}

def model():
    return zoo.gpt(Shape((CONTEXT,), False, VOCABULARY), depth=DEPTH, width=WIDTH, heads=HEADS, context=CONTEXT)

def data():
    draw = torch.Generator().manual_seed(0)
    first = torch.randint(VOCABULARY, (SAMPLES, 1), generator=draw)
    stride = torch.randint(1, 5, (SAMPLES, 1), generator=draw)
    tokens = (first + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return (inputs, targets), (inputs[:2], targets[:2])
"""
RATE, SEED = 3e-4, 0


@dataclass(frozen=True)
class Size:
    vocabulary: int = 25_024
    context: int = 1024
    depth: int = 12
    width: int = 768
    heads: int = 12
    batch: int = 128
    microbatches: int = 8
    steps: int = 14

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def cuts(self) -> str:
        """Two stages in one process: the embedding is the first layer, the head the last."""
        return f"0-{self.depth // 2},{self.depth // 2 + 1}-{self.depth + 1}"

    @property
    def cuts_for_two(self) -> str:
        """The master's front, the worker's stage, the loss alone with the master."""
        return f"0-{self.depth // 2},{self.depth // 2 + 1}-{self.depth},{self.depth + 1}"

    def write(self, folder: Path) -> None:
        names = {**asdict(self), "samples": (self.steps + 1) * self.batch}  # no epoch ends
        (folder / "mine.py").write_text(MODEL.format(**names))


LARGE, TINY = Size(), Size(512, 32, 2, 32, 4, 8, 4, 5)
#: For losses beside a processor's: all blocks, shorter samples.
FOR_LOSS, TINY_LOSS = Size(context=128, batch=4, microbatches=2, steps=50), Size(512, 32, 2, 32, 4, 8, 4, 50)
FOR_MIXED, TINY_MIXED = Size(512, 128, 4, 128, 4, 16, 4, 40), Size(512, 32, 3, 32, 4, 8, 4, 30)


@dataclass
class Given:
    device: str
    size: Size
    loss: Size
    mixed: Size
    compile: bool
    compute: str
    threads: int
    until: float  # by time.monotonic
    rows: list[dict[str, Any]] = field(default_factory=list)
    folder: Path = Path()
    out: Path | None = None

    def left(self, most_s: float) -> float:
        return max(5.0, min(most_s, self.until - time.monotonic()))

    def note(self, part: str, what: str, **found: Any) -> None:
        row = {"part": part, "what": what, **found}
        self.rows.append(row)
        if self.out is not None:
            self.out.write_text(json.dumps({"size": asdict(self.size), "rows": self.rows}, indent=1))
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", default="base,ring,loss,mixed,pipelining,more,bits")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--compute", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seconds", type=float, default=520.0, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    options = parser.parse_args()
    sizes = (TINY, TINY_LOSS, TINY_MIXED) if options.tiny else (LARGE, FOR_LOSS, FOR_MIXED)
    until = time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # what was started ends, too
    given = Given(options.device, *sizes, not options.no_compile, options.compute, options.threads, until)
    given.out = options.out
    given.note("machine", **facts(options.device))
    for name in options.parts.split(","):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ringtmp-gpu-") as folder:
            given.folder = Path(folder)
            PARTS[name](given)
        given.note("time", name, seconds=round(time.monotonic() - began, 1))
    print(table(given.rows))


def facts(device: str) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "processor"
    return {"what": name, "torch": str(torch.__version__), "python": platform.python_version(), "cores": os.cpu_count()}


def table(rows: list[dict[str, Any]]) -> str:
    """Tokens a second, as a share of the compiled base with the same microbatches."""
    base = next((row["tokens_s"] for row in rows if row["part"] == "base" and row.get("same_microbatches")), None)
    lines = ["", "| part | what | tokens/s | of the base | more |", "|---|---|---|---|---|"]
    for row in rows:
        if row["part"] == "time":
            continue
        rate = row.get("tokens_s")
        share = f"{rate / base:.0%}" if rate and base else ""
        hidden = ("part", "what", "tokens_s", "same_microbatches")
        more = ", ".join(f"{key} {value}" for key, value in row.items() if key not in hidden)
        lines.append(f"| {row['part']} | {row['what']} | {f'{rate:,.0f}' if rate else ''} | {share} | {more[-300:]} |")
    return "\n".join(lines)


# -- running things -------------------------------------------------------------------------------------------------


def ring_words(given: Given, size: Size, steps: int, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "ringtmp", "train", "--model", "mine.py:model", "--data", "mine.py:data", "--loss", "next_byte",
        "--optimizer", "adamw", "--lr", str(RATE), "--batch-size", str(size.batch), "--microbatches", str(size.microbatches),
        "--steps", str(steps), "--seed", str(SEED), "--schedule", "1f1b", "--protect", "off", "--no-rebalance", "--json",
        "--quiet", *more,
    ]  # fmt: skip


def fast(given: Given) -> list[str]:
    return [*(["--compute", given.compute] if given.compute != "float32" else []), *["--compile"] * given.compile]


def ring(given: Given, part: str, what: str, *more: str, limit_s: float = 150) -> None:
    given.size.write(given.folder)
    name = re.sub(r"\W+", "-", what)
    words = ring_words(given, given.size, given.size.steps, "--device", given.device, "--run-dir", name, *more)
    out, why, _ = run(words, given.folder, given.left(limit_s))
    if why:
        given.note(part, what, error=why)
        return
    told = json.loads(out)
    steps_s = step_seconds(given.folder / name)
    given.note(
        part, what, tokens_s=given.size.tokens / median(steps_s[len(steps_s) // 3 :]), first_step_s=round(steps_s[0], 1),
        loss=round(told["loss"]["last"], 4), weights=told["weights_sha256"][:12], mode=told["numeric_mode"],
        exactness=told["exactness"], forecast_s=(told.get("forecast") or {}).get("step_s"),
    )  # fmt: skip


def step_events(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [each for each in lines if each.get("type") == "step"]


def step_seconds(folder: Path) -> list[float]:
    """From the end of one step to the end of the next, so that nothing between them goes uncounted."""
    found = step_events(folder)
    ends = [each["at"] for each in found]
    return [found[0]["wall_s"], *(after - before for before, after in pairwise(ends))]


# -- the parts ------------------------------------------------------------------------------------------------------


def base_part(given: Given) -> None:
    peer(given, "base", "one process, torch.compile, the same microbatches", given.size.microbatches, True)


def profile_part(given: Given) -> None:
    """Of one step of the base, and of two of the ring with kernels that repeat and with any."""
    peer(given, "profile", "one process, torch.compile", given.size.microbatches, True, profiled=given.size.steps - 2)
    two = ["--nodes", "1", "--laps", "2", "--cuts", given.size.cuts, "--threads", str(given.threads), *fast(given)]
    for number, more in enumerate(([], ["--no-deterministic"])):
        words = ring_words(
            given, given.size, given.size.steps, "--device", given.device, "--run-dir", f"p{number}", *two, *more
        )
        asked = {"words": words[words.index("train") :], "profiled": given.size.steps - 4, "steps": 2}
        _, why, err = run([sys.executable, __file__, "_profiled", json.dumps(asked)], given.folder, given.left(150))
        given.note(
            "profile",
            " ".join(["two stages in one process", *more]),
            **found_in(err),
            **({"error": why} if why else {}),
        )


def found_in(err: str) -> dict[str, Any]:
    """What a watch has written among other things."""
    return next((json.loads(line) for line in reversed(err.splitlines()) if line.startswith('{"wall_ms"')), {})


def bits_part(given: Given) -> None:
    """Small models with dropout and clipping: the same digests for one node and for three?"""
    given.mixed.write(given.folder)
    small = [
        "--model",
        "mlp",
        "--set",
        "dropout=0.2",
        "--set",
        "depth=6",
        "--optimizer",
        "adamw",
        "--clip-norm",
        "1",
        "--steps",
        "12",
    ]
    ways = {"float32": [], "as measured": fast(given)}
    for way, more in ways.items():
        digests = {}
        for nodes in ("1", "3"):
            words = [
                sys.executable,
                "-m",
                "ringtmp",
                "train",
                *small,
                "--device",
                given.device,
                "--nodes",
                nodes,
                "--json",
                "--quiet",
            ]
            out, why, _ = run([*words, *more, "--run-dir", f"{way[0]}{nodes}"], given.folder, given.left(100))
            if why:
                given.note("bits", way, error=why)
                return
            told = json.loads(out)
            digests[nodes] = told["weights_sha256"][:12]
        given.note(
            "bits",
            way,
            **{f"nodes_{nodes}": each for nodes, each in digests.items()},
            same=len(set(digests.values())) == 1,
        )


def peer(
    given: Given, part: str, what: str, microbatches: int, same: bool, limit_s: float = 150, profiled: int = -1
) -> None:
    given.size.write(given.folder)
    asked = {
        "profiled": profiled,
        "device": given.device,
        "compute": given.compute,
        "compile": given.compile,
        "microbatches": microbatches,
    }
    words = [
        sys.executable,
        __file__,
        "_base",
        json.dumps({**asked, "steps": given.size.steps, "batch": given.size.batch}),
    ]
    out, why, err = run(words, given.folder, given.left(limit_s))
    if why:
        given.note(part, what, error=why)
        return
    told = json.loads(out.splitlines()[-1])
    steps_s = told["steps_s"]
    rate = given.size.tokens / median(steps_s[len(steps_s) // 3 :])
    given.note(
        part, what, tokens_s=rate, same_microbatches=same, first_step_s=round(steps_s[0], 1), loss=round(told["loss"], 4),
        parameters=told["parameters"], **found_in(err),
    )  # fmt: skip


def ring_part(given: Given) -> None:
    two = ["--nodes", "1", "--laps", "2", "--cuts", given.size.cuts, "--threads", str(given.threads), *fast(given)]
    ring(given, "ring", "two stages in one process", *two)
    ring(given, "ring", "two stages in one process, any kernels", *two, "--no-deterministic")


def more_part(given: Given) -> None:
    """What there is time for. With few samples in a microbatch the GPU is told less quickly than it computes."""
    many = ["--threads", str(given.threads), *fast(given)]
    shared = ["--nodes", "2", "--cuts", given.size.cuts_for_two, *many]
    two = ["--nodes", "1", "--laps", "2", "--cuts", given.size.cuts, *many, "--no-deterministic"]
    few = replace(given, size=replace(given.size, batch=max(given.size.microbatches, given.size.batch // 4)))
    peer(few, "more", "few samples: one process, torch.compile", few.size.microbatches, False)
    ring(few, "more", "few samples: two stages in one process, any kernels", *two)
    ring(given, "more", "two processes share the device, any kernels", *shared, "--no-deterministic", limit_s=100)
    ring(given, "more", "one stage, any kernels", "--nodes", "1", *many, "--no-deterministic", limit_s=80)
    ring(given, "more", "two stages in one process, float32, not compiled", *two[:8], *two[-1:], limit_s=100)


def loss_part(given: Given) -> None:
    """Both in float32, not compiled, the same threads."""
    given.loss.write(given.folder)
    losses: dict[str, list[float]] = {}
    for device in dict.fromkeys((given.device, "cpu")):
        words = ring_words(given, given.loss, given.loss.steps, "--device", device, "--run-dir", device)
        words += ["--nodes", "1", "--threads", str(given.threads)]
        _, why, _ = run(words, given.folder, given.left(120))
        if why:
            given.note("loss", device, error=why)
            return
        losses[device] = [each["loss"] for each in step_events(given.folder / device)]
    apart = max(abs(one - other) for one, other in zip(losses[given.device], losses["cpu"], strict=True))
    given.note(
        "loss", f"{given.device} and cpu", steps=len(losses["cpu"]), first=round(losses["cpu"][0], 4),
        last=round(losses["cpu"][-1], 4), furthest_apart=apart, within_a_thousandth=apart <= 1e-3,
    )  # fmt: skip


def mixed_part(given: Given) -> None:
    joined(given, "mixed", given.device, "cpu", 2)
    joined(given, "the other way round", "cpu", given.device, 1)


def joined(given: Given, name: str, of_master: str, of_others: str, others: int) -> None:
    """A master, and devices that join over encrypted links, and where each computes."""
    home = given.folder / name.replace(" ", "-")
    home.mkdir()
    given.mixed.write(home)
    what = f"master on {of_master}, {others} joined on {of_others}"
    words = ring_words(
        given, given.mixed, given.mixed.steps, "--device", of_master, "--nodes", str(others + 1),
        "--listen", f"127.0.0.1:{free_port()}", "--all-devices", "--threads", "1", "--run-dir", "mixed",
    )  # fmt: skip
    words.remove("--quiet")
    said = home / "said"
    with (
        said.open("w") as err, (home / "told").open("w") as out, (home / "nodes").open("w") as log,
        started(words, home, home / "master", stdout=out, stderr=err) as master, contextlib.ExitStack() as nodes,
    ):  # fmt: skip
        token = awaited(said, master, given.left(60))
        if token is None:
            given.note("mixed", what, error=f"no token: {said.read_text()[-600:]}")
            return
        node = [sys.executable, "-m", "ringtmp", "node", "--device", of_others, "--join", token]
        for number in range(others):
            each = f"node-{number}"
            nodes.enter_context(started([*node, "--name", each], home, home / each, stdout=log, stderr=log))
        with contextlib.suppress(subprocess.TimeoutExpired):
            master.wait(given.left(120))
    if master.returncode != 0:
        given.note("mixed", what, error=said.read_text()[-500:] + (home / "nodes").read_text()[-300:])
        return
    told = json.loads((home / "told").read_text())
    given.note(
        "mixed", what, steps=told["steps"], nodes=told["nodes"], first=round(told["loss"]["first"], 4),
        last=round(told["loss"]["last"], 4), outcome=told["outcome"], exactness=told["exactness"], bytes=told["bytes_total"],
        step_s=round(told["step_s"]["median"], 4), plan=[each["segments"] for each in told["per_node"]],
        forecast_s=(told.get("forecast") or {}).get("step_s"),
    )  # fmt: skip


def pipelining_part(given: Given) -> None:
    given.size.write(given.folder)
    what = "torch.distributed.pipelining, 1F1B, two Gloo ranks that share the device"
    asked = {
        "device": given.device, "compute": given.compute, "compile": given.compile, "microbatches": given.size.microbatches,
        "steps": given.size.steps, "batch": given.size.batch, "first": given.size.depth // 2 + 1, "context": given.size.context,
        "width": given.size.width, "vocabulary": given.size.vocabulary,
    }  # fmt: skip
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, "_pipelining",
        json.dumps(asked),
    ]  # fmt: skip
    out, why, _ = run(words, given.folder, given.left(120), OMP_NUM_THREADS="4")
    if why:
        given.note("pipelining", what, error=why)
        return
    told = next(json.loads(line) for line in out.splitlines() if line.startswith("{"))
    steps_s = told["steps_s"]
    given.note(
        "pipelining", what, tokens_s=given.size.tokens / median(steps_s[len(steps_s) // 3 :]),
        first_step_s=round(steps_s[0], 1), loss=round(told["loss"], 4),
    )  # fmt: skip


PARTS: dict[str, Callable[[Given], None]] = {
    "base": base_part, "ring": ring_part, "loss": loss_part, "mixed": mixed_part, "pipelining": pipelining_part,
    "more": more_part, "bits": bits_part, "profile": profile_part,
}  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("_base", "_pipelining", "_profiled"):
        import gpu_peers

        gpu_peers.PEERS[sys.argv[1]](json.loads(sys.argv[2]))
    else:
        main()
