"""`timeball serve --group g1,g2` as a process, for tests."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
from tests.bounds import BOUND_S
from tests.cli.in_process import run_here
from tests.ports import free_ports

from timeball.cli.serve import PORTS, PORTS_APART

T = TypeVar("T")
CLUSTER = "c"
EDGES = [name.replace("_", "-") for name in PORTS]


def blocks_of_ports(nodes: int, groups: int) -> list[dict[str, int]]:
    """Find ports for each node, so that the ports of its other groups are free at this time, too."""
    edges = [*EDGES, "name-server-port"]
    while True:
        ports = free_ports(len(edges) * nodes)
        all_ports = {port + index * PORTS_APART for port in ports for index in range(groups)}
        if len(all_ports) == len(ports) * groups and all(map(is_free, all_ports)):
            starts = range(0, len(ports), len(edges))
            return [dict(zip(edges, ports[at : at + len(edges)], strict=True)) for at in starts]


def is_free(port: int) -> bool:
    """Check whether no process listens on a port."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Supervised:
    """`timeball serve` with several groups, as a process. It starts with this object."""

    def __init__(
        self, folder: Path, etcd: list[str], ports: dict[str, int], *, node: str = "a", groups: str = "g1,g2"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self.ports = folder / "log", ports
        options = [word for name, port in ports.items() for word in (f"--{name}", str(port))]
        self.etcd = ",".join(etcd)
        command = [sys.executable, "-m", "timeball", "serve", "--json", "--cluster", CLUSTER, "--node", node]
        command += ["--group", groups, "--etcd", self.etcd, "--data", str(folder / "data"), *options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def events(self, **fields: object) -> list[dict[str, Any]]:
        """Return the lines that have these fields."""
        lines = [line for line in self.text.splitlines() if line.startswith('{"event"')]
        return [event for line in lines if (event := json.loads(line)).items() >= fields.items()]

    @property
    def text(self) -> str:
        return self._log.read_text()

    def wait(self, found: Callable[[], T]) -> T:
        """Wait until `found` returns something, and return it. Fails if the process ends or the time is over."""
        until_s = time.monotonic() + BOUND_S
        while not (value := found()):
            assert self.process.poll() is None and time.monotonic() < until_s, self.text
            time.sleep(0.05)
        return value

    def end(self) -> int:
        """End the supervisor and its processes by SIGTERM, and return its exit code. Kills it if it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the supervisor and its processes, which ends them as a power cut would."""
        processes = [
            *psutil.Process(self.process.pid).children(recursive=True),
            psutil.Process(self.process.pid),
        ]
        for process in processes:
            process.kill()
        self.process.wait(BOUND_S)


def run_cluster(etcd: list[str], *words: str) -> str:
    """Run a command of `timeball cluster`, and return its output."""
    result = run_here("cluster", words[0], "--cluster", CLUSTER, "--etcd", ",".join(etcd), *words[1:])
    assert result.returncode == 0, result.stderr
    return result.stdout
