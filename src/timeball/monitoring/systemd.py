"""Notifications to systemd about the broker's state: ready, alive, stopping (sd_notify(3)).

Each is one datagram to the socket named by NOTIFY_SOCKET. Without this variable nothing is sent. This module needs no
package: the existing ones bind libsystemd, which requires a compiler and its headers, or had no release for years.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger(__name__)

STATE_S = 1.0  # to wait for a systemd that does not read: a lost READY=1 would be a start that never ends


class Systemd:
    """Notifies the service manager of this process, if there is one. The environment is read once."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        # A leading @ means an abstract address, which begins with a zero byte and is no file.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_s = _watchdog_s(environment) if path else 0.0

    def status(self, text: str) -> None:
        """Show `text` in `systemctl status`."""
        self._tell(f"STATUS={text}")

    def ready(self, text: str) -> None:
        """Announce that the broker accepts messages from now on."""
        self._tell(f"READY=1\nSTATUS={text}")

    def stopping(self) -> None:
        """Announce that the broker saves its data and ends."""
        self._tell("STOPPING=1\nSTATUS=stopping: what was accepted is written")

    async def run_watchdog(self) -> None:
        """Announce that the event loop runs, twice per period of the watchdog, until cancelled."""
        while self.watchdog_s:
            self._tell("WATCHDOG=1", wait_s=0.0)
            await asyncio.sleep(self.watchdog_s / 2)

    def _tell(self, text: str, wait_s: float = STATE_S) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(wait_s)
                sender.sendto(text.encode(), self._address)
        except OSError as error:
            # The broker also works if systemd does not receive this. After a missed WATCHDOG=1 it gets the next one.
            logger.warning("systemd not told text=%s error=%s", text.partition("\n")[0], error)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Read the time after which systemd ends a silent service. 0 if it watches no process, or another one."""
    microseconds, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(microseconds) / 1e6
