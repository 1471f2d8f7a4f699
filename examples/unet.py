"""A U-Net, written for plain PyTorch, learns to find discs in noise on a ring of three processes.

python examples/unet.py                 # --nodes 4 gives the same digest
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from ringtmp import Ring


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up2, self.join2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), double(4 * width, 2 * width)
        self.up1, self.join1 = nn.ConvTranspose2d(2 * width, width, 2, 2), double(2 * width, width)
        self.pool, self.drop, self.out = nn.MaxPool2d(2), nn.Dropout2d(0.1), nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.down1(x)
        coarse = self.down2(self.pool(fine))
        y = self.drop(self.bottom(self.pool(coarse)))
        y = self.join2(torch.cat([self.up2(y), coarse], 1))  # skips: they go straight to the node that needs them
        logits: torch.Tensor = self.out(self.join1(torch.cat([self.up1(y), fine], 1)))
        return logits


def discs(count: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images, and for every pixel whether it lies in the disc."""
    rows = torch.arange(size).view(1, size, 1)
    y, x = torch.randint(4, size - 4, (2, count, 1, 1))
    inside = (rows - y) ** 2 + (rows.mT - x) ** 2 < torch.randint(5, 25, (count, 1, 1))
    return (inside + 0.5 * torch.randn(count, size, size)).unsqueeze(1), inside.long()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.manual_seed(0)
    model, train, test = UNet(), discs(960), discs(160)
    optimizer = ("adam", {"lr": 0.01})
    result = Ring(nodes=given.nodes).fit(
        model, train, test_data=test, steps=given.steps, microbatches=4, optimizer=optimizer
    )
    print(result)
