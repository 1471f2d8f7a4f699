"""ringtmp plan: what it says, draws and refuses; and advice, comparison and picture on their own."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from commands import here, ringtmp
from costs import device, devices, layers
from ringtmp.cli import ringtmp as verbs
from ringtmp.errors import RingError
from ringtmp.lab import devices_file as devices_file
from ringtmp.launch import planned_devices
from ringtmp.model import profile
from ringtmp.plan import advice
from ringtmp.plan.devices import Device, Link, Measured
from ringtmp.plan.memory_forecast import PROCESS_BYTES
from ringtmp.plan.planner import PlanOptions, plan
from ringtmp.report.step_drawing import svg, tick_count, tick_s
from ringtmp.strategies import registry
from ringtmp.strategies.base import Task
from ringtmp.strategies.compare import compare
from ringtmp.system.container_limits import Limits

FOUR = """
[[device]]
name = "desk"
cpu = 1.0
memory_mb = 1024
link_mbps = 1000
idle_w = 2
busy_w = 6
[[device]]
name = "pi-1"
cpu = 0.5
memory_mb = 512
link_mbps = 1000
idle_w = 2
busy_w = 5
[[device]]
name = "snail"
cpu = 0.01
memory_mb = 512
link_mbps = 1000
idle_w = 1
busy_w = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(planned_devices, "peak_rss_bytes", lambda: PROCESS_BYTES)  # not what other tests have left here
    (tmp_path / "devices.toml").write_text(FOUR)
    return tmp_path


MODEL = ("--model", "mlp", "--set", "depth=8", "--set", "width=1024", "--batch-size", "256")


def run(*args: str) -> None:
    """In this process: torch is loaded already."""
    verbs.main([*args], standalone_mode=False)


def test_a_plan_for_a_devices_file_as_json_as_a_picture_and_for_people(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = here(
        "plan", *MODEL, "--devices", "devices.toml", "--compare", "ring,ps:bsp,allreduce:ring", "--svg", "step.svg",
        "--json", cwd=folder,
    )  # fmt: skip
    page = json.loads(done.stdout)
    assert page["nodes"] == len(page["per_node"]) == 2
    assert [each["device"] for each in page["left_out"]] == ["snail"]
    assert page["step_s"] > 0
    assert page["epoch_s"] == pytest.approx(page["step_s"] * 6)
    assert page["ideal_s"]["max(c, T)"] <= page["step_s"]
    assert sum(page["parts"].values()) == pytest.approx(page["step_s"], rel=0.05)
    assert [way["strategy"] for way in page["ways"]] == ["ring", "ps:bsp", "allreduce:ring"]
    assert page["ways"][0]["energy_j_epoch"] == pytest.approx(6 * sum(node["energy_j"] for node in page["per_node"]))
    for node in page["per_node"]:
        assert sum(each for name, each in node["memory"].items() if name not in ("total", "free")) == pytest.approx(
            node["memory"]["total"]
        )
        assert node["memory"]["total"] < node["memory"]["free"]
    assert ElementTree.parse(folder / "step.svg").getroot().get("width") == "1200"
    assert list((folder / "cache" / "ringtmp" / "profile").iterdir()), "what was measured is kept"
    assert sorted(path.name for path in folder.iterdir()) == ["cache", "devices.toml", "step.svg"], (
        "nothing was started"
    )
    # For people: who holds what, what limits it, what would help. What was measured above is not measured again.
    monkeypatch.chdir(folder)
    run("plan", *MODEL, "--devices", "devices.toml", "--quiet")
    text = capsys.readouterr().out
    for word in (
        "mlp on digits",
        "a step",
        "1,000 steps ",
        "desk",
        "pi-1",
        "left out snail",
        "with --all-devices  ",
        "| snail ",
        "limited by",
        "would help",
        "--cuts 0",
        "Wh",
    ):
        assert word in text
    run("plan", *MODEL, "--nodes", "2", "--quiet")
    text = capsys.readouterr().out
    assert "master" in text
    assert "node 1" in text


def sizes_measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Microbatch sizes of all that is measured from now on, of layers and of the loss."""
    found: list[int] = []
    measure, measure_loss = profile._measure, profile._measure_loss

    def layer(*given: Any, **more: Any) -> profile.Profile:
        found.extend(given[3])
        return measure(*given, **more)

    def loss(*given: Any) -> Measured:
        found.append(given[3])
        return measure_loss(*given)

    monkeypatch.setattr(profile, "_measure", layer)
    monkeypatch.setattr(profile, "_measure_loss", loss)
    return found


@pytest.mark.parametrize(
    ("first", "microbatches", "sizes", "then"),
    [
        ("plan", "7", {4, 8, 16}, set()),
        ("train", "7", {8}, {4, 16}),
        pytest.param("plan", "auto", {1, 3, 6, 12, 25}, set(), marks=pytest.mark.long),
    ],
)
def test_a_plan_and_a_run_are_the_same_plan_and_whoever_comes_second_measures_nothing_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    first: str, microbatches: str, sizes: set[int], then: set[int],
) -> None:  # fmt: skip
    """A plan measures half and twice the run's microbatches too: to say what other numbers of them would cost."""
    monkeypatch.chdir(folder)
    flags = (
        "--set",
        "depth=6",
        "--set",
        "width=64",
        "--batch-size",
        "50",
        "--microbatches",
        microbatches,
        "--nodes",
        "2",
    )
    more = {"plan": (), "train": ("--steps", "1", "--run-dir", "run")}
    said, measured = {}, sizes_measured(monkeypatch)
    for verb, expected in zip(sorted(more, key=lambda each: each != first), (sizes, then), strict=True):
        run(verb, *flags, *more[verb], "--json", "--quiet")
        said[verb] = json.loads(capsys.readouterr().out)
        assert set(measured) == expected
        measured.clear()
    assert said["plan"]["step_s"] == said["train"]["forecast"]["step_s"]
    layers = [re.findall(r"#([0-9-]+)", " ".join(each["segments"])) for each in said["train"]["per_node"]]
    assert [each["layers"].split(", ") for each in said["plan"]["per_node"]] == layers


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--devices", "none.toml"], 2, "the devices file none.toml cannot be read"),
        (["--devices", "devices.toml", "--nodes", "5"], 2, "--nodes 5 does not match the 3 devices in devices.toml"),
        (["--strategy", "ps"], 2, "not --strategy ps: put that beside it"),
        (["--strategy", "allreduce:tree"], 2, "put that beside it with --compare allreduce:tree"),
        (["--compare", "gossip"], 2, "unknown strategy 'gossip'"),
        (["--compare", "ps:bsp:many"], 2, "'many' is neither a number of servers"),
        (["--nodes", "9"], 2, "9 nodes need at least 10 layers"),
        (["--nodes", "2", "--cuts", "0-1,3,4-5"], 2, "must start at layer 2"),
        (["--devices", "tiny.toml", "--set", "width=512"], 3, "bytes (56.0 KiB) too few: add a device"),
        (["--devices", "tiny.toml", "--set", "width=2048"], 3, "layer 1 (dense1) alone needs"),
        (["--svg", "none/step.svg"], 2, "cannot be written"),
    ],
)
def test_refusals_say_why_in_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    says: str,
) -> None:
    (folder / "tiny.toml").write_text(FOUR.replace("512", "266").replace("1024", "240"))
    monkeypatch.chdir(folder)
    with pytest.raises(RingError) as refusal:
        run("plan", "--quiet", *args)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.exit_code == code
    assert capsys.readouterr().out == ""


def test_the_verb_loads_without_torch() -> None:
    check = "import sys, ringtmp.cli.plan; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout == "False\n"


# -- devices of a file ------------------------------------------------------------------------------------------------------


def test_a_share_of_a_core_is_a_bucket_as_the_lab_makes_it() -> None:
    desk, pi, snail = planned_devices.from_file(devices_file.parse(FOUR, "four"), 1)
    assert desk.quota is None
    assert pi.quota is not None
    assert (pi.quota.run_s, pi.quota.period_s) == pytest.approx((0.005, 0.01))
    assert snail.quota is not None
    assert snail.quota.share == pytest.approx(0.01)
    assert pi.pace == pytest.approx(0.5)
    assert desk.memory_bytes - 512 * 2**20 == pi.memory_bytes
    assert desk.extra_bytes == 0, "the master has no agent"
    assert pi.extra_bytes == planned_devices.AGENT_BYTES
    assert 110e6 < pi.link.up_bytes_per_s < 125e6, "a gigabit less headers"
    two = planned_devices.from_file(devices_file.parse(FOUR, "four"), 2)
    assert two[0].pace == pytest.approx(0.5), "two threads on one core: profiled with two, each runs half the time"


def test_local_processes_share_cores_and_memory() -> None:
    there = planned_devices.local_processes(4, 1, 2, 4 * 2**30)
    assert [each.speed for each in there] == [0.5] * 4
    assert there[0].memory_bytes == 2**30
    assert all(each.takes_turns for each in there)
    assert not any(each.takes_turns for each in planned_devices.local_processes(2, 1, 2, 2**30))
    assert planned_devices.local_processes(1, 1, 2, 2**30)[0].speed == 1.0
    capped = planned_devices.local_processes(4, 1, 2, 2**30, Limits(cores=1.5, period_s=0.1))[0]
    assert capped.quota is not None
    assert capped.quota.share == pytest.approx(0.75)
    assert 4 * capped.pace == pytest.approx(1.5), "all of what the group may use"
    assert planned_devices.local_processes(1, 1, 2, 2**30, Limits(cores=1.5, period_s=0.1))[0].quota is None


# -- advice -------------------------------------------------------------------------------------------------------------------


def made_for(there: list[Device], count: int = 8, **each: float) -> advice.Plan:
    return plan(layers(count, **each), there, PlanOptions(16, 8, keep_all=True))


def test_the_limit_is_the_busiest_processor_line_or_the_way_through() -> None:
    assert advice.limit(made_for(devices(2))).what == "compute"
    slow = advice.limit(made_for(devices(3, rate=0.05), output=1.0))
    assert slow.what == "link"
    assert "the link of" in slow.text
    many = plan(layers(11), devices(10), PlanOptions(16, 2, keep_all=True))
    assert advice.limit(many).what == "fill and drain"


def test_parts_and_bounds_of_a_step_add_up() -> None:
    made = made_for(devices(3, rate=5.0), output=1.0, update_s=0.5)
    parts, limits = advice.parts(made), advice.bounds(made)
    total = parts.forward_s + parts.backward_s + parts.update_s + sum(parts.waiting_s.values())
    assert total == pytest.approx(made.step_s)
    assert limits.ideal_s == max(limits.compute_s, limits.link_s)
    assert limits.compute_s == pytest.approx((8 * 2 * 16 + 8 * 0.5) / 3)
    assert limits.ideal_s <= limits.slowest_s <= made.step_s


def test_what_would_help_is_planned_anew_and_told_with_its_gain() -> None:
    there = devices(3, rate=0.5)
    made = made_for(there, output=1.0)
    gains = advice.gains(made, tuple(there))
    changes = {each.change: each for each in gains}
    assert "a bfloat16 wire" in changes
    assert "twice the link rate everywhere" in changes
    assert [each.gain for each in gains] == sorted((each.gain for each in gains), reverse=True)
    wired = plan(layers(8, output=1.0), there, PlanOptions(16, 8, keep_all=True, wire_ratio=0.5))
    assert changes["a bfloat16 wire"].step_s == pytest.approx(wired.step_s)
    assert changes["a bfloat16 wire"].gain == pytest.approx(made.step_s / wired.step_s - 1)
    assert all("bfloat16" not in each.change for each in advice.gains(made_for(there), tuple(there))), "nothing crosses"


def test_a_strong_device_beside_a_weak_master_is_named() -> None:
    there = [device("weak", 0.1), device("strong", 10.0, rate=0.5)]
    made = plan(layers(8, output=4.0), there, PlanOptions(16, 8, keep_all=True))
    best = advice.gains(made, tuple(there))[0]
    assert best.change == "starting the run on strong alone, on 1 device"
    assert best.step_s < made.step_s / 2
    assert not any("starting" in each.change for each in advice.gains(made_for(devices(3)), tuple(devices(3))))


# -- other ways ---------------------------------------------------------------------------------------------------------------


def test_every_way_is_compared_with_as_many_devices() -> None:
    there, model = devices(4, rate=100.0), layers(6, output=1.0, weights=1000)
    for name in (
        "ring",
        "ps:bsp",
        "ps:async",
        "ps:ssp:2",
        "ps:bsp:workers",
        "ps:bsp:2",
        "allreduce:ring",
        "allreduce:tree",
    ):
        way = compare(registry.parse(name), Task(model, there, PlanOptions(16, 8, keep_all=True)))
        assert way.simulated is not None
        assert len(way.simulated.nodes) == 4
        assert way.problem == ""
    assert "leaves no worker" in compare(registry.parse("ps:bsp:4"), Task(model, there, PlanOptions(16, 8))).problem


def test_a_model_no_single_device_can_hold_fits_the_ring_and_no_other_way() -> None:
    there = [replace(each, memory_bytes=9000.0) for each in devices(4)]
    model, options = layers(8, weights=1000), PlanOptions(8, 8, process_bytes=0.0)
    assert compare(registry.parse("ring"), Task(model, there, options)).problem == ""
    way = compare(registry.parse("allreduce:ring"), Task(model, there, options))
    assert "device0 needs" in way.problem
    assert way.simulated is not None


# -- the picture --------------------------------------------------------------------------------------------------------------


def test_the_picture_has_a_bar_for_every_piece_of_work() -> None:
    made = made_for([Device("a<b", link=Link()), device("c")])
    root = ElementTree.fromstring(svg(made.simulated.nodes, made.simulated.spans, made.step_s, "title & more"))
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(made.simulated.spans)
    assert any(title.startswith("a<b: forward 0") for title in titles)
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "title & more" in texts


@pytest.mark.parametrize("length", [3e-5, 0.0123, 0.4, 1.0, 7.7, 360.0, 99999.0])
def test_ticks_are_round_and_few(length: float) -> None:
    assert 4 <= tick_count(length) <= 10
    assert f"{tick_s(length):.0e}"[0] in "125"


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "says"),
    [
        (20000, "layer 1 of the model has a tensor of"),
        (7000, "layer dense1 has .* of parameters, and to train it alone"),
    ],
)
def test_a_layer_too_large_to_build_or_to_try_is_refused_before_its_memory_is_taken(
    width: int, says: str, tmp_path: Path
) -> None:
    limit = 1100 * 2**20

    def capped() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    flags = ("--model", "mlp", "--set", f"width={width}", "--steps", "1", "--nodes", "1", "--run-dir", "run")
    done = ringtmp("train", *flags, cwd=tmp_path, code=3, preexec_fn=capped)
    assert re.search(says, done.stderr), done.stderr
    assert "bytes)" in done.stderr
    assert not (tmp_path / "run").exists()
