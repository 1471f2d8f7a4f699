"""All-reduce whose sums are made by the transport's library: what goes on around them is as with our own sums."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtmp import api
from ringtmp.config import KeepPart, RingPart, RunConfig, TrainingPart
from ringtmp.data.tables_and_streams import tensors
from ringtmp.errors import UsageError
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics import events
from ringtmp.transport.base import Transport, TransportWrapper
from test_training_loop import blobs, stack

NODES = 2


class Library:
    """Sums over all nodes of this process, in the order of nodes; a sum comes one question late."""

    def __init__(self) -> None:
        self.given: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        self.ready: list[deque[Any]] = [deque() for _ in range(NODES)]

    def start(self, node: int, name: tuple[int, int], vector: torch.Tensor) -> None:
        given = self.given.setdefault(name, {})
        assert node not in given, "a sum was started twice"
        given[node] = vector
        if len(given) == NODES:
            del self.given[name]
            total = given[0] + given[1]
            for each, mine in given.items():
                mine.copy_(total)
                self.ready[each].append((name, mine))


class Sums:
    ranks = NODES

    def __init__(self, library: Library, node: int) -> None:
        self._library, self._node = library, node

    def start(self, name: tuple[int, int], vector: torch.Tensor) -> None:
        self._library.start(self._node, name, vector)

    def there(self) -> list[Any]:
        ready = self._library.ready[self._node]
        return [ready.popleft()] if ready else []


class Summing(TransportWrapper):
    def __init__(self, inner: Transport, library: Library) -> None:
        super().__init__(inner)
        self.sums = Sums(library, inner.node)


class Ranks(InMemoryPool):
    ranks_of_torch = True


def trained(folder: Path, algorithm: str, pool: InMemoryPool, **training: Any) -> api.Result:
    base = {"epochs": 2, "batch_size": 16, "microbatches": 4, "optimizer": "adamw", "optimizer_settings": {"lr": 0.01}}
    config = RunConfig(
        training=TrainingPart(data="given", **{**base, **training}),
        ring=RingPart(nodes=NODES, strategy="allreduce", strategy_settings={"algorithm": algorithm}, all_devices=True),
        keep=KeepPart(checkpoint_every=4),
    )  # fmt: skip
    data = tensors("t", *blobs(90)), tensors("t", *blobs(30))
    return api.start(config, stack(), data, None, run_dir=folder, pool=pool)


def by_library(folder: Path, **training: Any) -> api.Result:
    library = Library()
    return trained(folder, "torch", Ranks(NODES, seed=3, wrap=lambda inner: Summing(inner, library)), **training)


@pytest.mark.parametrize("training", [{}, pytest.param({"clip_norm": 0.5}, marks=pytest.mark.long)])
def test_of_two_nodes_the_bits_are_those_of_our_own_sums(training: dict[str, Any], tmp_path: Path) -> None:
    ours = trained(tmp_path / "ours", "ring", InMemoryPool(NODES, seed=1), **training).summary
    found = by_library(tmp_path / "torch", **training)
    assert found.summary.weights_sha256 == ours.weights_sha256 is not None
    assert found.summary.exactness == ours.exactness
    most = max(each.bytes_sent for each in ours.per_node)  # the other's last part left after its last step was told of
    assert [each.bytes_sent for each in found.summary.per_node] == [most, most], "as many bytes as a ring sends"
    steps = [each for each in events.read(found.run_dir / "events.jsonl") if isinstance(each, events.NodeStep)]
    assert {each.node for each in steps} == {0, 1}
    assert min(each.sent_bytes for each in steps) > 0


def test_nodes_that_torch_has_not_started_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="allreduce with algorithm=torch: torch.distributed makes the sums"):
        trained(tmp_path / "run", "torch", InMemoryPool(NODES))
    assert not (tmp_path / "run").exists()
