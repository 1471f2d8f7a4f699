"""Named places at which a node of a run is killed, each the moment before or after something it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Point(NamedTuple):
    node: int  # 0 is the master
    what: str  # module:Class.method, below ringtmp
    when: str  # before or after it
    times: int = 1  # the how-manieth time, counted in each process
    generation: int = 1  # not before this one
    only: Callable[..., bool] = lambda *given: True  # which calls count


def _message(kind: str) -> Callable[..., bool]:
    """Calls with a message of this kind among what they are given."""

    def found(*given: Any) -> bool:
        return any(type(getattr(each, "message", each)).__name__ == kind for each in given)

    return found


def _evaluating(_node: Any, state: Any) -> bool:
    return bool(state.activations) and not state.activations[0].message.training


NODE, LAYERS, ENDING, KEEPING, SHELF = (
    "strategies.ring.node:Node",
    "strategies.ring.node_layers:NodeLayers",
    "strategies.ring.sums_and_norms:SumsAndNorms",
    "strategies.ring.exchange_snapshots:NodeSnapshots",
    "runtime.snapshot_store:SnapshotStore",
)
WORKER, ENDPOINT, MASTER = "runtime.worker:Worker", "runtime.mailbox:Endpoint", "strategies.ring.master:Master"
WRITER = "runtime.checkpoint:CheckpointWriter"

#: Where layers lie, so that points can count them: nodes 1 and 2 have two each, the master the first and the last.
CUTS = "0,1-2,3-4,5"

#: A worker dies, once, and another takes its place.
ONCE = {
    "before hello": Point(1, f"{WORKER}._say_hello", "before"),
    "after hello": Point(2, f"{WORKER}._say_hello", "after"),
    "before setup": Point(1, f"{NODE}.__init__", "before"),
    "after setup": Point(2, f"{NODE}.__init__", "after"),
    "before a layer moves in": Point(1, f"{LAYERS}.place", "before"),
    "after a layer moved in": Point(2, f"{LAYERS}.place", "after"),
    "after admission": Point(1, f"{NODE}._forward", "before", 90),
    "after a forward": Point(2, f"{NODE}._forward", "after", 91),
    "before activations are sent": Point(1, f"{NODE}._send_on", "before", 95),
    "after activations were sent": Point(2, f"{NODE}._send_on", "after", 96),
    "before a backward": Point(2, f"{NODE}._backward", "before", 97),
    "after a backward": Point(1, f"{NODE}._backward", "after", 98),
    "before norms": Point(2, f"{ENDING}.pass_norms_on", "before", 99),
    "before the total norm": Point(1, f"{ENDING}.scale", "before", 25),
    "before an update": Point(1, f"{NODE}._update", "before", 25),
    "after an update": Point(2, f"{NODE}._update", "after", 26),
    "before a step is told": Point(1, f"{NODE}._close_step", "before", 27),
    "after a step was told": Point(2, f"{NODE}._close_step", "after", 28),
    "before a copy": Point(1, f"{KEEPING}.take", "before", 2),
    "within a copy": Point(2, f"{SHELF}.put", "after", 3),
    "after a copy": Point(1, f"{KEEPING}.take", "after", 2),
    "before a piece is sent": Point(1, f"{ENDPOINT}.post", "before", 3, only=_message("Keep")),
    "after a piece was sent": Point(2, f"{ENDPOINT}.post", "after", 3, only=_message("Keep")),
    "a piece arrives": Point(2, f"{KEEPING}._receive", "before", 3),
    "holder before it tells": Point(2, f"{KEEPING}._hold", "before", 3),
    "holder after it told": Point(2, f"{KEEPING}._hold", "after", 3),
    "before older ones go": Point(1, f"{SHELF}.free", "before", 2),
    "after older ones went": Point(2, f"{SHELF}.free", "after", 2),
    "before a layer is given": Point(1, f"{LAYERS}._send_layer", "before", 2),
    "after a layer was given": Point(2, f"{LAYERS}._send_layer", "after", 2),
    "after the last layer was given": Point(2, f"{LAYERS}._send_layer", "after", 4),
    "in an evaluation": Point(1, f"{NODE}._forward", "before", 3, only=_evaluating),
    "after an evaluation's forward": Point(2, f"{NODE}._forward", "after", 3, only=_evaluating),
}

SUMS, SHARED = "strategies.ring.group_sums:GroupSums", "strategies.ring.shared_state:SharedState"

#: A member of a group dies: the first of the first group, who speaks for it, or the second of the second. M-2-2-M.
MEMBERS = {
    f"{name}, node {node}": Point(node, what, when)
    for node in (1, 4)
    for name, what, when in (
        ("before a member's forward", f"{NODE}._forward", "before"),
        ("after a member's activations were sent", f"{NODE}._send_on", "after"),
        ("before a member's backward", f"{NODE}._backward", "before"),
        ("before its group adds up", f"{SUMS}.begin", "before"),
        ("before its first sum is sent", f"{SUMS}._send", "before"),
        ("after a sum was sent", f"{SUMS}._send", "after"),
        ("after it sent all of its own", f"{SUMS}.finish", "after"),
        ("before it takes another's sum", f"{SUMS}._take", "before"),
        ("after it took another's sum", f"{SUMS}._take", "after"),
        ("before its sum is whole", f"{SUMS}._ended", "before"),
        ("when its sum is whole", f"{ENDING}.summed", "before"),
        ("after it said the norms", f"{ENDING}.summed", "after"),
        ("before it hears the total norm", f"{ENDING}.scale", "before"),
        ("after it passed the total norm on", f"{ENDING}.scale", "after"),
        ("before a member's update", f"{NODE}._update", "before"),
        ("after a member's update", f"{NODE}._update", "after"),
        ("before a member's step is told", f"{NODE}._close_step", "before"),
        ("after a member's step was told", f"{NODE}._close_step", "after"),
    )
}

#: A second worker dies while the ring heals from the first; the first is named with it.
WHILE_HEALING = {
    "before the new generation": ("after an update", Point(1, f"{WORKER}._renew", "before")),
    "after the new generation": ("after an update", Point(1, f"{WORKER}._renew", "after")),
    "before it restores a layer": ("after an update", Point(1, f"{LAYERS}.restore", "before")),
    "after it restored a layer": ("after an update", Point(1, f"{LAYERS}.restore", "after")),
    "before it gives what it holds": ("before an update", Point(2, f"{KEEPING}.handle", "before", only=_message("Recall"))),
    "after it gave what it holds": ("before an update", Point(2, f"{KEEPING}.handle", "after", only=_message("Recall"))),
    "replaced, before hello": ("before an update", Point(1, f"{WORKER}._say_hello", "before", generation=2)),
    "replaced, while layers move in": ("before an update", Point(1, f"{LAYERS}.place", "after", generation=2)),
}  # fmt: skip

#: The master dies, and somebody resumes the run.
MASTERS = {
    "before the first step": Point(0, f"{MASTER}._begin_step", "before"),
    "before the ring is laid out": Point(0, f"{MASTER}.lay_out", "before"),
    "before a batch is given": Point(0, f"{MASTER}._begin_step", "before", 25),
    "at the loss": Point(0, f"{MASTER}.tail", "before", 120),
    "before a snapshot is whole": Point(0, "runtime.snapshot_schedule:Protection.held", "before", 9),
    "between a checkpoint's layers": Point(0, f"{WRITER}.add", "after", 10),
    "before a checkpoint is there": Point(0, f"{WRITER}.commit", "before", 2),
    "after a checkpoint is there": Point(0, f"{WRITER}.commit", "after", 2),
    "master in an evaluation": Point(0, f"{MASTER}.evaluate", "before"),
    "master when it stops the ring": Point(0, f"{MASTER}.stop", "before"),
}
