"""SIGTERM and SIGINT as a future: with these signals, supervisors, systemd and terminals ask a process to end."""

from __future__ import annotations

import asyncio
import signal


def stop_asked() -> asyncio.Future[None]:
    """Return a future of the running loop that is done when the next SIGTERM or SIGINT arrives."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[None] = loop.create_future()

    def ask() -> None:
        if not asked.done():
            asked.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    return asked
