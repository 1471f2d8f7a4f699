"""Which snapshot is whole, which is under way, and when the next is due.

Pure: what happened comes in, what to do goes out. A snapshot costs the busiest node some seconds; with K steps between two
it slows training by seconds / (K * step), and K is the smallest that keeps this within the budget. What nodes report is the
work; what it costs besides, on lines it shares with training, shows in the steps during which it was under way: they are
compared with those without. One at a time: the next begins when everyone holds the one before.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from ringtmp.runtime.checkpoint import Progress
from ringtmp.wire.messages import Held, Hello

BUDGET = 0.035
#: Steps whose times are known before the first snapshot.
FIRST_AFTER = 3
REMEMBERED_STEPS = 50
EASING = 8
#: Steps without a snapshot that others can be compared with, and snapshots whose slowdown is remembered.
LEAST_QUIET = 3
REMEMBERED_SLOWDOWNS = 3


@dataclass(frozen=True)
class Snapshot:
    """A whole one: every layer as it was before `step`."""

    progress: Progress
    ahead: int = 0  # steps it holds beyond those the run has counted
    told: Mapping[int, float] = field(default_factory=dict)  # the losses of those, as far as they are known

    @property
    def step(self) -> int:
        return self.progress.step + self.ahead


@dataclass
class _UnderWay:
    snapshot: Snapshot
    waiting: set[int]  # layers nobody holds yet
    seconds: dict[int, float]  # spent by each node


class Protection:
    def __init__(self, mode: str, staleness: int = 0, leave: Callable[[Snapshot], None] | None = None) -> None:
        """`leave` is told of each one that is whole, before older ones go, where a master that is started again may find it
        with its nodes."""
        self.mode = mode
        self.outlived = leave is not None
        self._leave = leave
        self.whole: Snapshot | None = None
        self.trouble: str | None = None
        self.interval = 1
        self.progress = Progress(0)  # of the run, before the step to come; the run sets it
        self._rests = staleness > 0
        self._alone = False
        self._told = False
        self._bare = True  # of this generation there is none
        self._under_way: _UnderWay | None = None
        self._next = FIRST_AFTER
        self._steps_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._quiet_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)  # of this generation, without a snapshot
        self._loud_s: list[float] = []  # of steps during which the newest was under way
        self._loud = self._hasty = False
        self._slowdowns_s: deque[float] = deque(maxlen=REMEMBERED_SLOWDOWNS)
        self._most_interval = EASING

    @property
    def on(self) -> bool:
        return self._wanted and self.trouble is None

    @property
    def _wanted(self) -> bool:
        return self.mode in ("auto", "memory", "disk") and not self._alone

    @property
    def unprotected(self) -> bool:
        """Snapshots are wanted, and there is none that everybody who is there has a part in: a loss now may cost all steps
        since the last checkpoint."""
        return self._wanted and (self.trouble is not None or self.whole is None or self._bare)

    @property
    def travel_steps(self) -> int:
        """Steps during which the last snapshot was on its way."""
        return max(1, len(self._loud_s))

    @property
    def quiet(self) -> bool:
        """Nothing of a snapshot is on its way."""
        return self._under_way is None

    def due(self, step: int) -> bool:
        """Whether to take a snapshot before this step."""
        return self.on and self._under_way is None and (self._hasty or step >= self._next)

    def hasten(self) -> None:
        """The next one is wanted as soon as the one under way, if there is one, is whole."""
        self._hasty = True

    def begin(self, layers: Iterable[int]) -> None:
        self._under_way = _UnderWay(Snapshot(self.progress), set(layers), {})
        self._next = self.progress.step + 1
        self._loud, self._loud_s, self._hasty = True, [], False

    def held(self, message: Held, holder: int) -> bool:
        """A holder has a layer. True if that makes the snapshot whole."""
        now = self._under_way
        if now is None or message.step != now.snapshot.step:
            return False
        if message.trouble:
            self.trouble, self._under_way = message.trouble, None
            return False
        for node, seconds in ((message.owner, message.owner_s), (holder, message.holder_s)):
            now.seconds[node] = now.seconds.get(node, 0.0) + seconds
        now.waiting.discard(message.layer)
        if now.waiting:
            return False
        self.whole, self._under_way, self._bare = now.snapshot, None, False
        if self._leave is not None:
            self._leave(self.whole)
        step_s = statistics.median(self._steps_s) if self._steps_s else 0.0
        # Where steps overlap the ring comes to rest for a snapshot, which costs about a step.
        cost_s = max(now.seconds.values()) + (step_s if self._rests else 0.0)
        # The first ones are the dearest (nothing is warm), so what they cost is believed only little by little.
        self._most_interval = 2 * self.interval + EASING
        self.interval = min(interval_steps(cost_s, step_s), self._most_interval)
        self._next = max(self._next, now.snapshot.step + self.interval)
        return True

    def step_took(self, seconds: float) -> None:
        self._steps_s.append(seconds)
        if not self._loud:
            self._quiet_s.append(seconds)
            return
        self._loud_s.append(seconds)
        if self._under_way is None:
            self._loud = False
            self._look_back()

    def _look_back(self) -> None:
        """The newest is whole, and so is its last step: what did it cost those during which it was under way?"""
        if len(self._quiet_s) < LEAST_QUIET or self.whole is None:
            return
        step_s = statistics.median(self._quiet_s)
        self._slowdowns_s.append(sum(self._loud_s) - len(self._loud_s) * step_s)
        wanted = interval_steps(statistics.median(self._slowdowns_s), step_s)
        self.interval = min(max(self.interval, wanted), self._most_interval)
        self._next = max(self._next, self.whole.step + self.interval)

    def renew(self, step: int, nodes: int) -> None:
        """A new generation begins at this step: what was under way is void, and the next comes at once; but not over the
        one everybody has just gone back to."""
        self._under_way = None
        self._loud = self._hasty = False
        self._quiet_s.clear()
        self._slowdowns_s.clear()
        self._alone, self._bare = nodes == 1, True
        self._next = step if self._steps_s else step + FIRST_AFTER
        if self.whole is not None:
            self._next = max(self._next, self.whole.step + 1)

    def lapse(self) -> str | None:
        """Why there are no more snapshots, the first time it is asked for."""
        told, self._told = self._told, self.trouble is not None
        return None if told else self.trouble

    def newest(
        self, hellos: Mapping[int, Hello], here: Sequence[tuple[int, int]], wanted: Iterable[int], saved_step: int
    ) -> Snapshot | None:
        """The whole snapshot, if those who are there have all `wanted` layers of it and no checkpoint is newer."""
        if self.whole is None or self.whole.step <= saved_step:
            return None
        found = places(self.whole.step, hellos, here)
        return self.whole if all(index in found for index in wanted) else None

    def spoil(self) -> None:
        """The whole one turned out not to be."""
        self.whole = None


def in_hand(
    hellos: Mapping[int, Hello],
    here: Sequence[tuple[int, int]],
    wanted: Collection[int],
    reached: Snapshot,
    saved_step: int,
) -> Snapshot | None:
    """What members left to each other: the newest step that all `wanted` layers are there of, unless the checkpoint is newer.
    Whoever has ended the step in which another was lost has its gradient too, so that step need not be done again."""
    steps = {step for kept in (here, *(hello.kept for hello in hellos.values())) for step, _ in kept}
    whole = [step for step in steps if step >= saved_step and places(step, hellos, here).keys() >= set(wanted)]
    if not whole:
        return None
    step = max(whole)
    if step < reached.step:
        return Snapshot(msgspec.structs.replace(reached.progress, step=step))
    return replace(reached, ahead=step - reached.step)


def interval_steps(cost_s: float, step_s: float) -> int:
    return max(1, math.ceil(cost_s / (BUDGET * step_s))) if step_s > 0 else 1


def places(step: int, hellos: Mapping[int, Hello], here: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Layer -> the nodes that have it as of this step; `here` is what the master has."""
    found: dict[int, list[int]] = {}
    for node, kept in ((0, here), *((node, hello.kept) for node, hello in sorted(hellos.items()))):
        for at, layer in kept:
            if at == step:
                found.setdefault(layer, []).append(node)
    return found
