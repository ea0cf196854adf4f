"""A leader hands over while 5,000 scheduled messages a second arrive: no failed call, and each is released once."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import Cluster, NodeProcess, client_of, running_cluster

from timeball import Timeball
from timeball.client.attempts import Lost
from timeball.io.clock import SystemClock

TOPIC, GROUP = "handed", "readers"
SENDERS, ROWS, EVERY_MS = 5, 50, 50
AHEAD_MS, SPREAD_MS = 3_000, 500
CLOCK = SystemClock()


@dataclass
class SteadyLoad:
    """Some senders at a rate, none of which may repeat a send by `retry`."""

    nodes: Sequence[NodeProcess]
    accepted: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    behind_ms: list[int] = field(default_factory=list)  # how late each send was answered
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._send, args=(n,)) for n in range(SENDERS)]
        for thread in threads:
            thread.start()
        return threads

    def _send(self, sender: int) -> None:
        begin_ms, number = CLOCK.wall_ms(), 0
        with client_of(self.nodes) as ball:
            while not self.ended.wait(max(0, begin_ms + number * EVERY_MS - CLOCK.wall_ms()) / 1_000):
                planned_ms = begin_ms + number * EVERY_MS
                number += 1
                due_ms = [CLOCK.wall_ms() + AHEAD_MS + row * SPREAD_MS // ROWS for row in range(ROWS)]
                rows = pa.table(
                    {
                        "topic": [TOPIC] * ROWS,
                        "body": [b"x" * 128] * ROWS,
                        "due_ms": due_ms,
                        "unique_key": [f"{sender}-{number}-{row}" for row in range(ROWS)],
                    }
                )
                try:
                    sent = ball.send_many(rows)
                except Exception as error:  # of any kind: it is what the test is about
                    self.failures.append(error)
                else:
                    self.accepted += sent.ids.to_pylist()
                    self.behind_ms.append(CLOCK.wall_ms() - planned_ms)


def hand_over(cluster: Cluster) -> None:
    """End the leader by SIGTERM, see another one lead, and start it again."""
    leader, epoch = cluster.leader(), cluster.view().record
    assert epoch is not None
    leader.kill(15)
    cluster.leader(epoch.epoch)
    leader.start()
    cluster.wait("all replicas are connected", lambda: len(cluster.ask("nodes")) == 3)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_hand_over_costs_no_call(tmp_path: Path) -> None:
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s"}) as cluster:
        cluster.leader()
        nodes = [*cluster.nodes.values()]
        load = SteadyLoad(nodes)
        threads = load.start()
        for _ in range(3):
            cluster.wait("a thousand sends more", _more(load, 100))
            hand_over(cluster)
        cluster.wait("and some after", _more(load, 100))
        load.ended.set()
        for thread in threads:
            thread.join()
        seen, late_ms = _received(nodes, len(load.accepted))
    answered_ms = np.array(load.behind_ms)
    print(
        f"{len(load.accepted)} accepted, {len(load.failures)} calls failed, lateness p99 "
        f"{np.percentile(late_ms, 99):.0f} max {late_ms.max()} ms, answered after p50 "
        f"{np.percentile(answered_ms, 50):.0f} p99 {np.percentile(answered_ms, 99):.0f} max {answered_ms.max()} ms"
    )
    assert not load.failures
    assert seen == Counter(load.accepted)
    assert late_ms.min() >= 0


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_stop_does_not_wait_for_a_replica_that_is_gone(tmp_path: Path) -> None:
    """With `--acks all`, the last commit needs this replica."""
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s", "acks": "all"}) as cluster:
        leader = cluster.leader()
        with leader.client() as ball:
            stored = ball.send(TOPIC, b"", after="1h")
        gone = next(node for node in cluster.nodes.values() if node is not leader)
        gone.kill()
        epoch, process = cluster.view().record, leader.process
        assert epoch is not None and process is not None
        with leader.client(timeout_ms=BOUND_S * 1_000) as ball, ThreadPoolExecutor(1) as sender:
            waiting = sender.submit(ball.send, TOPIC, b"", after="1h")
            cluster.wait("the commit waits", lambda: _lags(ball))
            leader.kill(signal.SIGTERM)
            assert process.returncode == 0
            assert isinstance(waiting.exception(BOUND_S), Lost)
        gone.start()
        leader.start()
        with cluster.leader(epoch.epoch).client() as ball:
            assert ball.get(stored.id).state == "waiting"


def _lags(ball: Timeball) -> bool:
    """Return whether rows of the leader's log are not committed."""
    replica = ball.status()["replica"]
    return int(replica["log_seq"]) > int(replica["committed_seq"])  # type: ignore[call-overload, index]


def _more(load: SteadyLoad, sends: int) -> object:
    wanted = len(load.accepted) + sends * ROWS
    return lambda: len(load.accepted) >= wanted


def _received(
    nodes: Sequence[NodeProcess], rows: int
) -> tuple[Counter[str], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return how often each message came, and how late each was in its queue."""
    seen: Counter[str] = Counter()
    late = []
    until_ms = CLOCK.wall_ms() + BOUND_S * 1_000
    with client_of(nodes) as ball:
        while CLOCK.wall_ms() < until_ms:
            batch = ball.browse_batch(
                TOPIC, GROUP, max_messages=4_096, wait="1s" if seen.total() < rows else "200ms"
            )
            if batch.num_rows == 0 and seen.total() >= rows:
                break
            seen.update(batch.column("unique_key").to_pylist())
            late.append(batch.column("store_ms").to_numpy() - batch.column("due_ms").to_numpy())
            ball.commit(TOPIC, GROUP)
    return seen, np.concatenate(late)
