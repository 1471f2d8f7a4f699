"""What a user is warned of in a ring's plan: what leaves the master, and links that are slow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ringtmp.model.portable_layer import hides_inputs
from ringtmp.model.recompute import refuse_unrepeatable
from ringtmp.plan.planner import Plan
from ringtmp.plan.route import MASTER
from ringtmp.strategies.base import PlanRequest
from ringtmp.strategies.ring.trial_results import SILENT_BYTES_PER_S
from ringtmp.units import bytes_text


def exposed(request: PlanRequest, bounds: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """What leaves the master that a user may want to keep there."""
    nodes = request.config.ring.nodes
    if request.config.ring.recompute == "all":
        refuse_unrepeatable(request.layers)
    has_parameters = hides_inputs(request.layers)
    warnings = []
    if nodes > 1 and not any(has_parameters[slice(*bounds[-1])]):
        warnings.append(
            "the tail has no layer with parameters: outputs and their gradients, which show labels, leave the master"
        )
    if nodes > 1 and not any(has_parameters[slice(*bounds[0])]):
        warnings.append("the front has no layer with parameters: the raw inputs leave the master")
    return tuple(warnings)


def slow_ways(planned: Plan) -> tuple[str, ...]:
    """Workers next to each other that reach each other worse than others."""
    around = [planned.devices[node].name for node, *_ in planned.options.holders(len(planned.devices))]
    found: dict[frozenset[str], str] = {}
    for here, there in pairwise(around):
        ways = [planned.paths.get(pair) for pair in ((here, there), (there, here))]
        rate = min((way.bytes_per_s for way in ways if way is not None and way.tried), default=math.inf)
        if math.isfinite(rate) and planned.devices[MASTER].name not in (here, there):
            found[frozenset((here, there))] = (
                f"{here} and {there} could not reach each other when their link was tested"
                if rate == SILENT_BYTES_PER_S
                else f"the link between {here} and {there} carries only {bytes_text(rate)}/s, less than either reaches "
                "elsewhere; the plan allows for it"
            )
    return tuple(found.values())
