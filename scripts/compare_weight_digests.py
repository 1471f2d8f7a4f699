"""The digest matrix: the weights of many small runs, so that a change that should alter no bit can show that it altered none.

    python scripts/compare_weight_digests.py record docs/digests.json     run every case and write its digest
    python scripts/compare_weight_digests.py compare docs/digests.json    run every case again and name those that differ
    python scripts/compare_weight_digests.py ... --only resume,killed     only cases whose name has one of these words

Models, strategies, schedules, routes, wires, optimizers, healing after a kill, resuming. Digests hold for one fingerprint
(torch build, CPU capability), which is recorded with them; with another one `compare` says so and compares nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MODELS = {
    "mlp": "--steps 12",
    "mlp-dropout": "--steps 12 --set dropout=0.2 --set depth=6",
    "convnet": "--model convnet --steps 8 --batch-size 16 --microbatches 4",
    "resnet": "--model resnet --steps 6 --batch-size 16 --microbatches 4",
    "gpt": "--model gpt --data pysource --set depth=3 --set width=32 --set context=32 --steps 6 --batch-size 8",
}
RINGS = {
    "1 node": "--nodes 1",
    "2 nodes": "--nodes 2",
    "3 nodes zero-bubble": "--nodes 3 --schedule zero-bubble",
    "3 nodes gpipe recompute": "--nodes 3 --schedule gpipe --recompute all",
}
SETTINGS = {
    "sgd momentum": "--steps 12 --optimizer sgd --opt momentum=0.9 --opt nesterov=yes",
    "adamw clip cosine": "--steps 12 --optimizer adamw --clip-norm 0.5 --lr-schedule cosine:warmup=3",
    "amsgrad": "--steps 12 --opt amsgrad=yes",
    "staleness 1": "--steps 12 --staleness 1 --optimizer sgd --lr 0.05",
    "two laps": "--steps 12 --nodes 2 --laps 2 --set depth=7",
    "route v": "--steps 12 --nodes 3 --route v --set depth=8",
    "cuts by hand": "--steps 12 --nodes 3 --cuts 0-1,2,3-4,5",
    "window 1": "--steps 12 --nodes 3 --window 1",
    "uneven batches": "--steps 60 --batch-size 50 --microbatches 7",
    "two threads": "--steps 6 --threads 2",
    "wire bfloat16": "--steps 12 --wire bfloat16 --nodes 3 --cuts 0-1,2,3-4,5",
    "wire float16": "--steps 12 --wire float16 --nodes 3 --cuts 0-1,2,3-4,5",
    "wire int8": "--steps 12 --wire int8 --nodes 3 --cuts 0-1,2,3-4,5",
    "early stop": "--epochs 3 --early-stop 1 --lr 0.05",
}
PARALLEL = {
    "ps bsp": "--steps 12 --strategy ps:bsp",
    "ps two servers": "--steps 12 --strategy ps:bsp --with servers=2 --nodes 4",
    "ps servers=workers": "--steps 12 --strategy ps --with servers=workers",
    "ps bsp clip": "--steps 12 --strategy ps:bsp --clip-norm 0.5",
    "ps int8": "--steps 12 --strategy ps:bsp --wire int8",
    "allreduce ring": "--steps 12 --strategy allreduce",
    "allreduce tree": "--steps 12 --strategy allreduce:tree --nodes 4",
    "allreduce convnet": "--model convnet --steps 6 --batch-size 16 --strategy allreduce",
}
#: The first part of a run, then what goes on with it.
RESUMED = {
    "resume": ("--steps 6", "--steps 12"),
    "resume with more nodes": ("--steps 6 --nodes 2", "--steps 12 --nodes 4"),
    "resume staleness 1": ("--steps 6 --staleness 1 --optimizer sgd --lr 0.05", "--steps 12"),
    "resume ps": ("--steps 6 --strategy ps:bsp", "--steps 12"),
    "resume gpt": (MODELS["gpt"].replace("--steps 6", "--steps 3"), "--steps 6"),
}
#: A worker is killed once the run has done so many steps.
KILLED = {
    "ring killed": ("--steps 200 --nodes 3", 40),
    "ring killed disk": ("--steps 200 --nodes 4 --protect disk --set depth=8", 60),
    "ring killed zero-bubble": ("--steps 200 --nodes 3 --schedule zero-bubble --set dropout=0.1", 50),
    "allreduce killed": ("--steps 200 --nodes 3 --strategy allreduce", 40),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", metavar="WORDS", default="", help="words of the cases to run, separated by commas")
    asked = parser.parse_args()
    words = asked.only.split(",")
    found = {"fingerprint": fingerprint(), "digests": measure(words)}
    if asked.verb == "record":
        asked.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found['digests'])} digests in {asked.file}")
        return
    before = json.loads(asked.file.read_text())
    if before["fingerprint"] != found["fingerprint"]:
        sys.exit(f"recorded with {before['fingerprint']}, this machine is {found['fingerprint']}: nothing to compare")
    names = {name for name in before["digests"] if wanted(name, words)} | found["digests"].keys()
    unlike = sorted(name for name in names if before["digests"].get(name) != found["digests"].get(name))
    for name in unlike:
        print(f"DIFFERS {name}: {before['digests'].get(name)} -> {found['digests'].get(name)}")
    print(f"{len(names) - len(unlike)} of {len(names)} equal")
    sys.exit(1 if unlike else 0)


def wanted(name: str, words: list[str]) -> bool:
    return any(word in name for word in words)


def measure(words: list[str]) -> dict[str, str]:
    cases: dict[str, tuple[str, ...]] = {
        f"{model}, {ring}": (f"{MODELS[model]} {RINGS[ring]}",) for model in MODELS for ring in RINGS
    }
    cases |= {name: (args,) for name, args in (SETTINGS | PARALLEL).items()}
    cases |= RESUMED
    found = {}
    for name, parts in cases.items():
        if not wanted(name, words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            found[name] = train(["--run-dir", str(run), *parts[0].split()])
            if len(parts) > 1:
                found[name] = train(["--resume", str(run), *parts[1].split()])
        print(f"{found[name][:16]}  {name}", flush=True)
    for name, (args, step) in KILLED.items():
        if not wanted(name, words):
            continue
        found[name] = killed(args, step)
        print(f"{found[name][:16]}  {name}", flush=True)
    return found


def train(args: list[str]) -> str:
    done = subprocess.run([*COMMAND, *args], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        sys.exit(f"{' '.join(args)}: exit {done.returncode}\n{done.stderr}")
    return str(json.loads(done.stdout)["weights_sha256"])


def killed(args: str, step: int) -> str:
    """The digest of a run that lost a worker; it must have healed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        with subprocess.Popen(
            [*COMMAND, "--run-dir", str(run), *args.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            limit = time.monotonic() + 120
            while time.monotonic() < limit and process.poll() is None and steps_done(run) < step:
                time.sleep(0.02)
            workers = [
                each for each in psutil.Process(process.pid).children() if "spare" not in " ".join(each.cmdline())
            ]
            os.kill(min(workers, key=lambda each: each.pid).pid, signal.SIGKILL)
            said, _ = process.communicate(timeout=300)
        summary = json.loads(said)
        if not summary["recoveries"]:
            sys.exit(f"{args}: nobody was lost")
        return str(summary["weights_sha256"])


def steps_done(run: Path) -> int:
    log = run / "events.jsonl"
    return log.read_bytes().count(b'{"type":"step"') if log.exists() else 0


def fingerprint() -> dict[str, str]:
    import torch

    return {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability()}


COMMAND = [sys.executable, "-m", "ringtmp", "train", "--json", "--quiet"]

if __name__ == "__main__":
    main()
