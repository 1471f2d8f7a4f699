"""The pages' server: static files of this package, a stream of news, a step in detail. It reads run directories.

A process of its own: whatever browsers do, training does not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import resources

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ringtmp.dashboard.access import ACT, Access, App, Guard
from ringtmp.dashboard.run_view import RunView
from ringtmp.dashboard.step_detail import detail_of
from ringtmp.dashboard.viewers import Viewers, event
from ringtmp.report import theme
from ringtmp.runtime import stop_and_checkpoint_requests

#: Between two looks at the files, while somebody watches and while nobody does.
LOOK_S, UNWATCHED_S = 0.5, 2.0
#: With many viewers news come less often: each costs something.
MANY_VIEWERS, MANY_LOOK_S = 8, 1.0


class Hello(msgspec.Struct, frozen=True):
    """What the page is told first."""

    runs: int
    may_act: bool


class Wish(msgspec.Struct, frozen=True):
    """What a viewer asks of a run."""

    run: int
    request: str


MOST_WISH_BYTES = 200
_wish = msgspec.json.Decoder(Wish)


class Board:
    """All runs on one page, and who looks at it."""

    def __init__(self, views: Sequence[RunView]) -> None:
        self.views = views
        self.viewers = Viewers(self._everything)
        self._lock = threading.Lock()  # a look and the making of everything are in threads
        self._whole: list[bytes] | None = None

    def say_goodbye(self) -> None:
        """The server ends with the run: no need to come again."""
        self.viewers.tell(event("over", b"{}"))

    def _everything(self) -> list[bytes]:
        with self._lock:
            if self._whole is None:
                self._whole = [event("news", msgspec.json.encode(each.everything())) for each in self.views]
            return self._whole

    def look(self) -> tuple[bool, list[bytes]]:
        """Whether there is more to read at once, and the news."""
        with self._lock:
            more = max([each.look() for each in self.views])
            if not len(self.viewers):  # who comes later gets everything
                self._whole = None
                return more, []
            made = [news for each in self.views if (news := each.news()) is not None]
            if made:
                self._whole = None
            return more, [event("news", msgspec.json.encode(each)) for each in made]

    async def follow(self) -> None:
        """For ever."""
        while True:
            more, news = await asyncio.to_thread(self.look)
            for each in news:
                self.viewers.tell(each)
            watched = len(self.viewers)
            pause = UNWATCHED_S if not watched else LOOK_S if watched <= MANY_VIEWERS else MANY_LOOK_S
            await asyncio.sleep(0.01 if more else pause)


class _Pages:
    """What can be asked of the server."""

    def __init__(self, board: Board) -> None:
        self._board = board

    async def front(self, _: Request) -> Response:
        return _file("index.html")

    async def static(self, request: Request) -> Response:
        return _file(request.path_params["name"])

    async def colours(self, _: Request) -> Response:
        night = f"@media (prefers-color-scheme: dark) {{ :root {{ {theme.variables(True)} }} }}"
        return Response(f":root {{ {theme.variables(False)} }}\n{night}\n", media_type="text/css")

    async def stream(self, request: Request) -> Response:
        board = self._board
        if board.viewers.full:
            return PlainTextResponse("Too many viewers.\n", 503)
        hello = event("hello", msgspec.json.encode(Hello(len(board.views), request.scope["role"] == ACT)))

        async def everything() -> AsyncIterator[bytes]:
            yield hello
            async for message in board.viewers.stream():
                yield message

        return StreamingResponse(everything(), media_type="text/event-stream")

    async def step(self, request: Request) -> Response:
        try:
            run, number = int(request.query_params["run"]), int(request.query_params["step"])
            if run < 0:
                raise IndexError
            view = self._board.views[run]
        except (KeyError, ValueError, IndexError):
            return PlainTextResponse("There is no such run or step.\n", 404)
        found = await asyncio.to_thread(detail_of, view.follower, number)
        if found is None:
            return PlainTextResponse("That step was not recorded in full.\n", 404)
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def act(self, request: Request) -> Response:
        if request.scope["role"] != ACT:
            return PlainTextResponse("With this address you may look, not act.\n", 403)
        return await _ask(self._board, request, lambda wish: wish != stop_and_checkpoint_requests.DETAIL)

    async def detail(self, request: Request) -> Response:
        return await _ask(self._board, request, lambda wish: wish == stop_and_checkpoint_requests.DETAIL)


def application(board: Board, access: Access) -> App:
    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(board.follow())
        try:
            yield
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    pages = _Pages(board)
    routes = [
        Route("/", pages.front),
        Route("/colours.css", pages.colours),
        Route("/stream", pages.stream),
        Route("/step", pages.step),
        Route("/act", pages.act, methods=["POST"]),
        Route("/detail", pages.detail, methods=["POST"]),
        Route("/static/{name:path}", pages.static),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), access)


async def _ask(board: Board, request: Request, allowed: Callable[[str], bool]) -> Response:
    """Leaves the wish in the run's directory, where the run finds it."""
    try:
        body = b""
        async for some in request.stream():
            body += some
            if len(body) > MOST_WISH_BYTES:
                raise ValueError
        wish = _wish.decode(body)
        if wish.run < 0 or not allowed(wish.request):
            raise ValueError
        view = board.views[wish.run]
        if view.over:  # a page may ask for detail until it hears of the end
            return PlainTextResponse(
                "The run has ended.\n", 200 if wish.request == stop_and_checkpoint_requests.DETAIL else 409
            )
        stop_and_checkpoint_requests.ask(view.path, wish.request)
    except (ValueError, msgspec.DecodeError, IndexError):
        return PlainTextResponse("A run cannot be asked for that.\n", 400)
    except OSError as error:
        return PlainTextResponse(f"The run's directory cannot be written: {error.strerror}.\n", 409)
    return PlainTextResponse("Asked.\n", 202)


def _file(name: str) -> Response:
    """One of this package's own, by its name in `static/`; nothing else can be asked for."""
    folder = resources.files("ringtmp.dashboard").joinpath("static")
    known = {f"{prefix}{each.name}": each for prefix, place in (("", folder), ("uplot/", folder.joinpath("uplot")))
             for each in place.iterdir() if each.is_file()}  # fmt: skip
    if name not in known:
        return PlainTextResponse("There is no such file.\n", 404)
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return Response(known[name].read_bytes(), media_type="text/javascript" if kind.endswith("javascript") else kind)
