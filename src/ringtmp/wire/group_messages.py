"""What members of a group say to each other (strategies/ring/group_sums.py)."""

from __future__ import annotations

from typing import ClassVar

from ringtmp.wire.message_parts import Specs
from ringtmp.wire.permissions import MEMBER, TENSOR, NodeMessage, between


class GroupSum(NodeMessage, frozen=True, tag="group sum"):
    """A chunk of a sum of gradients on its way through a group: being added up, or (the root of the tree) the total."""

    RULE: ClassVar = between(TENSOR, MEMBER)
    turn: int
    visit: int
    bucket: int
    node: int  # of the tree of sums
    chunk: int
    there: tuple[bool, ...] = ()  # which tensors of the bucket got a gradient; empty: all
    tensors: Specs = ()  # empty: none did
