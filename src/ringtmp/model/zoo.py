"""Ready models as generators of layers; sizes follow the data unless set.

mlp      depth hidden dense layers of one width, then a linear head
convnet  3x3 convolutions with BatchNorm, ReLU and Dropout, pooled in between
resnet   residual blocks: the skip stays inside a layer
gpt      byte or token transformer: pre-norm attention and a 4x GELU MLP, untied head
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringtmp.data.tables_and_streams import Shape
from ringtmp.errors import UsageError, unknown

Layers = Iterator[tuple[str, nn.Module]]


class Dense(nn.Module):
    """Flatten, linear, ReLU, Dropout."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(F.relu(self.linear(x.flatten(1))))
        return dropped


class Head(nn.Module):
    """Flatten, linear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x.flatten(1))
        return logits


def mlp(shape: Shape, depth: int = 5, width: int = 128, dropout: float = 0.0) -> Layers:
    inputs = shape.values
    for index in range(depth):
        yield f"dense{index}", Dense(inputs, width, dropout)
        inputs = width
    yield "head", Head(inputs, shape.outputs)


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, dropout: float, pool: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        if self.pool:
            x = F.max_pool2d(x, 2)
        dropped: torch.Tensor = self.dropout(x)
        return dropped


class PooledHead(nn.Module):
    """Average over the picture, linear."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x.mean((2, 3)))
        return logits


def convnet(shape: Shape, depth: int = 5, width: int = 16, dropout: float = 0.1) -> Layers:
    channels, height, side = _picture("convnet", shape)
    outputs = width
    for index in range(depth):
        pool = index % 2 == 1 and min(height, side) >= 4
        if pool:
            height, side = height // 2, side // 2
        outputs = width * 2 ** (index // 2)
        yield f"conv{index}", ConvBlock(channels, outputs, dropout, pool)
        channels = outputs
    yield "head", PooledHead(channels, shape.outputs)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.dropout(F.relu(self.norm1(self.conv1(x))))))
        return F.relu(y + self.skip(x))


class Stem(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)))


def resnet(shape: Shape, depth: int = 4, width: int = 16, dropout: float = 0.0) -> Layers:
    channels, height, side = _picture("resnet", shape)
    yield "stem", Stem(channels, width)
    channels = width
    for index in range(depth):
        stride = 2 if index and index % 2 == 0 and min(height, side) >= 4 else 1
        outputs = channels * stride
        yield f"block{index}", Residual(channels, outputs, stride, dropout)
        channels, height, side = outputs, height // stride, side // stride
    yield "head", PooledHead(channels, shape.outputs)


class Embed(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (batch, time) -> (batch, time, width)
        embedded: torch.Tensor = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
        return embedded


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        # (batch, time, 3 * width) -> three of (batch, heads, time, width / heads)
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.merge(mixed.transpose(1, 2).reshape(batch, time, width)))
        y: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return y


class Vocabulary(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, width) -> (batch, time, vocabulary)
        logits: torch.Tensor = self.linear(self.norm(x))
        return logits


GPT_HEADS = 4


def gpt(
    shape: Shape, depth: int = 4, width: int = 128, heads: int = GPT_HEADS, context: int = 0, dropout: float = 0.0
) -> Layers:
    if shape.floating or len(shape.inputs) != 1:
        raise UsageError("gpt needs sequences of bytes or token numbers: use --data text:PATH or pysource")
    if width % heads:
        raise UsageError(f"gpt: width {width} is not a multiple of heads {heads}")
    yield "embed", Embed(shape.outputs, max(context, shape.inputs[0]), width, dropout)
    for index in range(depth):
        yield f"block{index}", Block(width, heads, dropout)
    yield "head", Vocabulary(width, shape.outputs)


ZOO: dict[str, Callable[..., Layers]] = {"mlp": mlp, "convnet": convnet, "resnet": resnet, "gpt": gpt}


def build(name: str, shape: Shape, settings: Mapping[str, Any]) -> Layers:
    """The layers of a zoo model. Refuses what the model does not know before anything is built."""
    if name not in ZOO:
        raise unknown("model", name, [*ZOO, "FILE.py:factory", "package.module:factory"])
    defaults = {key: each.default for key, each in inspect.signature(ZOO[name]).parameters.items() if key != "shape"}
    for key, value in settings.items():
        if key not in defaults:
            raise unknown(f"setting of {name}", key, defaults)
        if type(defaults[key]) is int and type(value) is not int:
            raise UsageError(f"{name}: {key}={value} must be a whole number")
        if not isinstance(value, int | float) or (key != "dropout" and key != "context" and value < 1):
            raise UsageError(f"{name}: {key}={value} must be a number of at least 1")
        if key == "dropout" and not 0 <= value < 1:
            raise UsageError(f"{name}: dropout={value} must be at least 0 and below 1")
    if shape.outputs < 1:
        raise UsageError(f"{name} needs data with a known number of classes")
    return ZOO[name](shape, **settings)


def _picture(name: str, shape: Shape) -> tuple[int, int, int]:
    if not shape.floating or len(shape.inputs) != 3:
        raise UsageError(f"{name} needs pictures (channels, height, width); these inputs are {shape.inputs}")
    channels, height, width = shape.inputs
    return channels, height, width
