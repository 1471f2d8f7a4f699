"""A loss is one value with what is known of it; nobody else knows its name."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from ringtmp.data.sample_or_batch import OWN_LOSS
from ringtmp.data.tables_and_streams import Text
from ringtmp.errors import UsageError
from ringtmp.runtime.losses import LOSSES, LabelRange, Loss, Score, TextScore, check_loss, is_of_bytes, loss_named


@pytest.mark.parametrize(
    ("name", "shape", "classes", "of_bytes"),
    [
        ("cross_entropy", (4, 10), 10, False), ("cross_entropy", (4, 3, 5), 3, False), ("cross_entropy", (4,), None, False),
        ("mse", (4, 10), None, False), ("next_byte", (4, 7, 256), 256, True), ("next_byte", (), None, True),
        ("callable", (4, 10), None, False),
    ],
)  # fmt: skip
def test_which_labels_a_loss_takes_follows_from_the_outputs(
    name: str, shape: tuple[int, ...], classes: int | None, of_bytes: bool
) -> None:
    assert LabelRange.of(name, shape).classes == classes
    assert is_of_bytes(name) == of_bytes
    score = Score(bytes_model=of_bytes)
    score.add(1.0, None, torch.zeros(1, 2, dtype=torch.long))
    assert (score.of_text(name, None).bits_per_byte is not None) == of_bytes


def test_scores_of_text_weigh_tokens_and_not_samples() -> None:
    score = Score()
    score.add(1.0, None, torch.tensor([[5, 7, -100, -100]]))  # one is learned: the first never is
    score.add(4.0, None, torch.tensor([[5, 7, 7, 7]]))
    assert score.loss == 2.5
    text = Text("t", 10, torch.tensor([2, 6]))
    told = score.of_text(OWN_LOSS, text)
    assert told.perplexity == pytest.approx(math.exp((1 * 1.0 + 3 * 4.0) / 4))
    assert told.bits_per_byte == pytest.approx((1 * 1.0 + 3 * 4.0) / 8 / math.log(2))
    assert score.of_text(OWN_LOSS, None) == TextScore(), "nobody knows what other labels mean"
    assert score.of_text("callable", text) == TextScore(), "nor what a loss of the user's own is a mean of"
    of_bytes = Score(bytes_model=True)
    of_bytes.add(2.0, None, torch.zeros(3, 4, dtype=torch.long))
    told = of_bytes.of_text("next_byte", None)
    assert (told.perplexity, told.bits_per_byte) == pytest.approx((math.exp(2.0), 2.0 / math.log(2)))
    far = Score(bytes_model=True)
    far.add(1e4, None, torch.zeros(1, 4, dtype=torch.long))
    assert far.of_text("next_byte", None).perplexity is None


def test_a_loss_in_one_entry_is_found_checked_and_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "huber", Loss("huber", F.huber_loss, same_shape=True))
    assert float(loss_named("huber")(torch.zeros(2), torch.ones(2))) == 0.5
    with pytest.raises(UsageError, match="loss huber needs outputs and targets of the same shape"):
        check_loss(loss_named("huber"), "huber", torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(UsageError, match="unknown loss 'hubert': did you mean 'huber'"):
        loss_named("hubert")
