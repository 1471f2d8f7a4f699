"""Who may look and who may act: two secrets in printed addresses, exchanged for a cookie; Host and Origin; what a page may do.

Every request comes through here first, whatever its method and path, the stream included. A page of another origin cannot
send our cookie (SameSite=Strict), cannot pass for us (Origin, Sec-Fetch-Site), and a name that was made to point here is
not ours (Host).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOK, ACT = "look", "act"
#: Cookies given out; the oldest goes first.
MOST_SESSIONS = 2000
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_NO_COOKIE = "This page is private. Open the address that ringtmp printed when it started; it has a token at its end.\n"
#: A redirect would be asked for as another site's where the address was followed from one, and so without the cookie.
_WELCOME = (
    b'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/"><link rel="icon" href="data:,">'
    b"<title>RingTMP</title>\n"
)


class Refused(Exception):  # noqa: N818
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Access:
    """`may_act`: whether there is a secret to act at all."""

    def __init__(self, port: int, hosts: frozenset[str], secure: bool, may_act: bool) -> None:
        self.secrets = {LOOK: secrets.token_urlsafe(24)}
        if may_act:
            self.secrets[ACT] = secrets.token_urlsafe(24)
        self._port = port
        self._hosts = hosts
        self._secure = secure
        self._cookie = f"ringtmp-{port}"  # cookies do not tell ports of a host apart
        self._sessions: dict[str, str] = {}  # digest of a cookie -> what it allows

    def role_for(self, token: str) -> str | None:
        """What a secret allows."""
        given = token.encode("utf-8", "replace")
        found = [role for role, secret in self.secrets.items() if hmac.compare_digest(secret.encode(), given)]
        return found[0] if found else None

    def new_session(self, role: str) -> str:
        """The Set-Cookie header."""
        value = secrets.token_urlsafe(24)
        self._sessions[_digest(value)] = role
        while len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        secure = "; Secure" if self._secure else ""
        return f"{self._cookie}={value}; Path=/; HttpOnly; SameSite=Strict{secure}"

    def check_origin(self, method: str, headers: dict[str, str]) -> None:
        """Refused unless it was sent to us, by a page of ours or by no page at all."""
        if headers.get("host", "").lower() not in self._hosts:
            raise Refused(403, "This is not the host that ringtmp serves.\n")
        scheme = "https" if self._secure else "http"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"{scheme}://{host}" for host in self._hosts}:
            raise Refused(403, "Another site's page may not ask for this.\n")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and (
            headers.get("sec-fetch-mode") != "navigate" or method != "GET"
        ):
            raise Refused(403, "Another site's page may not ask for this.\n")
        if method not in ("GET", "HEAD") and origin is None:
            raise Refused(403, "Only the page itself may act: the request names no origin.\n")

    def role_of(self, headers: dict[str, str]) -> str:
        """Of the cookie, or Refused."""
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            morsel = None
        role = self._sessions.get(_digest(morsel.value)) if morsel is not None else None
        if role is None:
            raise Refused(401, _NO_COOKIE)
        return role


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()


class Guard:
    """Stands before the app. `scope["role"]` says behind it what the viewer may do."""

    def __init__(self, app: App, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        try:
            self._access.check_origin(scope["method"], headers)
            if (token := _token(scope)) is not None:
                await self._welcome(token, scope["method"], send)
                return
            scope["role"] = self._access.role_of(headers)
        except Refused as no:
            await _answer(send, no.status, no.text.encode(), [(b"content-type", b"text/plain; charset=utf-8")])
            return
        await self._app(scope, receive, _with_headers(send))

    async def _welcome(self, token: str, method: str, send: Send) -> None:
        role = self._access.role_for(token)
        if role is None or method != "GET":
            raise Refused(401, "The token in this address is not the one that ringtmp printed.\n")
        cookie = self._access.new_session(role).encode()
        await _answer(send, 200, _WELCOME, [(b"content-type", b"text/html; charset=utf-8"), (b"set-cookie", cookie)])


def _token(scope: Scope) -> str | None:
    """Only the front page takes one."""
    query: bytes = scope["query_string"]
    if scope["path"] != "/" or b"token=" not in query:
        return None
    return parse_qs(query.decode("latin-1")).get("token", [""])[0]


def _with_headers(send: Send) -> Send:
    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *_headers()]
        await send(message)

    return sent


def _headers() -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in HEADERS.items()]


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length, *_headers()]})
    await send({"type": "http.response.body", "body": body})
