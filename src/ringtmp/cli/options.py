"""Options that say what to train and how: shared by every verb that needs them, declared once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ringtmp.cli.settings import parse_pairs, parse_schedule


class _Count(click.ParamType[int | str]):
    """A number, or 'auto'."""

    name = "integer"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "auto":
            return "auto"
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor 'auto'", param, ctx)


_DECLARED: tuple[Callable[[Any], Any], ...] = (
    click.argument("config", required=False, type=click.Path(path_type=Path)),
    click.option("--model", help="mlp, convnet, resnet, gpt, FILE.py:factory or package.module:factory.  [mlp]"),
    click.option(
        "--set", "set_", multiple=True, metavar="KEY=VALUE", help="A size of the model: --set depth=8 --set width=256."
    ),
    click.option(
        "--data", help="digits, random:784x10, idx:DIR, npz:FILE, text:PATH, pysource or FILE.py:factory.  [digits]"
    ),
    click.option("--loss", help="cross_entropy, mse or next_byte.  [what fits the data]"),
    click.option("--strategy", help="ring, ps (ps:bsp, ps:async, ps:ssp:3) or allreduce (allreduce:tree).  [ring]"),
    click.option(
        "--with", "with_", multiple=True, metavar="KEY=VALUE", help="A setting of the strategy: see ringtmp strategies."
    ),
    click.option("--nodes", type=int, help="Members of the ring, the master included.  [3]"),
    click.option(
        "--all-devices", is_flag=True, default=None, help="Leave no device out, even one that slows the ring."
    ),
    click.option("--epochs", type=int, help="Passes over the data.  [10]"),
    click.option("--steps", type=int, help="Updates, instead of --epochs."),
    click.option("--batch-size", type=int, help="Samples per update, over all nodes.  [32]"),
    click.option(
        "--microbatches",
        type=_Count(),
        help="Slices of a batch; auto: what the plan finds fastest.  [8, or the batch size if smaller]",
    ),
    click.option("--window", type=int, help="Microbatches in flight at most.  [the plan's]"),
    click.option("--schedule", help="1f1b, gpipe or zero-bubble.  [1f1b]"),
    click.option("--laps", type=int, help="Times the activations go round: so many segments per node.  [1]"),
    click.option("--route", help="ring, or v: out to the last node and back, two segments per node.  [ring]"),
    click.option("--recompute", help="none, all or auto: compute activations again instead of storing them.  [none]"),
    click.option("--cuts", help="Layers per visit, for instance 0-2,3-5,6-7; '-' for a loss-only tail.  [the plan's]"),
    click.option(
        "--rebalance/--no-rebalance", default=None, help="Deal layers anew when devices leave the forecast.  [yes]"
    ),
    click.option("--wire", help="What travels: float32, bfloat16, float16 or int8.  [float32]"),
    click.option(
        "--staleness", type=int, help="1: gradients at the weights one update ago, so that steps overlap.  [0]"
    ),
    click.option(
        "--threads",
        type=int,
        help="Threads per node, the same on all.  [1; of devices that join, the smallest number of cores]",
    ),
    click.option("--optimizer", help="sgd, adam or adamw.  [adam]"),
    click.option("--lr", type=float, help="Learning rate.  [0.1 for sgd, 0.002 else]"),
    click.option(
        "--opt", multiple=True, metavar="KEY=VALUE", help="An optimizer setting: --opt momentum=0.9 --opt nesterov=yes."
    ),
    click.option("--lr-schedule", help="constant, step:every=N,factor=F or cosine:warmup=N,floor=F.  [constant]"),
    click.option("--clip-norm", type=float, help="Clip gradients to this global norm."),
    click.option(
        "--early-stop", type=int, metavar="EPOCHS", help="Stop after this many epochs without a better test loss."
    ),
    click.option("--seed", type=int, help="Of weights, batches and dropout.  [0]"),
    click.option("--checkpoint-every", type=int, metavar="STEPS", help="[at the end of epochs, at most every 30 s]"),
    click.option("--protect", help="Of a lost node: auto, memory, disk, checkpoint or off.  [auto]"),
    click.option(
        "--stream-keep", help="Batches of a stream, until a checkpoint: in memory, on disk or none.  [memory]"
    ),
    click.option("--notice", "notice_s", type=float, metavar="S", help="Seconds until a silent node is lost.  [3]"),
)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds CONFIG and every option that becomes a setting of the run; the verb's own options go below."""
    for declare in reversed(_DECLARED):
        function = declare(function)
    return function


def flags(given: dict[str, Any]) -> dict[str, Any]:
    """The options a user gave, ready for `settings.build`; `given` has what `run_options` declared, less CONFIG."""
    rest = dict(given)
    set_, with_, opt = rest.pop("set_"), rest.pop("with_"), rest.pop("opt")
    lr, lr_schedule = rest.pop("lr"), rest.pop("lr_schedule")
    found = {name: value for name, value in rest.items() if value is not None}
    if with_:
        found["with"] = parse_pairs("--with", with_)
    if set_:
        found["set"] = parse_pairs("--set", set_)
    if opt or lr is not None:
        found["opt"] = parse_pairs("--opt", opt) | ({"lr": lr} if lr is not None else {})
    if lr_schedule is not None:
        found["lr_schedule"] = parse_schedule(lr_schedule)
    return found
