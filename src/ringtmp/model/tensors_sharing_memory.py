"""Memory that tensors share on their way through a model, found on a sample that runs through it in eager mode.

In one process a change in place shows in every tensor that lies in the same memory. After a cut each has its own, and the
change would show in one of them alone: what the model computes would depend on the cut, so such a model is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ringtmp.errors import UsageError
from ringtmp.model.call_module import unpacked, without_cache
from ringtmp.model.memory_aliases import Memory
from ringtmp.model.name_in_errors import Subject
from ringtmp.model.output_tree import flattened
from ringtmp.model.overlapping_memory import overlapping, overlaps
from ringtmp.model.portable_layer import Layer


@dataclass(frozen=True)
class Sample:
    """Tensors between two layers; `owners`: which of the memory they lie in is a layer's own, by storage, and whose."""

    value: Any
    owners: Mapping[int, str] = field(default_factory=dict)

    @property
    def leaves(self) -> list[torch.Tensor]:
        return list(pytree.tree_leaves(self.value))

    def through(self, subject: Subject, module: nn.Module, keep_parameters: bool = False) -> Sample:
        """What the layer makes of it in eager mode, without leaving a trace in its buffers or in this sample; with
        `keep_parameters` in its parameters neither, which it may change itself."""
        copies, owners = self._copied()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            live = dict(module.named_parameters())
            stand_ins = {id(each): each.clone() for each in module.buffers()}
            if keep_parameters:
                stand_ins |= {id(each): each.clone() for each in live.values()}
            named = (*live.items(), *module.named_buffers())
            own = [*((name, stand_ins.get(id(each), each)) for name, each in named), *_constants(module)]
            args, kwargs = unpacked(copies)
            with without_cache(module), standing_in(module, stand_ins):
                value = module(*args, **kwargs)
        owners.update((_storage(each), f"{subject.name}.{name}") for name, each in own)
        leaving = {_storage(leaf) for leaf in flattened(value, str(subject))[1]}
        return Sample(value, {storage: name for storage, name in owners.items() if storage in leaving})

    def _copied(self) -> tuple[Any, dict[int, str]]:
        """Copies that share memory as the originals do."""
        storages = {_storage(leaf): leaf.untyped_storage() for leaf in self.leaves}
        fresh: dict[int, Any] = {key: each.clone() for key, each in storages.items()}  # type: ignore[no-untyped-call]
        copies: dict[int, torch.Tensor] = {}  # what is one tensor stays one

        def copy(leaf: torch.Tensor) -> torch.Tensor:
            if id(leaf) not in copies:
                empty = torch.empty(0, dtype=leaf.dtype)
                copies[id(leaf)] = empty.set_(
                    fresh[_storage(leaf)], leaf.storage_offset(), leaf.shape, leaf.stride()
                )  # fmt: skip
            return copies[id(leaf)]

        return pytree.tree_map(copy, self.value), {fresh[key]._cdata: name for key, name in self.owners.items()}


@contextmanager
def standing_in(module: nn.Module, others: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Other tensors stand where the module's own are, by their ids. Afterwards its own are back, also where one module has
    several names, of which torch's functional_call leaves some behind."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for each in module.modules():
        tables: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        kept += [(own, name, tensor) for own in tables for name, tensor in own.items() if id(tensor) in others]
    for own, name, tensor in kept:
        own[name] = others[id(tensor)]
    try:
        yield
    finally:
        for own, name, tensor in kept:
            own[name] = tensor


def refuse_shared_writes(subject: Subject, entering: Sample, written: Iterable[int]) -> None:
    """`written`: positions of the tensors that enter the layer and that it changes in place."""
    leaves = entering.leaves
    for at in written:
        label = f"{subject} changes its input in place"
        if any(overlapping(leaves[at], other) for position, other in enumerate(leaves) if position != at):
            raise UsageError(
                f"{label} while another tensor shares its memory, so a cut would change the result: use inplace=False "
                "there, or give it a copy (clone)"
            )
        owner = entering.owners.get(_storage(leaves[at]))
        if owner is not None:
            raise UsageError(
                f"{label}, and that input lies in the memory of {owner}, which would change only where both layers are "
                "on one node: return a copy (clone) of it"
            )


def refuse_own_writes(subject: Subject, layer: Layer) -> None:
    """Statistics live in buffers; a constant never changes. (Parameters: see `written_parameters`.)"""
    for graph in (layer.train, layer.evaluate):
        memory = Memory(graph)
        for slot, local in memory.owned("constant").items():
            if memory.group(slot) in memory.written:
                raise UsageError(
                    f"{subject} changes {local} in its forward pass, which is not a buffer: other microbatches are "
                    "under way at that time. Keep what a forward pass changes in a buffer (register_buffer)"
                )


def refuse_stale(name: str, trained: Mapping[str, torch.Tensor], constants: Mapping[str, torch.Tensor]) -> None:
    """A plain attribute in the memory of a parameter changes with it in one process; a node has it as it was at first."""
    for pair in overlaps([*trained.items(), *constants.items()]):
        (one, _), (other, _) = pair
        if {one, other} & constants.keys() and {one, other} & trained.keys():
            constant, parameter = (one, other) if one in constants else (other, one)
            raise UsageError(
                f"{name}.{constant} lies in the memory of the parameter {name}.{parameter} and would not change with it on a "
                "node: take it from the parameter in forward, or keep a copy (.clone())"
            )


def untie(name: str, tensors: dict[str, torch.Tensor], changed: Iterable[str]) -> dict[str, torch.Tensor]:
    """Every tensor of a layer in memory of its own. Two that share some are told apart, unless the layer changes one."""
    seen: dict[int, str] = {}
    changing = frozenset(changed)
    apart: dict[str, torch.Tensor] = {}
    for local, tensor in tensors.items():
        other = seen.setdefault(_storage(tensor), local) if tensor.numel() else local
        if other != local and {other, local} & changing:
            raise UsageError(
                f"{name}.{other} and {name}.{local} share memory, and the layer changes it in its forward pass: give each "
                "its own"
            )
        apart[local] = tensor if other == local else tensor.clone()
    return apart


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _constants(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are plain attributes."""
    for prefix, each in module.named_modules():
        for attribute, value in vars(each).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{attribute}".lstrip("."), value
