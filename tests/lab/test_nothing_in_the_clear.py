"""Four emulated devices: the bits of one process, and of every packet on their switch nothing can be read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_lab import device, devices_file, needs_isolation

from commands import begin, here

#: Four letters alone turn up in random bytes by chance.
TOKEN = rb"rt1\.[\w-]{40}"

SNIFFER = """
import socket, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 2**20)
with open(sys.argv[1], "wb", buffering=2**20) as file:
    print("listening", flush=True)
    raw.settimeout(0.2)
    while not sys.stdin.closed:
        try:
            packet = raw.recv(65536)
        except TimeoutError:
            file.flush()
            continue
        if packet[12:14] == b"\\x08\\x00" and packet[23] == 6:  # TCP over IPv4: the payload alone, so that streams join up
            inner = packet[14 + (packet[14] & 15) * 4 :]
            file.write(inner[(inner[12] >> 4) * 4 :])
"""


#: Every process of the lab writes down the secrets it makes, so that they can be looked for.
SPY = """
import os, secrets
made = secrets.token_bytes
def token_bytes(count=None):
    found = made(count)
    if count == 16:
        with open(os.environ["SECRETS"], "ab") as file:
            file.write(found)
    return found
secrets.token_bytes = token_bytes
"""


@pytest.mark.long  # devices that join, strangers, encryption: test_joining, test_join_security, test_transports
@needs_isolation
def test_four_devices_at_100_mbit_train_the_bits_of_one_process_and_nothing_readable_crosses_their_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spy").mkdir()
    (tmp_path / "spy" / "sitecustomize.py").write_text(SPY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "spy"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("SECRETS", str(tmp_path / "secrets"))
    path = devices_file(tmp_path, *(device(name) for name in ("desk", "shelf", "attic", "shed")))
    flags = ["--steps", 10, "--seed", 3, "--json"]
    process = begin("lab", "--devices", path, "--", "train", "--all-devices", *flags, "--run-dir", "run", cwd=tmp_path)
    switch = f"rtlab-{process.pid}-switch"
    limit = time.monotonic() + 20
    while subprocess.run(["ip", "-n", switch, "link", "show", "bridge"], capture_output=True, check=False).returncode:
        assert time.monotonic() < limit
        time.sleep(0.005)
    sniffer = subprocess.Popen(
        ["ip", "netns", "exec", switch, sys.executable, "-c", SNIFFER, str(tmp_path / "heard")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert sniffer.stdout is not None
        assert sniffer.stdout.readline() == "listening\n"
        out, err = process.communicate(timeout=90)
    finally:
        sniffer.terminate()
        sniffer.communicate()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0, err
    summary = json.loads(out)
    check_what_was_heard((tmp_path / "heard").read_bytes(), summary, tmp_path)
    check_the_run(summary, err, tmp_path)
    alone = here("train", "--nodes", 1, "--threads", 1, *flags, "--quiet", "--run-dir", "alone", cwd=tmp_path)
    single = json.loads(alone.stdout)
    assert summary["weights_sha256"] == single["weights_sha256"]
    assert single["emulated"] is False


def check_the_run(summary: dict[str, Any], err: str, folder: Path) -> None:
    assert (summary["nodes"], summary["threads"], summary["emulated"]) == (4, 1, True)
    for name, address in (("shelf", "10.77.0.2"), ("attic", "10.77.0.3"), ("shed", "10.77.0.4")):
        assert re.search(rf"^\d\. {name}: .*, 1 core, [12]\.\d GiB free, {address}$", err, re.MULTILINE), err
    joined = re.search(r"all joined ([\d.]+) s after the token", err)
    assert joined, err
    assert float(joined[1]) < 5
    assert "rt1." not in err, "the lab uses the token itself"
    for path in folder.rglob("*"):
        written = path.is_file() and re.search(TOKEN, path.read_bytes())
        assert not written, f"the token is in {path}"


def check_what_was_heard(heard: bytes, summary: dict[str, Any], folder: Path) -> None:
    assert len(heard) > summary["bytes_total"] + summary["placement_bytes"], "not everything was heard"
    made = (folder / "secrets").read_bytes()
    assert made
    assert all(made[start : start + 16] not in heard for start in range(0, len(made), 16)), "a token's secret"
    assert not re.search(TOKEN, heard), "a token"
    for word in (b"activations", b"gradients", b"aten.linear", b"dense1", b"weight", b"adam"):
        assert word not in heard, f"{word!r} can be read on the wire"
    for file in sorted((folder / "run/checkpoints").glob("step-*/weights-*.safetensors")):
        for name, tensor in load_file(file).items():
            raw = tensor.numpy().tobytes()
            assert all(raw[start : start + 32] not in heard for start in range(0, len(raw) - 32, 997)), name
