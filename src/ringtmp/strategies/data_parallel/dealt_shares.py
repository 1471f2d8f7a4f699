"""What part of a batch each worker is given: a batch is sliced by `tensor_split`, and its microbatches dealt in order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ringtmp.wire.messages import Work

#: Shares this far apart are the same; sums of them round.
CLOSE = 1e-9


def samples_before(microbatch: int, work: Work) -> int:
    """In its batch."""
    least, longer = divmod(work.samples, max(1, work.microbatches))
    return microbatch * least + min(microbatch, longer)


def shares_dealt(work: Work, workers: Sequence[int]) -> dict[int, float]:
    """To each of these, as whoever got this piece of work can tell: parts of the batch."""
    n, count = len(workers), work.microbatches
    ends = [samples_before(rank * count // n, work) for rank in range(n + 1)]
    return {worker: (ends[rank + 1] - ends[rank]) / work.samples for rank, worker in enumerate(workers)}
