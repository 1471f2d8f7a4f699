"""Where the time goes: every moment of a step has a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtmp.metrics import events
from ringtmp.metrics.step_recorder import Recorder
from test_training_loop import train


def test_work_hand_over_mail_and_waiting_follow_one_another_without_gaps() -> None:
    times = iter([10.0, 12.0, 13.0, 14.0, 20.0, 23.0, 24.0, 25.0])
    recorder = Recorder(1, lambda: next(times), 1)
    started = recorder.begin()  # 10
    recorder.sending()  # 12
    recorder.sending()  # a second message of the same work: no reading of the clock
    recorder.end(started, "forward", 2, 0)  # 13
    started = recorder.begin()  # 14: straight on, so the time between was the loop's own
    recorder.end(started, "weights", 2, -1)  # 20
    recorder.waiting_for("gradients")
    recorder.heard(21.5)
    recorder.waiting_for("gradients")  # that mail was not enough
    recorder.heard(22.0)
    recorder.heard(22.5)
    started = recorder.begin()  # 23
    recorder.end(started, "backward", 2, 0)  # 24
    step = recorder.close_step(0, 0)
    assert step.busy == {"forward": 2.0, "serialise": 1.0, "mail": 2.0, "weights": 6.0, "backward": 1.0}
    assert step.idle == {"gradients": 2.0}
    assert step.busy_s + step.idle_s == step.end - step.start == 14.0
    assert [(span.kind, span.start, span.end) for span in step.spans] == [
        ("forward", 10.0, 12.0), ("serialise", 12.0, 13.0), ("mail", 13.0, 14.0), ("weights", 14.0, 20.0),
        ("mail", 22.0, 23.0), ("backward", 23.0, 24.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "staleness"), [("1f1b", 0), ("gpipe", 0), ("zero-bubble", 0), ("1f1b", 1), ("zero-bubble", 1)]
)
def test_spans_and_waits_account_for_98_percent_of_every_step(schedule: str, staleness: int, tmp_path: Path) -> None:
    summary = train(tmp_path / "run", 3, steps=6, schedule=schedule, staleness=staleness).summary
    compute = {"forward", "backward", "update"}
    for event in events.read(tmp_path / "run/events.jsonl"):
        if isinstance(event, events.NodeStep):
            # Where steps overlap, all forwards of a step may lie in the one before it.
            least = compute - {"forward"} if staleness else compute
            assert least <= set(event.busy) <= compute | {"weights", "serialise", "mail"}
            assert sum(event.busy.values()) == pytest.approx(event.busy_s)
            spans = sum(span.end - span.start for span in event.spans if span.kind in event.busy)
            assert spans + sum(event.idle.values()) >= 0.98 * (event.end - event.start)
    assert any("weights" in node.busy_kinds for node in summary.per_node) == (schedule == "zero-bubble")
    for node in summary.per_node:
        assert sum(node.busy_kinds.values()) == pytest.approx(node.busy_s)
