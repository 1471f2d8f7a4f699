"""What a run says of itself: to its event log, and to whoever looks on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtmp.metrics import events
from ringtmp.metrics.event_log import EventLog
from ringtmp.metrics.events import Regrouped
from ringtmp.run.what_to_train import Watcher
from ringtmp.wire.messages import Hello


class Record:
    def __init__(self, log: EventLog, watcher: Watcher) -> None:
        self.log = log
        self.watcher = watcher
        self._seen_at = 0.0

    def write(self, event: events.Event) -> None:
        self.log.write(event)
        if isinstance(event, Regrouped):
            self.watcher.recovered(event)

    def began(self, run_dir: Path, event: events.RunStarted) -> None:
        self.log.write(event)
        self.watcher.started(run_dir, event)

    def still_here(self) -> None:
        """The run waits, and means to: whoever supervises it looks at the time of the last event."""
        now = time.monotonic()
        if now - self._seen_at > 1:
            self._seen_at = now
            self.log.touch()

    def warn(self, text: str) -> None:
        self.watcher.warn(text)
        self.log.write(events.Warned(time.monotonic(), text))

    def survived(self, event: Regrouped) -> None:
        """A node was lost, and the run goes on."""
        self.write(event)
        self.watcher.tell(lost_text(event))


def unlike(hellos: Mapping[int, Hello], own: Mapping[str, Any], device: str = "cpu") -> dict[int, str]:
    """A line for every node whose arithmetic may not be the master's, which computes on this `device`."""
    mine = own["torch"], own["capability"], device
    return {
        node: f"node {node} has torch {hello.torch} with {_computing(hello.capability, hello.device)}, the master {mine[0]} "
        f"with {_computing(*mine[1:])}: weights may differ in their last bits from those of one process, and after a loss from "
        "an undisturbed run's"
        for node, hello in sorted(hellos.items())
        if (hello.torch, hello.capability, hello.device) != mine
    }


def _computing(capability: str, device: str) -> str:
    return capability if device == "cpu" else device


def steps_again(count: int) -> str:
    return "no step" if not count else f"{count} step{'s' if count > 1 else ''}"


def lost_text(event: Regrouped) -> str:
    """One line for the user."""
    who = " and ".join(f"node {node}" for node in event.lost) or "a link"
    steps = steps_again(event.repeated)
    lost = f"{who} lost, noticed within {event.notice_s:.1f} s"
    after = f"{event.nodes} nodes continue after {event.seconds:.1f} s (generation {event.generation})"
    if event.source == "servers":
        return f"{lost}; the servers have the parameters, so no step is repeated; {after}"
    if event.source == "workers":
        return f"{lost}; every other worker has its own parameters, so no step is repeated; {after}"
    if event.source == "replica":
        return f"{lost}; the next server has its keys, so no step is repeated; {after}"
    if event.source == "survivors":
        return f"{lost}; continued at step {event.step} with what the survivors have, repeating {steps}; {after}"
    return f"{lost}; went back to the {event.source} of step {event.step}, repeating {steps}; {after}"
