"""What nodes of the data-parallel strategies send each other, held against the plan before memory is taken for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringtmp import untrusted
from ringtmp.errors import ProtocolError
from ringtmp.runtime import check_node_replies
from ringtmp.runtime.optimizers import STATE_KEYS
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel.linear_gradients import Linear
from ringtmp.strategies.data_parallel.parameter_keys import Key
from ringtmp.wire.formats import PLAIN, WireFormat, wire_format
from ringtmp.wire.messages import Copied, Copy, GradientPart, Kept, Message, Pull, Pulled, Push, Specs, Squares, Total
from ringtmp.wire.who_may_send import Who

#: A worker is never this far ahead of a server, nor of another worker.
MOST_AHEAD = 10_000


def is_a(roles: Callable[[], Roles]) -> Callable[[Who, int, Any], bool]:
    """What nodes are in a run with these roles, of which some may be lost meanwhile."""

    def found(who: Who, node: int, message: Any) -> bool:
        return node in (roles().servers if who is Who.SERVER else roles().workers if who is Who.WORKER else ())

    return found


class KeyScrutiny:
    """Of a parameter server: keys, steps, shares and tensors are those of the plan."""

    def __init__(
        self, table: Sequence[Key], wire: str, servers: int, step: Callable[[], int],
        *, nodes: Callable[[int], tuple[int, ...]] = lambda worker: (), by_tree: bool = False, most_share: float = 1.0,
        parts: bool = False, linear: Mapping[int, Linear] | None = None,
    ) -> None:  # fmt: skip
        """`servers`: how many there were at the beginning; `nodes` of the tree of sums that a worker pushes, if `by_tree`;
        `most_share`: of a batch, in one gradient; `parts`: answers may be some of the values and their places; `linear`: layers
        whose gradients may be pushed as factors."""
        self._linear = linear or {}
        self._nodes = nodes
        self._by_tree = by_tree
        self._most_share = most_share
        self._parts = parts
        self._table = table
        self._servers = servers
        self._wire = wire_format(wire)
        self._step = step

    def __call__(self, sender: int, message: Message) -> None:
        if isinstance(message, Push | Pull | Pulled | Copy | Copied):
            untrusted.whole(message.key, "the number of a key", 0, len(self._table) - 1)
        if isinstance(message, Push | Pull | Pulled | Copy | Squares | Total):
            untrusted.whole(message.step, "the step", 0, self._step() + MOST_AHEAD)
        if isinstance(message, Push | Copy):
            untrusted.number(message.share, "the share of a batch", 0.0, self._most_share)
        if isinstance(message, Push):
            if message.node not in (self._nodes(sender) or (0,)):
                raise ProtocolError(f"sent sum {message.node}, which is not its to send")
            if message.rows:
                self._factors(message)
            elif message.tensors or (message.share and not message.node):
                self._tensor(message.key, message.tensors, self._wire)
        elif isinstance(message, Copy):
            untrusted.whole(message.worker, "the number of a worker", -1)
            if message.tensors or (message.share and not self._by_tree):
                self._tensor(message.key, message.tensors, PLAIN)
        elif isinstance(message, Pulled):
            untrusted.whole(message.oldest, "the age of parameters", 0, self._step() + MOST_AHEAD)
            if message.change and self._parts:
                some_of(message.tensors, self._table[message.key].size)
                return
            if message.change and not self._wire.carries_error:
                raise ProtocolError(f"sent a change of key {message.key} instead of its values")
            # Of a coarse format the first answer is whole, and the others say what has changed.
            whole = self._wire.carries_error and not message.change
            self._tensor(message.key, message.tensors, PLAIN if whole else self._wire)
        elif isinstance(message, Copied):
            untrusted.whole(message.updates, "the number of updates")
        elif isinstance(message, Squares):
            untrusted.whole(message.servers, "the number of servers", 1, self._servers)
            wanted = [(PLAIN.name, ())] * len(message.keys)
            if [each and (each.dtype, each.shape) for each in message.tensors] != wanted or (
                message.keys and not self._by_tree
            ):
                raise ProtocolError(f"sent {message.tensors} as the norms of {len(message.keys)} keys")
            for key in message.keys:
                untrusted.whole(key, "the number of a key", 0, len(self._table) - 1)
            if message.value < 0:  # what is not finite comes of gradients that are not, and is found out as such
                raise ProtocolError(f"sent {message.value:.6g} as a sum of squares")

    def _factors(self, push: Push) -> None:
        key = self._table[push.key]
        linear = self._linear.get(key.layer)
        if linear is None:
            raise ProtocolError(f"sent factors of key {push.key}, whose layer is not plain linear")
        low, high = linear.columns(key.start, key.stop)
        most = key.size // (linear.inputs + high - low)
        untrusted.whole(push.rows, "the number of rows", 1, most)
        shapes = ((push.rows, linear.inputs), (push.rows, high - low))
        wanted = [each for shape in shapes for each in self._wire.travels(PLAIN.name, shape)]
        if [each and (each.dtype, each.shape) for each in push.tensors] != wanted:
            raise ProtocolError(f"sent {push.tensors} for {push.rows} rows of key {push.key}")

    def _tensor(self, key: int, specs: Specs, wire: WireFormat) -> None:
        flat(specs, self._table[key].size, wire)


def flat(specs: Specs, size: int, wire: WireFormat) -> None:
    """A vector of so many float32 values, as this wire carries it."""
    if [each and (each.dtype, each.shape) for each in specs] != wire.travels(PLAIN.name, (size,)):
        raise ProtocolError(f"sent {specs} for {size} values")


def some_of(specs: Specs, size: int) -> None:
    """Less than half of so many values, and the place of each."""
    found = [each and (each.dtype, each.shape) for each in specs]
    count = specs[0].count if specs and specs[0] is not None else 0
    if found != [(PLAIN.name, (count,)), ("int32", (count,))] or 2 * count >= max(size, 1):
        raise ProtocolError(f"sent {specs} for a part of {size} values")


def kept(message: Kept, table: Sequence[Key]) -> None:
    """A key's values and optimizer state on their way to the master."""
    untrusted.whole(message.key, "the number of a key", 0, len(table) - 1)
    size = table[message.key].size
    if len(message.tensors) != 1 + len(message.state) or not set(message.state) <= STATE_KEYS:
        raise ProtocolError(f"sent key {message.key} with {len(message.tensors)} tensors")
    if len(set(message.state)) != len(message.state):
        raise ProtocolError(f"sent key {message.key} with one state twice")
    flat(message.tensors[:1], size, PLAIN)
    for name, spec in zip(message.state, message.tensors[1:], strict=True):
        check_node_replies.state_tensor(name, spec, (size,))


class PartScrutiny:
    """Of an all-reduce: every part comes once in every step, step after step, from whom it must, and is as large as it must
    be. Workers are at most `ahead` steps apart. `due` says whether a part is this sender's, and how many values it has."""

    def __init__(
        self,
        due: Callable[[int, GradientPart], int],
        buckets: int,
        wire: str,
        step: Callable[[], int],
        *,
        ahead: int = 1,
    ) -> None:
        self._ahead = ahead
        self._due = due
        self._buckets = buckets
        self._wire = wire_format(wire)
        self._step = step
        self._first = step()
        self._last: dict[tuple[int, int, int, bool, int], int] = {}  # by part and sender: the step it came of

    def __call__(self, sender: int, message: Message) -> None:
        if not isinstance(message, GradientPart):
            return
        step = self._step()
        untrusted.whole(message.step, "the step", step, step + self._ahead)
        untrusted.whole(message.bucket, "the number of a bucket", 0, self._buckets - 1)
        size = self._due(sender, message)
        if not message.there or any(message.there):
            flat(message.tensors, size, self._wire)
        elif message.tensors:
            raise ProtocolError("sent values of a sum of which it says that there are none")
        name = (message.bucket, message.chunk, message.hop, message.summed, sender)
        if message.step != self._last.get(name, self._first - 1) + 1:
            raise ProtocolError(f"sent part {message.chunk} of step {message.step} out of turn")
        self._last[name] = message.step
