"""Which token comes next: the best, or drawn from those that are allowed, by a seed."""

from __future__ import annotations

import pytest
import torch

from ringtmp.errors import UsageError
from ringtmp.model.next_token import Choice, Chooser, chances

SCORES = torch.tensor([0.0, 2.0, 1.0, -1.0])


@pytest.mark.parametrize("choice", [Choice(), Choice(temperature=0.0, top_k=3), Choice(temperature=1.0, top_k=1)])
def test_the_best(choice: Choice) -> None:
    assert Chooser(choice)(SCORES) == 1


def test_chances_are_those_of_the_scores_at_a_temperature() -> None:
    torch.testing.assert_close(chances(SCORES, Choice(temperature=2.0)), (SCORES.double() / 2).softmax(0))


def test_few_are_left_of_which_the_chances_add_up_to_one_again_when_drawn() -> None:
    assert (chances(SCORES, Choice(top_k=2)) > 0).tolist() == [False, True, True, False]
    assert chances(SCORES, Choice(top_k=2)).sum() == pytest.approx(1.0)
    whole = SCORES.double().softmax(0)  # 0.64, 0.24, 0.09, 0.03 in the order 1, 2, 0, 3
    assert (chances(SCORES, Choice(top_p=0.5)) > 0).tolist() == [False, True, False, False]
    assert (chances(SCORES, Choice(top_p=0.8)) > 0).tolist() == [False, True, True, False]
    assert float(whole[1]) < 0.8 < float(whole[1] + whole[2])
    assert (chances(SCORES, Choice(top_p=1.0)) > 0).all()


def test_the_seed_says_what_is_drawn() -> None:
    def drawn(seed: int) -> list[int]:
        chooser = Chooser(Choice(temperature=1.0, seed=seed))
        return [chooser(SCORES) for _ in range(30)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert set(drawn(1)) > {1}


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_what_is_no_choice(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong)).replace("_", "-")):
        Choice(**wrong)  # type: ignore[arg-type]
