"""What happened in a run, in sentences: one line of the page's log for each event that a person wants to know of."""

from __future__ import annotations

import msgspec

from ringtmp.metrics import events
from ringtmp.units import bytes_text, count_text, seconds_text

#: The first and the last are kept of more than these.
MOST_ENTRIES, FIRST_ENTRIES = 600, 100


#: More than these that begin together are one entry.
MOST_JOINED = 8


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """`kind` chooses the sign beside it: start, join, lost, healed, moved, kept, tested, warning, end."""

    at_s: float
    kind: str
    text: str
    step: int | None = None


class Happenings(msgspec.Struct):
    """`changed_from`: entries from this place on are other than those told last."""

    entries: list[Entry] = []
    left_out: int = 0
    changed_from: int = 0
    protected: bool = False
    starts: int = 0
    joined: int = 0  # of those who began last, one after the other

    def take(self, event: events.Event, at_s: float) -> None:
        found = self._told(event)
        if found is None:
            return
        kind, text = found
        if isinstance(event, events.NodeGone):
            self._forget_warning_of(event.reason)
        self.joined = self.joined + 1 if kind == "join" else 0
        if self.joined > MOST_JOINED:
            if self.joined == MOST_JOINED + 1:
                del self.entries[-MOST_JOINED:]
            else:
                self.entries.pop()
            self.changed_from = min(self.changed_from, len(self.entries))
            text = f"{self.joined} nodes work; the table says what each holds"
        step = getattr(event, "step", None)
        self.entries.append(Entry(round(at_s, 3), kind, text, step))
        if len(self.entries) > MOST_ENTRIES:
            del self.entries[FIRST_ENTRIES]
            self.left_out += 1
            self.changed_from = min(self.changed_from, FIRST_ENTRIES)

    def _forget_warning_of(self, reason: str) -> None:
        """A loss is warned of in the same words before it is told: one entry is enough."""
        if self.entries and self.entries[-1].kind == "warning" and self.entries[-1].text.startswith(reason):
            self.entries.pop()
            self.changed_from = min(self.changed_from, len(self.entries))

    def _told(self, event: events.Event) -> tuple[str, str] | None:
        if isinstance(event, events.RunStarted):
            self.starts += 1
            if self.starts == 1:
                return "start", "The run began"
            return "start", f"The run was resumed after step {event.first_step}"
        if isinstance(event, events.NodeStarted):
            name = event.device or ("the master" if event.node == 0 else f"node {event.node}")
            held = ", ".join(event.segments)
            what = f" with {held} ({count_text(event.parameters)} parameters)" if held else ""
            return "join", f"{name[0].upper()}{name[1:]} works{what}"
        if isinstance(event, events.NodeGone):
            return "lost", f"{event.reason}. The ring is healing"
        if isinstance(event, events.Regrouped):
            return _regrouped(event)
        if isinstance(event, events.HomesMet):
            return "moved", _met(event)
        if isinstance(event, events.CheckpointSaved):
            size, took = bytes_text(event.bytes), seconds_text(event.seconds)
            return "kept", f"Checkpoint of step {event.step} saved: {size} in {took}"
        if isinstance(event, events.Evaluated):
            return "tested", f"Test after step {event.step}: {score(event)}"
        if isinstance(event, events.SnapshotWhole):
            told, self.protected = self.protected, True
            return None if told else ("kept", "The first snapshot is whole: from here on a node may vanish")
        if isinstance(event, events.StreamStrayed | events.Warned):
            return "warning", event.text
        if isinstance(event, events.RunEnded):
            return "end", f"The run ended: {_outcome(event)}"
        return None


def _outcome(event: events.RunEnded) -> str:
    if not event.error:
        return event.outcome
    # "interrupted after step 7; the checkpoint is saved" has the outcome in it.
    return event.error if event.error.startswith(event.outcome) else f"{event.outcome}. {event.error}"


def score(event: events.Evaluated) -> str:
    parts = [f"loss {event.loss:.4f}"]
    if event.bits_per_byte is not None:
        parts.append(f"{event.bits_per_byte:.3f} bits per byte")
    elif event.accuracy is not None:
        parts.append(f"{event.accuracy:.1%} right")
    if event.perplexity is not None:
        parts.append(f"perplexity {event.perplexity:.4g}")
    return ", ".join(parts)


def _met(event: events.HomesMet) -> str:
    took = seconds_text(event.seconds)
    if event.kind == "alone":
        return f"Round {event.round} ended alone after step {event.step} ({took}): the other home was not there"
    if event.kind in ("adopted", "served"):
        who = "This home took over what the other had" if event.kind == "adopted" else "The other home took over"
        return f"{who} at step {event.step} ({took})"
    return f"Homes exchanged after step {event.step}: {bytes_text(event.sent_bytes)} each way in {took}"


def _regrouped(event: events.Regrouped) -> tuple[str, str]:
    took = seconds_text(event.seconds)
    again = "no step is repeated" if not event.repeated else f"{event.repeated} steps are repeated"
    if event.kind == "rebalanced":
        return "moved", f"Layers were moved: {event.reason} ({took})"
    if event.kind == "restarted":
        return "healed", f"{event.reason}; the next went on from the {event.source} in {took}, {again}"
    if event.lost:
        return "healed", f"Healed in {took} from the {event.source or 'survivors'}: {event.nodes} nodes go on, {again}"
    return "moved", f"{event.reason}: the ring was rebuilt in {took}, {event.nodes} nodes"
