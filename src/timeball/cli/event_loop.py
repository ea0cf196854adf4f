"""The event loop of the server processes: uvloop's, which is built on libuv (docs/decisions/0076-uvloop.md).

No code below the commands depends on the kind of loop. Tests use asyncio's own loop, and so do the client commands.
"""

from __future__ import annotations

import asyncio


def runner() -> asyncio.Runner:
    """Create a runner that executes a coroutine on a loop of uvloop."""
    import uvloop  # imported here: client commands are installed without uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
