"""A group of three nodes in the place of the demo's broker. The one that leads is killed at noon of the day."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.cluster.machines import NAMES, LocalCluster, local_cluster

from timeball import Timeball
from timeball.model.config import StrategyName

# As the broker's of `broker.py`: a node at work compacts once a minute.
OPTIONS = ("--compact-interval-ms", "3s")


class Group:
    """The group, as the demo's steps see it. Its endpoints have the addresses of all nodes."""

    compaction = "the leader's own compaction"

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.endpoint, self.http_endpoint = cluster.endpoint, cluster.http_endpoint

    def client(self) -> Timeball:
        """Return a client with columns."""
        return Timeball(self.http_endpoint, flight=self.endpoint)

    def pipeline_state(self) -> str:
        """Say that no pipeline runs beside a node."""
        return self.compaction

    def last_words(self) -> str:
        """Say where the nodes' logs are."""
        return f"the logs of {', '.join(NAMES)} in {self._cluster.folder} say more"

    def kill_leader(self) -> str:
        """Kill the leader, wait until another node leads, and start the killed one again; return what happened."""
        killed, begin_s = self._cluster.leader(), time.monotonic()
        self._cluster.kill(killed)
        leads = self._cluster.wait_leader(killed)
        took_s = time.monotonic() - begin_s
        self._cluster.nodes[killed].start()
        return f"{killed}, which led, was killed at noon: {leads} led after {took_s:.1f} s"


@contextmanager
def group_in(data: Path, strategy: StrategyName) -> Iterator[Group]:
    """Run the group for the length of a block. Raises SetupError, Unavailable."""
    data.mkdir(parents=True, exist_ok=True)
    options = (*OPTIONS, "--strategy", strategy)
    with local_cluster(data.absolute(), any_ports=True, options=options) as cluster:
        yield Group(cluster)
