"""A trunk learns the digits 0 to 4 on a ring; then it is frozen, and a new head learns 5 to 9 from few images.

python examples/finetune_vision.py      # --nodes 4 gives the same digests
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from typing import Any

import numpy
import torch
from torch import nn

from ringtmp import Ring


class Digits(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(2 * width * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.trunk(x))
        return logits


def images_of(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five digits from `first` on, as the classes 0 to 4."""
    with (files("ringtmp.data") / "digits" / "digits.npz").open("rb") as file, numpy.load(file) as digits:
        images, labels = torch.from_numpy(digits["images"]).float() / 16, torch.from_numpy(digits["labels"]).long()
    chosen = (labels >= first) & (labels < first + 5)
    return images[chosen][:, None], labels[chosen] - first


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=90)
    given = parser.parse_args()
    torch.manual_seed(0)
    ring = Ring(nodes=given.nodes)
    base = ring.fit(Digits(), images_of(0), steps=given.steps, microbatches=4)
    model: Any = base.model  # an ordinary module
    model.head = nn.Linear(model.head.in_features, 5)  # for another task
    images, labels = images_of(5)
    few, test = (images[:300], labels[:300]), (images[300:], labels[300:])
    tuned = ring.fit(model, few, test_data=test, steps=given.steps, microbatches=4, train="head")
    print(tuned)
    trunks: Any = base.model, tuned.model
    same = all(map(torch.equal, *(each.trunk.parameters() for each in trunks)))
    print(f"the trunk {'kept' if same else 'lost'} its bits")
