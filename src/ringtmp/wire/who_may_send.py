"""Who may say what to whom, when, and on which channel: declared on every message's class, judged here before it is handled.

    MASTER   node 0                      NODE      any other node of the ring
    BEFORE   on the route, whoever sends activations to the receiver; AFTER: whoever gets them from it
    MEMBER   on the route, another node that holds the same layers
    SERVER, WORKER   of a data-parallel strategy

    MEETING  from hello to the plan      PLAN      from the plan on      END   the master has told everyone to stop

Channels keep no order among one another, so what belongs to a plan may reach a node before the plan does: it is kept, and
judged again when the plan is there. The master has the plan first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any, ClassVar

import msgspec

from ringtmp.wire.channel import Channel

CONTROL, TENSOR, BULK = Channel


class Who(Enum):
    MASTER = "the master"
    NODE = "a node"
    BEFORE = "the neighbour before"
    AFTER = "the neighbour behind"
    MEMBER = "a member of the same group"
    SERVER = "a server"
    WORKER = "a worker"


class Phase(Flag):
    MEETING = auto()
    PLAN = auto()
    END = auto()


MEETING, PLAN, END = Phase
ALWAYS = MEETING | PLAN | END

#: Whether a node is this to the receiver of a message, under the receiver's plan.
IsA = Callable[[Who, int, Any], bool]


@dataclass(frozen=True)
class Rule:
    channel: Channel
    by: tuple[Who, ...]
    to: tuple[Who, ...]
    when: Phase

    def offence(self, name: str, message: Any, sender: int, me: int, phase: Phase, is_a: IsA | None) -> str | None:
        """Why this message from `sender` must not be handled; None: it may. Without a plan (`is_a` None) a message that
        belongs to one is let through to a node that waits for it, as far as can be told."""
        if not (self._one_of(self.by, message, sender, is_a) and self._one_of(self.to, message, me, is_a)):
            return f"sent {name}, which is said by {_words(self.by)} to {_words(self.to)}"
        early = phase is MEETING and bool(self.when & PLAN) and me != 0
        if not (self.when & phase or early or phase is END):
            return f"sent {name} out of turn"
        return None

    def _one_of(self, group: tuple[Who, ...], message: Any, node: int, is_a: IsA | None) -> bool:
        for who in group:
            if who is Who.MASTER or who is Who.NODE:
                if (node == 0) is (who is Who.MASTER):
                    return True
            elif is_a is None or is_a(who, node, message):
                return True
        return False


def _words(group: tuple[Who, ...]) -> str:
    return " or ".join(who.value for who in group)


class NodeMessage(msgspec.Struct, frozen=True, array_like=True):
    """What every message is: a class that does not say who may send it, when and on which channel cannot be defined."""

    RULE: ClassVar[Rule]

    def __init_subclass__(cls) -> None:
        rule = vars(cls).get("RULE")
        if not isinstance(rule, Rule):
            raise TypeError(f"{cls.__name__} has no RULE: say its channel, who sends it, who receives it and when")
        if rule.channel is CONTROL and "tensors" in cls.__annotations__:
            raise TypeError(f"{cls.__name__} has tensors, which do not travel on the control channel")


ANYONE = (Who.MASTER, Who.NODE)
NODE, BEFORE, AFTER, MEMBER = (Who.NODE,), (Who.BEFORE,), (Who.AFTER,), (Who.MEMBER,)
SERVER, WORKER = (Who.SERVER,), (Who.WORKER,)
_MASTER = (Who.MASTER,)


def told(channel: Channel, when: Phase, to: tuple[Who, ...] = NODE) -> Rule:
    """The master says it."""
    return Rule(channel, _MASTER, to, when)


def reported(channel: Channel, when: Phase, by: tuple[Who, ...] = NODE) -> Rule:
    """The master is told."""
    return Rule(channel, by, _MASTER, when)


def between(channel: Channel, by: tuple[Who, ...], to: tuple[Who, ...] = ANYONE, when: Phase = PLAN) -> Rule:
    """Nodes say it to each other, the master among them."""
    return Rule(channel, by, to, when)
