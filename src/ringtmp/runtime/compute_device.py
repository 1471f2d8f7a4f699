"""Where the stages of this process compute: the processor, or an accelerator that torch knows. One for the whole process.

Only stages know of it: what enters one is brought there, and what leaves a node comes back into the processor's memory,
because messages, snapshots and checkpoints are made of that.

An accelerator works behind the process that tells it what to do. Whatever waits for it (a number read, a copy from ordinary
memory) leaves it with nothing to do until it has been told more: so a stage waits for it once a step, not per microbatch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ringtmp.errors import UsageError
from ringtmp.model import compute_formats
from ringtmp.model.compute_formats import COMPUTE_IN
from ringtmp.system.bfloat16_units import bfloat16_units as system_units
from ringtmp.system.resources import free_memory_bytes

PROCESSOR = torch.device("cpu")
#: Up to so much is copied to an accelerator by way of page-locked memory, which is used again and never given back.
PAGE_LOCKED_UP_TO_BYTES = 64 * 2**20
_current = PROCESSOR


def find(name: str, number: int = 0) -> torch.device:
    """A device by its setting. Where a machine has several of them, node `number` gets one after the other."""
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "mps" if has_mps else "cpu"
    if name == "cuda":
        if not has_cuda:
            raise UsageError(f"--device cuda: {_why_no_cuda()}; use --device cpu, or auto")
        return torch.device("cuda", number % torch.cuda.device_count())
    if name == "mps" and not has_mps:
        raise UsageError("--device mps: this machine has no Metal device that torch can use; use --device cpu, or auto")
    return torch.device(name)


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return "torch finds no NVIDIA GPU on this machine"


def use(device: torch.device) -> None:
    """From here on. With full float32 products, and the same bits for the same work on one kind of device."""
    global _current
    _current = device
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it matrix products are not deterministic
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        # Where kernels must repeat, torch fills all memory that it takes, with a kernel each time. Nothing reads that.
        torch._C._set_deterministic_fill_uninitialized_memory(False)
        torch.cuda.set_device(device)


@contextmanager
def computing_on(name: str) -> Iterator[None]:
    """A run's own setting, for as long as it lasts."""
    before = _current
    use(find(name))
    try:
        yield
    finally:
        use(before)


def here() -> torch.device:
    return _current


def name() -> str:
    """For people and for the record: cpu, or what the accelerator is called."""
    return torch.cuda.get_device_name(_current) if _current.type == "cuda" else _current.type


def maker_name() -> str:
    """Which of all accelerators there are it is; empty: it is the processor, or has no name of its own."""
    return str(torch.cuda.get_device_properties(_current).uuid) if _current.type == "cuda" else ""


def seed(key: int) -> None:
    """The generators that random operators draw from here."""
    torch.default_generator.manual_seed(key)
    if _current.type == "cuda":
        torch.cuda.default_generators[_current.index or 0].manual_seed(key)
    elif _current.type == "mps":
        torch.mps.manual_seed(key)


def brought(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the memory of this process's device; one that comes several times is still one."""
    if _current.type == "cpu":
        return list(tensors)
    moved = {id(tensor): _moved(tensor) for tensor in tensors}
    return [moved[id(tensor)] for tensor in tensors]


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """Without waiting for the accelerator, if it can be: a copy from ordinary memory would."""
    plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad
    if _current.type == "cuda" and plain and tensor.nbytes <= PAGE_LOCKED_UP_TO_BYTES:
        return tensor.pin_memory().to(_current, non_blocking=True)
    return tensor.to(_current)


def works_behind() -> bool:
    """Whether to read a number is to wait for all that was to be computed before it."""
    return _current.type != "cpu"


def finish() -> None:
    """Wait until all that was to be computed here is."""
    if _current.type == "cuda":
        torch.cuda.synchronize(_current)
    elif _current.type == "mps":
        torch.mps.synchronize()


def bfloat16_units() -> str:
    """Of the device that computes; empty: bfloat16 would be slower there than float32."""
    if _current.type == "cuda":
        return name() if torch.cuda.is_bf16_supported(including_emulation=False) else ""
    return system_units() if _current.type == "cpu" else _current.type


def refuse_slow_bfloat16(compute: str, units: str, who: str) -> None:
    """UsageError where bfloat16 is asked of a device that has no units for it."""
    if not COMPUTE_IN[compute].plain and not units:
        raise UsageError(
            f"--compute {compute}: {who} has no units for {compute} that torch knows of (AVX512_BF16 or AMX, on ARM BF16), so "
            "it would be slower than float32: leave out --compute, or compute on devices that have them"
        )


def going_forward(compute: str) -> AbstractContextManager[object]:
    """Computing here, in the numbers of this setting."""
    return compute_formats.going_forward(compute, _current.type)


def in_these_numbers(loss: Callable[..., torch.Tensor], compute: str) -> Callable[..., torch.Tensor]:
    """The loss, computed as everything that goes forward."""

    def computed(*given: Any) -> torch.Tensor:
        with going_forward(compute):
            return loss(*given)

    return computed


def taken_back(tensor: torch.Tensor) -> torch.Tensor:
    """In the processor's memory."""
    return tensor.cpu() if _current.type != "cpu" else tensor


def count() -> int:
    """Accelerators of this kind that this machine has."""
    return torch.cuda.device_count() if _current.type == "cuda" else 1


def free_bytes() -> int | None:
    """What the accelerator has left for this process, which keeps some that it does not use; None: stages use the processor's
    memory."""
    if _current.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(_current) - torch.cuda.memory_allocated(_current)
    return int(torch.cuda.mem_get_info(_current)[0]) + unused


def free_for_stages() -> int:
    """What stages here may still take."""
    free = free_bytes()
    return free_memory_bytes() if free is None else free


def compiled_loss(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss that torch.compile has made faster, where that has been seen to pay: on an accelerator, whose memory a loss over a
    large vocabulary goes through several times."""
    if _current.type == "cpu":
        return loss
    compiled: Callable[..., torch.Tensor] = torch.compile(loss, dynamic=False)
    return compiled
