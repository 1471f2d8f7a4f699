"""The coordinator of an L-BFGS on inner products alone: on a quadratic it takes the textbook number of steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ringtmp.errors import UsageError
from ringtmp.strategies import registry
from ringtmp.strategies.lbfgs.coordinator import Further, Search, Turn, decide, first, two_loops


class Quadratic:
    """f = (w - best) H (w - best) / 2, of `size` unknowns."""

    def __init__(self, size: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        turned = torch.linalg.qr(torch.randn(size, size, generator=random, dtype=torch.float64)).Q
        self.second = turned @ torch.linspace(1, 20, size, dtype=torch.float64).diag() @ turned.T
        self.best = torch.randn(size, generator=random, dtype=torch.float64)

    def gradient(self, point: torch.Tensor) -> torch.Tensor:
        return self.second @ (point - self.best)


def descend(of: Quadratic, iterations: int, memory: int, curvature: float) -> tuple[list[torch.Tensor], int]:
    """Points after each iteration, and how many gradients it took, driven by the coordinator."""
    size = len(of.best)
    base = torch.zeros(size, dtype=torch.float64)
    point, search, steps, changes = base, None, [], []
    direction = base_gradient = torch.zeros_like(base)
    reached, evaluations = [], 0
    while len(reached) <= iterations:
        gradient = of.gradient(point)
        evaluations += 1
        basis = torch.stack([*steps, *changes, base_gradient, gradient, direction])
        gram = basis @ basis.T
        decision = first(gram) if search is None else decide(gram, search, curvature)
        if isinstance(decision, Turn):
            if decision.keep and search is not None:
                steps, changes = [*steps, search.at * direction], [*changes, gradient - base_gradient]
                steps, changes = steps[-memory:], changes[-memory:]
            base, base_gradient, direction = point, gradient, decision.coefficients @ basis
            reached.append(base)
        search = decision.search
        point = base + search.at * direction
    return reached, evaluations


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_with_an_exact_line_search_a_quadratic_of_n_unknowns_takes_n_iterations_of_two_gradients(size: int) -> None:
    """As conjugate gradients: after n iterations the minimum is reached, and after n - 1 in general not."""
    of = Quadratic(size)
    reached, evaluations = descend(of, size, memory=size, curvature=1e-9)
    far = float(of.best.norm())
    assert float((reached[size] - of.best).norm()) < 1e-7 * far
    if size > 1:
        assert float((reached[size - 1] - of.best).norm()) > 1e-6 * far
    assert evaluations == 2 * size + 1  # a trial and the exact point for each, and the first gradient


def test_every_iteration_goes_down_with_a_loose_line_search_too() -> None:
    of = Quadratic(20, seed=1)
    reached, _ = descend(of, 30, memory=5, curvature=0.9)
    heights = [float((point - of.best) @ of.second @ (point - of.best)) for point in reached]
    assert all(after <= before for before, after in pairwise(heights))
    assert heights[-1] < 1e-6 * heights[0]


def test_two_loops_of_one_pair_are_nocedals_formula() -> None:
    s, y, g = (torch.tensor(each, dtype=torch.float64) for each in ([1.0, 2.0], [3.0, 1.0], [0.5, -1.0]))
    basis = torch.stack([s, y, g])
    units = torch.eye(3, dtype=torch.float64)
    found = two_loops(basis @ basis.T, [(units[0], units[1])], units[2]) @ basis
    rho = 1 / float(s @ y)
    left = torch.eye(2, dtype=torch.float64) - rho * torch.outer(s, y)
    inverse = left @ (torch.eye(2) * float(s @ y) / float(y @ y)).double() @ left.T + rho * torch.outer(s, s)
    assert torch.allclose(found, -inverse @ g)


def test_the_line_search_brackets_and_never_leaves_the_bracket() -> None:
    gram = torch.zeros(3, 3, dtype=torch.float64)
    gram[0, 2] = gram[2, 0] = -1.0  # the first slope
    gram[1, 2] = gram[2, 1] = 5.0  # where it is tried the objective goes up
    further = decide(gram, Search(1.0, low=(0.0, -1.0)), 0.1)
    assert isinstance(further, Further)
    assert further.search.high == (1.0, 5.0)
    assert further.search.at == pytest.approx(1 / 6)
    gram[1, 2] = gram[2, 1] = -0.5
    again = decide(gram, further.search, 0.1)
    assert isinstance(again, Further)
    assert 1 / 6 < again.search.at < 1.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lbfgs:0", "memory=0 must be from 1 to 50"),
        ("lbfgs:memory=51", "memory=51 must be from 1 to 50"),
        ("lbfgs:many", "not a number of pairs"),
        ("lbfgs:curvature=1.5", "curvature=1.5 must be above 0 and below 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        registry.parse(text)
