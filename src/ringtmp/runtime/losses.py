"""Losses and scores. They run on the master only, where labels are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ringtmp.data.batches import Batch
from ringtmp.data.sample_or_batch import IGNORED, LABELS, OWN_LOSS
from ringtmp.data.tables_and_streams import Text
from ringtmp.errors import UsageError, unknown
from ringtmp.model.large_cross_entropy import cross_entropy_loss
from ringtmp.model.output_tree import described, field_of

LossFunction = Callable[[Any, torch.Tensor], torch.Tensor]
#: Of a larger loss e to it is no number.
_MOST_NATS = 700.0


@dataclass(frozen=True)
class Loss:
    """A loss by its name, with what is known of it."""

    name: str
    function: LossFunction
    class_dim: int | None = None  # where outputs have a value for every class; None: targets are no classes
    same_shape: bool = False  # outputs and targets must have one shape
    of_model: bool = False  # the model computes it, and it takes whatever the model returns
    of_bytes: bool = False  # of a text's bytes: its scores are told in bits per byte, too

    def __call__(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return self.function(outputs, targets)


def _next_byte(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """(batch, time, 256) logits against (batch, time) bytes."""
    return cross_entropy_loss(outputs.flatten(0, 1), targets.flatten())


def _of_model(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """The model has computed it: its output's `loss`, or its output."""
    value = outputs if isinstance(outputs, torch.Tensor) else field_of(outputs, "loss")
    if not isinstance(value, torch.Tensor) or value.dim():
        raise UsageError(
            f'loss="{OWN_LOSS}" needs a model that returns its loss, as one number or in a field called loss; this one returns '
            f"{described(outputs)}: compute the loss in forward (from {LABELS!r} among its inputs), or give a loss"
        )
    return value


cross_entropy = Loss("cross_entropy", cross_entropy_loss, class_dim=1)
mse = Loss("mse", F.mse_loss, same_shape=True)
next_byte = Loss("next_byte", _next_byte, class_dim=-1, of_bytes=True)
own_loss = Loss(OWN_LOSS, _of_model, of_model=True)
#: To add a loss, write it above and name it here.
LOSSES: dict[str, Loss] = {loss.name: loss for loss in (cross_entropy, mse, next_byte, own_loss)}


def loss_named(name: str) -> Loss:
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    return LOSSES[name]


def is_of_bytes(name: str) -> bool:
    """Of a loss of the user's own nothing is known."""
    return name in LOSSES and LOSSES[name].of_bytes


def class_dim_of(name: str) -> int | None:
    """Where classes lie in what a model returns, samples first; None: this loss is of no classes, or a user's own."""
    return LOSSES[name].class_dim if name in LOSSES else None


def _class_dim(outputs: Any, targets: torch.Tensor, last: bool) -> int | None:
    """Along which dimension of the outputs the classes lie: the second, as for torch's losses, or the last, as for text;
    None where targets are no classes of these outputs."""
    if not isinstance(outputs, torch.Tensor) or targets.is_floating_point() or outputs.dim() != targets.dim() + 1:
        return None
    for dim in (-1, 1) if last else (1, -1):
        if outputs.shape[:dim] + (outputs.shape[dim + 1 :] if dim == 1 else ()) == targets.shape:
            return dim
    return None


@dataclass(frozen=True)
class LabelRange:
    """Which labels a loss over classes takes; `classes` None: any."""

    classes: int | None

    @classmethod
    def of(cls, loss: str, shape: tuple[int, ...]) -> LabelRange:
        """`shape`: of the model's outputs, samples first."""
        dim = LOSSES[loss].class_dim if loss in LOSSES else None
        return cls(None if dim is None or len(shape) <= max(dim, 0) else shape[dim])

    def check(self, targets: torch.Tensor, where: str, numbers: torch.Tensor | None = None) -> None:
        """Refuses a label the model has no output for. `numbers`: the samples' own, counted from 0."""
        if self.classes is None or targets.is_floating_point() or not targets.numel():
            return
        low, high = targets.aminmax()
        if int(low) >= 0 and int(high) < self.classes:
            return
        wrong = ((targets < 0) & (targets != IGNORED)) | (targets >= self.classes)
        if not bool(wrong.any()):
            return
        place = wrong.nonzero()[0]
        label, row = int(targets[tuple(place)]), int(place[0])
        sample = int(numbers[row]) if numbers is not None else row
        raise UsageError(
            f"sample {sample} of {where} has label {label}, and the model has {self.classes} outputs, for labels 0 to "
            f"{self.classes - 1}: {_advice(label, targets.dim())}"
            if label >= 0
            else f"sample {sample} of {where} has label {label}: labels are 0 to {self.classes - 1} ({IGNORED} is ignored)"
        )

    def check_batch(self, batch: Batch, table: str, stream: str) -> None:
        """Samples of a table have numbers of their own; those of a stream count within their batch."""
        first = 0
        for index, targets in enumerate(batch.targets):
            if batch.numbers is not None:
                self.check(targets, table, batch.numbers[index])
            else:
                self.check(targets, stream, torch.arange(first, first + len(targets)))
            first += len(targets)


def _advice(label: int, dimensions: int) -> str:
    if dimensions == 1:
        return f"correct the label, or give the model's last layer {label + 1} outputs"
    return (
        "correct the label, or see that classes are dimension 1 of the outputs, where this loss looks for them (a language "
        "model's are often the last: transpose them, or give a loss of your own)"
    )


@dataclass
class Score:
    """Sums over an evaluation."""

    loss_sum: float = 0.0
    samples: int = 0
    right: int = 0
    guesses: int = 0
    bytes_model: bool = False
    #: Over tokens, if every sample has a label for each of its places.
    token_loss_sum: float = 0.0
    tokens: int = 0

    def add(self, loss: float, outputs: Any, targets: torch.Tensor) -> None:
        count = len(targets)
        self.loss_sum += loss * count
        self.samples += count
        if targets.dim() == 2 and not targets.is_floating_point():
            # A model that computes its own loss shifts the labels, so that the first is not learned.
            tokens = int(((targets if self.bytes_model else targets[:, 1:]) != IGNORED).sum())
            self.token_loss_sum += loss * tokens if tokens else 0.0
            self.tokens += tokens
        if not isinstance(outputs, torch.Tensor) and targets.dim() == 1:
            # With more labels per sample nobody knows whether the model shifts them, as language models do.
            outputs = field_of(outputs, "logits")
        dim = _class_dim(outputs, targets, self.bytes_model)
        if dim is not None:
            counted = targets != IGNORED
            self.right += int(((outputs.argmax(dim) == targets) & counted).sum())
            self.guesses += int(counted.sum())

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.samples)

    @property
    def accuracy(self) -> float | None:
        return self.right / self.guesses if self.guesses else None

    def of_text(self, loss: str, text: Text | None) -> TextScore:
        """What is said of language models; `text`: what is known of the data, if it was read by a tokeniser. Of other data
        nobody knows whether its labels are the tokens that come next, and of a loss of the user's own what it is a mean of."""
        of_tokens = text is not None and loss in LOSSES and LOSSES[loss].of_model
        if not self.tokens or not (self.bytes_model or of_tokens):
            return TextScore()
        per_token = self.token_loss_sum / self.tokens
        count = self.tokens if text is None else int(text.bytes.sum())
        perplexity = math.exp(per_token) if per_token < _MOST_NATS else None
        return TextScore(perplexity, self.token_loss_sum / math.log(2) / count if count else None)


@dataclass(frozen=True)
class TextScore:
    """Of the test part of a text. None: it means nothing, or is beyond all numbers."""

    perplexity: float | None = None  # e to the mean loss of a token
    bits_per_byte: float | None = None  # the loss of all tokens, in bits, by the bytes these tokens stand for


def check_loss(loss: LossFunction, name: str, outputs: Any, targets: torch.Tensor) -> None:
    """Try the loss on a sample: wrong shapes and labels out of range are the user's to know before the start."""
    if isinstance(outputs, torch.Tensor):
        LabelRange.of(name, tuple(outputs.shape)).check(targets, "the data's first samples")
    known = LOSSES.get(name)
    if known is not None and not known.of_model and not isinstance(outputs, torch.Tensor):
        raise UsageError(
            f"loss {name} takes one tensor, and the model returns {described(outputs)}: give a function of what it returns, as "
            "in loss=lambda outputs, targets: F.cross_entropy(outputs.logits, targets)"
        )
    same_shape = known is not None and known.same_shape
    if same_shape and isinstance(outputs, torch.Tensor) and outputs.shape != targets.shape:
        several = outputs.dim() == 2 and targets.dim() == 1 and outputs.shape[1] > 1
        classes = "if the targets are classes, make them whole numbers (targets.long())"
        raise UsageError(
            f"loss {name} needs outputs and targets of the same shape, but they are {tuple(outputs.shape)} and "
            f"{tuple(targets.shape)}: {classes if several else 'reshape the targets'}"
        )
    try:
        value = loss(outputs, targets)
    except UsageError:
        raise
    except Exception as error:  # a callable may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"loss {name} refuses the model's outputs: {reason} (the model returns {described(outputs)})"
        ) from error
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        raise UsageError(f"loss {name} must return one number as a tensor")


def what_to_try_when_not_finite(step: int) -> str:
    """Before the first update no setting of the optimizer can be the cause."""
    if step == 0:
        return (
            "no update has been made yet, so look for numbers that are not finite, or far too large, in the data and in the "
            "weights that training starts from"
        )
    return "try a smaller --lr, --clip-norm or a --lr-schedule with warm-up"
