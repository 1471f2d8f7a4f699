"""A hidden matrix multiplies what passes through; tables, biases, kernels and frozen parameters are none."""

from __future__ import annotations

import torch
from torch import nn

from ringtmp.model.build import build_layers
from ringtmp.model.build_cells import Cutting
from ringtmp.model.matrices_for_muon import hidden_matrices


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.places = nn.Parameter(torch.randn(4, 6))
        self.qkv = nn.Linear(6, 18)
        self.turned = nn.Parameter(torch.randn(6, 6))
        self.frozen = nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.recurrent = nn.GRU(6, 6, batch_first=True)
        self.gate = nn.Parameter(torch.randn(4, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) + self.places[:4]
        query, _, value = self.qkv.weight.chunk(3)
        x = x @ query.t() + torch.matmul(x, value.transpose(0, 1)) + self.qkv.bias[:6]
        x = self.frozen(x @ self.turned)
        x = self.norm(self.recurrent(x)[0] * self.gate)
        return (x @ self.table.weight.t()).mean(1)  # the output layer shares the table


def test_the_first_use_decides() -> None:
    (layer,) = [each.layer for each in build_layers([Mixed()], 0, lambda count: torch.zeros(count, 4).long(), [2])]
    assert hidden_matrices(layer) == {"qkv.weight", "turned", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0"}


def test_cells_of_any_size_agree() -> None:

    found = []
    for blocks in ((), ("norm",)):
        layers = [
            each.layer
            for each in build_layers(
                Mixed(), 0, lambda count: torch.zeros(count, 4).long(), [2], cutting=Cutting(blocks, ())
            )
        ]
        names = {
            layer.full_name(each) for layer in layers for each in layer.tensors if each.name in hidden_matrices(layer)
        }
        found.append((len(layers), names))
    assert found[0][0] > found[1][0] >= 1
    assert found[0][1] == found[1][1] == {"qkv.weight", "turned", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0"}
