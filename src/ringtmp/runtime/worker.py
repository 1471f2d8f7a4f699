"""A worker's life: say hello, be set up, get layers, work until told to stop; when another is lost, begin again."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ringtmp.errors import Misconduct, ProtocolError, Unasked
from ringtmp.metrics import events, power_of_this_device
from ringtmp.metrics.events import NodeEnded, Reading
from ringtmp.plan.route import MASTER
from ringtmp.runtime import compute_device
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.member import MakeMember, Member
from ringtmp.system.resources import peak_rss_bytes, rss_bytes
from ringtmp.transport.base import Channel
from ringtmp.wire.address import Address
from ringtmp.wire.messages import Accused, Bye, Detail, Hello, Renew, Report, Stop


class Worker:
    def __init__(
        self,
        endpoint: Endpoint,
        master_address: Address,
        make_member: MakeMember,
        asked: Callable[[Endpoint, Mail], bool] = lambda endpoint, mail: False,
    ) -> None:
        """`asked` answers what a node can be asked before it has a plan."""
        self.endpoint = endpoint
        self.member: Member | None = None
        self._make_member = make_member
        self._asked = asked
        self.stopped: str | None = None  # the reason, once told to stop
        self._early: list[Mail] = []  # what overtook the plan: channels keep no order among one another
        endpoint.connect(MASTER, master_address)
        self._say_hello()

    def turn(self) -> bool:
        """One piece of work; False when there is none."""
        early = self.member is None
        mail = self.endpoint.collect()
        for each in mail:
            if self.endpoint.forgot(each.sender):
                continue
            if isinstance(each.message, Renew):
                self._renew(each.message.generation)
                return True  # the rest of the mail is of the generation that has ended
            if isinstance(each.message, Stop):
                self.stopped = each.message.reason
                last = self.member.farewell() if self.member is not None else farewell(self.endpoint)
                self.endpoint.post(MASTER, Bye(events.encode(last)))
                return True
            self._take(each, early)
        worked = self._act()
        self._accuse()
        return worked or bool(mail)

    def _take(self, mail: Mail, early: bool) -> None:
        """`early`: it was judged before there was a plan."""
        if isinstance(mail.message, Detail):
            self.endpoint.detailed_step = mail.message.step
            return
        if self.member is not None:
            self._handle(self.member, mail, early)
            return
        try:
            if self._asked(self.endpoint, mail):
                return
        except ProtocolError as error:
            self._blame(mail.sender, error)
            return
        self.member = self._make_member(self.endpoint, mail.message)
        if self.member is None:
            self._early.append(mail)
            return
        for each in self._early:
            self._handle(self.member, each, early=True)
        self._early.clear()

    def _handle(self, member: Member, mail: Mail, early: bool) -> None:
        try:
            if early and mail.sender != self.endpoint.node:
                self.endpoint.judge(mail.sender, mail.message)
            member.handle(mail)
        except ProtocolError as error:
            self._blame(mail.sender, error)

    def _act(self) -> bool:
        try:
            return self.member.act() if self.member is not None else False
        except Misconduct as error:
            self._blame(error.node, error)
            return True

    def _blame(self, node: int, error: ProtocolError) -> None:
        """A node that breaks the protocol costs itself. Whoever trusts nobody but the master cannot do without it."""
        if node == MASTER and isinstance(error, Unasked):
            self.endpoint.post(MASTER, Accused(MASTER, str(error)))  # which knows what it was asked
            return
        if node in (MASTER, self.endpoint.node):
            raise error
        self.endpoint.offended(node, str(error))

    def _accuse(self) -> None:
        for offence in self.endpoint.offences():
            if offence.node == MASTER:
                raise ProtocolError(f"the master {offence.text}")
            self.endpoint.post(MASTER, Accused(offence.node, offence.text))

    def _renew(self, generation: int) -> None:
        if generation > self.endpoint.generation:
            if self.member is not None:
                self.member.leave()
            self.member = None
            self._early.clear()
            self.endpoint.renew(generation)
            self._say_hello()

    def _say_hello(self) -> None:
        kept = self.endpoint.snapshots.contents()
        capability, units = torch.backends.cpu.get_cpu_capability(), compute_device.bfloat16_units()
        hello = Hello(os.getpid(), str(torch.__version__), capability, kept, units, compute_device.name())
        self.endpoint.post(MASTER, hello)

    @property
    def step(self) -> int:
        return self.member.step if self.member is not None else 0


def report(endpoint: Endpoint, event: events.Event) -> None:
    """An event of this node, for the master's log."""
    endpoint.post(MASTER, Report((events.encode(event),)))


def reading_of(endpoint: Endpoint) -> Callable[[float], Reading]:
    """What this node's process has, and has sent, for those who look on."""
    return lambda at: Reading(at, rss_bytes(), endpoint.traffic.sent_to())


def farewell(endpoint: Endpoint) -> NodeEnded:
    """What a node has to say at its end."""
    tensor = endpoint.traffic.counters(Channel.TENSOR)
    everything = endpoint.traffic.counters()
    return NodeEnded(
        endpoint.node,
        peak_rss_bytes(),
        tensor.payload_sent,
        tensor.payload_received,
        endpoint.traffic.counters(Channel.BULK).payload_received,
        everything.overhead_sent,
        everything.resent,
        power=power_of_this_device.power(torch.get_num_threads()),
        sent_to=endpoint.traffic.sent_to(),
    )
