"""Which ranks share a GPU, and what their messages go over. Pure: what every rank said of its GPU in, words out.

Messages and sums go over Gloo, in the processor's memory, wherever ranks compute; so two ranks may share a GPU. NCCL, which
moves tensors from one GPU to another, takes one rank for each GPU alone, and there is no transport for it here yet: whoever
asks for it (RINGTMP_BACKEND=nccl) hears why not.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringtmp.errors import UsageError, unknown

GLOO, NCCL = "gloo", "nccl"
#: The environment variable that says what ranks talk over.
ASKED = "RINGTMP_BACKEND"


def check_backend(asked: str) -> None:
    if asked not in (GLOO, NCCL):
        raise unknown(ASKED, asked, (GLOO,))


def shared(gpus: Sequence[str]) -> dict[str, list[int]]:
    """The ranks of every GPU that several have. `gpus`: what each rank's is called by its maker, everywhere another name;
    empty: it has none."""
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        if gpu:
            ranks.setdefault(gpu, []).append(rank)
    return {gpu: found for gpu, found in ranks.items() if len(found) > 1}


def refuse(backend: str, gpus: Sequence[str]) -> None:
    """UsageError where these ranks cannot talk over what was asked for."""
    if backend == GLOO:
        return
    instead = f"leave {ASKED} out: messages then go over Gloo, through the processor's memory"
    if without := [rank for rank, gpu in enumerate(gpus) if not gpu]:
        raise UsageError(
            f"{ASKED}={NCCL} needs a GPU for every rank, which {_named(without)} lack{'s' * (len(without) == 1)} (--device "
            f"cuda lets ranks compute on GPUs); {instead}"
        )
    if both := shared(gpus):
        gpu, ranks = next(iter(both.items()))
        raise UsageError(
            f"{_named(ranks)} would share one GPU ({gpu}), and NCCL refuses two ranks there: start one rank for each GPU "
            f"(--nproc-per-node), or {instead}; two stages on one GPU in one process are --nodes 1 --laps 2"
        )
    raise UsageError(f"{ASKED}={NCCL}: there is no transport over NCCL yet; {instead}")


def told(gpus: Sequence[str]) -> str:
    """For people; empty where nobody computes on a GPU."""
    if not any(gpus):
        return ""
    both = [f"{_named(ranks)} share one GPU" for ranks in shared(gpus).values()]
    return "; ".join(["ranks talk over Gloo: tensors pass through the processor's memory, not from GPU to GPU", *both])


def _named(ranks: Sequence[int]) -> str:
    names = [f"rank {each}" for each in ranks]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
