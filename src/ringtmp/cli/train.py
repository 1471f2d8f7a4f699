"""ringtmp train"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ringtmp.cli.settings import build, parse_pairs, parse_schedule
from ringtmp.errors import UsageError


@click.command("train", short_help="Train a model on a ring.")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--model", help="mlp, convnet, resnet, gpt, FILE.py:factory or package.module:factory.  [mlp]")
@click.option(
    "--set", "set_", multiple=True, metavar="KEY=VALUE", help="A size of the model: --set depth=8 --set width=256."
)
@click.option(
    "--data", help="digits, random:784x10, idx:DIR, npz:FILE, text:PATH, pysource or FILE.py:factory.  [digits]"
)
@click.option("--loss", help="cross_entropy, mse or next_byte.  [what fits the data]")
@click.option("--strategy", help="ring, ps (ps:bsp, ps:async, ps:ssp:3) or allreduce (allreduce:tree).  [ring]")
@click.option(
    "--with", "with_", multiple=True, metavar="KEY=VALUE", help="A setting of the strategy: see ringtmp strategies."
)
@click.option("--nodes", type=int, help="Members of the ring, the master included.  [3]")
@click.option("--listen", metavar="ADDRESS[:PORT]", help="Wait for devices here instead of starting processes.")
@click.option(
    "--ring", "ring_name", default="home", show_default=True, help="The ring the devices join (with --listen)."
)
@click.option("--start-with", type=int, metavar="K", help="Start with K nodes if no more come within --wait.")
@click.option(
    "--wait", "wait_s", type=float, default=60.0, show_default=True, metavar="S", help="Seconds --start-with waits."
)
@click.option("--epochs", type=int, help="Passes over the data.  [10]")
@click.option("--steps", type=int, help="Updates, instead of --epochs.")
@click.option("--batch-size", type=int, help="Samples per update, over all nodes.  [32]")
@click.option("--microbatches", type=int, help="Slices of a batch.  [8, or the batch size if smaller]")
@click.option("--window", type=int, help="Microbatches in flight at most.  [by the number of nodes]")
@click.option("--schedule", help="1f1b, gpipe or zero-bubble.  [1f1b]")
@click.option("--laps", type=int, help="Times the activations go round: so many segments per node.  [1]")
@click.option("--route", help="ring, or v: out to the last node and back, two segments per node.  [ring]")
@click.option("--recompute", help="none, all or auto: compute activations again instead of storing them.  [none]")
@click.option("--cuts", help="Layers per visit, for instance 0-2,3-5,6-7; '-' for a loss-only tail.  [equal cost]")
@click.option("--wire", help="What travels: float32, bfloat16, float16 or int8.  [float32]")
@click.option("--staleness", type=int, help="1: gradients at the weights one update ago, so that steps overlap.  [0]")
@click.option("--threads", type=int, help="Threads per node, the same on all.  [1]")
@click.option("--optimizer", help="sgd, adam or adamw.  [adam]")
@click.option("--lr", type=float, help="Learning rate.  [0.1 for sgd, 0.002 else]")
@click.option(
    "--opt", multiple=True, metavar="KEY=VALUE", help="An optimizer setting: --opt momentum=0.9 --opt nesterov=yes."
)
@click.option("--lr-schedule", help="constant, step:every=N,factor=F or cosine:warmup=N,floor=F.  [constant]")
@click.option("--clip-norm", type=float, help="Clip gradients to this global norm.")
@click.option(
    "--early-stop", type=int, metavar="EPOCHS", help="Stop after this many epochs without a better test loss."
)
@click.option("--seed", type=int, help="Of weights, batches and dropout.  [0]")
@click.option("--checkpoint-every", type=int, metavar="STEPS", help="[at the end of epochs, at most every 30 s]")
@click.option("--protect", help="Of a lost node: auto, memory, disk, checkpoint or off.  [auto]")
@click.option("--notice", "notice_s", type=float, metavar="S", help="Seconds until a silent node is lost.  [3]")
@click.option("--run-dir", type=click.Path(path_type=Path), help="Where to keep the run.  [runs/TIME]")
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="DIR", help="Go on with the run in DIR, with the same bits."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
@click.option("--quiet", is_flag=True, help="No progress.")
def command(
    config: Path | None, as_json: bool, quiet: bool, run_dir: Path | None, resume: Path | None, lr: float | None,
    listen: str | None, ring_name: str, start_with: int | None, wait_s: float,
    set_: tuple[str, ...], with_: tuple[str, ...], opt: tuple[str, ...], lr_schedule: str | None, **plain: Any,
) -> None:  # fmt: skip
    """Train a model on a ring of processes on this machine.

    Without any option: the bundled digits on a ring of three, done within seconds. Settings may also come from a TOML
    file (CONFIG, with sections model, training, ring, keep) and from the environment (RINGTMP_TRAIN_NODES=4); flags win.
    """
    flags = {name: value for name, value in plain.items() if value is not None}
    if with_:
        flags["with"] = parse_pairs("--with", with_)
    if set_:
        flags["set"] = parse_pairs("--set", set_)
    if opt or lr is not None:
        flags["opt"] = parse_pairs("--opt", opt) | ({"lr": lr} if lr is not None else {})
    if lr_schedule is not None:
        flags["lr_schedule"] = parse_schedule(lr_schedule)
    if resume is not None and (run_dir is not None or config is not None):
        raise UsageError("--resume goes with neither --run-dir nor a settings file: the run has its own")
    settings = build(config, flags)

    from ringtmp import api
    from ringtmp.cli import show

    with show.watcher(quiet) as watcher:
        crew = None
        if listen is not None:
            nodes, threads = settings.ring.nodes, settings.training.threads
            notice_s = settings.keep.notice_s
            crew = api.remote_crew(listen, ring_name, nodes, threads, watcher, start_with, wait_s, notice_s)
        elif start_with is not None:
            raise UsageError("--start-with goes with --listen: processes on this machine all come")
        if resume is not None:
            result = api.resume(resume, _changes(flags), None, None, watcher, crew)
        else:
            result = api.start(settings, None, None, None, run_dir, watcher, crew)
    if as_json:
        show.print_json(result.summary)
    else:
        show.print_summary(result.summary, sys.stdout)


def _changes(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags under their field names, as the saved settings have them."""
    from ringtmp.cli.settings import FIELDS

    renamed = {"opt": "optimizer_settings", "set": "settings", "model": "name"}
    return {renamed.get(flag, FIELDS[flag][1]): value for flag, value in flags.items()}
