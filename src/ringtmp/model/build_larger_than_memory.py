"""A model is built whole although it does not fit into memory: what is large lies in files, which the system pages in and out.

While the user's code builds a module, the tensors it asks torch for are counted. From the point on where they would take more
than half of what is free, large ones are mapped from files. The user's code fills them as it would fill any tensor, with the
same random numbers, so the first weights have the bits of a model built in memory.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ringtmp.errors import DoesNotFit
from ringtmp.system.resources import free_memory_bytes
from ringtmp.units import bytes_text

#: Every way in which a module makes the memory of its parameters.
FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye, torch.arange}
#: Every way in which a module gives them first values, by the name of the method.
FILLING = frozenset(("normal_", "uniform_", "zero_", "fill_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_"))
#: Smaller tensors stay in memory.
LARGE_BYTES = 2**20
#: Of what is free when building begins.
SHARE = 0.5


class BuiltInFiles(TorchFunctionMode):
    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder
        self._room = SHARE * free_memory_bytes()
        self._taken = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in FACTORIES:
            return func(*args, **kwargs)
        planned = planned_tensor(func, args, kwargs)
        if planned is None:
            return func(*args, **kwargs)
        self._taken += planned.nbytes
        if planned.nbytes < LARGE_BYTES or self._taken <= self._room:
            return func(*args, **kwargs)
        made = self._mapped(planned)
        if func is torch.empty:
            return made.requires_grad_(planned.requires_grad)
        with torch.no_grad():
            func(*args, **{key: value for key, value in kwargs.items() if key != "requires_grad"}, out=made)
        return made.requires_grad_(planned.requires_grad)

    def _mapped(self, planned: torch.Tensor) -> torch.Tensor:
        """Memory of a file that is gone from its folder as soon as it is there."""
        handle, name = tempfile.mkstemp(prefix=".building-", dir=self._folder)
        try:
            os.posix_fallocate(handle, 0, planned.nbytes)
            storage: Any = torch.UntypedStorage.from_file(name, shared=True, nbytes=planned.nbytes)
        except OSError as error:
            raise DoesNotFit(
                f"the model takes more than the {bytes_text(self._room)} of memory it may take while it is built, and a tensor "
                f"of {bytes_text(planned.nbytes)} cannot be put on the disk in {Path(name).parent}: {error.strerror}"
            ) from error
        finally:
            os.close(handle)
            os.unlink(name)
        return torch.empty(0, dtype=planned.dtype).set_(storage, 0, planned.shape, planned.stride())


class LeftUnfilled(TorchFunctionMode):
    """While a module is built whose weights come from a file: large tensors get no first values, and so no memory before they
    are filled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FILLING:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, torch.Tensor) and filled.device.type == "cpu" and filled.nbytes >= LARGE_BYTES:
                return filled
        return func(*args, **kwargs)


def planned_tensor(factory: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What a call would make, without its memory; None where that is not known: it says no by itself, or is not plain."""
    if kwargs.get("out") is not None or str(kwargs.get("device") or "cpu") != "cpu":
        return None
    try:
        made = factory(*args, **{**kwargs, "device": "meta", "out": None})
    except (TypeError, RuntimeError):
        return None
    plain = isinstance(made, torch.Tensor) and made.layout == torch.strided and math.prod(made.shape) == made.numel()
    return made if plain else None
