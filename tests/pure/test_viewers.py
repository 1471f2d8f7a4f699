"""Those who look on: whoever does not read is left behind and costs nothing; whoever reads gets everything in order."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("starlette")

from ringtmp.dashboard.viewers import PIECE_BYTES, QUEUE, Viewers, event


async def some(stream: object, count: int) -> list[bytes]:
    return [await anext(stream) for _ in range(count)]  # type: ignore[call-overload]


def test_fifty_that_never_read_hold_a_queue_each_and_begin_again_with_the_whole() -> None:
    async def looked_on() -> None:
        made = 0

        def everything() -> list[bytes]:
            nonlocal made
            made += 1
            return [event("news", b"whole")]

        viewers = Viewers(everything)
        streams = [viewers.stream() for _ in range(50)]
        for each in streams:
            await some(each, 2)  # the first word and the whole; then never again
        for number in range(1000):
            viewers.tell(event("news", str(number).encode()))
        assert max(viewer.queue.qsize() for viewer in viewers._viewers) <= QUEUE
        told = await some(streams[0], 1)
        assert told == [event("news", b"whole")], "what it missed is in the whole"
        viewers.tell(event("news", b"1000"))
        assert await some(streams[0], 1) == [event("news", b"1000")]
        for each in streams:
            await each.aclose()  # type: ignore[attr-defined]
        assert len(viewers) == 0
        assert made == 51

    asyncio.run(looked_on())


def test_one_that_reads_gets_every_piece_of_news_in_order_and_a_large_whole_in_pieces() -> None:
    async def looked_on() -> None:
        whole = b"x" * (3 * PIECE_BYTES + 5)
        viewers = Viewers(lambda: [whole])
        stream = viewers.stream()
        assert b"".join(await some(stream, 5)).endswith(whole)
        for number in range(QUEUE):
            viewers.tell(event("news", str(number).encode()))
        expected = [event("news", str(number).encode()) for number in range(QUEUE)]
        assert await some(stream, QUEUE) == expected
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(looked_on())
