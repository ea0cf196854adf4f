"""The event loop of the processes that serve: libuv's, by uvloop (docs/decisions/0076-uvloop.md).

Nothing below the commands knows which loop it runs on: tests use asyncio's own, and so do the commands that only ask.
"""

from __future__ import annotations

import asyncio


def runner() -> asyncio.Runner:
    """Return what runs a coroutine on this loop."""
    import uvloop  # here, as commands that only ask a broker are installed without it

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
