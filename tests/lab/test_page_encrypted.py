"""The page on an address other than this machine's own: encrypted, its certificate told by the printed fingerprint, and to look
at only. In a network namespace with an address of its own, with a client that knows the fingerprint and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_lab import needs_isolation

pytest.importorskip("uvicorn")

from commands import CLI
from known_run import known_events
from ringtmp.metrics.events import encode

ADDRESS = "10.9.8.7"
NAMESPACE = 'ip link set lo up && ip address add "$0/32" dev lo && exec "$@"'
#: Starts the page, speaks to it, and prints what it saw.
CLIENT = r"""
import hashlib, http.client, json, re, socket, ssl, subprocess, sys
address, *command = sys.argv[1:]
page = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
seen = {"said": [page.stdout.readline().rstrip()]}
seen["said"] += [page.stdout.readline().rstrip() for _ in range(seen["said"][0].startswith("watch"))]
try:
    port = int(re.search(r":(\d+)/", seen["said"][0])[1])
    token = seen["said"][0].partition("?token=")[2]
    made = ssl.get_server_certificate((address, port))
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(made)).hexdigest().upper()
    seen["fingerprint"] = ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))
    trusting = ssl.create_default_context(cadata=made)  # this certificate, for this address, and no other

    def ask(path, method="GET", body=None, **headers):
        line = http.client.HTTPSConnection(address, port, timeout=60, context=trusting)
        line.request(method, path, body, {name.title(): value for name, value in headers.items()})
        answer = line.getresponse()
        text = answer.read(60 if path == "/stream" else None).decode()
        line.close()
        return answer.status, dict(answer.getheaders()), text

    origin = f"https://{address}:{port}"
    _, headers, _ = ask(f"/?token={token}")
    seen["cookie"] = headers["set-cookie"]
    cookie = headers["set-cookie"].split(";")[0]
    seen["codes"] = {
        "front": ask("/", cookie=cookie)[0], "no cookie": ask("/")[0], "wrong token": ask("/?token=wrong")[0],
        "other host": ask("/", cookie=cookie, host=f"other:{port}")[0],
        "not encrypted page": ask("/", cookie=cookie, origin=f"http://{address}:{port}")[0],
        "act": ask("/act", "POST", json.dumps({"run": 0, "request": "stop"}), cookie=cookie, origin=origin)[0],
    }
    seen["hello"] = ask("/stream", cookie=cookie)[2]
    with socket.create_connection((address, port), timeout=60) as plain:
        plain.sendall(f"GET / HTTP/1.1\r\nHost: {address}:{port}\r\n\r\n".encode())
        try:
            seen["in the clear"] = plain.recv(100).decode("latin-1")
        except ConnectionError:
            seen["in the clear"] = ""
    other = ssl.create_default_context()
    try:
        other.wrap_socket(socket.create_connection((address, port), timeout=60), server_hostname=address)
        seen["unknown to others"] = False
    except ssl.SSLCertVerificationError:
        seen["unknown to others"] = True
finally:
    page.terminate()
    seen["ended"] = page.wait(60)
print(json.dumps(seen))
"""


def looked_at(folder: Path) -> dict[str, Any]:
    command = [*CLI, "watch", folder, "--host", ADDRESS]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", NAMESPACE, ADDRESS, sys.executable, "-c", CLIENT, ADDRESS, *map(str, command)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@needs_isolation
@pytest.mark.timeout(400)
def test_on_another_address_the_page_is_encrypted_known_by_its_fingerprint_and_to_look_at_only(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"".join(encode(each) + b"\n" for each in known_events()))
    seen = looked_at(tmp_path)
    watch, fingerprint = seen["said"]
    assert watch.startswith(f"watch      https://{ADDRESS}:"), "and the next line gives no address to act"
    assert fingerprint.startswith("SHA-256 of the certificate")
    assert fingerprint.endswith(seen["fingerprint"])
    assert "; Secure" in seen["cookie"]
    assert seen["codes"] == {
        "front": 200, "no cookie": 401, "wrong token": 401, "other host": 403, "not encrypted page": 403, "act": 403,
    }  # fmt: skip
    assert '"may_act":false' in seen["hello"]
    assert "HTTP" not in seen["in the clear"]
    assert seen["unknown to others"]
    assert seen["ended"] in (0, -15)
