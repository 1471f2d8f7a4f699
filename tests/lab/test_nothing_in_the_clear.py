"""Every packet on the lab's switch during a run: no weight, no message, no secret in the clear."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_lab import device, devices_file, needs_isolation

from commands import begin

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


@needs_isolation
def test_nothing_readable_crosses_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spy").mkdir()
    (tmp_path / "spy" / "sitecustomize.py").write_text(SPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "spy"))
    monkeypatch.setenv("SECRETS", str(tmp_path / "secrets"))
    path = devices_file(tmp_path, *(device(name, link_mbps=500) for name in ("a", "b", "c")))
    process = begin(
        "lab",
        "--devices",
        path,
        "--",
        "train",
        "--all-devices",
        "--steps",
        12,
        "--run-dir",
        tmp_path / "run",
        "--json",
        cwd=tmp_path,
    )
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
    heard = (tmp_path / "heard").read_bytes()
    summary = json.loads(out)
    assert len(heard) > summary["bytes_total"] + summary["placement_bytes"], "not everything was heard"

    made = (tmp_path / "secrets").read_bytes()
    assert made
    assert all(made[start : start + 16] not in heard for start in range(0, len(made), 16)), "a token's secret"
    assert b"rt1." not in heard
    for word in (b"activations", b"gradients", b"aten.linear", b"dense1", b"weight", b"adam"):
        assert word not in heard, f"{word!r} can be read on the wire"
    for file in sorted((tmp_path / "run/checkpoints").glob("step-*/weights-*.safetensors")):
        for name, tensor in load_file(file).items():
            raw = tensor.numpy().tobytes()
            assert all(raw[start : start + 32] not in heard for start in range(0, len(raw) - 32, 997)), name
