"""The master of the data-parallel strategies: deals batches out, hears what became of them, collects the model.

A batch's microbatches are dealt in order, an equal number to every worker; a worker gets work some steps ahead, so that it
never waits for the master, but never beyond a step at which the run may pause.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from ringtmp import untrusted
from ringtmp.data.batches import Batch
from ringtmp.errors import LossNotFinite, NodeLost, ProtocolError
from ringtmp.metrics import events
from ringtmp.model import portable_layer
from ringtmp.model.frozen_parameters import frozen_names
from ringtmp.plan.route import MASTER
from ringtmp.plan.sum_tree import SumTree
from ringtmp.runtime import check_node_replies
from ringtmp.runtime.base_leader import BaseLeader, Start
from ringtmp.runtime.checkpoint import Checkpoint, CheckpointWriter, LayerTensors, StateName
from ringtmp.runtime.losses import Score, what_to_try_when_not_finite
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.snapshot_schedule import places
from ringtmp.strategies.base import Roles, Upcoming, nothing_ahead
from ringtmp.strategies.data_parallel import own_samples
from ringtmp.strategies.data_parallel.collected_model import mean_loss, mean_of, of_keys, without_frozen
from ringtmp.strategies.data_parallel.member import ParallelMember
from ringtmp.strategies.data_parallel.message_checks import kept
from ringtmp.strategies.data_parallel.one_key_per_layer import by_range, by_tensor, from_tensors
from ringtmp.strategies.data_parallel.own_samples import Samples, joined
from ringtmp.strategies.data_parallel.parameter_keys import Key, following
from ringtmp.strategies.data_parallel.partial_epochs import Stretch
from ringtmp.strategies.data_parallel.replica import layer_flat
from ringtmp.strategies.data_parallel.samples_already_sent import Ledger
from ringtmp.transport.base import Channel
from ringtmp.wire.messages import (
    Enough,
    Fetch,
    Kept,
    LayerState,
    Lend,
    Lost,
    Message,
    Place,
    Restore,
    Scored,
    Store,
    Work,
    WorkDone,
)

if TYPE_CHECKING:
    from ringtmp.strategies.data_parallel.plan import ParallelPlan

#: Layers on their way to their holders: the master holds no more of the model than this and one layer.
PLACING_BYTES = 8 * 1024**2


class DataParallelLeader(BaseLeader):
    def __init__(self, start: Start, plan: ParallelPlan) -> None:
        super().__init__(start, plan.request.step, plan.enlist.detailed_steps)
        self._survived = start.survived
        self._told = self._snapshot.told if self._snapshot is not None else {}
        self._plan = plan
        self._layers = plan.request.layers
        self._workers = plan.roles.workers
        self._servers = plan.roles.servers
        self._unprotected: set[int] = set()  # servers whose loss would lose something
        self._laid_out = False
        self._pace = plan.pace
        self._tree = SumTree(plan.enlist.recipe.sum_tree)
        self._stretch = Stretch(plan.pace.enough)
        self._ledgers = {worker: Ledger() for worker in self._workers}
        self._pauses = False  # the run does, behind all that is dealt out
        self._done = plan.request.step
        self._dids: dict[int, list[tuple[int, WorkDone]]] = {}
        self._dealt: dict[int, dict[int, float]] = {worker: {} for worker in self._workers}  # step -> share, under way
        self._last_loss = math.nan
        self._fetch: Fetch | None = None  # what is being collected
        self._carried = 0.0  # what was done beyond the steps counted so far, in batches
        self._pool: list[WorkDone] = []  # what was done and not yet counted towards a step, where steps mix
        self._scores: dict[int, list[Scored]] = {}
        self._unscored: Counter[int] = Counter()  # by worker: evaluations it has not answered
        self._most_samples = 0  # of the batch that is evaluated
        self._asked_whole = False  # the layer that was asked for last
        self._kept: dict[int, tuple[Kept, list[torch.Tensor]]] = {}
        # Before there is a member, which claims what lies here.
        step, snapshots = None if self._snapshot is None else self._snapshot.step, self.endpoint.snapshots
        self._holders = {} if step is None else places(step, self.hellos, snapshots.contents())  # by layer
        self._part = self._member = cast(ParallelMember, plan.strategy.member(self.endpoint, plan.enlist))
        self._part.emit = self._log.write
        self.endpoint.inspect_too(self._inspect)

    # -- setting up ---------------------------------------------------------------------------------------------------

    def lay_out(self, checkpoint: Checkpoint) -> None:
        """Everyone gets the plan; servers their keys, workers the layers; one layer at a time."""
        enlist = self._plan.enlist
        for node in range(enlist.nodes):
            if node != MASTER:
                self.endpoint.post(node, enlist)
        for index, layer in enumerate(self._layers):
            holders = self._holders.get(index, [])
            for worker in holders:
                self.endpoint.post(worker, Restore(enlist.step, index, portable_layer.encode(layer)))
            lacking = [worker for worker in self._workers if worker not in holders]
            if not lacking:
                continue
            tensors, state = self._from(holders[0], index) if holders else checkpoint.layer(index, layer)
            if self._servers:
                self._store(index, tensors, state)
            held: list[torch.Tensor | None] = [
                None if self._servers and each.trainable else tensor
                for each, tensor in zip(layer.tensors, tensors, strict=True)
            ]
            names = () if self._servers else tuple(state)
            for worker in lacking:
                # A node that has its own tensors changes them: nobody may share memory with it.
                moving = [*held, *(state[name] for name in names)]
                if worker == MASTER:
                    moving = [each.clone() if each is not None else None for each in moving]
                self.endpoint.post(worker, Place(index, portable_layer.encode(layer), names), moving)
            self._settle(PLACING_BYTES)
        if self._plan.loss is not None:
            layer, tensors = self._plan.loss
            for worker in self._workers:
                self.endpoint.post(worker, Place(len(self._layers), portable_layer.encode(layer), ()), tensors)
        self._settle(0)
        self._laid_out = True

    def _from(self, worker: int, index: int) -> LayerTensors:
        """A layer from a worker that has all of it."""
        self._states.clear()
        self._awaited = index
        self._asked_whole = True
        self.endpoint.post(worker, Fetch(index, self._plan.enlist.step))
        self._until(lambda: worker in self._states, lambda: f"node {worker} to send layer {index}", self._stall_limit())
        message, given = self._states[worker]
        own = len(self._layers[index].tensors)
        return given[:own], dict(zip(message.state, given[own:], strict=True))

    def _store(self, index: int, tensors: Sequence[torch.Tensor], state: dict[StateName, torch.Tensor]) -> None:
        layer, layout = self._layers[index], layer_flat(self._layers[index])
        if not layout.slots:
            return
        trainable = [tensor for each, tensor in zip(layer.tensors, tensors, strict=True) if each.trainable]
        keys = [key for key in self._plan.table if key.layer == index]
        cut = by_tensor if self._tree.parts > 1 else by_range
        for key, (names, parts) in zip(keys, cut(layout, keys, trainable, state), strict=True):
            owner = self._plan.owners[key.number]
            self.endpoint.post(owner, Store(key.number, names), parts)
            if self._pace.replicas:
                copies = [each.clone() for each in parts]
                self.endpoint.post(following(self._servers, owner), Store(key.number, names), copies)

    def _settle(self, most_bytes: int) -> None:
        """Until no more than this is on its way."""
        others = [node for node in range(self._plan.enlist.nodes) if node != MASTER]
        self._until(
            lambda: sum(self.endpoint.in_flight_bytes(node, Channel.BULK) for node in others) <= most_bytes,
            lambda: "the layers to arrive",
            self._stall_limit(),
        )

    # -- training -----------------------------------------------------------------------------------------------------

    def train_step(self, step: int, batch: Batch, fresh: bool, upcoming: Upcoming = nothing_ahead) -> float:
        started = self.endpoint.clock()
        if self._committed == step:
            self._deal(step, batch, fresh)
        while self._may_deal(step) and (later := upcoming(self._committed)) is not None:
            self._deal(self._committed, later, False)
        self._pauses = self._may_deal(step)
        self._give_up_the_rest()
        self._until(lambda: self._complete(step), lambda: self._waiting_for(step), self._stall_limit())
        self._longest_step_s = max(self._longest_step_s, self.endpoint.clock() - started)
        return self._count(step)

    def _may_deal(self, step: int) -> bool:
        """Whether the next step may be dealt out while this one is under way: not the first after a warm start."""
        alone, next_alone = (each < self._pace.warm_start for each in (step, self._committed))
        return self._committed <= step + self._pace.ahead and alone == next_alone

    def _give_up_the_rest(self) -> None:
        if self._pauses and self._stretch.may_end():
            for worker in self._workers:
                self.endpoint.post(worker, Enough(self._committed))

    def _complete(self, step: int) -> bool:
        if step < self._plan.request.step:
            return True  # in the generation before this one
        if self._pace.mixed:
            under_way = any(self._dealt[worker] for worker in self._workers)
            enough = self._carried + sum(each.share for each in self._pool) > 1 - 1e-9
            return enough and (bool(self._pool) or not under_way)
        here = dict(self._dids.get(step, []))
        quorum = self._pace.quorum
        came = sum(not did.skipped for did in here.values())
        return (quorum is not None and came >= quorum) or all(worker in here for worker in self._workers)

    def _count(self, step: int) -> float:
        """The mean loss of the samples that made up the step. Where nobody could tell, that of the step before."""
        if step < self._plan.request.step:
            self._last_loss = self._told.get(step, self._last_loss)
            return self._last_loss
        if self._pace.mixed:
            taken: list[WorkDone] = []
            share = 0.0
            while self._pool and (not taken or self._carried + share < 1 - 1e-9):
                taken.append(self._pool.pop(0))
                share += taken[-1].share
            self._carried += share - 1
        else:
            taken = [did for _, did in sorted(self._dids.pop(step, []), key=lambda each: each[0])]
            self._done = step + 1
        self._last_loss = mean_loss(taken, self._last_loss)
        return self._last_loss

    def leave(self) -> dict[int, float]:
        for mail in self.endpoint.collect():  # what the last steps came to may be among it
            self._take(mail)
        super().leave()
        heard = {step: mean_loss([did for _, did in dids], math.nan) for step, dids in self._dids.items()}
        return {**self._told, **{step: loss for step, loss in heard.items() if math.isfinite(loss)}}

    def _deal(self, step: int, batch: Batch, fresh: bool) -> None:
        for worker in self._workers:
            share = self._dealt[worker][step] = self._send_work(worker, step, batch, True, fresh)
            self._stretch.dealt(share, fresh and worker == self._workers[0])
        self._committed = step + 1

    def _send_work(self, worker: int, step: int, batch: Batch, training: bool, fresh: bool) -> float:
        """The share of the batch that was sent."""
        rank, n, count = self._workers.index(worker), len(self._workers), len(batch.targets)
        first, stop = rank * count // n, (rank + 1) * count // n
        if training and self._tree.parts > 1:  # whole parts
            mine = self._tree.microbatches(self._tree.share(rank, n), count)
            first, stop = mine.start, mine.stop
        if training and step < self._pace.warm_start:
            first, stop = (0, count) if rank == 0 else (count, count)
        sizes = tuple(len(each) for each in batch.targets[first:stop])
        own = training and self._pace.own_samples
        if own:
            sizes = own_samples.sizes(batch, rank, n, stop - first)
        samples = None
        if sizes:
            samples = own_samples.taken(batch, rank, n) if own else joined(batch, first, stop)
        work = Work(
            step, training, fresh, batch.samples, first, sizes, "train" if training else "test", microbatches=count
        )
        return self._post_work(worker, work, samples)

    def _post_work(self, worker: int, work: Work, samples: Samples | None) -> float:
        """The share of the batch that was sent. `work.table`: where the samples' numbers count."""
        table, tensors = "", list[torch.Tensor | None]()
        if samples is not None:
            inputs, targets, numbers = samples
            table, tensors = self._ledgers[worker].to_send(work.table, numbers, inputs, targets)
        self.endpoint.post(worker, msgspec.structs.replace(work, table=table), tensors)
        return sum(work.sizes) / work.samples

    def evaluate(self, batches: Iterable[Batch], step: int, bytes_model: bool) -> Score:
        score = Score(bytes_model=bytes_model)
        if not self._pace.alike:
            self._lend()
        for batch in batches:
            self._scores.clear()
            self._most_samples = batch.samples
            asked = 0
            workers: tuple[int, ...] = ()
            while workers != self._workers:  # again if one was lost meanwhile; what is counted is the last answer
                asked, workers = asked + 1, self._workers
                for worker in workers:
                    self._send_work(worker, step, batch, False, False)
                self._unscored.update(workers)
                self._until(
                    lambda asked=asked: not self._silent(asked),  # type: ignore[misc]
                    lambda asked=asked: f"node {self._silent(asked)[0]} to evaluate",  # type: ignore[misc]
                    self._stall_limit(),
                )
            for worker in workers:
                part = self._scores[worker][-1]
                score.loss_sum += part.loss_sum
                score.samples += part.samples
                score.right += part.right
                score.guesses += part.guesses
                score.token_loss_sum += part.token_loss_sum
                score.tokens += part.tokens
        return score

    def _lend(self) -> None:
        """Workers differ from one another: what is evaluated is the model that would be saved."""
        for index, layer in enumerate(self._layers):
            tensors = without_frozen(layer, self._layer_state(index)[0])
            for worker in self._workers:
                self.endpoint.post(worker, Lend(index), tensors)
            self._settle(PLACING_BYTES)

    def _silent(self, asked: int) -> list[int]:
        """Workers that have not answered every time they were asked."""
        return [worker for worker in self._workers if len(self._scores.get(worker, ())) < asked]

    # -- the model back to the disk -----------------------------------------------------------------------------------

    def save(self, writer: CheckpointWriter) -> None:
        for index, layer in enumerate(self._layers):
            tensors, state = self._layer_state(index)
            writer.add(index, layer, tensors, state, frozen_names(layer))

    def _collect(self, index: int, wanted: Sequence[Key], apart: bool) -> None:
        """The layer from everyone; `apart`: all that each worker has of it."""
        self._states.clear()
        self._kept.clear()
        self._awaited = index
        self._fetch = Fetch(index, self._committed, False)
        self._asked_whole = apart
        for node in dict.fromkeys((*(self._owner(key) for key in wanted), *self._workers)):
            whole = apart or (node == MASTER and not self._servers)
            self.endpoint.post(node, Fetch(index, self._committed, whole))
        self._until(
            lambda: len(self._kept) == len(wanted) and all(worker in self._states for worker in self._workers),
            lambda: f"layer {index} to come back",
            self._stall_limit(),
        )
        self._fetch = None

    def _layer_state(self, index: int) -> LayerTensors:
        layer, apart = self._layers[index], not self._servers and not self._pace.alike
        wanted = [key for key in self._plan.table if key.layer == index]
        self._collect(index, wanted, apart)
        own = {worker: tensors for worker, (_, tensors) in self._states.items()}
        if apart:
            mean, count = mean_of([own[worker] for worker in self._workers]), len(layer.tensors)
            return mean[:count], dict(zip(self._states[MASTER][0].state, mean[count:], strict=True))
        if self._servers:
            together = from_tensors if self._tree.parts > 1 else of_keys
            trainable, state = together(layer_flat(layer), [self._kept[key.number] for key in wanted])
        else:
            message, given = self._states[MASTER]
            flags = [each.trainable for each in layer.tensors]
            trainable = [tensor for tensor, flag in zip(given, flags, strict=False) if flag]
            own[MASTER] = [tensor for tensor, flag in zip(given, flags, strict=False) if not flag]
            state = dict(zip(message.state, given[len(flags) :], strict=True))
        parameters, rest = iter(trainable), iter(mean_of([own[worker] for worker in self._workers]))
        return [next(parameters) if each.trainable else next(rest) for each in layer.tensors], state

    def _owner(self, key: Key) -> int:
        owner = self._plan.owners[key.number]
        while owner not in self._servers:
            owner = following(self._plan.roles.servers, owner)
        return owner

    def _waiting_for(self, step: int) -> str:
        done = {worker for worker, _ in self._dids.get(step, [])}
        late = [worker for worker in self._workers if worker not in done]
        return f"node {late[0] if late else self._workers[0]} in step {step}"

    def _hear(self, mail: Mail) -> bool:
        message = mail.message
        if isinstance(message, WorkDone):
            dealt = self._dealt[mail.sender].get(message.step)
            if dealt is None or not abs(dealt - message.share) <= 1e-9:  # it may be no number
                raise ProtocolError(f"says that it did {message.share:.6g} of step {message.step}, not {dealt}")
            del self._dealt[mail.sender][message.step]
            if not message.skipped and not math.isfinite(message.loss):
                raise LossNotFinite(
                    f"the loss is {message.loss} in step {message.step} on node {mail.sender}: "
                    f"{what_to_try_when_not_finite(message.step)}"
                )
            self._stretch.done(0.0 if message.skipped else message.share)
            self._give_up_the_rest()
            if self._pace.mixed:
                self._pool.append(message)
            elif message.step >= self._done:  # later than its step was counted: a straggler beyond the quorum
                self._dids.setdefault(message.step, []).append((mail.sender, message))
        elif isinstance(message, Scored):
            untrusted.whole(message.samples, "the number of samples", 0, self._most_samples)
            untrusted.whole(message.guesses, "the number of guesses")
            untrusted.whole(message.right, "the number of right ones", 0, message.guesses)
            untrusted.whole(message.tokens, "the number of tokens")
            if not self._unscored[mail.sender]:
                raise ProtocolError("sent Scored, which nobody asked for")
            self._unscored[mail.sender] -= 1
            self._scores.setdefault(mail.sender, []).append(message)
        elif isinstance(message, LayerState):
            if message.layer == self._awaited:  # else asked for twice, because somebody was lost meanwhile
                self._states[mail.sender] = (message, mail.present())
        elif isinstance(message, Kept) and self._plan.table[message.key].layer != self._awaited:
            pass  # asked for twice, because somebody was lost meanwhile
        elif isinstance(message, Kept):
            self._kept[message.key] = (message, mail.present())
        else:
            return False
        return True

    def _inspect(self, sender: int, message: Message) -> None:
        if isinstance(message, LayerState):
            check_node_replies.layer_of(message.layer, len(self._layers))
            check_node_replies.layer_state(message, self._layers[message.layer], self._asked_whole)
        elif isinstance(message, Kept):
            kept(message, self._plan.table)

    def _survive(self, lost: NodeLost) -> bool:
        """Where the strategy allows it, the others go on: without the worker, or with the keys of the next server."""
        node, started = lost.node, self.endpoint.clock()
        if node is None or not self._laid_out:
            return False
        if self._tree.parts > 1 and node in self._workers:  # its share of the sums would be missing
            return False
        roles, strategy = Roles(self._servers, self._workers), self._plan.strategy
        settings, nodes = strategy.read(self._plan.enlist.settings), self._plan.enlist.nodes
        if not strategy.can_lose(settings, roles, node, self._unprotected, nodes):
            return False
        serves, works = node in self._servers, node in self._workers
        done = []
        if works:
            self._workers = tuple(each for each in self._workers if each != node)
            self._carried += sum(self._dealt.pop(node).values())  # nobody will do it any more
            keepers = "the servers keep the parameters" if self._servers else "each with its own parameters"
            done.append(f"{len(self._workers)} workers go on, {keepers}")
        heir = node
        if serves:
            heir = following(self._servers, node)
            self._unprotected |= {heir, self._servers[self._servers.index(node) - 1]}
            self._servers = tuple(each for each in self._servers if each != node)
            done.append(f"node {heir} serves its keys, which have no replica now")
        self._log.write(events.Warned(started, f"{lost}; {' and '.join(done)}"))
        self._part.lose(node)
        for other in self.hellos:
            if other != node:
                self.endpoint.post(other, Lost(node))
        if serves and self._fetch is not None:
            self.endpoint.post(heir, self._fetch)
        self._survived(
            events.Regrouped(
                time.monotonic(), self._committed, self.endpoint.generation, str(lost), len(self.hellos),
                self.endpoint.clock() - started, (node,), lost.notice_s, 0,
                "replica" if serves else "servers" if self._servers else "workers",
            )
        )  # fmt: skip
        return True
