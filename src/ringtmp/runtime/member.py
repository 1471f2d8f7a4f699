"""What every strategy puts on a node: something that takes mail and does the next piece of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ringtmp.metrics import events
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.wire.messages import Message


class Member(Protocol):
    """A node's part in a run. Neither method blocks."""

    @property
    def step(self) -> int:
        """The step it is in, for whoever must say where something went wrong."""
        ...

    def handle(self, mail: Mail) -> None: ...

    def act(self) -> bool:
        """Do one piece of work; False when nothing is runnable."""
        ...

    def leave(self) -> None:
        """The generation ends: put what the next can use into the endpoint's snapshot store."""
        ...

    def farewell(self) -> events.NodeEnded:
        """What it has to say at its end."""
        ...


#: The plan a node gets from the master becomes a member; None: the message is not a plan.
MakeMember = Callable[[Endpoint, Message], Member | None]
