"""The join token: where the master is, by which key it is known, and a secret. One line a person can paste.

rt1.<base64url of MessagePack [ring, address, key, secret, check]>
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import sys
from pathlib import Path

import msgspec

from ringtmp import untrusted
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch.device_names import NAME
from ringtmp.launch.key_store import SECRET_BYTES
from ringtmp.transport.encryption import is_key

PREFIX = "rt1."


class Token(msgspec.Struct, frozen=True, array_like=True):
    ring: str
    address: str  # host:port of the join endpoint
    key: str  # the master's public key
    secret: bytes

    def __repr__(self) -> str:
        return f"Token({self.ring} at {self.address}, secret hidden)"


_decoder = msgspec.msgpack.Decoder(Token)


def encode(token: Token) -> str:
    body = msgspec.msgpack.encode(token)
    return PREFIX + base64.urlsafe_b64encode(_check(body) + body).decode().rstrip("=")


def decode(text: str) -> Token:
    text = text.strip()
    wrong = "copy the whole line the master printed, beginning with rt1."
    if not text.startswith(PREFIX):
        raise UsageError(f"that is not a join token: {wrong}")
    try:
        raw = base64.b64decode(
            text.removeprefix(PREFIX) + "=" * (-len(text.removeprefix(PREFIX)) % 4), b"-_", validate=True
        )
    except (binascii.Error, ValueError):
        raise UsageError(f"the join token is damaged: {wrong}") from None
    check, body = raw[:4], raw[4:]
    if check != _check(body):
        raise UsageError(f"the join token is damaged or cut short: {wrong}")
    try:
        token = untrusted.decode(_decoder, body, "a token", 1024)
    except ProtocolError as error:
        raise UsageError(f"the join token is damaged: {error}") from None
    host, _, port = token.address.rpartition(":")
    if not (
        NAME.fullmatch(token.ring)
        and is_key(token.key)
        and len(token.secret) == SECRET_BYTES
        and host
        and port.isdigit()
    ):
        raise UsageError(f"the join token is invalid: {wrong}")
    return token


def given(argument: str | None) -> Token:
    """From the argument, `-` (standard input), `@FILE` or RINGTMP_TOKEN, so that it need not show in a process list."""
    text = argument or os.environ.get("RINGTMP_TOKEN", "")
    if text == "-":
        text = sys.stdin.readline()
    elif text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except OSError as error:
            raise UsageError(f"the token file {text[1:]} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise UsageError("no join token: give --join TOKEN, --join - (standard input), --join @FILE or RINGTMP_TOKEN")
    return decode(text)


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:4]
