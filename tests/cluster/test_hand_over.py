"""A leader hands over while 5,000 scheduled messages a second arrive: no call fails, each is released once."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
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
    """Threads that send batches at a fixed rate. No send is repeated."""

    nodes: Sequence[NodeProcess]
    accepted: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    answered_after_ms: list[int] = field(
        default_factory=list
    )  # from the planned start of a send to its answer
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> list[threading.Thread]:
        """Start a thread per sender. They run until `ended` is set."""
        threads = [threading.Thread(target=self._send, args=(sender,)) for sender in range(SENDERS)]
        for thread in threads:
            thread.start()
        return threads

    def _send(self, sender: int) -> None:
        """Send batches with the keys of one sender, each at its planned time."""
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
                except Exception as error:  # the test asserts that there is none
                    self.failures.append(error)
                else:
                    self.accepted += sent.ids.to_pylist()
                    self.answered_after_ms.append(CLOCK.wall_ms() - planned_ms)


def hand_over(cluster: Cluster) -> None:
    """End the leader with SIGTERM, wait for the next leader, and start the first one again."""
    leader, record = cluster.leader(), cluster.view().record
    assert record is not None
    leader.kill(signal.SIGTERM)
    cluster.leader(record.epoch)
    leader.start()
    cluster.wait("all replicas are connected", lambda: len(cluster.ask("nodes")) == 3)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_no_call_fails_during_a_hand_over(tmp_path: Path) -> None:
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s"}) as cluster:
        cluster.leader()
        nodes = [*cluster.nodes.values()]
        load = SteadyLoad(nodes)
        threads = load.start()
        for _ in range(3):
            cluster.wait("100 more sends", _accepts_more(load, 100))
            hand_over(cluster)
        cluster.wait("100 sends after the last hand-over", _accepts_more(load, 100))
        load.ended.set()
        for thread in threads:
            thread.join()
        counts, late_ms = _received(nodes, len(load.accepted))
    answered_ms = np.array(load.answered_after_ms)
    print(
        f"{len(load.accepted)} accepted, {len(load.failures)} calls failed, lateness p99 "
        f"{np.percentile(late_ms, 99):.0f} max {late_ms.max()} ms, answered after p50 "
        f"{np.percentile(answered_ms, 50):.0f} p99 {np.percentile(answered_ms, 99):.0f} max {answered_ms.max()} ms"
    )
    assert not load.failures
    assert counts == Counter(load.accepted)
    assert late_ms.min() >= 0


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_a_leader_with_acks_all_stops_although_a_replica_is_gone(tmp_path: Path) -> None:
    """The leader's last commit needs the absent replica. The stop must not wait for it."""
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s", "acks": "all"}) as cluster:
        leader = cluster.leader()
        with leader.client() as ball:
            stored = ball.send(TOPIC, b"", after="1h")
        absent = next(node for node in cluster.nodes.values() if node is not leader)
        absent.kill()
        record, process = cluster.view().record, leader.process
        assert record is not None and process is not None
        with leader.client(timeout_ms=BOUND_S * 1_000) as ball, ThreadPoolExecutor(1) as sender:
            waiting = sender.submit(ball.send, TOPIC, b"", after="1h")
            cluster.wait("the commit waits", lambda: _lags(ball))
            leader.kill(signal.SIGTERM)
            assert process.returncode == 0
            assert isinstance(waiting.exception(BOUND_S), Lost)
        absent.start()
        leader.start()
        with cluster.leader(record.epoch).client() as ball:
            assert ball.get(stored.id).state == "waiting"


def _lags(ball: Timeball) -> bool:
    """Check whether rows of the leader's log are not committed."""
    replica = ball.status()["replica"]
    return int(replica["log_seq"]) > int(replica["committed_seq"])  # type: ignore[call-overload, index]


def _accepts_more(load: SteadyLoad, sends: int) -> Callable[[], bool]:
    """Return a condition that is true when so many further sends have been accepted."""
    target = len(load.accepted) + sends * ROWS
    return lambda: len(load.accepted) >= target


def _received(
    nodes: Sequence[NodeProcess], rows: int
) -> tuple[Counter[str], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Consume until all messages have come and no more do. Return the count of each, and each one's lateness in ms.

    The lateness is the time from the due time to the storing in a queue.
    """
    counts: Counter[str] = Counter()
    late_ms = []
    until_ms = CLOCK.wall_ms() + BOUND_S * 1_000
    with client_of(nodes) as ball:
        while CLOCK.wall_ms() < until_ms:
            batch = ball.browse_batch(
                TOPIC, GROUP, max_messages=4_096, wait="1s" if counts.total() < rows else "200ms"
            )
            if batch.num_rows == 0 and counts.total() >= rows:
                break
            counts.update(batch.column("unique_key").to_pylist())
            late_ms.append(batch.column("store_ms").to_numpy() - batch.column("due_ms").to_numpy())
            ball.commit(TOPIC, GROUP)
    return counts, np.concatenate(late_ms)
