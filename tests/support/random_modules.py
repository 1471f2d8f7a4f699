"""Random modules as nobody would write them: skips, views, changes in place, shared weights, state, blocks without gradients.

A module is a list of steps over a pool of tensors; a step takes some of the pool and adds what it makes. Every tensor has a
form: "btw" (batch, time, width), "tbw" with time first, "nw" (batch * time, width), "bw" (batch, width), "bth" half as wide.
What eager mode itself refuses (a change in place of what backward needs) is tried and left out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

#: What is done, to which of the pool, and a number for whatever needs one.
Steps = tuple[tuple[str, tuple[int, ...], int], ...]
TIME = 5
LINEARS = 4


class Doubled(torch.autograd.Function):
    """With a backward that no formula of torch's own would give."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y = ctx.saved_tensors
        return gradients[0] * y * 2 + gradients[1], gradients[0] * x


class RandomModule(nn.Module):
    def __init__(self, steps: Steps, outputs: tuple[int, ...], width: int, gathered: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.steps, self.outputs, self.gathered, self.width = steps, outputs, gathered, width
        self.embed = nn.Embedding(width, width)
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=at % 2 == 0) for at in range(LINEARS))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm, self.batch_norm = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("moving", torch.ones(width))
        self.register_buffer("hidden", torch.linspace(-1, 1, TIME), persistent=False)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        x, tokens = inputs
        pool: list[torch.Tensor] = [x, self.embed(tokens)]
        for kind, taken, number in self.steps:
            made = STEPS[kind][2](self, number, *(pool[at] for at in taken))
            pool += made if isinstance(made, tuple) else (made,)
        found = tuple(pool[at] for at in self.outputs)
        for at in self.gathered:  # what no step takes is used at the end: skips from everywhere
            found = (found[0] * (1 + 0.1 * pool[at].mean()), *found[1:])
        return found[0] if len(found) == 1 else found


def _added(m: Any, n: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += b
    return a


def _marked(m: Any, n: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[:, n] = b[:, 0] * 0.5
    return a


def _causal(m: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    time = torch.arange(x.shape[1])
    scores = x @ x.transpose(1, 2) / 8
    return scores.masked_fill(time[:, None] < time[None, :], -torch.inf).softmax(-1) @ x


def _filled_mask(m: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(x.shape[0], x.shape[1])
    mask[:, 1:] = 1
    mask += torch.arange(x.shape[0])[:, None]
    return x * mask[..., None]


def _attention(m: Any, n: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rate = 0.2 if m.training else 0.0
    return F.scaled_dot_product_attention(x, y, y, is_causal=n == 1, dropout_p=rate)


def _without_gradient(m: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = m.linears[n](x).tanh()
        y = y * m.scale
    return x * y


def _moving(m: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    m.moving.mul_(1.01)
    return x * m.moving


def _batch_norm(m: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    return m.batch_norm(x)


def _largest(m: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    value, place = x.max(-1, keepdim=True)
    return x.gather(-1, place) + x * value


def _windows(m: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    return x.unfold(-1, 3, 1).mean(-1).repeat(1, 1, 3)[..., : x.shape[-1]]


def _late_change(m: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.view(-1, x.shape[-1])
    y[..., :2] += 1
    return x + z.view(x.shape)


def _hyper(m: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, m.linears[n](m.embed.weight))


Step = Callable[..., Any]
#: What each takes, what it gives, and what it does. "*" is any one form, the same everywhere.
STEPS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Step]] = {
    "linear": (("*",), ("*",), lambda m, n, x: m.linears[n](x)),
    "tied": (("*",), ("*",), lambda m, n, x: F.linear(x, m.embed.weight)),
    "hyper": (("*",), ("*",), _hyper),
    "turned weight": (("*",), ("*",), lambda m, n, x: x @ m.linears[n].weight.t()),
    "frozen": (("*",), ("*",), lambda m, n, x: m.frozen(x)),
    "norm": (("*",), ("*",), lambda m, n, x: m.norm(x)),
    "relu": (("*",), ("*",), lambda m, n, x: F.relu(x)),
    "tanh": (("*",), ("*",), lambda m, n, x: torch.tanh(x)),
    "gelu": (("*",), ("*",), lambda m, n, x: F.gelu(x)),
    "sum": (("*", "*"), ("*",), lambda m, n, x, y: x + y),
    "product": (("*", "*"), ("*",), lambda m, n, x, y: x * torch.sigmoid(y)),
    "dropout": (("*",), ("*",), lambda m, n, x: F.dropout(x, 0.3, m.training)),
    "no dropout": (("*",), ("*",), lambda m, n, x: F.dropout(x, 0.0, m.training)),
    "own backward": (("*", "*"), ("*", "*"), lambda m, n, x, y: Doubled.apply(x, y)),
    "no gradient": (("*",), ("*",), _without_gradient),
    "detached": (("*", "*"), ("*",), lambda m, n, x, y: x + y.detach()),
    "scaled": (("*",), ("*",), lambda m, n, x: x * m.scale),
    "moving": (("*",), ("*",), _moving),
    "mean": (("*", "*"), ("*",), lambda m, n, x, y: x * y.mean()),
    "double": (("*",), ("*",), lambda m, n, x: x.double().cumsum(-1).float()),
    "contiguous": (("*",), ("*",), lambda m, n, x: x.contiguous()),
    "same kind": (("*",), ("*",), lambda m, n, x: x.to(torch.float32)),
    "at least": (("*",), ("*",), lambda m, n, x: torch.atleast_2d(x)),
    "largest": (("*",), ("*",), _largest),
    "late change": (("*",), ("*",), _late_change),
    "relu_": (("*",), ("*",), lambda m, n, x: F.relu_(x)),
    "mul_": (("*",), ("*",), lambda m, n, x: x.mul_(0.9)),
    "add_": (("*", "*"), ("*",), lambda m, n, x, y: x.add_(y, alpha=0.5)),
    "+=": (("*", "*"), ("*",), _added),
    "part mul_": (("*",), ("*",), lambda m, n, x: (x[..., : 2 + n].mul_(0.5), x)[1]),
    "marked": (("btw", "btw"), ("btw",), _marked),
    "flat": (("btw",), ("nw",), lambda m, n, x: x.reshape(-1, x.shape[-1])),
    "flattened": (("nw",), ("nw",), lambda m, n, x: x.flatten(1)),
    "viewed": (("nw",), ("btw",), lambda m, n, x: x.view(-1, TIME, x.shape[-1])),
    "turned": (("btw",), ("tbw",), lambda m, n, x: x.transpose(0, 1)),
    "turned for good": (("btw",), ("tbw",), lambda m, n, x: x.transpose(0, 1).contiguous()),
    "turned back": (("tbw",), ("btw",), lambda m, n, x: x.transpose(0, 1)),
    "batch norm": (("nw",), ("nw",), _batch_norm),
    "one": (("btw",), ("bw",), lambda m, n, x: x[:, n]),
    "two": (("btw",), ("bw", "bw"), lambda m, n, x: (x.unbind(1)[n], x.unbind(1)[n + 1])),
    "spread": (("bw",), ("btw",), lambda m, n, x: x.unsqueeze(1).expand(-1, TIME, -1)),
    "spread over": (("bw", "btw"), ("btw",), lambda m, n, x, y: y * x[:, None]),
    "halves": (("btw",), ("bth", "bth"), lambda m, n, x: tuple(x.chunk(2, -1))),
    "split": (("btw",), ("bth", "bth"), lambda m, n, x: tuple(x.split(x.shape[-1] // 2, -1))[::-1]),
    "joined": (("bth", "bth"), ("btw",), lambda m, n, x, y: torch.cat([x, y], -1)),
    "time": (("btw",), ("btw",), lambda m, n, x: x * m.hidden[:, None]),
    "causal": (("btw",), ("btw",), _causal),
    "filled mask": (("btw",), ("btw",), _filled_mask),
    "numbered": (("btw",), ("btw",), lambda m, n, x: x + torch.arange(x.shape[0])[:, None, None] * 0.1),
    "numbered second": (("tbw",), ("tbw",), lambda m, n, x: x + torch.arange(x.shape[1])[:, None] * 0.1),
    "attention": (("btw", "btw"), ("btw",), _attention),
    "recurrent": (("btw",), ("btw",), lambda m, n, x: m.recurrent(x)[0]),
    "windows": (("btw",), ("btw",), _windows),
    "flipped": (("btw",), ("btw",), lambda m, n, x: x.flip(1)),
}
IN_PLACE = frozenset(["relu_", "mul_", "add_", "+=", "part mul_", "marked"])
#: Steps without which a module is not worth its export.
COMMON = ("linear", "tied", "sum", "relu_", "+=", "batch norm")


def random_module(seed: int, length: int = 14) -> RandomModule:
    dice = random.Random(seed)
    width = dice.choice([16, 32, 48])
    steps: list[tuple[str, tuple[int, ...], int]] = []
    forms = ["btw", "btw"]
    while len(steps) < length:
        kind = dice.choice(COMMON) if dice.random() < 0.3 else dice.choice(sorted(STEPS))
        takes, gives, _ = STEPS[kind]
        form = dice.choice(["btw", "btw", "nw", "bw", "tbw"])
        wanted = [form if each == "*" else each for each in takes]
        found = [[at for at, each in enumerate(forms) if each == one] for one in wanted]
        if not all(found):
            continue
        taken = tuple(max(dice.choice(each), dice.choice(each)) for each in found)  # rather late ones
        if kind in IN_PLACE and taken[0] == 0 and dice.random() < 0.7:
            continue
        step = kind, taken, dice.randrange(LINEARS)
        made = [form if each == "*" else each for each in gives]
        if kind not in IN_PLACE or _eager_allows((*steps, step), len(forms) + len(made), width):
            steps.append(step)
            forms += made
    count = dice.choice([1, 1, 2, 3])
    outputs = tuple(sorted({len(forms) - 1, *(dice.randrange(2, len(forms)) for _ in range(count - 1))}))
    used = {at for _, taken, _ in steps for at in taken} | set(outputs)
    gathered = tuple(at for at in range(len(forms)) if at not in used) if dice.random() < 0.6 else ()
    torch.manual_seed(seed)
    module = RandomModule(tuple(steps), outputs, width, gathered)
    return module if _stays_small(copy.deepcopy(module)) else random_module(seed + 1000, length)


def random_inputs(width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return (
        torch.randn(count, TIME, width, generator=generator),
        torch.randint(0, width, (count, TIME), generator=generator),
    )


def _eager_allows(steps: Any, count: int, width: int) -> bool:
    module = RandomModule(steps, tuple(range(1, count)), width)
    try:
        outputs = module(random_inputs(width, 3))
        square_loss(outputs, torch.ones(3)).backward()
    except RuntimeError:
        return False
    return True


def _stays_small(module: RandomModule) -> bool:
    """Products of products may grow until a training step ends in infinity."""
    loss = square_loss(module(random_inputs(module.width, 7)), torch.ones(7))
    if not loss.requires_grad:
        return False
    loss.backward()
    return all(bool((each.grad.abs() < 10).all()) for each in module.parameters() if each.grad is not None)


def square_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    parts = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return sum(((part.tanh() - 0.3).square().mean() * targets.mean() for part in parts), torch.zeros(()))
