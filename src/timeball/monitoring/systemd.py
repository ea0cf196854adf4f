"""Notifications to systemd about the broker's state: ready, alive, stopping (sd_notify(3)).

Each notification is a datagram to the socket named by NOTIFY_SOCKET. Without this variable nothing is sent. No package
is used: the existing ones bind libsystemd, which requires a compiler and its headers, or had no release for years.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger(__name__)

# How long to wait for a systemd that does not read its socket. After a lost READY=1 the service would never count as
# started.
NOTIFY_TIMEOUT_S = 1.0


class Systemd:
    """Notifies the service manager of this process, if there is one. The environment is read once."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # A leading @ means an address in the abstract namespace, which begins with a zero byte.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_s = _watchdog_s(environment) if path else 0.0

    def status(self, text: str) -> None:
        """Show `text` in `systemctl status`."""
        self._notify(f"STATUS={text}")

    def ready(self, text: str) -> None:
        """Announce that the broker accepts messages from now on."""
        self._notify(f"READY=1\nSTATUS={text}")

    def stopping(self) -> None:
        """Announce that the broker saves its data and ends."""
        self._notify("STOPPING=1\nSTATUS=stopping: what was accepted is written")

    async def run_watchdog(self) -> None:
        """Announce that the event loop is alive, twice per watchdog period, until cancelled."""
        while self.watchdog_s:
            self._notify("WATCHDOG=1", wait_s=0.0)
            await asyncio.sleep(self.watchdog_s / 2)

    def _notify(self, text: str, wait_s: float = NOTIFY_TIMEOUT_S) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(wait_s)
                sender.sendto(text.encode(), self._address)
        except OSError as error:
            # The broker works without systemd. A missed WATCHDOG=1 is followed by the next one.
            logger.warning("systemd not told text=%s error=%s", text.partition("\n")[0], error)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Read the time after which systemd kills a silent service, in seconds. 0 if it does not watch this process."""
    microseconds, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(microseconds) / 1e6
