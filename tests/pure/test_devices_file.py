"""The devices file, what each device gets of the machine, and the control groups' files: all without starting anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtmp.errors import UsageError
from ringtmp.lab import control_groups, networks, run_command
from ringtmp.lab.devices_file import PRESETS, Device, parse, toml
from ringtmp.lab.machine_shares import place, share_out

GIB = 2**30


def table(**keys: object) -> str:
    lines = {"name": '"a"', "cpu": 0.5, "memory_mb": 512, "link_mbps": 100} | keys
    return "[[device]]\n" + "\n".join(f"{key} = {value}" for key, value in lines.items() if value is not None) + "\n"


def device(name: str, cpu: float, memory_mb: float = 512, link_mbps: float = 100) -> Device:
    return Device(name, cpu, cpu, memory_mb, link_mbps)


def test_a_device_is_what_its_table_says() -> None:
    text = table(latency_ms=2, idle_w=1, busy_w=3.5, host='"10.0.0.7"') + table(name='"b"', cpu=2)
    first, second = parse(text, "two.toml")
    assert first == Device("a", 0.5, 0.5, 512.0, 100.0, 2.0, 1.0, 3.5, "10.0.0.7")
    assert second == Device("b", 2.0, 2.0, 512.0, 100.0)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_in_everything_and_a_key_beside_it_wins(name: str) -> None:
    plain = parse(f'[[device]]\nname = "a"\npreset = "{name}"', "one.toml")[0]
    preset = PRESETS[name]
    assert plain.cpu == pytest.approx(preset.cores * preset.core_speed)
    assert (plain.memory_mb, plain.link_mbps) == (preset.memory_mb, preset.link_mbps)
    assert (plain.idle_w, plain.busy_w) == (preset.watts.idle_w, preset.watts.busy_w)
    changed = parse(f'[[device]]\nname = "a"\npreset = "{name}"\nmemory_mb = 300\nlink_mbps = 7', "one.toml")[0]
    assert (changed.memory_mb, changed.link_mbps, changed.cpu) == (300.0, 7.0, plain.cpu)


def test_devices_written_and_read_again_are_the_same_devices() -> None:
    listed = "".join(f'[[device]]\nname = "{name}"\npreset = "{name}"\nlatency_ms = 0.5\n' for name in PRESETS)
    text = listed + table(latency_ms=2, idle_w=1, busy_w=3.5, host='"10.0.0.7"') + table(name='"b"', cpu=1 / 3)
    devices = parse(text, "many.toml")
    assert parse(toml(devices), "again.toml") == devices


def test_one_thread_of_a_four_core_board_gets_one_core_of_it() -> None:
    board = parse('[[device]]\nname = "a"\npreset = "pi-4b"', "one.toml")[0]
    assert board.wanted_cpu(1) == pytest.approx(0.164)
    assert board.wanted_cpu(3) == pytest.approx(0.492)
    assert board.wanted_cpu(16) == pytest.approx(0.656)
    assert device("a", 1.5).wanted_cpu(1) == 1.5, "a share that was written down is given whole"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["few.toml has no device", "[[device]]"]),
        ("device = 3", ["has no device"]),
        ("device = [1]", ["has no device"]),
        ("[[device]\n", ["few.toml is not TOML"]),
        ("[[devices]]\n", ["unknown section 'devices'", "did you mean 'device'"]),
        (table(name=None), ["device 1 has no name"]),
        (table(name=7), ["name is 7; it must be text"]),
        (table(name='"Pi 4"'), ["device 1", "'Pi 4'", "a-z, 0-9 and '-'"]),
        (table(name='"../../etc"'), ["'../../etc'"]),
        (table(name='"' + "a" * 33 + '"'), ["1 to 32"]),
        (table(name='"switch"'), ["'switch' is the name of the network"]),
        (table() + table(), ["devices 1 and 2 are both called 'a'"]),
        (table(memori_mb=3), ["device 1", "unknown key 'memori_mb'", "did you mean 'memory_mb'"]),
        (table(cpu=None), ["(a) has neither preset nor cpu", "pi-zero-2w"]),
        (table(preset='"pi-4b"'), ["both preset and cpu"]),
        (table(cpu=None, preset='"pi4b"'), ["unknown preset 'pi4b'", "did you mean 'pi-4b'"]),
        (table(memory_mb=None), ["(a) has no memory_mb"]),
        (table(link_mbps=None), ["(a) has no link_mbps"]),
        (table(cpu=0), ["cpu is 0", "from 0.01 to 256"]),
        (table(cpu=-1), ["cpu is -1"]),
        (table(cpu="nan"), ["cpu is nan"]),
        (table(cpu="inf"), ["cpu is inf"]),
        (table(cpu="true"), ["cpu is True; it must be a number"]),
        (table(memory_mb='"1 GB"'), ["memory_mb is '1 GB'; it must be a number"]),
        (table(memory_mb=1), ["memory_mb is 1; it must be from 16"]),
        (table(link_mbps=0), ["link_mbps is 0"]),
        (table(link_mbps=1e9), ["link_mbps is 1e+09"]),
        (table(latency_ms=-1), ["latency_ms is -1"]),
        (table(idle_w=5, busy_w=2), ["idle_w 5 is more than busy_w 2"]),
        (table(host='""'), ["host is ''"]),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_reason(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text, "few.toml")
    for word in [*words, "few.toml"]:
        assert word in str(refused.value)


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="201 devices; a lab holds at most 200"):
        parse("".join(table(name=f'"n{index}"') for index in range(201)), "many.toml")


def test_shares_under_a_core_stay_on_one_processor_and_fill_them_evenly() -> None:
    placed, fullest = place([0.5, 0.5, 0.5, 0.5], [0, 1])
    assert sorted(placed) == [(0,), (0,), (1,), (1,)]
    assert fullest == 1.0
    assert place([1.5, 0.5], [0, 1]) == ([(0, 1), (0,)], 0.5)
    assert place([1.0, 1.0], [3, 7]) == ([(3,), (7,)], 1.0)


def test_devices_that_fit_are_not_scaled() -> None:
    scale, shares = share_out([device("a", 0.5), device("b", 1.5)], [0, 1], GIB, 1, may_scale=False)
    assert scale == 1.0
    assert [(share.cpu, share.link_mbps, share.memory_bytes) for share in shares] == [
        (0.5, 100, GIB // 2),
        (1.5, 100, GIB // 2),
    ]


def test_more_cores_than_there_are_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"need 5 cores \(a 2, b 3\), but this machine has 2: .*--scale"):
        share_out([device("a", 2), device("b", 3)], [0, 1], GIB, 1, may_scale=False)
    # 1.8 of 2 cores, but two of the three would have to share one processor.
    with pytest.raises(UsageError, match="need 1.8 cores .* if no device with less than a core may use two"):
        share_out([device(name, 0.6) for name in "abc"], [0, 1], 2 * GIB, 1, may_scale=False)


def test_scaling_slows_every_cpu_and_link_by_one_factor() -> None:
    scale, shares = share_out([device("a", 3, link_mbps=50), device("b", 1)], [0, 1], GIB, 1, may_scale=True)
    assert scale == pytest.approx(0.5)
    assert [share.cpu for share in shares] == pytest.approx([1.5, 0.5])
    assert [share.link_mbps for share in shares] == pytest.approx([25, 50])
    # Three times a core on two processors: two thirds each would do, but not on one processor each.
    scale, shares = share_out([device(name, 1) for name in "abc"], [0, 1], 2 * GIB, 1, may_scale=True)
    assert scale == pytest.approx(0.5)
    assert all(len(share.processors) == 1 for share in shares)


def test_more_memory_than_there_is_cannot_be_scaled_away() -> None:
    with pytest.raises(UsageError, match=r"have 1.0 GiB of memory together, but this machine has 512.0 MiB free"):
        share_out([device("a", 0.1), device("b", 0.1)], [0], GIB // 2, 1, may_scale=True)


def test_the_cpu_quota_keeps_its_share_where_the_kernel_wants_at_least_a_millisecond() -> None:
    assert control_groups.quota(0.5) == (10_000, 5_000)
    assert control_groups.quota(2.0) == (10_000, 20_000)
    assert control_groups.quota(0.05) == (20_000, 1_000)
    assert control_groups.quota(0.01) == (100_000, 1_000)


def test_a_fast_link_may_burst_two_milliseconds_and_a_slow_one_ten_frames() -> None:
    assert networks.burst_bytes(1000) == 250_000
    assert networks.burst_bytes(1) == 15_140
    assert [networks.packet_bytes(rate) for rate in (1, 10, 40, 100, 1000)] == [1500, 1500, 5000, 9000, 9000]


V1_MOUNTS = """tmpfs {root} tmpfs rw 0 0
cgroup {root}/cpu,cpuacct cgroup rw,nosuid,cpu,cpuacct 0 0
cgroup {root}/memory cgroup rw,nosuid,memory 0 0
cgroup {root}/pids cgroup rw,nosuid,pids 0 0
cgroup2 {root}/unified cgroup2 rw,nosuid 0 0
"""


def test_version_1_groups_are_made_below_our_own(tmp_path: Path) -> None:
    (tmp_path / "memory/user/session").mkdir(parents=True)
    (tmp_path / "cpu,cpuacct").mkdir()
    own = "4:memory:/user/session\n2:cpu,cpuacct:/not/visible/here\n0::/\n"
    tree = control_groups.find_tree(V1_MOUNTS.format(root=tmp_path), own)
    assert tree.version == 1
    assert tree.memory == tmp_path / "memory/user/session"
    assert tree.cpu == tmp_path / "cpu,cpuacct", "a path of the host's, seen in a container"
    groups = control_groups.make(tree, 123, "a", 0.25, 64 * 2**20)
    assert groups == (tmp_path / "cpu,cpuacct/rtlab-123/a", tmp_path / "memory/user/session/rtlab-123/a")
    assert (groups[0] / "cpu.cfs_quota_us").read_text() == "2500"
    assert (groups[0] / "cpu.cfs_period_us").read_text() == "10000"
    assert (groups[1] / "memory.limit_in_bytes").read_text() == str(64 * 2**20)
    assert control_groups.labs(tree) == {123}
    (groups[1] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert control_groups.memory_kills(groups) == 3


def test_version_2_groups_get_the_same_limits(tmp_path: Path) -> None:
    """On files alone: no machine with version 2 was at hand."""
    tree = control_groups.find_tree(f"cgroup2 {tmp_path} cgroup2 rw,nosuid 0 0\n", "0::/user.slice/session-1.scope\n")
    assert (tree.version, tree.cpu) == (2, tmp_path)
    (group,) = control_groups.make(tree, 123, "a", 0.25, 64 * 2**20)
    assert group == tmp_path / "rtlab-123/a"
    assert (group / "cpu.max").read_text() == "2500 10000"
    assert (group / "memory.max").read_text() == str(64 * 2**20)
    assert (group / "memory.swap.max").read_text() == "0"
    for above in (tmp_path, tmp_path / "rtlab-123"):
        assert (above / "cgroup.subtree_control").read_text() == "+cpu +memory"
    assert not (group / "cgroup.subtree_control").exists(), "a group with processes hands nothing down"


def test_no_control_groups_at_all_offers_to_go_without() -> None:
    with pytest.raises(UsageError, match="no control groups .* --no-isolation"):
        control_groups.find_tree("proc /proc proc rw 0 0\n", "")


def test_the_lab_chooses_address_and_nodes_and_one_thread() -> None:
    assert run_command.complete(["--steps", "3"], 4) == (["--steps", "3", "--threads", "1"], 1)
    assert run_command.complete(["--threads=2", "--nodes", "4"], 4) == (["--threads=2", "--nodes", "4"], 2)
    with pytest.raises(UsageError, match="takes no --listen"):
        run_command.complete(["--listen=10.0.0.1"], 4)
    with pytest.raises(UsageError, match="--nodes 3, but the devices file has 4"):
        run_command.complete(["--nodes", "3"], 4)
    with pytest.raises(UsageError, match="--threads 'two'"):
        run_command.complete(["--threads", "two"], 4)
