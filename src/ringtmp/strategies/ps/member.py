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

    value:D   on push: if |w' - w_j| > D for what some other worker j has read and not yet pushed a gradient of: hold it back
              (M. Langer et al., Distributed Training of Deep Learning Models, 2020, 3.3.4)
    asp:S     as bsp; on pull: send only what differs by more than S of itself from what the worker has
              (K. Hsieh et al., Gaia, NSDI 2017; there the filter is between data centres, here between server and worker)
    Downpour  J. Dean et al., Large Scale Distributed Deep Networks, NIPS 2012; on worker i in step t:
                if t mod n_fetch = 0: w_i <- w (asynchronously)
                g <- gradient at w_i;  accrued <- accrued + g;  w_i <- w_i - rate(t) g
                if (t + 1) mod n_push = 0: push accrued;  accrued <- 0      (the paper pushes where t mod n_push = 0)

    eager     E. Xing et al., Petuum, KDD 2015; J. Wei et al., Managed Communication and Consistency, SoCC 2015; on the server:
                when min over workers of clock grows: send w to every worker, for step clock + S
    enough    Project Adam ends an epoch when 75 % of it are done; on worker i, when told so before a pause of the run:
                for every step t dealt out and not begun: tell every server that no gradient of t comes
    teams     A. Mamidala et al., MXNet-MPI, 2018: workers of a team add up among themselves, and the first pushes and pulls
              once for all (proxy.py); they add up by all-reduce (team_sums.py) or through the first. In stages (T. Chen et
              al., MXNet, 2015: proxies between workers and servers) those first workers form teams again (teams.py)
    factors   T. Chilimbi et al., Project Adam, OSDI 2014: gradients of fully connected layers are made in the server
                worker: X <- what entered the matrix (K rows), E <- errors behind it
                        K (inputs + outputs of the key) <= values of the key: push(key, X, E, t), else push(key, E^T X, t)
                server: g <- E^T X, then as above

Departures. With `factors` a worker decides key by key, and X travels for every key of a large matrix; the paper has whole
layers. The optimizer of the run (SGD, Adam, ...) takes the place of plain descent. Above a bound of 0 each gradient is
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

from collections.abc import Callable

import msgspec

from ringtmp.errors import ProtocolError
from ringtmp.metrics import events, power_of_this_device
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.route import MASTER
from ringtmp.plan.sum_tree import SumTree
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.worker import farewell, reading_of, report
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.data_parallel.linear_gradients import known
from ringtmp.strategies.data_parallel.message_checks import KeyScrutiny, is_a
from ringtmp.strategies.data_parallel.parameter_keys import following
from ringtmp.strategies.data_parallel.replica import Replica
from ringtmp.strategies.data_parallel.trainer import Trainer
from ringtmp.strategies.ps.client import Client
from ringtmp.strategies.ps.proxy import Proxy
from ringtmp.strategies.ps.server import Server
from ringtmp.strategies.ps.settings import PsSettings
from ringtmp.strategies.ps.teams import Teams
from ringtmp.wire.formats import wire_format
from ringtmp.wire.messages import Enlist, GradientPart, Lost, Pulled, Work


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
        teams = Teams.of(roles.workers, settings.team_counts)
        pushing = Roles(roles.servers, teams.top)
        self.server = (
            Server(endpoint, plan, settings, pushing, table=table, owners=owners, recorder=recorder) if serves else None
        )
        self.trainer: Trainer | None = None
        self._client: Client | None = None
        self._proxy: Proxy | None = None
        if works:
            above, ring = teams.above(endpoint.node), settings.ring_of(teams.team(endpoint.node))
            to = owners if above is None else [above] * len(table)
            if teams.below(endpoint.node):
                self._proxy = Proxy(
                    endpoint, teams, ring, above=to, table=table,
                    step=plan.step, lag=settings.lag, wire=wire_format(plan.wire), recorder=recorder,
                )  # fmt: skip
                to = [endpoint.node] * len(table)
            factored = [layer for layer, each in enumerate(plan.linear) if each]
            replica = Replica(plan.recipe, endpoint.node, settings.fetch == "layerwise", factored)
            self._client = Client(
                endpoint, plan, settings, replica, table=table, owners=to, recorder=recorder, team=ring
            )
            self._client.nodes = nodes_of(plan, roles, endpoint.node)
            self.trainer = Trainer(endpoint, plan, recorder, self._client, replica)
            self.trainer.emit = lambda event: self.emit(event)
        elif self.server is not None:
            self.server.emit = lambda event: self.emit(event)
        scrutiny = KeyScrutiny(
            table, plan.wire, len(roles.servers), lambda: self.step, most_share=float(settings.n_push),
            parts=bool(settings.significant), nodes=lambda worker: nodes_of(plan, roles, worker), by_tree=bool(plan.slots),
            linear=known(plan.linear),
        )  # fmt: skip
        # A head is a worker to whoever is above it and a server to those below.
        endpoint.enter_plan(
            is_a(lambda: Roles((*self._everyone.servers, *teams.heads), self._everyone.workers)), scrutiny
        )
        if self._client is not None and self._client.team_sums is not None:
            endpoint.inspect_too(self._client.team_sums.scrutiny)
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
        elif isinstance(message, GradientPart) and self._client is not None and self._client.team_sums is not None:
            self._recorder.received(message.bucket, message.chunk, mail.first_at, mail.arrived_at, mail.payload_bytes)
            self._client.team_sums.part(mail)
        elif self._proxy is not None and isinstance(message, Pulled) and self._proxy.takes_from(mail.sender):
            self._proxy.pulled(message, mail)
        elif self._proxy is not None and self._proxy.handle(mail):
            pass
        elif isinstance(message, Pulled) and self._client is not None:
            self._client.pulled(message, mail)
        elif self.server is not None and self.server.handle(mail):
            pass
        elif self.trainer is None or not self._worked(self.trainer, mail):
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def _worked(self, trainer: Trainer, mail: Mail) -> bool:
        message = mail.message
        if self._proxy is not None and isinstance(message, Work) and message.training:
            self._proxy.dealt(message, self._roles.workers)
        return trainer.handle(mail)

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
        if self._proxy is not None:
            self._proxy.lose(node)
        if self._client is not None and heir is not None:
            self._client.lose(node, heir)

    def leave(self) -> None:
        """Keys may be of different steps: a new generation begins with a checkpoint. Nothing waits for a garbage
        collection."""
        self.server = self.trainer = self._client = self._proxy = None

    def farewell(self) -> events.NodeEnded:
        last = farewell(self.endpoint)
        if self._client is not None and self._client.given_up:
            last = msgspec.structs.replace(last, dropped=self._client.given_up)
        return last if self.server is None else self.server.counted(last)
