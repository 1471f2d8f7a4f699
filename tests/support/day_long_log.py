"""The events of a run that lasted for days, as a file of any size: `python tests/support/day_long_log.py RUN [MEGABYTES]`.

Lines are those of a real run: about 560 bytes for a node's share of a step, every span in the first 32 steps and every
hundredth. Two steps in a thousand are tested, and a node is lost and healed halfway.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from ringtmp.metrics.events import (
    CheckpointSaved,
    Evaluated,
    NodeGone,
    NodeStarted,
    NodeStep,
    Reading,
    Regrouped,
    RunEnded,
    RunStarted,
    Span,
    StepDone,
    encode,
)

CONFIG = {
    "ring": {"strategy": "ring", "schedule": "1f1b", "nodes": 4},
    "model": {"name": "mlp"},
    "training": {"seed": 0, "staleness": 0, "wire": "float32"},
}
FACTS = {"data": "digits", "batch_size": 32, "microbatches": 4, "threads": 1, "torch": "2", "emulated": True}
STEP_S = 1.6
#: Of 4 nodes, spans included.
STEP_BYTES = 2_700


def write(run: Path, megabytes: float, nodes: int = 4) -> int:
    """How many steps there are in it; the file is at least that large."""
    run.mkdir(parents=True, exist_ok=True)
    size, steps = 0, 0
    with (run / "events.jsonl").open("wb") as file:
        for line, done in _lines(round(megabytes * 1e6 / STEP_BYTES * 4 / nodes), nodes):
            size += file.write(line + b"\n")
            steps += done
    return steps


def _lines(steps: int, nodes: int) -> Iterator[tuple[bytes, bool]]:
    chance = random.Random(0)
    yield encode(RunStarted(0.0, "2026-01-01T00:00:00+00:00", 1, "r", "0.1", CONFIG, FACTS, 1, 0)), False
    for generation in (1, 2):
        half = range(steps // 2) if generation == 1 else range(steps // 2, steps)
        now = half.start * STEP_S
        if generation == 2:
            yield encode(NodeGone(now, half.start, 1, "node 1 is gone")), False
            now += 1
        for node in range(nodes):
            held = (f"{2 * node}-{2 * node + 1}",)
            yield encode(NodeStarted(now, node, "worker" if node else "master", 1, generation, held, 33_000)), False
        if generation == 2:
            yield encode(Regrouped(now, half.start, 2, "node 1 was lost", nodes, 1.0, lost=(1,))), False
        for step in half:
            for node in range(nodes):
                yield encode(_node_step(chance, node, step, nodes)), False
            now = (step + 1) * STEP_S
            yield encode(StepDone(now, step, step // 1000, 2.0 + chance.random() - step / steps, 0.1, 32, STEP_S)), True
            if step % 1000 == 999:
                yield encode(Evaluated(now, step + 1, step // 1000, 360, 0.5, 0.9, None)), False
                yield encode(CheckpointSaved(now, step + 1, 0.1, 10**6)), False
    yield encode(RunEnded(steps * STEP_S, steps, "done", "ab" * 32)), False


def _node_step(chance: random.Random, node: int, step: int, nodes: int) -> NodeStep:
    start = step * STEP_S
    busy = {kind: chance.random() / 5 for kind in ("mail", "forward", "serialise", "backward", "weights", "update")}
    busy_s = sum(busy.values())
    waited = chance.random() * (STEP_S - busy_s)
    spans = tuple(
        Span(kind, 0, number, start + chance.random(), start + 1 + chance.random() / 2, 7)
        for number in range(6 if step < 32 or step % 100 == 0 else 0)
        for kind in ("mail", "forward", "serialise", "backward", "weights", "send", "receive")
    )
    return NodeStep(
        node, step, start, start + STEP_S, busy_s, STEP_S - busy_s,
        {"activations": waited, "gradients": STEP_S - busy_s - waited}, 30_720, 30_720, spans, busy,
        reading=Reading(start + STEP_S, 250 * 2**20, {(node + 1) % nodes: 30_720 * (step + 1)}) if step % 2 else None,
    )  # fmt: skip


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), float((sys.argv[2:] or ["100"])[0])), "steps")
