"""A loss is one value with what is known of it; nobody else knows its name."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ringtmp.errors import UsageError
from ringtmp.runtime.losses import LOSSES, LabelRange, Loss, Score, check_loss, is_of_bytes, loss_named


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
    assert (Score(1.0, 1, bytes_model=of_bytes).bits_per_byte is not None) == of_bytes


def test_a_loss_in_one_entry_is_found_checked_and_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "huber", Loss("huber", F.huber_loss, same_shape=True))
    assert float(loss_named("huber")(torch.zeros(2), torch.ones(2))) == 0.5
    with pytest.raises(UsageError, match="loss huber needs outputs and targets of the same shape"):
        check_loss(loss_named("huber"), "huber", torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(UsageError, match="unknown loss 'hubert': did you mean 'huber'"):
        loss_named("hubert")
