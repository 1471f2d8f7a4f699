"""A certificate made for one run: between machines a page goes out encrypted or not at all.

Nobody has signed it, so a browser asks the first time; the fingerprint that is printed tells the right one. Its key lies
in a folder that only this user may enter, for as long as it takes to load it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import ssl
import subprocess
import tempfile
from pathlib import Path

from ringtmp.errors import UsageError

DAYS = 30
_LIMIT_S = 20.0


def certificate(host: str) -> tuple[ssl.SSLContext, str]:
    """What a server needs, and the SHA-256 fingerprint as browsers show it."""
    with tempfile.TemporaryDirectory(prefix="ringtmp-page-") as folder:  # 0700
        key, made = Path(folder) / "key.pem", Path(folder) / "certificate.pem"
        _make(host, key, made)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(made, key)
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(made.read_text())).hexdigest().upper()
    return context, ":".join(digest[place : place + 2] for place in range(0, len(digest), 2))


def _make(host: str, key: Path, made: Path) -> None:
    try:
        ipaddress.ip_address(host)
        named = f"IP:{host}"
    except ValueError:
        named = f"DNS:{host}"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", str(DAYS),
        "-subj", "/CN=ringtmp", "-addext", f"subjectAltName={named}", "-keyout", str(key), "-out", str(made),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        raise UsageError(
            "on another address than this machine's own the page is encrypted, and the openssl command that makes its "
            "certificate is missing: install openssl, or leave out --host"
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"openssl made no certificate within {_LIMIT_S:.0f} s") from None
    if done.returncode:
        raise UsageError(f"openssl made no certificate: {done.stderr.strip().splitlines()[-1:]}")
