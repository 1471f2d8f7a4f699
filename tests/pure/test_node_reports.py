"""What a node reports of its steps: each once, in order, of those there are, within limits; and who breaks that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crooked import Crooked, Tensors
from ringtmp.errors import ProtocolError
from ringtmp.metrics import events
from ringtmp.metrics.energy import Power, Watts
from ringtmp.metrics.events import NodeStep, Reading, Span
from ringtmp.metrics.step_recorder import MOST_SPANS, Recorder
from ringtmp.runtime import check_node_replies
from ringtmp.runtime.node_reports import MOST_STEP_BYTES, Reports
from ringtmp.wire.messages import Message, Report
from test_data_parallel_healing import Base

NASTY = "\x1b[2J\x1b]0;owned\x07\nwarning: all is lost\u202e" + "A" * 500
POWER = Power("pi-4b", Watts(2.7, 6.4, 4.0), 1.0, "board", "rapl")
FIRST, COMMITTED, LASTED_S = 10, 20, 100.0


class Now:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def reports(detailed_steps: int = 3) -> Reports:
    clock = Now()
    made = Reports(FIRST, detailed_steps, clock)
    clock.now = LASTED_S
    return made


def told(step: int = FIRST, **other: Any) -> bytes:
    given: dict[str, Any] = {
        "start": 1.0, "end": 3.0, "busy_s": 1.5, "idle_s": 0.5, "idle": {"activations": 0.5}, "sent_bytes": 7,
        "received_bytes": 8, "busy": {"forward": 1.5}, "spans": (Span("forward", 1, 0, 1.0, 2.5),), "power": POWER,
    }  # fmt: skip
    return events.encode(NodeStep(node=1, step=step, **{**given, **other}))


def test_what_an_honest_node_reports_goes_into_the_log_as_it_is() -> None:
    made = reports()
    for step in (10, 11, 12):
        assert made.line(told(step), 1, COMMITTED) == told(step)
    skipped = told(15, spans=(), oldest=13, joules=5.0)  # a step that went on without it is not reported
    assert made.line(skipped, 1, COMMITTED) == skipped
    assert made.line(told(10).replace(b'"node":1', b'"node":2'), 2, COMMITTED), "everyone for itself"


def test_every_span_of_a_step_that_a_viewer_asked_for_is_taken_and_of_no_other() -> None:
    made = reports()
    made.asked = 15
    assert made.line(told(15), 1, COMMITTED) == told(15)
    with pytest.raises(ProtocolError, match="every span of step 16, which nobody asked for"):
        made.line(told(16), 1, COMMITTED)


@pytest.mark.parametrize("step", [9, 11, 10, 20, 10**6])
def test_a_step_reported_twice_out_of_order_or_before_it_is_given_is_an_offence(step: int) -> None:
    made = reports()
    made.line(told(11), 1, COMMITTED)
    with pytest.raises(ProtocolError, match=f"reports step {step}"):
        made.line(told(step), 1, COMMITTED)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"spans": (Span("forward", 1, 0, 1.0, 2.5),) * (MOST_SPANS + 1)}, "spans"),
        ({"busy": {f"k{number}": 1.0 for number in range(33)}}, "kinds of work"),
        ({"idle": {f"k{number}": 1.0 for number in range(33)}}, "kinds of waiting"),
        ({"sent_bytes": 10**15}, "bytes sent"),
        ({"received_bytes": MOST_STEP_BYTES + 1}, "bytes received"),
        ({"busy": {f"k{number:031}": 1.0 for number in range(150_000)}}, "over the limit of 1048576"),
        ({"power": msgspec.structs.replace(POWER, watts=Watts(-5e300, 1.0))}, "its power"),
        ({"power": msgspec.structs.replace(POWER, share=-1e300)}, "its power"),
        ({"reading": Reading(1.0, -1)}, "the memory it has"),
        ({"reading": Reading(1.0, 5, {2: -7})}, "what was sent to it"),
        ({"reading": Reading(1.0, 5, {-2: 7})}, "a receiver"),
    ],
)
def test_more_than_fits_is_an_offence(other: dict[str, Any], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        reports().line(told(**other), 1, COMMITTED)


def test_every_span_of_a_step_is_for_the_steps_that_are_shown_in_detail() -> None:
    made = reports(detailed_steps=3)
    made.line(told(12), 1, COMMITTED)
    with pytest.raises(ProtocolError, match="every span of step 13"):
        made.line(told(13), 1, COMMITTED)
    assert made.line(told(100), 1, 101), "every hundredth is"


def test_text_about_a_device_is_only_text() -> None:
    power = Power(NASTY, POWER.watts, 1.0, NASTY, NASTY)
    shown = check_node_replies.node_step(told(power=power), 1).power
    assert shown is not None
    assert all(each.isprintable() and len(each) <= 80 for each in (shown.name, shown.host, shown.meter))


def test_no_time_is_less_than_nothing_or_longer_than_the_run_has_lasted() -> None:
    long = told(busy_s=1e8, idle_s=-1e-4, busy={"forward": 1e8, "update": -1e-4}, idle={"gradients": 1e9}, joules=1e15)
    event = msgspec.json.decode(reports().line(long, 1, COMMITTED), type=NodeStep)
    times = [event.busy_s, event.idle_s, *event.busy.values(), *event.idle.values()]
    assert min(times) == 0
    assert max(times) < 1.2 * LASTED_S
    assert event.joules is not None
    assert event.joules < 1e9


def test_a_recorder_keeps_no_more_spans_than_may_be_reported() -> None:
    """However many microbatches or keys there are; what was done is counted all the same."""
    clock = Now()
    clock.now = 1234567.123456789
    recorder = Recorder(1, clock, 32)
    recorder.begin()
    for number in range(MOST_SPANS):
        started = recorder.begin()
        clock.now += 0.00123456789
        recorder.end(started, "serialise", 1000, number)
        recorder.received(1000, number, 1234567.123456789, 1234568.123456789, 123_456_789)
        recorder.sent(1234567.123456789, 1234568.123456789, 123_456_789)
    event = recorder.close_step(FIRST, FIRST)
    assert len(event.spans) == MOST_SPANS
    assert event.busy_s == pytest.approx(MOST_SPANS * 0.00123456789)
    assert event.received_bytes == MOST_SPANS * 123_456_789
    assert reports().line(events.encode(event), 1, COMMITTED)


@pytest.mark.usefixtures("offenders")
def test_a_node_that_reports_a_step_three_times_is_dropped_and_named(tmp_path: Path) -> None:
    def thrice(peer: int, message: Message, tensors: Tensors) -> tuple[int, Message, Tensors] | None:
        return (peer, Report(message.events * 3), tensors) if isinstance(message, Report) else None

    hit = Base(tmp_path).run(Crooked(3, 1, thrice), "ring", steps=4)
    (loss,) = hit.summary.recoveries
    assert "node 1 broke the protocol" in loss.reason
    assert "reports step" in loss.reason
    log = [json.loads(line) for line in (hit.run_dir / "events.jsonl").read_text().splitlines()]
    moved = next(at for at, each in enumerate(log) if each["type"] == "regroup")
    before = [each["step"] for each in log[:moved] if each["type"] == "node_step" and each["node"] == 1]
    assert len(before) == len(set(before))
