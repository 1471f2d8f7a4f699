"""What the process and the machine have: peak memory, the torch build, threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import platform
import resource
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from ringtmp.errors import UsageError
from ringtmp.system.container_limits import group_limits
from ringtmp.system.signals import held

#: Files a process asks to be allowed, and what a ring takes of them, with room: one node has 8 open, three 38, five 43.
ENOUGH_FILES = 65_536
FILES_AT_LEAST, FILES_PER_NODE = 32, 8


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(("model name", "Model", "Hardware")):
                    return line.split(":", 1)[1].strip()[:80]
    except OSError:
        pass
    return (platform.processor() or platform.machine())[:80]


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def free_memory_bytes() -> int:
    """What this process may still take: the machine's free memory, or less under a control group or a limit of its own."""
    free = machine_free_bytes()
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    taken = _private_bytes()
    return free if limit == resource.RLIM_INFINITY or taken is None else max(0, min(free, limit - taken))


def own_memory_bytes() -> int:
    """What this process has taken and may still take."""
    return free_memory_bytes() + rss_bytes()


def machine_free_bytes() -> int:
    """What processes here may still take together."""
    free = int(psutil.virtual_memory().available)
    group = group_limits().memory_free_bytes
    return max(0, free if group is None else min(free, group))


def _private_bytes() -> int | None:
    """What the system counts against a limit of private memory; None where it does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))


def limit_memory(more_bytes: int) -> None:
    """From here on this process gets at most this much more private memory: the system refuses what a received graph or
    tensor would take beyond it, before it is taken. Linux counts it; elsewhere nothing is limited."""
    used = _private_bytes()
    if used is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def file_limit() -> int:
    """Files, sockets and pipes this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """As many as the system allows this user, where that is more. Not beyond what `select` and small tables bear."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def require_files(nodes: int) -> None:
    """UsageError unless as many files may be opened as a ring of so many nodes takes."""
    raise_file_limit()
    needed = FILES_AT_LEAST + FILES_PER_NODE * nodes
    if file_limit() < needed:
        raise UsageError(
            f"this process may open {file_limit()} files and a ring of {nodes} takes up to {needed}: raise ulimit -n"
        )


def out_of_files(error: BaseException | None) -> str | None:
    """The cause and what to do, if no file could be opened because too many are; None for any other error."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):
            used = f"{open_files()} of {file_limit()}"
            return f"too many open files: {used} file descriptors in use; raise ulimit -n (ulimit -Hn shows how far)"
        error = error.__cause__ or error.__context__
    return None


def open_files() -> int:
    try:
        return int(psutil.Process().num_fds())
    except (OSError, psutil.Error):  # none left to count them with
        return file_limit()


@contextlib.contextmanager
def loading(nothing_started: bool = False) -> Iterator[None]:
    """Around large imports: all they make stays, so looking for garbage meanwhile is a sixth of their time for nothing.
    `nothing_started`: by a command that has nothing to clean up yet; for Ctrl-C see `held`."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with held(nothing_started):
            yield
    finally:
        if collecting:
            gc.enable()


@cache
def _search_once() -> None:
    gc.collect()


@contextlib.contextmanager
def keeping_what_is_there() -> Iterator[None]:
    """Around long work: what exists now is not looked through for garbage again and again. Torch, and what building and
    checking a model leaves in it, is half a million objects: a quarter of a second in the middle of some step, on a fast
    machine. The first time in a process garbage is collected before; later the usual collections will have done so."""
    foreign = gc.get_freeze_count()
    _search_once()
    gc.freeze()
    try:
        yield
    finally:
        if not foreign:
            gc.unfreeze()


#: Of the C library (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Freed pieces up to this size are used again, and up to so much in all stays with the process.
REUSED_UP_TO_BYTES = 8 * 2**20
KEPT_FREE_BYTES = 64 * 2**20
#: With less than this to be had nothing is kept but what the C library keeps by itself.
SHORT_BYTES = 8 * KEPT_FREE_BYTES
_USUAL_BYTES = 128 * 2**10


def set_threads(threads: int) -> None:
    """One number for the whole ring: two threads change the bits of convolution and LayerNorm gradients."""
    import torch

    torch.set_num_threads(threads)
    only_repeating_kernels(True)
    _reuse_memory()


def only_repeating_kernels(only: bool) -> None:
    """Whether operators without a kernel that gives the same bits every time are refused, in this process."""
    import torch

    # What torch.use_deterministic_algorithms does, less its import of torch's compiler (2 s, 70 MiB per node).
    torch._C._set_deterministic_algorithms(only, warn_only=False)


def _reuse_memory() -> None:
    """Activations come and go with every microbatch. The C library gives pieces of their size back to the system and takes
    them again, page by page: a tenth of a step's processor time. Where memory is short that is as it should be; where the
    library has no such switch, nothing changes."""
    short = free_memory_bytes() < SHORT_BYTES
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _USUAL_BYTES if short else REUSED_UP_TO_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _USUAL_BYTES if short else KEPT_FREE_BYTES)


def give_back_memory() -> None:
    """What was kept free goes back to the system, and how much may be kept from here on is decided again."""
    _reuse_memory()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def mind_memory() -> None:
    """When a node has everything it needs: where little is left, nothing is kept from here on."""
    if free_memory_bytes() < SHORT_BYTES:
        give_back_memory()


def fingerprint(threads: int) -> dict[str, Any]:
    """What the bits depend on besides the recipe."""
    import torch

    return {
        "torch": str(torch.__version__),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "emulated": os.environ.get("RINGTMP_EMULATED") == "1",
        "lab_scale": float(os.environ.get("RINGTMP_LAB_SCALE", 1)),  # 0.5: CPUs and links at half their speed
    }
