"""What a master does under every strategy: gather the nodes, work until something has happened, notice who is gone, stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from ringtmp import untrusted
from ringtmp.errors import Misconduct, NodeFailed, NodeLost, ProtocolError, WaitTimeout
from ringtmp.metrics import events
from ringtmp.metrics.event_log import EventLog
from ringtmp.plan.route import MASTER
from ringtmp.runtime import check_node_replies
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.member import Member
from ringtmp.runtime.node_reports import Reports
from ringtmp.runtime.snapshot_schedule import Protection, Snapshot
from ringtmp.runtime.worker import farewell
from ringtmp.wire.messages import Accused, Bye, Detail, Failed, Hello, LayerState, Message, Placed, Report, Stop

HELLO_LIMIT_S = 60.0
STALL_LIMIT_S = 60.0
STALL_FACTOR = 20
WATCH_EVERY_S = 0.2
WAIT_S = 0.05
#: What a look for signs of life lasts beyond this was no silence of others: the machine slept, or this process was stopped.
LONGEST_LOOK_S = 1.0
STOP_LIMIT_S = 2.0
LAST_WORDS_S = 0.2


class NodePool(Protocol):
    """The other nodes of a run, wherever they live."""

    #: All nodes run on this machine. Else each is tried before a plan is made, and one that slows the ring is left out.
    same_machine: bool

    def advance(self) -> bool:
        """Let nodes that live in this process work. True if any did."""
        ...

    def check(self, step: int) -> None:
        """Raise NodeLost if a node has died."""
        ...

    def drop(self, node: int) -> None:
        """The run goes on without this one: it is not checked any more."""
        ...

    def expel(self, node: int, sure: bool) -> None:
        """As `drop`, and not to be taken again; one that only others accuse may be, a few times."""
        ...


class NoPlanYet:
    """The master's member before there is a plan, and when a generation has ended: no work, and nobody to talk to."""

    step = 0

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def handle(self, mail: Mail) -> None:
        raise ProtocolError(f"sent {type(mail.message).__name__}, which nobody asked for")

    def act(self) -> bool:
        return False

    def leave(self) -> None:
        pass

    def farewell(self) -> events.NodeEnded:
        return farewell(self._endpoint)


@dataclass(frozen=True)
class Start:
    """What a master begins to lead with, whatever the strategy."""

    endpoint: Endpoint
    pool: NodePool
    log: EventLog
    hellos: Mapping[int, Hello] = field(default_factory=dict)  # of those who have said it already
    snapshot: Snapshot | None = None  # what to lay out instead of a checkpoint
    protection: Protection = field(default_factory=lambda: Protection("off"))
    #: Told of a node whose loss needed no new generation.
    survived: Callable[[events.Regrouped], None] = lambda event: None


class BaseLeader:
    """The part of a master that knows no strategy. By itself it has no plan: it gathers the nodes. `_member` is what works on
    the master's own node."""

    #: What nodes say to each other, of which a leader has nothing to know: it goes to the member at once.
    members_own: ClassVar[frozenset[type[Message]]] = frozenset()

    def __init__(self, start: Start, committed: int = 0, detailed_steps: int = 0) -> None:
        self.endpoint = start.endpoint
        self.hellos = dict(start.hellos)
        self._node_pool = start.pool
        self._log = start.log
        self._snapshot = start.snapshot
        self._member: Member = NoPlanYet(start.endpoint)
        self._reports = Reports(committed, detailed_steps, start.endpoint.clock)
        self._committed = committed
        self._placed: set[tuple[int, int]] = set()  # node, layer
        self._states: dict[int, tuple[LayerState, list[torch.Tensor]]] = {}  # by sender, of the layer that is awaited
        self._awaited: int | None = None
        self._gone: set[int] = set()
        self._last_watch = 0.0
        self._longest_step_s = 0.0

    @property
    def committed(self) -> int:
        """The first step whose batch has not been given to the nodes: everything before must be finished."""
        return self._committed

    def want_detail(self, step: int) -> None:
        """Every node records every span of this step, once: somebody looks on."""
        self._reports.asked = step
        self.endpoint.detailed_step = step
        for node in self.hellos.keys() - self._gone:
            self.endpoint.post(node, Detail(step))

    def gather(self, nodes: Iterable[int]) -> None:
        """Wait until each of these has said hello; the master need not."""
        for node in nodes:
            if node != MASTER:
                self._until_node(node, lambda node=node: node in self.hellos, "to start", HELLO_LIMIT_S)  # type: ignore[misc]

    def leave(self) -> dict[int, float]:
        """This generation ends: members put what they can reuse into their snapshot stores. Returns the losses of steps
        that are not counted yet."""
        self._member.leave()
        self._member = NoPlanYet(self.endpoint)
        return {}

    def stop(self, reason: str, limit_s: float = STOP_LIMIT_S) -> list[NodeLost]:
        """Tell every node to stop, and wait a moment for each to say goodbye. Returns those who had died before."""
        self.endpoint.end()
        for node in self.hellos:
            self.endpoint.post(node, Stop(reason))
        self._hear_farewells(limit_s)
        died = self._dead() if self._unheard() else {}
        if died:
            self._hear_farewells(LAST_WORDS_S)  # one that has ended may have said goodbye first
        self.endpoint.collect()  # the acknowledgements go out
        return [lost for node, lost in died.items() if node in self._unheard()]

    def _unheard(self) -> set[int]:
        return self.hellos.keys() - self._gone

    def _hear_farewells(self, limit_s: float) -> None:
        limit = self.endpoint.clock() + limit_s
        while self._unheard() and self.endpoint.clock() < limit:
            for mail in self.endpoint.collect():
                if isinstance(mail.message, Report | Bye):
                    self._take(mail)
            if not self._node_pool.advance():
                self.endpoint.wait(0.01)

    def _dead(self) -> dict[int, NodeLost]:
        """Everyone who is not there any more, whether it said goodbye or not."""
        found: dict[int, NodeLost] = {}
        while True:
            try:
                self._node_pool.check(self._member.step)
                return found
            except NodeLost as lost:
                if lost.node is None or lost.node in found:
                    return found
                found[lost.node] = lost
                self._node_pool.drop(lost.node)

    def farewell(self) -> events.NodeEnded:
        return self._member.farewell()

    def keep_in_touch(self) -> None:
        """While the run waits for something else: hear what nodes say, and notice who is gone."""
        while self._work_once():
            pass

    def try_lines(self) -> dict[int, tuple[float, float]]:
        return {}

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _until(self, condition: Callable[[], bool], waiting_for: Callable[[], str], limit_s: float) -> None:
        """Work until the condition holds; at most `limit_s` without any sign of life."""
        quiet_s, looked_at = 0.0, self.endpoint.clock()
        while not condition():
            worked, now = self._pump(), self.endpoint.clock()
            quiet_s = 0.0 if worked else quiet_s + min(now - looked_at, LONGEST_LOOK_S)
            looked_at = now
            if quiet_s > limit_s:
                raise WaitTimeout(f"waited {limit_s:.0f} s for {waiting_for()} without a sign of life")

    def _until_node(self, node: int, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Work until one node has done something. If it does not, it is as good as lost."""
        try:
            self._until(condition, lambda: f"node {node} {what}", limit_s)
        except WaitTimeout as stalled:
            self._node_pool.drop(node)
            raise NodeLost(str(stalled), node, limit_s) from None

    def _pump(self) -> bool:
        worked = self._work_once()
        if not worked:
            self.endpoint.wait(WAIT_S)
        return worked

    def _work_once(self) -> bool:
        """One piece of work, without waiting for any."""
        mail = self.endpoint.collect()
        for each in mail:
            self._take(each)
        worked = self._act()
        self._drop_offenders()
        helped = self._node_pool.advance()
        now = self.endpoint.clock()
        if now - self._last_watch > WATCH_EVERY_S:
            self._last_watch = now
            self._watch()
        return bool(mail) or worked or helped

    def _watch(self) -> None:
        try:
            self._node_pool.check(self._member.step)
        except NodeLost as lost:
            if lost.node is None or not self._survive(lost):
                raise
            self._node_pool.drop(lost.node)
            self.hellos.pop(lost.node, None)

    def _act(self) -> bool:
        try:
            return self._member.act()
        except Misconduct as error:
            self.endpoint.offended(error.node, str(error), sure=False)
            return True

    def _drop_offenders(self) -> None:
        """Who broke the protocol is out, and named; the run heals as from any loss."""
        step = self._member.step
        offences = [each for each in self.endpoint.offences() if each.node != MASTER]
        for each in offences:
            self._node_pool.expel(each.node, each.sure)
        for each in offences:
            lost = NodeLost(f"node {each.node} broke the protocol in step {step}: it {each.text}", each.node)
            if not self._survive(lost):
                raise lost
            self.hellos.pop(each.node, None)

    def _survive(self, lost: NodeLost) -> bool:
        """Whether this strategy can go on without a node, here and now."""
        return False

    def _take(self, mail: Mail) -> None:
        if self.endpoint.forgot(mail.sender):
            return
        try:
            self._heed(mail)
        except ProtocolError as error:
            if mail.sender == MASTER:
                raise
            self.endpoint.offended(mail.sender, str(error))

    def _heed(self, mail: Mail) -> None:
        message = mail.message
        if type(message) in self.members_own:
            self._member.handle(mail)
        elif isinstance(message, Hello):
            self.hellos[mail.sender] = check_node_replies.hello(message)
        elif isinstance(message, Report):
            for event in message.events:
                self._log.write_encoded(self._reports.line(event, mail.sender, self._committed))
        elif isinstance(message, Bye):
            if mail.sender in self._gone:
                raise ProtocolError("said goodbye twice")
            self._gone.add(mail.sender)  # whatever it says
            self._log.write_encoded(check_node_replies.last_event(message.event, mail.sender))
        elif isinstance(message, Placed):
            self._placed.add((mail.sender, message.layer))
        elif isinstance(message, Accused):
            self._accused(mail.sender, message)
        elif isinstance(message, Failed):
            said = untrusted.line(message.error), untrusted.lines(message.traceback)
            raise NodeFailed(f"node {mail.sender} failed in step {message.step}: {said[0]}\n{said[1]}")
        elif not self._hear(mail):
            self._member.handle(mail)

    def _accused(self, accuser: int, message: Accused) -> None:
        """Of the two one breaks the protocol. The accuser is believed: it has nothing to win."""
        if message.node == accuser:
            raise ProtocolError("accused itself")
        if message.node == MASTER:  # which answers as it is asked
            raise ProtocolError(f"asked for what it did not want: the master {untrusted.line(message.why)}")
        if message.node in self.hellos:  # else it is gone already
            self.endpoint.offended(message.node, f"{untrusted.line(message.why)} (says node {accuser})", sure=False)

    def _hear(self, mail: Mail) -> bool:
        """Messages to the master that only one strategy knows. True: it was one."""
        return False

    def _stall_limit(self) -> float:
        return max(STALL_LIMIT_S, STALL_FACTOR * self._longest_step_s)
