"""torch.distributed.pipelining on Gloo: stages of equal measured cost, and any of its schedules.

A schedule for one stage per rank is GPipe or 1F1B (Huang et al. 2019; Narayanan et al. 2019); those for two are the
interleaved ones (Narayanan et al. 2021), the zero-bubble ones (Qi et al. 2023) and DualPipeV (DeepSeek-AI 2025).
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from ringtmp.bench.peers.model_and_batches import Steps, Task, arguments, join, optimizer
from ringtmp.bench.training_runs.speed_cases import stage_ranks


def main() -> None:
    given = arguments(_options)
    rank, ranks = join(given.meet)
    task = Task(given.work)
    holders = stage_ranks(given.layout, ranks)
    bounds = agreed_bounds(task, len(holders), given.microbatches)
    stages = [
        PipelineStage(
            nn.Sequential(OrderedDict(task.layers[slice(*bounds[index])])), index, len(holders), torch.device("cpu")
        )
        for index, holder in enumerate(holders)
        if holder == rank
    ]
    kind: Any = getattr(schedules, given.schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, given.microbatches, loss_fn=task.loss)
    owned = nn.ModuleList([stage.submod for stage in stages])
    sgd = optimizer(owned, task.work.lr)
    steps, last = Steps(), holders[-1]
    for batch in task.batches(1):
        sgd.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = (batch.inputs[0],) if holders[0] == rank else ()
        schedule.step(*inputs, **({"target": batch.targets[0], "losses": losses} if last == rank else {}))
        sgd.step()
        steps.ended(batch, sum(loss.item() for loss in losses) / max(1, len(losses)))
    steps.add_losses()  # only the last stage has any
    # The first rank ends a step last: its backward is the end of the way back.
    if rank == 0:
        steps.print(parameters=task.parameters, bounds=bounds, holders=holders)
    dist.barrier()
    dist.destroy_process_group()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--microbatches", type=int, required=True)


def agreed_bounds(task: Task, stages: int, microbatches: int) -> list[tuple[int, int]]:
    """Rank 0 measures, all cut alike."""
    ends = torch.zeros(stages, dtype=torch.long)
    if dist.get_rank() == 0:
        ends = torch.tensor(even_ends(_costs(task, microbatches), stages))
    dist.broadcast(ends, 0)
    return list(zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True))


def _costs(task: Task, microbatches: int) -> list[float]:
    """Seconds of forward and backward of one microbatch per layer: the best of all layers alike, three times over."""
    best: dict[tuple[object, ...], float] = {}
    for _ in range(3):
        sample, kinds = task.example(-(-task.work.batch_size // microbatches)), []
        for _, layer in task.layers:
            inputs = sample.detach().requires_grad_(sample.is_floating_point())
            began = time.perf_counter()
            outputs = layer(inputs)
            outputs.sum().backward()
            took = time.perf_counter() - began
            layer.zero_grad()
            kinds.append((type(layer), inputs.shape, outputs.shape))
            best[kinds[-1]] = min(best.get(kinds[-1], took), took)
            sample = outputs
    return [best[kind] for kind in kinds]


def even_ends(costs: list[float], pieces: int) -> list[int]:
    """Where each of the adjacent pieces ends, so that the dearest is as cheap as can be; none is empty.

    Dynamic programme over (pieces, layers), O(pieces * layers**2).
    """
    layers = len(costs)
    if pieces > layers:
        raise SystemExit(f"{pieces} stages need as many layers, and the model has {layers}")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: (dearest piece, ends) of the first n layers in as many pieces as rounds so far
    best: dict[int, tuple[float, list[int]]] = {n: (sums[n], [n]) for n in range(1, layers + 1)}
    for piece in range(2, pieces + 1):
        best = {
            n: min((max(best[k][0], sums[n] - sums[k]), [*best[k][1], n]) for k in range(piece - 1, n))
            for n in range(piece, layers + 1)
        }
    return best[layers][1]


if __name__ == "__main__":
    main()
