"""Where a step's processor time goes, device by device and kind by kind: tables of docs/performance.md.

    sudo python scripts/measure_processor_time.py --settings lab-100 lab-8 [--steps 16] [--microbatches 16]    (2 minutes each)

The `gpt` of the bench (`gpt16` on eight devices) trains on the bench's emulated devices, and once in one process. Kinds are
those of a step's busy time, in processor time of the main thread (time.thread_time); those of the other threads and of the
kernel come from /proc, and what a device was kept from using from its control group. A module that Python loads at its start
(sitecustomize) takes them in every node, so what is measured is the engine as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from ringtmp.bench.training_runs.device_setups import DEVICES, RINGTMP, SETTINGS, Setting, lab
from ringtmp.bench.training_runs.workloads import WORKLOADS, train_flags
from ringtmp.lab.devices_file import toml

FOLDER = "RINGTMP_PROCESSOR_TIME"
LAYERS = ("forward", "backward", "weights")
#: All of a step. Evaluations are in what the process took, and in nothing here.
COUNTED = (*LAYERS, "update", "serialise", "mail", "zeromq", "threads")
#: What every process of a run loads first: the recorder of steps keeps processor time beside its own.
PROBE = '''
import importlib.util, json, os, sys, time

NAME = "ringtmp.metrics.step_recorder"

def threads():
    """Processor seconds of all threads but this one, by how it is called."""
    found, me = {}, str(os.getpid())
    for each in os.listdir("/proc/self/task"):
        if each == me:
            continue
        try:
            called = open(f"/proc/self/task/{each}/comm").read().strip()
            ran = int(open(f"/proc/self/task/{each}/schedstat").read().split()[0]) / 1e9
        except OSError:
            continue
        kind = "zeromq" if called.startswith("ZMQ") else "threads"
        found[kind] = found.get(kind, 0.0) + ran
    return found

def throttled():
    """Seconds that the device's quota kept its group from running."""
    for line in open("/proc/self/cgroup"):
        _, names, path = line.strip().split(":", 2)
        if "cpu" in names.split(",") or names == "":
            for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup"):
                try:
                    stat = dict(each.split() for each in open(f"{root}{path}/cpu.stat").read().splitlines())
                    return int(stat.get("throttled_time", 0)) / 1e9 or int(stat.get("throttled_usec", 0)) / 1e6
                except OSError:
                    pass
    return 0.0

def wrap(Recorder):
    begin, sending, end, close = Recorder.begin, Recorder.sending, Recorder.end, Recorder.close_step
    fresh = Recorder.fresh
    ran = time.thread_time

    def count(self, kind, now):
        times = self.__dict__.setdefault("_ran", {})
        times[kind] = times.get(kind, 0.0) + now - self.__dict__.get("_ran_at", now)
        self._ran_at = now

    def begin_(self):
        count(self, "mail", ran())
        self._handing = None
        return begin(self)

    def fresh_(self):
        self._ran_at = ran()  # what came before, an evaluation perhaps, belongs to no step
        return fresh(self)

    def sending_(self):
        if self.__dict__.get("_handing") is None:
            self._handing = ran()
        return sending(self)

    def end_(self, started, kind, visit, microbatch):
        now, handing = ran(), self.__dict__.get("_handing")
        count(self, kind, now if handing is None else handing)
        count(self, "serialise", now)
        self._handing = None
        return end(self, started, kind, visit, microbatch)

    def close_(self, step, *more, **named):
        record = close(self, step, *more, **named)
        usage = os.times()
        line = {"node": record.node, "step": step, "kinds": dict(self.__dict__.get("_ran", {})), "others": threads(),
                "kernel": usage.system, "process": usage.user + usage.system, "throttled": throttled(),
                "wall": record.end - record.start, "idle": record.idle_s}
        self._ran = {}
        with open(os.path.join(os.environ["RINGTMP_PROCESSOR_TIME"], f"{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\\n")
        return record

    Recorder.begin, Recorder.sending, Recorder.end, Recorder.close_step = begin_, sending_, end_, close_
    Recorder.fresh = fresh_

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            wrap(module.Recorder)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=["lab-100", "lab-8"], choices=sorted(SETTINGS))
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="gpt, or gpt16 on eight devices, unless given")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=4, help="steps left out")
    parser.add_argument(
        "--with", dest="more", nargs=argparse.REMAINDER, default=[], help="further options of ringtmp train"
    )
    asked = parser.parse_args()
    if asked.steps <= asked.warm_up:
        parser.error("--steps must be more than --warm-up")
    for name in asked.settings:
        setting = SETTINGS[name]
        workload = asked.workload or ("gpt16" if setting.nodes > 4 else "gpt")
        print(f"\n{workload}, {setting.text}, {asked.microbatches} microbatches, {asked.steps - asked.warm_up} steps\n")
        print(table(measured(setting, workload, asked), measured(None, workload, asked), setting.nodes), flush=True)


def measured(setting: Setting | None, workload: str, asked: argparse.Namespace) -> dict[int, dict[str, float]]:
    """By node, means per step. `setting` None: one process that has a core."""
    work = WORKLOADS[workload]
    words = [
        "train", *train_flags(work, asked.microbatches), "--schedule", "zero-bubble", "--steps", str(asked.steps), "--protect",
        "off", "--no-rebalance", "--threads", "1", "--json", "--quiet", *asked.more,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ringtmp-times-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(PROBE)
        if setting is not None and setting.emulated:
            (folder / DEVICES).write_text(toml(setting.devices))
            command = [*lab(), *words, "--all-devices"]
        else:
            nodes = 1 if setting is None else setting.nodes
            command = [*RINGTMP, *words, "--nodes", str(nodes)]
        (folder / "times").mkdir()
        path = os.pathsep.join(each for each in (name, os.environ.get("PYTHONPATH", "")) if each)
        environment = {**os.environ, "PYTHONPATH": path, FOLDER: str(folder / "times")}
        command = [sys.executable, *command[1:]]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return by_node(folder / "times", asked.warm_up)


def by_node(folder: Path, warm_up: int) -> dict[int, dict[str, float]]:
    lines: dict[int, list[dict[str, object]]] = defaultdict(list)
    for each in sorted(folder.glob("*.jsonl")):
        for text in each.read_text().splitlines():
            line = json.loads(text)
            lines[line["node"]].append(line)
    return {node: per_step(found, warm_up) for node, found in sorted(lines.items())}


def per_step(lines: list[dict[str, object]], warm_up: int) -> dict[str, float]:
    """Counters that only grow are taken between the last step left out and the last one."""
    first, last = lines[warm_up - 1], lines[-1]
    counted, steps = lines[warm_up:], len(lines) - warm_up
    found: dict[str, float] = defaultdict(float)
    for line in counted:
        for kind, seconds in dict(line["kinds"]).items():  # type: ignore[call-overload]
            found[kind] += seconds / steps
    for kind, seconds in dict(last["others"]).items():  # type: ignore[call-overload]
        found[kind] = (seconds - dict(first["others"]).get(kind, 0.0)) / steps  # type: ignore[call-overload]
    for kind in ("kernel", "process", "throttled"):
        found[kind] = (float(str(last[kind])) - float(str(first[kind]))) / steps
    for kind in ("wall", "idle"):
        found[kind] = fmean(float(str(line[kind])) for line in counted)
    return found


ROWS = (
    ("forward", ("forward",)),
    ("backward, weight gradients", ("backward", "weights")),
    ("update", ("update",)),
    ("handing results to the links", ("serialise",)),
    ("mail: receiving, deciding, the batch", ("mail",)),
    ("ZeroMQ's threads", ("zeromq",)),
    ("other threads", ("threads",)),
    ("all of the process", ("process",)),
    ("of it in the kernel", ("kernel",)),
    ("kept from running by the quota (wall)", ("throttled",)),
    ("idle (wall)", ("idle",)),
    ("step (wall)", ("wall",)),
)


def table(ring: dict[int, dict[str, float]], alone: dict[int, dict[str, float]], nodes: int) -> str:
    master, others, one = ring[0], [each for node, each in ring.items() if node], alone[0]
    share = {kind: seconds / nodes for kind, seconds in one.items()}
    head = f"| ms of a step | master | the others, mean | their largest | one process / {nodes} |"
    rows = [head, "|---|---:|---:|---:|---:|"]
    for name, kinds in ROWS:
        mean, most = (
            fold(sum(each.get(kind, 0.0) for kind in kinds) for each in others)
            for fold in (lambda x: fmean(list(x)), max)
        )
        first, base = (sum(each.get(kind, 0.0) for kind in kinds) for each in (master, share))
        wall = "(wall)" in name
        rows.append(f"| {name} | {ms(first)} | {ms(mean)} | {ms(most)} | {'' if wall else ms(base)} |")
    outside = [1 - _sum(each, LAYERS) / _sum(each, COUNTED) for each in (master, *others)]
    rows.append(
        f"| outside layers, of all but evaluations | {outside[0]:.1%} | {fmean(outside[1:]):.1%} | {max(outside[1:]):.1%} | |"
    )
    return "\n".join(rows)


def _sum(found: dict[str, float], kinds: tuple[str, ...]) -> float:
    return sum(found.get(kind, 0.0) for kind in kinds)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 0.01 else f"{1e3 * seconds:.0f}"


if __name__ == "__main__":
    main()
