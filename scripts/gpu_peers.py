"""Plain PyTorch beside a ring on a GPU. scripts/measure_gpu.py starts these in a folder with mine.py (model and data)."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import gpu_profile

RATE, SEED = 3e-4, 0


def layers() -> list[tuple[str, nn.Module]]:
    torch.manual_seed(SEED)
    return list(mine().model())


def mine() -> Any:
    """The file that measure_gpu.py has written here."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module("mine")


def batches(asked: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    (inputs, targets), _ = mine().data()
    draw = torch.Generator().manual_seed(SEED)
    for _ in range(asked["steps"]):
        chosen = torch.randperm(len(inputs), generator=draw)[: asked["batch"]]
        yield inputs[chosen], targets[chosen]


def autocast(asked: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    if asked["compute"] == "float32":
        return contextlib.nullcontext()
    return torch.autocast(asked["device"], torch.bfloat16)


def settle(asked: dict[str, Any]) -> None:
    """As a run has it: full float32 products, where products are float32."""
    if asked["device"] == "cuda":
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def one_process(asked: dict[str, Any]) -> None:
    """The model and its loss compiled as one; the loss is read once a step."""
    settle(asked)
    model = nn.Sequential(OrderedDict(layers())).to(asked["device"])
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with autocast(asked):
            return cross_entropy(model(inputs), targets)

    compiled: Callable[..., torch.Tensor] = torch.compile(loss_of, dynamic=False) if asked["compile"] else loss_of
    steps_s, count, total = [], asked["microbatches"], 0.0
    for number, (inputs, targets) in enumerate(batches(asked)):
        if number == asked.get("profiled"):
            watch = gpu_profile.Watch().start()
        began = time.perf_counter()
        losses = []
        inputs, targets = inputs.to(asked["device"]), targets.to(asked["device"])
        for piece, wanted in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = compiled(piece, wanted) / count
            loss.backward()
            losses.append(loss.detach())
        adamw.step()
        adamw.zero_grad()
        total = float(torch.stack(losses).sum())
        steps_s.append(time.perf_counter() - began)
        if number == asked.get("profiled"):
            print(json.dumps(watch.stop(1)), file=sys.stderr)
    parameters = sum(each.numel() for each in model.parameters())
    print(json.dumps({"steps_s": steps_s, "loss": total, "parameters": parameters}))


class OnDevice(nn.Module):
    """A stage on the device between tensors in the processor's memory, which are what Gloo sends."""

    def __init__(self, stage: nn.Module, asked: dict[str, Any]) -> None:
        super().__init__()
        self.stage, self.asked = stage.to(asked["device"]), asked
        self.call: Callable[..., torch.Tensor] = torch.compile(stage, dynamic=False) if asked["compile"] else stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(self.asked):
            return self.call(x.to(self.asked["device"])).to("cpu")


class Tail(OnDevice):
    """With the loss, of which alone a number has to leave the device: a row of it for each sample, as a stage must give."""

    targets: Iterator[torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(self.asked):
            outputs = self.call(x.to(self.asked["device"]))
            loss = cross_entropy(outputs, next(self.targets).to(self.asked["device"]))
        return loss.expand(len(x)).to("cpu")


def pipelining(asked: dict[str, Any]) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    settle(asked)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), asked["microbatches"]
    made = layers()
    own = nn.Sequential(OrderedDict(made[: asked["first"]] if rank == 0 else made[asked["first"] :]))
    module: Any = OnDevice(own, asked) if rank == 0 else Tail(own, asked)
    rows = asked["batch"] // count
    # What crosses is the sum of the residual stream, float32 under autocast, too.
    tokens = torch.zeros(rows, asked["context"], dtype=torch.int64)
    between = torch.zeros(rows, asked["context"], asked["width"], requires_grad=True)
    enters, leaves = (tokens, between) if rank == 0 else (between, torch.zeros(rows, requires_grad=True))
    with first_shapes(module, rank):
        stage = PipelineStage(module, rank, 2, torch.device("cpu"), input_args=(enters,), output_args=(leaves,))
    schedule = Schedule1F1B(stage, count, loss_fn=lambda losses, _: losses.mean())
    adamw = torch.optim.AdamW(own.parameters(), lr=RATE, fused=True)
    steps_s, total = [], 0.0
    for inputs, targets in batches(asked):
        began = time.perf_counter()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            module.targets = iter(targets.chunk(count))
            schedule.step(target=torch.zeros(asked["batch"]), losses=losses)
        adamw.step()
        adamw.zero_grad()
        if asked["device"] == "cuda":
            torch.cuda.synchronize()
        total = sum(float(each.detach()) for each in losses) / max(1, len(losses))
        steps_s.append(time.perf_counter() - began)
    if rank == 1:  # it alone has a loss, and it waits for the other in every step
        print(json.dumps({"steps_s": steps_s, "loss": total}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def first_shapes(module: Any, rank: int) -> Iterator[None]:
    """Where a stage tries its module on the shapes it was given, there is a target for it."""
    if rank == 1:
        (_, targets), _ = mine().data()
        module.targets = iter(targets.split(1))
    yield


PEERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "_base": one_process, "_pipelining": pipelining, "_profiled": gpu_profile.ring,
}  # fmt: skip
