"""The oracle: training as anyone would write it in plain PyTorch, in one process, without RingTMP's runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ringtmp.runtime.learning_rates import learning_rate
from ringtmp.runtime.random_keys import LOSS, random_key


class RandomByOperator(TorchFunctionMode):
    """Eager mode, in which every torch function that draws random numbers has a seed of its own, by its ordinal. On leaving,
    the generator is seeded for the loss."""

    def __init__(self, seed: int, step: int, microbatch: int) -> None:
        super().__init__()
        self._key = seed, step, microbatch
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = torch.default_generator
        generator.manual_seed(random_key(*self._key, self.count))
        before = generator.get_state()
        result = func(*args, **(kwargs or {}))
        if not generator.get_state().equal(before) or _counts_anyway(func, args, kwargs or {}):
            self.count += 1
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.default_generator.manual_seed(random_key(*self._key, LOSS))


def _counts_anyway(func: Any, args: Any, kwargs: Any) -> bool:
    """`rrelu` in training draws only for what is not positive, and is a random operator even where there is nothing."""
    if getattr(func, "__name__", "") not in ("rrelu", "rrelu_"):
        return False
    return bool(kwargs["training"] if "training" in kwargs else len(args) > 3 and args[3])


def _by_layer(model: nn.Sequential, x: Any, key: tuple[int, int, int]) -> Any:
    """The rule of runs that began before randomness went by operator."""
    for position, layer in enumerate(model):
        torch.default_generator.manual_seed(random_key(*key, position))
        x = layer(x)
    return x


def plain_loop(
    model: nn.Module,
    batches: Sequence[tuple[Any, torch.Tensor]],
    microbatches: int,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    seed: int = 0,
    clip_norm: float | None = None,
    schedule: dict[str, Any] | None = None,
    delayed: bool = False,
    randomness: str = "operator",
    sum_tree: int = 1,
) -> list[float]:
    """Trains `model` in place and returns the loss of every step. `delayed`: every gradient is taken at the weights one
    update ago, w[t+1] = w[t] - step(gradient at w[t-1]); the first at the first weights. `sum_tree`: so many parts of a batch
    are added up as a tree."""
    model.train()
    previous = _weights(model)
    updates = optimizer(model.parameters())
    base = updates.param_groups[0]["lr"]
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        total = 0.0
        newest = _weights(model)
        if delayed:
            _load(model, previous)
        count = min(microbatches, len(targets))
        sums: list[Any] = []
        parts = [set(each.tolist()) for each in torch.arange(count).tensor_split(sum_tree)]
        for number, (x, y) in enumerate(zip(_split(inputs, count), targets.tensor_split(count), strict=True)):
            if number not in parts[len(sums)]:
                sums.append(_taken(model))
            if randomness == "layer":
                assert isinstance(model, nn.Sequential)
                x = _by_layer(model, x, (seed, step, number))
            else:
                with RandomByOperator(seed, step, number):
                    x = model(x)
            share = len(y) / len(targets)
            value = loss(x, y)
            (value * share).backward()
            total += float(value.detach()) * share
        sums.append(_taken(model))
        for parameter, gradient in zip(
            model.parameters(), _tree([*sums, *[None] * (sum_tree - len(sums))]), strict=True
        ):
            parameter.grad = gradient
        if delayed:  # else a weight that a layer changes in its forward pass would be lost
            _load(model, newest)
        previous = newest
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if schedule is not None:
            for group in updates.param_groups:
                group["lr"] = learning_rate(schedule, base, step)
        updates.step()
        updates.zero_grad()
        losses.append(total)
    return losses


def _taken(model: nn.Module) -> list[torch.Tensor | None]:
    """The gradients, which the model has no longer."""
    found = [each.grad for each in model.parameters()]
    for each in model.parameters():
        each.grad = None
    return found


def _tree(sums: list[Any]) -> Any:
    """Neighbours in pairs, then pairs in pairs. Nothing is added to what has no partner."""
    while len(sums) > 1:
        sums = [_pair(left, right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _pair(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, list):
        return [_pair(*each) for each in zip(left, right, strict=True)]
    return left + right


def _split(inputs: Any, count: int) -> list[Any]:
    leaves, structure = pytree.tree_flatten(inputs)
    columns = [leaf.tensor_split(count) for leaf in leaves]
    return [pytree.tree_unflatten([column[at] for column in columns], structure) for at in range(count)]


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


@torch.no_grad()
def _load(model: nn.Module, weights: list[torch.Tensor]) -> None:
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)


def state_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(
            name.encode() + b"\0" + dtype.encode() + b"\0" + ",".join(map(str, tensor.shape)).encode() + b"\0"
        )
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
