"""The doctor with real sockets on loopback, its checks on made-up machines, and a bug report without secrets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from commands import ringtmp
from ringtmp.launch import agent, doctor, reach_master
from ringtmp.launch import join_token as tokens
from ringtmp.launch.agent_messages import Died, End, Heartbeat
from ringtmp.launch.authenticate_devices import JOINS_PER_S
from ringtmp.launch.device_facts import device_facts
from ringtmp.launch.doctor import Finding
from ringtmp.launch.join_token import Token
from ringtmp.launch.key_store import Rings, identity
from ringtmp.launch.private_folder import PrivateFolder
from ringtmp.system.container_limits import Limits, group_limits
from ringtmp.transport.encryption import new_key_pair
from test_join_security import HOST, Master, free_port


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(tmp_path / "master")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTMP_CONFIG", str(tmp_path / "device"))
    monkeypatch.delenv("RINGTMP_TOKEN", raising=False)


def verdicts(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.name, finding.verdict) for finding in findings]


REACHED = [("way", "ok"), ("reach", "ok"), ("reach", "ok"), ("round trip", "ok")]


def test_a_waiting_master_passes_every_step_and_admits_nobody(master: Master, tmp_path: Path) -> None:
    token = master.token(uses=1)
    before = master.rings.open("home")
    findings = reach_master.try_joining(token)
    assert verdicts(findings) == [*REACHED, ("key", "ok"), ("token", "ok"), ("speed", "ok")]
    assert "at least" in findings[-1].found
    assert "lower bound" in findings[-1].found
    assert master.rings.open("home") == before, "no use taken, no key admitted"
    assert not (tmp_path / "device").exists(), "and no identity made here"


def test_knocking_leaves_the_door_half_its_requests() -> None:
    assert 2 * reach_master.BURST <= JOINS_PER_S
    assert reach_master.PAUSE_S > 1


def test_a_master_with_another_key_is_told_nothing(master: Master) -> None:
    token = msgspec.structs.replace(master.token(), key=new_key_pair().public)
    findings = reach_master.try_joining(token)
    assert verdicts(findings) == [*REACHED, ("key", "fail")]
    assert "nothing was sent to it" in findings[-1].found


def test_a_dead_port_is_named_with_what_to_do() -> None:
    port = free_port()
    findings = reach_master.try_joining(Token("home", f"{HOST}:{port}", new_key_pair().public, bytes(16)))
    assert verdicts(findings) == [("way", "ok"), ("reach", "fail")]
    assert f"{HOST} port {port} (join): nobody listens there" in findings[-1].found
    assert "ringtmp train --listen" in findings[-1].todo


def test_a_table_behind_a_firewall_is_found_though_the_door_answers() -> None:
    with socket.create_server((HOST, port := free_port())):
        findings = reach_master.try_joining(Token("home", f"{HOST}:{port}", new_key_pair().public, bytes(16)))
    assert verdicts(findings) == [("way", "ok"), ("reach", "ok"), ("reach", "fail")]
    assert f"port {port + 1} (table)" in findings[-1].found


@pytest.mark.parametrize("trouble", ["expired", "used up", "revoked", "wrong"])
def test_a_token_that_would_be_refused_says_why(master: Master, trouble: str) -> None:
    token = master.token(uses=1)
    mine = identity()
    if trouble == "expired":
        _change(master.rings, expires_at=time.time() - 1)
    elif trouble == "used up":
        assert master.rings.admit("home", token.secret, new_key_pair().public, "first") is None
    elif trouble == "revoked":
        assert master.rings.admit("home", token.secret, mine.public, "board") is None
        master.rings.revoke("home", "board")
    else:
        token = msgspec.structs.replace(token, secret=bytes(16))
    findings = reach_master.try_joining(token)
    assert verdicts(findings) == [*REACHED, ("key", "ok"), ("token", "fail")]
    assert trouble in findings[-1].found


@pytest.mark.long
def test_a_device_that_is_a_member_passes_with_a_used_up_token(master: Master) -> None:
    token = master.token(uses=1)
    assert master.rings.admit("home", token.secret, identity().public, "board") is None
    assert verdicts(reach_master.try_joining(token))[-2:] == [("token", "ok"), ("speed", "ok")]


def _change(rings: Rings, expires_at: float) -> None:
    with rings._change("home") as (ring, save):
        moved = tuple(msgspec.structs.replace(token, expires_at=expires_at) for token in ring.tokens)
        save(tokens=moved)


@pytest.mark.long
def test_the_command_gives_json_exit_codes_and_never_the_token(master: Master, tmp_path: Path) -> None:
    token = master.token()
    text = tokens.encode(token)
    (tmp_path / "token").write_text(text + "\n")
    done = ringtmp("doctor", "--join", f"@{tmp_path / 'token'}", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert {"addresses", "ports", "clock", "python", "torch", "cores", "memory", "config", "power", "key", "token"} <= {
        each["name"] for each in found["findings"]
    }
    assert all(set(each) == {"name", "verdict", "found", "todo"} for each in found["findings"])
    assert text not in done.stdout + done.stderr
    wrong = tokens.encode(msgspec.structs.replace(token, secret=bytes(16)))
    done = ringtmp("doctor", "--join", "-", cwd=tmp_path, code=1, input=wrong + "\n")
    assert "fail  token" in done.stdout
    assert "1 of" in done.stdout
    done = ringtmp("doctor", "--join", text[:-5], cwd=tmp_path, code=2)
    assert "damaged or cut short" in done.stderr


def test_devices_that_join_at_once_all_reach_the_table(master: Master, tmp_path: Path) -> None:
    """The door used to welcome a device before the table knew its key; half of nine were shut out for good."""
    token = master.token(uses=9)
    facts = device_facts("board")
    begin, end = threading.Barrier(9), threading.Event()

    def device(number: int) -> None:
        keys = identity(tmp_path / f"device-{number}")
        begin.wait()
        here = agent.Agent(token, agent.join(token, keys, facts), keys, facts, HOST, lambda text: None)
        while not end.wait(0.1):
            here._beat()
        here.close()

    threads = [threading.Thread(target=device, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + 10
    while len(master.hub.present()) < 9 and time.monotonic() < limit:
        time.sleep(0.05)
    arrived = len(master.hub.present())
    end.set()
    for thread in threads:
        thread.join()
    assert arrived == 9


def test_news_of_a_death_waits_until_the_master_listens(tmp_path: Path) -> None:
    token, keys, facts = (
        Token("home", f"{HOST}:1", new_key_pair().public, bytes(16)),
        identity(tmp_path),
        device_facts("a"),
    )
    here = agent.Agent(token, f"tcp://{HOST}:{free_port()}", keys, facts, HOST, lambda text: None)
    told: list[object] = []
    here._tell(Died("run", 3, -9, "killed"))  # nobody is there
    here._say_to_master = lambda message: not told.append(message)  # type: ignore[method-assign,func-returns-value]
    here._beat()
    here._beat()
    assert [type(each) for each in told] == [Heartbeat, Died, Heartbeat]
    here.close()


def test_news_of_another_run_is_not_believed(master: Master, tmp_path: Path) -> None:
    """Generations are counted from 1 in every run, and what nobody heard is told when somebody listens again."""
    token, keys, facts = master.token(), identity(tmp_path / "device"), device_facts("board")
    here = agent.Agent(token, agent.join(token, keys, facts), keys, facts, HOST, lambda text: None)
    master.hub.run = "this"
    try:
        for ring in ("before", "this"):
            here._tell(Died(ring, 1, -9, ring))
        limit = time.monotonic() + 10
        while not (found := [each.died for each in master.hub.present() if each.died]) and time.monotonic() < limit:
            here._beat()
            time.sleep(0.05)
        assert [each.ring for each in found] == ["this"]
    finally:
        here.close()


@pytest.mark.long
def test_ctrl_c_while_a_compute_process_is_ended_leaves_no_file(master: Master, tmp_path: Path) -> None:
    token, keys, facts = master.token(), identity(tmp_path / "device"), device_facts("board")
    here = agent.Agent(token, agent.join(token, keys, facts), keys, facts, HOST, lambda text: None)
    here._folder = PrivateFolder()
    here._log = here._folder.path / "log"
    here._log.touch()
    (here._folder.path / "snapshots").mkdir()
    folder = here._folder.path
    # One that takes its time to go: the signal comes between the sign to go and the end.
    slow = f"import sys, os, signal, time; sys.stdin.read(); os.kill({os.getpid()}, signal.SIGINT); time.sleep(60)"
    child = here._child = subprocess.Popen([sys.executable, "-c", slow], stdin=subprocess.PIPE)
    with here.leaves_on_signals():
        here._take(End(0))
        here.run(once=False)
        here.close()
    assert child.poll() is not None
    assert not folder.exists()


def test_a_taken_port_fails_a_master_and_only_warns_others() -> None:
    port = free_port()
    assert doctor.check_ports(HOST, port, wanted=True).verdict == "ok"
    with socket.create_server((HOST, port + 1)):
        finding = doctor.check_ports(HOST, port, wanted=True)
        assert (finding.verdict, finding.found) == ("fail", f"{port + 1} on {HOST} is taken")
        assert f"--listen {HOST}:PORT" in finding.todo
        assert doctor.check_ports(HOST, port, wanted=False).verdict == "warn"


def test_with_several_addresses_it_says_which_is_used_and_how_to_choose() -> None:
    loopback = {"127.0.0.1": "lo"}
    assert doctor.check_addresses(loopback, "127.0.0.1").verdict == "warn"
    one = {**loopback, "192.168.1.10": "eth0"}
    assert doctor.check_addresses(one, "192.168.1.10") == Finding("addresses", "ok", "192.168.1.10 (eth0)")
    two = doctor.check_addresses({**one, "10.0.0.7": "wlan0"}, "10.0.0.7")
    assert two.found == "10.0.0.7 (wlan0), 192.168.1.10 (eth0); used: 10.0.0.7"
    assert "--listen" in two.todo
    assert doctor.check_addresses({"169.254.3.4": "eth0"}, "169.254.3.4").verdict == "warn"


def test_a_clock_that_cannot_be_right_warns_and_never_fails() -> None:
    assert doctor.check_clock(1_763_200_000.0).verdict == "ok"
    for wrong in (0.0, 1_700_000_000.0, 5e9):
        finding = doctor.check_clock(wrong)
        assert finding.verdict == "warn"
        assert "joining still works" in finding.todo


def test_python_and_zeromq_are_judged() -> None:
    assert doctor.check_python((3, 11, 2), (4, 3, 5), True).verdict == "ok"
    assert doctor.check_python((3, 10, 9), (4, 3, 5), True).verdict == "fail"
    assert doctor.check_python((3, 11, 2), (4, 3, 5), False).verdict == "fail"
    assert doctor.check_python((3, 11, 2), (4, 3, 4), True).verdict == "warn"


def _pretend_python(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("script", "nvidia", "verdict", "says"),
    [
        ("""echo '["2.13.0+cpu", null, null, 1.5]'""", False, "ok", "CPU build, loads in 1.5 s"),
        ("""echo '["2.13.0+cu130", "13.0", null, 1.5]'""", False, "warn", "CUDA 13.0 build"),
        ("""echo '["2.13.0+cu130", "13.0", null, 1.5]'""", True, "ok", "CUDA 13.0 build"),
        ("""echo '["2.5.1", null, null, 1.5]'""", False, "fail", "2.5.1"),
        ("echo 'ModuleNotFoundError: No module named torch' >&2; exit 1", False, "fail", "No module named torch"),
        ("kill -9 $$", False, "fail", "killed by signal 9"),
        ("exec sleep 60", False, "fail", "timed out"),
    ],
)
def test_torch_builds_are_told_apart(tmp_path: Path, script: str, nvidia: bool, verdict: str, says: str) -> None:
    finding = doctor.check_torch(nvidia, _pretend_python(tmp_path, script), limit_s=1)
    assert finding.verdict == verdict
    assert says in finding.found


def test_memory_and_cores_are_judged_under_control_groups() -> None:
    mib = 2**20
    assert doctor.check_memory(1000 * mib, Limits()).verdict == "ok"
    assert doctor.check_memory(300 * mib, Limits()).verdict == "warn"
    assert doctor.check_memory(200 * mib, Limits()).verdict == "fail"
    squeezed = doctor.check_memory(4000 * mib, Limits(memory_bytes=256 * mib, memory_free_bytes=200 * mib))
    assert squeezed.verdict == "fail"
    assert "a control group allows 256.0 MiB" in squeezed.found
    assert doctor.check_cores(2, Limits()).verdict == "ok"
    assert doctor.check_cores(2, Limits(cores=0.45)).verdict == "warn"


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_control_groups_of_both_versions_bind_at_every_level(tmp_path: Path) -> None:
    (tmp_path / "two").write_text("0::/app/job\n")
    root = tmp_path / "v2"
    _write(root / "app", cpu__max="50000 100000\n", memory__max="max\n", memory__current="7\n")
    _write(
        root / "app/job", cpu__max="max 100000\n", memory__max="1000\n", memory__current="900\n",
        memory__stat="anon 5\ninactive_file 50\nactive_file 30\nfile_mapped 10\n",
    )  # fmt: skip
    assert group_limits(root, tmp_path / "two") == Limits(0.5, 1000, 170, 0.1)
    (tmp_path / "one").write_text("4:memory:/gone\n2:cpu,cpuacct:/lab\n")
    root = tmp_path / "v1"
    _write(root / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="7\n")
    _write(root / "cpu,cpuacct/lab", cpu__cfs_quota_us="4500\n", cpu__cfs_period_us="10000\n")
    assert group_limits(root, tmp_path / "one") == Limits(0.45, period_s=0.01)
    _write(
        root / "memory", memory__limit_in_bytes="1000\n", memory__usage_in_bytes="900\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 30\ntotal_mapped_file 40\n",
    )  # fmt: skip
    assert group_limits(root, tmp_path / "one") == Limits(0.45, 1000, 150, 0.01)
    assert group_limits(tmp_path / "none", tmp_path / "nowhere") == Limits()


def test_keys_others_can_read_fail_and_what_we_make_passes(tmp_path: Path) -> None:
    folder = tmp_path / "fresh" / "ringtmp"
    assert doctor.check_config(folder).verdict == "ok"
    Rings(folder).open("home", create=True)
    identity(folder)
    assert doctor.check_config(folder).verdict == "ok"
    (folder / "rings" / "home.json").chmod(0o644)
    finding = doctor.check_config(folder)
    assert finding.verdict == "fail"
    assert "home.json (0644)" in finding.found
    subprocess.run(finding.todo, shell=True, check=True)
    assert doctor.check_config(folder).verdict == "ok"


def test_power_sensors_are_named_when_there(tmp_path: Path) -> None:
    assert "no power sensor" in doctor.check_power(tmp_path, False).found
    _write(tmp_path / "sys/class/powercap/intel-rapl:0", energy_uj="5\n")
    _write(tmp_path / "sys/class/hwmon/hwmon0", power1_input="5\n")
    assert doctor.check_power(tmp_path, True).found == "sensors: powercap, hwmon, vcgencmd"


def test_neither_keys_nor_tokens_nor_addresses_are_in_a_bug_report(tmp_path: Path) -> None:
    rings = Rings()
    file = rings.open("secret-name", create=True)
    mine = identity()
    token = tokens.encode(Token("secret-name", "203.0.113.9:47100", file.public, rings.new_secret("secret-name", 1)))
    surroundings = dict(os.environ, RINGTMP_TOKEN=token)
    for args in (["env"], ["env", "--json"]):
        text = ringtmp(*args, cwd=tmp_path, env=surroundings).stdout
        for hidden in (token, "rt1.", *mine, file.public, file.secret, "RINGTMP_TOKEN", "secret-name", str(tmp_path)):
            assert hidden not in text
        assert "203.0.113" not in text
        assert "127.0.0.1" not in text
    found = json.loads(text)
    assert found["rings"] == 1
    assert {"ringtmp", "python", "torch", "pyzmq", "libzmq", "msgspec", "safetensors", "numpy", "cpu"} <= set(found)


def test_the_agent_and_the_doctor_load_without_torch() -> None:
    names = (
        "launch.agent",
        "launch.authenticate_devices",
        "launch.doctor",
        "launch.reach_master",
        "cli.doctor",
        "cli.env",
        "cli.node",
    )
    check = f"import sys, {', '.join(f'ringtmp.{name}' for name in names)}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "False\n"
