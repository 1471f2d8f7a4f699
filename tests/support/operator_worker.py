"""A process that makes calls of listed operators as a hostile graph would, forward and backward, and says how many ran.

    python operator_worker.py LOG WANTED TARGET:FIRST:REACHED ...

Before each call its name goes to LOG, so that whoever finds this process dead knows of what. Tensors that enter lie
against pages nobody may touch: reading or writing one byte too far is a signal too, not a lucky number. A call that
computes for longer than its limit ends the process with SIGPROF.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRIES = 60  # at most so many calls for each that is wanted
MOST_DEATHS = 20  # of one operator, before it is left alone
CALL_LIMIT_S = 10.0
MEMORY_BYTES = 768 * 2**20  # beyond what libraries take
FULL = 75  # the exit code of a process that has used up half of that and wants to be followed by a fresh one
PAGE = mmap.PAGESIZE
REGION = 16 * PAGE
MALLOC_CHECK = "libc_malloc_debug.so.0"


@dataclass
class Found:
    """What a fuzzed operator did: calls whose kernel ran, calls made, and the calls that ended their process."""

    reached: int = 0
    tries: int = 0
    deaths: list[tuple[int, str]] = field(default_factory=list)
    slow: list[int] = field(
        default_factory=list
    )  # calls that computed beyond their limit; a graph's own limit is for them


# -- in the worker ----------------------------------------------------------------------------------------------------


class Fence:
    """Memory between two pages that may not be touched; used again for every call."""

    def __init__(self, count: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._regions = []
        for _ in range(count):
            region = mmap.mmap(-1, REGION + 2 * PAGE)
            start = ctypes.addressof(ctypes.c_char.from_buffer(region))
            for page in (start, start + PAGE + REGION):
                assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
            self._regions.append(region)
        self.used = 0

    def take(self, count: int, dtype: Any, at_end: bool) -> Any:
        """So many elements, the first or the last against a forbidden page."""
        import torch

        nbytes = count * dtype.itemsize
        if nbytes == 0 or nbytes > REGION or self.used == len(self._regions):
            return torch.empty(count, dtype=dtype)
        region = self._regions[self.used]
        self.used += 1
        offset = PAGE + REGION - nbytes if at_end else PAGE
        return torch.frombuffer(region, dtype=dtype, count=count, offset=offset)


def work(log: int, wanted: int, parts: Sequence[tuple[str, int, int]]) -> None:
    import torch

    if os.environ.get("RINGTMP_TEST_NO_CONTRACTS"):  # to see that this finds what they keep out
        from ringtmp.model.operator_contracts import CONTRACTS

        CONTRACTS.clear()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    at_first = private_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (at_first + MEMORY_BYTES, at_first + MEMORY_BYTES))
    fence = Fence(24)
    for target, first, reached in parts:
        number = first
        while reached < wanted and number < TRIES * wanted:
            os.write(log, f"{target} {number} {reached}\n".encode())
            signal.setitimer(signal.ITIMER_PROF, CALL_LIMIT_S)
            fence.used = 0
            reached += attempt(target, number, fence)
            number += 1
            if number % 100 == 0 and private_bytes() - at_first > MEMORY_BYTES // 2:
                # Kernels keep what they compiled for each shape, and die where they cannot get more.
                os.write(log, f"{target} {number} {reached} full\n".encode())
                sys.exit(FULL)
        os.write(log, f"{target} {number} {reached} done\n".encode())


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))


def attempt(target: str, number: int, fence: Fence) -> bool:
    """Whether the kernel ran. Errors are fine; a signal would end this process."""
    import torch

    from operator_calls import call

    each = call(target, number)
    generator = torch.Generator().manual_seed(number)
    try:
        graph, entering = written(each, fence, generator)
    except (RuntimeError, ValueError, MemoryError, OverflowError):
        return False  # the tensor itself cannot be made
    try:
        outputs, later = forward(each, graph, entering)
    except Exception:  # whatever torch or we refuse it with
        return False
    with contextlib.suppress(Exception):
        backward(each, entering, outputs, later)
    return True


def written(each: Any, fence: Fence, generator: Any) -> tuple[Any, list[Any]]:
    """The call as a graph of one operation, and what enters it."""
    import torch

    from operator_calls import Kind, T, strides, values
    from ringtmp.model.allowed_operators import resolve
    from ringtmp.model.portable_layer import Graph, Input, Items, Named, Op, Ref

    schema = resolve(each.target)._schema
    writes = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
    entering: list[Any] = []

    def value(one: Any, name: str) -> Any:
        if isinstance(one, T):
            steps = strides(one)
            extent = 0 if 0 in one.shape else 1 + sum((n - 1) * s for n, s in zip(one.shape, steps, strict=True))
            if extent > 2**24:
                raise MemoryError
            memory = fence.take(extent, getattr(torch, one.dtype), each.number % 2 == 0)
            memory.copy_(values(one, extent, generator))
            tensor = memory.as_strided(one.shape, steps)
            if tensor.is_complex() and one.layout == "last":
                tensor = tensor.conj()  # which is a mark on the same memory
            if each.gradients and (tensor.is_floating_point() or tensor.is_complex()):
                tensor = tensor.requires_grad_()
                if name in writes:
                    tensor = tensor.clone()  # a leaf may not be changed in place
            entering.append(tensor)
            return Ref(len(entering) - 1)
        if isinstance(one, list):
            return Items(tuple(value(item, name) for item in one))
        return Named(one.kind, one.name) if isinstance(one, Kind) else one

    named = {name: value(one, name) for name, one in each.arguments.items()}
    ordered = []
    for one in schema.arguments:
        if one.kwarg_only or one.name not in named:
            break
        ordered.append(named.pop(one.name))
    kind = "parameter" if each.owned else "input"
    inputs = tuple(Input(kind, str(index)) for index in range(len(entering)))
    return Graph(inputs, (Op(each.target, tuple(ordered), named),), (Ref(len(entering)),), False), entering


def forward(each: Any, graph: Any, entering: list[Any]) -> tuple[list[Any], list[Any]]:
    from ringtmp.model.run_graph import Program

    later: list[Any] = []
    program = Program(graph)
    if each.owned:
        outputs = program.run([], {str(index): tensor for index, tensor in enumerate(entering)}, later)
    else:
        outputs = program.run(entering, {})
    flat = outputs[0] if isinstance(outputs[0], tuple | list) else outputs
    return list(flat), later


def backward(each: Any, entering: list[Any], outputs: list[Any], later: list[Any]) -> None:
    import torch

    tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
    for one in tensors:
        if one.numel() < 2**22:
            one.sum()  # reads all of it
    if each.tamper:
        with torch.no_grad():
            for one in (*entering, *tensors):
                if one.is_floating_point() or one.is_complex() or one.dtype == torch.bool:
                    continue
                if each.number % 2:
                    one.unsqueeze_(0)
                else:
                    one.fill_(100 if one.dtype.itemsize == 1 else 30_000 if one.dtype.itemsize == 2 else 2**30)
    roots = [one for one in tensors if one.requires_grad]
    if roots:
        dtype = torch.float64 if each.number % 7 == 0 else None
        seeds = [
            torch.ones((), dtype=dtype or one.dtype).expand(one.shape) if each.number % 3 else torch.ones_like(one)
            for one in roots
        ]
        torch.autograd.backward(roots, seeds)
    for _, job in later:
        job()


# -- outside ----------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """With the C library's own checks of its heap where it has them."""
    checks = any(
        (Path(folder) / MALLOC_CHECK).exists()
        for folder in ("/lib/x86_64-linux-gnu", "/lib64", "/lib/aarch64-linux-gnu")
    )
    heap = {"LD_PRELOAD": MALLOC_CHECK, "MALLOC_CHECK_": "3"} if checks else {}
    return {**os.environ, **heap, "MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "1"}


def fuzz(
    targets: Sequence[str], wanted: int, folder: Path, limit_s: float, most_deaths: int = MOST_DEATHS
) -> dict[str, Found]:
    """Every operator until `wanted` of its calls have run; a process that dies is followed by another."""
    found = {target: Found() for target in targets}
    rest = list(targets)
    log = folder / "calls.log"
    while rest:
        log.write_bytes(b"")
        parts = [f"{target}:{found[target].tries}:{found[target].reached}" for target in rest]
        done = subprocess.run(
            [sys.executable, __file__, str(log), str(wanted), *parts],
            env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=limit_s,
        )  # fmt: skip
        lines = log.read_text().splitlines()
        for line in lines:
            target, number, reached, *end = line.split()
            found[target].reached, found[target].tries = int(reached), int(number) + (not end)
            if "done" in end:
                rest.remove(target)
        if done.returncode in (0, FULL):
            assert done.returncode or not rest, rest[:3]
        elif not lines or done.returncode > 0:
            raise RuntimeError(done.stderr.decode()[-2000:])
        else:
            target, number, *_ = lines[-1].split()
            name = signal.Signals(-done.returncode).name
            if name == "SIGPROF":
                found[target].slow.append(int(number))
            else:
                found[target].deaths.append((int(number), name))
            if len(found[target].deaths) >= most_deaths or len(found[target].slow) >= MOST_DEATHS:
                rest.remove(target)
    return found


def main() -> None:
    descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    parts = [part.split(":") for part in sys.argv[3:]]
    work(descriptor, int(sys.argv[2]), [(target, int(first), int(reached)) for target, first, reached in parts])


if __name__ == "__main__":
    main()
