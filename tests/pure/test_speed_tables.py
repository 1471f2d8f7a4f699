"""`bench speed` on paper: the commands of its cases, its bounds by hand, and the tables and figures of what was measured."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from invented import choices, page
from invented import measurement as measured_job
from ringtmp.bench.analysis.step_time_bounds import Sizes, ceiling_s, ideal_s, limit_s
from ringtmp.bench.analysis.traffic_formulas import busiest_sent
from ringtmp.bench.bench_request import Choices
from ringtmp.bench.experiments import speed
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.measurement_files import Measured, Measurement, Result
from ringtmp.bench.training_runs.device_setups import SETTINGS
from ringtmp.bench.training_runs.speed_cases import CASES, job, stage_ranks
from ringtmp.bench.training_runs.workloads import WORKLOADS
from ringtmp.errors import UsageError
from ringtmp.lab import devices_file
from ringtmp.lab.devices_file import toml
from ringtmp.report.page_text import markdown

BY_NAME = {case.name: case for case in CASES}


def asked(**changes: Any) -> Choices:
    return choices(quick=False, names=("speed",), **({"workloads": "gpt", "settings": "two"} | changes))


# -- planning ---------------------------------------------------------------------------------------------------------


def command(case: str, setting: str, workload: str = "gpt") -> str:
    return job(BY_NAME[case], WORKLOADS[workload], SETTINGS[setting], 2).text


def test_every_case_becomes_the_command_one_would_type() -> None:
    work = "--batch-size 32 --microbatches"
    assert f"{work} 8 " in command("ring", "two")
    assert command("ring", "two").startswith("python -P -m ringtmp train --model gpt --set depth=8 --set width=256 ")
    assert command("ring", "lab-100").startswith(
        "python -P -m ringtmp lab --devices devices.toml -- train --model gpt "
    )
    assert "--strategy ps:bsp --with servers=1 " in command("ps:bsp", "lab-100")
    assert f"{work} 3 " in command("ps:bsp", "lab-100"), "one microbatch per worker; the fourth node serves"
    assert "--strategy ps:bsp --with servers=workers " in command("ps:bsp:workers", "lab-100")
    assert f"{work} 4 " in command("ps:bsp:workers", "lab-100")
    assert "--strategy ps:ssp:3 " in command("ps:ssp:3", "two")
    assert "--strategy allreduce:ring " in command("allreduce:ring", "two")
    assert command("ddp", "two").startswith(
        "python -P -m ringtmp lab exec --no-isolation --devices devices.toml -- python "
    )
    assert "lab exec --devices" in command("ddp", "lab-100")
    assert "--batch-size 512 --microbatches 4 " in command("ring", "two", "mlp")


def cases(**changes: Any) -> list[str]:
    return [each.case for each in speed.jobs(asked(**changes))]


def test_one_process_is_always_measured_and_only_once_per_workload() -> None:
    made = speed.jobs(asked(workloads="", settings="", cases="ring,ddp"))
    assert [each.case for each in made].count("one") == len(WORKLOADS)
    assert len(made) == len(WORKLOADS) * (1 + len(SETTINGS) * 3), "and all devices side by side, once per setting"
    assert len({each.file_stem for each in made}) == len(made)


def test_several_microbatch_counts_make_several_cases_of_a_pipeline_alone() -> None:
    found = cases(cases="ring,ddp,pipelining:1f1b", microbatches="4,16")
    assert found == ["one", "side-by-side", "ring:m4", "ring:m16", "ddp", "pipelining:1f1b:m4", "pipelining:1f1b:m16"]


def test_a_strategy_that_is_no_listed_case_is_measured_by_its_name() -> None:
    found = cases(cases="ps:ssp:7,ps:bsp")
    assert set(found) == {"one", "side-by-side", "ps:bsp", "ps:ssp:7"}


def test_microbatches_in_a_strategys_own_name_are_what_its_command_says() -> None:
    made = speed.jobs(asked(cases="ring:schedule=zero-bubble:microbatches=32", microbatches="4,8"))
    (ours,) = [each.text for each in made if each.case.startswith("ring")]
    assert "microbatches=32" in ours
    assert "--microbatches 32" in ours


def test_a_ring_that_chooses_its_microbatches_is_told_so_and_is_one_case_whatever_is_asked_for() -> None:
    made = speed.jobs(asked(cases="ring:*", microbatches="4,16"))
    assert [each.case for each in made] == [
        "one", "side-by-side", "ring:auto", "ring:zero-bubble", "ring:staleness=1", "ring:protected:m4", "ring:protected:m16",
        "ring:groups",
    ]  # fmt: skip
    assert all("--microbatches auto" in each.text for each in (*made[2:5], made[-1]))


def test_the_devices_file_is_one_the_lab_takes() -> None:
    parsed = devices_file.parse(toml(SETTINGS["lab-100"].devices), "devices.toml")
    assert [(each.cpu, each.link_mbps) for each in parsed] == [(0.45, 100.0)] * 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workloads": "gtp"}, "did you mean 'gpt'"),
        ({"cases": "rnig"}, "unknown case 'rnig'"),
        ({"settings": "lab-fast,lab-100", "isolated": False}, "lab-fast and lab-100 need the lab.*--settings two"),
        ({"cores": 1}, "two needs 2 cores, and this machine has 1"),
        ({"microbatches": "4,0"}, "positive numbers"),
    ],
)
def test_wrong_names_and_missing_rights_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        speed.jobs(asked(**changes))


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_stages_lie_where_the_schedules_expect_them() -> None:
    assert stage_ranks("straight", 4) == [0, 1, 2, 3]
    assert stage_ranks("looped", 2) == [0, 1, 0, 1]
    assert stage_ranks("v", 3) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("ranks", "cuts"),
    [
        ([0], 0),
        ([0, 1], 1),  # activations one way, gradients the other
        ([0, 1, 2], 2),  # the middle one sends both
        ([0, 1, 2, 3, 0], 2),  # the ring: everybody sends both
        ([0, 1, 0, 1], 3),
        ([0, 1, 1, 0], 2),  # the bottom of the V stays at home
    ],
)
def test_the_busiest_device_sends_this_many_cuts(ranks: list[int], cuts: int) -> None:
    assert busiest_sent(ranks, [1] * (len(ranks) - 1)) == cuts


def test_ideal_and_limits_by_hand() -> None:
    """784-1024x9-10, batch 512, on 4 x 0.45 core: 0.32 s alone; 2 MiB per cut, 168 ms at 100 Mbit/s."""
    parameters = 784 * 1024 + 8 * 1024 * 1024 + 1024 * 10 + 9 * 1024 + 10
    sizes, slow, fast = Sizes(0.32, parameters, 1024, 512), SETTINGS["lab-100"], SETTINGS["lab-fast"]
    assert ceiling_s(sizes, slow, 0.2) == 0.2  # slower than the link
    assert ceiling_s(sizes, slow, 0.1) == pytest.approx(512 * 1024 * 4 / 12.5e6)
    assert ideal_s(sizes, SETTINGS["two"]) == pytest.approx(0.16)
    assert ideal_s(sizes, slow) == pytest.approx(0.32 / 1.8)  # 178 ms, just above the 168 of the link
    assert limit_s(BY_NAME["ring"], sizes, slow) == pytest.approx(2 * 512 * 1024 * 4 / 12.5e6)
    assert limit_s(BY_NAME["ring"], sizes, fast) == pytest.approx(0.32 / 1.8)
    assert limit_s(BY_NAME["ps:bsp"], sizes, slow) == pytest.approx(3 * parameters * 4 / 12.5e6)
    assert limit_s(BY_NAME["ps:bsp"], sizes, SETTINGS["two"]) == pytest.approx(0.32)  # one of the two only serves
    assert limit_s(BY_NAME["ddp"], sizes, slow) == pytest.approx(1.5 * parameters * 4 / 12.5e6)
    assert limit_s(BY_NAME["allreduce:ring"], sizes, slow) == limit_s(BY_NAME["ps:bsp:workers"], sizes, slow)


def test_stages_are_cut_so_that_the_dearest_is_cheapest() -> None:
    from ringtmp.bench.peers.pipelining import (
        even_ends,  # loads torch's pipelines: seconds, in every process that collects
    )

    assert even_ends([1, 1, 1, 3], 2) == [3, 4]
    assert even_ends([1, 2, 3, 4, 5, 6], 3) == [3, 5, 6]  # 6, 9, 6
    assert even_ends([1, 1, 1, 1], 4) == [1, 2, 3, 4]
    with pytest.raises(SystemExit, match="5 stages need as many layers"):
        even_ends([1, 1, 1, 1], 5)


# -- what measurements say --------------------------------------------------------------------------------------------


SEEN = "ring,ps:bsp,ddp,pipelining:1f1b"


def measurement(made: Job, step_s: float | None, busy: float = 0.02, **facts: Any) -> Measurement:
    failed = {"outcome": "failed", "error": "exit code 2\nringtmp: unknown strategy 'ps'", "result": None}
    found = measured_job(made, 0, Result((step_s or 0.0,) * 4, facts))
    found = msgspec.structs.replace(found, wall_s=10.0, busy_before=busy, stolen_s=0.4)
    return msgspec.structs.replace(found, **failed) if step_s is None else found


def synthetic() -> list[Measurement]:
    """Alone 2 s, side by side 1.1, the ring 1.2, the peers 1.5 and 1.6, a server that fails."""
    took = {"one": 2.0, "side-by-side": 1.1, "ring": 1.2, "pipelining:1f1b": 1.6, "ps:bsp": None, "ddp": 1.5}
    sizes = {"parameters": 7_000_000, "cut_values": 128 * 256}
    return [measurement(each, took[each.case], **sizes) for each in speed.jobs(asked(cases=SEEN))]


def rows(taken: list[Measurement]) -> list[speed.Row]:
    return speed.rows(asked(cases=SEEN), Measured(taken))


def test_rows_compare_with_the_ideal_and_with_the_best_peer() -> None:
    found = rows(synthetic()[::-1])
    assert [row.case for row in found] == ["one", "side-by-side", "ring", "ps:bsp", "ddp", "pipelining:1f1b"], (
        "in any order of measuring"
    )
    ring, server = found[2], found[3]
    assert ring.over_ideal == pytest.approx(1.2)
    assert ring.over_ceiling == pytest.approx(1.2 / 1.1)
    assert ring.best_peer == "ddp"
    assert ring.over_best_peer is not None
    assert ring.over_best_peer.middle == pytest.approx(0.8)
    assert ring.stolen_share == pytest.approx(0.02)  # 0.4 s of 10 s on two cores
    assert (server.step_s, server.failed) == (None, 1)
    assert found[4].over_best_peer is None, "a peer is not compared with itself"


def test_without_one_process_there_are_times_and_no_ratio() -> None:
    found = rows([each for each in synthetic() if each.job.case != "one"])
    assert found[0].step_s is not None
    assert (found[0].over_ideal, found[0].over_ceiling) == (None, None)
    without = rows([each for each in synthetic() if each.job.case != "side-by-side"])
    assert (without[1].over_ideal, without[1].over_ceiling) == (pytest.approx(1.2), None)


def test_the_page_has_command_date_table_and_failures() -> None:
    made = markdown(page(asked(cases=SEEN), synthetic()))
    assert "- command: ringtmp bench\n- date: 2026-01-01\n- machine: a processor, 2 cores" in made
    assert (
        "| ring | 8 | 1200 | 1200–1200 | 1.20 | 1.09 | 1.67 | 1000 | 1.20 |  |  |  | 0.80 (0.80–0.80) | 2.0% |" in made
    )
    assert "- gpt two ps:bsp: failed: ringtmp: unknown strategy 'ps'" in made
    assert "one process 2000 ms; ideal 1000 ms; ceiling 1100 ms; best peer ddp" in made


def test_a_machine_that_was_not_quiet_is_said_to_be_so() -> None:
    def note(busy: float) -> str:
        taken = [msgspec.structs.replace(each, busy_before=busy) for each in synthetic()]
        return speed.section(asked(cases=SEEN), Measured(taken)).tables[0].note

    assert "QUIET" not in note(0.02)
    assert "NOT A QUIET MACHINE: others used up to 45%" in note(0.45)


def test_a_figure_names_every_case_with_its_interval_and_the_ideal() -> None:
    (figure,) = speed.section(asked(cases=SEEN), Measured(synthetic())).figures
    assert figure.name == "speed-gpt-two"
    assert figure.series[0].x == ("side-by-side", "ring", "ddp", "pipelining:1f1b")
    assert figure.series[0].y == figure.series[0].low == pytest.approx((1100.0, 1200.0, 1500.0, 1600.0))
    assert (figure.line, figure.line_label) == (pytest.approx(1000.0), "ideal: max(c, T)")
