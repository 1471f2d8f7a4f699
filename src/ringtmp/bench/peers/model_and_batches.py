"""What every peer does alike: the zoo's model, the ring's batches, torch's own SGD, and one line of JSON at the end."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ringtmp.bench.measuring.read_output import PeerSteps
from ringtmp.bench.training_runs.workloads import Workload
from ringtmp.data import source_registry
from ringtmp.data.batches import Batch, TrainingBatches
from ringtmp.data.tables_and_streams import Source
from ringtmp.launch.device_facts import own_addresses
from ringtmp.model import zoo
from ringtmp.model.layers import layers_of, opened_model
from ringtmp.runtime.losses import LossFunction, loss_named
from ringtmp.system.resources import peak_rss_bytes

#: A peer that waits longer for another has lost it.
WAIT_LIMIT_S = 300


def arguments(add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A peer of `ringtmp bench speed`; started by the bench.")
    parser.add_argument("work", type=lambda text: msgspec.json.decode(text, type=Workload), help="a workload, as JSON")
    if add is not None:
        parser.add_argument("--meet", required=True, help="a file that all ranks can reach")
        add(parser)
    return parser.parse_args()


def join(meet: str) -> tuple[int, int]:
    """(rank, ranks) of this process among the lab's devices, with Gloo between them on the lab's own network."""
    torch.set_num_threads(1)
    peers = [pair.partition("=") for pair in os.environ["RINGTMP_PEERS"].split()]
    rank = [name for name, _, _ in peers].index(os.environ["RINGTMP_DEVICE"])
    # Gloo asks the resolver for the host's own name, which no device of a lab has an entry for.
    os.environ["GLOO_SOCKET_IFNAME"] = own_addresses()[os.environ["RINGTMP_ADDRESS"]]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.path.abspath(meet)}",
        rank=rank,
        world_size=len(peers),
        timeout=timedelta(seconds=WAIT_LIMIT_S),
    )
    return rank, len(peers)


class Task:
    """The model, its data and its loss."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self._source: Source = source_registry.load(work.data, work.seed, work.settings)[0]
        self.loss: LossFunction = loss_named(self._source.loss or "cross_entropy")
        made = zoo.build(work.model, self._source.shape, work.settings)
        self.layers: list[tuple[str, nn.Module]] = list(layers_of(opened_model(made, work.seed)))

    @property
    def parameters(self) -> int:
        return sum(each.numel() for _, layer in self.layers for each in layer.parameters())

    def whole(self) -> nn.Sequential:
        return nn.Sequential(OrderedDict(self.layers))

    def example(self, count: int) -> torch.Tensor:
        inputs: torch.Tensor = self._source.example(count)[0]
        return inputs

    def cut_values(self) -> int:
        """Values per sample that leave the largest layer but the last, where nobody cuts."""
        sample, largest = self.example(1), 0
        with torch.no_grad():
            for _, layer in self.layers[:-1]:
                sample = layer(sample)
                largest = max(largest, sample.numel())
        return largest

    def batches(self, pieces: int) -> Iterator[Batch]:
        """Those of the ring with the same seed, each in this many pieces."""
        training = TrainingBatches(self._source, self.work.batch_size, pieces, self.work.seed)
        for step in range(self.work.steps):
            batch = training.batch(step)
            assert batch is not None, "a table has no end"
            yield batch


def optimizer(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr, fused=True)


class Steps:
    """Notes when steps end; prints them."""

    def __init__(self) -> None:
        self._ended_s: list[float] = []
        self._batches: list[Batch] = []
        self._losses: list[float] = []

    def ended(self, batch: Batch, loss: float) -> None:
        self._ended_s.append(time.perf_counter())
        self._batches.append(batch)
        self._losses.append(loss)

    def add_losses(self) -> None:
        """Sum them over all ranks, each of which has noted its part."""
        parts = torch.tensor(self._losses, dtype=torch.float64)
        dist.all_reduce(parts)
        self._losses = parts.tolist()

    def mean_over_ranks(self) -> float:
        """From here on a step ends at the mean of the moments it ended on all ranks, which share a clock. The mean step of the
        slowest rank, in seconds."""
        ended = torch.tensor(self._ended_s, dtype=torch.float64)
        slowest = (ended[-1] - ended[0]) / max(1, len(ended) - 1)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(ended)
        self._ended_s = (ended / dist.get_world_size()).tolist()
        return float(slowest)

    def print(self, **facts: Any) -> None:
        facts["loss"] = {"first": self._losses[0], "last": self._losses[-1]}
        facts |= {"peak_rss_bytes": peak_rss_bytes(), "torch": str(torch.__version__)}
        steps = PeerSteps(
            tuple(self._ended_s),
            tuple(batch.samples for batch in self._batches),
            tuple(batch.epoch for batch in self._batches),
            facts,
        )
        sys.stdout.write(msgspec.json.encode(steps).decode() + "\n")
        sys.stdout.flush()
