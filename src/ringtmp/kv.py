"""A key-value store: tables whose rows lie on servers, and workers that push updates, pull rows and tick a clock.

    with KeyValueStore({"counts": torch.zeros(1000, 20)}, servers=2, workers=4, staleness=1) as store:
        worker = store.worker(0)
        rows = worker.pull("counts", [3, 7])
        worker.push("counts", change, [3, 7])
        worker.clock()

The servers are nodes like those of a ring: processes on this machine, over the same links. Workers are handles in this
process, each with a clock of its own, and may be used from a thread each. How updates are applied and who waits:
runtime/key_value_server.py.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from ringtmp.errors import ProtocolError, RingError, UsageError, WaitTimeout, unknown
from ringtmp.launch.node_pool import NodePool
from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.metrics.event_log import EventLog
from ringtmp.model import portable_layer
from ringtmp.model.export import EXAMPLE_BATCH, Exporter
from ringtmp.model.random_operators import random_count
from ringtmp.model.run_graph import Program
from ringtmp.runtime.base_leader import BaseLeader, Start
from ringtmp.runtime.key_value_server import rows_of
from ringtmp.runtime.mailbox import Mail
from ringtmp.wire.key_value_messages import (
    READER,
    FirstRows,
    PulledRows,
    PullRows,
    PushRows,
    ServeTables,
    TableShare,
    Tick,
)
from ringtmp.wire.messages import Message

DTYPES = ("float32", "float64", "int32", "int64")
MOST_SERVERS = MOST_WORKERS = MOST_STALENESS = 1000
LOOK_EVERY_S = 0.0005
#: New rows, of the rows as they are and the updates pushed for them; one row's result depends on nothing but that row.
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Rows = Sequence[int] | torch.Tensor


class KeyValueStore:
    def __init__(
        self, tables: Mapping[str, torch.Tensor], *, servers: int = 1, workers: int = 1, staleness: int | None = 0,
        rules: Mapping[str, Rule] | None = None, where: Literal["processes", "memory"] = "processes", limit_s: float = 60.0,
    ) -> None:  # fmt: skip
        """`tables`: what they begin with, by name, the first dimension counting rows; `staleness`: clocks a worker may be ahead
        of the slowest when it pulls, None for any number; `rules`: by table, how an update changes rows, where it is not added;
        `where`: servers are processes, or live in this one; `limit_s`: a pull waits so long at most."""
        self._refuse(tables, servers, workers, staleness, rules or {}, where, limit_s)
        self.staleness = staleness
        self._limit_s = limit_s
        self._tables = {name: table.detach().clone() for name, table in tables.items()}
        self._numbers = {name: number for number, name in enumerate(tables)}
        self._rules = {name: exported_rule(name, rule, tables[name]) for name, rule in (rules or {}).items()}
        self._nodes = range(1, servers + 1)
        self._workers = [KeyValueWorker(self, number) for number in range(workers)]
        self._clocks = [0] * workers
        self._lock = threading.RLock()
        self._shares = {node: self._shares_of(node - 1, servers) for node in self._nodes}
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self._leader = self._started(stack, where)
            self._closing = stack.pop_all()

    def worker(self, number: int) -> KeyValueWorker:
        """A worker by its number, from 0."""
        if type(number) is not int or not 0 <= number < len(self._workers):
            raise UsageError(f"worker({number!r}): there are workers 0 to {len(self._workers) - 1}")
        return self._workers[number]

    def read(self, table: str) -> torch.Tensor:
        """The whole table as the servers have it now; nobody is waited for. With staleness 0 it has the updates of the clocks
        that every worker has passed, otherwise all that were pushed."""
        return self._pull(READER, 0, table, None)

    @property
    def clocks(self) -> tuple[int, ...]:
        """Of every worker."""
        return tuple(self._clocks)

    @property
    def bytes_sent(self) -> int:
        """Payload to the servers: first rows, updates, numbers of rows."""
        return self._leader.endpoint.traffic.counters().payload_sent

    @property
    def bytes_received(self) -> int:
        return self._leader.endpoint.traffic.counters().payload_received

    def close(self) -> None:
        """End the servers. What they hold is gone: `read` it first."""
        with self._lock:
            self._closing.close()

    def __enter__(self) -> KeyValueStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- what workers do ----------------------------------------------------------------------------------------------

    def _push(self, worker: int, clock: int, table: str, update: torch.Tensor, rows: Rows | None) -> None:
        whole, numbers = self._table(table), self._row_numbers(table, rows)
        if not isinstance(update, torch.Tensor):
            raise UsageError(f"an update of table {table!r} must be a tensor, not {type(update).__name__}")
        update = update.detach()
        count = len(whole) if numbers is None else len(numbers)
        if (update.dtype, update.shape) != (whole.dtype, (count, *whole.shape[1:])):
            raise UsageError(
                f"an update of {count} rows of table {table!r} is {_kind(whole, count)}, not {_kind(update, len(update))}"
            )
        if numbers is not None and table in self._rules and len(set(numbers.tolist())) < count:
            raise UsageError(f"a row of table {table!r} occurs twice in one push: its rule takes one update a row")
        with self._lock:
            for node, share in self._holders(table):
                message = PushRows(worker, clock, self._numbers[table])
                if numbers is None:
                    self._post(node, message, [update[share.first : share.stop].clone()])
                    continue
                mine = (numbers >= share.first) & (numbers < share.stop)
                if mine.any():
                    self._post(node, message, [numbers[mine] - share.first, update[mine]])

    def _tick(self, worker: int) -> int:
        with self._lock:
            self._clocks[worker] += 1
            for node in self._nodes:
                self._post(node, Tick(worker, self._clocks[worker]))
            self._leader.turn()
            return self._clocks[worker]

    def _pull(self, worker: int, clock: int, table: str, rows: Rows | None) -> torch.Tensor:
        whole, numbers = self._table(table), self._row_numbers(table, rows)
        found = whole.new_empty((len(whole) if numbers is None else len(numbers), *whole.shape[1:]))
        parts: dict[int, Any] = {}  # by node: where its rows belong
        with self._lock:
            question = self._leader.next_question()
            for node, share in self._holders(table):
                if numbers is None:
                    parts[node], asked = slice(share.first, share.stop), []
                else:
                    parts[node] = mine = (numbers >= share.first) & (numbers < share.stop)
                    asked = [numbers[mine] - share.first]
                    if not mine.any():
                        del parts[node]
                        continue
                self._leader.awaited[question, node] = (share, len(asked[0]) if asked else share.rows)
                self._post(node, PullRows(question, worker, clock, self._numbers[table]), asked)
        for node, place in parts.items():
            found[place] = self._answer(worker, clock, question, node)
        return found

    def _answer(self, worker: int, clock: int, question: int, node: int) -> torch.Tensor:
        until = self._leader.endpoint.clock() + self._limit_s
        while True:
            with self._lock:
                if (question, node) in self._leader.answers:
                    return self._leader.answers.pop((question, node))
                self._open()
                worked = self._leader.turn()
                if not worked and self._leader.endpoint.clock() > until:
                    slowest = min(range(len(self._clocks)), key=self._clocks.__getitem__)
                    raise WaitTimeout(
                        f"worker {worker} at clock {clock} waited {self._limit_s:g} s for node {node}; worker {slowest} is at "
                        f"clock {self._clocks[slowest]}, and staleness={self.staleness} is how far another may be ahead"
                    )
            if not worked:
                time.sleep(LOOK_EVERY_S)  # outside the lock: other workers may have something to say

    # -- parts --------------------------------------------------------------------------------------------------------

    def _started(self, stack: contextlib.ExitStack, where: str) -> _Leader:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringtmp-kv-")))
        pool: NodePool
        if where == "memory":
            pool = InMemoryPool(len(self._nodes) + 1)
        else:
            from ringtmp.launch.ring_of_processes import LocalPool

            (folder / "logs").mkdir()
            pool = LocalPool(len(self._nodes) + 1, 1, folder / "logs", keeps=False)
        stack.callback(pool.stop)
        endpoint = pool.start("kv", 1)
        log = EventLog(folder / "events.jsonl")
        stack.callback(log.close)
        leader = _Leader(Start(endpoint, pool, log))
        leader.begin(self._nodes)
        for node, shares in self._shares.items():
            endpoint.post(node, ServeTables(shares, len(self._workers), self.staleness))
            for number, share in enumerate(shares):
                endpoint.post(node, FirstRows(number), [self._tables[share.name][share.first : share.stop].clone()])
        stack.callback(leader.stop, "the store was closed")
        return leader

    def _shares_of(self, server: int, servers: int) -> tuple[TableShare, ...]:
        """Rows in a row, as many on every server, to one."""
        return tuple(
            TableShare(
                name, _dtype(table), tuple(table.shape[1:]), len(table) * server // servers,
                len(table) * (server + 1) // servers, self._rules.get(name, b""),
            )
            for name, table in self._tables.items()
        )  # fmt: skip

    def _holders(self, table: str) -> list[tuple[int, TableShare]]:
        number = self._numbers[table]
        return [(node, shares[number]) for node, shares in self._shares.items() if shares[number].rows]

    def _post(self, node: int, message: Message, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._open()
        self._leader.endpoint.post(node, message, tensors)

    def _open(self) -> None:
        if self._leader.stopped:
            raise RingError("the store is closed: its servers have ended")

    def _table(self, name: str) -> torch.Tensor:
        if not isinstance(name, str):
            raise UsageError(f"a table is named by a text, not by {type(name).__name__}")
        if name not in self._tables:
            raise unknown("table", name, self._tables)
        return self._tables[name]

    def _row_numbers(self, table: str, rows: Rows | None) -> torch.Tensor | None:
        if rows is None:
            return None
        count = len(self._tables[table])
        said = f"rows of table {table!r} must be whole numbers from 0 to {count - 1}"
        try:
            numbers = torch.as_tensor(rows).reshape(-1)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UsageError(said) from error
        if numbers.dtype == torch.bool:
            raise UsageError(f"{said}; of a mask take mask.nonzero()")
        whole = not numbers.is_floating_point() and not numbers.is_complex()
        if len(numbers) and not (whole and 0 <= int(numbers.min()) <= int(numbers.max()) < count):
            raise UsageError(said)
        return numbers.long()

    @staticmethod
    def _refuse(
        tables: Mapping[str, torch.Tensor], servers: int, workers: int, staleness: int | None, rules: Mapping[str, Rule],
        where: str, limit_s: float,
    ) -> None:  # fmt: skip
        if not isinstance(tables, Mapping) or not tables or not all(isinstance(name, str) for name in tables):
            raise UsageError("a key-value store needs tables by name: KeyValueStore({'counts': torch.zeros(1000, 20)})")
        for name, table in tables.items():
            dense = isinstance(table, torch.Tensor) and table.layout == torch.strided and table.device.type == "cpu"
            if not dense or _dtype(table) not in DTYPES or not table.dim() or not table.numel():
                raise UsageError(
                    f"table {name!r} must be a dense tensor of {', '.join(DTYPES)} on the CPU, with a row and a value at least"
                )
        for word, number, least, most in (
            ("servers", servers, 1, MOST_SERVERS),
            ("workers", workers, 1, MOST_WORKERS),
            ("staleness", 0 if staleness is None else staleness, 0, MOST_STALENESS),
        ):
            if not (type(number) is int and least <= number <= most):
                raise UsageError(f"{word}={number!r} must be a whole number from {least} to {most}")
        if not isinstance(rules, Mapping):
            raise UsageError("rules are given by table: rules={'counts': lambda rows, updates: rows + updates}")
        for name in rules:
            if not isinstance(name, str) or name not in tables:
                raise unknown("table", str(name), tables)
        if where not in ("processes", "memory"):
            raise unknown("where", where, ("processes", "memory"))
        if not isinstance(limit_s, int | float) or not limit_s > 0:
            raise UsageError(f"limit_s={limit_s!r} must be a number of seconds above 0")


class KeyValueWorker:
    """One of a store's workers; its clock is at 0 when it begins."""

    def __init__(self, store: KeyValueStore, number: int) -> None:
        self._store = store
        self.number = number

    def pull(self, table: str, rows: Rows | None = None) -> torch.Tensor:
        """Rows of a table, or all. With staleness S, every update that any worker pushed before clock c - S is in them, c being
        this worker's clock; where one is too slow for that, it is waited for."""
        return self._store._pull(self.number, self._store.clocks[self.number], table, rows)

    def push(self, table: str, update: torch.Tensor, rows: Rows | None = None) -> None:
        """Updates for rows of a table, or for all: added, or what the table's rule makes of them. Waits for nobody."""
        self._store._push(self.number, self._store.clocks[self.number], table, update, rows)

    def clock(self) -> int:
        """A unit of work is done. Returns the worker's clock."""
        return self._store._tick(self.number)


class _Leader(BaseLeader):
    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self.awaited: dict[
            tuple[int, int], tuple[TableShare, int]
        ] = {}  # by question and node: rows of what, and how many
        self.answers: dict[tuple[int, int], torch.Tensor] = {}
        self.stopped = False
        self._questions = itertools.count()

    def begin(self, nodes: Iterable[int]) -> None:
        self.gather(nodes)
        self.endpoint.enter_plan(lambda who, node, message: False, self._inspect)

    def next_question(self) -> int:
        return next(self._questions)

    def turn(self) -> bool:
        return self._work_once()

    def stop(self, reason: str, limit_s: float = 2.0) -> Any:
        self.stopped = True
        return super().stop(reason, limit_s)

    def _inspect(self, sender: int, message: Message) -> None:
        if isinstance(message, PulledRows):
            if (message.number, sender) not in self.awaited:
                raise ProtocolError(f"answers question {message.number}, which nobody asked")
            share, count = self.awaited[message.number, sender]
            rows_of(share, message.tensors, count)

    def _hear(self, mail: Mail) -> bool:
        if not isinstance(mail.message, PulledRows):
            return False
        del self.awaited[mail.message.number, mail.sender]
        self.answers[mail.message.number, mail.sender] = mail.present()[0]
        return True


class _RuleModule(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self._rule = rule

    def forward(self, tensors: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self._rule(*tensors)


def exported_rule(table: str, rule: Rule, values: torch.Tensor) -> bytes:
    """The rule as data, of listed operators alone; UsageError: it is not to be had, or does something else as data."""
    shape, said = (EXAMPLE_BATCH, *values.shape[1:]), f"the rule of table {table!r}"
    example = [
        torch.arange(1, 1 + values[:1].numel() * EXAMPLE_BATCH).reshape(shape).to(values.dtype) for _ in range(2)
    ]
    try:
        layer, tensors = Exporter().export(f"rule of table {table}", _RuleModule(rule), tuple(example))
    except UsageError as error:
        what = str(error).partition(" cannot be exported: ")[2].partition(". A layer must be")[0]
        if not what:
            raise
        raise UsageError(
            f"{said} cannot be exported: {what}. A rule must be a fixed sequence of tensor operations: no branch on values "
            "(torch.where chooses between two), no Python side effects"
        ) from error
    if tensors:
        raise UsageError(
            f"{said} brings a tensor of its own ({', '.join(tensors)}): write numbers, or keep it in a table"
        )
    if random_count(layer.evaluate):
        raise UsageError(f"{said} draws random numbers, which no two servers would draw alike: draw them in the worker")
    with torch.no_grad():
        expected = rule(*(each.clone() for each in example))
        made = Program(layer.evaluate).run([each.clone() for each in example], {})
    if len(made) != 1 or made[0].shape != shape or made[0].dtype != values.dtype:
        raise UsageError(
            f"{said} must make rows like those it is given, {_kind(values, EXAMPLE_BATCH)}; it makes {_made(made)}"
        )
    if not torch.equal(made[0].nan_to_num(), expected.nan_to_num()):
        raise UsageError(
            f"{said} gives something else as data than as Python: does it depend on anything but its arguments?"
        )
    with torch.no_grad():
        by_row = torch.cat([rule(*(each[row : row + 1].clone() for each in example)) for row in range(EXAMPLE_BATCH)])
    if not torch.allclose(by_row.nan_to_num(), expected.nan_to_num()):
        raise UsageError(
            f"{said} makes something else of one row when others come with it: which rows meet depends on the servers and on "
            "who pushes what"
        )
    return portable_layer.encode(layer)


def _made(made: Sequence[Any]) -> str:
    return (
        " and ".join(_kind(each, len(each)) for each in made if isinstance(each, torch.Tensor) and each.dim())
        or "no rows"
    )


def _kind(tensor: torch.Tensor, rows: int) -> str:
    return f"{_dtype(tensor)} of shape ({', '.join(str(each) for each in (rows, *tensor.shape[1:]))})"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


__all__ = ["KeyValueStore", "KeyValueWorker"]
