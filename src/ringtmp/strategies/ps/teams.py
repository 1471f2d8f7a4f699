"""Which workers are a team, and who is its head. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Team = tuple[int, ...]


def teams_of(workers: Sequence[int], count: int | None) -> tuple[Team, ...]:
    """In order and as even as can be; the first of each is its head. None: every worker is a team of its own."""
    n = len(workers)
    teams = n if count is None else count
    bounds = [number * n // teams for number in range(teams + 1)]
    return tuple(tuple(workers[a:b]) for a, b in pairwise(bounds))


def team_of(worker: int, teams: Sequence[Team]) -> Team:
    return next(team for team in teams if worker in team)


def heads(teams: Sequence[Team]) -> tuple[int, ...]:
    return tuple(team[0] for team in teams)
