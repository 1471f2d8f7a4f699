"""How many torch threads every rank gets: one number for all of them, because it decides bits. Pure: facts in, a number and
words out.

torchrun sets OMP_NUM_THREADS=1 where it starts several ranks on a machine; Slurm and Kubernetes set nothing, and torch would
take every core in every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringtmp.launch.meeting_of_ranks import Facts

#: Whoever sets it has chosen.
CHOSEN_BY = "OMP_NUM_THREADS"


def sharing(rank: Facts, ranks: Sequence[Facts]) -> int:
    """How many ranks, itself among them, may run on cores of this one."""
    return sum(each.host == rank.host and not set(each.cores).isdisjoint(rank.cores) for each in ranks) or 1


def threads_for(ranks: Sequence[Facts]) -> int:
    """The most that every rank has: what was chosen for it, or else its share of the cores it may run on."""
    return min(each.threads if each.chosen else max(1, each.threads // sharing(each, ranks)) for each in ranks)


def told(ranks: Sequence[Facts], threads: int) -> str:
    """For people; empty where there is nothing to know."""
    most = min(len(each.cores) // sharing(each, ranks) for each in ranks)
    every = f"every rank computes with {threads} thread{'s' * (threads != 1)}"
    if any(each.chosen for each in ranks) and most > threads:
        return (
            f"{every}, as {CHOSEN_BY} says (torchrun sets it to 1 where several ranks share a machine); there are cores for "
            f"{most}: --threads {most} uses them and ends in other bits"
        )
    shared = max(sharing(each, ranks) for each in ranks)
    if shared > 1 and not all(each.chosen for each in ranks):
        return f"{every}: up to {shared} ranks share a machine's cores"
    return ""
