"""Options that say what to train and how: shared by every verb that needs them, declared once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ringtmp.config import parse_pairs, parse_schedule
from ringtmp.errors import UsageError, nearest


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


Declared = Callable[[Any], Any]
CONFIG: Declared = click.argument("config", required=False, type=click.Path(path_type=Path))
#: Every option that becomes a setting of the run, under the heading it has in --help.
GROUPS: dict[str, tuple[Declared, ...]] = {
    "Model and data": (
        click.option("--model", help="mlp, convnet, resnet, gpt, FILE.py:factory or package.module:factory.  [mlp]"),
        click.option(
            "--set", "set_", multiple=True, metavar="KEY=VALUE", help="A setting of the model: --set depth=8 --set width=256."
        ),
        click.option(
            "--data", help="digits, random:784x10, idx:DIR, npz:FILE, text:PATH, pysource or FILE.py:factory.  [digits]"
        ),
        click.option("--loss", help="cross_entropy, mse or next_byte.  [what fits the data]"),
    ),
    "Training": (
        click.option("--epochs", type=int, help="Passes over the data.  [10]"),
        click.option("--steps", type=int, help="Updates, instead of --epochs."),
        click.option("--batch-size", type=int, help="Samples per update, over all nodes.  [32]"),
        click.option(
            "--microbatches",
            type=_Count(),
            help="Slices of a batch; auto: what the plan finds fastest.  [8, or the batch size if smaller]",
        ),
        click.option("--optimizer", help="sgd, adam or adamw.  [adam]"),
        click.option("--lr", type=float, help="Learning rate.  [0.1 for sgd, otherwise 0.002]"),
        click.option(
            "--opt", multiple=True, metavar="KEY=VALUE", help="An optimizer setting: --opt momentum=0.9 --opt nesterov=yes."
        ),
        click.option("--lr-schedule", help="constant, step:every=N,factor=F or cosine:warmup=N,floor=F.  [constant]"),
        click.option("--clip-norm", type=float, help="Clip gradients to this global norm."),
        click.option(
            "--early-stop", type=int, metavar="EPOCHS", help="Stop after this many epochs without a better test loss."
        ),
        click.option("--seed", type=int, help="Random seed for weights, batches and dropout.  [0]"),
        click.option(
            "--staleness", type=int, help="1: gradients at the weights one update ago, so that steps overlap.  [0]"
        ),
    ),
    "Nodes": (
        click.option("--strategy", help="ring, ps (ps:bsp, ps:async, ps:ssp:3) or allreduce (allreduce:tree).  [ring]"),
        click.option(
            "--with", "with_", multiple=True, metavar="KEY=VALUE", help="A setting of the strategy: see ringtmp strategies."
        ),
        click.option("--nodes", type=int, help="Members of the ring, the master included.  [3]"),
        click.option(
            "--all-devices", is_flag=True, default=None, help="Leave no device out, even one that slows the ring."
        ),
        click.option(
            "--threads",
            type=int,
            help="Threads per node, the same on all.  [1; of devices that join, the smallest number of cores]",
        ),
        click.option(
            "--rebalance/--no-rebalance", default=None, help="Move layers when devices turn out slower or faster.  [yes]"
        ),
    ),
    "How the ring runs (most people leave these to the plan)": (
        click.option("--cuts", help="Layers per visit, for instance 0-2,3-5,6-7; '-' for a loss-only tail.  [the plan's]"),
        click.option("--window", type=int, help="Microbatches in flight at most.  [the plan's]"),
        click.option("--schedule", help="1f1b, gpipe or zero-bubble.  [1f1b]"),
        click.option("--laps", type=int, help="How often activations go round: so many segments per node.  [1]"),
        click.option("--route", help="ring, or v: out to the last node and back, two segments per node.  [ring]"),
        click.option("--recompute", help="none, all or auto: compute activations again instead of storing them.  [none]"),
        click.option("--wire", help="What travels: float32, bfloat16, float16 or int8.  [float32]"),
    ),
    "Safety": (
        click.option(
            "--checkpoint-every", type=int, metavar="STEPS",
            help="Steps between checkpoints.  [at the end of epochs, at most every 30 s]",
        ),
        click.option("--protect", help="How a lost node's layers are kept: auto, memory, disk, checkpoint or off.  [auto]"),
        click.option(
            "--stream-keep", help="Where batches of a stream stay until a checkpoint: memory, disk or none.  [memory]"
        ),
        click.option("--notice", "notice_s", type=float, metavar="S", help="Seconds until a silent node is lost.  [3]"),
    ),
}  # fmt: skip

#: What people call an option elsewhere.
_ELSEWHERE = {
    "--learning-rate": "--lr", "--batch": "--batch-size", "--bs": "--batch-size", "--workers": "--nodes",
    "--num-nodes": "--nodes", "--world-size": "--nodes", "--processes": "--nodes", "--dataset": "--data",
    "--optim": "--optimizer", "--num-epochs": "--epochs", "--max-steps": "--steps", "--iterations": "--steps",
    "--output": "--run-dir", "--out": "--run-dir", "--output-dir": "--run-dir", "--random-seed": "--seed",
    "--momentum": "--opt momentum=…", "--weight-decay": "--opt weight_decay=…", "--grad-clip": "--clip-norm",
    "--width": "--set width=…", "--depth": "--set depth=…", "--dropout": "--set dropout=…", "--dtype": "--wire",
}  # fmt: skip


class RunCommand(click.Command):
    """A verb with the options of a run: --help shows them in groups, and an unknown option gets the one that was meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = {name for each in self.params if isinstance(each, click.Option) for name in each.opts}
            meant = _ELSEWHERE.get(error.option_name)
            if meant is None or meant.split()[0] not in known:
                meant = nearest(error.option_name, known)
            hint = f"did you mean {meant}? " if meant else ""
            raise UsageError(f"no option {error.option_name}: {hint}see ringtmp {self.name} --help") from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        group_of = {name: title for title, declared in GROUPS.items() for name in _names(declared)}
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in (*GROUPS, _REST)}
        for each in self.get_params(ctx):
            if (record := each.get_help_record(ctx)) is not None:
                sections[group_of.get(each.name or "", _REST)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_REST = "This command"


def _names(declared: tuple[Declared, ...]) -> list[str]:
    """The parameter names that options declare."""

    def nothing() -> None: ...

    for declare in declared:
        declare(nothing)
    parameters: list[click.Parameter] = getattr(nothing, "__click_params__")  # noqa: B009
    return [each.name or "" for each in parameters]


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds CONFIG and every option that becomes a setting of the run; the verb's own options go below."""
    for declare in reversed([CONFIG, *(each for declared in GROUPS.values() for each in declared)]):
        function = declare(function)
    return function


def flags(given: dict[str, Any]) -> dict[str, Any]:
    """The options a user gave, ready for `settings.build`; `given` has what `run_options` declared, less CONFIG."""
    rest = _flag_wins(dict(given))
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


def _flag_wins(given: dict[str, Any]) -> dict[str, Any]:
    """Of epochs and steps, the one on the command line takes the place of the other in the environment."""
    if given["epochs"] is not None and given["steps"] is not None:
        context = click.get_current_context()
        typed = {
            name: context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in ("epochs", "steps")
        }
        if typed["epochs"] != typed["steps"]:
            given["steps" if typed["epochs"] else "epochs"] = None
    return given
