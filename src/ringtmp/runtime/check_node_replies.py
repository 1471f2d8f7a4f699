"""What nodes tell the master, checked: numbers in their ranges, indexes within the plan, text that is only text.

Every function takes what came and returns it fit for use, or raises ProtocolError; whoever sent it is then dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ringtmp import untrusted
from ringtmp.errors import ProtocolError
from ringtmp.metrics import events
from ringtmp.metrics.energy import Power
from ringtmp.metrics.events import NodeEnded, NodeStep, Reading
from ringtmp.model.portable_layer import Layer
from ringtmp.plan.route import MASTER, Route, holder_of
from ringtmp.runtime.checkpoint import StateName
from ringtmp.runtime.optimizers import NUMBERS, STATE_KEYS
from ringtmp.runtime.staged_layer import PREVIOUS
from ringtmp.wire.message_parts import Specs
from ringtmp.wire.messages import Held, Hello, Inspected, LayerState, Missing, Timed
from ringtmp.wire.tensors import TensorSpec, check

#: Room for the spans of a detailed step.
MOST_EVENT_BYTES = 2**20
MOST_KEPT = 100_000
MOST_PEERS = 100_000
MOST_S = 1e9
#: Differences of times are rounded: a little less than nothing is nothing.
LEAST_S = -1e-3
_step_decoder = msgspec.json.Decoder(NodeStep)
_end_decoder = msgspec.json.Decoder(NodeEnded)


def hello(message: Hello) -> Hello:
    untrusted.whole(message.pid, "its process id")
    if len(message.kept) > MOST_KEPT:
        raise ProtocolError(f"says that it keeps {len(message.kept)} layers")
    for step, layer in message.kept:
        untrusted.whole(step, "the step of a snapshot")
        untrusted.whole(layer, "the layer of a snapshot")
    torch, capability, units, device = (
        untrusted.line(each, 64) for each in (message.torch, message.capability, message.bfloat16, message.device)
    )
    return Hello(message.pid, torch, capability, message.kept, units, device)


def node_step(data: bytes, sender: int) -> NodeStep:
    """A node's share of a step."""
    event = untrusted.decode(_step_decoder, data, "a node's step", MOST_EVENT_BYTES)
    _own(event.node, sender)
    untrusted.whole(event.step, "its step")
    for value in (event.busy_s, event.idle_s, *event.idle.values(), *event.busy.values()):
        untrusted.number(value, "its time", LEAST_S, MOST_S)
    for value in (event.start, event.end, *(each for span in event.spans for each in (span.start, span.end))):
        untrusted.number(value, "its clock", -float(untrusted.MOST))
    for count in (event.sent_bytes, event.received_bytes, *(span.bytes for span in event.spans)):
        untrusted.whole(count, "its bytes")
    for span in event.spans:
        untrusted.whole(span.visit, "the visit of a span", -1)
        untrusted.whole(span.microbatch, "the microbatch of a span", -1)
    if event.oldest is not None:
        untrusted.whole(event.oldest, "the oldest update it worked with", -1)
    if event.joules is not None:
        untrusted.number(event.joules, "its energy")
    _check_reading(event.reading)
    return msgspec.structs.replace(
        event,
        busy_s=max(0.0, event.busy_s),
        idle_s=max(0.0, event.idle_s),
        idle={untrusted.line(name, 32): max(0.0, value) for name, value in event.idle.items()},
        busy={untrusted.line(name, 32): max(0.0, value) for name, value in event.busy.items()},
        spans=tuple(msgspec.structs.replace(span, kind=untrusted.line(span.kind, 32)) for span in event.spans),
        power=_power(event.power),
    )


def last_event(data: bytes, sender: int) -> bytes:
    """A node's last word, as a line for the log."""
    event = untrusted.decode(_end_decoder, data, "a node's last event", MOST_EVENT_BYTES)
    _own(event.node, sender)
    for name in msgspec.structs.fields(NodeEnded):
        value = getattr(event, name.name)
        if isinstance(value, int):
            untrusted.whole(value, name.name)
    _check_receivers(event.sent_to)
    return events.encode(msgspec.structs.replace(event, power=_power(event.power)))


def _check_reading(reading: Reading | None) -> None:
    if reading is not None:
        untrusted.number(reading.at, "the time of a reading", -float(untrusted.MOST))
        untrusted.whole(reading.rss_bytes, "the memory it has")
        _check_receivers(reading.sent_to)


def _check_receivers(sent_to: dict[int, int]) -> None:
    if len(sent_to) > MOST_PEERS:
        raise ProtocolError(f"names {len(sent_to)} receivers, over the limit of {MOST_PEERS}")
    for peer, count in sent_to.items():
        untrusted.whole(peer, "a receiver")
        untrusted.whole(count, "what was sent to it")


def _power(power: Power | None) -> Power | None:
    """What a node knows of its device."""
    if power is None:
        return None
    for value in (power.watts.idle_w, power.watts.busy_w, power.watts.nj_per_byte, power.share):
        untrusted.number(value, "its power")
    texts = {name: untrusted.line(getattr(power, name), 80) for name in ("name", "host", "meter")}
    return msgspec.structs.replace(power, **texts)


def timed(message: Timed) -> Timed:
    untrusted.number(message.seconds, "the time of the sample", 1e-12, MOST_S)
    untrusted.whole(message.rss_bytes, "the memory it has taken")
    untrusted.whole(message.memory_bytes, "its memory", 1)
    if message.cores is not None:
        untrusted.number(message.cores, "its cores", 1e-6, 1e6)
    if message.period_s is not None:
        untrusted.number(message.period_s, "the period of its quota", 1e-9, MOST_S)
    return message


def held(message: Held, sender: int, route: Route, layers: int) -> Held:
    untrusted.whole(message.step, "the step of a snapshot")
    layer_of(message.layer, layers)
    if message.owner not in route.nodes() or sender not in (message.owner, holder_of(route, message.owner)):
        raise ProtocolError(f"says that it holds a layer of node {message.owner}")
    if route.holder(message.layer).node != message.owner:
        raise ProtocolError(f"says that layer {message.layer} is of node {message.owner}")
    if sender == message.owner and sender != MASTER and not message.trouble:
        raise ProtocolError("says that it holds its own layer for itself")
    untrusted.number(message.owner_s, "what a snapshot cost its owner", LEAST_S, MOST_S)
    untrusted.number(message.holder_s, "what a snapshot cost its holder", LEAST_S, MOST_S)
    return msgspec.structs.replace(
        message,
        owner_s=max(0.0, message.owner_s),
        holder_s=max(0.0, message.holder_s),
        trouble=untrusted.line(message.trouble),
    )


def missing(message: Missing, layers: int) -> Missing:
    layer_of(message.layer, layers)
    return Missing(message.layer, untrusted.line(message.why))


def inspected(message: Inspected, sender: int, route: Route) -> Inspected:
    mine = {visit.index for visit in route.on(sender)}
    if not mine.issuperset(message.bad) or not set(route.nodes()).issuperset(message.unheard):
        raise ProtocolError(
            f"names visits {message.bad[:9]} and nodes {message.unheard[:9]}, which are not of its plan"
        )
    return message


def layer_of(layer: int, layers: int) -> None:
    untrusted.whole(layer, "the number of a layer", 0, layers - 1)


def layer_state(
    message: LayerState, layer: Layer, whole: bool = True, frozen: Collection[str] = frozenset()
) -> None:  # fmt: skip
    """A layer's own tensors but for the frozen ones, then its optimizer state; not `whole`: only what is not trained, holes
    for the rest."""
    wanted = [each for each in layer.tensors if each.name not in frozen]
    own = len(wanted)
    if len(message.tensors) != own + len(message.state) or len(set(message.state)) != len(message.state):
        raise ProtocolError(f"sent layer {layer.name} with {len(message.tensors)} tensors")
    for each, spec in zip(wanted, message.tensors, strict=False):
        if each.trainable and not whole:
            if spec is not None:
                raise ProtocolError(f"sent {layer.full_name(each)}, which nobody asked for")
        elif spec is None or (spec.dtype, spec.shape) != (each.dtype, each.shape):
            raise ProtocolError(f"sent {spec} as {layer.full_name(each)}")
        elif each.trainable:
            _one_by_one(spec)
    if message.state and not whole:
        raise ProtocolError(f"sent optimizer state of {layer.name}, which nobody asked for")
    optimizer_state(layer, message.state, message.tensors[own:])


def optimizer_state(layer: Layer, state: Sequence[StateName], tensors: Specs) -> None:
    """Each of what a layer's parameters may have, once."""
    if len(state) != len(tensors) or len(set(state)) != len(state):
        raise ProtocolError(f"sent optimizer state of {layer.name} with {len(tensors)} tensors")
    shapes = {each.name: each.shape for each in layer.tensors if each.trainable}
    for (name, key), spec in zip(state, tensors, strict=True):
        if name not in shapes or key not in (*STATE_KEYS, PREVIOUS):
            raise ProtocolError(f"sent optimizer state {untrusted.line(f'{name}.{key}')} of {layer.name}")
        state_tensor(key, spec, shapes[name])


def state_tensor(key: str, spec: TensorSpec | None, shape: Sequence[int]) -> None:
    """Optimizer state has the shape of its parameter, a single number none."""
    wanted = () if key in NUMBERS else tuple(shape)
    if spec is None or spec.shape != wanted or not spec.dtype.startswith(("float", "bfloat")):
        raise ProtocolError(f"sent {spec} as {key}")
    _one_by_one(spec)


def _one_by_one(spec: TensorSpec) -> None:
    """Nothing that is updated in place may lie in one place with something else."""
    check(spec, untrusted.MOST)
    if any(stride == 0 and size > 1 for size, stride in zip(spec.shape, spec.strides, strict=True)):
        raise ProtocolError(f"sent {spec}, whose elements lie in one place")


def _own(node: int, sender: int) -> None:
    if node != sender:
        raise ProtocolError(f"reports what node {node} did")


def within(total: Collection[TensorSpec | None], limit_bytes: int, what: str) -> None:
    """All together no more than this."""
    taken = sum(check(each, limit_bytes) for each in total if each is not None)
    if taken > limit_bytes:
        raise ProtocolError(f"sent {taken} bytes of {what}, over the limit of {limit_bytes}")
