"""The event loop of the server processes: uvloop's, which is built on libuv (docs/decisions/0076-uvloop.md).

Only the server commands use uvloop. No other code depends on the kind of loop: tests and client commands use asyncio's.
"""

from __future__ import annotations

import asyncio


def runner() -> asyncio.Runner:
    """Create a runner that runs a coroutine on a uvloop event loop."""
    import uvloop  # imported here: client commands are installed without uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
