"""What a page is sent of a long run: thin, with the same sums, and every undone step drawn once."""

from __future__ import annotations

import msgspec
import pytest

from known_run import known_events, node_step, started, step
from ringtmp.dashboard.decimated_history import MOST_FRAMES, MOST_POINTS, Frames, Points
from ringtmp.dashboard.sentences_for_events import FIRST_ENTRIES, MOST_ENTRIES, Happenings
from ringtmp.metrics import events
from ringtmp.metrics.events import Event, NodeStarted, Reading, Regrouped
from ringtmp.metrics.fold_events import Fold, parts_of
from ringtmp.metrics.summary import of_parts


def test_a_day_of_steps_is_at_most_so_many_points_with_the_same_samples_and_extremes() -> None:
    points = Points()
    losses = [((7919 * number) % 1000) / 1000 for number in range(86_400)]
    for number, loss in enumerate(losses):
        points.take(events.StepDone(float(number), number, 0, loss, 0.1, 16, 1.0), float(number))
    assert MOST_POINTS // 2 <= len(points.rows) <= MOST_POINTS
    assert sum(each.samples for each in points.rows) == 16 * len(losses)
    assert (min(each.low for each in points.rows), max(each.high for each in points.rows)) == (min(losses), max(losses))
    assert points.rows[-1].loss == losses[-1]


def test_what_is_done_again_is_drawn_once() -> None:
    points = Points()
    for number in (0, 1, 2, 3, 4):
        points.take(step(number, float(number)), float(number))
    points.changed_from = len(points.rows)
    points.keep_before(2)
    points.take(step(2, 9.0), 9.0)
    assert [each.last for each in points.rows] == [0, 1, 2]
    assert points.changed_from == 2, "the page is told from here on"


def test_stretches_of_time_keep_every_second_and_byte_while_they_are_merged() -> None:
    frames = Frames()
    for number in range(4000):
        frames.take([node_step(0, number, 2.0 * number), node_step(1, number, 2.0 * number)], number, 2.0 * number + 2)
    assert len(frames.frames) <= MOST_FRAMES
    assert frames.rows(0), "what is told was added up"
    idle = sum(each.nodes[1].idle["activations"] for each in frames.frames)
    assert idle == pytest.approx(0.75 * 4000)
    assert sum(each.nodes[0].sent_bytes for each in frames.frames) == 1000 * 4000
    assert frames.frames[-1].step == 3999


def test_links_are_told_from_two_readings_of_one_process_and_never_across_two() -> None:
    frames = Frames()

    def read(number: int, at: float, sent: int) -> None:
        told = events.NodeStep(1, number, at, at, 1.0, 0.0, {}, 5, 5, reading=Reading(at, 7, {2: sent}))
        frames.take([told], number, at)

    read(0, 10.0, 1000)
    read(1, 12.0, 5000)
    assert frames.rows(0)[-1][2][0][5] == [2, 2000]
    frames.forget_readings([1])
    read(2, 14.0, 40)
    assert frames.rows(0)[-1][2][0][5] == []


def test_a_long_log_keeps_its_beginning_and_its_end_and_says_what_is_missing() -> None:
    log = Happenings()
    for number in range(MOST_ENTRIES + 50):
        log.take(events.Warned(float(number), str(number)), float(number))
    assert [each.text for each in log.entries[:FIRST_ENTRIES]] == [str(number) for number in range(FIRST_ENTRIES)]
    assert log.entries[-1].text == str(MOST_ENTRIES + 49)
    assert (len(log.entries), log.left_out) == (MOST_ENTRIES, 50)


def healed(steps: int, back_to: int) -> list[Event]:
    """A run that loses node 1 after so many steps, goes back, and goes on to as many again."""
    found: list[Event] = known_events()[:3]
    for number in range(steps):
        found += [
            node_step(0, number, 2.0 * number),
            node_step(1, number, 2.0 * number),
            step(number, 2.0 * number + 2),
        ]
    found += [NodeStarted(2.0 * steps, node, "worker", 1, 2, ("0-1",), 10) for node in (0, 1)]
    found.append(Regrouped(2.0 * steps + 1, back_to, 2, "lost", 2, 1.0, lost=(1,), repeated=steps - back_to))
    for number in range(back_to, steps):
        found += [node_step(0, number, 900.0), node_step(1, number, 900.0), step(number, 900.0 + 2 * number)]
    return found


def test_a_fold_that_keeps_little_gives_the_summary_of_one_that_keeps_all() -> None:
    stream = healed(40, 36)
    small = Fold(recent=8)
    for event in stream:
        small.take(event)
    assert not small.undone_too_far
    kept = sum(len(each) for part in small.parts() for each in part.node_steps.values())
    assert kept < 2 * 2 * 9 + 1
    assert of_parts(small.parts(), "run") == of_parts(parts_of(stream), "run")


def test_a_node_of_other_arithmetic_takes_the_bits_of_one_process_from_the_level_though_it_has_gone() -> None:
    there = healed(4, 2)
    like = of_parts(parts_of(there), "run").exactness
    at = next(position for position, each in enumerate(there) if isinstance(each, NodeStarted))
    there[at] = msgspec.structs.replace(there[at], unlike=True)
    assert (like, of_parts(parts_of(there), "run").exactness) == ("bits", "replay")


def test_a_loss_that_undoes_more_than_is_kept_apart_is_said() -> None:
    small = Fold(recent=8)
    for event in healed(40, 5):
        small.take(event)
    assert small.undone_too_far


def test_moments_of_a_resumed_part_follow_on_those_before() -> None:
    fold = Fold()
    for event in (started(100.0), step(0, 102.0), step(1, 104.0), started(7.0, first_step=2)):
        fold.take(event)
    assert fold.run_s(9.0) == 4.0 + 2.0


def test_many_nodes_that_begin_together_are_one_entry() -> None:
    log = Happenings()
    log.take(started(), 0.0)
    for node in range(64):
        log.take(NodeStarted(0.0, node, "worker", 1, 1, ("0-1",), 10), 0.0)
        log.changed_from = len(log.entries)
    assert [each.text for each in log.entries] == ["The run began", "64 nodes work; the table says what each holds"]
    log.take(events.Warned(1.0, "slow"), 1.0)
    log.take(NodeStarted(0.0, 3, "worker", 1, 1, ("0-1",), 10), 0.0)
    assert log.entries[-1].text.startswith("Node 3 works")


def test_a_loss_that_was_warned_of_in_the_same_words_is_one_entry() -> None:
    log = Happenings()
    log.take(started(), 0.0)
    log.take(events.Warned(1.0, "node 2 was killed by SIGKILL in step 7; healing"), 1.0)
    log.changed_from = len(log.entries)
    log.take(events.NodeGone(1.0, 7, 2, "node 2 was killed by SIGKILL in step 7"), 1.0)
    assert [each.kind for each in log.entries] == ["start", "lost"]
    assert log.changed_from == 1, "the page forgets the warning, too"
    log.take(events.Warned(2.0, "the disk is nearly full"), 2.0)
    log.take(events.NodeGone(2.0, 8, 1, "node 1 went silent"), 2.0)
    assert [each.kind for each in log.entries] == ["start", "lost", "warning", "lost"]


def test_an_end_says_its_outcome_once() -> None:
    log = Happenings()
    log.take(events.RunEnded(1.0, 7, "interrupted", None, "interrupted after step 7; the checkpoint is saved"), 1.0)
    log.take(events.RunEnded(2.0, 8, "failed", None, "no room on the disk"), 2.0)
    assert [each.text for each in log.entries] == [
        "The run ended: interrupted after step 7; the checkpoint is saved", "The run ended: failed. no room on the disk",
    ]  # fmt: skip
