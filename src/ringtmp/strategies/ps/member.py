"""Parameter server: servers hold the parameters as keys, workers push gradients and pull parameters.

A. Smola, S. Narayanamurthy, An Architecture for Parallel Topic Models, VLDB 2010; Q. Ho et al., More Effective Distributed
ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013; M. Li et al., Scaling Distributed Machine Learning with
the Parameter Server, OSDI 2014; J. Chen et al., Revisiting Distributed Synchronous SGD, 2016 (backup workers).

    server                                        worker i
    for every key: w <- w_0                       for t in 0, 1, 2, ...
    loop                                            await w of every layer, in the order of the forward pass
      on push(key, g, t) from worker i:             x <- share i of batch t
        bsp:   g_t <- g_t + g; of all n (or Q):     from the last layer down:
                 w <- w - rate(t) g_t                 g <- gradient of the layer;  push(key, g, t)
        else:  w <- w - rate(t) share_i g / share_i   pull(key) for step t + 1 (+ 1 above a bound of 0)
      on pull(key, t) from worker i:
        answer when min over workers of clock >= t - S

Symbols: n workers, S the bound (bsp 0, async infinite), Q the quorum, clock of a worker = steps it has pushed.

Departures. The optimizer of the run (SGD, Adam, ...) takes the place of plain descent. Above a bound of 0 each gradient is
applied as it comes, as the mean over the worker's own samples at its share of the learning rate, so that one batch moves
the weights about as far as in bsp; and a worker does not await its own newest gradient before it goes on (that is what
hides the exchange behind the computation), so what it reads lacks at most S steps of others and one of its own. Batches
are dealt by the master in the same order under every strategy. BatchNorm statistics are each worker's own, and their mean
is saved. Answers go out first to the worker that is furthest behind, then in the order of the next forward pass. In bsp a
worker pushes no more than it has answers for and a little: one that is early would fill the server's link with gradients
that complete nothing, while answers, which need that link's other direction, wait for the gradients of the late. Nobody
waits for a lost worker: a step's gradient is then the mean over the others' shares. With a tree of sums (plan/sum_tree.py)
keys are whole tensors, a worker pushes a sum for each node of the tree that is all its own, and servers add them up along it:
the bits of one process. A lost worker then costs a new generation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from ringtmp.errors import ProtocolError
from ringtmp.metrics import events, power_of_this_device
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.route import MASTER
from ringtmp.plan.sum_tree import SumTree
from ringtmp.runtime.gradient_sums import Sums
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.worker import farewell, reading_of, report
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.message_checks import KeyScrutiny, is_a
from ringtmp.strategies.data_parallel.parameter_keys import Key, following
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.trainer import Exchange, Trainer
from ringtmp.strategies.ps.server import Server
from ringtmp.strategies.ps.settings import PsSettings
from ringtmp.wire.formats import ErrorFeedback, wire_format
from ringtmp.wire.messages import Enlist, Lost, Pull, Pulled, Push

#: What a worker may have pushed to a server without an answer, where answers do not wait for all gradients.
AHEAD_BYTES = 6 * 1024**2


def nodes_of(plan: Enlist, roles: Roles, worker: int) -> tuple[int, ...]:
    """Of the tree of sums, those that a worker's parts add up to; none: there is no tree."""
    tree = SumTree(plan.recipe.sum_tree)
    if tree.parts == 1 or worker not in roles.workers:
        return ()
    return tree.whole(tree.share(roles.workers.index(worker), len(roles.workers)))


class PsMember:
    """A node of a parameter-server run: a server, a worker, or both."""

    def __init__(self, endpoint: Endpoint, plan: Enlist, settings: PsSettings, roles: Roles) -> None:
        self.endpoint = endpoint
        self._roles = self._everyone = roles  # those who are there; and who was at the beginning
        self.emit: Callable[[events.Event], None] = lambda event: report(endpoint, event)
        power = power_of_this_device.power(plan.recipe.threads)
        self._recorder = recorder = Recorder(
            endpoint.node, endpoint.clock, plan.detailed_steps, power_of_this_device.meter(), power,
            reading=reading_of(endpoint), asked=lambda: endpoint.detailed_step,
        )  # fmt: skip
        table = parameter_keys.table(plan.sizes, plan.slots, len(roles.servers))
        owners = [roles.servers[server] for server in parameter_keys.deal(table, len(roles.servers))]
        serves, works = endpoint.node in roles.servers, endpoint.node in roles.workers
        self.server = (
            Server(endpoint, plan, settings, roles, table=table, owners=owners, recorder=recorder) if serves else None
        )
        self.trainer: Trainer | None = None
        self._client: Client | None = None
        if works:
            replica = Replica(plan.recipe, endpoint.node, settings.fetch == "layerwise")
            self._client = Client(endpoint, plan, settings, replica, table=table, owners=owners, recorder=recorder)
            self._client.nodes = nodes_of(plan, roles, endpoint.node)
            self.trainer = Trainer(endpoint, plan, recorder, self._client, replica)
            self.trainer.emit = lambda event: self.emit(event)
        elif self.server is not None:
            self.server.emit = lambda event: self.emit(event)
        endpoint.enter_plan(
            is_a(lambda: self._everyone),
            KeyScrutiny(
                table,
                plan.wire,
                len(roles.servers),
                lambda: self.step,
                nodes=lambda worker: nodes_of(plan, roles, worker),
                by_tree=bool(plan.slots),
            ),
        )
        others = {peer: address for peer, address in plan.addresses.items() if peer not in (endpoint.node, MASTER)}
        endpoint.connect_all(others)

    @property
    def step(self) -> int:
        return self.trainer.step if self.trainer is not None else (self.server.step if self.server is not None else 0)

    def handle(self, mail: Mail) -> None:
        message = mail.message
        self._recorder.heard(mail.arrived_at)
        if self.endpoint.forgot(mail.sender):
            return  # what it did and is not counted is done by others
        if isinstance(message, Lost):
            self.lose(message.node)
        elif isinstance(message, Pulled) and self._client is not None:
            self._client.pulled(message, mail)
        elif self.server is not None and self.server.handle(mail):
            pass
        elif self.trainer is None or not self.trainer.handle(mail):
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def act(self) -> bool:
        served = self.server.act() if self.server is not None else False
        if self.trainer is not None:
            return self.trainer.act() or served
        if not served:
            self._recorder.waiting_for("gradients")
        return served

    def lose(self, node: int) -> None:
        """A node is gone. Of a server the replica answers; of a worker nothing more is awaited."""
        self.endpoint.forget(node)
        servers, workers = self._roles.servers, self._roles.workers
        self._roles = self._roles.without(node)
        heir = following(servers, node) if node in servers else None
        if self.server is not None and heir is not None:
            self.server.lose(node, heir)
        if self.server is not None and node in workers:
            self.server.lose_worker(node)
        if self._client is not None and heir is not None:
            self._client.lose(node, heir)

    def leave(self) -> None:
        """Keys may be of different steps: a new generation begins with a checkpoint. Nothing waits for a garbage
        collection."""
        self.server = self.trainer = self._client = None

    def farewell(self) -> events.NodeEnded:
        last = farewell(self.endpoint)
        return last if self.server is None else self.server.counted(last)


class Client(Exchange):
    """A worker's side: which parameters it has, what it has asked for, what it has pushed."""

    cause = "parameters"

    def __init__(
        self, endpoint: Endpoint, plan: Enlist, settings: PsSettings, replica: Replica,
        *, table: Sequence[Key], owners: Sequence[int], recorder: Recorder,
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self._plan = plan
        self._settings = settings
        self._table = table
        self._owners = list(owners)
        self._recorder = recorder
        self._replica = replica
        self._layers: list[list[Key]] = [[] for _ in plan.sizes]
        for key in table:
            self._layers[key.layer].append(key)
        self._asked: dict[int, Pull] = {}  # what is still to be answered
        self._questions: Counter[tuple[int, int]] = Counter()  # (key, step): how often it was asked for
        self._answered = dict.fromkeys(range(len(table)), -1)  # the step a key's newest answer is for
        self._versions = dict.fromkeys(range(len(table)), -1)  # every update before this step is in it
        self._incoming: dict[int, list[tuple[bool, torch.Tensor]]] = {}
        self._wire = wire_format(plan.wire)
        self._feedback = ErrorFeedback(self._wire)
        self._used: list[int] = []
        self._unconfirmed: dict[int, list[tuple[Push, list[torch.Tensor]]]] = {key.number: [] for key in table}
        self._fresh = False
        self._held: list[tuple[int, int, float, torch.Tensor]] = []  # gradients waiting to be clipped
        self._to_push: deque[tuple[Key, Push, list[torch.Tensor]]] = deque()
        self._unanswered: dict[int, tuple[int, int]] = {}  # key -> owner, bytes pushed
        self._paced = settings.deterministic and not self._layerwise and plan.recipe.clip_norm is None

    def begin(self, fresh: bool) -> None:
        self._fresh = fresh

    def ready(self, layer: int, step: int, training: bool) -> bool:
        """Await w. Asks, where nothing has been asked for yet, for every layer from this one on (layerwise: one ahead)."""
        exact = not training and not self._settings.deterministic
        waiting = any(self._missing(key, step, exact) for key in self._layers[layer])
        if waiting or self._layerwise:
            for deeper in self._layers[layer : layer + 2 if self._layerwise else None]:
                self._ask_for(deeper, step, exact)
        if waiting:
            return False
        for key in self._layers[layer]:
            self._load(key)
        if training:
            self._used += [self._versions[key.number] for key in self._layers[layer]]
        return True

    def again(self, layer: int, step: int) -> bool:
        if not self._layerwise:
            return True
        for deeper in reversed(self._layers[max(0, layer - 1) : layer + 1]):
            self._ask_for(deeper, step)
        return not any(self._missing(key, step) for key in self._layers[layer])

    def used(self, layer: int) -> None:
        if self._layerwise:
            self._replica.drop(layer)
            self._answered.update({key.number: -1 for key in self._layers[layer]})

    def overtaken(self, step: int) -> bool:
        return self._settings.quorum is not None and max(self._versions.values()) > step

    def gradient(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        if self._plan.recipe.clip_norm is not None and not self._settings.gathered:
            self._clip_and_push(layer, step, share, gradient)
        else:
            self._push(layer, step, share, gradient)

    def sums(self, layer: int, step: int, share: float, sums: list[Sums | None]) -> None:
        for at, key in enumerate(self._layers[layer]):  # a key is a tensor
            for node, found in zip(self.nodes, sums, strict=True):
                gradient = None if found is None else found[at]
                tensors = [] if gradient is None else [gradient.reshape(-1)]
                self._to_push.append((key, Push(key.number, step, share, self._fresh, node), tensors))
        self._send_pushes()

    def oldest(self) -> int | None:
        oldest = min(self._used, default=None)
        self._used = []
        return oldest

    def pulled(self, message: Pulled, mail: Mail) -> None:
        key = self._table[message.key]
        if not self._questions[key.number, message.step]:
            raise ProtocolError(f"sent key {message.key} for step {message.step}, which nobody asked for")
        self._questions[key.number, message.step] -= 1
        if not self._questions[key.number, message.step]:
            del self._questions[key.number, message.step]
        self._recorder.received(key.layer, -1, mail.first_at, mail.arrived_at, mail.payload_bytes)
        asked = self._asked.get(key.number)
        if asked is not None and asked.step <= (message.oldest if asked.exact else message.step):
            del self._asked[key.number]
            if self._unanswered.pop(key.number, None) is not None and self._to_push:
                self._send_pushes()
        self._answered[key.number] = max(self._answered[key.number], message.step)
        self._versions[key.number] = max(self._versions[key.number], message.oldest)
        tensor = self._wire.decode(mail.present(), key.size)
        queue = self._incoming.setdefault(key.number, [])
        if not message.change:
            queue.clear()
        queue.append((message.change, tensor))
        kept = self._unconfirmed[key.number]
        self._unconfirmed[key.number] = [each for each in kept if each[0].step >= message.oldest]
        if not self._settings.lag and asked is not None:
            # Asked for after the layer's backward pass: nobody is using the old values. An answer nobody waits for any
            # more (one came that was newer than it had to be) waits for the next forward pass.
            self._load(key)

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def _layerwise(self) -> bool:
        return self._settings.fetch == "layerwise"

    def _ask_for(self, wanted: Sequence[Key], step: int, exact: bool = False) -> None:
        for key in wanted:
            if self._missing(key, step, exact):
                self._ask(key, step, exact)

    def _missing(self, key: Key, step: int, exact: bool = False) -> bool:
        return (self._versions if exact else self._answered)[key.number] < step

    def _ask(self, key: Key, step: int, exact: bool = False) -> None:
        asked = self._asked.get(key.number)
        if asked is not None and asked.step >= step and asked.exact >= exact:
            return
        self._asked[key.number] = pull = Pull(key.number, step, exact)
        self._questions[key.number, step] += 1
        self.endpoint.post(self._owners[key.number], pull)

    def _load(self, key: Key) -> None:
        if key.number not in self._incoming:
            return
        self._replica.hold(key.layer)
        values = self._replica.values[key.layer][key.start : key.stop]
        for change, tensor in self._incoming.pop(key.number, ()):
            if change:
                values.add_(tensor)
            else:
                values.copy_(tensor)

    def _push(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        for key in self._layers[layer]:
            tensors = self._feedback.encode(key.number, gradient[key.start : key.stop])
            self._to_push.append((key, Push(key.number, step, share, self._fresh), tensors))
        self._send_pushes()

    def _send_pushes(self) -> None:
        """In their order, as far as each key's server may have them."""
        held: deque[tuple[Key, Push, list[torch.Tensor]]] = deque()
        ahead = Counter[int]()
        for owner, nbytes in self._unanswered.values():
            ahead[owner] += nbytes
        for key, push, tensors in self._to_push:
            owner, nbytes = self._owners[key.number], sum(each.nbytes for each in tensors)
            if ahead[owner] >= AHEAD_BYTES:
                held.append((key, push, tensors))
                continue
            if owner != self.endpoint.node:
                self._recorder.count_sent(nbytes)
            self.endpoint.post(owner, push, tensors)
            if self._paced:
                ahead[owner] += nbytes
                self._unanswered[key.number] = (owner, nbytes * max(1, len(self.nodes)))
            if self._settings.replicas:
                self._unconfirmed[key.number].append((push, tensors))
            if not self._layerwise:
                self._ask(key, push.step + 1 + self._settings.lag)
        self._to_push = held

    def _clip_and_push(self, layer: int, step: int, share: float, gradient: torch.Tensor) -> None:
        """Each gradient is an update of its own, so each is clipped on its own, when the whole of it is known."""
        self._held.append((layer, step, share, gradient))
        if layer > 0:
            return
        limit = self._plan.recipe.clip_norm
        assert limit is not None
        squares = sum(float(each.double().square().sum()) for *_, each in self._held)
        factor = min(1.0, limit * share / (squares**0.5 + 1e-6))  # the gradient is the mean times the share
        for each_layer, _, _, each in self._held:
            self._push(each_layer, step, share, each.mul_(factor))
        self._held.clear()

    def lose(self, node: int, heir: int) -> None:
        """Send again what the lost server may not have passed on, and ask again."""
        for key in self._table:
            if self._owners[key.number] != node:
                continue
            self._owners[key.number] = heir
            if key.number in self._unanswered:
                self._unanswered[key.number] = (heir, self._unanswered[key.number][1])
            for push, tensors in self._unconfirmed[key.number]:
                self.endpoint.post(heir, push, tensors)
            asked = self._asked.get(key.number)
            if asked is not None:
                self._questions[key.number, asked.step] += 1
                self.endpoint.post(heir, asked)
