"""A broker that is measured: it is started in a folder of its own, it names the wires it speaks, its processes can be
read, and it is ended whatever happens.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import psutil

from benchmarks.harness import Server
from timeball import __version__

Flush = Literal["sync", "async"]
REMOTING, GRPC, NAME_SERVER = "remoting", "grpc", "name server"
HTTP, PYTHON = "http", "python"
DELIVERY = "delivery"  # the wire of another broker's client in delayed_queues.py


class Peer(ABC):
    """One broker. After `kill` and `start` it goes on with the same data; addresses may differ then."""

    name: str
    settings: str  # how it was started, for the page

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses: Mapping[str, str] = {}  # wire -> host:port

    @abstractmethod
    def start(self) -> None:
        """Start it, and wait until it answers."""

    @abstractmethod
    def stop(self) -> None:
        """End all its processes at once: its data goes away. Called again, this does nothing."""

    @abstractmethod
    def kill(self) -> None:
        """Kill -9 the broker: nothing is flushed. `start` follows."""

    @property
    @abstractmethod
    def data(self) -> Path:
        """The folder in which it keeps messages."""

    @abstractmethod
    def processes(self) -> list[psutil.Process]:
        """Return the broker's process and its children."""

    def cpu_s(self) -> float:
        """Return the CPU time used so far, user and system, by all processes of the broker."""
        # The clock of a process, to the nanosecond; what /proc counts are ticks of 10 ms.
        return sum((time.clock_gettime((~process.pid << 3) | 2) for process in self.processes()), 0.0)

    def rss_mb(self) -> float:
        """Return the resident memory, pages of mapped files included."""
        return sum(process.memory_info().rss for process in self.processes()) / 2**20

    def anonymous_mb(self) -> float:
        """Return the resident memory without mapped files, whose pages the kernel takes back when it needs them."""
        infos = [process.memory_info() for process in self.processes()]
        return sum(info.rss - info.shared for info in infos) / 2**20

    def disk_mb(self) -> float:
        """Return the blocks that the data folder's files have on the disk."""
        files = [path for path in self.data.rglob("*") if path.is_file()]
        return sum(path.stat().st_blocks * 512 for path in files) / 2**20


class TimeballPeer(Peer):
    """`timeball serve` of this checkout."""

    name = "Timeball"

    def __init__(self, folder: Path, flush: Flush) -> None:
        super().__init__(folder)
        self._flush = flush
        self._server: Server | None = None
        self.settings = f"Timeball {__version__}, `--durability {flush}`"

    @property
    def data(self) -> Path:
        """See Peer."""
        return self.folder / "data"

    def start(self) -> None:
        """See Peer."""
        self._server = Server(self.data, "--durability", self._flush)
        server = self._server
        self.addresses = {
            REMOTING: server.remoting, GRPC: server.grpc, NAME_SERVER: server.name_server, HTTP: server.http,
            PYTHON: f"http://{server.http}",
        }  # fmt: skip

    def stop(self) -> None:
        """See Peer."""
        self.kill()

    def kill(self) -> None:
        """See Peer."""
        server, self._server = self._server, None
        if server is not None:
            server.kill()

    def processes(self) -> list[psutil.Process]:
        """See Peer."""
        if self._server is None:
            return []
        return [self._server.process, *self._server.process.children(recursive=True)]
