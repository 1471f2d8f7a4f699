"""`ringtmp train` as one of several ranks that torchrun, Slurm or Kubernetes has started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ringtmp.errors import UsageError
from ringtmp.launch.rank_environment import Rank, run_folder, this_rank


def as_rank(chosen: dict[str, Any], listen: str | None) -> Rank | None:
    """Which rank this is; the number of nodes is the number of ranks. None: a run of its own."""
    rank = this_rank()
    if rank is None:
        return None
    if listen is not None:
        raise UsageError(
            "--listen is for devices that join; torchrun has started the nodes already: leave it out, or start without torchrun"
        )
    if chosen.setdefault("nodes", rank.world) != rank.world:
        raise UsageError(f"--nodes {chosen['nodes']}, but there are {rank.world} ranks: leave --nodes out")
    return rank


def goes_on_in(rank: Rank, run_dir: Path | None, resume: Path | None) -> tuple[Path | None, Path | None]:
    """Where to keep the run, and what to resume: after a restart, what the ranks before left behind."""
    if resume is not None:
        return run_dir, resume
    folder = run_dir or run_folder(rank)
    if not rank.restarts:
        return folder, None
    from ringtmp.runtime.run_directory import RunDirectory

    with suppress(UsageError):  # the ranks before ended while the model was being read
        RunDirectory(folder).read_config()
        return None, folder
    return folder.with_name(f"{folder.name}-restart-{rank.restarts}"), None
