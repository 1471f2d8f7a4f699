"""Plans held against emulated devices with real memory caps, and the bench that holds forecasts against measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_lab import begin, device, devices_file, finish, needs_isolation

from ringtmp.bench.experiments import plan_accuracy
from ringtmp.bench.measuring.jobs import Job
from ringtmp.bench.measuring.machine import Environment
from ringtmp.bench.measuring.measurement_files import SCHEMA, Measurement, Result

CAP_MB = 420


def trial(folder: Path, width: int, protect: str = "off", steps: int = 2) -> tuple[int, dict[str, Any], str]:
    """A few steps of an mlp of this width on three devices with a cap: exit code, summary, what was said."""
    folder.mkdir()
    file = devices_file(folder, *(device(name, 0.45, CAP_MB, 1000) for name in ("desk", "shelf", "attic")))
    process = begin(
        "lab", "--devices", file, "--", "train", "--model", "mlp", "--set", "depth=6", "--set", f"width={width}",
        "--data", "random:64x10", "--batch-size", "16", "--steps", str(steps), "--protect", protect, "--all-devices", "--json",
        "--run-dir", folder / "run", cwd=folder,
    )  # fmt: skip
    out, err = process.communicate(timeout=100)
    return process.returncode, json.loads(out) if process.returncode == 0 else {}, err


@needs_isolation
@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_the_widest_model_a_plan_accepts_runs_under_its_cap_and_a_little_wider_is_refused(tmp_path: Path) -> None:
    """Bisection over real runs: whatever is accepted ends well, whatever is refused names device and bytes."""
    fits, too_wide, summary, err = 256, 1536, {}, ""
    code, summary, err = trial(tmp_path / "first", fits)
    assert code == 0, err
    while too_wide / fits > 1.05:
        width = (fits + too_wide) // 32 * 16
        code, found, said = trial(tmp_path / str(width), width)
        assert code in (0, 3), f"width {width} was accepted and then failed with {code}:\n{said}"
        if code == 0:
            fits, summary = width, found
        else:
            too_wide = width
            assert re.search(r"(master|shelf|attic) needs .* and has .* free, \d+ bytes .* too few", said), said
    peaks = {node["node"]: node["peak_rss_bytes"] for node in summary["per_node"]}
    said = summary["forecast"]["per_node"]
    assert all(node["memory_bytes"] <= node["free_bytes"] for node in said)
    # Little false alarm: what was refused, a twentieth wider, would have left less than 15 % free on some device.
    process = 230 * 2**20
    fullest = max(
        (process + (peaks[node["node"]] - process) * (too_wide / fits) ** 2) / node["free_bytes"] for node in said
    )
    assert fullest * 1.15 >= 1, f"width {too_wide} was refused, and would have needed {fullest:.0%} of what there is"
    # Snapshots on disk take a twentieth of the parameters at most: nearly that wide a model trains with them, and keeps one.
    narrower = int(fits * 0.95**0.5) // 8 * 8
    code, _, said = trial(tmp_path / "disk", narrower, "disk", steps=40)
    assert code == 0, said
    log = (tmp_path / "disk" / "run" / "events.jsonl").read_text()
    assert '"type":"snapshot"' in log, "no snapshot became whole"


# -- the bench, on paper --------------------------------------------------------------------------------------------------


def measured(job: Job, step_s: list[float], predicted_s: float, memory: list[tuple[float, float]]) -> Measurement:
    facts = {
        "forecast": {
            "step_s": predicted_s, "idle_fraction": 0.1, "left_out": ["n3"],
            "per_node": [
                {"node": node, "device": f"n{node}", "memory_bytes": said, "free_bytes": None, "busy_s": 0.1}
                for node, (said, _) in enumerate(memory)
            ],
        },
        "per_node": [{"node": node, "peak_rss_bytes": came} for node, (_, came) in enumerate(memory)],
    }  # fmt: skip
    here = Environment("1", "x", "2", "avx2", "3.11", "linux", "cpu", 2)
    return Measurement(
        SCHEMA, job, 0, "digest", here, "now", 1.0, 0.0, 0.0, None, "measured", None, Result(tuple(step_s), facts)
    )


def test_ten_rings_differ_in_devices_speeds_links_caps_and_models() -> None:
    beds = plan_accuracy.BEDS
    assert len({bed.name for bed in beds}) == 10
    assert {len(bed.devices) for bed in beds} >= {2, 3, 4, 5, 6}
    ratios = [max(d.cpu for d in bed.devices) / min(d.cpu for d in bed.devices) for bed in beds]
    assert (min(ratios), max(ratios)) == (1.0, pytest.approx(10.0))
    rates = {device.link_mbps for bed in beds for device in bed.devices}
    assert (min(rates), max(rates)) == (10, 1000)
    assert {bed.model for bed in beds} == {"gpt", "mlp", "convnet"}
    assert all(sum(device.cpu for device in bed.devices) <= 1.9 for bed in beds), "they run side by side on two cores"


def test_errors_are_told_per_ring_and_over_all() -> None:
    beds = plan_accuracy.BEDS[:2]
    jobs = plan_accuracy.jobs(beds, [], steps=3, warm_up=1)
    found = plan_accuracy.rows(
        beds,
        [
            measured(jobs[0], [1.0, 1.0, 4.0], 1.1, [(95.0, 100.0), (120.0, 100.0)]),
            measured(jobs[0], [1.2, 1.2, 1.2], 1.2, [(100.0, 100.0)]),
            measured(jobs[1], [2.0], 1.8, [(100.0, 100.0)]),
        ],
    )
    assert found[0].step_error == pytest.approx(0.05)
    assert found[0].spread == pytest.approx(0.2 / 1.1)
    assert found[0].memory_error == pytest.approx(0.2)
    assert found[1].step_error == pytest.approx(-0.1)
    total = plan_accuracy.verdict(found)
    assert total is not None
    assert (total.step_median, total.memory_worst) == (pytest.approx(0.075), pytest.approx(0.2))
    page = plan_accuracy.markdown(found, [], "ringtmp bench plan", "today")
    assert "| +5.0% | 18.2% | +20.0% |" in page


def test_a_contrast_is_the_plan_against_equal_parts_and_against_one() -> None:
    (bed, wanted), _ = plan_accuracy.CONTRASTS
    jobs = plan_accuracy.jobs([], [bed], steps=3, warm_up=1)
    assert [job.case for job in jobs] == list(plan_accuracy.WAYS)
    assert jobs[2].files["devices.toml"].count("[[device]]") == 1
    taken = [measured(job, [step], 1.0, []) for job, step in zip(jobs, (1.0, 6.0, 1.5), strict=True)]
    (found,) = plan_accuracy.contrasts([(bed, wanted)], taken)
    assert (found.over_equal, found.over_alone, found.left_out) == (6.0, 1.5, ("n3",))
    assert "6.0 (wanted 5) | 1.50 (wanted 1)" in plan_accuracy.markdown([], [found], "ringtmp bench plan", "today")


def test_a_ring_that_failed_is_told_and_leaves_the_others() -> None:
    bed = plan_accuracy.BEDS[0]
    (row,) = plan_accuracy.rows([bed], [])
    assert row.error == "not measured"
    assert plan_accuracy.verdict([row]) is None
    assert "failed" in plan_accuracy.markdown([row], [], "ringtmp bench plan", "today")


@needs_isolation
@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(200)
def test_a_model_that_fits_nowhere_is_refused_with_exit_3_before_it_starts(tmp_path: Path) -> None:
    file = devices_file(tmp_path, device("desk", 0.6, 400, 1000), device("shelf", 0.6, 400, 1000))
    process = begin(
        "lab", "--devices", file, "--", "train", "--model", "mlp", "--set", "depth=4", "--set", "width=4096",
        "--data", "random:64x10", "--steps", "2", "--run-dir", tmp_path / "run", cwd=tmp_path,
    )  # fmt: skip
    _, err = finish(process, 3)
    assert re.search(r"layer \S+ .* alone needs .* bytes\)|needs .* bytes .* too few", err), err
    assert not (tmp_path / "run").exists(), "nothing was started, so nothing is left"
