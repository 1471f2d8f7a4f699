"""`ringtmp train` as one of several ranks that torchrun, Slurm or Kubernetes has started."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtmp.errors import UsageError
from ringtmp.launch.rank_environment import KeptIn, Rank, run_folder, this_rank

if TYPE_CHECKING:
    from ringtmp.launch.meeting_of_ranks import Meeting


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


def goes_on_in(meeting: Meeting, run_dir: Path | None, resume: Path | None) -> tuple[Path | None, Path | None]:
    """Where to keep the run, and what to resume: after a restart, what the ranks before left behind, and nothing else."""
    if resume is not None:
        return run_dir, resume
    rank, kept, host = meeting.rank, meeting.kept_in, os.uname().nodename
    folder = run_dir or run_folder(rank)
    if kept is None:
        if is_run(folder) and rank.restarts and not meeting.outlives_ranks:
            return None, folder
        if not is_run(folder):
            meeting.keep_in(KeptIn(str(folder.absolute()), host))
        return folder, None  # another's run is refused there
    before = Path(kept.folder)
    if is_run(before):
        return None, before
    if kept.host != host and not before.exists():
        raise UsageError(
            f"the run is kept in {before} on {kept.host}, and rank 0 has been started again on {host}, where there is no such "
            "folder: choose a --run-dir on a file system that both see"
        )
    if before.exists():  # the ranks before ended while the model was being read
        folder = folder.with_name(f"{folder.name}-restart-{rank.restarts}")
        meeting.keep_in(KeptIn(str(folder.absolute()), host))
        return folder, None
    return before, None


def is_run(folder: Path) -> bool:
    from ringtmp.runtime.run_directory import RunDirectory

    with suppress(UsageError):
        RunDirectory(folder).read_config()
        return True
    return False
