"""Predictions of several models as one, the weights of stacking, and who learns from which sample."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ringtmp.model.ensemble import combined, equal_weights, stacking_weights
from ringtmp.strategies.ensemble.bags import counts, pieces
from ringtmp.strategies.ensemble.combining_leader import fit


def logits(*rows: tuple[float, ...]) -> torch.Tensor:
    """Of these probabilities, and not normalised."""
    return torch.tensor(rows).log() + 3.0


def test_the_mean_is_of_probabilities_whatever_each_adds_to_its_outputs() -> None:
    together = combined([logits((0.9, 0.1)), logits((0.2, 0.8)) - 7], equal_weights(2), "mean", 1)
    assert torch.allclose(together.exp(), torch.tensor([[0.55, 0.45]]))
    assert F.cross_entropy(together, torch.tensor([1])).item() == pytest.approx(-torch.tensor(0.45).log().item())


def test_classes_in_the_last_of_three_dimensions_and_numbers_that_are_no_classes() -> None:
    one, two = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    likely = (one.softmax(-1) + two.softmax(-1)) / 2
    assert torch.allclose(combined([one, two], equal_weights(2), "mean", -1).exp(), likely)
    voted = combined([one, one, two], equal_weights(3), "vote", -1)
    assert voted.shape == one.shape
    assert torch.equal(voted.argmax(-1), one.argmax(-1))
    assert torch.allclose(combined([one, two], torch.tensor([0.25, 0.75]), "stacking", None), one / 4 + two * 3 / 4)


def test_a_vote_is_one_for_each_and_the_mean_breaks_ties() -> None:
    sure, doubtful = (0.05, 0.9, 0.05), (0.4, 0.35, 0.25)
    voted = combined([logits(doubtful), logits(doubtful), logits(sure)], equal_weights(3), "vote", 1)
    assert voted.argmax(1).item() == 0, "the mean alone would say 1"
    assert voted.exp().sum().item() == pytest.approx(1)
    assert combined([logits(doubtful), logits(sure)], equal_weights(2), "vote", 1).argmax(1).item() == 1


def test_stacking_finds_the_mixture_with_the_least_loss() -> None:
    torch.manual_seed(0)
    right, other = torch.randn(500, 1), torch.randn(500, 1)
    wanted = 0.3 * right + 0.7 * other
    found = stacking_weights(lambda share: F.mse_loss(combined([right, other], share, "stacking", None), wanted), 2)
    assert found.tolist() == pytest.approx([0.3, 0.7], abs=1e-3)


def test_a_sample_that_a_member_knows_by_heart_says_nothing_of_its_weight() -> None:
    """Member 0 has the right answer for its own samples alone, which are two thirds; elsewhere it guesses."""
    torch.manual_seed(0)
    targets = torch.randint(0, 4, (300,))
    known = F.one_hot(targets, 4) * 20.0
    guess = torch.randn(300, 4)
    good = known * 0.1 + torch.randn(300, 4)
    mine = torch.arange(300) % 3 > 0
    first = torch.where(mine[:, None], known, guess)
    fresh = torch.stack([~mine, torch.ones(300, dtype=torch.bool), torch.ones(300, dtype=torch.bool)], 1)
    honest = fit([first, good, good], targets, fresh, F.cross_entropy, 1)
    fooled = fit([first, good, good], targets, torch.ones_like(fresh), F.cross_entropy, 1)
    assert honest[0] < 0.1 < fooled[0]
    assert fit([first, good, good], targets, torch.zeros_like(fresh), F.cross_entropy, 1).equal(equal_weights(3))


def test_every_sample_is_in_one_shard_and_in_a_bootstrap_about_once() -> None:
    numbers = torch.arange(9000)
    shards = torch.stack([counts(numbers, member, 3, "shard", 7) for member in range(3)])
    assert bool((shards.sum(0) == 1).all())
    bags = [counts(numbers, member, 3, "bootstrap", 7) for member in range(3)]
    for bag in bags:  # Poisson: mean 1, variance 1, and 37 % are left out
        assert bag.double().mean().item() == pytest.approx(1, abs=0.04)
        assert bag.double().var().item() == pytest.approx(1, abs=0.08)
        assert (bag == 0).double().mean().item() == pytest.approx(0.368, abs=0.02)
    assert not bags[0].equal(bags[1])
    assert bags[0].equal(counts(numbers, 0, 5, "bootstrap", 7)), "whoever else there is"
    assert bags[0][40:50].equal(counts(numbers[40:50], 0, 3, "bootstrap", 7)), "whichever samples come with it"
    assert not bags[0].equal(counts(numbers, 0, 3, "bootstrap", 8))


def test_a_bag_is_cut_into_pieces_none_of_which_is_too_small() -> None:
    assert pieces(10, 4, 1) == (3, 3, 2, 2)
    assert pieces(5, 4, 2) == (3, 2)
    assert pieces(1, 4, 2) == () == pieces(0, 4, 1)
