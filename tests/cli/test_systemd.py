"""The notifications to systemd, received by a datagram socket in its place, also those of a real `timeball serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cli.processes import running

from timeball.cli.serve import Systemd


@contextmanager
def listener(address: str) -> Iterator[socket.socket]:
    """Yield a socket at systemd's address, which receives the notifications."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + address[1:] if address.startswith("@") else address)
        receiver.settimeout(BOUND_S)
        yield receiver


def fields(receiver: socket.socket) -> dict[str, str]:
    """Return the next datagram's variables."""
    return dict(line.split("=", 1) for line in receiver.recv(4_096).decode().splitlines())


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of systemd's socket: a path, or a name in the abstract namespace."""
    return str(tmp_path / "notify") if request.param == "path" else f"@timeball-{uuid.uuid4()}"


def test_each_state_is_notified(address: str) -> None:
    with listener(address) as receiver:
        systemd = Systemd({"NOTIFY_SOCKET": address})
        systemd.status("recovering")
        systemd.ready("serves")
        systemd.stopping()
        assert fields(receiver) == {"STATUS": "recovering"}
        assert fields(receiver) == {"READY": "1", "STATUS": "serves"}
        assert fields(receiver)["STOPPING"] == "1"


def test_the_watchdog_notifies_repeatedly_until_cancelled(address: str) -> None:
    with listener(address) as receiver:
        systemd = Systemd(
            {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())}
        )
        assert systemd.watchdog_s == 0.002

        async def main() -> None:
            watchdog = asyncio.create_task(systemd.run_watchdog())
            for _ in range(3):
                notification = await asyncio.to_thread(fields, receiver)
                assert notification == {"WATCHDOG": "1"}
            watchdog.cancel()

        asyncio.run(main())


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "1000000"},
        {"NOTIFY_SOCKET": "/nowhere"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"},
    ],
)
def test_without_a_watchdog_no_notification_is_sent(environment: dict[str, str]) -> None:
    systemd = Systemd(environment)
    assert systemd.watchdog_s == 0
    asyncio.run(systemd.run_watchdog())  # ends at once


def test_an_error_of_the_notification_socket_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Systemd({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("serves")
        Systemd({}).ready("serves")
    (line,) = caplog.messages
    assert line.startswith("systemd not told text=READY=1 error=")


def test_a_watchdog_notification_is_dropped_at_once_if_the_queue_is_full(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with listener(address) as receiver:
        systemd = Systemd({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
        receiver.setblocking(False)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
            filler.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    filler.sendto(b"X=1", address)
        systemd._notify("WATCHDOG=1", wait_s=0.0)
        with pytest.raises(BlockingIOError):
            while True:
                assert receiver.recv(4_096) == b"X=1"


def test_a_broker_notifies_ready_watchdog_and_stopping_in_this_order(tmp_path: Path) -> None:
    """READY=1 comes when a client can connect, WATCHDOG=1 after it, STOPPING=1 with the signal."""
    address, data = str(tmp_path / "notify"), str(tmp_path / "data")
    with listener(address) as receiver:
        variables = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000"}
        with running("serve", "--json", "--port", "0", "--data", data, **variables) as server:
            assert fields(receiver)["STATUS"].startswith("recovering")
            notification = fields(receiver)
            assert notification["READY"] == "1"
            endpoint = notification["STATUS"].removeprefix("serves grpc://")
            host, _, port = endpoint.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=BOUND_S):
                pass
            assert [fields(receiver) for _ in range(3)] == [{"WATCHDOG": "1"}] * 3
            assert server.end(signal.SIGTERM) == 0
        notification = {"WATCHDOG": "1"}
        while notification == {"WATCHDOG": "1"}:
            notification = fields(receiver)
        assert notification["STOPPING"] == "1"
