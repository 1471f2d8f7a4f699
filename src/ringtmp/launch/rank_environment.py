"""Whether somebody started this process as one of several ranks, and which: read from the environment. No torch import.

torchrun, Kubernetes' PyTorchJob and most Slurm scripts set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ringtmp.errors import UsageError

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Rank(msgspec.Struct, frozen=True):
    number: int
    world: int
    here: int = 1  # ranks on this machine
    restarts: int = 0
    job: str = ""  # what torchrun calls it

    @property
    def leads(self) -> bool:
        return self.number == 0


class KeptIn(msgspec.Struct, frozen=True):
    """Where rank 0 keeps the run."""

    folder: str  # an absolute path
    host: str


def this_rank(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """None: this process is on its own."""
    if not all(name in environment for name in NEEDED):
        return None
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        here = int(environment.get("LOCAL_WORLD_SIZE", 1))
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
        int(environment["MASTER_PORT"])
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from None
    if not 0 <= rank < world:
        raise UsageError(f"RANK={rank} is not one of 0 to {world - 1} (WORLD_SIZE={world})")
    return Rank(rank, world, here, restarts, environment.get("TORCHELASTIC_RUN_ID", "")) if world > 1 else None


def run_folder(rank: Rank, runs: Path = Path("runs")) -> Path:
    """Named after torchrun's job, or else after the process that starts and restarts us."""
    job = rank.job if rank.job not in ("", "none") else str(os.getppid())
    return runs / f"torchrun-{job}"
