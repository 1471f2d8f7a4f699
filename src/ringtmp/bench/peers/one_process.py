"""One process, one thread, the whole batch at once: what "ideal" divides by the cores there are."""

from __future__ import annotations

import torch

from ringtmp.bench.peers.model_and_batches import Steps, Task, arguments, optimizer


def main() -> None:
    torch.set_num_threads(1)
    task = Task(arguments().work)
    cut_values = task.cut_values()
    model = task.whole()
    sgd = optimizer(model, task.work.lr)
    steps = Steps()
    for batch in task.batches(1):
        sgd.zero_grad()
        loss = task.loss(model(batch.inputs[0]), batch.targets[0])
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        steps.ended(batch, loss.item())
    steps.print(parameters=task.parameters, cut_values=cut_values)


if __name__ == "__main__":
    main()
