"""A run that was stopped and resumed is one run: time, bytes, joules and curves cover all its parts, every step once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from known_run import ended, figures_of, known_events, node_step, started, step
from ringtmp import Result
from ringtmp.errors import RingError
from ringtmp.metrics.events import (
    Evaluated,
    Event,
    NodeStarted,
    Regrouped,
    RunEnded,
    Warned,
    read,
)
from ringtmp.metrics.fold_events import parts_of
from ringtmp.metrics.history import history_of
from ringtmp.metrics.summary import Summary, of_parts
from ringtmp.report import learning_curves, run_page, run_timeline
from ringtmp.report.page_content import Figure, Mark
from test_training_loop import resume, train


def part(clock: float, first: int, last: int, nodes: tuple[int, ...] = (0, 1)) -> list[Event]:
    """Steps `first` to `last` of two seconds each, from a start at `clock`, half a second before the first."""
    found: list[Event] = [started(clock, first)]
    found += [NodeStarted(clock, node, "master" if node == 0 else "worker", 1, 1, (f"{node}",), 10) for node in nodes]
    for place, number in enumerate(range(first, last + 1)):
        at = clock + 0.5 + 2.0 * place
        power = {node: ended(node).power if place == 0 else None for node in nodes}
        done = [msgspec.structs.replace(node_step(node, number, at), power=power[node]) for node in nodes]
        found += [*done, step(number, at + 2)]
    return found


def stopped(clock: float, step: int, outcome: str, nodes: tuple[int, ...] = (0, 1)) -> list[Event]:
    return [*map(ended, nodes), RunEnded(clock, step, outcome, "ab" * 32 if outcome == "done" else None)]


def cut_and_resumed() -> list[Event]:
    """Killed with step 2 done, two steps after the checkpoint; resumed after a reboot: the clock has begun anew."""
    return [
        *part(500.0, 0, 2),
        *part(3.0, 1, 3),
        Evaluated(9.7, 4, 0, 10, 0.5, 0.9, None),
        *stopped(10.0, 4, "done"),
    ]


def whole(events: list[Event]) -> Summary:
    return of_parts(parts_of(events), "run")


A_STEP_J = (4.0 + 3.0 + 1.5) + (4.0 + 2.0 + 1.5)


def test_the_summary_of_a_resumed_run_covers_all_of_it_and_counts_lost_steps_once() -> None:
    summary = whole(cut_and_resumed())
    assert summary.steps == 4
    assert summary.wall_s == 6.5 + 7.0  # the lost steps took their time; what lay between the parts did not
    assert summary.bytes_total == 4 * 1500
    assert summary.loss.first == 3.0
    assert summary.loss.last == 0.0
    assert [(each.node, each.busy_s, each.bytes_sent) for each in summary.per_node] == [(0, 6.0, 4000), (1, 4.0, 2000)]
    assert summary.samples_per_s == 8.0
    # The part that was cut off said with its first step what it ran on.
    assert summary.energy_j == pytest.approx(4 * A_STEP_J)
    assert (summary.outcome, summary.accuracy) == ("done", 0.9)
    assert [(each.first_step, each.steps, each.lost_steps, each.outcome) for each in summary.parts] == [
        (0, 1, 2, "cut off"), (1, 4, 0, "done"),
    ]  # fmt: skip


def test_the_page_of_a_resumed_run_shows_all_of_it_with_a_mark_where_it_was_resumed() -> None:
    shown = figures_of(cut_and_resumed())
    resumed = "resumed after step 1, 2 lost"
    loss = shown["loss-steps"]
    assert (loss.series[0].x, loss.series[0].y) == ((1.0, 2.0, 3.0, 4.0), (3.0, 2.0, 1.0, 0.0))
    assert loss.marks == (Mark(1.0, resumed),)
    assert loss.series[1].x == (4.0,)
    assert shown["loss-seconds"].series[0].x == (2.0, 8.5, 10.5, 12.5)
    assert shown["loss-seconds"].marks == (Mark(6.0, resumed),)
    assert shown["loss-bytes"].series[0].x == (1500.0, 3000.0, 4500.0, 6000.0)
    assert shown["loss-bytes"].marks == (Mark(1500.0, resumed),)
    assert shown["loss-joules"].series[0].x == pytest.approx([A_STEP_J * (each + 1) for each in range(4)])
    assert sum(sum(series.y) for series in shown["energy"].series) == pytest.approx(4 * A_STEP_J)
    accuracy = shown["accuracy"]
    assert (accuracy.series[0].x, accuracy.series[0].y) == ((4.0,), (90.0,))
    speed = shown["speed"]
    assert speed.marks == (Mark(6.0, resumed),)
    stretch = 2 * float(speed.series[0].x[0])
    assert sum(speed.series[0].y) * stretch == pytest.approx(6 * 16)  # four steps, two of them twice
    found = run_timeline.gather(cut_and_resumed(), "run")
    assert found is not None
    page = run_page.page(found)
    tables = {table.title: table for section in page.sections for table in section.tables}
    assert [row[2:6] for row in tables["Where it was stopped and resumed"].rows] == [
        ("0", "1", "2", "2"), ("1", "4", "0", "2"),
    ]  # fmt: skip
    assert tables["Epoch by epoch"].rows == (("1", "4", "1.5", "0.5", "90.0%", "0.1", "8.0 s", "2"),)
    assert ("took", "13.5 s in 2 parts") in page.facts


def test_a_run_that_was_never_stopped_has_one_part_and_no_word_of_parts() -> None:
    found = run_timeline.gather(known_events(), "run")
    assert found is not None
    page = run_page.page(found)
    assert all(section.name != "parts" for section in page.sections)
    assert not any(figure.marks for figure in page.figures)
    assert ("took", "7.0 s") in page.facts


def test_nodes_that_a_resumed_run_no_longer_has_keep_what_they_did() -> None:
    log = [
        *part(0.0, 0, 1),
        *stopped(5.0, 2, "interrupted"),
        *part(100.0, 2, 3, (0,)),
        *stopped(105.0, 4, "done", (0,)),
    ]
    summary = whole(log)
    assert summary.nodes == 1
    assert [(each.node, each.segments, each.bytes_sent) for each in summary.per_node] == [
        (0, ("0",), 4000), (1, (), 1000),
    ]  # fmt: skip
    # Alone on the machine, the master has all its idle watts; hosts differ here, so nothing is shared before either.
    assert summary.energy_j == pytest.approx(2 * A_STEP_J + 2 * (4.0 + 3.0 + 1.5))
    begun = whole([*log, started(200.0, 4)])  # its ring is not laid out yet
    assert (begun.nodes, begun.steps, begun.outcome, begun.per_node) == (1, 4, "unfinished", summary.per_node)
    assert run_page.page(run_timeline.gather([*log, started(200.0, 4)], "run")).facts[0] == ("outcome", "unfinished")  # type: ignore[arg-type]
    shown = figures_of(log)
    assert shown["loss-steps"].marks == (Mark(2.0, "resumed after step 2"),)
    assert [row.row for row in shown["gantt"].spans] == ["master"]


def test_an_attempt_to_resume_that_came_to_nothing_does_not_undo_the_run() -> None:
    log = [*known_events(), Warned(1.0, "odd"), RunEnded(2.0, 0, "failed", None, "no room", begun=False)]
    summary = whole(log)
    before = whole(known_events())
    assert (summary.outcome, summary.weights_sha256, summary.wall_s) == ("done", "ab" * 32, before.wall_s)
    assert summary.warnings == ("odd", "an attempt to go on with the run failed: no room")
    killed = [*part(500.0, 0, 2), RunEnded(3.0, 0, "failed", None, "no room", begun=False)]
    assert whole(killed).outcome == "unfinished"
    assert whole(killed).wall_s == 6.5


def test_a_score_of_before_is_not_that_of_what_was_trained_since() -> None:
    log = [*part(0.0, 0, 1), Evaluated(4.6, 2, 0, 10, 0.5, 0.9, None), *stopped(5.0, 2, "done"),
           *part(50.0, 2, 3), *stopped(55.0, 4, "done")]  # fmt: skip
    assert whole(log).accuracy is None
    shown = figures_of(log)["loss-steps"]
    assert shown.series[1].x == (2.0,)


# -- history ------------------------------------------------------------------------------------------------------------


def test_the_history_of_a_resumed_run_has_every_step_once_and_says_which_part_it_is_of() -> None:
    history = history_of(parts_of(cut_and_resumed()))
    assert [(row.step, row.loss, row.part, row.at_s) for row in history.steps] == [
        (1, 3.0, 1, 2.5), (2, 2.0, 2, 9.0), (3, 1.0, 2, 11.0), (4, 0.0, 2, 13.0),
    ]  # fmt: skip
    assert [row.test_loss for row in history.steps] == [None, None, None, 0.5]
    (epoch,) = history.epochs
    assert (epoch.step, epoch.epoch, epoch.loss, epoch.test_loss, epoch.accuracy) == (4, 1, 1.5, 0.5, 0.9)
    assert (epoch.rate, epoch.samples, epoch.seconds) == (0.1, 64, 8.0)


def test_a_test_that_is_done_again_is_there_once() -> None:
    def tested(at: float, loss: float) -> Evaluated:
        return Evaluated(at, 2, 0, 10, loss, None, None)

    # The checkpoint of step 2 was saved before its epoch was tested, and the run killed after.
    log = [*part(0.0, 0, 2), tested(9.0, 0.7), *part(50.0, 2, 3), tested(50.1, 0.7), *stopped(60.0, 4, "done")]
    assert [row.test_loss for row in history_of(parts_of(log)).steps] == [None, 0.7, None, None]
    assert sum(len(each.evaluations) for each in parts_of(log)) == 1
    # A test of what was lost does not count; in a healed ring neither.
    late = Evaluated(9.0, 3, 0, 10, 0.1, None, None)
    assert [each.evaluations for each in parts_of([*part(0.0, 0, 2), late, *part(50.0, 1, 1)])] == [(), ()]
    again = Regrouped(9.5, 2, 1, "lost", 2, 0.5, (1,), 0.1, 1, "snapshot")
    assert parts_of([*part(0.0, 0, 2), late, again])[0].evaluations == ()


def test_a_long_history_prints_its_first_and_last_epochs() -> None:
    log: list[Event] = [started()]
    for number in range(30):
        done = step(number, 2.0 * number + 2)
        log.append(type(done)(done.at, number, number, done.loss, done.lr, done.samples, done.wall_s))
    lines = str(history_of(parts_of(log))).splitlines()
    assert lines[0].split() == ["epoch", "step", "loss", "rate", "time"]  # nothing was tested
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "...", *map(str, range(24, 31))]
    assert len({len(line) for line in lines}) == 1


# -- of real runs -------------------------------------------------------------------------------------------------------


def test_a_real_run_in_three_parts_reads_like_one(tmp_path: Path) -> None:
    never = train(tmp_path / "whole", 2, steps=8)
    train(tmp_path / "parts", 3, steps=3)
    resume(tmp_path / "parts", 1, steps=5)
    last = resume(tmp_path / "parts", 2, steps=8)
    once, thrice = never.history, last.history
    assert [(row.step, row.epoch, row.loss, row.rate) for row in thrice.steps] == [
        (row.step, row.epoch, row.loss, row.rate) for row in once.steps
    ]
    assert [row.part for row in thrice.steps] == [1, 1, 1, 2, 2, 3, 3, 3]
    assert [row.accuracy for row in thrice.epochs] == [row.accuracy for row in once.epochs]
    assert [row.at_s for row in thrice.steps] == sorted(row.at_s for row in thrice.steps)
    assert last.summary.loss == never.summary.loss
    figures = {figure.name: figure for figure in _page_of(tmp_path / "parts")}
    assert [mark.text for mark in figures["loss-steps"].marks] == ["resumed after step 3", "resumed after step 5"]


def test_a_real_attempt_that_fails_before_its_start_leaves_the_result_as_it_was(tmp_path: Path) -> None:
    digest = train(tmp_path / "run", 2, steps=3).summary.weights_sha256
    with pytest.raises(RingError) as refused:
        resume(tmp_path / "run", 9, steps=5)  # more nodes than layers
    summary = Result(tmp_path / "run").summary
    assert (summary.outcome, summary.weights_sha256, len(summary.parts)) == ("done", digest, 1)
    assert summary.warnings[-1] == f"an attempt to go on with the run failed: {refused.value}"


def _page_of(folder: Path) -> tuple[Figure, ...]:
    found = run_timeline.gather(read(folder / "events.jsonl"), str(folder))
    assert found is not None
    assert all(each > 0 for each in learning_curves.joules_by_step(found))
    return run_page.page(found).figures
