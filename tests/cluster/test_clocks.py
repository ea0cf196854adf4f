"""A node with a wrong clock takes over: pending messages are early or late by at most its error, and come once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cli.in_process import run_here
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import CLUSTER, Cluster, NodeProcess, client_of, running_cluster
from tests.cluster.skewed import SKEW_MS

from timeball.io.clock import SystemClock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0), pytest.mark.xdist_group("etcd")]

TOPIC, GROUP = "clocks", "readers"
ROWS, FIRST_MS, SPREAD_MS = 400, 6_000, 4_000
ROUNDING_MS = 2  # of times of two clocks in whole milliseconds
CLOCK = SystemClock()


class Reader:
    """Browses a topic, and records how early each message arrived by this machine's clock."""

    def __init__(self, nodes: Sequence[NodeProcess]) -> None:
        self.early_ms: dict[str, int] = {}
        self.twice: list[str] = []
        self._nodes, self._ended = nodes, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        """Browse until the end, and record each message."""
        with client_of(self._nodes) as ball:
            while not self._ended.is_set():
                batch = ball.browse_batch(TOPIC, GROUP, max_messages=1_024, wait="0.2s")
                now_ms = CLOCK.wall_ms()
                keys, due = batch.column("unique_key").to_pylist(), batch.column("due_ms").to_pylist()
                for key, due_ms in zip(keys, due, strict=True):
                    if key in self.early_ms:
                        self.twice.append(key)
                    self.early_ms[key] = due_ms - now_ms
                if keys:
                    ball.commit(TOPIC, GROUP)

    def wait(self, count: int) -> None:
        """Wait until this number of messages has arrived."""
        until_s = time.monotonic() + BOUND_S
        while len(self.early_ms) < count:
            assert time.monotonic() < until_s, f"{len(self.early_ms)} of {count} arrived"
            time.sleep(0.05)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def set_wrong(cluster: Cluster, name: str, skew_ms: int) -> None:
    """Start a node again with a clock that is wrong, and let it lead."""
    node, epoch = cluster.nodes[name], cluster.epoch()
    was_leader = cluster.leader() is node
    node.kill()
    if was_leader:
        cluster.leader(epoch)
    node.module, node.environment = "tests.cluster.skewed", {SKEW_MS: str(skew_ms)}
    node.start()
    cluster.wait("it is registered again", lambda: name in cluster.ask("nodes"))  # type: ignore[operator]


@pytest.mark.parametrize("skew_ms", [0, 300, 1_000, 5_000, -3_000])
def test_messages_are_early_by_at_most_the_error_of_the_new_leader_s_clock(
    tmp_path: Path, skew_ms: int
) -> None:
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s"}) as cluster:
        cluster.leader()
        set_wrong(cluster, "b", skew_ms)
        nodes = [*cluster.nodes.values()]
        reader = Reader(nodes)
        try:
            with client_of(nodes) as ball:
                first_ms = CLOCK.wall_ms() + FIRST_MS
                ball.send_many(
                    {"topic": TOPIC, "body": "x", "message_id": f"m{row}", "due_ms": first_ms + row * SPREAD_MS // ROWS}
                    for row in range(ROWS)
                )  # fmt: skip
            options = ("--cluster", CLUSTER, "--etcd", ",".join(cluster.etcd.endpoints))
            command = run_here("cluster", "hand-over", *options, "--to", "b")
            assert command.returncode == 0, command.stderr
            reader.wait(ROWS)
        finally:
            reader.end()
    earliest = max(reader.early_ms.values())
    print(
        f"clock wrong by {skew_ms} ms: earliest {earliest} ms early, latest {-min(reader.early_ms.values())} ms late"
    )
    assert not reader.twice
    assert earliest <= max(0, skew_ms) + ROUNDING_MS
