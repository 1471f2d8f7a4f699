"""Serve the pages: take a port, say where to look, go on until told to stop."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ringtmp.dashboard.access import ACT, LOOK, Access
from ringtmp.dashboard.beside_training import GOODBYE_S, READ_S, Ending
from ringtmp.dashboard.certificate import certificate
from ringtmp.errors import UsageError

if TYPE_CHECKING:
    import uvicorn

PORT = 8650
#: After the usual port so many are tried.
MORE_PORTS = 40


@dataclass(frozen=True)
class Place:
    """Where to serve. `port` None: the usual one, or the next that is free."""

    host: str = "127.0.0.1"
    port: int | None = None
    act: bool | None = None  # whether viewers may act; None: only on this machine

    @property
    def loopback(self) -> bool:
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def everywhere(self) -> bool:
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_unspecified
        return self.host == ""


def require_web() -> None:
    try:
        import starlette
        import uvicorn
    except ImportError:
        raise UsageError("the page needs starlette and uvicorn: pip install 'ringtmp[web]'") from None
    del starlette, uvicorn


def listening(place: Place) -> socket.socket:
    """A socket on the port that was asked for, or the next free one where none was."""
    if place.everywhere:
        raise UsageError(
            f"{place.host} stands for every address of this machine, and a page is served on one that is named: "
            "give one that `ip address` lists"
        )
    first = PORT if place.port is None else place.port
    last = first + MORE_PORTS if place.port is None else first
    for port in range(first, last + 1):
        try:
            return _bound(place.host, port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise UsageError(
                    f"{place.host} is not an address of this machine: use one that `ip address` lists"
                ) from error
            if error.errno == errno.EACCES:
                raise UsageError(
                    f"port {port} may not be opened by this user: choose one above 1023 (--port)"
                ) from error
            if error.errno != errno.EADDRINUSE:
                raise
    if place.port is None:
        raise UsageError(f"ports {first} to {last} of {place.host} are all in use: give another with --port")
    raise UsageError(f"port {first} is in use{_by_whom(first)}: {_next_free(place.host, first)}")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made


def _by_whom(port: int) -> str:
    try:
        for each in psutil.net_connections("tcp"):
            if each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN and each.pid:
                return f" by process {each.pid} ({psutil.Process(each.pid).name()})"
    except (psutil.Error, OSError):
        pass
    return " by another process"


def _next_free(host: str, port: int) -> str:
    for other in range(port + 1, min(port + MORE_PORTS, 65536)):
        with contextlib.suppress(OSError):
            _bound(host, other).close()
            return f"--port {other} is free"
    return "choose another with --port"


def hosts_of(host: str, port: int) -> frozenset[str]:
    """What a browser may call us."""
    names = {f"[{host}]" if ":" in host else host.lower()}
    if Place(host).loopback:
        names |= {"localhost", "127.0.0.1", "[::1]"}
    return frozenset(f"{name}:{port}" for name in names)


@dataclass(frozen=True)
class Addresses:
    look: str
    act: str | None
    fingerprint: str = ""

    def lines(self) -> list[str]:
        found = [f"watch      {self.look}"]
        if self.act is not None:
            found.append(f"and act    {self.act}")
        if self.fingerprint:
            found.append(f"SHA-256 of the certificate, which the browser shows: {self.fingerprint}")
        return found


def _server(config: uvicorn.Config, until: Callable[[], bool]) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        """Asks now and then whether to stop."""

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or until()

    return Server(config)


def _until(ending: Ending | None, say_goodbye: Callable[[], None]) -> Callable[[], bool]:
    def over() -> bool:
        gone_s = None if ending is None else ending.seconds
        if gone_s is None:
            return False
        if gone_s > READ_S:
            say_goodbye()
        return gone_s > GOODBYE_S

    return over


def serve(
    runs: Sequence[Path], place: Place, announce: Callable[[Addresses], None], ending: Ending | None = None
) -> None:  # fmt: skip
    """Until Ctrl-C, or until a moment after the run it stands beside. `announce` is told where, once browsers can come."""
    require_web()
    import uvicorn

    from ringtmp.dashboard.run_view import RunView
    from ringtmp.dashboard.server import Board, application

    taken = listening(place)
    port = taken.getsockname()[1]
    secure = not place.loopback
    may_act = place.loopback if place.act is None else place.act
    access = Access(port, hosts_of(place.host, port), secure, may_act)
    board = Board([RunView(run, number) for number, run in enumerate(runs)])
    context, fingerprint = certificate(place.host) if secure else (None, "")
    config = uvicorn.Config(
        application(board, access), log_level="critical", access_log=False, server_header=False, date_header=False,
        timeout_graceful_shutdown=1, ws="none", lifespan="on",
    )  # fmt: skip
    name = f"[{place.host}]" if ":" in place.host else place.host
    base = f"{'https' if secure else 'http'}://{name}:{port}/?token="
    config.load()
    if context is not None:
        config.ssl = context
    act = base + access.secrets[ACT] if may_act else None
    server = _server(config, _until(ending, board.say_goodbye))
    announce(Addresses(base + access.secrets[LOOK], act, fingerprint))
    with taken:
        server.run(sockets=[taken])
