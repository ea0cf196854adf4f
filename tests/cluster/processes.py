"""Three real nodes of a cluster on this machine's loopback, with three members of etcd. Tests start and kill them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import EtcdCluster
from tests.cluster.namespaces import ETCD, Network
from tests.ports import free_ports

from timeball import Timeball
from timeball.cluster.coordination.coordinator import Coordinator, GroupView
from timeball.cluster.coordination.etcd import EtcdAccess, EtcdStore
from timeball.cluster.protocol.replica import Record, node_of
from timeball.io.clock import SystemClock

CLUSTER, GROUP = "tests", "g1"
EDGES = ("port", "http-port", "name-server-port", "remoting-port", "grpc-port", "replication-port")


def client_of(nodes: Iterable[NodeProcess], **options: Any) -> Timeball:
    """Return a client that may ask any of these nodes, over HTTP and Flight."""
    nodes = list(nodes)
    http, flight = (
        ",".join(f"{node.host}:{node.ports[edge]}" for node in nodes) for edge in ("http-port", "port")
    )
    return Timeball(f"http://{http}", flight=f"grpc://{flight}", **options)


def pulled_ids(nodes: Iterable[NodeProcess], topic: str, count: int) -> list[str | None]:
    """Pull messages of a topic and return their ids, until `count` or more have come and no more do.

    Returns fewer when the bound of time is over: messages are lost then.
    """
    ids, until_s = list[str | None](), time.monotonic() + BOUND_S
    with client_of(nodes) as ball:
        while time.monotonic() < until_s:
            messages = ball.pull(topic, "readers", wait="1s" if len(ids) < count else "200ms")
            if not messages and len(ids) >= count:
                break
            ids += [message.id for message in messages]
            ball.ack(messages)
    return ids


@dataclass
class NodeProcess:
    """One node. It keeps its ports and its folder over restarts."""

    name: str
    folder: Path
    etcd: list[str]
    options: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    group: str = GROUP
    module: str = "timeball"  # another one is `timeball` with a fault made on purpose
    environment: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    within: list[str] = field(default_factory=list)  # the command that runs it in a namespace (namespaces.py)

    def __post_init__(self) -> None:
        self.ports = self.ports or dict(zip(EDGES, free_ports(len(EDGES)), strict=True))

    @property
    def data(self) -> Path:
        return self.folder / self.name

    @property
    def stalled(self) -> Path:
        """While this file exists, the disk does not answer (stalled.py)."""
        return self.folder / f"{self.name}.stalled"

    @property
    def full(self) -> Path:
        """While this file exists, the disk is full (full.py)."""
        return self.folder / f"{self.name}.full"

    @property
    def endpoint(self) -> str:
        return f"grpc://{self.host}:{self.ports['port']}"

    def client(self, **options: Any) -> Timeball:
        """A client of this node."""
        return client_of([self], **options)

    def start(self) -> None:
        """Start the process without waiting for it. Its output is appended to a file, which `text` reads."""
        assert self.process is None
        command = [*self.within, sys.executable, "-m", self.module, "serve", "--json", "--log-level", "info"]
        command += [
            "--cluster",
            CLUSTER,
            "--node",
            self.name,
            "--group",
            self.group,
            "--etcd",
            ",".join(self.etcd),
        ]
        command += ["--data", str(self.data), "--segment-bytes", "8MiB"]
        for name, value in [*self.options.items(), *self.ports.items()]:
            command += [f"--{name}", str(value)]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.environment}
            )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal. After SIGKILL and SIGTERM, wait for the end of the process."""
        assert self.process is not None
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(BOUND_S)
            self.process = None

    def wipe(self) -> None:
        """Delete the data folder of the node, which must not run."""
        assert self.process is None
        shutil.rmtree(self.data)

    @property
    def text(self) -> str:
        return (self.folder / f"{self.name}.log").read_text()

    def events(self) -> list[dict[str, object]]:
        """Read the events that the node has printed in all its runs."""
        return [json.loads(line) for line in self.text.splitlines() if line.startswith('{"event"')]


@dataclass
class Cluster:
    """All nodes of a group, and the coordinator as the tests ask it."""

    folder: Path
    etcd: EtcdCluster
    nodes: dict[str, NodeProcess] = field(default_factory=dict)
    group: str = GROUP

    def ask(self, call: str, *args: object) -> object:
        """Call one method of Coordinator, and return its result."""

        async def connect_and_call() -> object:
            store = EtcdStore(EtcdAccess(self.etcd.endpoints), ttl_ms=20_000)
            coordinator = Coordinator(store, SystemClock(), cluster=CLUSTER, node="tests")
            try:
                return await getattr(coordinator, call)(*args)
            finally:
                await coordinator.close()

        return asyncio.run(connect_and_call())

    def view(self) -> GroupView:
        view = self.ask("read", self.group)
        assert isinstance(view, GroupView)
        return view

    def begin(self) -> None:
        """Create the group's record of the registered replicas."""

        def list_replicas_of_all_nodes() -> list[str]:
            """List the replicas of all nodes, or none until all have registered."""
            nodes = self.ask("nodes")
            assert isinstance(nodes, dict)
            replicas = [node.replica for name, node in nodes.items() if name in self.nodes]
            return replicas if len(replicas) == len(self.nodes) else []

        replicas = self.wait("all nodes have registered", list_replicas_of_all_nodes)
        assert isinstance(replicas, list)
        self.ask("change", self.group, 0, Record(0, "", tuple(sorted(replicas))))

    def leader(self, epoch_above: int = 0) -> NodeProcess:
        """Wait until a node reports that it leads in an epoch above this one, and return the node."""

        def find_leader() -> NodeProcess | None:
            """Find the running node whose last reported epoch is that of the record."""
            for node in self.nodes.values():
                if node.process is None:
                    continue
                epochs = [event["epoch"] for event in node.events() if event["event"] == "leads"]
                if epochs and epochs[-1] > epoch_above and self.view().record.epoch == epochs[-1]:  # type: ignore[operator, union-attr]
                    return node
            return None

        leader = self.wait("a node leads", find_leader)
        assert isinstance(leader, NodeProcess)
        return leader

    def epoch(self) -> int:
        record = self.view().record
        return record.epoch if record else 0

    def wait(self, what: str, condition: object, bound_s: float = BOUND_S) -> object:
        """Return the first true result of `condition`. Fails with the nodes' last output when `bound_s` is over."""
        deadline = time.monotonic() + bound_s
        while time.monotonic() < deadline:
            result = condition()  # type: ignore[operator]
            if result:
                return result
            time.sleep(0.02)
        raise AssertionError(
            f"not seen: {what}\n"
            + "\n".join(f"{node.name}: {node.text[-1500:]}" for node in self.nodes.values())
        )


@contextmanager
def running_cluster(
    folder: Path,
    names: str = "abc",
    unfenced: str = "",
    net: Network | None = None,
    module: str = "timeball",
    **options: str,
) -> Iterator[Cluster]:
    """Start three members of etcd and a node for each letter of `names`, and create their group's record.

    `unfenced` names the fences that the nodes lack (unfenced.py). With `net`, each runs in a namespace of this network.
    `module` is run in place of `timeball`, such as tests.cluster.stalled. At the end all nodes are killed.
    """
    with EtcdCluster(folder / "etcd", host=net.addresses[ETCD] if net else "127.0.0.1") as etcd:
        cluster = Cluster(folder, etcd)
        try:
            for name in names:
                node = cluster.nodes[name] = NodeProcess(
                    name, folder, etcd.endpoints, dict(options), module=module
                )
                if net:
                    node.host, node.within = net.addresses[name], net.within(name)
                    node.options["host"] = node.host
                    node.environment = {"TIMEBALL_ALLOW_PLAINTEXT": "true"}
                if unfenced:
                    node.module = "tests.cluster.unfenced"
                    node.environment["UNFENCED"] = unfenced
                node.environment |= {"STALLED": str(node.stalled), "FULL": str(node.full)}
                node.start()
            cluster.begin()
            yield cluster
        finally:
            for node in cluster.nodes.values():
                if node.process is not None:
                    node.kill()


@contextmanager
def running_groups(folder: Path, names: Mapping[str, str], **options: str) -> Iterator[dict[str, Cluster]]:
    """Start three members of etcd and several groups. `names`: name of a group -> a letter for each of its nodes."""
    with EtcdCluster(folder / "etcd") as etcd:
        groups = {group: Cluster(folder, etcd, group=group) for group in names}
        try:
            for group, cluster in groups.items():
                for name in names[group]:
                    node = NodeProcess(name, folder, etcd.endpoints, dict(options), group=group)
                    cluster.nodes[name] = node
                    node.start()
            for cluster in groups.values():
                cluster.begin()
            yield groups
        finally:
            for cluster in groups.values():
                for node in cluster.nodes.values():
                    if node.process is not None:
                        node.kill()


__all__ = ["Cluster", "NodeProcess", "node_of", "running_cluster", "running_groups"]
