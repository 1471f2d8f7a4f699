"""A run's rebalancing: listens to what nodes report, and says when to rebuild the ring, at a snapshot.

Decided in plan/when_to_rebalance.py. A move waits for the next whole snapshot, which is asked for at once; where there are no
snapshots, or none within a while, the run saves a checkpoint first. Lines are tried while the ring is at rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ringtmp.metrics.event_log import EventLog
from ringtmp.metrics.events import NodeTimes, Regrouped
from ringtmp.plan.when_to_rebalance import PAUSE_S, Balance, Move
from ringtmp.run.record_events import steps_again
from ringtmp.runtime.snapshot_schedule import Protection
from ringtmp.strategies.base import Leader, Plan, PlanRequest

#: What a new generation costs, until one has been seen.
MOVE_S = 2.0
SNAPSHOT_LIMIT_S = 15.0
#: A ring that gained less than half of what was promised is left alone for longer and longer, up to this.
LONGEST_PAUSE_S = 16 * PAUSE_S


class Ready(NamedTuple):
    """A move whose time has come: from a snapshot, or from `here`, of which a checkpoint must be saved first."""

    move: Move
    here: bool


class Rebalancing:
    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._balance: Balance | None = None
        self._move: Move | None = None
        self._unproven: Move | None = None
        self._moved_at = 0.0
        self._decided_at = 0.0
        self._from_step = 0  # a snapshot of this step or later will do
        self._not_before = 0.0
        self._calm_until = 0.0
        self._pause_s = PAUSE_S
        self._move_s = MOVE_S
        self._clock: Callable[[], float] = time.monotonic
        self._same_machine = True

    def watch(self, plan: Plan, log: EventLog, clock: Callable[[], float], same_machine: bool) -> None:
        """A generation has been laid out. `same_machine`: all on this machine, where there are no lines to try."""
        self._move, self._clock, self._same_machine = None, clock, same_machine
        self._balance, log.listener = plan.balance(self._not_before) if self._wanted else None, self._heard
        if self._balance is not None:
            self._balance.calm(self._calm_until)

    def _heard(self, times: NodeTimes) -> None:
        if self._balance is not None:
            self._balance.heard(times.node, self._clock(), times.compute_s)

    def step_done(self, took_s: float, steps_left: int, protection: Protection) -> None:
        if self._balance is None or self._move is not None:
            return
        now = self._clock()
        self._balance.step_took(now, took_s)
        self._prove(self._balance)
        again_s = protection.travel_steps * took_s
        self._move = self._balance.decide(now, steps_left, self._move_s + again_s)
        if self._move is not None:
            self._decided_at, self._from_step = now, protection.progress.step
            protection.hasten()

    def _prove(self, balance: Balance) -> None:
        """Once after a move: did it keep what it promised?"""
        if self._unproven is None or not balance.watched:
            return
        move, self._unproven = self._unproven, None
        self._pause_s = PAUSE_S if balance.kept(move) else min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._calm_until = self._moved_at + self._pause_s
        balance.calm(self._calm_until)

    def at_rest(self, leader: Leader, protection: Protection) -> bool:
        """The ring stands still: a moment to try lines that are suspected. True if it was taken."""
        balance = self._balance
        if balance is None or self._same_machine or self._move is not None or not protection.quiet:
            return False
        if not balance.suspects_lines(self._clock()):
            return False
        rates = leader.try_lines()
        balance.lines_found(self._clock(), rates)
        return True

    def ready(self, protection: Protection) -> Ready | None:
        """What to do now; None while there is no move or its snapshot is on its way."""
        if self._move is None:
            return None
        if not protection.on or self._clock() - self._decided_at > SNAPSHOT_LIMIT_S:
            return Ready(self._move, here=True)
        whole = protection.whole is not None and protection.whole.step >= self._from_step
        return Ready(self._move, here=False) if whole else None

    def devices_for(self, request: PlanRequest) -> PlanRequest | None:
        """With the devices as the run has measured them; None if nothing is to move, or others are there than were."""
        move = self._move
        named = {} if move is None else {each.name: each for each in move.devices}
        if move is None or named.keys() != {each.name for each in request.devices}:
            return None
        return replace(request, devices=tuple(named[each.name] for each in request.devices), paths=move.plan.paths)

    def drop(self) -> None:
        """The move cannot be made now."""
        self._move = None

    def begin(self, move: Move) -> None:
        self._unproven, self._moved_at = move, self._clock()
        self._not_before, self._calm_until = self._moved_at + PAUSE_S, self._moved_at + self._pause_s

    def moved(self, event: Regrouped, move: Move) -> str:
        """Returns one line for the user."""
        self._move_s = event.seconds
        return (
            f"rebalanced: {event.reason}; layers moved in {event.seconds:.1f} s, repeating {steps_again(event.repeated)} "
            f"from the {event.source} of step {event.step}; a step should now take {move.promised_s:.3g} s instead of "
            f"{move.step_s:.3g} s (generation {event.generation})"
        )
