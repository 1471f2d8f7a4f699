"""The search of a worker of GADMM: it finds minima, never ends higher than it began, and rounding does not lead it astray."""

from __future__ import annotations

import pytest
import torch

from ringtmp.strategies.gadmm.local_minimum import Descent


def quadratic(size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    half = torch.randn(size, size, generator=random).double()
    return half @ half.T / size + 0.1 * torch.eye(size).double(), torch.randn(size, generator=random).double()


def search(
    descent: Descent, matrix: torch.Tensor, wanted: torch.Tensor, point: torch.Tensor
) -> tuple[torch.Tensor, int]:
    goes_on, tries = True, 0
    while goes_on:
        point, goes_on = descent.next(point, matrix @ point - wanted, 1e-12)
        tries += 1
    descent.rest()
    return point, tries


def test_it_finds_a_minimum_and_the_next_with_another_linear_term_faster() -> None:
    matrix, wanted = quadratic()
    descent = Descent(1e-8, 200, 0.1)
    first, many = search(descent, matrix, wanted, torch.zeros(12).double())
    assert torch.allclose(first, torch.linalg.solve(matrix, wanted), atol=1e-6)
    second, fewer = search(descent, matrix, 1.1 * wanted, first)
    assert torch.allclose(second, torch.linalg.solve(matrix, 1.1 * wanted), atol=1e-6)
    assert fewer < many


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_with_few_tries_it_ends_no_worse_than_it_began(most: int) -> None:
    matrix, wanted = quadratic()
    point = torch.full((12,), 3.0).double()
    answer, tries = search(Descent(1e-8, most, 0.1), matrix, wanted, point)
    assert tries == most
    before, after = (float(each @ matrix @ each / 2 - wanted @ each) for each in (point, answer))
    assert after < before or (most < 4 and after == before)


def test_pairs_of_rounding_do_not_lead_it_astray() -> None:
    """At the minimum gradients are noise: searches begun there stay there."""
    matrix, wanted = quadratic()
    random = torch.Generator().manual_seed(2)
    descent, best = Descent(1e-3, 20, 0.1), torch.linalg.solve(matrix, wanted)
    point = best.clone()
    for _ in range(100):
        goes_on = True
        while goes_on:
            rounding = 1e-7 * torch.randn(12, generator=random).double()
            point, goes_on = descent.next(point, matrix @ point - wanted + rounding, 1e-9)
        descent.rest()
    assert float((point - best).norm()) < 1e-4
