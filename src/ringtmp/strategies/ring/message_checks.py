"""What neighbours on a ring send, held against the plan before memory is taken for it.

Links keep order, every visit has one sender of activations and one of gradients, and passes follow one another; so it is
known of every message whether it is the next. What is not raises ProtocolError, and costs its sender its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ringtmp import untrusted
from ringtmp.errors import ProtocolError
from ringtmp.plan.node_groups import member_for
from ringtmp.plan.route import holder_of
from ringtmp.runtime.layer_snapshot import Label
from ringtmp.strategies.ring.exchange_snapshots import MOST_PIECE_BYTES
from ringtmp.strategies.ring.pass_order import MOST_PASSES_AHEAD
from ringtmp.strategies.ring.segment_queue import Pass, VisitState
from ringtmp.strategies.ring.sums_and_norms import SumsAndNorms
from ringtmp.wire.formats import wire_format
from ringtmp.wire.message_parts import fits
from ringtmp.wire.messages import (
    Activations,
    Gradients,
    GroupChange,
    GroupNorms,
    GroupState,
    GroupSum,
    GroupWeights,
    Keep,
    Message,
    Norms,
    Scale,
    Setup,
    Specs,
)
from ringtmp.wire.tensors import TensorSpec, check
from ringtmp.wire.who_may_send import Who

_FLOATS = ("float32", "float64", "float16", "bfloat16")
MOST_LABEL_BYTES = 2**20
MOST_PARAMETERS = 10**7
#: Answers kept; a peer that invents visits gets no more memory than this.
MOST_NEIGHBOURS = 4096
_labels = msgspec.msgpack.Decoder(Label)


class Scrutiny:
    def __init__(
        self, setup: Setup, me: int, visits: Mapping[int, VisitState], limit_bytes: int,
        expects: Callable[[Activations], None], ending: SumsAndNorms,
    ) -> None:  # fmt: skip
        """`expects` knows more of a pass, where the batch is at hand."""
        self._setup = setup
        self._route = setup.route
        self._tree = setup.tree
        self._ending = ending
        self._me = me
        self._visits = visits
        self._limit_bytes = limit_bytes
        self._expects = expects
        self._wire = wire_format(setup.wire)
        #: Edges past a visit, by where they begin and end; what came last along each, there and back.
        self._skips = {(each.source, each.target) for each in setup.flow if each.target != each.source + 1}
        self._newest: dict[tuple[int, int, bool], tuple[int, int]] = {}
        self._last: dict[int, Activations] = {}  # by visit
        self._wants: dict[tuple[int, int], Any] = {}  # by where they come from and go to
        self._holes: dict[tuple[int, int], Any] = {}
        self._norms: dict[tuple[int, int], Any] = {}
        #: Among groups, by visit and pass: what was said of it, and which microbatches have come.
        self._passes: dict[tuple[int, int], tuple[tuple[int, int, bool, bool], set[int]]] = {}
        self._next_step = dict.fromkeys(visits, setup.step)
        self._neighbours: dict[tuple[Who, int, int, int], bool] = {}

    def is_a(self, who: Who, node: int, message: Any) -> bool:
        if who is Who.MEMBER:
            visit = self._visits.get(message.visit)
            return visit is not None and node in visit.visit.members
        if who not in (Who.BEFORE, Who.AFTER):
            return False
        if self._route.grouped or isinstance(message, Keep):
            return self._is_neighbour(who, node, message)
        # Without groups nothing but this decides, and the same few come with every microbatch.
        key = (who, node, message.visit, getattr(message, "source", -1))
        if key not in self._neighbours:
            if len(self._neighbours) > MOST_NEIGHBOURS:
                return self._is_neighbour(who, node, message)
            self._neighbours[key] = self._is_neighbour(who, node, message)
        return self._neighbours[key]

    def _is_neighbour(self, who: Who, node: int, message: Any) -> bool:
        if isinstance(message, Keep):
            return who is Who.BEFORE and node in self._route.nodes() and holder_of(self._route, node) == self._me
        visit = message.visit
        if visit not in self._visits:
            return False
        other = visit - 1 if who is Who.BEFORE else visit + 1
        if (source := getattr(message, "source", -1)) >= 0:
            pair = (source, visit) if who is Who.BEFORE else (visit, source)
            if pair not in self._skips:
                return False
            other = source
        return 0 <= other <= self._route.last and node in self._senders(other, message)

    def _senders(self, visit: int, message: Any) -> tuple[int, ...]:
        """Who of a visit may send this: of a group whoever has the microbatch, or else the first, who speaks for all."""
        there = self._route.visits[visit]
        if not there.others:
            return there.members
        number = getattr(message, "microbatch", -1)
        if number < 0:
            return (there.node,)
        count = getattr(message, "microbatches", None)
        if count is None:  # a gradient, of a pass that is under way
            count = self._visits[message.visit].pass_of(message.turn).count
        return (member_for(there, self._tree.part_of(number, count), self._tree),) if 0 <= number < count else ()

    def __call__(self, sender: int, message: Message) -> None:
        if isinstance(message, Activations) and message.source >= 0:
            self._skipped(message, message.source, message.visit, message.training)
        elif isinstance(message, Gradients) and message.source >= 0:
            self._skipped(message, message.visit, message.source, True)
        elif isinstance(message, Activations):
            self._activations(message)
        elif isinstance(message, Gradients):
            self._gradients(message)
        elif isinstance(message, GroupSum | GroupChange | GroupNorms | GroupWeights | GroupState):
            self._within_group(sender, message)
        elif isinstance(message, Norms):
            current = self._pass(message)
            norms = _given(message.tensors, len(message.tensors), "Norms")
            # Among groups gradients take other ways than norms do.
            if not (self._route.grouped or current.returned == current.microbatches) or current.norms_came:
                raise ProtocolError(f"sent Norms of pass {message.turn} out of turn")
            whole = all(each.dtype in _FLOATS and len(each.shape) == 1 for each in norms)
            if not whole or sum(each.count for each in norms) > MOST_PARAMETERS:
                raise ProtocolError(f"sent {norms} as norms")
            way = message.visit + 1, message.visit
            self._same(self._norms, way, True, [(each.dtype, each.count) for each in norms], "sent norms of")
            current.norms_came = True
        elif isinstance(message, Scale):
            current = self._pass(message)
            (total,) = _given(message.tensors, 1, "Scale")
            first = self._visits[message.visit].visit.node == self._me
            if not (current.norms_sent if first else current.answered) or current.scale_came:
                raise ProtocolError(f"sent Scale of pass {message.turn} out of turn")
            if total.dtype not in _FLOATS or total.shape:
                raise ProtocolError(f"sent {total} as a norm")
            current.scale_came = True
        elif isinstance(message, Keep):
            self._keep(sender, message)

    def _within_group(
        self, sender: int, message: GroupSum | GroupChange | GroupNorms | GroupWeights | GroupState
    ) -> None:
        visit, ending = message.visit, self._ending
        if isinstance(message, GroupSum) and visit in ending.groups:
            ending.check(sender, self._visits[visit], message)
        elif isinstance(message, GroupChange) and visit in ending.late:
            ending.late[visit].check(sender, message)
        elif isinstance(message, GroupNorms | GroupWeights) and visit in ending.sharing:
            ending.check(sender, self._visits[visit], message)
        elif isinstance(message, GroupState) and visit in ending.gathered:
            done = self._setup.step + self._visits[visit].updates
            ending.gathered[visit].check(sender, message, done)
        else:
            raise ProtocolError(f"sent {type(message).__name__}, which is not how this group agrees")

    def _activations(self, message: Activations) -> None:
        last, visit = self._last.get(message.visit), message.visit
        if self._route.grouped:
            self._in_any_order(message)
        elif last is not None and message.turn == last.turn:
            same = (message.step, message.microbatches, message.training, message.keep)
            if message.microbatch != last.microbatch + 1 or message.microbatch >= last.microbatches:
                raise ProtocolError(f"sent microbatch {message.microbatch} of pass {message.turn} out of turn")
            if same != (last.step, last.microbatches, last.training, last.keep):
                raise ProtocolError(f"changed its mind about pass {message.turn}")
        else:
            ended, before = (True, 0) if last is None else (last.microbatch == last.microbatches - 1, last.turn)
            if not (ended and message.turn == before + 1 and message.microbatch == 0):
                raise ProtocolError(f"sent pass {message.turn}, microbatch {message.microbatch}, after pass {before}")
            untrusted.whole(message.microbatches, "the number of microbatches", 1)
            untrusted.whole(message.step, "the step")
            if message.training and message.step != self._next_step[visit]:
                raise ProtocolError(f"sent step {message.step}, and step {self._next_step[visit]} is next")
            self._next_step[visit] += message.training
        if len(self._visits[visit].activations) > 2 * self._setup.window:
            raise ProtocolError("sent more microbatches than the window admits")
        if message.microbatch < 0:
            return
        if len(message.tensors) != self._wire.width * len(message.wants) or not self._holes_explained(message):
            raise ProtocolError(f"sent {len(message.tensors)} tensors of which {len(message.wants)} may want gradients")
        way = visit - 1, visit
        self._same(self._wants, way, message.training, (message.wants, message.same), "wants gradients for")
        self._fit(message, visit)
        self._expects(message)
        self._last[visit] = message

    def _in_any_order(self, message: Activations) -> None:
        """Among groups several nodes send to a visit, each in the order of its own microbatches."""
        state, turn, number = self._visits[message.visit], message.turn, message.microbatch
        untrusted.whole(message.microbatches, "the number of microbatches", 1)
        untrusted.whole(message.step, "the step")
        what = (message.step, message.microbatches, message.training, message.keep)
        told, seen = self._passes.setdefault((message.visit, turn), (what, set()))
        own = range(message.microbatches) if state.share is None else state.share.microbatches(message.microbatches)
        if not state.done_turn < turn <= state.done_turn + MOST_PASSES_AHEAD or number in seen:
            raise ProtocolError(f"sent microbatch {number} of pass {turn} out of turn")
        if told != what:
            raise ProtocolError(f"changed its mind about pass {turn}")
        if number not in (own or (-1,)):
            raise ProtocolError(f"sent microbatch {number} of pass {turn}, which is not had here")
        part = (
            self._tree.microbatches(self._part(number, message.microbatches), message.microbatches)
            if number >= 0
            else ()
        )
        if number > 0 and number - 1 in part and number - 1 not in seen:
            raise ProtocolError(f"sent microbatch {number} of pass {turn} before the one before it")
        seen.add(number)
        for old in [key for key in self._passes if key[0] == message.visit and key[1] <= state.done_turn]:
            del self._passes[old]

    def _part(self, microbatch: int, count: int) -> range:
        part = self._tree.part_of(microbatch, count)
        return range(part, part + 1)

    def _skipped(self, message: Activations | Gradients, source: int, target: int, training: bool) -> None:
        """Along an edge past a visit microbatches come in order, too; with which others they belong is seen when the
        microbatch is worked on."""
        key, now = (source, target, isinstance(message, Activations)), (message.turn, message.microbatch)
        before = self._newest.get(key, (0, -1))
        if not self._route.grouped and not (now == (before[0], before[1] + 1) or (now[0] > before[0] and now[1] == 0)):
            raise ProtocolError(f"sent microbatch {message.microbatch} of pass {message.turn} out of turn")
        state = self._visits[message.visit]
        waiting = state.skipped if isinstance(message, Activations) else state.returned
        if len(waiting.get(message.source, ())) > 2 * self._setup.window:
            raise ProtocolError("sent more microbatches than the window admits")
        if isinstance(message, Activations):
            if len(message.tensors) != self._wire.width * len(message.wants) or not self._holes_explained(message):
                raise ProtocolError(
                    f"sent {len(message.tensors)} tensors, {len(message.wants)} of which may want gradients"
                )
        elif not self._route.grouped and now > max(
            ((each.turn, each.forwarded - 1) for each in state.passes), default=(0, 0)
        ):
            raise ProtocolError(f"sent a gradient for pass {message.turn}, microbatch {message.microbatch} out of turn")
        self._fit_edge(message, source, target, training)
        if isinstance(message, Activations):
            wishes = message.wants, message.same
            self._same(self._wants, (source, target), training, wishes, "wants gradients for")
        else:
            holes = [each is None for each in message.tensors[:: self._wire.width]]
            self._same(self._holes, (source, target), True, holes, "sent gradients of")
        self._newest[key] = now

    def _fit_edge(self, message: Activations | Gradients, source: int, target: int, training: bool) -> None:
        """Tensors are what the plan says goes from one visit to another."""
        for each in self._setup.flow:
            if (each.training, each.source, each.target) == (training, source, target):
                known = not each.values or bool(each.crossings)
                count = len(message.tensors) == self._wire.width * len(each.values)
                if not count or (known and not fits(each.crossings, message.tensors, self._wire)):
                    name = type(message).__name__
                    raise ProtocolError(f"sent {name} that are {message.tensors}; the plan says {each.crossings}")
                return
        raise ProtocolError(f"sent {type(message).__name__} from visit {source} to visit {target}, where nothing goes")

    def _holes_explained(self, message: Activations) -> bool:
        """A tensor is missing just where it is said to be the same as one before it."""
        heads = message.tensors[:: self._wire.width]
        same = message.same or range(len(heads))
        if len(same) != len(heads):
            return False
        return all(
            0 <= first <= at and same[first] == first and (heads[at] is None) == (first < at)
            for at, first in enumerate(same)
        )

    def _same(
        self, before: dict[tuple[int, int], Any], way: tuple[int, int], counts: bool, now: Any, what: str
    ) -> None:
        """A graph does not change: what is true of one microbatch is true of all that go the same way."""
        if counts and before.setdefault(way, now) != now:
            raise ProtocolError(f"{what} other tensors than before, from visit {way[0]} to visit {way[1]}")

    def _gradients(self, message: Gradients) -> None:
        current = self._pass(message)
        fine = message.microbatch == current.returned < current.forwarded and message.step == current.step
        if self._route.grouped:
            gone = (message.step, message.microbatch) in self._visits[message.visit].stage.stored
            fine = message.step == current.step and gone and message.microbatch not in current.went_back
            current.went_back.add(message.microbatch)
        if not fine:
            raise ProtocolError(f"sent a gradient for pass {message.turn}, microbatch {message.microbatch} out of turn")
        self._fit(message, message.visit + 1)
        holes = [each is None for each in message.tensors[:: self._wire.width]]
        self._same(self._holes, (message.visit, message.visit + 1), True, holes, "sent gradients of")
        current.returned += 1

    def _fit(self, message: Activations | Gradients, visit: int) -> None:
        """Tensors are what the plan says crosses the cut before a visit."""
        if self._setup.flow:
            training = message.training if isinstance(message, Activations) else True
            self._fit_edge(message, visit - 1, visit, training)
            return
        wanted = self._setup.crossings.get(visit)
        if wanted is None or fits(wanted, message.tensors, self._wire):
            return
        name = type(message).__name__
        raise ProtocolError(f"sent {name} for visit {message.visit} that are {message.tensors}; the plan says {wanted}")

    def _pass(self, message: Gradients | Norms | Scale) -> Pass:
        current = self._visits[message.visit].pass_of(message.turn)
        if not current.training:
            raise ProtocolError(f"sent {type(message).__name__} for pass {message.turn}, which is an evaluation")
        return current

    def _keep(self, sender: int, message: Keep) -> None:
        untrusted.number(message.seconds, "what a snapshot cost")
        untrusted.whole(message.start, "the start of a piece")
        untrusted.whole(message.step, "the step of a snapshot")
        (piece,) = _given(message.tensors, 1, "Keep")
        if piece.dtype != "uint8" or len(piece.shape) != 1 or not 1 <= piece.count <= MOST_PIECE_BYTES:
            raise ProtocolError(f"sent {piece} as a piece of a snapshot")
        if not any(message.layer in visit.layers for visit in self._route.on(sender)):
            raise ProtocolError(f"sent a snapshot of layer {message.layer}, which it does not hold")
        if message.start == 0:
            label_of(message, self._limit_bytes)


def label_of(message: Keep, limit_bytes: int) -> Label:
    """The label that comes with the first piece; it says what the message says, and no more than fits."""
    label = untrusted.decode(_labels, message.label, "the label of a snapshot", MOST_LABEL_BYTES)
    if (label.step, label.layer) != (message.step, message.layer) or len(label.state) > len(label.specs):
        raise ProtocolError(f"sent a label of layer {label.layer}, step {label.step} with layer {message.layer}")
    total = 0
    for spec in label.specs:
        check(spec, limit_bytes - total)
        total += spec.nbytes
    if label.size != total or not 0 < total <= limit_bytes:
        raise ProtocolError(f"sent a label of {label.size} bytes for tensors of {total}")
    return label


def _given(specs: Specs, count: int, name: str) -> list[TensorSpec]:
    """This many tensors, and no hole."""
    there = [each for each in specs if each is not None]
    if len(there) != count or len(specs) != count:
        raise ProtocolError(f"sent {name} with {len(there)} tensors instead of {count}")
    return there
