"""CPU shares and memory caps of emulated devices, by control groups rtlab-PID/NAME.

Version 1 makes its groups below the one this process is in, so that a cap around the lab goes on holding. Version 2 is
written from the kernel's documentation and untried on a machine: it makes them at the root of the tree, since there a
group that has processes may not hand its controllers down.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from pathlib import Path

import msgspec

from ringtmp.errors import RingError, UsageError
from ringtmp.lab.networks import INSTEAD, PREFIX

PERIOD_US = 10_000
LEAST_QUOTA_US = 1_000  # the kernel refuses less
REMOVE_LIMIT_S = 10.0


class Tree(msgspec.Struct, frozen=True):
    version: int
    cpu: Path  # the group ours are made in
    memory: Path  # the same one in version 2
    roots: tuple[Path, ...]  # where to look for what a killed lab left

    @property
    def parents(self) -> tuple[Path, ...]:
        return (self.cpu,) if self.cpu == self.memory else (self.cpu, self.memory)


def find_tree(mounts: str, own: str) -> Tree:
    """From the texts of /proc/self/mounts and /proc/self/cgroup."""
    where = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in own.splitlines() if line.count(":") >= 2}
    paths = {name: path for names, path in where.items() for name in names.split(",")}
    roots: dict[str, Path] = {}
    unified = None
    for line in mounts.splitlines():
        _device, mount, kind, options, *_ = line.split(" ")
        if kind == "cgroup":
            roots |= {name: Path(mount) for name in options.split(",") if name in ("cpu", "memory")}
        elif kind == "cgroup2":
            unified = Path(mount)
    if len(roots) == 2:
        inner = {name: roots[name] / paths.get(name, "/").lstrip("/") for name in roots}
        # In a container the path may be the host's, and not exist here.
        inner = {name: path if path.is_dir() else roots[name] for name, path in inner.items()}
        return Tree(1, inner["cpu"], inner["memory"], tuple(sorted(set(roots.values()))))
    if unified is not None:
        return Tree(2, unified, unified, (unified,))
    raise UsageError(f"no control groups for cpu and memory are mounted here: mount /sys/fs/cgroup, {INSTEAD}")


def this_tree() -> Tree:
    return find_tree(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text())


def make(tree: Tree, lab: int, name: str, cpu: float, memory_bytes: int) -> tuple[Path, ...]:
    """The groups of one device; a process is in them once its id was written to their `cgroup.procs`."""
    parents = tuple(parent / f"{PREFIX}{lab}" for parent in tree.parents)
    groups = tuple(parent / name for parent in parents)
    period_us, quota_us = quota(cpu)
    try:
        for parent in parents:
            parent.mkdir(exist_ok=True)
        if tree.version == 2:
            for above in (tree.cpu, *parents):
                (above / "cgroup.subtree_control").write_text("+cpu +memory")
        for group in groups:
            group.mkdir()
        if tree.version == 1:
            (groups[0] / "cpu.cfs_period_us").write_text(str(period_us))
            (groups[0] / "cpu.cfs_quota_us").write_text(str(quota_us))
            (groups[-1] / "memory.limit_in_bytes").write_text(str(memory_bytes))
            with contextlib.suppress(OSError):  # a kernel that does not count swap; then there is none to speak of
                (groups[-1] / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))
        else:
            (groups[0] / "cpu.max").write_text(f"{quota_us} {period_us}")
            (groups[0] / "memory.max").write_text(str(memory_bytes))
            with contextlib.suppress(OSError):
                (groups[0] / "memory.swap.max").write_text("0")
    except OSError as error:
        what = f"control group {error.filename}: {error.strerror}"
        raise UsageError(f"this machine refuses a {what}: run the lab as root, {INSTEAD}") from error
    return groups


def quota(cpu: float) -> tuple[int, int]:
    """Period and quota in microseconds. A share under a tenth needs a longer period: the quota has a least value."""
    period_us = max(PERIOD_US, math.ceil(LEAST_QUOTA_US / cpu))
    return period_us, max(LEAST_QUOTA_US, round(period_us * cpu))


def memory_kills(groups: tuple[Path, ...]) -> int:
    """How many processes the kernel ended there because the cap was reached."""
    for file in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", (groups[-1] / file).read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def labs(tree: Tree) -> set[int]:
    """Process ids of the labs that groups exist of."""
    return {int(path.name.removeprefix(PREFIX)) for path in _of_labs(tree)}


def remove(tree: Tree, lab: int) -> None:
    """Kill whoever is in this lab's groups and delete them."""
    for top in _of_labs(tree):
        if top.name != f"{PREFIX}{lab}":
            continue
        for group in [*(child for child in top.iterdir() if child.is_dir()), top]:
            _remove(group)


def _of_labs(tree: Tree) -> list[Path]:
    found = []
    for root in tree.roots:
        for folder, children, _files in os.walk(root):
            found += [Path(folder, child) for child in children if re.fullmatch(PREFIX + r"\d+", child)]
    return found


def _remove(group: Path) -> None:
    limit = time.monotonic() + REMOVE_LIMIT_S
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in (group / "cgroup.procs").read_text().split():
                if int(line):  # 0: a process of another pid namespace, and to kill(2) all of our own group
                    os.kill(int(line), signal.SIGKILL)
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > limit:
                raise RingError(f"the control group {group} cannot be removed: {error.strerror}") from error
        time.sleep(0.01)
