"""The honest ceiling: every device does its share of the layers on the whole batch, all at the same time, and nobody talks.

What is lost against one process divided by the cores is the machine's (shared caches and memory, quota periods, interrupts),
not the strategy's. Shares are stages of equal measured cost; what enters and what comes back is made once, before the first
step. A step is the mean over the devices, as if the shares were perfectly equal.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn

from ringtmp.bench.peers.model_and_batches import Steps, Task, arguments, join, optimizer
from ringtmp.bench.peers.pipelining import agreed_bounds


def main() -> None:
    given = arguments(lambda parser: None)
    rank, ranks = join(given.meet)
    task = Task(given.work)
    first, stop = agreed_bounds(task, ranks, 1)[rank]
    entering = _reached(task, first)
    stage = nn.Sequential(OrderedDict(task.layers[first:stop]))
    task.layers.clear()  # the others' shares
    sgd = optimizer(stage, lr=0.0)  # the same work, and weights that stay as they are
    coming_back = torch.randn(stage(entering).shape, generator=torch.Generator().manual_seed(rank)) * 1e-3
    last = rank == ranks - 1
    steps = Steps()
    dist.barrier()
    for batch in task.batches(1):
        sgd.zero_grad()
        leaf = entering.detach().requires_grad_(first > 0 and entering.is_floating_point())
        output = stage(leaf)
        if last:
            task.loss(output, batch.targets[0]).backward()  # type: ignore[no-untyped-call]
        else:
            output.backward(coming_back)
        sgd.step()
        steps.ended(batch, 0.0)
    slowest_s = steps.mean_over_ranks()
    if rank == 0:
        steps.print(slowest_s=slowest_s)
    dist.barrier()
    dist.destroy_process_group()


def _reached(task: Task, layer: int) -> torch.Tensor:
    """What enters this layer for a whole batch."""
    sample = task.example(task.work.batch_size)
    with torch.no_grad():
        for _, each in task.layers[:layer]:
            sample = each(sample)
    return sample


if __name__ == "__main__":
    main()
