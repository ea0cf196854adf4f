"""SIGTERM and SIGINT as a future: with these signals, supervisors, systemd and terminals ask a process to end."""

from __future__ import annotations

import asyncio
import signal


def watch_stop_signals() -> asyncio.Future[None]:
    """Install handlers for SIGTERM and SIGINT. The returned future is done when the next of them arrives."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if not stop.done():
            stop.set_result(None)

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, on_signal)
    return stop
