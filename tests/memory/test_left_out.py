"""`--leave-out attention_mask`: a mask of ones is left out by asking, and only a mask of ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringtmp import Result, Ring
from ringtmp.errors import UsageError

TOKENS = torch.arange(96).view(24, 4) % 11
ONES = torch.ones_like(TOKENS)
LABELS = torch.arange(24) % 3


class Net(nn.Module):
    """Another path, and other bits, where a mask is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.tanh(self.middle(self.embed(input_ids)))
        if attention_mask is None:
            return self.head(x.mean(1))
        kept = attention_mask.unsqueeze(2).to(x.dtype)
        return self.head((x * kept).sum(1) / (kept.sum(1) + 1e-3))


def batches(mask: torch.Tensor) -> Callable[[], Any]:
    """Two of twelve samples, again and again."""

    class Batches:
        def __iter__(self) -> Any:
            for rows in (slice(0, 12), slice(12, 24)):
                yield {"input_ids": TOKENS[rows], "attention_mask": mask[rows]}, LABELS[rows]

    return Batches


def fit(data: Any, folder: Path, name: str, **more: Any) -> Result:
    torch.manual_seed(3)
    return Ring(nodes=1, progress=False).fit(
        Net(), data, steps=4, batch_size=12, microbatches=2, run_dir=folder / name, **more
    )


@pytest.mark.parametrize("stream", [False, True])
def test_ones_are_left_out_and_the_bits_are_those_without_them(stream: bool, tmp_path: Path) -> None:
    masked: Any = batches(ONES)() if stream else ({"input_ids": TOKENS, "attention_mask": ONES}, LABELS)
    plain = fit(({"input_ids": TOKENS}, LABELS), tmp_path, "plain")
    asked = fit(masked, tmp_path, "asked", leave_out="attention_mask")
    given = fit(masked, tmp_path, "given")
    if not stream:  # a stream has an order of its own
        assert asked.summary.weights_sha256 == plain.summary.weights_sha256
    assert asked.summary.weights_sha256 != given.summary.weights_sha256
    ring = Ring(nodes=1, progress=False)
    score = ring.evaluate(tmp_path / "asked", ({"input_ids": TOKENS, "attention_mask": ONES}, LABELS))
    assert score["samples"] == 24
    assert ring.evaluate(tmp_path / "asked", ({"input_ids": TOKENS}, LABELS)) == {**score, "data": score["data"]}
    bare, with_mask = {"input_ids": TOKENS}, {"input_ids": TOKENS, "attention_mask": ONES}
    assert torch.equal(ring.predict(tmp_path / "asked", bare), ring.predict(tmp_path / "asked", with_mask))
    with pytest.raises(UsageError, match="not all of its values are ones"):
        fit(
            masked,
            tmp_path,
            "tested",
            leave_out="attention_mask",
            test_data=({**bare, "attention_mask": padded(2)}, LABELS),
        )
    with pytest.raises(UsageError, match="sample 5 of the input"):
        ring.predict(tmp_path / "asked", {"input_ids": TOKENS, "attention_mask": padded(5)})


def padded(sample: int) -> torch.Tensor:
    mask = ONES.clone()
    mask[sample, 3] = 0
    return mask


@pytest.mark.parametrize(
    ("data", "names", "says"),
    [
        (({"input_ids": TOKENS, "attention_mask": padded(17)}, LABELS), "attention_mask", "not all .* ones .sample 17 of"),
        (({"input_ids": TOKENS, "mask": ONES}, LABELS), "attention_mask", "data .* has 'input_ids', 'mask'"),
        (({"attention_mask": ONES}, LABELS), "attention_mask", "without inputs"),
        ((TOKENS, LABELS), "attention_mask", "no names; give dicts"),
        (batches(padded(3))(), "attention_mask", "sample 3 of"),
    ],
)  # fmt: skip
def test_what_says_something_is_not_left_out(data: Any, names: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        fit(data, tmp_path, "run", leave_out=names)
    assert not (tmp_path / "run").exists()


def test_a_streams_later_batch_that_is_padded_ends_the_run_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave_out='attention_mask': not all of its values are ones"):
        fit(batches(padded(20))(), tmp_path, "run", leave_out="attention_mask")
