"""Several models as one: their predictions are combined. Pure arithmetic on what each of them returns.

    mean      the mean of their probabilities where outputs have a value for every class, else of their outputs
    vote      each has one vote, for its largest output; what the mean says breaks ties
    stacking  a weighted mean, weights as they were learned

Probabilities are returned as logarithms, so that whatever takes a model's outputs takes these: their largest is the class, and
`cross_entropy` of them is the combined prediction's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from ringtmp.errors import UsageError
from ringtmp.model.output_tree import described

Combine = Literal["mean", "vote", "stacking"]
#: Steps of the search for weights; it ends sooner where they no longer change.
STACKING_STEPS = 50


def combined(
    outputs: Sequence[torch.Tensor], weights: torch.Tensor, how: Combine, class_dim: int | None
) -> torch.Tensor:
    """Of the same samples, from every member. `weights` add up to 1; `class_dim`: where classes lie, None: they are none."""
    stacked = torch.stack(list(outputs))
    dim = None if class_dim is None else class_dim % (stacked.dim() - 1) + 1
    shares = weights.to(stacked.dtype).reshape(-1, *[1] * (stacked.dim() - 1))
    if dim is None:
        return (stacked * shares).sum(0)
    likely = (stacked.log_softmax(dim) + shares.log()).logsumexp(0)
    if how != "vote":
        return likely
    count = stacked.shape[dim]
    votes = nn.functional.one_hot(stacked.argmax(dim), count).sum(0).movedim(-1, dim - 1)
    ties = likely.exp().clamp_min(torch.finfo(likely.dtype).tiny)
    return ((votes + ties) / (len(stacked) + 1)).log()


def equal_weights(members: int) -> torch.Tensor:
    return torch.full((members,), 1 / members)


def stacking_weights(
    loss: Callable[[torch.Tensor], torch.Tensor], members: int, steps: int = STACKING_STEPS
) -> torch.Tensor:
    """Weights, none below 0 and 1 in all, where `loss` of them is least."""
    free = torch.zeros(members, requires_grad=True)
    search = torch.optim.LBFGS([free], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        search.zero_grad()
        value = loss(free.softmax(0))
        value.backward()  # type: ignore[no-untyped-call]
        return value

    try:
        with torch.enable_grad():
            search.step(closure)  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # models that have gone astray: a step is longer than float32 can say
        if "overflow" not in str(error):
            raise
        return equal_weights(members)
    found = free.detach().softmax(0)
    return found if bool(found.isfinite().all()) else equal_weights(members)


def one_tensor(output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise UsageError(
            f"predictions of several models are combined where each is one tensor; this model returns {described(output)}"
        )
    return output


class Ensemble(nn.Module):
    """Called as each of its members is; returns what they say together."""

    weights: torch.Tensor

    def __init__(
        self, members: Sequence[nn.Module], weights: torch.Tensor, how: Combine, class_dim: int | None
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer("weights", weights)
        self.how = how
        self.class_dim = class_dim

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        found = [one_tensor(each(*inputs, **named)) for each in self.members]
        return combined(found, self.weights, self.how, self.class_dim)
