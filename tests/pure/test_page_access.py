"""Who may see a page: on every route and method a missing, wrong or foreign token, Origin or Host is refused."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from known_run import known_events
from ringtmp.dashboard.access import ACT, HEADERS, LOOK, MOST_SESSIONS, Access, Refused
from ringtmp.dashboard.listen_until_stopped import Place, hosts_of, listening
from ringtmp.dashboard.run_view import RunView
from ringtmp.dashboard.server import Board, application
from ringtmp.errors import UsageError
from ringtmp.metrics.events import encode

PORT = 8650
HOST = f"127.0.0.1:{PORT}"
ROUTES = ["/", "/colours.css", "/stream", "/step?run=0&step=0", "/static/main.js", "/act", "/detail", "/nothing"]


class Client:
    """Speaks to the application itself, without a socket."""

    def __init__(self, run: Path, may_act: bool = True) -> None:
        self.access = Access(PORT, hosts_of("127.0.0.1", PORT), secure=False, may_act=may_act)
        self.app = application(Board([RunView(run)]), self.access)

    def cookie(self, role: str) -> str:
        return self.access.new_session(role).split(";")[0]

    def ask(
        self, path: str, method: str = "GET", body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        name, _, query = path.partition("?")
        given = {"host": HOST, **{key.replace("_", "-"): value for key, value in headers.items()}}
        scope = {
            "type": "http", "method": method, "path": name, "raw_path": name.encode(), "query_string": query.encode(),
            "headers": [(key.encode(), value.encode()) for key, value in given.items()], "http_version": "1.1",
            "scheme": "http", "server": ("127.0.0.1", PORT), "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        sent: list[MutableMapping[str, Any]] = []

        async def answered() -> None:
            asked = False

            async def receive() -> dict[str, Any]:
                nonlocal asked
                if asked:
                    await asyncio.sleep(60)
                asked = True
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message: MutableMapping[str, Any]) -> None:
                sent.append(message)

            try:
                await asyncio.wait_for(self.app(scope, receive, send), 2 if name != "/stream" else 0.3)
            except TimeoutError:
                assert name == "/stream"

        asyncio.run(answered())
        headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
        return sent[0]["status"], headers, b"".join(each.get("body", b"") for each in sent[1:])


@pytest.fixture
def client(tmp_path: Path) -> Client:
    (tmp_path / "events.jsonl").touch()
    return Client(tmp_path)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ROUTES)
def test_every_route_and_method_is_refused_without_a_sound_token_host_and_origin(
    client: Client, path: str, method: str
) -> None:
    ours, sound = f"http://{HOST}", client.cookie(ACT)
    other = Access(PORT, hosts_of("127.0.0.1", PORT), secure=False, may_act=True).new_session(ACT).split(";")[0]
    for headers in (
        {"origin": ours},
        {"origin": ours, "cookie": "ringtmp-8650=wrong"},
        {"origin": ours, "cookie": other},
    ):
        assert client.ask(path, method, **headers)[0] == 401
    for headers in (
        {"cookie": sound, "origin": "http://evil.example"},
        {"cookie": sound, "origin": "null"},
        {"cookie": sound, "origin": "http://127.0.0.1:9999"},
        {"cookie": sound, "origin": ours, "host": "evil.example"},
        {"cookie": sound, "origin": ours, "host": "127.0.0.1"},
        {"cookie": sound, "sec_fetch_site": "cross-site", "sec_fetch_mode": "cors", "origin": ours},
        {"cookie": sound, "sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors", "origin": ours},
    ):
        status, told, _ = client.ask(path, method, **headers)
        assert status == 403
        assert told["content-security-policy"] == HEADERS["content-security-policy"]
    if method not in ("GET", "HEAD"):
        assert client.ask(path, method, cookie=sound)[0] == 403, "a request that acts names its origin"


def test_a_printed_address_is_exchanged_for_a_strict_cookie_that_opens_everything(client: Client) -> None:
    for role, secret in client.access.secrets.items():
        status, headers, _ = client.ask(f"/?token={secret}")
        assert status == 200
        assert secret not in str(headers)
        assert "HttpOnly; SameSite=Strict" in headers["set-cookie"]
        cookie = headers["set-cookie"].split(";")[0]
        status, headers, page = client.ask("/", cookie=cookie)
        assert (status, b"<h1" in page) == (200, True)
        assert headers["cache-control"] == "no-store"
        assert client.ask("/static/main.js", cookie=cookie)[1]["content-type"].startswith("text/javascript")
        hello = client.ask("/stream", cookie=cookie)[2].split(b"\n\n")[0]
        assert (b'"may_act":true' in hello) == (role == ACT)


@pytest.mark.parametrize("token", ["", "wrong", "%00", "x" * 5000, "%ff"])
def test_a_wrong_token_opens_nothing(client: Client, token: str) -> None:
    status, headers, _ = client.ask(f"/?token={token}")
    assert status == 401
    assert "set-cookie" not in headers


def test_a_token_is_taken_by_the_front_page_alone_and_not_by_methods_that_act(client: Client) -> None:
    secret = client.access.secrets[LOOK]
    assert client.ask(f"/stream?token={secret}")[0] == 401
    assert client.ask(f"/?token={secret}", "POST", origin=f"http://{HOST}")[0] == 401


def test_nothing_but_the_pages_own_files_can_be_asked_for(client: Client) -> None:
    cookie = client.cookie(LOOK)
    for name in ("../server.py", "..%2fserver.py", "/etc/passwd", "uplot/../../server.py", "server.py", "uplot"):
        assert client.ask(f"/static/{name}", cookie=cookie)[0] == 404
    for path in ("/step", "/step?run=5&step=1", "/step?run=0&step=x", "/step?run=-1&step=0", "/step?run=0&step=7"):
        assert client.ask(path, cookie=cookie)[0] == 404


def test_without_a_secret_to_act_there_is_none_to_guess(tmp_path: Path) -> None:
    client = Client(tmp_path, may_act=False)
    assert list(client.access.secrets) == [LOOK]
    assert client.access.role_for("") is None


def test_old_sessions_make_room_for_new_ones(client: Client) -> None:
    first = client.cookie(LOOK)
    for _ in range(MOST_SESSIONS):
        client.cookie(LOOK)
    assert client.ask("/", cookie=first)[0] == 401


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "10.9.8.7", "fd00::7", "Desk.local"])
def test_a_browser_may_name_the_address_that_was_printed(host: str) -> None:
    named = f"[{host}]" if ":" in host else host
    access = Access(PORT, hosts_of(host, PORT), secure=False, may_act=False)
    access.check_origin("GET", {"host": f"{named}:{PORT}"})
    with pytest.raises(Refused, match="not the host that ringtmp serves"):
        access.check_origin("GET", {"host": f"evil.example:{PORT}"})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_page_is_served_on_one_named_address(host: str) -> None:
    with pytest.raises(UsageError, match="every address of this machine"):
        listening(Place(host))


# -- acting ---------------------------------------------------------------------------------------------------------------


def post(client: Client, path: str, role: str, body: bytes) -> int:
    return client.ask(path, "POST", body, origin=f"http://{HOST}", cookie=client.cookie(role))[0]


def test_who_may_look_may_want_detail_and_nothing_else(client: Client, tmp_path: Path) -> None:
    assert post(client, "/act", LOOK, b'{"run":0,"request":"stop"}') == 403
    assert post(client, "/detail", LOOK, b'{"run":0,"request":"stop"}') == 400
    assert not (tmp_path / "requests").exists()
    assert post(client, "/detail", LOOK, b'{"run":0,"request":"detail"}') == 202
    assert [each.name for each in (tmp_path / "requests").iterdir()] == ["detail"]


def test_who_may_act_leaves_a_wish_where_the_run_finds_it(client: Client, tmp_path: Path) -> None:
    for request in ("stop", "checkpoint", "release-2"):
        assert post(client, "/act", ACT, f'{{"run":0,"request":"{request}"}}'.encode()) == 202
    assert sorted(each.name for each in (tmp_path / "requests").iterdir()) == ["checkpoint", "release-2", "stop"]
    assert client.ask("/act", cookie=client.cookie(ACT))[0] == 405


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'{"run":1,"request":"stop"}', b'{"run":-1,"request":"stop"}', b'{"run":0,"request":"../../etc"}',
        b'{"run":0,"request":"detail"}', b'{"run":0}', b'{"run":0,"request":"release-../x"}', b" " * 5000,
    ],
)  # fmt: skip
def test_a_run_cannot_be_asked_for_anything_else(client: Client, tmp_path: Path, body: bytes) -> None:
    assert post(client, "/act", ACT, body) == 400
    assert not (tmp_path / "requests").exists()


def test_a_run_that_has_ended_cannot_be_asked(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"".join(encode(each) + b"\n" for each in known_events()))
    view = RunView(tmp_path)
    while view.look():
        pass
    client = Client(tmp_path)
    client.app = application(Board([view]), client.access)
    assert post(client, "/act", ACT, b'{"run":0,"request":"stop"}') == 409
    assert post(client, "/detail", LOOK, b'{"run":0,"request":"detail"}') == 200, (
        "no fault of a page that hears of it later"
    )
