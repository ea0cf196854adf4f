"""A log on three machines against one: single sends of 128 bytes, acknowledged by a majority of disks.

C x W: C connections with W requests in flight each, from the load generator of benchmarks/versus. One broker and the
group are loaded in turn, so that both see the same machine; rates are medians of the rounds, and the ratio is of them.

Not measured: three machines. The replicas, the three members of etcd and the load share this machine's cores and its
disk, which writes all three times: a group of real machines has three times the cores and disks, and a network between.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.harness import TOPIC, Server
from benchmarks.remoting import QUEUES
from benchmarks.report import Report
from timeball.model.errors import SetupError

if TYPE_CHECKING:
    from tests.cluster.processes import Cluster

    from benchmarks.versus.load import Generator, Outcome

ONLY_BY_NAME = True  # needs etcd and a C compiler
SHAPES = {(8, 512): 0.85, (64, 1): 0.75}  # and the least share of one machine's rate
ROUNDS, SECONDS, SECONDS_SMALL = 3, 3.0, 0.3
OPTIONS = {"segment-bytes": "256MiB", "lease-ttl-ms": "2s"}
_CPU_CLOCK = 2  # as in harness.py


class Loaded:
    """One broker, or a group by its leader: where it is loaded, and which processes do the work."""

    def __init__(self, name: str, address: str, pids: dict[str, int]) -> None:
        self.name, self.address, self.pids = name, address, pids
        self.outcomes: dict[tuple[int, int], list[Outcome]] = {shape: [] for shape in SHAPES}
        self.cpu_s: dict[tuple[tuple[int, int], str], float] = {}

    def measure(self, load: Generator, shape: tuple[int, int], seconds: float) -> None:
        """Load once, and note what it cost each process."""
        from benchmarks.versus.sending import sends

        before = {role: cpu_s(pid) for role, pid in self.pids.items()}
        self.outcomes[shape].append(load.run(self.address, sends(), shape, seconds=seconds))
        for role, pid in self.pids.items():
            spent = cpu_s(pid) - before[role]
            self.cpu_s[shape, role] = self.cpu_s.get((shape, role), 0.0) + spent

    def rate(self, shape: tuple[int, int]) -> float:
        """Return the median of the rounds, in messages a second."""
        return median(outcome.answers / outcome.seconds for outcome in self.outcomes[shape])

    def report(self, report: Report, shape: tuple[int, int]) -> None:
        """Add the figures of a shape."""
        label, outcomes = f"{self.name} {shape[0]}x{shape[1]}", self.outcomes[shape]
        report.add(f"{label}: rate", self.rate(shape), "msg/s")
        report.add(f"{label}: ack p50", median(outcome.p50_ms for outcome in outcomes), "ms")
        report.add(f"{label}: ack p99", median(outcome.p99_ms for outcome in outcomes), "ms")
        answered = sum(outcome.answered for outcome in outcomes)
        for role in self.pids:
            report.add(f"{label}: {role}'s CPU", self.cpu_s[shape, role] / answered * 1e6, "us/msg")
        report.add(f"{label}: failed", sum(outcome.failures for outcome in outcomes), "requests")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK)


def group_of(cluster: Cluster) -> Loaded:
    """Return a group by its leader."""
    leader = cluster.leader()
    pids = {}
    for node in cluster.nodes.values():
        assert node.process is not None
        pids["leader" if node is leader else f"follower {node.name}"] = node.process.pid
    with leader.client() as ball:
        ball.create_topic(TOPIC, QUEUES)
    return Loaded("majority", f"127.0.0.1:{leader.ports['remoting-port']}", pids)


def run(*, small: bool) -> Report:
    """Measure one machine and a group in turn; raises SetupError without etcd."""
    # What these need is a checkout's alone: `timeball bench --list` goes without.
    from tests.cluster.etcd_cluster import BINARY
    from tests.cluster.processes import running_cluster

    from benchmarks.versus.load import Generator
    from benchmarks.versus.sending import WARM_SHAPE, sends

    if BINARY is None:
        raise SetupError("etcd is not installed (Debian: etcd-server)")
    report, seconds = Report("cluster", small), SECONDS_SMALL if small else SECONDS
    rounds = 1 if small else ROUNDS
    with tempfile.TemporaryDirectory(prefix="timeball-bench-") as name:
        folder = Path(name)
        load = Generator(folder)
        with Server(folder / "alone") as server, running_cluster(folder, net=None, **OPTIONS) as cluster:
            with server.client() as ball:
                ball.create_topic(TOPIC, QUEUES)
            alone = Loaded("one machine", server.remoting, {"broker": server.process.pid})
            loaded = [alone, group_of(cluster)]
            for each in loaded:
                load.run(each.address, sends(), WARM_SHAPE, seconds=seconds)
            begun_load = os.getloadavg()[0]
            for shape in SHAPES:
                for _ in range(rounds):
                    for each in loaded:
                        each.measure(load, shape, seconds)
            for shape, bar in SHAPES.items():
                for each in loaded:
                    each.report(report, shape)
                ratio = loaded[1].rate(shape) / alone.rate(shape)
                report.add(f"majority of one machine {shape[0]}x{shape[1]}", ratio, "of its rate", bar)
            report.add("load average at the begin", begun_load, "processes")
    return report
