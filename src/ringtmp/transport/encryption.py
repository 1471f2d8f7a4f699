"""CURVE on every TCP socket, and the gatekeeper that decides who may speak.

CURVE alone fails open: without a ZAP handler a server accepts every key. So each context has a gatekeeper, each server
socket a domain with `ZAP_ENFORCE_DOMAIN`, and a dead gatekeeper closes the door instead of opening it. The gatekeeper
answers a known key with the name it was admitted under; ZeroMQ attaches that name to every message (`User-Id`), so who
speaks is decided by the key and never by what a message claims.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import zmq
from zmq.utils import z85

from ringtmp.transport.connection_limits import Listener, listen

#: A connection that has not finished its handshake by then is dropped.
HANDSHAKE_LIMIT_MS = 5000


class KeyPair(NamedTuple):
    """Both in Z85, 40 characters."""

    public: str
    secret: str


def new_key_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def is_key(text: str) -> bool:
    try:
        return len(text) == 40 and len(z85.decode(text.encode())) == 32
    except (ValueError, KeyError, UnicodeEncodeError):
        return False


#: Final: the other side gives up. Or: come again, as someone must who was told of a peer before the peer was told of them.
REFUSED, NOT_YET = b"400", b"300"


class Gatekeeper:
    """Answers ZeroMQ's question "may this key connect to that domain?" for one context, in a thread of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], refusal: bytes = REFUSED) -> None:
        self._refusal = refusal
        self._lock = threading.Lock()
        self._allowed: dict[str, dict[str, str]] = {}
        self._open: set[str] = set()
        self.refused = 0
        self.listeners: list[Listener] = []
        self._stop = threading.Event()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._thread = threading.Thread(target=self._serve, name="gatekeeper", daemon=True)
        self._thread.start()

    def allow(self, domain: str, key: str, name: str) -> None:
        with self._lock:
            self._allowed.setdefault(domain, {})[key] = name

    def forbid(self, domain: str, key: str) -> None:
        with self._lock:
            self._allowed.get(domain, {}).pop(key, None)

    def open_to_anyone(self, domain: str) -> None:
        """Any key may connect; its name is the key itself. Only for a door where a secret is asked for next."""
        with self._lock:
            self._open.add(domain)

    def listen(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Bind a socket of this context, and keep an eye on how many connect."""
        listener = listen(socket, endpoint)
        with self._lock:
            self.listeners.append(listener)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self._stop.is_set():
            with self._lock:
                listeners = list(self.listeners)
            for each in listeners:
                if each.monitor not in poller:
                    poller.register(each.monitor, zmq.POLLIN)
                each.look()
            poller.poll(100)
            if self._socket.poll(0):
                request = self._socket.recv_multipart()
                self._socket.send_multipart(self._answer(request))
        self._socket.close()
        for each in self.listeners:
            each.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number = request[0], request[1] if len(request) > 1 else b""
        name = self._name_of(request) if version == b"1.0" and len(request) == 7 else None
        if name is None:
            self.refused += 1
            return [b"1.0", number, self._refusal, b"not admitted", b"", b""]
        return [b"1.0", number, b"200", b"OK", name.encode(), b""]

    def _name_of(self, request: list[bytes]) -> str | None:
        domain, mechanism, key = request[2].decode(errors="replace"), request[5], request[6]
        if mechanism != b"CURVE" or len(key) != 32:
            return None
        text = z85.encode(key).decode()
        with self._lock:
            return text if domain in self._open else self._allowed.get(domain, {}).get(text)


def serve_securely(socket: zmq.Socket[bytes], keys: KeyPair, domain: str) -> None:
    """The listening side: our key, and nobody without the gatekeeper's word."""
    socket.curve_server = True
    _secure(socket, keys, domain)


def connect_securely(socket: zmq.Socket[bytes], keys: KeyPair, server_key: str, domain: str) -> None:
    """The connecting side: nothing is said to a server that cannot prove `server_key`."""
    socket.curve_serverkey = server_key.encode()
    _secure(socket, keys, domain)


def _secure(socket: zmq.Socket[bytes], keys: KeyPair, domain: str) -> None:
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
