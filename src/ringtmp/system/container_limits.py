"""What control groups (containers, services, the lab) leave to this process: cores and memory, versions 1 and 2.

A limit anywhere between our group and the root binds us, so every level is read and the smallest counts. Version 2 is
tested on recorded files only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
#: Version 1 writes "no limit" as the largest whole number of pages.
_NO_LIMIT_BYTES = 2**60
_LIMITING = {"cpu", "memory"}


class Limits(msgspec.Struct, frozen=True):
    """None: not limited."""

    cores: float | None = None
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    period_s: float | None = None  # in which the time of `cores` may be used up


def group_limits(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Limits:
    cores: list[tuple[float, float]] = []
    memory: list[int] = []
    free: list[int] = []
    for controllers, folder in _groups(root, membership):
        if "cpu" in controllers and (found := _cores(folder)) is not None:
            cores.append(found)
        if "memory" in controllers and (pair := _memory(folder)) is not None:
            memory.append(pair[0])
            free.append(pair[1])
    tightest = min(cores, default=None)
    share, period_s = (None, None) if tightest is None else tightest
    return Limits(share, min(memory, default=None), min(free, default=None), period_s)


def _groups(root: Path, membership: Path) -> Iterator[tuple[Collection[str], Path]]:
    """The groups that limit cores or memory, each with its controllers. What only others control (there may be ten) is not
    looked at: this is asked while training."""
    for line in _read(membership).splitlines():
        _number, _, rest = line.partition(":")
        named, _, inside = rest.partition(":")
        controllers = set(named.split(",")) if named else _LIMITING
        if not controllers & _LIMITING:
            continue
        bases = [root / named] if named else [root, root / "unified"]
        for base in bases:
            # In a container our path may be missing below the mount; its root then is our own group.
            folder = base / inside.lstrip("/")
            while True:
                if folder.is_dir():
                    yield controllers, folder
                if folder == base or base not in folder.parents:
                    break
                folder = folder.parent


def _cores(folder: Path) -> tuple[float, float] | None:
    """Share and period."""
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period), int(period) / 1e6


def _memory(folder: Path) -> tuple[int, int] | None:
    """Limit and what is left of it. Cached pages of files count as left, since the kernel drops them first: those not used of
    late, and of the others those that are in no process, as a file that was written and read again leaves them."""
    limit = _read(folder / "memory.max").strip() or _read(folder / "memory.limit_in_bytes").strip()
    used = _read(folder / "memory.current").strip() or _read(folder / "memory.usage_in_bytes").strip()
    if not (limit.isdigit() and used.isdigit()) or int(limit) >= _NO_LIMIT_BYTES:
        return None
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    old, recent, mapped = (
        int(next((stat[name] for name in names if name in stat), "0"))
        for names in (
            ("total_inactive_file", "inactive_file"),
            ("total_active_file", "active_file"),
            ("total_mapped_file", "file_mapped"),
        )
    )
    return int(limit), max(0, int(limit) - int(used) + old + max(0, recent - mapped))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
