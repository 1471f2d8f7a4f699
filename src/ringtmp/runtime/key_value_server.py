"""A server of a key-value store: holds rows of tables, applies updates, answers workers whose clocks allow it.

M. Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014; Q. Ho et al., More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013 (Petuum).

    push(r, u) of worker m at clock c     staleness 0: kept until every worker has ticked past c, then applied in the order of
                                          workers, so that the bits do not depend on who came first
                                          otherwise: w[r] <- rule(w[r], u) at once
    pull(r) of a worker at clock c        answered when min over workers of their clocks >= c - staleness
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from ringtmp import untrusted
from ringtmp.errors import ProtocolError
from ringtmp.metrics.events import NodeEnded
from ringtmp.model import portable_layer
from ringtmp.model.run_graph import Program, dtype_of
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.worker import farewell
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
from ringtmp.wire.messages import Message, Specs

ROW_NUMBERS = "int64"


class _Update(NamedTuple):
    table: int
    rows: torch.Tensor | None  # None: all
    values: torch.Tensor


class _Question(NamedTuple):
    asked: PullRows
    rows: torch.Tensor | None


class KeyValueServer:
    """All it does, it does on a message."""

    def __init__(self, endpoint: Endpoint, plan: ServeTables) -> None:
        self.endpoint = endpoint
        self._plan = plan
        self._values: dict[int, torch.Tensor] = {}
        self._rules = [_program(each) for each in plan.tables]
        self._clocks = [0] * plan.workers
        self._early: dict[tuple[int, int], list[_Update]] = defaultdict(list)  # by clock and worker
        self._questions: list[_Question] = []
        endpoint.enter_plan(lambda who, node, message: False, self._inspect)
        endpoint.connect_all({})

    @property
    def step(self) -> int:
        """The clock that every worker has reached."""
        return min(self._clocks)

    def handle(self, mail: Mail) -> None:
        message, given = mail.message, mail.present()
        if isinstance(message, PushRows | PullRows):
            if message.table not in self._values:
                raise ProtocolError(f"asked for table {message.table} before its first rows came")
            if len(given) > isinstance(message, PushRows):
                _within(given[0], self._plan.tables[message.table])
        if isinstance(message, FirstRows):
            self._values[message.table] = given[0].clone()
        elif isinstance(message, PushRows):
            update = _Update(message.table, given[0] if len(given) > 1 else None, given[-1])
            if self._plan.staleness == 0:
                self._early[message.clock, message.worker].append(update)
            else:
                self._apply(update)
        elif isinstance(message, Tick):
            self._tick(message)
        elif isinstance(message, PullRows):
            self._questions.append(_Question(message, given[0] if given else None))
        else:
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def act(self) -> bool:
        """Answer whom the others' clocks allow."""
        left = [each for each in self._questions if not self._answered(each)]
        worked, self._questions = len(left) < len(self._questions), left
        return worked

    def leave(self) -> None:
        self._values.clear()

    def farewell(self) -> NodeEnded:
        return farewell(self.endpoint)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _tick(self, tick: Tick) -> None:
        before = self.step
        if tick.clock != self._clocks[tick.worker] + 1:
            raise ProtocolError(f"sent clock {tick.clock} of worker {tick.worker} out of turn")
        self._clocks[tick.worker] = tick.clock
        for clock in range(before, self.step):
            for worker in range(self._plan.workers):
                for update in self._early.pop((clock, worker), ()):
                    self._apply(update)

    def _apply(self, update: _Update) -> None:
        values, rule = self._values[update.table], self._rules[update.table]
        if rule is None:
            if update.rows is None:
                values.add_(update.values)
            else:
                values.index_add_(0, update.rows, update.values)
            return
        old = values if update.rows is None else values[update.rows]
        with torch.no_grad():
            (new,) = rule.run([old.clone(), update.values], {})
        if new.shape != old.shape or new.dtype != old.dtype:
            name = self._plan.tables[update.table].name
            raise ProtocolError(
                f"the rule of table {name!r} makes {new.dtype} {tuple(new.shape)} of {tuple(old.shape)}"
            )
        if update.rows is None:
            values.copy_(new)
        else:
            values[update.rows] = new

    def _answered(self, question: _Question) -> bool:
        asked, bound = question.asked, self._plan.staleness
        if asked.worker != READER and bound is not None and self.step < asked.clock - bound:
            return False
        values = self._values[asked.table]
        found = values.clone() if question.rows is None else values[question.rows]
        self.endpoint.post(0, PulledRows(asked.number, self.step, ()), [found])
        return True

    def _inspect(self, sender: int, message: Message) -> None:
        """Before memory is taken for it. Only the master may say these."""
        if isinstance(message, FirstRows | PushRows | PullRows):
            untrusted.whole(message.table, "the number of a table", 0, len(self._plan.tables) - 1)
            share = self._plan.tables[message.table]
            if isinstance(message, PullRows):
                if message.tensors:
                    _row_numbers(message.tensors[:1])
            elif isinstance(message, FirstRows) or len(message.tensors) == 1:
                rows_of(share, message.tensors, share.rows)
            else:
                rows_of(share, message.tensors[1:], _row_numbers(message.tensors[:1]))
        if isinstance(message, PushRows | PullRows | Tick):
            least = READER if isinstance(message, PullRows) else 0
            untrusted.whole(message.worker, "the number of a worker", least, self._plan.workers - 1)


def rows_of(share: TableShare, specs: Specs, count: int) -> None:
    """So many rows of a table, and nothing else."""
    if [each and (each.dtype, each.shape) for each in specs] != [(share.dtype, (count, *share.row))]:
        raise ProtocolError(f"sent {specs} for {count} rows of table {share.name!r}")


def _row_numbers(specs: Specs) -> int:
    first = specs[0] if specs else None
    if first is None or first.dtype != ROW_NUMBERS or len(first.shape) != 1:
        raise ProtocolError(f"sent {specs} as the numbers of rows")
    return first.shape[0]


def _within(rows: torch.Tensor, share: TableShare) -> None:
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= share.rows):
        raise ProtocolError(
            f"spoke of rows {int(rows.min())} to {int(rows.max())} of {share.rows} of table {share.name!r}"
        )


def _program(share: TableShare) -> Program | None:
    if not share.rule:
        return None
    dtype_of(share.dtype)
    return Program(portable_layer.decode(share.rule).evaluate)
