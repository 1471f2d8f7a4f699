"""Listening on TCP without being filled up: strangers cannot make a process open all the files it may.

Whoever connects costs a file descriptor until the handshake is done or its time is over, and ZeroMQ takes everybody. So
each listening socket is counted, and with too many connections the kernel drops every new one. Those who are connected
notice nothing; the dropped ones try again. On Linux; elsewhere only the time limit of handshakes bounds strangers.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys

import zmq
from zmq.utils.monitor import recv_monitor_message

from ringtmp.system.resources import file_limit

#: A listening socket's connections, those of the ring included: a share of the files this process may open, in bounds.
#: With so many it takes no more until half are gone. A master has five such sockets.
SHARE, FEWEST, MOST = 16, 16, 256
BACKLOG = 32
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
#: A filter of one instruction: return 0 bytes of whatever comes.
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


def listen(zmq_socket: zmq.Socket[bytes], endpoint: str) -> Listener:
    """Bind to `tcp://HOST:PORT`, `*` for any port. zmq.ZMQError when it cannot, as `bind` itself would raise."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), 0 if port == "*" else int(port), type=socket.SOCK_STREAM
        )[0]
        ours = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise zmq.ZMQError(error.errno or zmq.EINVAL, str(error.strerror or error)) from error
    try:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.setblocking(False)
        ours.bind(address)
        ours.listen(BACKLOG)
        gate = ours.dup()
    except OSError as error:
        ours.close()
        raise zmq.ZMQError(error.errno or zmq.EINVAL, str(error.strerror or error)) from error
    zmq_socket.setsockopt(zmq.USE_FD, ours.detach())  # ZeroMQ's from here on
    name = gate.getsockname()
    try:
        zmq_socket.bind(f"tcp://{f'[{name[0]}]' if family == socket.AF_INET6 else name[0]}:{name[1]}")
    except zmq.ZMQError:
        gate.close()
        raise
    return Listener(zmq_socket, gate)


class Listener:
    """Counts who is connected to a listening socket, and shuts it when there are too many.

    Made in the thread that owns the socket; `look` and `close` belong to another, the gatekeeper's, which has time even
    while the owner computes."""

    def __init__(self, zmq_socket: zmq.Socket[bytes], gate: socket.socket) -> None:
        self._gate = gate
        self._most = max(FEWEST, min(MOST, file_limit() // SHARE))
        self.connections: set[int] = set()
        self.is_shut = False
        self.times_shut = 0
        self.someone_is_in = False  # a connection has done its handshake, and not all have gone since
        wanted = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self.monitor = zmq_socket.get_monitor_socket(wanted)

    def look(self) -> None:
        """Take note of who came and went."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.connections.add(event["value"])
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self.connections.discard(event["value"])
                self.someone_is_in &= bool(self.connections)
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.someone_is_in = True
            if not self.is_shut and len(self.connections) >= self._most:
                self._filter(True)
                self.times_shut += 1
        if self.is_shut and len(self.connections) <= self._most // 2:
            self._filter(False)

    def close(self) -> None:
        """Before the socket's context ends: a second name for the listening socket would keep the port."""
        self.monitor.close(linger=0)
        self._gate.close()

    def _filter(self, shut: bool) -> None:
        self.is_shut = shut
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            if shut:
                program = ctypes.create_string_buffer(_DROP)
                described = struct.pack("@HP", 1, ctypes.addressof(program))
                self._gate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
            else:
                self._gate.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
