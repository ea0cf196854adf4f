"""Redis, beanstalkd and NATS, which are compared at the consumer (delivery.py). They speak no wire of RocketMQ.

Each is started with settings under which an answer means that the message is on the disk. NATS is also started with its
default settings, which sync every two minutes: its column says that it is not durable then.
"""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import psutil
from tests.interop.environments import tool

from benchmarks.versus.peers import DELIVERY, Peer

START_S = 20.0
HOST = "127.0.0.1"


class OtherPeer(Peer):
    """A broker of one process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._port = _free_port()
        self.addresses = {DELIVERY: f"{HOST}:{self._port}"}
        self.data.mkdir(parents=True, exist_ok=True)

    @property
    def data(self) -> Path:
        """See Peer."""
        return self.folder / "data"

    def start(self) -> None:
        """See Peer."""
        with (self.folder / "out").open("ab") as out:
            self._process = subprocess.Popen(
                self._command(), stdout=out, stderr=subprocess.STDOUT, cwd=self.data
            )
        give_up = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((HOST, self._port), timeout=1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"{self.name} does not start: see {self.folder}/out") from None
                time.sleep(0.05)

    def stop(self) -> None:
        """See Peer."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """See Peer."""
        self.stop()

    def processes(self) -> list[psutil.Process]:
        """See Peer."""
        return [] if self._process is None else [psutil.Process(self._process.pid)]

    def _command(self) -> list[str]:
        raise NotImplementedError


class RedisPeer(OtherPeer):
    """`redis-server` with an append-only file that is synced for each command."""

    name = "Redis"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.settings = (
            "Redis, `appendfsync always`, no snapshots; a sorted set, a Lua script and a processing set"
        )

    def _command(self) -> list[str]:
        return [
            tool("redis-server", "redis-server"), "--port", str(self._port), "--bind", HOST, "--dir", str(self.data),
            "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--daemonize", "no",
        ]  # fmt: skip


class BeanstalkdPeer(OtherPeer):
    """`beanstalkd` with a binlog that is synced for each write."""

    name = "beanstalkd"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.settings = "beanstalkd, `-f0`; delays in whole seconds, rounded up"

    def _command(self) -> list[str]:
        return [
            tool("beanstalkd", "beanstalkd"),
            "-l",
            HOST,
            "-p",
            str(self._port),
            "-b",
            str(self.data),
            "-f0",
        ]


class NatsPeer(OtherPeer):
    """`nats-server` with JetStream and scheduled messages."""

    name = "NATS"

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        super().__init__(folder)
        self.name = "NATS" if durable else "NATS, default sync"
        sync = "`sync_interval: always`" if durable else "`sync_interval` of 2 minutes"
        self.settings = f"NATS JetStream, {sync}, a stream with `allow_msg_schedules`"
        how = "always" if durable else '"2m"'
        (self.folder / "nats.conf").write_text(
            f'listen: {HOST}:{self._port}\njetstream {{ store_dir: "{self.data}", sync_interval: {how} }}\n'
        )

    def _command(self) -> list[str]:
        return [tool("nats-server", "nats-server"), "-c", str(self.folder / "nats.conf")]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port
