"""Which way a layer's gradient travels: as factors from worker to worker, or through the servers. Pure.

With n workers, R rows of the whole batch, a matrix of M by N with what is added (P values in all), s workers with samples:

    factors    (n - 1) R (M + N)                every worker sends its rows and errors to every other
    servers    s P - (what each serves itself) + (n - 1) P       gradients up, sums down; 2 (n - 1) P where all have samples
"""

from __future__ import annotations

#: More a layer's factors may not take at once, whatever was asked for: 64 MiB of float32.
MOST_VALUES = 2**24


def chunk(size: int, workers: int, rank: int) -> tuple[int, int]:
    """The part of a vector that this worker serves."""
    return size * rank // workers, size * (rank + 1) // workers


def with_samples(microbatches: int, workers: int) -> tuple[int, ...]:
    """Ranks that the master gives some of so many microbatches."""
    return tuple(
        rank for rank in range(workers) if rank * microbatches // workers < (rank + 1) * microbatches // workers
    )


def server_values(size: int, workers: int, senders: tuple[int, ...]) -> int:
    served = sum(stop - start for start, stop in (chunk(size, workers, rank) for rank in senders))
    return len(senders) * size - served + (workers - 1) * size


def factor_values(rows: float, width: float, workers: int) -> float:
    """`width`: values in the factors of a row."""
    return (workers - 1) * rows * width


def by_factors(way: str, rows: int, width: int, size: int, *, workers: int, senders: tuple[int, ...]) -> bool:
    """`rows`: of the whole batch."""
    if way != "auto" or rows * width > MOST_VALUES:
        return way == "factors" and rows * width <= MOST_VALUES
    return factor_values(rows, width, workers) <= server_values(size, workers, senders)


def most_rows(width: int) -> int:
    """That one worker may send of such a layer: the choice goes by the rows that a sample makes in the mean."""
    return MOST_VALUES // width
