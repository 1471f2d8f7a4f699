"""Runs that nobody made, with idleness, bytes and joules in round numbers, for tests of the experiments."""

from __future__ import annotations

from typing import Any

import msgspec

from ringtmp.bench import jobs_of_experiments
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.experiment_registry import COMPARISONS
from ringtmp.bench.measuring import run_record
from ringtmp.bench.measuring.jobs import Job, digest
from ringtmp.bench.measuring.machine_facts import Environment
from ringtmp.bench.measuring.measurement_files import SCHEMA, Measurement, Result
from ringtmp.bench.programs import largest_model, node_removal
from ringtmp.bench.training_runs.strategy_variants import parse_all
from ringtmp.metrics import events
from ringtmp.metrics.energy import Power, Watts
from ringtmp.metrics.fold_events import parts_of
from ringtmp.report.page_content import Page

ENVIRONMENT = Environment("0", "code", "torch", "AVX2", "3.11", "Linux", "a processor", 2)
CONFIG = {"ring": {"strategy": "ring", "schedule": "1f1b"}, "model": {"name": "mlp"},
          "training": {"seed": 0, "staleness": 0, "wire": "float32"}}  # fmt: skip
FACTS = {"data": "digits", "batch_size": 10, "microbatches": 1, "threads": 1}


def choices(quick: bool = True, strategies: str = "ring,ring:staleness=1,ps:bsp,ps:async", **changes: Any) -> Choices:
    made = Choices(COMPARISONS, parse_all(strategies), (), True, 3, 0, quick, 2)
    return msgspec.structs.replace(made, **changes)


def run_events(idle_s: float, steps: int = 6, sent: int = 1000, server: bool = False) -> list[events.Event]:
    """Two nodes. A step takes a second; a worker is busy for the rest of it; each sends and receives `sent` bytes."""
    found: list[events.Event] = [
        events.RunStarted(0.0, "", 1, "r", "0", CONFIG, FACTS, 1, 0),
        events.NodeStarted(0.0, 0, "server" if server else "master", 1, 1, (), 10),
        events.NodeStarted(0.0, 1, "worker", 2, 1, (), 10),
    ]
    for step in range(steps):
        for node in (0, 1):
            causes = {"activations": idle_s * 0.75, "window": idle_s * 0.25}
            found.append(
                events.NodeStep(
                    node,
                    step,
                    float(step),
                    step + 1.0,
                    1 - idle_s,
                    idle_s,
                    causes,
                    sent,
                    sent,
                    (events.Span("forward", 0, 0, step + 0.1, step + 0.4),),
                )
            )
        found.append(events.StepDone(step + 1.0, step, 0, 2.0 - 0.25 * step, 0.1, 10, 1.0))
    found.append(events.Evaluated(steps + 0.5, steps, 0, 100, 0.5, 0.75, None))
    power = Power("given", Watts(2.0, 6.0, 1e6), 1.0, "here")
    found += [events.NodeEnded(node, 7 * 2**20, 0, 0, 0, 0, 0, power=power) for node in (0, 1)]
    return found


def record_of(stream: list[events.Event]) -> run_record.Record:
    """Of the run's last start, as the bench makes it."""
    return run_record.record(parts_of(stream)[-1])


def measurement(job: Job, repeat: int, result: Result) -> Measurement:
    return Measurement(
        SCHEMA, job, repeat, digest(job, ENVIRONMENT), ENVIRONMENT, "", 1.0, 0.0, 0.0, 0.0, "measured", None, result
    )


def invented(asked: Choices) -> list[Measurement]:
    """As if everything had been measured: the ring idles for a quarter of its time, everything else for a half."""
    found = []
    for repeat, job in [*jobs_of_experiments.sweep_plan(asked), *jobs_of_experiments.plan(asked)]:
        if job.experiment == "resilience":
            facts: dict[str, Any] = node_removal.describe(parts_of(run_events(0.25)), 3.5, 0, "")
        elif job.experiment == "capacity":
            size = 9 if "ring" in job.case else 3
            tries = [largest_model.Try(size, 2048, size * 10**6, "fits", "", (10**8,) * 3),
                     largest_model.Try(size + 1, 2048, (size + 1) * 10**6, "refused", "too large")]  # fmt: skip
            facts = {"tries": msgspec.to_builtins(tries)}
        else:
            made = record_of(run_events(0.25 if "ring" in job.case else 0.5))
            facts = {"record": msgspec.to_builtins(made), "test_loss": 0.5, "accuracy": 0.9, "weights_sha256": "ab"}
        found.append(measurement(job, repeat, Result((1.0,) * 4, facts)))
    return found


def page(asked: Choices, measurements: list[Measurement]) -> Page:
    return jobs_of_experiments.page(
        asked, measurements, ENVIRONMENT, command="ringtmp bench", date="2026-01-01", partial=False
    )
