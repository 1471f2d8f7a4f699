"""A server of the parameter-server strategy: holds a shard of the keys, sums up, updates, answers. See ps.py."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch.nn.utils import clip_grads_with_norm_

from ringtmp.errors import ProtocolError
from ringtmp.metrics import events
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.route import MASTER
from ringtmp.plan.sum_tree import SumTree
from ringtmp.runtime import gradients_at_segment_edges as edges
from ringtmp.runtime.clipping import norm_of, total_norm
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.strategies.base import Roles
from ringtmp.strategies.data_parallel.linear_gradients import known
from ringtmp.strategies.data_parallel.parameter_keys import Key, following
from ringtmp.strategies.ps.apply_gradients import Gradient, Slot
from ringtmp.strategies.ps.settings import PsSettings
from ringtmp.transport.base import Channel
from ringtmp.wire.formats import wire_format
from ringtmp.wire.messages import Copied, Copy, Enlist, Fetch, Kept, Pull, Pulled, Push, Squares, Store, Total

#: Answers handed to a worker's link at once; the rest wait here, where their order can still change.
CREDIT_BYTES = 2 * 1024**2
#: Steps that a worker may be ahead of what a replica has, beyond those it makes without an answer.
MOST_EARLY = 8


class Server:
    """Holds a shard. All it does, it does on a message."""

    def __init__(
        self, endpoint: Endpoint, plan: Enlist, settings: PsSettings, roles: Roles,
        *, table: Sequence[Key], owners: Sequence[int], recorder: Recorder,
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self.me = endpoint.node
        self.step = plan.step
        self.emit: Callable[[events.Event], None] | None = None  # a worker on the same node reports for both
        self._plan = plan
        self._linear = known(plan.linear)
        self._wire = wire_format(plan.wire)
        self._settings = settings
        self._roles = roles
        self._table = table
        self._owned = {key.number for key in table if owners[key.number] == self.me}
        self._recorder = recorder
        self._slots: dict[int, Slot] = {}
        self._replicas: dict[int, Slot] = {}  # of the server before this one
        self._quorum = settings.quorum or len(roles.workers)
        self._tree = SumTree(plan.recipe.sum_tree)
        if self._tree.parts > 1:  # a sum from every worker for each node of the tree that is all its own
            shares = [self._tree.share(rank, len(roles.workers)) for rank in range(len(roles.workers))]
            self._quorum = sum(len(self._tree.whole(share)) for share in shares)
        self._norms: dict[int, torch.Tensor] = {}  # with a tree, by key
        self._next = following(roles.servers, self.me) if settings.replicas else None
        self._waiting: list[tuple[int, Pull]] = []  # pulls that ask for what is not there yet
        self._copying: list[tuple[int, int, Pull, int]] = []  # (until copied, worker, pull, oldest)
        # By worker: what to answer, the lowest step and key first, and of two for the same the one asked for first.
        self._answers: dict[int, list[tuple[int, int, int, int, bool]]] = {worker: [] for worker in roles.workers}
        self._turns = itertools.count()
        self._scattered: dict[int, int] = {}  # by key: the step up to which every worker was sent it, unasked
        self._fetches: list[Fetch] = []
        self._early: list[Mail] = []
        self._squares: dict[int, float] = {}
        self._dropped = 0
        self._total: Total | None = None  # the norm of the newest step
        self._changed = False
        self._fresh_step = -1

    def handle(self, mail: Mail) -> bool:
        message, started = mail.message, None
        if isinstance(message, Push | Pull) and mail.sender not in self._answers:
            raise ProtocolError(f"sent {type(message).__name__}, which only the head of its team may")
        if isinstance(message, Push) and message.key not in self._slots:
            if message.key not in self._replicas:
                raise ProtocolError(f"sent its gradient of key {message.key} to a server that does not have it")
            self._keep_early(mail, message)
            return True
        if isinstance(message, Push | Copy):
            if isinstance(message, Push) and message.fresh and self._fresh_step < message.step:
                self._fresh_step = message.step
                if self.emit is not None:  # else a worker on this node keeps the record
                    self._recorder.fresh()
            started = self._recorder.begin()
        if isinstance(message, Push):
            self._recorder.received(
                self._table[message.key].layer, -1, mail.first_at, mail.arrived_at, mail.payload_bytes
            )
            self._pushed(mail.sender, message, self._gradient(message, mail.present()))
        elif isinstance(message, Pull):
            self._waiting.append((mail.sender, message))
        elif isinstance(message, Store):
            self._store(message, mail.present())
        elif isinstance(message, Fetch):
            self._fetches.append(message)
            self._changed = True
            return self.me not in self._roles.workers  # a worker on the same node has something to add
        elif isinstance(message, Copy):
            self._repeat(message, mail.present(), mail.sender)
        elif isinstance(message, Copied):
            slot = self._slots.get(message.key)
            if slot is None or message.updates > slot.applied:
                raise ProtocolError(f"says that it has {message.updates} updates of key {message.key}")
            slot.copied = max(slot.copied, message.updates)
        elif isinstance(message, Squares):
            self._add_squares(mail.sender, message, mail.present())
        elif isinstance(message, Total):
            self._scale(message)
        else:
            return False
        self._changed = True
        if started is not None and isinstance(message, Push | Copy):
            self._recorder.end(started, "update", self._table[message.key].layer, -1)
            self._close()
        return True

    def _keep_early(self, mail: Mail, push: Push) -> None:
        """The sender has heard sooner that a server is lost whose keys lie here. What it was answered is in the replica."""
        slot, settings = self._replicas[push.key], self._settings
        done = slot.updates if settings.gathered else slot.clocks.get(mail.sender, 0)
        bound = 0 if math.isinf(settings.bound) else int(settings.bound)
        if push.step > done + bound + settings.n_push + settings.n_fetch + MOST_EARLY:
            raise ProtocolError(f"sent its gradient of key {push.key} of step {push.step} out of turn")
        name = (mail.sender, push.key, push.step, push.node)
        if any(name == (each.sender, other.key, other.step, other.node) for each in self._early
               if isinstance(other := each.message, Push)):  # fmt: skip
            raise ProtocolError(f"sent its gradient of key {push.key} of step {push.step} twice")
        if push.step >= done:
            self._early.append(mail)

    # -- push ---------------------------------------------------------------------------------------------------------

    def _gradient(self, push: Push, given: Sequence[torch.Tensor]) -> edges.Gradient:
        key = self._table[push.key]
        if not push.rows:
            return self._wire.decode(given, key.size) if given else None
        linear, half = self._linear[key.layer], len(given) // 2
        rows, errors = self._wire.decode(given[:half]), self._wire.decode(given[half:])
        return linear.gradient(key.start, key.stop, rows, errors, linear.columns(key.start, key.stop)[0])

    def _pushed(self, worker: int, push: Push, gradient: edges.Gradient) -> None:
        slot = self._slots[push.key]
        if gradient is None and self._settings.gathered and self._tree.parts == 1:
            raise ProtocolError(f"sent no gradient of key {push.key} in step {push.step}, for which all wait")
        if self._settings.gathered:
            whose = push.node or worker
            if push.step > slot.updates:  # it is computed with parameters that nobody can have yet
                raise ProtocolError(f"sent its gradient of key {push.key} of step {push.step} out of turn")
            if push.step < slot.updates or whose in slot.arrived.get(push.step, {}):
                # Late for a quorum; or sent again because a server died, and the replica had it already.
                self._dropped += self._settings.quorum is not None
                return
            slot.arrived.setdefault(push.step, {})[whose] = (gradient, push.share)
            self._update_if_complete(slot)
        elif gradient is None:  # given up
            self._copy(slot, push.step, worker, 0.0, None)
            slot.clocks[worker] = max(slot.clocks[worker], push.step + 1)
        elif push.step >= slot.clocks[worker]:
            slot.used_by(worker)
            mean = gradient.div_(push.share) if push.share else gradient
            slot.held.append(Gradient(worker, push.step, push.share, mean))
            self._apply_held(slot)

    def _apply_held(self, slot: Slot) -> None:
        """Gradients as they came, but for those that would change too much of what another worker is computing with."""
        bound, again = self._settings.change, True
        while again:
            again = False
            for each in tuple(slot.held):
                if each.share and bound is None:
                    slot.apply(each.values, each.step, each.share)
                elif each.share and not slot.apply_within(each, bound or 0.0):
                    continue
                slot.held.remove(each)
                self._copy(slot, each.step, each.worker, each.share, each.values)
                slot.clocks[each.worker] = each.step + 1
                again = bound is not None

    def _update_if_complete(self, slot: Slot) -> None:
        while slot.summed is None and len(slot.arrived.get(slot.updates, {})) >= self._quorum:
            if self._tree.parts > 1:
                gradient = slot.add_up(slot.updates, self._tree)
                del slot.arrived[slot.updates]
            else:
                gradient = slot.sum_up(slot.updates)
            if self._plan.recipe.clip_norm is None:
                self._update(slot, gradient)
            elif self._total is not None and self._total.step == slot.updates:  # a shard taken over in mid-step
                self._update(slot, self._clipped(gradient, self._total))
            else:
                slot.summed = (gradient,)
                self._offer_squares()

    def _update(self, slot: Slot, gradient: edges.Gradient) -> None:
        step = slot.updates
        if gradient is not None:
            slot.apply(gradient, step)
        self._copy(slot, step, -1, 1.0, gradient)
        slot.updates = step + 1

    # -- clipping: the norm of all gradients is a sum over servers ----------------------------------------------------

    def _offer_squares(self) -> None:
        summed = [(slot.summed[0], slot.values) for slot in self._slots.values() if slot.summed is not None]
        if len(summed) == len(self._slots):
            step, count = next(iter(self._slots.values())).updates, len(self._roles.servers)
            if self._tree.parts > 1:  # as torch does: the norm of every parameter's norm
                norms = [norm_of(*each) for each in summed]
                self.endpoint.post(self._roles.servers[0], Squares(step, 0.0, count, tuple(self._slots)), norms)
                return
            squares = sum(float(each.double().square().sum()) for each, _ in summed if each is not None)
            self.endpoint.post(self._roles.servers[0], Squares(step, squares, count))

    def _add_squares(self, server: int, message: Squares, norms: Sequence[torch.Tensor]) -> None:
        if message.servers != len(self._roles.servers):
            return  # said before a server was lost; it is said again
        if self._total is not None and message.step <= self._total.step:
            # Said again because a server was lost; all there is to say is known.
            self.endpoint.post(server, self._total)
            return
        if message.step != (self._plan.step if self._total is None else self._total.step + 1):
            raise ProtocolError(f"sent the squares of step {message.step} out of turn")
        self._squares[server] = message.value
        self._norms.update(zip(message.keys, norms, strict=True))
        if len(self._squares) == len(self._roles.servers):
            norm = sum(self._squares[each] for each in self._roles.servers) ** 0.5
            if self._tree.parts > 1:
                if len(self._norms) < len(self._table):
                    raise ProtocolError(f"sent the norms of step {message.step} without those of every key")
                together = torch.stack([self._norms[key.number] for key in self._table])
                norm = float(total_norm([together], self._plan.order))
            self._squares.clear()
            self._norms.clear()
            for each in self._roles.servers:
                self.endpoint.post(each, Total(message.step, norm))

    def _scale(self, message: Total) -> None:
        if self._total is not None and message.step <= self._total.step:
            return  # told twice
        self._total = message
        for slot in self._slots.values():
            summed, slot.summed = slot.summed, None
            if summed is not None:
                self._update(slot, self._clipped(summed[0], message))
        for slot in self._slots.values():
            self._update_if_complete(slot)
        self._close()

    def _clipped(self, gradient: edges.Gradient, total: Total) -> edges.Gradient:
        limit = self._plan.recipe.clip_norm
        assert limit is not None
        if gradient is None:
            return None
        if self._tree.parts > 1:  # torch's own, for its bits
            owner = gradient.new_empty(gradient.shape)
            owner.grad = gradient
            clip_grads_with_norm_([owner], limit, torch.tensor(total.norm, dtype=gradient.dtype))
            return gradient
        return gradient.mul_(min(1.0, limit / (total.norm + 1e-6)))

    # -- pull ---------------------------------------------------------------------------------------------------------

    def act(self) -> bool:
        """Answer what can be answered."""
        if self._changed:
            self._changed = False
            if self._settings.eager:
                self._scatter()
            self._waiting = [each for each in self._waiting if not self._admit(*each)]
            self._copying = [each for each in self._copying if not self._release(*each)]
            self._fetches = [each for each in self._fetches if not self._fetched(each)]
        sent = [self._answer(worker, queue) for worker, queue in self._answers.items() if queue]
        return any(sent)

    def _oldest(self, slot: Slot) -> int:
        """Every gradient before this step is in the values."""
        return slot.updates if self._settings.gathered else min(slot.clocks.values())

    def _admit(self, worker: int, pull: Pull) -> bool:
        slot = self._slots.get(pull.key)
        if slot is None:
            return False
        oldest = self._oldest(slot)
        if oldest < (pull.step if pull.exact else pull.step - self._settings.bound):
            return False
        if self._settings.change is not None and slot.clocks[worker] < pull.step:
            return False  # its own gradient is held back, and so is the worker
        self._copying.append((slot.applied if self._is_copied(slot) else 0, worker, pull, oldest))
        return True

    def _scatter(self) -> None:
        """Every worker gets each key that is a step further, as if it had asked for the newest step that may have it."""
        for number, slot in self._slots.items():
            oldest = self._oldest(slot)
            if oldest > self._scattered.get(number, self._plan.step):
                self._scattered[number] = oldest
                pull = Pull(number, oldest + int(self._settings.bound))
                copies = slot.applied if self._is_copied(slot) else 0
                self._copying += [(copies, worker, pull, oldest) for worker in self._roles.workers]

    def _release(self, copies: int, worker: int, pull: Pull, oldest: int) -> bool:
        """What a worker has seen must not be lost with this server: the replica has it first."""
        if self._is_copied(self._slots[pull.key]) and self._slots[pull.key].copied < copies:
            return False
        heapq.heappush(self._answers[worker], (pull.step, pull.key, next(self._turns), oldest, pull.exact))
        return True

    def _answer(self, worker: int, queue: list[tuple[int, int, int, int, bool]]) -> bool:
        sent = False
        while queue and self.endpoint.in_flight_bytes(worker, Channel.TENSOR) < CREDIT_BYTES:
            step, key, _, oldest, exact = heapq.heappop(queue)
            if self._settings.significant:
                answer = self._slots[key].significant(worker, self._settings.significant)
            else:
                answer = self._slots[key].answer(self._wire, worker, self._settings.shared)
            if self._settings.change is not None and not exact:
                self._slots[key].in_use_by(worker)
            if worker != self.me:
                self._recorder.count_sent(sum(each.nbytes for each in answer.tensors))
            self.endpoint.post(worker, Pulled(key, step, oldest, answer.change), answer.tensors)
            sent = True
        return sent

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _is_copied(self, slot: Slot) -> bool:
        """What was taken over from a lost server has no replica."""
        return self._next is not None and slot.key.number in self._owned

    def _copy(self, slot: Slot, step: int, worker: int, share: float, gradient: edges.Gradient) -> None:
        if self._next is not None and self._is_copied(slot):
            given = [] if gradient is None else [gradient]
            self._recorder.count_sent(sum(each.nbytes for each in given))
            self.endpoint.post(self._next, Copy(slot.key.number, step, worker, share), given)

    def _repeat(self, copy: Copy, given: Sequence[torch.Tensor], sender: int) -> None:
        slot = self._replicas.get(copy.key)
        if slot is None:
            raise ProtocolError(f"sent an update of key {copy.key}, which has no replica here")
        if copy.share and given:
            slot.apply(given[0], copy.step, copy.share)
        if copy.worker < 0:
            slot.updates = copy.step + 1
        elif copy.worker in slot.clocks:  # else it is lost
            slot.clocks[copy.worker] = copy.step + 1
        self.endpoint.post(sender, Copied(copy.key, slot.applied))

    def lose(self, node: int, heir: int) -> None:
        """The next server takes the shard over; what the lost one replicated has no replica any more."""
        if node == self._next:
            self._next = None
        if heir == self.me:
            for number, slot in self._replicas.items():
                slot.forget_readers()
                slot.copied = slot.applied
                self._slots[number] = slot
            self._replicas = {}
        self._roles = self._roles.without(node)
        self._changed = True
        self._squares.clear()
        if self._plan.recipe.clip_norm is not None:
            self._offer_squares()
        early, self._early = self._early, []
        for mail in early:
            self.handle(mail)

    def lose_worker(self, node: int) -> None:
        """The mean is over the workers that are left, from the first step on that is not complete with the lost one's
        gradient. What it sent of such a step is left out, so that no gradient counts for a whole batch's worth twice."""
        self._roles = self._roles.without(node)
        self._quorum = min(self._quorum, len(self._roles.workers))
        self._waiting = [each for each in self._waiting if each[0] != node]
        self._early = [each for each in self._early if each.sender != node]
        self._copying = [each for each in self._copying if each[1] != node]
        self._answers.pop(node, None)
        for slot in (*self._slots.values(), *self._replicas.values()):
            slot.leave_out(node)
        for slot in self._slots.values():
            if self._settings.gathered:
                self._update_if_complete(slot)
            else:
                self._apply_held(slot)
        self._changed = True
        self._close()

    # -- keys come and go ---------------------------------------------------------------------------------------------

    def _store(self, message: Store, tensors: list[torch.Tensor]) -> None:
        key = self._table[message.key]
        state = dict(zip(message.state, tensors[1:], strict=True))
        slot = Slot(key, tensors[0], state, self._plan.recipe, step=self._plan.step, workers=self._roles.workers)
        (self._slots if key.number in self._owned else self._replicas)[key.number] = slot

    def _fetched(self, fetch: Fetch) -> bool:
        mine = [slot for slot in self._slots.values() if slot.key.layer == fetch.layer]
        if any(self._oldest(slot) < fetch.step for slot in mine):
            return False
        for slot in mine:
            names = tuple(sorted(slot.state))
            # Cloned: training may go on while they travel.
            tensors = [slot.values.clone(), *(slot.state[name].clone() for name in names)]
            self.endpoint.post(MASTER, Kept(slot.key.number, names), tensors)
        return True

    # -- the record ---------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """A server's step is over when all its keys have been updated."""
        if self.emit is None:
            return
        self.endpoint.sent.clear()  # who waited for what to arrive is the workers' record
        done = min((self._oldest(slot) for slot in self._slots.values()), default=0)
        while self.step < done:
            self.emit(self._recorder.close_step(self.step, self._plan.step))
            self.step += 1

    def counted(self, last: events.NodeEnded) -> events.NodeEnded:
        applied = sum(slot.applied for slot in self._slots.values())
        return msgspec.structs.replace(last, applied=applied, dropped=last.dropped + self._dropped)
