"""The master: a node like the others that also owns data, labels and loss, and leads the run.

It puts batches at the front and takes losses at the tail; between the two it does its share of the work. The whole model
never lies here: layers pass through one at a time, on their way to a node or to the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from ringtmp.data.batches import Batch
from ringtmp.data.tables_and_streams import leaves
from ringtmp.errors import NodeLost, ProtocolError, SnapshotUnusable, WaitTimeout
from ringtmp.metrics.events import SnapshotWhole, Warned
from ringtmp.model import portable_layer
from ringtmp.model.export import EXAMPLE_BATCH
from ringtmp.model.frozen_parameters import frozen_names, with_frozen, without_frozen
from ringtmp.model.output_tree import map_outputs, nest
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.node_groups import admission
from ringtmp.plan.route import MASTER
from ringtmp.runtime import check_node_replies, compute_device
from ringtmp.runtime.base_leader import WAIT_S, BaseLeader, Start
from ringtmp.runtime.checkpoint import CheckpointWriter, LayerTensors, Weights
from ringtmp.runtime.clipping import parameter_order
from ringtmp.runtime.losses import Loss, LossFunction, Score
from ringtmp.runtime.mailbox import Mail
from ringtmp.runtime.snapshot_schedule import places
from ringtmp.strategies.ring.diagnose_failure import NotFinite, WhatIsWrong
from ringtmp.strategies.ring.exchange_snapshots import checkpoint_bytes
from ringtmp.strategies.ring.gradient_buckets import owned_by
from ringtmp.strategies.ring.link_trials import MOST_BYTES, Lines
from ringtmp.strategies.ring.node import Node
from ringtmp.strategies.ring.step_under_way import StepUnderWay
from ringtmp.strategies.ring.tensor_routes import flow_of, neighbours, ways_of
from ringtmp.wire.messages import (
    Activations,
    Echoed,
    Failed,
    Fetch,
    Gradients,
    Held,
    Inspected,
    LayerState,
    Meet,
    Message,
    Missing,
    Place,
    Recall,
    Restore,
    Setup,
    Void,
    Whole,
)  # fmt: skip

#: A pass in which nothing happens for so long: is everyone reached by its neighbours?
ASK_AFTER_S = 15.0
#: Passes that may be under way at once, and one.
REMEMBERED_PASSES = 3


class Master(BaseLeader):
    """Leads a ring whose nodes have all said hello. `setup` has everyone's addresses; a node gets those of its neighbours."""

    members_own = frozenset({Activations, Gradients})

    def __init__(self, start: Start, setup: Setup, layers: Sequence[Layer], loss: LossFunction) -> None:
        super().__init__(start, setup.step, setup.detailed_steps)
        endpoint = self.endpoint
        if not setup.flow:
            setup = msgspec.structs.replace(setup, flow=flow_of(layers, setup.route))
        self._setup = setup
        self._protection = start.protection
        self._layers = layers
        self._frozen = [frozen_names(each, setup.aside) for each in layers]
        self._checkpoint: Weights | None = None  # what is frozen comes from there
        self._loss = compute_device.in_these_numbers(loss, setup.recipe.compute)
        compiled = setup.recipe.compiled and isinstance(loss, Loss)
        learned_by = compute_device.compiled_loss(loss) if compiled else loss
        self._learned_by = compute_device.in_these_numbers(learned_by, setup.recipe.compute)
        self._turn = 0
        self._lines = Lines(endpoint, self._until_node)
        self._missing: dict[tuple[int, int], str] = {}  # node and layer -> why it has none
        self._steps: dict[int, StepUnderWay] = {}  # training steps under way
        self._question: Fetch | Recall | None = None  # which layer was asked for last
        self._sizes: dict[int, tuple[int, bool, list[int]]] = {}  # by pass: step, training, samples of its microbatches
        self._came_out: Callable[[int, Any], None] = lambda microbatch, outputs: None  # in a pass without training
        endpoint.snapshots.reserve_bytes = checkpoint_bytes(layers, setup.recipe)
        self.parameter_order = parameter_order(layers)
        self.node = Node(endpoint, self._setup_of(MASTER), owner=self)
        self.node.emit = self._log.write
        self._wrong = WhatIsWrong(self.node, layers, self._pump, self._take_answers_alone)
        self._member = self.node
        endpoint.inspect_too(self._inspect)

    # -- setting up ---------------------------------------------------------------------------------------------------

    def lay_out(self, checkpoint: Weights) -> None:
        """Send everyone the plan, and every layer to its holder, one at a time: from the checkpoint, or after a loss from
        whoever has it in the last whole snapshot, which mostly is the holder itself."""
        route, snapshot = self._setup.route, self._snapshot
        for node in route.nodes():
            if node != MASTER:
                self.endpoint.post(node, self._setup_of(node))
        for node in self.hellos.keys() - route.nodes():
            self.endpoint.post(node, Meet({}))  # left out: nobody's peer
        self._checkpoint = checkpoint
        here = {} if snapshot is None else places(snapshot.step, self.hellos, self.endpoint.snapshots.contents())
        taking = set() if snapshot is None else self._let_all_take_their_own(snapshot.step, here)
        for index, layer in enumerate(self._layers):
            for holder in route.holder(index).members:
                if (index, holder) in taking and self._has_taken(index, holder):
                    continue
                if snapshot is None or not layer.tensors:
                    self._place(index, holder, checkpoint.layer(index, layer))
                elif without_frozen(layer, self._frozen[index]):
                    self._bring_back(snapshot.step, index, holder, here[index])
                else:
                    self._bring_frozen(snapshot.step, index, holder, checkpoint)

    def _let_all_take_their_own(self, step: int, here: Mapping[int, Collection[int]]) -> set[tuple[int, int]]:
        """Whoever has its layers of the snapshot brings them back while others do so, too. Which layer is coming to whom."""
        found = set[tuple[int, int]]()
        for index, layer in enumerate(self._layers):
            if without_frozen(layer, self._frozen[index]) and self._all_have_all(index):
                for holder in self._setup.route.holder(index).members:
                    if holder in here.get(index, ()):
                        self.endpoint.post(holder, Restore(step, index, portable_layer.encode(layer)))
                        found.add((index, holder))
        return found

    def _all_have_all(self, index: int) -> bool:
        """Whether every holder of a layer keeps all of its state."""
        return not (self._setup.shares_state and self._setup.route.holder(index).others)

    def _has_taken(self, index: int, holder: int) -> bool:
        """False: its own copy was not sound, and it needs another."""
        try:
            self._until_taken(index, holder)
        except SnapshotUnusable as problem:
            self._log.write(Warned(time.monotonic(), str(problem)))
            return False
        return True

    def _setup_of(self, node: int) -> Setup:
        near = {peer: self._setup.addresses[peer] for peer in neighbours(self._setup.route, self._setup.flow, node)}
        return msgspec.structs.replace(self._setup, addresses=near)

    def _place(self, index: int, holder: int, given: LayerTensors) -> None:
        tensors, state = given
        if not self._all_have_all(index):
            visit = self._setup.route.holder(index)
            owned = owned_by([self._layers[at] for at in visit.layers], len(visit.members))[index - visit.first]
            state = {key: value for key, value in state.items() if visit.members[owned[key[0]]] == holder}
        place = Place(index, portable_layer.encode(self._layers[index]), tuple(state))
        self.endpoint.post(holder, place, [*tensors, *state.values()])
        self._until_taken(index, holder)

    def _bring_frozen(self, step: int, index: int, holder: int, checkpoint: Weights) -> None:
        """A layer of which nothing changes: its holder mostly has it still."""
        try:
            self.endpoint.post(holder, Restore(step, index, portable_layer.encode(self._layers[index])))
            self._until_taken(index, holder)
        except SnapshotUnusable:
            self._place(index, holder, checkpoint.layer(index, self._layers[index]))

    def _bring_back(self, step: int, index: int, holder: int, sources: Sequence[int]) -> None:
        """A layer of the snapshot to its holder: its own copy, if it keeps the whole state, or else that of the next who has a
        sound one. Who held it for another has no frozen parameters of it: its copy comes here, and goes back with them."""
        problems = []
        mine = holder if self._all_have_all(index) else None
        ways = [(source, source == mine) for source in sorted(sources, key=lambda node: node != mine)]
        for source, alone in [*ways, *((holder, False) for _, alone in ways[:1] if alone and self._frozen[index])]:
            try:
                if alone:
                    self.endpoint.post(holder, Restore(step, index, portable_layer.encode(self._layers[index])))
                    self._until_taken(index, holder)
                else:
                    self._place(index, holder, self._whole(index, self._asked(source, Recall(step, index), index)))
                return
            except SnapshotUnusable as problem:
                self._log.write(Warned(time.monotonic(), str(problem)))
                problems.append(str(problem))
        raise SnapshotUnusable("; ".join(problems))

    def _until_taken(self, index: int, holder: int) -> None:
        done = lambda: (holder, index) in self._placed or (holder, index) in self._missing  # noqa: E731
        self._until_node(holder, done, f"to take layer {index}", self._stall_limit())
        self._refuse_missing(holder, index)

    def _refuse_missing(self, node: int, index: int) -> None:
        why = self._missing.pop((node, index), None)
        if why is not None:
            raise SnapshotUnusable(f"node {node}: {why}")

    # -- passes -------------------------------------------------------------------------------------------------------

    def train_step(
        self, step: int, batch: Batch, fresh: bool, upcoming: Callable[[int], Batch | None] | None = None
    ) -> float:
        """One update of every layer. The batch's mean loss before it.

        With delayed gradients the ring begins the next step before this one has ended: `upcoming` gives its batch, or
        None where the ring must come to rest after this step. A step that was begun early is asked for as any other.
        """
        started = self.endpoint.clock()
        if step not in self._steps:
            self._begin_step(
                step, batch, fresh, self._protection.due(step)
            )  # nothing is under way: the ring is at rest
        if upcoming is not None and self.node.setup.recipe.staleness and step + 1 not in self._steps:
            following = upcoming(step + 1)
            if following is not None:
                self._begin_step(step + 1, following, fresh=False)
        try:
            self._finish_pass(self._steps[step].turn, step)
        except NotFinite as found:
            raise self._wrong.not_finite(found) from None
        self._longest_step_s = max(self._longest_step_s, self.endpoint.clock() - started)
        return self._steps.pop(step).loss

    def _begin_step(self, step: int, batch: Batch, fresh: bool, keep: bool = False) -> None:
        if keep:
            frozen = zip(self._layers, self._frozen, strict=True)
            self._protection.begin([index for index, each in enumerate(frozen) if without_frozen(*each)])
        self._steps[step] = StepUnderWay(batch, self._begin_pass(step, batch, True, fresh, keep))
        self._committed = step + 1

    def evaluate(self, batches: Iterable[Batch], step: int, bytes_model: bool) -> Score:
        score = Score(bytes_model=bytes_model)

        def add(batch: Batch, microbatch: int, outputs: Any) -> None:
            (targets,) = compute_device.brought([batch.targets[microbatch]])
            score.add(float(self._loss(outputs, targets)), outputs, targets)

        self._run_through(batches, step, add)
        return score

    def predict(self, batches: Iterable[Batch], step: int) -> list[Any]:
        """The model's outputs, one entry per microbatch, in order."""
        found: list[Any] = []

        def keep(batch: Batch, microbatch: int, outputs: Any) -> None:
            found.append(map_outputs(compute_device.taken_back, outputs))

        self._run_through(batches, step, keep)
        return found

    def _run_through(self, batches: Iterable[Batch], step: int, came_out: Callable[[Batch, int, Any], None]) -> None:
        for batch in batches:
            self._came_out = partial(came_out, batch)
            self._finish_pass(self._begin_pass(step, batch, training=False, fresh=False), step)

    def tail(self, step: int, microbatch: int, training: bool, outputs: list[torch.Tensor]) -> torch.Tensor | None:
        """Called by the node when a microbatch has gone through the last layer."""
        nested = nest(self._layers[-1].output, outputs, own=True)
        if not training:
            with torch.no_grad():
                self._came_out(microbatch, nested)
            return None
        current = self._steps[step]
        with torch.enable_grad():
            (targets,) = compute_device.brought([current.batch.targets[microbatch]])
            return current.came(step, microbatch, self._learned_by(nested, targets))

    def _begin_pass(self, step: int, batch: Batch, training: bool, fresh: bool, keep: bool = False) -> int:
        """Put a batch at the front. The number of its pass."""
        self._turn += 1
        turn, now = self._turn, self.endpoint.clock()
        sizes = [len(next(iter(leaves(each)))) for each in batch.inputs]
        self._sizes = {at: each for at, each in self._sizes.items() if at > turn - REMEMBERED_PASSES}
        self._sizes[turn] = (step, training, sizes)
        order = admission(self._setup.route, self._setup.tree, len(batch.inputs))
        for microbatch in order if self._setup.route.grouped else range(len(batch.inputs)):
            tensors = self._entering(list(leaves(batch.inputs[microbatch])), training)
            message = Activations(
                turn, step, 0, microbatch, len(batch.inputs), training, fresh, (False,) * len(tensors), keep=keep
            )  # fmt: skip
            self.node.handle(Mail(MASTER, message, tensors, 0, now, now))
        return turn

    def _entering(self, inputs: list[torch.Tensor | None], training: bool) -> list[torch.Tensor | None]:
        """Of the model's inputs those that somebody uses."""
        if not self._setup.flow:
            return inputs
        (edge,) = ways_of(self._setup.flow, 0, training).entering
        return [inputs[place] for _, place in edge.values]

    def _finish_pass(self, turn: int, step: int) -> None:
        # All that has stalled may answer again by the time it is asked (a line that was down, a host that slept): then the
        # pass has the stall limit once more to come to its end.
        stall_s = self._stall_limit()
        waits = (ASK_AFTER_S, stall_s - ASK_AFTER_S, stall_s)
        for asked, limit_s in enumerate(waits, start=1):
            try:
                self._until(
                    lambda: all(state.done_turn >= turn for state in self.node.visits.values()),
                    lambda: self._wrong.waiting_for(step),
                    limit_s,
                )
                return
            except WaitTimeout as stalled:
                self._wrong.look_for_a_broken_link(step)
                if asked > 1 and (silent := self._wrong.silent_node()) is not None:
                    self._node_pool.drop(silent)
                    text = f"node {silent} is alive but answers nobody in step {step}: {stalled}"
                    raise NodeLost(text, silent, self._stall_limit()) from None
                if asked == len(waits):
                    raise

    # -- layers back to the disk --------------------------------------------------------------------------------------

    def save(self, writer: CheckpointWriter) -> None:
        for index, layer in enumerate(self._layers):
            others, state = self._changing(index)
            left, frozen = iter(others), self._frozen[index]
            tensors = [None if each.name in frozen else next(left) for each in layer.tensors]
            writer.add(index, layer, tensors, state, frozen)
            self._states.clear()

    def _layer_state(self, index: int) -> LayerTensors:
        return self._whole(index, self._changing(index))

    def _changing(self, index: int) -> LayerTensors:
        """What is not frozen of a layer."""
        visit = self.node.route.holder(index)
        if visit.node == MASTER:
            return self.node.visits[visit.index].stage.layer_state(index, self._frozen[index])
        tensors, state = self._asked(visit.node, Fetch(index, self.node.step), index)
        for node in visit.others if self._setup.shares_state else ():
            state |= self._asked(node, Fetch(index, self.node.step), index)[1]
        return tensors, state

    def _whole(self, index: int, given: LayerTensors) -> LayerTensors:
        """With what is frozen, which lies on the disk here."""
        if not self._frozen[index]:
            return given
        assert self._checkpoint is not None
        layer = self._layers[index]
        return with_frozen(layer, given[0], self._checkpoint.frozen(index, layer)), given[1]

    def _asked(self, node: int, question: Fetch | Recall, index: int) -> LayerTensors:
        self._states.clear()
        self._awaited, self._question = index, question
        self.endpoint.post(node, question)
        done = lambda: node in self._states or (node, index) in self._missing  # noqa: E731
        self._until_node(node, done, f"to send layer {index}", self._stall_limit())
        self._refuse_missing(node, index)
        message, given = self._states[node]
        own = len(without_frozen(self._layers[index], self._frozen[index]))
        return given[:own], dict(zip(message.state, given[own:], strict=True))

    def _hear(self, mail: Mail) -> bool:
        if isinstance(mail.message, Inspected):
            self._wrong.heard(mail.sender, check_node_replies.inspected(mail.message, mail.sender, self.node.route))
        elif isinstance(mail.message, Held):
            held = check_node_replies.held(mail.message, mail.sender, self.node.route, len(self._layers))
            if self._protection.held(held, mail.sender):
                # Now, and not when the step ends: it may never end, and nobody has the one before any more.
                self._log.write(SnapshotWhole(time.monotonic(), held.step, self._protection.interval))
                for node in self.node.route.nodes():
                    self.endpoint.post(node, Whole(held.step))
            elif held.trouble:
                for node in self.node.route.nodes():
                    self.endpoint.post(node, Void(held.step))
        elif isinstance(mail.message, Missing):
            missing = check_node_replies.missing(mail.message, len(self._layers))
            self._missing[mail.sender, missing.layer] = missing.why
        elif isinstance(mail.message, LayerState):
            self._take_layer(mail, mail.message)
        else:
            return self._lines.heard(mail)
        return True

    def _take_layer(self, mail: Mail, message: LayerState) -> None:
        """What is not as the layer says is an offence, unless it comes from a snapshot: then it was so when it came to who
        holds it, and another copy may do."""
        check_node_replies.layer_of(message.layer, len(self._layers))
        try:
            if mail.sender != MASTER:  # what it says to itself travels without a description
                check_node_replies.layer_state(message, self._layers[message.layer], frozen=self._frozen[message.layer])
        except ProtocolError as problem:
            if not isinstance(self._question, Recall):
                raise
            self._missing[mail.sender, message.layer] = f"node {mail.sender} {problem}"
        else:
            if message.layer == self._awaited:  # else asked for twice, because somebody was lost meanwhile
                self._states[mail.sender] = (message, mail.present())

    def _inspect(self, sender: int, message: Message) -> None:
        if isinstance(message, LayerState) and not isinstance(self._question, Recall):
            check_node_replies.layer_of(message.layer, len(self._layers))
            check_node_replies.layer_state(message, self._layers[message.layer], frozen=self._frozen[message.layer])
        elif isinstance(message, Echoed):
            check_node_replies.within(message.tensors, MOST_BYTES, "an echo")

    def expects(self, message: Activations) -> None:
        """What comes round is of a batch that went in."""
        given = self._sizes.get(message.turn)
        if given is None or given[:2] != (message.step, message.training) or len(given[2]) != message.microbatches:
            raise ProtocolError(f"sent pass {message.turn} of step {message.step}, which is not under way")
        wanted = self.node.setup.crossings.get(message.visit, ())
        for each in self.node.setup.flow:
            source = message.visit - 1 if message.source < 0 else message.source
            if (each.training, each.source, each.target) == (message.training, source, message.visit):
                wanted = each.crossings
        samples, width = given[2][message.microbatch], len(message.tensors) // max(1, len(wanted))
        for crossing, spec in zip(wanted, message.tensors[:: width or 1], strict=False):
            # A layer was asked with an example of so many samples what leaves it: a size of that number may be a constant.
            if crossing.per_sample and spec is not None and spec.shape[0] not in (samples, EXAMPLE_BATCH):
                raise ProtocolError(f"sent {spec.shape[0]} samples of the {samples} in microbatch {message.microbatch}")

    def try_lines(self) -> dict[int, tuple[float, float]]:
        """Bytes per second to and from other nodes, while the ring is at rest."""
        found = self._lines.tried([node for node in self.node.route.nodes() if node != MASTER])
        return {node: (line.down_bytes_per_s, line.up_bytes_per_s) for node, line in found.items()}

    def _take_answers_alone(self) -> None:
        for mail in self.endpoint.collect():
            if isinstance(mail.message, Inspected | Failed):
                self._take(mail)
        if not self._node_pool.advance():
            self.endpoint.wait(WAIT_S)
