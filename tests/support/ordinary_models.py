"""Models as people write them: an `nn.Module` with a `forward`, skips, shared weights, changes in place and several inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.down = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)) if stride > 1 else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.down is None else self.down(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += identity
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.layer1 = nn.Sequential(ResidualBlock(8, 8), ResidualBlock(8, 8))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16, 2), ResidualBlock(16, 16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(F.relu(self.stem(x), inplace=True)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc1, self.enc2, self.middle = twice(1, 4), twice(4, 8), twice(8, 16)
        self.up2, self.dec2 = nn.ConvTranspose2d(16, 8, 2, 2), twice(16, 8)
        self.up1, self.dec1 = nn.ConvTranspose2d(8, 4, 2, 2), twice(8, 4)
        self.out, self.pool, self.drop = nn.Conv2d(4, 2, 1), nn.MaxPool2d(2), nn.Dropout2d(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.enc1(x)
        b = self.enc2(self.pool(a))
        y = self.drop(self.middle(self.pool(b)))
        y = self.dec2(torch.cat([self.up2(y), b], 1))
        return self.out(self.dec1(torch.cat([self.up1(y), a], 1)))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1)) for i in range(4)
        )
        self.fc = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.fc(torch.cat(features, 1).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.first = kind(12, 16, 2, batch_first=True, dropout=0.2)
        self.between = nn.Linear(16, 16)
        self.second = kind(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.first(self.embed(x))
        y, _ = self.second(torch.tanh(self.between(y)))
        return self.head(y[:, -1])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class TiedLanguageModel(nn.Module):
    def __init__(self, blocks: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.position = nn.Parameter(torch.randn(300, 16) * 0.1)
        self.blocks = nn.ModuleList(Attention(16, 2, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.middle, self.last = (
            nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.shared(torch.relu(self.first(x))))
        y = torch.relu(self.shared(torch.tanh(self.middle(y))))
        return self.last(torch.sigmoid(self.shared(self.middle(y))))


class Aliased(nn.Module):
    """Modules that have two names each, one of them with buffers that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16, affine=False)
        self.steps = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.steps.append(self.steps[0])
        self.again, self.head = self.norm, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x))
        for step in self.steps:
            y = torch.tanh(step(y)) + y
        return self.head(torch.relu(y))


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate, self.leave = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enter(x)
        shares = torch.softmax(self.gate(y), -1)
        given = torch.stack([expert(y) for expert in self.experts], -1)
        return self.leave((given * shares.unsqueeze(1)).sum(-1) + y)


class Recommender(nn.Module):
    """As DLRM: dense features and categories, every pair of which meets."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 8) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        dense, categories = x
        low = self.bottom(dense)
        every = torch.stack([low, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        pairs = torch.bmm(every, every.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([low, pairs[:, rows, columns]], 1))


Sample = Callable[[int], Any]


def images(channels: int, size: int) -> Sample:
    return lambda count: torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(count))


def tokens(words: int, length: int) -> Sample:
    return lambda count: torch.randint(0, words, (count, length), generator=torch.Generator().manual_seed(count))


def vectors(width: int) -> Sample:
    return lambda count: torch.randn(count, width, generator=torch.Generator().manual_seed(count))


#: Name -> the model, and what gives samples.
ORDINARY: dict[str, tuple[Callable[[], nn.Module], Sample]] = {
    "resnet": (ResNet, images(3, 8)),
    "unet": (UNet, images(1, 8)),
    "densenet": (DenseNet, images(3, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM), tokens(20, 9)),
    "lstm, 256 long": (lambda: Recurrent(nn.LSTM), tokens(20, 256)),
    "gru, 256 long": (lambda: Recurrent(nn.GRU), tokens(20, 256)),
    "tied": (TiedLanguageModel, tokens(30, 20)),
    "tied, 256 long": (lambda: TiedLanguageModel(2), tokens(30, 256)),
    "shared block": (SharedBlock, vectors(8)),
    "aliased": (Aliased, vectors(8)),
    "experts": (MixtureOfExperts, vectors(8)),
    "recommender": (Recommender, lambda count: (vectors(4)(count), tokens(10, 3)(count))),
}


def targets_for(model: nn.Module, inputs: Any) -> torch.Tensor:
    """Classes for whatever the model gives, in the dimension torch's cross-entropy wants them in."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = model(inputs)
    shape = (outputs.shape[0], *outputs.shape[2:]) if outputs.dim() != 3 else tuple(outputs.shape[:2])
    classes = outputs.shape[1] if outputs.dim() != 3 else outputs.shape[2]
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(5))


def class_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if outputs.dim() == 3:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return F.cross_entropy(outputs, targets)
