"""The events of a run, one JSON object per line in `<run>/events.jsonl`. Times are seconds of the master's clock.

A new field is optional; a changed meaning is a new SCHEMA. Those that come by the hundred thousand are `gc=False`: nothing
in them can refer back to them, and the collector need not look at them again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ringtmp.errors import UsageError
from ringtmp.metrics.energy import Power

SCHEMA = 1


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something a node did: forward, backward, weights, update (compute), serialise, mail, send, receive."""

    kind: str
    visit: int
    microbatch: int
    start: float
    end: float
    bytes: int = 0


class RunStarted(msgspec.Struct, frozen=True, tag="run"):
    at: float
    wall_clock: str
    schema: int
    run: str
    version: str
    config: dict[str, Any]
    facts: dict[str, Any]
    generation: int
    first_step: int


class NodeStarted(msgspec.Struct, frozen=True, tag="node"):
    at: float
    node: int
    role: str
    pid: int
    generation: int
    segments: tuple[str, ...]
    parameters: int
    device: str = ""  # its own name, where it has one
    unlike: bool = False  # its arithmetic may not be the master's


class StepDone(msgspec.Struct, frozen=True, tag="step", omit_defaults=True, gc=False):
    at: float
    step: int
    epoch: int
    loss: float
    lr: float
    samples: int
    wall_s: float
    unprotected: bool = False  # snapshots are wanted, and there is none of this generation
    #: Of its samples before they were learned, in evaluation mode, with --test-then-train.
    predicted_loss: float | None = None
    predicted_accuracy: float | None = None


class Reading(msgspec.Struct, frozen=True, gc=False):
    """Of one node at the end of a step, about once a second: the memory it has, and what it has sent to each peer since its
    process began (tensor payload, evaluations included)."""

    at: float
    rss_bytes: int
    sent_to: dict[int, int] = {}


class NodeStep(msgspec.Struct, frozen=True, tag="node_step", gc=False):
    """One node's share of one step. busy_s + idle_s is the whole of end - start; `busy` and `idle` say what each was."""

    node: int
    step: int
    start: float
    end: float
    busy_s: float
    idle_s: float
    idle: dict[str, float]
    sent_bytes: int
    received_bytes: int
    spans: tuple[Span, ...] = ()
    busy: dict[str, float] = {}
    #: Every update before this step was in the parameters it worked with; None where there is no doubt.
    oldest: int | None = None
    #: What a meter said meanwhile; None without one.
    joules: float | None = None
    #: What is known of its device, with the first step it records: it may be cut off before it says so at its end.
    power: Power | None = None
    reading: Reading | None = None  # for whoever looks on; None: there was one less than a second ago


class Evaluated(msgspec.Struct, frozen=True, tag="evaluation"):
    at: float
    step: int
    epoch: int
    samples: int
    loss: float
    accuracy: float | None
    bits_per_byte: float | None
    perplexity: float | None = None


class CheckpointSaved(msgspec.Struct, frozen=True, tag="checkpoint"):
    at: float
    step: int
    seconds: float
    bytes: int


class Regrouped(msgspec.Struct, frozen=True, tag="regroup"):
    """Other members: a new generation, or within one, where a parameter server goes on without a node. What nodes do from
    `step` on comes after this event; what was done of it before does not count."""

    at: float
    step: int
    generation: int
    reason: str
    nodes: int
    seconds: float  # from noticing, or wanting it, to the ring laid out again
    #: Of a loss: who, how long after it was last known to live it was noticed, how many finished steps are done again,
    #: and what everyone goes on with: a snapshot, a checkpoint, what survivors, servers or a replica have.
    lost: tuple[int, ...] = ()
    notice_s: float = 0.0
    repeated: int = 0
    source: str = ""
    #: "rebalanced": nobody came or went, but devices were not as fast as planned. "restarted": the master was gone, and this is
    #: the next one's first word.
    kind: str = ""


class HomesMet(msgspec.Struct, frozen=True, tag="homes"):
    """The run met the other home, or ended a round without it, and goes on from `step` with other weights."""

    at: float
    step: int
    round: int  # that begins
    kind: str  # exchanged, alone, adopted (took over what the other had), served (the other took over)
    seconds: float  # from coming to it to the ring laid out again
    sent_bytes: int = 0
    received_bytes: int = 0


class NodeGone(msgspec.Struct, frozen=True, tag="gone"):
    """A node was lost and the ring begins to heal; a Regrouped follows when it has."""

    at: float
    step: int
    node: int | None  # None: a link
    reason: str


class SnapshotWhole(msgspec.Struct, frozen=True, tag="snapshot"):
    """Every node's state before `step` is held by its neighbour too; the next comes `interval` steps later."""

    at: float
    step: int
    interval: int


class LineTried(msgspec.Struct, frozen=True, tag="line"):
    """Before a plan: how much goes from one node to another, and back, and how long an empty message takes. Nothing at all:
    they did not hear each other."""

    at: float
    source: int
    target: int
    there_bytes_per_s: float
    back_bytes_per_s: float
    latency_s: float


class StreamStrayed(msgspec.Struct, frozen=True, tag="stream"):
    """From `step` on batches are not those an undisturbed run would have: `skipped` samples could not be had again, or the
    stream gave others."""

    at: float
    step: int
    skipped: int
    text: str


class SamplesLeftOut(msgspec.Struct, frozen=True, tag="left_out"):
    """What could not be read as a sample and was left out as asked (--bad-lines skip)."""

    at: float
    step: int
    count: int  # since this part of the run began
    text: str  # about the last one


class Warned(msgspec.Struct, frozen=True, tag="warning"):
    at: float
    text: str


class NodeEnded(msgspec.Struct, frozen=True, tag="node_end"):
    node: int
    peak_rss_bytes: int
    sent_bytes: int
    received_bytes: int
    placement_bytes: int
    overhead_sent_bytes: int
    resent_packets: int
    #: Gradients a server applied, and those it left out because the step had gone on without them.
    applied: int = 0
    dropped: int = 0
    power: Power | None = None
    #: Tensor payload by receiver, evaluations included.
    sent_to: dict[int, int] = {}


class RunEnded(msgspec.Struct, frozen=True, tag="end"):
    at: float
    step: int
    outcome: str  # done, stopped early, interrupted, failed
    weights_sha256: str | None
    error: str | None = None
    begun: bool = True  # False: it came to nothing before its first event, so this ends no part of the run


Event = (
    RunStarted
    | NodeStarted
    | StepDone
    | NodeStep
    | Evaluated
    | CheckpointSaved
    | Regrouped
    | HomesMet
    | NodeGone
    | SnapshotWhole
    | LineTried
    | StreamStrayed
    | SamplesLeftOut
    | Warned
    | NodeEnded
    | RunEnded
)


class NodeTimes(msgspec.Struct, frozen=True):
    """Of a NodeStep, what is looked at while a run lasts."""

    node: int
    busy_s: float
    idle_s: float
    busy: dict[str, float] = {}

    @property
    def compute_s(self) -> float:
        """Work on layers."""
        return sum(self.busy.get(kind, 0.0) for kind in ("forward", "backward", "weights", "update"))


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


def encode(event: Event) -> bytes:
    return _encoder.encode(event)


def decode(line: bytes) -> Event:
    """msgspec.DecodeError or UnicodeDecodeError: it is none, or of a kind from a later version."""
    event: Event = _decoder.decode(line)
    return event


def read(path: Path) -> Iterator[Event]:
    """All whole lines. A line cut short by a crash or damaged is passed over, as is a kind from a later version."""
    with path.open("rb") as file:
        yield from decoded(file)


def of_run(run: Path) -> Iterator[Event]:
    """UsageError where it is no run's directory."""
    log = run / "events.jsonl"
    if not log.is_file():
        raise UsageError(f"{run} is not a run directory: it has no events.jsonl")
    return read(log)


def decoded(lines: Iterable[bytes]) -> Iterator[Event]:
    """What is an event among these lines."""
    for line in lines:
        try:
            event = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        yield event
