"""A residual network, written for plain PyTorch, learns the bundled digits on a ring of three processes.

python examples/own_model.py            # --nodes 4 gives the same digest
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from ringtmp import Ring


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        out: torch.Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([Block(width, width), Block(width, 2 * width, 2), Block(2 * width, 2 * width)])
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x), inplace=True)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=69)
    given = parser.parse_args()
    torch.manual_seed(0)
    result = Ring(nodes=given.nodes).fit(ResNet(), "digits", steps=given.steps, batch_size=64, microbatches=4)
    print(result)
