"""A node's mailbox: typed messages to and from peers, over links over a transport."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringtmp.errors import ProtocolError
from ringtmp.runtime.kept_programs import Programs
from ringtmp.runtime.snapshot_store import SnapshotStore
from ringtmp.system.resources import free_memory_bytes
from ringtmp.transport.base import Arrival, Channel, Transport
from ringtmp.wire.address import Address
from ringtmp.wire.messages import Bye, Message, Stop
from ringtmp.wire.reliable_link import Counters, Delivery, Link
from ringtmp.wire.who_may_send import END, MEETING, PLAN, IsA, Phase

if TYPE_CHECKING:
    from ringtmp.transport.sums_together import SumsTogether

#: Links that bring nothing are looked at this often: for what a silent peer may not have got.
LOOK_EVERY_S = 0.1


class Mail(NamedTuple):
    sender: int
    message: Message
    tensors: list[torch.Tensor | None]
    payload_bytes: int
    first_at: float
    arrived_at: float

    def present(self) -> list[torch.Tensor]:
        """The tensors, without holes."""
        return [each for each in self.tensors if each is not None]


class Offence(NamedTuple):
    """A peer broke the protocol. Not `sure`: somebody else says so, or it may have passed on what others did."""

    node: int
    text: str
    sure: bool


#: Sees every arriving message (sender, message) before memory is taken for it; raises ProtocolError.
Inspector = Callable[[int, Message], None]


class Traffic:
    """What went over all links of a node, those of ended generations and of forgotten peers included."""

    def __init__(self, links: Mapping[tuple[int, Channel], Link]) -> None:
        self._links = links
        self._retired: list[tuple[int, Channel, Counters]] = []
        self._elsewhere: dict[int, Counters] = {}

    def retire(self, peer: int, channel: Channel, link: Link) -> None:
        """A link that carries nothing more still counts."""
        self._retired.append((peer, channel, link.counters))

    def counters(self, *channels: Channel) -> Counters:
        """Sums over all links of these channels; all channels if none is named."""
        total = Counters()
        for _, channel, counters in self._counted():
            if channels and channel not in channels:
                continue
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(counters, name))
        return total

    def sent_to(self) -> dict[int, int]:
        """Tensor payload sent to each peer."""
        found: dict[int, int] = {}
        for peer, channel, counters in self._counted():
            if channel is Channel.TENSOR and counters.payload_sent:
                found[peer] = found.get(peer, 0) + counters.payload_sent
        return found

    def count_elsewhere(self, peer: int, sent: int, received: int) -> None:
        """Payload that went to this peer, and came, by another way than links."""
        if peer not in self._elsewhere:
            self._elsewhere[peer] = Counters()
            self._retired.append((peer, Channel.TENSOR, self._elsewhere[peer]))
        self._elsewhere[peer].payload_sent += sent
        self._elsewhere[peer].payload_received += received

    def _counted(self) -> list[tuple[int, Channel, Counters]]:
        return [*self._retired, *((peer, channel, link.counters) for (peer, channel), link in self._links.items())]


class Endpoint:
    def __init__(
        self,
        transport: Transport,
        ring: str,
        generation: int,
        clock: Callable[[], float] = time.monotonic,
        limit_bytes: int | None = None,
        snapshots: SnapshotStore | None = None,
    ) -> None:
        """No message may bring more than `limit_bytes`: the memory that is free now, unless told otherwise."""
        self.limit_bytes = limit_bytes or free_memory_bytes()
        self.node = transport.node
        self.clock = clock
        self._transport = transport
        #: Where the transport's library makes sums over all nodes itself; None: it makes none.
        self.sums: SumsTogether | None = getattr(transport, "sums", None)
        #: All nodes as torch.distributed has them, where it started them and was asked to; else None.
        self.mesh: Any = getattr(transport, "mesh", None)
        #: What outlives a generation.
        self.snapshots = snapshots or SnapshotStore()
        self.programs = Programs()
        self._ring = ring
        self._generation = generation
        self._links: dict[tuple[int, Channel], Link] = {}
        self._local: list[Mail] = []
        self._forgotten: set[int] = set()
        self._peers: set[int] = set()
        self._met: dict[int, Address] = {}
        #: Links of ended generations to peers not heard in this one: what was said last may not have reached them.
        self._parting: dict[int, list[Link]] = {}
        self.traffic = Traffic(self._links)
        self.detailed_step = -1  # which somebody wants to see in full
        self._looked_at = 0.0
        #: What peers are to this node under its plan; None: there is none yet.
        self._is_a: IsA | None = None
        self._inspectors: list[Inspector] = []
        self._ending = False
        self._offences: list[Offence] = []
        #: (peer, posted at, acknowledged at, payload bytes) of delivered messages with tensors; taken by the recorder.
        self.sent: list[tuple[int, float, float, int]] = []

    @property
    def generation(self) -> int:
        return self._generation

    # -- who may say what ---------------------------------------------------------------------------------------------

    @property
    def _phase(self) -> Phase:
        return END if self._ending else MEETING if self._is_a is None else PLAN

    def enter_plan(self, is_a: IsA, inspector: Inspector) -> None:
        """There is a plan: `is_a` says what peers are under it, `inspector` looks at what messages say."""
        self._is_a = is_a
        self._inspectors.append(inspector)

    def inspect_too(self, inspector: Inspector) -> None:
        """Another look at what messages say, in this generation."""
        self._inspectors.append(inspector)

    def end(self) -> None:
        """Everyone is told to stop."""
        self._ending = True

    def judge(self, sender: int, message: Message) -> None:
        """The one place where it is decided whether a message may be handled. ProtocolError: it may not."""
        rule, name = message.RULE, type(message).__name__
        offence = rule.offence(name, message, sender, self.node, self._phase, self._is_a)
        if offence is not None:
            raise ProtocolError(offence)
        for inspector in self._inspectors:
            inspector(sender, message)

    def offended(self, node: int, text: str, sure: bool = True) -> None:
        """A peer broke the protocol: it is neither heard nor told anything any more in this generation."""
        if node not in self._forgotten:
            self._offences.append(Offence(node, text, sure))
            self.forget(node)

    def offences(self) -> list[Offence]:
        """Those not asked for before."""
        found, self._offences = self._offences, []
        return found

    # -- generations and peers ----------------------------------------------------------------------------------------

    def renew(self, generation: int, word: Message | None = None, to: Collection[int] = ()) -> None:
        """The next generation begins, on the same transport: whatever was under way is dropped, and what is still to come
        of it will be too. `word` goes to each of `to` in the generation that ends, until it is heard in this one."""
        assert generation > self._generation, "generations only grow"
        self._transport.listen_again()
        now = self.clock()
        parting = {}
        for peer in to:
            assert word is not None
            links = [*self._parting.get(peer, ()), self._link(peer, Channel.CONTROL)]
            for link in links:
                link.send(word, (), now)
                self._flush(peer, Channel.CONTROL, link)
            parting[peer] = links
        self._parting = parting
        for (peer, channel), link in self._links.items():
            self.traffic.retire(peer, channel, link)
        self._links.clear()
        self._local.clear()
        self._forgotten.clear()
        self._peers |= self._met.keys()
        self._met = {}
        self.sent.clear()
        self._is_a = None
        self._inspectors.clear()
        self._offences.clear()
        self._generation = generation

    def connect(self, peer: int, address: Address) -> None:
        self._transport.connect(peer, address)

    def connect_all(self, addresses: Mapping[int, Address]) -> None:
        """These are the peers of this generation, beside the master; whoever was one before and is not is hung up on. One
        that was only met is not heard any more either."""
        for peer in (self._peers | self._met.keys()) - addresses.keys():
            self._transport.hang_up(peer)
        for peer in self._met.keys() - addresses.keys():
            self.forget(peer)
        for peer, address in addresses.items():
            if self._met.get(peer) != address:
                self._transport.connect(peer, address)
        self._peers, self._met = set(addresses), {}

    def meet(self, addresses: Mapping[int, Address]) -> None:
        """Others of this generation to try lines with, before it is known who is a peer."""
        assert self._forgotten.isdisjoint(addresses), "who was forgotten stays so in this generation"
        for peer, address in addresses.items():
            self._transport.connect(peer, address)
        self._met = dict(addresses)

    def post(self, peer: int, message: Message, tensors: Sequence[torch.Tensor | None] = ()) -> None:
        """Send. Never blocks; the tensors must not change until they have arrived."""
        now = self.clock()
        if peer == self.node:
            self._local.append(Mail(peer, message, list(tensors), 0, now, now))
            return
        if isinstance(message, Stop | Bye):
            self._acknowledge()  # whoever leaves now waits for nothing else
        if peer in self._forgotten:
            return
        channel = message.RULE.channel
        link = self._link(peer, channel)
        link.send(message, tensors, now)
        self._flush(peer, channel, link)

    def collect(self) -> list[Mail]:
        """Everything that has arrived, in order per sender and channel."""
        mail, self._local = self._local, []
        touched: dict[tuple[int, Channel], Link] = {}
        for arrival in self._transport.receive():
            if arrival.peer in self._forgotten:
                continue
            key = (arrival.peer, arrival.channel)
            link = touched[key] = self._link(*key)
            now = self.clock()
            delivery = self._receive(link, arrival, now)
            if delivery is not None:
                mail.append(
                    Mail(key[0], delivery.message, delivery.tensors, delivery.payload_bytes, delivery.first_at, now)
                )
        now = self.clock()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            touched = self._links  # nobody's news for a while may be news too
            for peer, links in self._parting.items():
                for link in links:
                    link.tick(now)
                    self._flush(peer, Channel.CONTROL, link)
        for (peer, channel), link in touched.items():
            link.tick(now)
            if link.outbox:
                self._flush(peer, channel, link)
            if link.delivered:
                self.sent += [(peer, *each) for each in link.delivered if each[2]]
                link.delivered.clear()
        return mail

    def _receive(self, link: Link, arrival: Arrival, now: float) -> Delivery | None:
        parting = self._parting.get(arrival.peer) if self._parting and arrival.channel is Channel.CONTROL else None
        foreign = link.counters.foreign
        try:
            delivery = link.receive(arrival.frames, now)
        except ProtocolError as error:
            self.offended(arrival.peer, str(error))
            return None
        if parting is not None:
            if link.counters.foreign == foreign:
                del self._parting[arrival.peer]  # it has come along
            else:
                for old in parting:
                    with contextlib.suppress(ProtocolError):
                        old.receive(arrival.frames, now)  # nobody listens any more; only acknowledgements count
                    self._flush(arrival.peer, Channel.CONTROL, old)
        return delivery

    def wait(self, timeout_s: float) -> None:
        """Until something arrives, at most this long."""
        if not self._local:
            self._transport.wait(timeout_s)

    def flushed(self) -> bool:
        """Everything posted has arrived."""
        return all(link.idle for link in self._links.values())

    def in_flight_bytes(self, peer: int, channel: Channel) -> int:
        """Sent to a peer and not yet acknowledged."""
        link = self._links.get((peer, channel))
        return link.in_flight_bytes if link is not None else 0

    def unheard(self, limit_s: float) -> tuple[int, ...]:
        """Peers that for so long have acknowledged nothing of what was sent to them."""
        now = self.clock()
        silent = {
            peer
            for (peer, _), link in self._links.items()
            if link.waiting_since is not None and now - link.waiting_since > limit_s
        }
        return tuple(sorted(silent))

    def forget(self, peer: int) -> None:
        """A peer is gone for good: nothing more is sent to it, and nothing awaited."""
        for channel in Channel:
            if (link := self._links.pop((peer, channel), None)) is not None:
                self.traffic.retire(peer, channel, link)
        self._forgotten.add(peer)

    def forgot(self, peer: int) -> bool:
        """Mail of such a peer may still be in hand: it was collected together with the news."""
        return peer in self._forgotten

    def close(self) -> None:
        self.snapshots.close()
        self._transport.close()

    def _acknowledge(self) -> None:
        for (peer, channel), link in self._links.items():
            link.acknowledge()
            self._flush(peer, channel, link)

    def _link(self, peer: int, channel: Channel) -> Link:
        key = (peer, channel)
        if key not in self._links:
            self._links[key] = Link(
                self._ring,
                self._generation,
                self.limit_bytes,
                lambda message: self._look_at(peer, channel, message),
                patient=channel is Channel.TENSOR,
            )
        return self._links[key]

    def _look_at(self, peer: int, channel: Channel, message: Message) -> None:
        if message.RULE.channel is not channel:
            raise ProtocolError(f"sent {type(message).__name__} on the {channel.name.lower()} channel")
        self.judge(peer, message)

    def _flush(self, peer: int, channel: Channel, link: Link) -> None:
        while link.outbox:
            self._transport.send(peer, channel, link.outbox.popleft())
