"""What is said between the workers of a key-value store, which are on the master, and its servers (ringtmp.kv)."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ringtmp.wire.message_parts import Specs
from ringtmp.wire.who_may_send import CONTROL, MEETING, PLAN, TENSOR, NodeMessage, reported, told

#: Whose pull waits for nobody: it reads what is there.
READER = -1


class TableShare(msgspec.Struct, frozen=True):
    """The rows of a table that one server holds."""

    name: str
    dtype: str
    row: tuple[int, ...]  # the shape of a row
    first: int
    stop: int
    rule: bytes = b""  # of its updates, as a portable layer; empty: they are added

    @property
    def rows(self) -> int:
        return self.stop - self.first


class ServeTables(NodeMessage, frozen=True, tag="kv"):
    """The plan of a key-value store: what the receiver holds."""

    RULE: ClassVar = told(CONTROL, MEETING)
    tables: tuple[TableShare, ...]
    workers: int
    staleness: int | None  # clocks a worker may be ahead of the slowest; None: nobody waits


class FirstRows(NodeMessage, frozen=True, tag="kv_first"):
    """What the receiver's rows of a table begin with."""

    RULE: ClassVar = told(TENSOR, PLAN)
    table: int
    tensors: Specs = ()


class PushRows(NodeMessage, frozen=True, tag="kv_push"):
    """Updates for rows of a table: their numbers, from the receiver's first on, then the updates. Without numbers: for all."""

    RULE: ClassVar = told(TENSOR, PLAN)
    worker: int
    clock: int
    table: int
    tensors: Specs = ()


class Tick(NodeMessage, frozen=True, tag="kv_clock"):
    """All updates of a worker before this clock have been sent."""

    RULE: ClassVar = told(TENSOR, PLAN)
    worker: int
    clock: int


class PullRows(NodeMessage, frozen=True, tag="kv_pull"):
    """Rows of a table, by their numbers, or all, as soon as they are new enough for a worker at this clock."""

    RULE: ClassVar = told(TENSOR, PLAN)
    number: int  # of the question
    worker: int
    clock: int
    table: int
    tensors: Specs = ()


class PulledRows(NodeMessage, frozen=True, tag="kv_rows"):
    RULE: ClassVar = reported(TENSOR, PLAN)
    number: int
    oldest: int  # every update before this clock is in them
    tensors: Specs = ()
