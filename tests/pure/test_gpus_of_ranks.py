"""Which ranks share a GPU, and why NCCL is refused: on paper, no GPU is asked."""

from __future__ import annotations

import pytest

from ringtmp.errors import UsageError
from ringtmp.launch.gpus_of_ranks import check_backend, refuse, shared, told


def test_two_ranks_on_one_gpu_are_refused_nccl_by_name_and_may_use_gloo() -> None:
    gpus = ["GPU-a", "GPU-b", "GPU-a"]
    assert shared(gpus) == {"GPU-a": [0, 2]}
    with pytest.raises(
        UsageError, match=r"rank 0 and rank 2 would share one GPU \(GPU-a\), and NCCL refuses two ranks"
    ):
        refuse("nccl", gpus)
    refuse("gloo", gpus)
    assert told(gpus).startswith("ranks talk over Gloo: tensors pass through the processor's memory")
    assert told(gpus).endswith("rank 0 and rank 2 share one GPU")


def test_nccl_is_refused_without_gpus_and_where_each_rank_has_its_own() -> None:
    with pytest.raises(UsageError, match="needs a GPU for every rank, which rank 1 lacks"):
        refuse("nccl", ["GPU-a", ""])
    with pytest.raises(UsageError, match="no transport over NCCL yet"):
        refuse("nccl", ["GPU-a", "GPU-b"])
    assert shared(["", "", "GPU-a"]) == {}, "processors are not shared GPUs"
    assert told(["", ""]) == ""
    with pytest.raises(UsageError, match="RINGTMP_BACKEND"):
        check_backend("mpi")
