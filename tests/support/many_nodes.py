"""The events of a ring of many nodes, invented: `python tests/support/many_nodes.py RUN [NODES] [STEPS]`.

Four steps a second, every span in the first 32 steps and every hundredth; node 17, or the last, is lost and healed halfway.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

from day_long_log import CONFIG, FACTS
from ringtmp.metrics.events import (
    Evaluated,
    Event,
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

STEP_S, HEALED_S = 0.25, 1.0


def write(run: Path, nodes: int = 64, steps: int = 300) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "events.jsonl").write_bytes(b"".join(encode(each) + b"\n" for each in events_of(nodes, steps)))


def events_of(nodes: int, steps: int) -> Iterator[Event]:
    chance, lost = random.Random(0), min(17, nodes - 1)
    config = {**CONFIG, "ring": {**CONFIG["ring"], "nodes": nodes}}
    yield RunStarted(0.0, "2026-01-01T00:00:00+00:00", 1, "r", "0.1", config, FACTS, 1, 0)
    for generation, half in ((1, range(steps // 2)), (2, range(steps // 2, steps))):
        late = HEALED_S * (generation - 1)
        now = half.start * STEP_S + late
        if generation == 2:
            yield NodeGone(now - HEALED_S, half.start, lost, f"node {lost} is gone")
        for node in range(nodes):
            held = (f"#{2 * node}-{2 * node + 1} block{2 * node} to block{2 * node + 1}",)
            yield NodeStarted(now, node, "worker" if node else "master", 1, generation, held, 33_000)
        if generation == 2:
            yield Regrouped(now, half.start, 2, f"node {lost} was lost", nodes, HEALED_S, lost=(lost,))
        for step in half:
            start = step * STEP_S + late
            yield from (_node_step(chance, node, nodes, step, start) for node in range(nodes))
            yield StepDone(start + STEP_S, step, 0, 2.0 - step / steps + chance.random() / 10, 0.1, 32, STEP_S)
            if step % 100 == 99:
                yield Evaluated(start + STEP_S, step + 1, 0, 360, 0.5, 0.9, None)
    yield RunEnded(steps * STEP_S + HEALED_S, steps, "done", "ab" * 32)


def _node_step(chance: random.Random, node: int, nodes: int, step: int, start: float) -> NodeStep:
    kinds = ("mail", "forward", "serialise", "backward", "weights", "update")
    busy = {kind: chance.random() * STEP_S / 12 for kind in kinds}
    busy_s = sum(busy.values())
    waited = chance.random() * (STEP_S - busy_s)
    places = [(start + number * STEP_S / 9, number) for number in range(8 if step < 32 or step % 100 == 0 else 0)]
    spans = tuple(
        Span(kind, 0, number, at + chance.random() * STEP_S / 20, at + STEP_S / 10, 7)
        for at, number in places
        for kind in ("forward", "backward", "send", "receive")
    )
    sent = 30_720 * (step + 1)
    reading = Reading(start + STEP_S, 250 * 2**20, {(node + 1) % nodes: sent, (node - 1) % nodes: sent})
    return NodeStep(
        node, step, start, start + STEP_S, busy_s, STEP_S - busy_s,
        {"activations": waited, "gradients": STEP_S - busy_s - waited}, 61_440, 61_440, spans, busy,
        reading=reading if step % 4 == 0 else None,
    )  # fmt: skip


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
