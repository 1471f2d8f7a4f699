"""Where a server applies gradients: the values of one key, their optimizer, each worker's clock, who waits for an answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringtmp.plan.sum_tree import ROOT, SumTree
from ringtmp.runtime import gradients_at_segment_edges as edges
from ringtmp.runtime.learning_rates import learning_rate
from ringtmp.runtime.optimizers import make_optimizer
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.wire.formats import WireFormat
from ringtmp.wire.messages import Recipe


@dataclass(frozen=True, eq=False)
class Gradient:
    """A push that has come."""

    worker: int
    step: int
    share: float
    values: torch.Tensor


@dataclass(frozen=True)
class Answer:
    """What a pull gets: tensors for the wire. `change`: to be added to what the worker has; or, where insignificant changes
    are withheld, values and the places they belong to."""

    tensors: list[torch.Tensor]
    change: bool


class Slot:
    def __init__(
        self, key: Key, values: torch.Tensor, state: dict[str, torch.Tensor], recipe: Recipe,
        *, step: int, workers: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.key = key
        self.values = values
        self._recipe = recipe
        self._optimizer = make_optimizer(recipe.optimizer, recipe.optimizer_settings, [values])
        self._optimizer.states[0] = state
        self.updates = step  # steps applied as a whole
        self.clocks = dict.fromkeys(workers, step)  # steps of each worker that are in the values
        self.applied = 0  # updates made here, however small
        self.copied = 0  # of those, how many the replica has repeated
        # step -> worker, or with a tree of sums the node of it that this is the sum below -> gradient, share
        self.arrived: dict[int, dict[int, tuple[edges.Gradient, float]]] = {}
        self.summed: tuple[edges.Gradient] | None = None  # of step `updates`, waiting for the norm of all gradients
        self._published: tuple[int, Answer] | None = None
        self._known: dict[int, torch.Tensor] = {}  # what a worker (-1: every worker) has of the values
        self._in_use: dict[int, torch.Tensor] = {}  # what a worker read and is computing with
        self.held: list[Gradient] = []  # gradients that would change too much of what is in use

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return self._optimizer.states[0]

    def sum_up(self, step: int) -> torch.Tensor:
        """The gradients of a step in the order of the workers, so that their sum has the same bits every time."""
        arrived = self.arrived.pop(step)
        total: torch.Tensor | None = None
        share = 0.0
        for worker in sorted(arrived):
            gradient, part = arrived[worker]
            assert gradient is not None
            total = gradient if total is None else total.add_(gradient)
            share += part
        assert total is not None
        # With a quorum some shares of the batch are missing: the mean is over those that came.
        return total if share > 1 - 1e-9 or share == 0 else total.div_(share)

    def add_up(self, step: int, tree: SumTree, node: int = ROOT) -> edges.Gradient:
        """The gradients of a step along the tree of sums; None: there is none."""
        arrived = self.arrived[step]
        if node in arrived:
            return arrived[node][0]
        if node >= tree.parts:
            return None
        left, right = self.add_up(step, tree, 2 * node), self.add_up(step, tree, 2 * node + 1)
        return right if left is None else left if right is None else left.add_(right)

    def apply(self, gradient: torch.Tensor, step: int, weight: float = 1.0) -> None:
        """w <- w - rate * g, by the optimizer of the run. `weight`: the part of a batch the gradient is of."""
        rate = learning_rate(self._recipe.schedule, self._recipe.optimizer_settings["lr"], step)
        self.values.grad = gradient
        self._optimizer.step(rate * weight)
        self.values.grad = None
        self.applied += 1

    def apply_within(self, gradient: Gradient, bound: float) -> bool:
        """Apply a worker's gradient, unless some parameter would then differ by more than `bound` from what another worker
        is computing with: then nothing changes."""
        used = list(self._in_use.values())
        before = (self.values.clone(), {name: each.clone() for name, each in self.state.items()}) if used else None
        self.apply(gradient.values, gradient.step, gradient.share)
        if before is None or all(float((self.values - each).abs().max()) <= bound for each in used):
            return True
        self.values.copy_(before[0])
        self._optimizer.states[0] = before[1]
        self.applied -= 1
        return False

    def in_use_by(self, worker: int) -> None:
        """The worker gets the values as they are and computes with them until its next gradient comes."""
        self._in_use[worker] = self.values.clone()

    def used_by(self, worker: int) -> None:
        self._in_use.pop(worker, None)

    def significant(self, worker: int, least: float) -> Answer:
        """What has changed since the worker last got it, by more than `least` of what it has: values and their places, or
        all of them where that is not more. So its copy is never further off than that."""
        known = self._known.get(worker)
        if known is not None:
            places = ((self.values - known).abs() > least * known.abs()).nonzero()[:, 0]
            if 2 * len(places) < len(known):
                found = self.values[places]
                known[places] = found
                return Answer([found, places.int()], change=True)
        self._known[worker] = self.values.clone()
        return Answer([self._known[worker].clone()], change=False)

    def answer(self, wire: WireFormat, worker: int, shared: bool) -> Answer:
        """The values as they are now. `shared`: every worker gets every version once, so one encoding serves all."""
        if shared and self._published is not None and self._published[0] == self.applied:
            return self._published[1]
        made = self._encode(wire, -1 if shared else worker, shared)
        if shared:
            self._published = (self.applied, made)
        return made

    def _encode(self, wire: WireFormat, worker: int, shared: bool) -> Answer:
        if wire.carries_error:
            known = self._known.get(worker)
            if known is None:
                self._known[worker] = self.values.clone()
                return Answer([self._known[worker].clone()], change=False)
            sent = wire.encode(self.values - known)
            known.add_(wire.decode(sent, known.numel()))  # what was rounded away is part of the next change
            return Answer(sent, change=True)
        if wire.exact:
            # Strictly in step nobody changes them before everyone has them; else a slow link would send half of each.
            return Answer([self.values if shared else self.values.clone()], change=False)
        return Answer(wire.encode(self.values), change=False)

    def leave_out(self, worker: int) -> None:
        """It is gone: nobody waits for its clock, and its gradients of steps to come do not count."""
        self.clocks.pop(worker, None)
        self._known.pop(worker, None)
        self._in_use.pop(worker, None)
        self.held = [each for each in self.held if each.worker != worker]
        for arrived in self.arrived.values():
            arrived.pop(worker, None)

    def forget_readers(self) -> None:
        """Nobody knows any more what workers have: the next answer is whole."""
        self._known.clear()
        self._in_use.clear()
        self.held.clear()
        self._published = None
