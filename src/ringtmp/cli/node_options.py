"""Where a run is used that is not trained: the options of evaluate, predict and generate, and the nodes they give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringtmp.errors import UsageError

if TYPE_CHECKING:
    from ringtmp.launch.node_pool import NodePool


def where_options(does: str) -> Callable[[Any], Any]:
    """`does`: what the nodes do."""

    def add(command: Any) -> Any:
        for name, more, said in (
            (("--ring", "ring_name"), {"default": "home", "show_default": True},
             "Name of the ring that devices join (with --listen)."),
            (("--listen",), {"metavar": "ADDRESS[:PORT]"}, "Wait for devices here instead of starting processes."),
            (("--nodes",), {"type": int}, f"Number of nodes that {does}.  [1; with --listen as many as trained]"),
        ):  # fmt: skip
            command = click.option(*name, help=said, **more)(command)
        return command

    return add


def nodes_of(run: Path, nodes: int | None, listen: str | None, ring_name: str) -> tuple[int, NodePool | None]:
    """The number of nodes, and the devices with --listen."""
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes} must be at least 1")
    if listen is None:
        return nodes or 1, None
    from ringtmp.run import evaluate_predict_generate
    from ringtmp.run.progress import Telling

    pool = evaluate_predict_generate.devices_for(run, listen, ring_name, nodes, Telling())
    return pool.nodes, pool
