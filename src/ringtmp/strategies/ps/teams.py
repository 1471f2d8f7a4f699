"""Which workers are a team, who is its head, and whose heads form teams again. Pure.

    teams=4/2, workers 1 to 9      stage 1        (1 2) (3 4) (5 6) (7 8 9)
                                   stage 2        (1 3) (5 7)
                                   to the server  1, 5

So every worker but 1 and 5 has one above it, and all form trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Team = tuple[int, ...]


def split(workers: Sequence[int], count: int) -> tuple[Team, ...]:
    """In order and as even as can be; the first of each team is its head."""
    n = len(workers)
    bounds = [number * n // count for number in range(count + 1)]
    return tuple(tuple(workers[a:b]) for a, b in pairwise(bounds))


@dataclass(frozen=True)
class Teams:
    workers: tuple[int, ...]
    stages: tuple[tuple[Team, ...], ...]  # none: every worker is by itself

    @classmethod
    def of(cls, workers: Sequence[int], counts: Sequence[int]) -> Teams:
        """`counts`: teams of workers, then of their heads, and so on."""
        stages: list[tuple[Team, ...]] = []
        members: Sequence[int] = workers
        for count in counts:
            stages.append(split(members, count))
            members = tuple(team[0] for team in stages[-1])
        return cls(tuple(workers), tuple(stages))

    @property
    def top(self) -> tuple[int, ...]:
        """Those who talk to the servers."""
        return tuple(team[0] for team in self.stages[-1]) if self.stages else self.workers

    @property
    def heads(self) -> tuple[int, ...]:
        """Those who have somebody below them."""
        return tuple(worker for worker in self.workers if self.below(worker))

    def team(self, worker: int) -> Team:
        """In which it works."""
        return next((team for team in self.stages[0] if worker in team), ()) if self.stages else (worker,)

    def above(self, worker: int) -> int | None:
        """None: the servers."""
        for stage in self.stages:
            for team in stage:
                if worker in team[1:]:
                    return team[0]
        return None

    def below(self, worker: int) -> Team:
        """Those who pull from it, nearest first."""
        return tuple(other for stage in self.stages for team in stage if team[0] == worker for other in team[1:])

    def beneath(self, worker: int) -> Team:
        """The worker, and all whose gradients are in what it passes on."""
        return tuple(sorted((worker, *(each for child in self.below(worker) for each in self.beneath(child)))))
