"""The way to a master, tried step by step with a token: its ports, its key, the token's life, round trip and speed.

Knocking admits nobody and uses nothing up. The secret is said only to a master that has proved the key in the token.
The door answers ten requests a second to everybody together; we ask for at most half of that.
"""

from __future__ import annotations

import socket
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from ringtmp import untrusted
from ringtmp.errors import ProtocolError, UsageError
from ringtmp.launch import agent_messages as messages
from ringtmp.launch.agent import at_the_door
from ringtmp.launch.device_facts import address_towards, own_addresses
from ringtmp.launch.doctor import Finding
from ringtmp.launch.join_token import Token
from ringtmp.launch.key_store import config_dir, identity
from ringtmp.transport.encryption import KeyPair, new_key_pair
from ringtmp.units import bytes_text, seconds_text

REACH_LIMIT_S = 3.0
HANDSHAKE_LIMIT_S = 3.0
ANSWER_LIMIT_S = 5.0
TRIES = 3
#: Below MAX_BYTES with room for the header, the secret and CURVE's own 33 bytes, which MAXMSGSIZE counts.
PADDING_BYTES = messages.MAX_BYTES - 256
BURST = 5
BURSTS = 2
#: A burst a second stays at half of what the door takes.
PAUSE_S = 1.1
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
)  # fmt: skip


def try_joining(token: Token) -> list[Finding]:
    """One finding per step; the first that fails is the last."""
    host, _, port_text = token.address.rpartition(":")
    port = int(port_text)
    try:
        mine = address_towards(host, port)
    except UsageError as error:
        return [Finding("way", "fail", str(error), "is this device on the master's network?")]
    interface = own_addresses().get(mine, "unknown interface")
    findings = [
        Finding(
            "way", "ok", f"to {host} from {mine} ({interface}); other nodes will connect to {mine}",
            "if they cannot reach it, choose another with ringtmp node --listen ADDRESS",
        )
    ]  # fmt: skip
    took_s = []
    for each, what in ((port, "join"), (port + messages.HUB_PORT_OFFSET, "table")):
        finding, seconds = reach(host, each, what)
        findings.append(finding)
        if seconds is None:
            return findings
        took_s.append(seconds)
    findings.append(
        Finding("round trip", "ok", f"{seconds_text(min(took_s))} (fastest of {2 * TRIES} TCP connections)")
    )
    return findings + check_join(token, _own_keys())


def reach(host: str, port: int, what: str) -> tuple[Finding, float | None]:
    """TCP alone: can a connection be made, and how long does it take? Says nothing over it."""
    best_s: float | None = None
    for _ in range(TRIES):
        began = time.monotonic()
        try:
            socket.create_connection((host, port), REACH_LIMIT_S).close()
        except OSError as error:
            return Finding("reach", "fail", f"{host} port {port} ({what}): {_why(error)}", _advice(error, port)), None
        took_s = time.monotonic() - began
        best_s = took_s if best_s is None else min(best_s, took_s)
    return Finding("reach", "ok", f"{host} port {port} ({what}) answers"), best_s


def check_join(token: Token, keys: KeyPair) -> list[Finding]:
    """Key, token and speed, over one connection to the door."""
    with at_the_door(token, keys, _HANDSHAKES) as (door, monitor):
        if not _handshake(monitor):
            return [
                Finding(
                    "key", "fail", f"{token.address} does not prove the key in the token; nothing was sent to it",
                    "is the token of another ring or an old one, or does something else listen there? "
                    "Ask the master for a fresh one (ringtmp ring token)",
                )
            ]  # fmt: skip
        findings = [Finding("key", "ok", f"{token.address} proves the key in the token")]
        findings.append(_alive(door, token))
        if findings[-1].verdict == "ok":
            findings.append(_speed(door, token))
        return findings


def _alive(door: zmq.Socket[bytes], token: Token) -> Finding:
    door.send(messages.encode(messages.JoinCheck(token.secret)))
    answer = _answer(door, time.monotonic() + ANSWER_LIMIT_S)
    if isinstance(answer, messages.JoinCheckAnswer) and not answer.reason:
        return Finding("token", "ok", f"ring {token.ring} would let this device in")
    if isinstance(answer, messages.JoinCheckAnswer):
        return Finding(
            "token",
            "fail",
            f"the master says: {untrusted.line(answer.reason)}",
            "get a fresh token: ringtmp ring token, there",
        )
    if isinstance(answer, messages.Refused):
        return Finding(
            "token", "warn", "the master's version is too old to answer this", "install one version of ringtmp everywhere",
        )  # fmt: skip
    return Finding(
        "token", "fail", f"no answer within {ANSWER_LIMIT_S:.0f} s",
        "the master may be crowded (it answers ten requests a second): try again in a while",
    )  # fmt: skip


def _speed(door: zmq.Socket[bytes], token: Token) -> Finding:
    """The best burst: its bytes in one direction over the time until all had come back, the master's own work included."""
    question = messages.encode(messages.JoinCheck(token.secret, bytes(PADDING_BYTES)))
    best_bits_per_s = 0.0
    for _ in range(BURSTS):
        time.sleep(PAUSE_S)
        began = time.monotonic()
        for _ in range(BURST):
            door.send(question)
        limit = began + ANSWER_LIMIT_S / 2
        for answers in range(1, BURST + 1):
            answer = _answer(door, limit)
            if not isinstance(answer, messages.JoinCheckAnswer) or len(answer.padding) != PADDING_BYTES:
                # What comes late would flatter the next burst.
                return _speed_found(best_bits_per_s)
            best_bits_per_s = max(best_bits_per_s, 8 * PADDING_BYTES * answers / (time.monotonic() - began))
    return _speed_found(best_bits_per_s)


def _speed_found(best_bits_per_s: float) -> Finding:
    if not best_bits_per_s:
        return Finding("speed", "warn", "too few answers to tell", "try again while nobody else is joining")
    return Finding(
        "speed", "ok", f"at least {best_bits_per_s / 1e6:.1f} Mbit/s each way (a lower bound, from bursts of "
        f"{BURST} messages of {bytes_text(PADDING_BYTES)})",
    )  # fmt: skip


def _answer(door: zmq.Socket[bytes], limit: float) -> messages.FromMaster | None:
    """The next answer, or None if none that makes sense comes before `limit` (monotonic seconds)."""
    if not door.poll(max(0, round((limit - time.monotonic()) * 1000))):
        return None
    try:
        return messages.decode(messages.from_master, door.recv(), messages.Heard.STRANGER)
    except ProtocolError:
        return None


def _handshake(monitor: zmq.Socket[bytes]) -> bool:
    """The master has opened what only the holder of its key can open."""
    if not monitor.poll(round(HANDSHAKE_LIMIT_S * 1000)):
        return False
    return bool(recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def _own_keys() -> KeyPair:
    """This device's own, if it has any: the master then also tells whether it was revoked. Makes none."""
    return identity() if (config_dir() / "identity.json").exists() else new_key_pair()


def _why(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return f"no answer within {REACH_LIMIT_S:.0f} s"
    return error.strerror or str(error)


def _advice(error: OSError, port: int) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "is the master waiting (ringtmp train --listen)? The join port closes once all devices have come"
    return f"is this the master's address now, is it switched on, and does its firewall let TCP port {port} through?"
