"""torch's DistributedDataParallel on Gloo: every rank the whole model and its share of the batch, gradients all-reduced
in buckets while backward still runs (Li et al., VLDB 2020)."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringtmp.bench.peers.model_and_batches import Steps, Task, arguments, join, optimizer


def main() -> None:
    given = arguments(lambda parser: None)
    rank, ranks = join(given.meet)
    task = Task(given.work)
    model = DistributedDataParallel(task.whole(), gradient_as_bucket_view=True)
    sgd = optimizer(model, task.work.lr)
    steps = Steps()
    for batch in task.batches(ranks):
        sgd.zero_grad()
        # DistributedDataParallel means the ranks' gradients; a rank's share of a batch weighs what it holds of it.
        loss = task.loss(model(batch.inputs[rank]), batch.targets[rank]) * (batch.weights[rank] * ranks)
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        steps.ended(batch, loss.item() / ranks)
    steps.add_losses()
    if rank == 0:
        steps.print(parameters=task.parameters)
    # Rank 0 prints before anybody leaves: a rank that goes first breaks the others' connections.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
