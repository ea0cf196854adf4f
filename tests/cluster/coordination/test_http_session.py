"""Answers over HTTP within a size limit, and the figures of a session."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from timeball import __version__
from timeball.cluster.coordination.etcd import open_session, read_bounded


class TooLong(Exception):
    """The refusal of these tests."""


def query(bytes_max: int, size: int) -> tuple[bytes, str]:
    """Query a server that answers with so many bytes. Return its answer and the request."""

    async def check() -> tuple[bytes, str]:
        agents = []

        async def answer(request: web.Request) -> web.Response:
            agents.append(request.headers["user-agent"])
            return web.Response(body=b"x" * size)

        application = web.Application()
        application.router.add_get("/", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            async with open_session(None) as session, session.get(url) as response:
                return await read_bounded(response, bytes_max, TooLong), agents[0]
        finally:
            await runner.cleanup()

    return asyncio.run(check())


def test_an_answer_within_the_bound_is_read() -> None:
    assert query(10_000, 10_000) == (b"x" * 10_000, f"timeball/{__version__}")


def test_an_answer_above_the_bound_is_refused() -> None:
    with pytest.raises(TooLong, match="more than 9999 bytes"):
        query(9_999, 10_000)
