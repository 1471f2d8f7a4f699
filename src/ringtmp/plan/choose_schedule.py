"""Which pipeline schedule: none changes the bits of a run, so the plan may choose.

Pure. Each schedule gets a plan of its own. Another one takes the place of the default where its step is clearly shorter:
putting weight gradients off costs a few hundredths that no simulation knows of, and more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringtmp.errors import DoesNotFit, RingError
from ringtmp.plan.devices import Device, LayerCost, Paths
from ringtmp.plan.pipeline_schedules import DEFAULT_SCHEDULE, SCHEDULES
from ringtmp.plan.planner import Plan, PlanOptions, plan
from ringtmp.units import seconds_text

#: What a deferred weight gradient was measured to cost (docs/log.md), as a share of the step.
LEAST_GAIN = 0.03
#: Other numbers of microbatches change the bits: worth telling only where they save this share of a step.
MUCH = 0.15


def plan_with_schedule(
    layers: Sequence[LayerCost], devices: Sequence[Device], options: PlanOptions, paths: Paths | None = None
) -> Plan:
    """With the schedule of the options; where the plan may choose, with the one whose simulated step is shortest. DoesNotFit
    where none fits."""
    if not options.any_schedule:
        return plan(layers, devices, options, paths)
    made, problems = [], []
    # A schedule in which all go forward first holds every microbatch at once, and is never faster.
    for each in (each for each in SCHEDULES.values() if not each.all_forward_first):
        try:
            made.append(plan(layers, devices, replace(options, schedule=each.name), paths))
        except DoesNotFit as problem:
            problems.append(problem)
    if not made:
        raise problems[0]
    usual = next((each for each in made if each.options.schedule == DEFAULT_SCHEDULE.name), None)
    best = min(made, key=lambda each: each.cost)
    return best if usual is None or best.cost < usual.cost * (1 - LEAST_GAIN) else usual


def much_faster(made: Plan, least: int = 1) -> str:
    """A line for people where another number of microbatches would make the step much shorter; empty where none would. The
    cuts stay, every microbatch has at least `least` samples, and layer costs go with its size, so this is a rough forecast."""
    count, options = made.options.ring.microbatches, made.options
    found = [made]
    for other in (2 * count, 4 * count, count // 2):
        if len(made.devices) < 2 or not options.sum_tree <= other <= options.batch_size // least:
            continue
        try:
            again = replace(options, microbatches=other, cuts=made.bounds)
            found.append(plan(made.layers, made.devices, again, made.paths))
        except RingError:
            continue
    best = min(found, key=lambda each: each.step_s)
    if best.step_s > made.step_s * (1 - MUCH):
        return ""
    return (
        f"--microbatches {best.options.microbatches} would take about {seconds_text(best.step_s)} a step instead of "
        f"{seconds_text(made.step_s)}; it gives other weights, so it is not chosen for you (--microbatches auto would)"
    )
