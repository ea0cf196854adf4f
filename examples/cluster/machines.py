"""Three nodes of Timeball and three members of etcd on this machine, as processes with a folder each.

A node that ends, as by `kill -9`, is started again a moment later, as a supervisor on its machine would.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from examples.time_limits import limit_s

from timeball.model.errors import SetupError, Unavailable

CLUSTER, GROUP, NAMES = "demo", "g1", ("a", "b", "c")
# Option -> the port of the first node; the others' are 1,000 and 2,000 further.
PORTS = {
    "--port": 7400, "--http-port": 7480, "--name-server-port": 9876, "--remoting-port": 10911, "--grpc-port": 8081,
    "--replication-port": 7410,
}  # fmt: skip
ETCD_PORTS = ((2379, 2380), (3379, 3380), (4379, 4380))
ETCD_OPTIONS = [
    "--heartbeat-interval",
    "50",
    "--election-timeout",
    "500",
    "--log-level",
    "warn",
    "--logger",
    "zap",
]
START_S, STOP_S = 60.0, 15.0  # on an idle machine
T = TypeVar("T")

AGAIN_S = 3.0  # until a node that has ended is started again


@dataclass
class Machine:
    """One process, and how it is started."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    ended_s: float = 0.0

    def start(self) -> None:
        """Start it; its output goes to its log."""
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches this program alone, which stops the nodes before etcd.
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, start_new_session=True)

    @property
    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self.process is not None and self.process.poll() is None


@dataclass
class LocalCluster:
    """All processes. `ports`: by node and option; `endpoints`: of etcd's members."""

    folder: Path
    ports: dict[str, dict[str, int]]
    endpoints: list[str]
    etcd: list[Machine] = field(default_factory=list)
    nodes: dict[str, Machine] = field(default_factory=dict)

    def url(self, name: str, option: str, scheme: str = "http") -> str:
        """Return an address of a node."""
        return f"{scheme}://127.0.0.1:{self.ports[name][option]}"

    @property
    def endpoint(self) -> str:
        """Return the Flight addresses of all nodes."""
        return self._addresses("--port", "grpc")

    @property
    def http_endpoint(self) -> str:
        """Return the HTTP addresses of all nodes."""
        return self._addresses("--http-port", "http")

    def _addresses(self, option: str, scheme: str) -> str:
        addresses = ",".join(self.url(name, option, "").removeprefix("://") for name in NAMES)
        return f"{scheme}://{addresses}"

    def leader(self) -> str:
        """Return the node that says that it leads; empty when none does."""
        for name, node in self.nodes.items():
            if node.is_running and _answers(self.url(name, "--http-port") + f"/leader/{GROUP}"):
                return name
        return ""

    def wait_leader(self, other_than: str = "") -> str:
        """Wait for a leader; raises Unavailable."""
        return _wait(
            "no node leads", lambda: leader if (leader := self.leader()) not in ("", other_than) else ""
        )

    def kill(self, name: str) -> None:
        """End a node as a power cut would."""
        process = self.nodes[name].process
        assert process is not None
        process.kill()
        process.wait()

    def start_ended_again(self) -> list[str]:
        """Start nodes that ended some seconds ago; return their names."""
        started = []
        for name, node in self.nodes.items():
            if node.is_running:
                node.ended_s = 0.0
            elif not node.ended_s:
                node.ended_s = time.monotonic()
            elif time.monotonic() - node.ended_s > AGAIN_S:
                node.start()
                started.append(name)
        return started


@contextmanager
def local_cluster(
    folder: Path, *, any_ports: bool = False, options: Sequence[str] = ()
) -> Iterator[LocalCluster]:
    """Start all, make the group, and end all. Raises SetupError, Unavailable."""
    cluster = _planned(folder, any_ports=any_ports)
    for node in cluster.nodes.values():
        node.command += options
    try:
        for member in cluster.etcd:
            member.start()
        for member, endpoint in zip(cluster.etcd, cluster.endpoints, strict=True):
            _wait(f"etcd does not answer, see {member.log}", lambda at=endpoint: _answers(f"{at}/health"))  # type: ignore[misc]
        for node in cluster.nodes.values():
            node.start()
        _init(cluster)
        cluster.wait_leader()
        yield cluster
    finally:
        _stop(list(cluster.nodes.values()))
        _stop(cluster.etcd)


def _planned(folder: Path, *, any_ports: bool) -> LocalCluster:
    binary = os.environ.get("TIMEBALL_ETCD") or shutil.which("etcd")
    if binary is None:
        raise SetupError(
            "etcd is not installed: 'apt-get install etcd-server' on Debian and Ubuntu, or name its binary by "
            "TIMEBALL_ETCD"
        )
    free = iter(_free_ports(len(NAMES) * (len(PORTS) + 2)))
    ports = {
        name: {option: next(free) if any_ports else port + 1_000 * place for option, port in PORTS.items()}
        for place, name in enumerate(NAMES)
    }
    pairs = [(next(free), next(free)) if any_ports else pair for pair in ETCD_PORTS]
    cluster = LocalCluster(folder, ports, [f"http://127.0.0.1:{client}" for client, _ in pairs])
    for number, (_, peer) in enumerate(pairs):
        every = ",".join(f"etcd{each}=http://127.0.0.1:{port}" for each, (_, port) in enumerate(pairs))
        client, own = cluster.endpoints[number], f"http://127.0.0.1:{peer}"
        name = f"etcd{number}"
        command = [
            binary, "--name", name, "--data-dir", str(folder / name),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", own, "--initial-advertise-peer-urls", own, "--initial-cluster", every,
            *ETCD_OPTIONS,
        ]  # fmt: skip
        cluster.etcd.append(Machine(name, command, folder / f"{name}.log"))
    for name in NAMES:
        options = [str(part) for pair in ports[name].items() for part in pair]
        command = [sys.executable, "-m", "timeball", "serve", *_of_cluster(cluster), "--node", name, *options]
        command += ["--data", str(folder / name), "--log-level", "info"]
        cluster.nodes[name] = Machine(name, command, folder / f"{name}.log")
    return cluster


def _of_cluster(cluster: LocalCluster) -> list[str]:
    return ["--cluster", CLUSTER, "--group", GROUP, "--etcd", ",".join(cluster.endpoints)]


def _init(cluster: LocalCluster) -> None:
    """Make the group, unless the folder has one from before."""
    command = [sys.executable, "-m", "timeball", "cluster", "init", *_of_cluster(cluster)]
    ran = subprocess.run(
        [*command, "--nodes", ",".join(NAMES)],
        capture_output=True,
        text=True,
        timeout=limit_s(2 * START_S),
        check=False,
    )
    if ran.returncode and "has a record already" not in ran.stderr:
        raise Unavailable(f"{ran.stderr.strip()}; the logs are in {cluster.folder}")


def _stop(machines: Sequence[Machine]) -> None:
    """End processes in order, all at the same time; those that do not are killed."""
    running = [machine.process for machine in machines if machine.process is not None]
    for process in running:
        process.terminate()
    until_s = time.monotonic() + limit_s(STOP_S)
    for process in running:
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:  # no answer, or one that is no success
        return False


def _wait(what: str, condition: Callable[[], T]) -> T:
    until_s = time.monotonic() + limit_s(START_S)
    while time.monotonic() < until_s:
        if found := condition():
            return found
        time.sleep(0.05)
    raise Unavailable(what)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
