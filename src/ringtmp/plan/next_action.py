"""The local rule: what a node does next, decided from what it has. Pure; live nodes and simulations call it alike.

    1f1b, 4 microbatches, window 3               gpipe
    visit 0  F0 F1 F2 B0 F3 B1 .  B2 .  B3 U     F0 F1 F2 F3 .  .  B0 B1 B2 B3 U
    visit 1  .  F0 B0 F1 B1 F2 B2 F3 B3 U  .     .  F0 F1 F2 F3 B0 B1 B2 B3 U  .

    zero-bubble: B gives the gradient of what entered, W those of the weights
    visit 0  F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3 U
    visit 1  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3 U

Why it cannot deadlock: a microbatch is admitted only at the front, at most `window` are in flight, and after admission
nobody refuses or blocks. Every forward gets exactly one backward answer, so the oldest microbatch in flight can always
move somewhere, and its end frees a place at the front.

Among ready work: backward first (it frees stored activations and feeds the neighbour that waits longest), then
updates (the next pass waits for them), then forward; among equals the deepest visit, then the oldest microbatch.
Deferred weight gradients are FIFO and fill the time in which nothing else is runnable. They go before forward in two
cases: when they alone stand before an update, and when all `places` of a visit are taken, which hold microbatches until
their weight gradients are done. So nothing is refused, and what a visit stores is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ringtmp.plan.pipeline_schedules import PipelineSchedule


class Ready(NamedTuple):
    """What one visit has in hand during the pass it is in."""

    visit: int
    front: bool
    forward: int | None  # oldest microbatch whose activations are here
    backward: int | None  # oldest microbatch whose gradient is here
    forwarded: int
    in_flight: int  # admitted and not yet answered; counted at the front only
    microbatches: int  # in this pass
    update: bool  # every gradient is in, and the clipping coefficient if there is one
    deferred: int = 0  # microbatches whose weight gradients wait
    stored: int = 0  # microbatches that take a place: gone forward, and their weight gradients not done
    closing: bool = False  # every gradient has come back: only deferred ones stand before the update


class Action(NamedTuple):
    kind: Literal["forward", "backward", "weights", "update"]
    visit: int
    microbatch: int = -1


def next_action(visits: Sequence[Ready], window: int, schedule: PipelineSchedule) -> Action | None:
    """The node's next piece of work; None when it must wait for a neighbour."""
    deepest_first = visits if len(visits) == 1 else sorted(visits, key=lambda each: -each.visit)
    for each in deepest_first:
        if each.backward is not None and (not schedule.all_forward_first or each.forwarded == each.microbatches):
            return Action("backward", each.visit, each.backward)
    for each in deepest_first:
        if each.update:
            return Action("update", each.visit)
    # Weight gradients shallowest first: the next pass begins at the front.
    for each in reversed(deepest_first):
        if each.deferred and each.closing:
            return Action("weights", each.visit)
    for each in deepest_first:
        if each.forward is not None and (not each.front or each.in_flight < window):
            if each.deferred and each.stored >= schedule.places(window):
                return Action("weights", each.visit)
            return Action("forward", each.visit, each.forward)
    for each in reversed(deepest_first):
        if each.deferred:
            return Action("weights", each.visit)
    return None
