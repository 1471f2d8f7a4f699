"""Layer costs, measured in a short run: time forward and backward, bytes kept between them, bytes at the cut.

A layer runs as a node runs it (the same program, gradients added up in place), several times at each microbatch size;
the median counts, because a ring meets the usual case. With one thread its processor time is taken, which neither a
quota nor a busy machine lengthens; with more, or on an accelerator, the time on the wall, for want of a better. What
autograd keeps is seen through its saved-tensor hooks.
Measurements are kept on disk under the layer's signature (graph, shapes, what wants gradients), the device's fingerprint,
thread count and this version, for every size that was ever asked for; anything else is measured again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from ringtmp import __version__
from ringtmp.errors import DoesNotFit
from ringtmp.model.build import BuiltLayer
from ringtmp.model.compute_formats import as_written
from ringtmp.model.deferred_gradients import ROOM, Job, at_once
from ringtmp.model.layers import SMALLER
from ringtmp.model.matrices_for_muon import hidden_matrices
from ringtmp.model.output_tree import leaves_of, map_outputs
from ringtmp.model.portable_layer import HidesInputs
from ringtmp.model.recompute import changed_buffers
from ringtmp.model.run_graph import Program
from ringtmp.model.shrink_frozen_weights import largest_converted_bytes
from ringtmp.model.sufficient_factors import factor_values
from ringtmp.plan.devices import LayerCost, Measured
from ringtmp.system.container_limits import group_limits
from ringtmp.system.files import cache_folder, write_atomic
from ringtmp.system.resources import cpu_name, fingerprint, free_memory_bytes
from ringtmp.units import bytes_text

#: Of the file's layout and of how things are measured.
FORMAT = 4
#: Each size is measured until this time is spent, but within these numbers of runs.
MEASURE_S = 0.15
LEAST_RUNS, MOST_RUNS = 3, 15
#: Bytes taken while a layer is measured, per byte of its parameters: copy and gradient. Optimizer state comes on top.
WHILE_MEASURED = 2
#: Touched between runs: in a ring other layers have been in the cache meanwhile.
OTHERS_BYTES = 4 * 2**20


LossFunction = Callable[[Any, torch.Tensor], torch.Tensor]
Clock = Callable[[], float]


class Optimizer(Protocol):
    states: list[dict[str, torch.Tensor]]

    @property
    def state_tensors(self) -> int: ...

    def step(self, lr: float) -> None: ...


#: Of parameters, and whether each is a hidden matrix.
MakeOptimizer = Callable[[Sequence[torch.Tensor], Sequence[bool]], Optimizer]


class Profile(msgspec.Struct, frozen=True):
    """What is kept on disk: one layer, or a loss, at every size that was measured."""

    points: tuple[Measured, ...]
    update_s: float = 0.0
    optimizer_bytes: int = 0

    def missing(self, sizes: Sequence[int]) -> list[int]:
        there = {each.samples for each in self.points}
        return [size for size in sizes if size not in there]

    def at(self, sizes: Sequence[int]) -> tuple[Measured, ...]:
        return tuple(sorted((each for each in self.points if each.samples in sizes), key=lambda each: each.samples))


NOTHING = Profile(())


@dataclasses.dataclass(frozen=True)
class Where:
    """The device on which layers are measured; as it stands, the processor."""

    device: str = "cpu"
    name: str = ""  # of the accelerator
    bring: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    finish: Callable[[], None] = lambda: None  # wait until all that was to be computed is
    computing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext  # in the run's numbers

    def clock(self, threads: int) -> Clock:
        if self.device == "cpu":
            return time.thread_time if threads == 1 else time.perf_counter

        def finished() -> float:
            self.finish()
            return time.perf_counter()

        return finished


PROCESSOR = Where()


class ProfileCache:
    """One small file per layer signature. A file that cannot be read or written is no cache, never an error."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder() / "profile"
        self.hits = self.misses = 0

    def get(self, key: str, sizes: Sequence[int]) -> Profile:
        """What is known, which may be less than all `sizes`."""
        try:
            found = msgspec.json.decode((self._folder / f"{key}.json").read_bytes(), type=Profile)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            found = NOTHING
        if found.missing(sizes):
            self.misses += 1
        else:
            self.hits += 1
        return found

    def put(self, key: str, profile: Profile) -> None:
        path = self._folder / f"{key}.json"
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, msgspec.json.encode(profile), durable=False)


class Profiler:
    """Costs of a model's layers, asked for in order; nothing of a layer is kept.

    `inputs`: what enters the first layer, at least max(sizes) samples; `make_optimizer` as the nodes use it,
    `optimizer_name` with its settings, for the cache."""

    def __init__(
        self, inputs: Any, sizes: Sequence[int], threads: int, make_optimizer: MakeOptimizer, *, optimizer_name: str,
        cache: ProfileCache, where: Where = PROCESSOR,
    ) -> None:  # fmt: skip
        self._inputs = inputs
        self._sizes = sizes
        self._make_optimizer = make_optimizer
        self._where = where
        self._here = f"{_device(threads)} {optimizer_name}" + (f" on {where.name}" if where.name else "")
        self._clock = where.clock(threads)
        self._cache = cache
        self._seen: dict[str, Profile] = {}
        self._hides_inputs = HidesInputs()
        self._trained = False  # the data wants no gradient, nor does what layers without parameters make of it

    def cost(self, each: BuiltLayer) -> LayerCost:
        """Of the next layer."""
        if each.cell is None:
            leaves = leaves_of(self._inputs)
            wants = tuple(self._trained and leaf.is_floating_point() for leaf in leaves)
        else:
            leaves, wants = each.cell.entering, tuple(leaf.requires_grad for leaf in each.cell.entering)
        alike = [msgspec.structs.replace(tensor, full="", rank=-1) for tensor in each.layer.tensors]
        key = signature((each.layer.train, alike), leaves, wants, self._here)
        found = self._seen.get(key) or self._cache.get(key, self._sizes)
        if missing := found.missing(self._sizes):
            _refuse_what_cannot_be_tried(each, self._make_optimizer((), ()).state_tensors)
            with self._where.computing():
                fresh = _measure(
                    each, leaves, wants, missing, make_optimizer=self._make_optimizer, clock=self._clock, where=self._where
                )  # fmt: skip
            # An update has no size: the first one measured stays.
            found = msgspec.structs.replace(found if found.points else fresh, points=(*found.points, *fresh.points))
            self._cache.put(key, found)
        self._seen[key] = found
        self._inputs = each.sample_outputs
        self._trained = self._trained or any(tensor.trainable for tensor in each.layer.tensors)
        weights = sum(tensor.nbytes for tensor in each.tensors.values())
        return LayerCost(
            each.layer.name, _behind(each, found.at(self._sizes)), weights, _trainable_bytes(each),
            optimizer_bytes=found.optimizer_bytes, update_s=found.update_s,
            has_parameters=self._hides_inputs(each.layer),
            waiting_bytes=0.0 if each.cell is None else each.cell.waiting,
            largest_bytes=max((each.tensors[it.name].nbytes for it in each.layer.tensors if it.trainable), default=0),
            converted_bytes=largest_converted_bytes(each.layer),
            factor_values=factor_values(each.layer, leaves, each.tensors, _samples(each, leaves)),
        )  # fmt: skip

    def with_loss(self, cost: LayerCost, loss: LossFunction, name: str | None, targets: torch.Tensor) -> LayerCost:
        """The last layer's cost with that of the loss behind it, which the tail computes too. `targets`: as many as the
        largest size has, or more. Without a `name` nobody else's measurement stands in for it."""
        leaves = leaves_of(self._inputs)
        key = signature((name, _shape(targets)), leaves, (), self._here)
        found = self._cache.get(key, self._sizes) if name is not None else NOTHING
        if missing := found.missing(self._sizes):
            with self._where.computing():
                given = map_outputs(self._where.bring, self._inputs), self._where.bring(targets)
                fresh = [_measure_loss(loss, *given, size, self._clock) for size in missing]
            found = Profile((*found.points, *fresh))
            if name is not None:
                self._cache.put(key, found)
        measured = tuple(
            dataclasses.replace(
                point, forward_s=point.forward_s + more.forward_s, backward_s=point.backward_s + more.backward_s
            )
            for point, more in zip(cost.measured, found.at(self._sizes), strict=True)
        )
        return dataclasses.replace(cost, measured=measured)


def _behind(built: BuiltLayer, measured: tuple[Measured, ...]) -> tuple[Measured, ...]:
    """Behind a cell more may cross than what it gives: what was made before it and is used after it."""
    if built.cell is None:
        return measured
    crossing, weights = built.cell.crossing, built.cell.weights
    return tuple(dataclasses.replace(point, output_bytes=crossing * point.samples + weights) for point in measured)


def _refuse_what_cannot_be_tried(built: BuiltLayer, state_tensors: int) -> None:
    """A copy to train, its gradient and the optimizer's state; the layer itself is here already."""
    trainable = _trainable_bytes(built)
    needed, free = (WHILE_MEASURED + state_tensors) * trainable, free_memory_bytes()
    if needed > free:
        raise DoesNotFit(
            f"layer {built.layer.name} has {bytes_text(trainable)} of parameters, and to train it alone needs "
            f"{bytes_text(needed)} more ({needed} bytes); {bytes_text(free)} are free where the model is built: {SMALLER}"
        )


def _samples(built: BuiltLayer, leaves: Sequence[torch.Tensor]) -> int:
    return built.cell.samples if built.cell is not None else len(leaves[0]) if leaves and leaves[0].dim() else 1


def _trainable_bytes(built: BuiltLayer) -> int:
    return sum(built.tensors[each.name].nbytes for each in built.layer.tensors if each.trainable)


def _measure_loss(loss: LossFunction, outputs: Any, targets: torch.Tensor, size: int, clock: Clock) -> Measured:
    kept = map_outputs(lambda leaf: (leaf[:size] if leaf.dim() else leaf).detach(), outputs)
    forward, backward = [], []
    for _ in range(LEAST_RUNS + 1):
        leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in leaves_of(kept)]
        given = map_outputs(torch.clone, kept)  # a loss may change what it is given in place
        began = clock()
        value = loss(given, targets[:size])
        middle = clock()
        if value.requires_grad:
            with as_written(value.device.type):
                torch.autograd.grad(value, [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)
        forward.append(middle - began)
        backward.append(clock() - middle)
    return Measured(size, statistics.median(forward[1:]), statistics.median(backward[1:]), 0, 0)


def signature(what: object, leaves: Sequence[torch.Tensor], wants: Sequence[bool], here: str) -> str:
    """Equal for measurements that may stand in for each other; the layer's name does not matter."""
    known = (what, [_shape(leaf) for leaf in leaves], list(wants), here, __version__, FORMAT)
    return hashlib.sha256(msgspec.msgpack.encode(known)).hexdigest()[:40]


def _shape(leaf: torch.Tensor) -> tuple[str, list[int]]:
    return str(leaf.dtype), list(leaf.shape[1:])


def _device(threads: int) -> str:
    known = fingerprint(threads)
    # Several threads are measured on the wall, where a quota shows.
    quota = group_limits() if threads > 1 else None
    here = f"{known['torch']} {known['capability']} {threads} {cpu_name()} {known['lab_scale']}"
    return here if quota is None or quota.cores is None else f"{here} {quota.cores:g} of {quota.period_s}"


def _measure(
    built: BuiltLayer, leaves: Sequence[torch.Tensor], wants: Sequence[bool], sizes: Sequence[int], *,
    make_optimizer: MakeOptimizer, clock: Clock, where: Where,
) -> Profile:  # fmt: skip
    layer = built.layer
    program = Program(layer.train, where.device)
    changed = changed_buffers(layer.train)
    owned = {
        each.name: _own(where.bring(built.tensors[each.name].detach()), each.trainable or each.name in changed)
        for each in layer.tensors
    }
    for each in layer.tensors:
        owned[each.name].requires_grad_(each.trainable)
    points = []
    largest = max((leaf.shape[0] for leaf in leaves if leaf.dim()), default=1)
    with torch.random.fork_rng(devices=[]):
        for size in sizes:
            given = [leaf[:size] if leaf.dim() and leaf.shape[0] == largest else leaf for leaf in leaves]
            if built.cell is not None:
                facts, there = built.cell.described, built.cell.samples
                given = [fact.of_samples(leaf, size, there) for fact, leaf in zip(facts, leaves, strict=True)]
            given = [where.bring(leaf) for leaf in given]
            runner = _Runner(program, owned, given, wants, changed)
            stored = runner.stored_bytes()
            forward_s, backward_s = runner.times(clock)
            weights_s = max(0.0, backward_s - runner.input_gradient_s(clock))
            points.append(Measured(size, forward_s, backward_s, stored, runner.output_bytes, weights_s))
    trained = {each.name: owned[each.name] for each in layer.tensors if each.trainable}
    return Profile(tuple(points), *_update(trained, hidden_matrices(layer), make_optimizer, clock))


def _own(tensor: torch.Tensor, changes: bool) -> torch.Tensor:
    """What stays as it is needs no copy: a frozen embedding may be a sixth of all there is."""
    return tensor.detach().clone() if changes else tensor.detach()


class _Runner:
    """Runs a layer as a stage does."""

    def __init__(
        self,
        program: Program,
        owned: dict[str, torch.Tensor],
        given: Sequence[torch.Tensor],
        wants: Sequence[bool],
        changed: Collection[str],
    ) -> None:
        """`changed`: names of the layer's tensors that a run changes."""
        self._program, self._owned, self._given, self._wants = program, owned, given, wants
        self._before = {name: owned[name].clone() for name in changed if not owned[name].requires_grad}
        self.output_bytes = 0

    def _forget(self) -> None:
        """A layer that counts its runs must not count these: it may do something else from some number on."""
        for name, before in self._before.items():
            self._owned[name].copy_(before)

    def _leaves(self) -> list[torch.Tensor]:
        return [leaf.clone().requires_grad_(wanted) for leaf, wanted in zip(self._given, self._wants, strict=True)]

    def _forward(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self._forget()
        leaves = self._leaves()
        return leaves, self._go(leaves)

    def _go(self, leaves: list[torch.Tensor], later: list[Job] | None = None) -> list[torch.Tensor]:
        entering = [leaf.clone() for leaf in leaves] if self._program.changes_inputs else leaves
        return self._program.run(entering, self._owned, later)

    def stored_bytes(self) -> int:
        """Distinct memory that autograd keeps, and the outputs; without parameters and what entered."""
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            leaves, outputs = self._forward()
        for output in outputs:
            keep(output)
        foreign = {each.untyped_storage().data_ptr() for each in (*self._owned.values(), *leaves)}
        self.output_bytes = sum(output.nbytes for output in outputs)
        return sum(storage.nbytes() for start, storage in kept.items() if start not in foreign)

    def times(self, clock: Clock) -> tuple[float, float]:
        forward: list[float] = []
        backward: list[float] = []
        others = torch.ones(OTHERS_BYTES // 4)  # on an accelerator nothing stays in a cache from one layer to the next
        generator = torch.default_generator
        spent, runs, later = 0.0, 0, at_once(self._owned.values())
        while runs <= LEAST_RUNS or (spent < MEASURE_S and runs < MOST_RUNS):
            leaves = self._leaves()
            others.add_(1.0)
            self._forget()
            began = clock()
            generator.manual_seed(runs)  # as a stage does before a random operator
            outputs = self._go(leaves, later)
            middle = clock()
            wanted = [each for each in outputs if each.requires_grad]
            seeds = [torch.ones_like(each) for each in wanted]
            others.add_(1.0)
            ready = clock()
            if wanted:
                with as_written(wanted[0].device.type):
                    torch.autograd.backward(wanted, seeds)
            ended = clock()
            if runs:  # the first warms up
                forward.append(middle - began)
                backward.append(ended - ready)
            spent += ended - began
            runs += 1
            if spent > 10 * MEASURE_S and forward:
                break
        ROOM.leave()
        return statistics.median(forward), statistics.median(backward)

    def input_gradient_s(self, clock: Clock) -> float:
        """Seconds of the gradients of what entered, without those of the layer's own tensors."""
        took = []
        for run in range(LEAST_RUNS + 1):
            torch.default_generator.manual_seed(run)
            leaves, outputs = self._forward()
            entered = [leaf for leaf in leaves if leaf.requires_grad]
            roots = [each for each in outputs if each.requires_grad]
            if not entered or not roots:
                return 0.0
            seeds = [torch.ones_like(each) for each in roots]
            began = clock()
            with as_written(roots[0].device.type):
                torch.autograd.grad(roots, entered, seeds, allow_unused=True)
            took.append(clock() - began)
        return statistics.median(took[1:])


def _update(
    trained: Mapping[str, torch.Tensor], hidden: Collection[str], make_optimizer: MakeOptimizer, clock: Clock
) -> tuple[float, int]:
    """Seconds of one optimizer step, and the bytes of its state."""
    trained = {name: each for name, each in trained.items() if each.grad is not None}
    if not trained:
        return 0.0, 0
    optimizer = make_optimizer(list(trained.values()), [name in hidden for name in trained])
    took = []
    for _ in range(LEAST_RUNS + 1):
        began = clock()
        optimizer.step(0.0)
        took.append(clock() - began)
    size = sum(tensor.nbytes for state in optimizer.states for tensor in state.values())
    return statistics.median(took[1:]), size
