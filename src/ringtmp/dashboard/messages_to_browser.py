"""What the page is told of a run: news that a browser adds to what it has. JSON is made of these and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec

from ringtmp.dashboard.shared_layers import groups_of
from ringtmp.metrics.summary import Summary


class Member(msgspec.Struct, frozen=True):
    node: int
    name: str
    role: str
    segments: tuple[str, ...]
    parameters: int


class Membership(msgspec.Struct, frozen=True):
    """Who is there from a moment on."""

    at_s: float
    generation: int
    members: tuple[Member, ...]
    #: The nodes of every group, in the order of layers; empty where no two nodes hold the same.
    groups: tuple[tuple[int, ...], ...] = ()


def membership(at_s: float, generation: int, members: tuple[Member, ...]) -> Membership:
    return Membership(at_s, generation, members, groups_of({each.node: each.segments for each in members}))


class Outage(msgspec.Struct):
    node: int
    from_s: float
    to_s: float | None = None  # None: not healed yet


class Test(msgspec.Struct, frozen=True, array_like=True):
    step: int
    at_s: float
    loss: float
    accuracy: float | None
    bits_per_byte: float | None
    perplexity: float | None


class Now(msgspec.Struct, frozen=True):
    """Of the last step."""

    at_s: float
    step: int  # done
    epoch: int
    loss: float
    lr: float
    unprotected: bool


class More(msgspec.Struct, frozen=True):
    """Rows from a place on: what stood there before, and after it, is no longer so."""

    since: int
    rows: list[Any]


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one run. What is absent is as it was."""

    run: int
    name: str
    status: str
    whole: bool = False  # all of it: forget what you have
    read: float = 1.0  # share of the file
    damaged: int = 0
    unknown: int = 0
    left_out: int = 0
    other_version: str = ""  # that wrote it, if it is not ours
    total_steps: int | None = None
    epochs: int | None = None
    began: str = ""  # by the clock on the wall
    now: Now | None = None
    summary: Summary | None = None
    kinds: list[str] = []
    frame_s: float = 0.0
    memberships: list[Membership] = []
    outages: list[Outage] = []
    detailed: list[int] = []
    points: More | None = None
    frames: More | None = None
    tests: More | None = None
    log: More | None = None
