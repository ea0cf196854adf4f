"""The event loop of the processes that serve."""

from __future__ import annotations

import asyncio

import uvloop

from timeball.cli import serve


async def _own() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_the_loop_is_uvloops_and_ends_with_the_runner() -> None:
    with serve.runner() as runner:
        loop = runner.run(_own())
        assert isinstance(loop, uvloop.Loop) and not loop.is_closed()
    assert loop.is_closed()
    assert not isinstance(asyncio.run(_own()), uvloop.Loop)
