"""Joules: one formula, whose they are, meters on recorded trees, and how far a comparison depends on the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtmp.errors import UsageError
from ringtmp.lab.devices_file import parse
from ringtmp.launch.planned_devices import from_file
from ringtmp.metrics import power_meters, power_of_this_device
from ringtmp.metrics.energy import PRESETS, Load, Power, Spent, Watts, attribute, sensitivity
from ringtmp.metrics.step_recorder import Recorder
from ringtmp.plan.simulated_step import joules

# As a Raspberry Pi 5 prints it.
PMIC = """\
     3V7_WL_SW_A current(0)=0.10000000A
       3V3_SYS_A current(1)=0.05000000A
      VDD_CORE_A current(7)=2.00000000A
          HDMI_A current(22)=0.01000000A
     3V7_WL_SW_V volt(8)=3.70000000V
       3V3_SYS_V volt(9)=3.30000000V
      VDD_CORE_V volt(15)=0.80000000V
         EXT5V_V volt(24)=5.10000000V
          BATT_V volt(25)=0.00000000V
"""


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def zone(root: Path, name: str, kind: str, energy_uj: int, reach: int = 262143328850) -> Path:
    folder = root / "sys/class/powercap" / name
    write(folder, name=kind, energy_uj=energy_uj, max_energy_range_uj=reach)
    return folder / "energy_uj"


# -- the model ----------------------------------------------------------------------------------------------------------


def test_the_formula_by_hand() -> None:
    load = Load(Watts(2.0, 10.0, 5.0), seconds=100.0, busy_s=40.0, bytes=1e9, share=0.25)
    assert (load.idle_j, load.work_j, load.bytes_j) == (200.0, 80.0, 5.0)
    assert load.joules == 285.0


def test_a_plan_and_a_run_use_the_same_formula() -> None:
    text = '[[device]]\nname = "a"\npreset = "pi-4b"\n'
    described = parse(text, "devices")
    planned = from_file(described, 1)[0]
    watts = PRESETS["pi-4b"]
    assert described[0].busy_share(1) == 0.25  # one thread of four cores
    assert planned.nj_per_byte == watts.nj_per_byte
    assert joules(planned, 3.0, 7.0, 1e6) == Load(watts, 10.0, 3.0, 1e6, 0.25).joules


def test_devices_in_a_file_may_say_what_a_byte_costs() -> None:
    text = '[[device]]\nname = "a"\ncpu = 0.5\nmemory_mb = 512\nlink_mbps = 100\nidle_w = 1\nbusy_w = 3\nnj_per_byte = 50\n'
    assert parse(text, "devices")[0].nj_per_byte == 50
    with pytest.raises(UsageError, match="nj_per_byte is -1"):
        parse(text.replace("= 50", "= -1"), "devices")


def power(host: str, meter: str = "") -> Power:
    return Power("given", Watts(2.0, 6.0), 1.0, host, meter)


def test_every_joule_says_where_it_comes_from() -> None:
    found = attribute({
        0: Spent(power("a", "rapl"), 10.0, 5.0, 0.0, metered_j=33.0),  # alone with its meter
        1: Spent(power("b", "rapl"), 10.0, 2.0, 0.0, metered_j=50.0),  # two on one machine: its joules by busy time
        2: Spent(power("b", "rapl"), 10.0, 8.0, 0.0, metered_j=49.0),
        3: Spent(power("c"), 10.0, 5.0, 0.0),  # no meter
        4: Spent(None, 10.0, 5.0, 0.0),  # it died before it could tell
    })  # fmt: skip
    assert {node: (each.joules, each.source) for node, each in found.items()} == {
        0: (33.0, "measured"), 1: (10.0, "estimated"), 2: (40.0, "estimated"), 3: (40.0, "modelled"),
    }  # fmt: skip


def test_nodes_that_share_a_machine_share_its_idle_watts() -> None:
    found = attribute({node: Spent(power("one"), 10.0, 5.0, 0.0) for node in range(4)})
    assert sum(each.joules for each in found.values()) == pytest.approx(2.0 * 10 + 4 * 4.0 * 5)


def test_devices_slowed_by_the_lab_are_charged_the_time_they_stand_for() -> None:
    spent = {0: Spent(power("a"), 20.0, 10.0, 0.0)}
    assert attribute(spent, scale=0.5)[0].joules == 2.0 * 10 + 4.0 * 5


# -- how much of a conclusion is the model ------------------------------------------------------------------------------


def test_a_comparison_of_like_with_like_keeps_its_sign_whatever_the_numbers() -> None:
    less, more = Load(Watts(2, 6, 4), 10, 5, 1e8), Load(Watts(2, 6, 4), 12, 6, 2e8)
    found = sensitivity([less], [more])
    assert not found.changes
    assert found.low <= found.ratio <= found.high < 1
    assert len(found.cases) == 27
    assert "keeps its sign" in found.sentence


def test_a_comparison_that_hangs_on_one_number_is_found_out() -> None:
    # One is short and busy, the other long and idle: 2*10 + 4*10 = 60 J against 2*28 + 4*2 = 64 J.
    busy, idle = Load(Watts(2, 6), 10, 10), Load(Watts(2, 6), 28, 2)
    found = sensitivity([busy], [idle])
    assert found.ratio == 60 / 64
    assert found.changes
    # Idle watts at half: 1*10 + 5*10 = 60 against 1*28 + 5*2 = 38.
    assert next(each.ratio for each in found.cases if (each.idle, each.busy, each.byte) == (0.5, 1, 1)) == 60 / 38
    # Busy watts never fall below idle watts: 3*10 against 3*28 at idle 1.5, busy 0.5.
    assert next(each.ratio for each in found.cases if (each.idle, each.busy, each.byte) == (1.5, 0.5, 1)) == 30 / 84
    assert "changes sign" in found.sentence


# -- meters, on recorded trees ------------------------------------------------------------------------------------------


def test_rapl_adds_packages_and_memory_and_survives_a_counter_that_begins_again(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 262143000000)
    zone(tmp_path, "intel-rapl:0:0", "core", 5)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 1000000, reach=65712999613)
    zone(tmp_path, "intel-rapl:1", "psys", 7)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 9)
    meter = power_meters.Rapl(tmp_path)
    assert meter.joules() == 0
    package.write_text("2000000\n")  # past its range of 262143.32885 J
    memory.write_text("4000000\n")
    assert meter.joules() == pytest.approx(0.32885 + 2.0 + 3.0)
    package.write_text("3500000\n")
    assert meter.joules() == pytest.approx(0.32885 + 3.5 + 3.0)


def test_a_meter_that_may_not_be_read_is_none(tmp_path: Path) -> None:
    assert power_meters.find(tmp_path, lambda command: "") is None
    zone(tmp_path, "intel-rapl:0", "package-0", 1).unlink()
    assert power_meters.find(tmp_path, lambda command: "") is None


def test_hwmon_takes_the_rail_that_feeds_a_jetson_and_not_its_parts(tmp_path: Path) -> None:
    chip = tmp_path / "sys/class/hwmon/hwmon3"
    write(chip, name="ina3221", in1_label="VDD_IN", in1_input=5000, curr1_input=1200, in2_label="VDD_CPU_GPU_CV",
          in2_input=4900, curr2_input=500, in3_label="VDD_SOC", in3_input=4900, curr3_input=300)  # fmt: skip
    write(tmp_path / "sys/class/hwmon/hwmon0", name="nvme", temp1_input=40000)
    write(tmp_path / "sys/class/hwmon/hwmon1", name="amdgpu", power1_average=42000000)
    assert power_meters.hwmon_watts(tmp_path) == pytest.approx(6.0)


def test_hwmon_reads_microwatts_where_a_chip_tells_them(tmp_path: Path) -> None:
    chip = tmp_path / "sys/class/hwmon/hwmon0"
    write(chip, name="ina219", power1_input=3200000, in1_input=5000, curr1_input=9999)
    assert power_meters.hwmon_watts(tmp_path) == pytest.approx(3.2)
    write(tmp_path / "sys/class/hwmon/hwmon1", name="power_meter", power1_average=1500000)
    assert power_meters.hwmon_watts(tmp_path) == pytest.approx(4.7)


def test_pmic_adds_volts_times_amperes_of_rails_that_have_both() -> None:
    assert power_meters.pmic_watts(PMIC) == pytest.approx(0.37 + 0.165 + 1.6)
    assert power_meters.pmic_watts('error=1 error_msg="Command not registered"\n') is None  # a Pi without the chip


def test_nvml_adds_gpus_and_passes_over_those_that_cannot_tell() -> None:
    assert power_meters.nvml_watts("71.53\n[N/A]\n18.42\n") == pytest.approx(89.95)
    assert power_meters.nvml_watts("") is None


def test_watts_become_joules_by_straight_lines() -> None:
    watts, times = iter([10.0, 20.0, None, 20.0]), iter([0.0, 2.0, 3.0, 5.0])
    meter = power_meters.Sampled("test", lambda: next(watts), lambda: next(times), thread=False)
    meter.sample()  # 10 to 20 W in 2 s
    meter.sample()  # nothing was told in the third second: as before
    assert meter.joules() == 30 + 20 + 2 * 20


def test_the_boards_meter_comes_before_the_processors(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    found = power_meters.find(tmp_path, lambda command: PMIC if command[0] == "vcgencmd" else "")
    assert found is not None
    assert found.name == "pmic"
    assert power_meters.find(tmp_path, lambda command: "", wanted="nvml") is None


def test_a_step_tells_what_the_meter_counted_meanwhile() -> None:
    times, counted = iter(range(100)), iter([100.0, 107.0, 110.0, 200.0, 201.0])
    recorder = Recorder(0, lambda: float(next(times)), 1, lambda: next(counted))
    recorder.end(recorder.begin(), "forward", 0, 0)
    assert recorder.close_step(0, 0).joules == 7.0
    recorder.end(recorder.begin(), "forward", 0, 0)
    assert recorder.close_step(1, 0).joules == 3.0
    recorder.fresh()  # an evaluation: what it needs is nobody's
    recorder.end(recorder.begin(), "forward", 0, 0)
    assert recorder.close_step(2, 0).joules == 1.0


# -- what a node knows of its device ------------------------------------------------------------------------------------


def test_a_board_is_known_by_its_name_and_what_is_unknown_is_assumed_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / "proc/sys/kernel/random", boot_id="5e2f")
    unknown = power_of_this_device.describe(tmp_path, {}, threads=1, cores=4)
    assert (unknown.name, unknown.share, unknown.watts) == ("laptop (assumed)", 0.25, PRESETS["laptop"])
    write(tmp_path / "proc/device-tree", model="Raspberry Pi 5 Model B Rev 1.0\0")
    board = power_of_this_device.describe(tmp_path, {}, threads=4, cores=4, meter_name="pmic")
    assert (board.name, board.share, board.meter) == ("pi-5", 1.0, "pmic")
    assert board.host == unknown.host != ""
    lab = {"RINGTMP_EMULATED": "1", "RINGTMP_DEVICE": "desk"}
    assert power_of_this_device.describe(tmp_path, lab, 1, 4) is None, "nobody said what it needs"
    told = {**lab, power_of_this_device.WATTS: power_of_this_device.watts_text(Watts(1.5, 4.0, 7.0), 0.25)}
    assert power_of_this_device.describe(tmp_path, told, 1, 4) == Power("given", Watts(1.5, 4.0, 7.0), 0.25, "desk")


@pytest.mark.parametrize("text", ["", "5", "5,2", "a,b", "1,2,3,4,5", "nan,2", "-1,2"])
def test_watts_nobody_has_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="RINGTMP_WATTS"):
        power_of_this_device.parse_watts(text)
