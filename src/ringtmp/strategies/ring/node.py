"""The node loop: take what neighbours sent, ask the local rule what to do, do it, send the result on.

A node acts on its neighbours' messages alone. Every visit of the route that lies here works through passes (training
steps and evaluations) strictly in order; within a pass microbatches come and go in order, because links keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol, cast

import msgspec
import torch

from ringtmp.errors import Misconduct, ProtocolError
from ringtmp.metrics import events, power_of_this_device
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.next_action import Action, next_action
from ringtmp.plan.node_groups import share_of, who_has, without_any
from ringtmp.plan.pipeline_schedules import schedule_named
from ringtmp.plan.route import MASTER, Visit
from ringtmp.runtime import compute_device
from ringtmp.runtime.gradients_at_segment_edges import WrongGradient, detached, once_each, whole
from ringtmp.runtime.mailbox import Endpoint, Mail
from ringtmp.runtime.stage import Stage
from ringtmp.runtime.worker import farewell, reading_of, report
from ringtmp.strategies.ring.exchange_snapshots import NodeSnapshots
from ringtmp.strategies.ring.gather_state import copied
from ringtmp.strategies.ring.link_trials import echo
from ringtmp.strategies.ring.message_checks import Scrutiny
from ringtmp.strategies.ring.node_layers import NodeLayers
from ringtmp.strategies.ring.segment_queue import Pass, Share, VisitState
from ringtmp.strategies.ring.sums_and_norms import SumsAndNorms
from ringtmp.strategies.ring.tensor_routes import crossings_of, neighbours, ways_of
from ringtmp.system.resources import mind_memory
from ringtmp.wire.formats import wire_format
from ringtmp.wire.messages import (
    Activations,
    Echo,
    Echoed,
    Fetch,
    Gradients,
    GroupChange,
    GroupNorms,
    GroupState,
    GroupSum,
    GroupWeights,
    Inspect,
    Inspected,
    Norms,
    Place,
    Restore,
    Scale,
    Setup,
)  # fmt: skip

#: A neighbour that acknowledges nothing for so long is busy, or cannot be reached: the master finds out which.
UNHEARD_S = 10.0


class LossOwner(Protocol):
    """What only the master does: the loss at the tail."""

    @property
    def parameter_order(self) -> Sequence[int]:
        """Of the norms that reach the front, where layers do not go by it."""
        ...

    def tail(self, step: int, microbatch: int, training: bool, outputs: list[torch.Tensor]) -> torch.Tensor | None: ...

    def expects(self, message: Activations) -> None:
        """ProtocolError: this is not what went into the ring."""
        ...


def _nothing_known(message: Activations) -> None:
    """Only the master knows the batch."""


class Node:
    """One member of a ring. `turn` does one piece of work and never blocks."""

    def __init__(self, endpoint: Endpoint, setup: Setup, owner: LossOwner | None = None) -> None:
        self.endpoint = endpoint
        self.me = endpoint.node
        self.setup = setup
        self.route = setup.route
        self.step = setup.step  # steps done by every visit here
        power = power_of_this_device.power(setup.recipe.threads)
        self.recorder = Recorder(
            self.me, endpoint.clock, setup.detailed_steps, power_of_this_device.meter(), power,
            reading=reading_of(endpoint), asked=lambda: endpoint.detailed_step,
        )  # fmt: skip
        self._wire = wire_format(setup.wire)
        self._schedule = schedule_named(setup.rule)
        self._places = self._schedule.places(setup.window)
        defer = self._schedule.defers_weights
        recipe = setup.recipe
        recompute = None if setup.recompute == "none" else self._recompute
        self._clip = recipe.clip_norm is not None
        self._tree = setup.tree
        endpoint.programs.renew()
        self.visits = {visit.index: self._visit(visit, defer, recompute) for visit in setup.route.on(self.me)}
        order = owner.parameter_order if owner is not None else ()
        self._ending = SumsAndNorms(
            self.me, setup, self.visits, post=self._post, post_sum=self._post_sum, parameter_order=order
        )
        self._owner = owner
        endpoint.snapshots.keep_only(setup.step)
        endpoint.snapshots.forget_frozen(but={layer for visit in setup.route.on(self.me) for layer in visit.layers})
        self.keeping = NodeSnapshots(endpoint, setup.route, setup.keep, setup.lines.get(self.me, math.inf), setup.aside)
        self._news = True
        self._layers = NodeLayers(endpoint, setup, self.visits, self.keeping)
        self._work: dict[str, Callable[[VisitState], None]] = {
            "forward": self._forward, "backward": self._backward, "weights": self._weights, "update": self._update,
        }  # fmt: skip
        expects = owner.expects if owner is not None else _nothing_known
        scrutiny = Scrutiny(setup, self.me, self.visits, endpoint.limit_bytes, expects, self._ending)
        endpoint.enter_plan(scrutiny.is_a, scrutiny)
        self._first_step = setup.step
        self._last_visit = setup.route.last
        #: Called with every event this node produces. A worker sends it to the master.
        self.emit: Callable[[events.Event], None] = self._report
        endpoint.sent.clear()  # what lines were tried with
        near = neighbours(self.route, setup.flow, self.me)
        endpoint.connect_all({peer: setup.addresses[peer] for peer in near if peer != MASTER})

    def _visit(self, visit: Visit, defer: bool, recompute: Callable[[int], bool] | None) -> VisitState:
        setup = self.setup
        ways = {each: ways_of(setup.flow, visit.index, each) for each in (True, False)} if setup.flow else {}
        crossings = {each: crossings_of(way) for each, way in ways.items()}
        adds_up = visit.others and not setup.late
        final = (lambda position: self._ending.groups[visit.index].final(position)) if adds_up else None
        stage = Stage(
            visit, setup.recipe, defer, setup.step, recompute, crossings or None, final, programs=self.endpoint.programs
        )
        share = Share(self._tree, share_of(visit, self.me, self._tree)) if visit.others else None
        return VisitState(visit, stage, setup.recipe.staleness, setup.route.grouped, ways, share)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Take mail and do at most one piece of work. False: nothing to do until something arrives."""
        mail = self.endpoint.collect()
        for each in mail:
            self.handle(each)
        return self.act() or bool(mail)

    def act(self) -> bool:
        """Do the next piece of work, if the local rule has one."""
        if self._ending.settled():
            self._layers.answer_fetches(self.step)
        if not self._news:
            return self.keeping.send_some(idle=True)  # nothing was runnable, and nothing has come since
        ready = [
            state.ready(self._clip, self._in_flight(state), self._still_read(state), self._ending.settled(index))
            for index, state in self.visits.items()
        ]
        action = next_action(ready, self.setup.window, self._schedule)
        if action is not None:
            self._perform(action)
            self.keeping.send_some(idle=False)
            return True
        self._news = False
        self.recorder.waiting_for(self._cause())
        return False

    def handle(self, mail: Mail) -> None:
        message = mail.message
        self._news = True
        self.recorder.heard(mail.arrived_at)
        if not self._wire.exact and mail.sender != self.me and isinstance(message, Activations | Gradients):
            mail = mail._replace(tensors=self._wire.unpack(mail.tensors))
        if isinstance(message, Activations):
            self._expect(message.visit, mail).arrived(mail)
            if mail.payload_bytes and message.training:
                self.recorder.received(
                    message.visit, message.microbatch, mail.first_at, mail.arrived_at, mail.payload_bytes
                )
        elif isinstance(message, Gradients):
            self._expect(message.visit, mail).returns(mail)
            if mail.payload_bytes:
                self.recorder.received(
                    message.visit, message.microbatch, mail.first_at, mail.arrived_at, mail.payload_bytes
                )
        elif isinstance(message, Norms | Scale | GroupSum | GroupNorms | GroupWeights | GroupChange):
            self._ending.hear(self._expect(message.visit, mail), mail)
        elif isinstance(message, GroupState):
            gathered = self._ending.gathered[message.visit]
            gathered.put(mail)
            self.keeping.put_gathered(gathered)
        elif isinstance(message, Place):
            self._layers.place(message, mail.tensors)
        elif isinstance(message, Restore):
            self._layers.restore(message)
        elif isinstance(message, Echo):
            echo(self.endpoint, mail, message)
        elif isinstance(message, Echoed) or self.keeping.handle(mail):  # the former to a question from before the plan
            pass
        elif isinstance(message, Fetch):
            self._layers.fetch(message)
        elif isinstance(message, Inspect):
            bad = tuple(index for index, state in self.visits.items() if not state.stage.finite(message.microbatch))
            self.endpoint.post(mail.sender, Inspected(bad, self.endpoint.unheard(UNHEARD_S)))
        else:
            raise ProtocolError(f"sent {type(message).__name__}, which nobody expects")

    def _in_flight(self, state: VisitState) -> int:
        """Admitted at the front and not yet at its end: answered in training, arrived at the tail in evaluation."""
        current = state.current
        if current is None or state.visit.index != 0:
            return 0
        if current.training:
            return sum(each.forwarded - each.backwarded for each in state.passes)
        tail = self.visits[self._last_visit]
        if tail.done_turn >= current.turn or tail is state:
            return 0
        arrived = tail.current.forwarded if tail.current is not None and tail.current.turn == current.turn else 0
        return current.forwarded - arrived

    def _still_read(self, state: VisitState) -> bool:
        """Whether weight gradients that wait in a deeper visit here may be computed of this one's parameters: those it lent
        within this node were not copied, and an update would change them."""
        current = state.current
        return (
            current is not None
            and current.answered
            and state.stage.lends
            and any(
                other.stage.has_deferred(current.step)
                for other in self.visits.values()
                if other.visit.index > state.visit.index
            )
        )

    def _cause(self) -> str:
        """Why nothing is runnable."""
        deepest = max(self.visits.values(), key=lambda state: state.visit.index)
        for state in (deepest, *self.visits.values()):
            current = state.current
            if current is not None and current.training:
                if current.backwarded == current.microbatches:
                    return "clipping" if current.summed else "sums"
                if state.visit.index == 0 and state.activations:
                    return "window"
                if current.forwarded == current.microbatches:
                    return "gradients"
        return "activations"

    # -- work ---------------------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        state = self.visits[action.visit]
        self._layers.begin_work()
        if action.kind == "forward":
            head = cast(Activations, state.activations[0].message)
            if not head.training:  # idle and busy are shares of training steps alone
                self._forward(state)
                return
            if head.fresh and self._all_idle():
                self.recorder.fresh()
        started, before = self.recorder.begin(), state.done_turn
        self._work[action.kind](state)
        self.recorder.end(started, action.kind, action.visit, action.microbatch)
        if (
            action.kind == "update"
            and state.done_turn > before
            and all(each.done_turn >= state.done_turn for each in self.visits.values())
        ):
            self._close_step()

    def _all_idle(self) -> bool:
        return all(not state.passes for state in self.visits.values())

    def _forward(self, state: VisitState) -> None:
        message, mail = state.take()
        if message.keep and state.begins(message):
            self._keep(state, message.step)
        current = state.begin(message)
        if message.microbatch < 0:  # a member of a group that has none
            self._without_any(state, current)
            return
        inputs: list[torch.Tensor] = []
        wants: list[bool] = []
        for each in mail:
            part = cast(Activations, each.message)
            inputs += whole(each.tensors, part.same, part.wants)
            wants += part.wants
        outputs = state.stage.forward(message.microbatch, message.step, inputs, wants, message.training)
        current.forwarded += 1
        if state.stage.held + state.stage.deferred > self._places:
            sender = mail[0].sender
            assert sender != self.me, "more microbatches stored than there are places"
            raise Misconduct("sent more microbatches than the window admits", sender)
        if state.visit.index == self._last_visit:
            self._finish(state, message, outputs)
        else:
            self._send_on(state, message, outputs)
        if not current.training and current.forwarded == current.microbatches:
            state.end()

    def _keep(self, state: VisitState, step: int) -> None:
        """A snapshot of a stage at rest. Of a group the first keeps what all of them have."""
        first, gathered = state.visit.node == self.me, self._ending.gathered.get(state.visit.index)
        if gathered is not None:
            self.keeping.gather(step, state.stage, gathered)
        elif first:
            self.keeping.take(step, state.stage)
        elif self.setup.shares_state:
            for layer in state.stage.visit.layers:
                part = copied(state.stage.layer_state(layer, self.keeping.left_out(state.stage, layer))[1])
                message = GroupState(step, state.visit.index, layer, tuple(part))
                self.endpoint.post(state.visit.node, message, list(part.values()))

    def _without_any(self, state: VisitState, current: Pass) -> None:
        if not current.training:
            state.end()
            return
        self._ending.last_backward(state, current)
        self._ending.add_up_if_complete(state, current)

    def _finish(self, state: VisitState, message: Activations, outputs: list[torch.Tensor]) -> None:
        """At the tail: the loss, and with it the gradient that starts the way back."""
        assert self._owner is not None, "the tail lies on the master"
        if message.training:
            outputs = state.stage.to_loss(message.step, message.microbatch, outputs)
        loss = self._owner.tail(message.step, message.microbatch, message.training, outputs)
        if message.training:
            assert loss is not None
            state.stage.end_in(message.step, message.microbatch, loss)
            self.endpoint.post(self.me, Gradients(message.turn, message.step, state.visit.index, message.microbatch))

    def _send_on(self, state: VisitState, message: Activations, outputs: list[torch.Tensor]) -> None:
        """To the next visit always, even where nothing goes there; to others what they get from here."""
        me, made = state.visit.index, iter(detached(outputs))
        for target, count in state.leaving(message.training, len(outputs)):
            mine = list(islice(made, count))
            same, tensors = once_each(mine)
            onward = Activations(
                message.turn, message.step, target, message.microbatch, message.microbatches, message.training,
                message.fresh, tuple(each.requires_grad for each in mine), keep=message.keep, same=same,
                source=-1 if target == me + 1 else me,
            )  # fmt: skip
            self._post(self._peer(target, message.microbatch, message.microbatches), onward, tensors, message.training)
        if message.microbatch == 0:  # whoever has this one tells those who have none
            for member in without_any(self.route.visits[me + 1], message.microbatches, self._tree):
                none = msgspec.structs.replace(
                    message, visit=me + 1, microbatch=-1, wants=(), tensors=(), same=(), source=-1
                )
                self._post(member, none, (), message.training)

    def _peer(self, visit: int, microbatch: int, count: int) -> int:
        return who_has(self.route.visits[visit], microbatch, count, self._tree)

    def _backward(self, state: VisitState) -> None:
        message, mail = state.take_back()
        current = state.pass_of(message.turn)
        if message.microbatch != current.backwarded and not state.grouped:
            raise ProtocolError(f"a gradient for pass {message.turn}, microbatch {message.microbatch} came out of turn")
        me = state.visit.index
        gradients = None if me == self._last_visit else [tensor for each in mail for tensor in each.tensors]
        if last := current.backwarded + 1 == current.microbatches:
            self._ending.last_backward(state, current)
        try:
            entering = state.stage.backward(message.step, message.microbatch, gradients, current.count, last)
        except WrongGradient as error:
            senders = [each.sender for each in mail for _ in each.tensors]
            raise Misconduct(f"sent {error}", senders[error.position]) from None
        current.backwarded += 1
        caught = iter(entering)
        for source, count in state.entering(len(entering)) if me > 0 else ():
            back = Gradients(
                message.turn, message.step, source, message.microbatch, source=-1 if source == me - 1 else me
            )
            self._post(self._peer(source, message.microbatch, current.count), back, list(islice(caught, count)))
        self._ending.add_up_if_complete(state, current)

    def _weights(self, state: VisitState) -> None:
        state.stage.weight_gradients()
        for each in tuple(state.passes):  # the second of two that overlap has work of its own left for later
            self._ending.add_up_if_complete(state, each)

    def _update(self, state: VisitState) -> None:
        current = state.current
        assert current is not None
        self._ending.update(state, current)

    def _close_step(self) -> None:
        for _, posted, acknowledged, size in self.endpoint.sent:
            self.recorder.sent(posted, acknowledged, size)
        self.endpoint.sent.clear()
        self.emit(self.recorder.close_step(self.step, self._first_step, self._ending.oldest))
        if self.step == self._first_step:
            mind_memory()
        self.step += 1

    def leave(self) -> None:
        """Its snapshots are in the store already. Layers and optimizer state are let go here and now: this node and its
        own methods hold each other, and a garbage collection may be long in coming."""
        self._layers.hand_over()
        self.visits.clear()
        self._work.clear()
        self._ending.leave()

    def farewell(self) -> events.NodeEnded:
        return farewell(self.endpoint)

    def _recompute(self, saved_bytes: int) -> bool:
        """Whether a segment whose microbatches leave this much stored keeps only what enters it."""
        if self.setup.recompute != "auto":
            return self.setup.recompute == "all"
        parameters = sum(state.stage.parameter_bytes for state in self.visits.values())
        state = sum(each.stage.state_bytes for each in self.visits.values())
        room = compute_device.free_for_stages() - parameters - state  # gradients and optimizer state are still to come
        return saved_bytes * (self._places - 1) * len(self.visits) > room // 2

    # -- small things -------------------------------------------------------------------------------------------------

    def _post(self, peer: int, message: Any, tensors: Sequence[torch.Tensor | None], counted: bool = True) -> None:
        if peer != self.me and not self._wire.exact and isinstance(message, Activations | Gradients):
            tensors = self._wire.pack(tensors)
        if peer != self.me and counted:
            self.recorder.count_sent(sum(each.nbytes for each in tensors if each is not None))
        self.recorder.sending()
        self.endpoint.post(peer, message, tensors)

    def _post_sum(self, peer: int, message: Any, tensors: Sequence[torch.Tensor]) -> None:
        """While a stage goes backward, which has not ended with this."""
        self.recorder.count_sent(sum(each.nbytes for each in tensors))
        self.endpoint.post(peer, message, tensors)

    def _expect(self, visit: int, mail: Mail) -> VisitState:
        if visit not in self.visits:
            raise ProtocolError(
                f"node {mail.sender} sent node {self.me} something for visit {visit}, which is elsewhere"
            )
        return self.visits[visit]

    def _report(self, event: events.Event) -> None:
        report(self.endpoint, event)
