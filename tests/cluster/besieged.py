"""Three replicas under the clients of the siege (tests/crash/siege.py): their leader is killed, wiped or stopped.

The clients reach the group through any of the nodes, whose gateways forward. So each client meets nodes that have
ended, and loses leaders. At the end the logs of the replicas are compared byte for byte, and a single broker opens one
of the folders, with a clock at which everything is due.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tests.bounds import BOUND_S
from tests.cluster.processes import Cluster, NodeProcess, running_cluster
from tests.crash.checker import Fault
from tests.crash.siege import BrokerProcess, Siege

from timeball import Timeball

OPTIONS = {"lease-ttl-ms": "1s", "checkpoint-interval-ms": "1s", "compact-rows": "100000000"}


class GroupProcesses(BrokerProcess):
    """A group in place of a single broker: its addresses are those of its nodes in turn."""

    def __init__(self, folder: Path, options: dict[str, str], unfenced: str) -> None:
        """`options` are those of each node. `unfenced` names fences that the nodes lack (unfenced.py)."""
        self._turns = itertools.count()
        self._folder, self._node_options, self._unfenced = folder, options, unfenced
        self._stack = ExitStack()
        self.starts_ms: list[int] = []
        self.cluster: Cluster
        self.epoch = 0

    @property
    def _next(self) -> NodeProcess:
        nodes = list(self.cluster.nodes.values())
        return nodes[next(self._turns) % len(nodes)]

    @property
    def endpoint(self) -> str:  # type: ignore[override]
        return self._next.endpoint

    def client(self, **options: Any) -> Timeball:
        return self._next.client(**options)

    @property
    def remoting_port(self) -> int:
        return self._next.ports["remoting-port"]

    @property
    def is_up(self) -> bool:
        return True

    def start(self, give_up_ms: float = 0) -> bool:
        """Start all nodes, and wait for a leader. Returns True."""
        self.cluster = self._stack.enter_context(
            running_cluster(self._folder, unfenced=self._unfenced, **self._node_options)
        )
        self.epoch = self.wait_leads(0)
        return True

    def clear(self) -> None:
        self._stack.close()

    def kill(self) -> None:
        """Kill all nodes."""
        for node in self.cluster.nodes.values():
            node.kill()

    def leader(self) -> NodeProcess:
        """Return the node that leads."""
        return self.cluster.leader(self.epoch - 1)

    def wait_leads(self, above: int) -> int:
        """Wait until a leader serves in an epoch above this one. Returns its epoch."""
        return int(
            self.cluster.wait(  # type: ignore[call-overload]
                f"an epoch above {above} serves",
                lambda: max(
                    (epoch for epoch in map(served, self.cluster.nodes.values()) if epoch > above), default=0
                ),
            )
        )

    def wait_all_count(self, started: NodeProcess, starts: int) -> None:
        """Wait until a node has started so many times, and the record names exactly the running replicas."""

        def all_count() -> bool:
            if len(replicas_of(started)) < starts:
                return False
            record = self.cluster.view().record
            assert record is not None
            return set(record.replicas) == {replicas_of(node)[-1] for node in self.cluster.nodes.values()}

        self.cluster.wait("all replicas count", all_count)


def replicas_of(node: NodeProcess) -> list[str]:
    """Return the replica of a node in each of its starts."""
    return [str(event["replica"]) for event in node.events() if event["event"] == "ready"]


def served(node: NodeProcess) -> int:
    """Return the last epoch in which a node reported that it serves."""
    return max((int(str(event["epoch"])) for event in node.events() if event["event"] == "leads"), default=0)


class GroupSiege(Siege):
    """A siege of a group: `strike` hits its leader."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        options: dict[str, str] | None = None,
        *,
        wipes: bool = False,
        unfenced: str = "",
    ) -> None:
        """`wipes`: the killed leader starts again with an empty disk. `unfenced`: see GroupProcesses."""
        super().__init__(folder / "unused", seed, options)
        self.broker: GroupProcesses = GroupProcesses(folder, {**OPTIONS, **(options or {})}, unfenced)
        self._compacts = False  # the files of compactions have their own tests
        self._wipes = wipes
        self.serving_s: list[float] = []  # from the kill until another node serves
        self.acknowledged_s: list[float] = []  # from the kill until that node has answered a client

    def strike(self) -> None:
        """Kill the leader, wait for another one, and start the killed node again."""
        broker, leader = self.broker, self.broker.leader()
        starts = len(replicas_of(leader))
        begin_s = time.monotonic()
        leader.kill()
        self.counts["killed"] += 1
        broker.epoch = broker.wait_leads(broker.epoch)
        self.serving_s.append(time.monotonic() - begin_s)
        before = self.counts["acknowledged"]
        self.until(lambda: self.counts["acknowledged"] > before, "an acknowledgement after a takeover")
        self.acknowledged_s.append(time.monotonic() - begin_s)
        if self._wipes:
            leader.wipe()
        leader.start()
        broker.wait_all_count(leader, starts + 1)

    def faults(self, schedule: str = "hour_log") -> list[Fault]:
        """Compare the logs, then the contents of one of them with the answers to clients."""
        self.end_clients()
        faults = self.differences()
        leader = self.broker.leader()
        self.broker.data = leader.data
        return [*faults, *super().faults(schedule)]

    def differences(self) -> list[Fault]:
        """Wait until all logs are equal. Returns a fault for each log if they do not become equal.

        The leader also writes rows without a request, so one look may be too early.
        """
        deadline, texts = time.monotonic() + BOUND_S, []
        while time.monotonic() < deadline:
            logs = [log_of(node) for node in self.broker.cluster.nodes.values()]
            if all(log == logs[0] for log in logs):
                return []
            texts = [str({name: len(content) for name, content in log.items()}) for log in logs]
            time.sleep(0.05)
        return [Fault("unequal", text) for text in texts]

    def times(self) -> str:
        """Describe the durations of the takeovers."""
        figures = {"serving": self.serving_s, "first acknowledgement": self.acknowledged_s}
        return ", ".join(
            f"{name}: p50 {median(durations_s):.2f} s, max {max(durations_s):.2f} s"
            for name, durations_s in figures.items()
            if durations_s
        )

    def _note_saved_offsets(self) -> None:
        """Do nothing: a row on the disk of a leader that was killed need not be committed."""


def log_of(node: NodeProcess) -> dict[str, bytes]:
    """Return a replica's segments without trailing zeros and without spares."""
    content_by_name = {
        path.name: path.read_bytes().rstrip(b"\0") for path in (node.data / "log").glob("*.log")
    }
    return {name: content for name, content in content_by_name.items() if content}
