"""The experiments: what is known beforehand comes out exactly, differences are found where they are, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from invented import choices, invented, page, record_of, run_events
from ringtmp.bench.analysis import intervals, per_step_values, traffic_formulas
from ringtmp.bench.analysis.intervals import Interval
from ringtmp.bench.bench_request import DIGITS_SAMPLES, default_ways
from ringtmp.bench.experiment_registry import CATALOG, COMPARISONS, named
from ringtmp.bench.experiments import (
    capacity,
    exchange,
    idle,
    learning_progress,
    resilience,
    scaling,
    step_time_equations,
    traffic,
)
from ringtmp.bench.measuring import run_record
from ringtmp.bench.measuring.measurement_files import Measured
from ringtmp.bench.measuring.read_output import step_times
from ringtmp.bench.programs import largest_model, node_removal
from ringtmp.bench.training_runs import common_runs, learning_rate_sweep
from ringtmp.bench.training_runs.strategy_variants import parse, parse_all
from ringtmp.cli import bench as verb
from ringtmp.data.source_registry import load
from ringtmp.errors import UsageError
from ringtmp.metrics import events
from ringtmp.metrics.fold_events import parts_of
from ringtmp.plan.route import parse_cuts

# -- ways -------------------------------------------------------------------------------------------------------------


def test_a_way_is_the_flags_one_would_type() -> None:
    assert parse("ring").words() == ["--strategy", "ring"]
    assert parse("ring:staleness=1").words() == ["--strategy", "ring", "--staleness", "1"]
    assert parse("ps:ssp:3").words() == ["--strategy", "ps", "--with", "consistency=ssp:3"]
    assert parse("ps:bsp:servers=workers:wire=int8").words() == [
        "--strategy", "ps", "--with", "consistency=bsp", "--with", "servers=workers", "--wire", "int8",
    ]  # fmt: skip
    assert parse("allreduce:ring").settings == {"algorithm": "ring"}
    assert (parse("ps:bsp").workers(4), parse("ps:bsp:servers=workers").workers(4), parse("ring").workers(4)) == (
        3,
        4,
        4,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rnig", "did you mean 'ring'"),
        ("ring:stalenes=1", "did you mean 'staleness'"),
        ("ps:bsp:staleness=1", "unknown setting of strategy ps"),
        ("ring:wire=int9", "did you mean 'int8'"),
        ("ring:staleness=2", "must be 0 or 1"),
        ("ring:window=0", "must be a whole number"),
        (" , ", "is empty"),
    ],
)
def test_a_wrong_way_is_refused_with_what_was_meant(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_all(text)


def test_a_way_that_cannot_run_is_skipped_with_its_reason_and_never_silently() -> None:
    asked = choices(strategies="ring,ps:bsp:servers=3")  # three nodes: no worker is left
    assert [each.way.label for each in idle.cells(asked) if not each.label] == ["ring"]
    skipped = [each for each in idle.section(asked, Measured([])).skipped if each.what == "ps:bsp:servers=3, 3 nodes"]
    assert skipped
    assert "leaves no worker" in skipped[0].why


# -- what is known comes back -----------------------------------------------------------------------------------------


def test_known_idleness_bytes_and_joules_come_back_exactly() -> None:
    made = record_of(run_events(idle_s=0.25))
    assert per_step_values.idle_times(made, 2) == [(0.5, 2.0)] * 4
    assert per_step_values.step_s(made, 2) == [1.0] * 4
    assert per_step_values.sent_bytes(made, 2) == [2000.0] * 4
    assert per_step_values.busiest_bytes(made, 2) == 1000.0
    assert per_step_values.busiest_step_bytes(made, 2) == [1000.0] * 4
    # Each node: 2 W for a second, 4 W more for 0.75 s, 2000 bytes at a millijoule each.
    assert per_step_values.step_joules(made, 2) == pytest.approx([2 * (2.0 + 3.0 + 2.0)] * 4, rel=1e-12)
    assert sum(load.joules for load in per_step_values.run_loads(made, 2)) == pytest.approx(4 * 14.0, rel=1e-12)
    assert made.tracks[1].causes == {"activations": 6 * 0.1875, "window": 6 * 0.0625}
    assert made.scores[0].accuracy == 0.75
    assert [bar.kind for bar in made.bars] == ["forward", "forward"]
    assert msgspec.convert(msgspec.to_builtins(made), run_record.Record) == made


def test_joules_of_some_steps_are_of_these_alone() -> None:
    stream = [
        msgspec.structs.replace(each, busy_s=0.25, idle_s=0.75)
        if isinstance(each, events.NodeStep) and each.step > 3
        else each
        for each in run_events(idle_s=0.25)
    ]
    made = record_of(stream)
    # Two nodes; a second has 2 J idle, 4 J more while busy and 2 J for bytes.
    assert sum(load.joules for load in per_step_values.run_loads(made, 0, 3)) == pytest.approx(3 * 2 * 7)
    assert sum(load.joules for load in per_step_values.run_loads(made, 2)) == pytest.approx(2 * 2 * 7 + 2 * 2 * 5)


def test_a_long_step_counts_for_more_of_the_idle_share_and_of_the_speed() -> None:
    """Idle time over training time, seconds over samples: not the mean of what single steps say."""
    made = record_of(run_events(idle_s=0.25))
    long = [
        msgspec.structs.replace(each, busy_s=(0.25, *each.busy_s[1:]), idle_s=(9.75, *each.idle_s[1:]))
        for each in made.tracks
    ]
    uneven = msgspec.structs.replace(
        made, tracks=tuple(long), took_s=(10.0, *made.took_s[1:]), samples=(5, *made.samples[1:])
    )
    share = intervals.interval([per_step_values.idle_times(uneven, 0)], "ratio", 0)
    assert share.middle == pytest.approx((9.75 + 5 * 0.25) / (10 + 5))
    assert share.low < share.middle <= share.high
    pace = intervals.interval([per_step_values.sample_times(uneven, 0)], "ratio", 0)
    assert pace.middle == pytest.approx(15 / 55)


def test_devices_that_were_slowed_are_told_in_their_own_time() -> None:
    made = msgspec.structs.replace(record_of(run_events(0.25)), scale=0.5)
    assert per_step_values.step_s(made, 2) == [0.5] * 4
    assert per_step_values.sample_times(made, 2) == [(0.5, 10.0)] * 4


def test_a_record_is_the_same_read_from_its_file() -> None:
    made = record_of(run_events(0.5))
    track = msgspec.structs.replace(made.tracks[0], sent_to={1: 1000, 2: 5})
    made = msgspec.structs.replace(made, tracks=(track, *made.tracks[1:]))
    kept = {"record": msgspec.to_builtins(made, str_keys=True)}
    assert run_record.from_facts(kept) == made
    assert run_record.from_facts(msgspec.json.decode(msgspec.json.encode(kept))) == made


def test_busy_time_of_steps_that_overlap_is_not_cut_off_step_by_step() -> None:
    """A node's record of a step may be of another time than the master's: only over all of them must it fit."""
    plain = record_of(run_events(0.5))
    uneven = msgspec.structs.replace(
        plain, took_s=tuple(sum(plain.took_s) / len(plain.took_s) * factor for factor in (0.1, 1.9) * 3)
    )
    assert sum(per_step_values.step_joules(uneven, 0)) == pytest.approx(sum(per_step_values.step_joules(plain, 0)))


def test_a_dedicated_server_is_in_no_workers_share() -> None:
    stream = run_events(0.25, server=True)
    lazy = [msgspec.structs.replace(each, busy_s=0.0, idle_s=1.0) if isinstance(each, events.NodeStep) and each.node == 0
            else each for each in stream]  # fmt: skip
    assert per_step_values.idle_times(record_of(lazy), 0) == [(0.25, 1.0)] * 6


def test_what_a_healed_run_did_again_counts_once_in_its_record_and_in_its_step_times() -> None:
    """Two steps, a test and half a third, a loss, and from the second step on all of it again, ten seconds later."""
    early = [*run_events(0.25, steps=2), *run_events(0.25, steps=3)[9:11]]
    lost = events.Regrouped(11.0, 1, 1, "lost", 2, 0.5, (1,), 0.2, 1, "snapshot")
    again = [msgspec.structs.replace(each, at=each.at + 11.0) if hasattr(each, "at") else each
             for each in run_events(0.25, steps=3)[6:]]  # fmt: skip
    (part,) = parts_of([*early, lost, *again])
    made = record_of([*early, lost, *again])
    assert made.steps == (0, 1, 2)
    assert made.ended_s == (1.0, 13.0, 14.0)
    assert sum(per_step_values.sent_bytes(made, 0)) == 3 * 2000
    assert [each.at_s for each in made.scores] == [14.5]
    # From the end of step 1 to that of step 2, each as it was done last; step 1 follows the loss.
    assert step_times(part.steps, part.pauses, batch_size=10, warm_up=0) == (1.0,)


def test_a_target_is_reached_where_the_mean_of_the_last_steps_is_below_it() -> None:
    assert per_step_values.reached([4.0, 2.0, 0.0, 0.0], 1.0, 2) == 2
    assert per_step_values.reached([4.0, 2.0, 0.0], 0.5, 2) is None
    assert per_step_values.reached([float("nan")] * 3, 1.0, 2) is None


# -- traffic ----------------------------------------------------------------------------------------------------------


def test_the_prototypes_counts_are_reproduced() -> None:
    assert traffic_formulas.PROTOTYPE.size == 39_250 + 2_550 + 510
    assert traffic_formulas.prototype_ring() == traffic_formulas.PROTOTYPE_RING == 1.32e7
    assert traffic_formulas.prototype_server() == traffic_formulas.PROTOTYPE_SERVER == 5.0772e9


def test_break_even_lies_where_both_send_as_much() -> None:
    for net in traffic_formulas.NETS:
        at = traffic_formulas.break_even(net, 4)
        for size, less in ((int(at * 0.9), "ring"), (int(at * 1.1) + 1, "ps")):
            ring, server = (traffic_formulas.epoch_values(net, each, 4, size, 1000) for each in ("ring", "ps"))
            assert ("ring" if ring < server else "ps") == less, net.name
    figures = {each.name: each for each in traffic.section(choices(), Measured([])).figures}
    ratios = [value for series in figures["break-even-total"].series for value in series.y]
    assert min(ratios) < 1 < max(ratios), "both regions are shown"


def test_the_busiest_link_by_hand() -> None:
    net = traffic_formulas.dense("d", "", (4, 8, 8, 8, 8, 2))  # 40 + 3 x 72 + 18 parameters
    assert net.size == 274
    assert traffic_formulas.even_cuts(net, 3) == (8, 8, 8)
    assert traffic_formulas.busiest_values(net, "ring", 3, 10) == 10 * 16
    assert traffic_formulas.busiest_values(net, "ps", 3, 10) == 274 * 2
    assert traffic_formulas.busiest_values(net, "allreduce", 3, 10) == pytest.approx(2 * 274 * 2 / 3)


@pytest.mark.parametrize("net", traffic_formulas.NETS, ids=lambda net: net.name)
def test_a_shape_is_cut_where_its_arithmetic_says(net: traffic_formulas.Net) -> None:
    layers = len(net.outputs)
    for nodes in range(2, min(layers, 9) + 1):
        assert traffic_formulas.can_cut(net, nodes)
        cuts = parse_cuts(traffic_formulas.cuts_text(net, nodes), layers, nodes)
        assert [stop for _, stop in cuts] == traffic_formulas.even_ends(net, nodes)
    assert not traffic_formulas.can_cut(net, layers + 1)


# -- runners ----------------------------------------------------------------------------------------------------------


def test_a_loss_is_timed_from_the_moment_of_removal() -> None:
    stream = run_events(0.25, steps=4)
    lost = events.Regrouped(7.0, 3, 2, "lost", 2, 1.5, (1,), 0.2, 1, "snapshot")
    after = [events.StepDone(8.0 + step, 3 + step, 0, 1.0, 0.1, 10, 1.0) for step in range(2)]
    facts = node_removal.describe(parts_of([*stream, lost, *after]), 5.0, 0, "")
    assert facts["notice_s"] == pytest.approx(0.5), "laid out at 7, noticed 1.5 s before, removed at 5"
    assert facts["again_s"] == pytest.approx(3.0)
    assert (facts["repeated"], facts["source"], facts["removed"]) == (1, "snapshot", True)
    assert facts["pause_s"] == pytest.approx(4.0)


def test_who_goes_on_without_a_new_start_trains_again_after_the_longest_pause() -> None:
    ends = [1.0, 2.0, 2.5, 5.5, 6.5]
    stream = [
        *run_events(0.25, steps=0),
        *(events.StepDone(at, step, 0, 1.0, 0.1, 10, 1.0) for step, at in enumerate(ends)),
    ]
    facts = node_removal.describe(parts_of(stream), 2.4, 0, "")
    assert (facts["notice_s"], facts["pause_s"], facts["repeated"]) == (None, 3.0, 0)
    assert facts["again_s"] == pytest.approx(3.1)


def test_a_run_that_ends_with_the_loss_is_a_result_with_its_reason() -> None:
    facts = node_removal.describe(parts_of(run_events(0.25, steps=2)), 1.5, 4, "warning\nringtmp: lost node 1\n")
    assert (facts["code"], facts["error"]) == (4, "ringtmp: lost node 1")
    assert facts["again_s"] == pytest.approx(0.5)
    assert not resilience.survived([facts])


@pytest.mark.parametrize(("most", "first"), [(37, 4), (37, 90), (1, 4)])
def test_the_search_ends_between_a_size_that_worked_and_one_that_did_not(most: int, first: int) -> None:
    def attempt(size: int) -> largest_model.Try:
        return largest_model.Try(size, 1, size, "fits" if size <= most else "refused", "")

    tried = largest_model.climb(first, 1.5, 12, attempt)
    fits = [each.depth for each in tried if each.outcome == "fits"]
    fails = [each.depth for each in tried if each.outcome != "fits"]
    assert len(tried) <= 12
    assert max(fits) <= most < min(fails)
    assert min(fails) - max(fits) <= max(1, most // 8)


def test_a_search_that_met_no_limit_decides_nothing() -> None:
    fits = [largest_model.Try(4, 8, 4000, "fits", "", (1, 1))]
    refused = [*fits, largest_model.Try(8, 8, 8000, "refused", "too large")]
    larger = [
        largest_model.Try(40, 8, 40000, "fits", "", (1, 1)),
        largest_model.Try(44, 8, 44000, "refused", "too large"),
    ]
    for ring, holds in ((fits, "open"), (refused, "open"), (larger, "yes")):
        known = {"ring": ring, "ps:bsp": refused}
        best = {label: capacity.largest(each) for label, each in known.items()}
        assert capacity._verdict(best, known).holds == holds


def test_a_run_that_was_merely_slow_is_no_limit_of_memory() -> None:
    fits = largest_model.Try(4, 8, 4000, "fits", "", (1, 1))
    for each, counts in (
        (largest_model.Try(8, 8, 8000, "timed out", "did not finish within 240 s"), False),
        (largest_model.Try(8, 8, 8000, "failed", "ringtmp: the port is in use"), False),
        (
            largest_model.Try(
                8, 8, 8000, "failed", "ringtmp: node 1: its compute process ended with code -9 in step 0"
            ),
            True,
        ),
        (largest_model.Try(8, 8, 8000, "refused", "too few"), True),
    ):
        assert capacity._bounded([fits, each]) == counts


def test_equations_are_judged_where_they_differ() -> None:
    def point(mbps: float, measured_s: float, transfer_s: float) -> step_time_equations.Point:
        return step_time_equations.Point(mbps, Interval(measured_s, measured_s, measured_s), 1.0, transfer_s)

    far, near = point(1.0, 11.5, 10.0), point(10.0, 1.2, 1.0)
    assert step_time_equations._verdict(parse("ring"), [far]).holds == "open", (
        "c + T and max(c, T) are nearly the same there"
    )
    assert step_time_equations._verdict(parse("ring"), [far, near]).holds == "yes"
    assert step_time_equations._verdict(parse("ring"), [far, point(10.0, 2.5, 1.0)]).holds == "no"


def test_a_run_that_was_over_before_anybody_was_removed_says_nothing() -> None:
    early, hung = {"code": 0, "removed": False}, {"code": -9, "removed": True, "error": "did not finish within 900 s"}
    good = {"code": 0, "removed": True}
    assert resilience.disturbed([early, good]) == [good]
    assert resilience.survived(resilience.disturbed([early, good]))
    assert not resilience.survived(resilience.disturbed([good, hung]))
    broken = {"code": 1, "removed": False, "error": "the port is in use"}
    assert resilience.disturbed([broken]) == []
    assert resilience._too_soon([broken, good]) == "1 of 2 runs never came to the removal: the port is in use"


def test_parameters_of_a_size_are_those_of_the_model() -> None:
    search = largest_model.Search((), 64, 10, 8, 3, 3, 1.5, 4, False)
    assert largest_model.parameters(search, 3, 8) == (64 * 8 + 8) + 2 * (8 * 8 + 8) + (8 * 10 + 10)


# -- the command ------------------------------------------------------------------------------------------------------


def bench(*words: str) -> None:
    verb.command.main(list(words), standalone_mode=False)


def test_wrong_usage_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match="unknown experiment 'idel': did you mean 'idle'"):
        bench("idel", *out)
    with pytest.raises(UsageError, match="unknown strategy"):
        bench("idle", "--strategies", "rnig", *out)
    file = tmp_path / "devices.toml"
    for text, said in (
        ('[[device]]\nname = "a"\ncpu = 0.5\nmemory = 1', "unknown key 'memory': did you mean 'memory_mb'"),
        ('[[device]]\nname = "a"\ncpu = -1\nmemory_mb = 1000\nlink_mbps = 10', "it must be from"),
        ('[[device]]\nname = "a"\ncpu = 1\nmemory_mb = 1000\nlink_mbps = 10', "only one device"),
        ("[[device", "not TOML"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=said):
            bench("idle", "--devices", str(file), *out)
    with pytest.raises(UsageError, match="cannot be read"):
        bench("idle", "--devices", str(tmp_path / "none"), *out)
    with pytest.raises(UsageError, match="use --listen and --nodes together"):
        bench("idle", "--listen", "127.0.0.1", *out)
    with pytest.raises(UsageError, match="leave out --devices"):
        bench("idle", "--listen", "127.0.0.1", "--nodes", "3", "--no-isolation", *out)
    monkeypatch.setattr("ringtmp.cli.bench.can_emulate", lambda: False)
    with pytest.raises(UsageError, match="need root on Linux.*--no-isolation"):
        bench("idle", *out)
    assert not (tmp_path / "out").exists()


def test_names_go_together_and_help_lists_them_all() -> None:
    assert named(("traffic", "idle")) == (("idle", "traffic"), False)
    assert named(("quick",)) == (COMPARISONS, True)
    assert named(("quick", "idle")) == (("idle",), True)
    assert named(("all",)) == (COMPARISONS, False)
    assert named(("speed", "all")) == ((*COMPARISONS, "speed"), False)
    assert named(("speed", "quick")) == (("speed",), True)
    said = CliRunner().invoke(verb.command, ["--help"]).output
    assert all(name in said for name in [*CATALOG, "quick", "all"])
    assert {way.strategy for way in default_ways(True)} == {"ring", "ps", "allreduce"}


# -- all families -------------------------------------------------------------------------------------------------------


def test_what_takes_the_whole_data_has_its_own_steps_no_rate_and_no_other_batches() -> None:
    asked = choices(quick=False, strategies="lbfgs,ps:bsp", names=("idle", "progress", "scaling"))
    (found,) = (each for each in common_runs.task_cells(asked) if each.way.full_batch)
    assert (found.work.batch_size, found.work.steps) == (DIGITS_SAMPLES, common_runs.FULL_BATCH_STEPS[False])
    assert load("digits", 0, {})[0].size == DIGITS_SAMPLES
    assert learning_rate_sweep.of_way(asked, found.way) == []
    labels = [each.way.label for each in idle.cells(asked) if each.label and "nodes" not in each.label]
    assert "lbfgs" not in labels
    assert "ps:bsp" in labels
    told = {each.what: each.why for each in idle.section(asked, Measured([])).skipped}
    assert "whole data" in told["lbfgs: other batch sizes, larger models"]
    assert "lbfgs: scaling" in {each.what for each in scaling.section(asked, Measured([])).skipped}


@pytest.mark.parametrize(
    ("text", "alike"),
    [("ring", True), ("tensor", True), ("hybcomm", True), ("ps:asp:0", True), ("ps:asp:0.01", False), ("averaging:8", False),
     ("mpca", False), ("gossip-learning", False), ("easgd", False), ("dpsgd", False), ("lbfgs", False), ("ps:value:0.1", False),
     ("allreduce:ring:wire=1bit", False)],
)  # fmt: skip
def test_only_what_trains_like_one_process_is_tuned_as_one(text: str, alike: bool) -> None:
    way = parse(text)
    assert way.like_one_process is alike
    assert way.full_batch or {each.nodes for each in learning_rate_sweep.of_way(choices(), way)} == {1 if alike else 3}


def test_a_step_stands_beside_the_lower_bound_of_its_exchange() -> None:
    asked = choices(strategies="ps:bsp,ring,allreduce:tree", names=("exchange",))
    made = page(asked, invented(asked)).sections[0]
    server, tree = exchange.rows(asked, Measured(invented(asked)))
    # 10 parameters over 100 Mbit/s: 3.2 microseconds. Two workers; 1000 bytes passed a link of which a model is 40.
    assert (server.least_models, server.models) == (2.0, 25.0)
    assert server.floor_s == pytest.approx(2 * 3.2e-6)
    assert server.in_turn_s == pytest.approx(4 * 3.2e-6, rel=0.01)
    assert (server.step_s, server.busy_s) == (1.0, 0.5)
    assert tree.pattern == "binomial tree"
    (figure,) = made.figures
    assert [each.x for each in figure.series] == [("ps:bsp", "allreduce:tree")] * 3
    assert "ring" in {each.what for each in made.skipped}
    joined = exchange.rows(msgspec.structs.replace(asked, listen="here", joined=3), Measured(invented(asked)))
    assert [each.floor_s for each in joined] == []


def test_a_run_is_told_whole_and_up_to_its_target() -> None:
    asked = choices(strategies="ps:bsp,lbfgs", names=("progress",))
    found = {each.label: each for each in learning_progress.outcomes(asked, Measured(invented(asked)))}
    assert set(found) == {"one device", "ps:bsp", "lbfgs"}
    server = found["ps:bsp"]
    assert (server.accuracy, server.whole.steps, server.whole.seconds, server.whole.bytes) == (
        0.9,
        6.0,
        6.0,
        6 * 2000.0,
    )
    assert (server.step_s, server.step_bytes, found["lbfgs"].lr) == (1.0, 2000.0, None)
    assert server.to_target is None or server.to_target.steps <= 6
