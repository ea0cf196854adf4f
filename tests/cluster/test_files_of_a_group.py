"""Data files of the pending table in three real processes: a majority has them before a row names them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import pytest
from tests.cluster.processes import Cluster, NodeProcess, running_cluster

from timeball.cluster.transport.data_files import SUFFIX
from timeball.model.errors import TimeballError

TOPIC = "later"


def files_of(node: NodeProcess, suffix: str = ".parquet") -> dict[str, bytes]:
    table = node.data / "pending"
    return {
        path.relative_to(table).as_posix(): path.read_bytes()
        for path in sorted(table.glob(f"bucket=*/*{suffix}"))
    }


def released(node: NodeProcess) -> Counter[bytes]:
    with node.client() as ball:
        queues = ball.queues(TOPIC)
        bodies: list[bytes] = []
        for queue_id, found in queues.items():
            if found.max > found.min:
                batches = ball.read_queue(TOPIC, queue_id, found.min, found.max - found.min)
                bodies += batches.read_all().column("body").to_pylist()
        return Counter(bodies)


def send(node: NodeProcess, count: int, after: str) -> Counter[bytes]:
    bodies = [b"message %d" % number for number in range(count)]
    with node.client() as ball:
        ball.create_topic(TOPIC)
        ball.send_many([{"body": body, "after": after} for body in bodies], topic=TOPIC)
    return Counter(bodies)


def compact(node: NodeProcess) -> None:
    with node.client() as ball:
        assert ball.compact() is not None


@pytest.fixture
def cluster(tmp_path: Path, etcd: object) -> Cluster:
    with running_cluster(tmp_path, **{"compact-rows": "1000000"}) as cluster:
        yield cluster


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("etcd")]


def test_messages_in_the_table_outlive_the_leader_and_its_disk(cluster: Cluster) -> None:
    first = cluster.leader()
    sent = send(first, 2_000, "12s")
    compact(first)
    names = set(files_of(first))
    first.kill()
    first.wipe()
    second = cluster.leader(1)
    assert names and set(files_of(second)) >= names
    with second.client() as ball:
        assert ball.status()["schedule"]["table_rows"] == 2_000
    first.start()
    cluster.wait("all are released, once", lambda: released(second) == sent)
    # The new disk counts when it has the files too: then the last of the first two may go.
    cluster.wait("the new disk joins", lambda: set(files_of(first)) >= names and _is_member(cluster, first))


def _is_member(cluster: Cluster, node: NodeProcess) -> bool:
    replica = [str(event["replica"]) for event in node.events() if event["event"] == "ready"][-1]
    record = cluster.view().record
    return record is not None and replica in record.replicas


def test_a_follower_that_is_killed_while_it_is_sent_a_file_gets_it_later(cluster: Cluster) -> None:
    leader = cluster.leader()
    down, other = [node for node in cluster.nodes.values() if node is not leader]
    with leader.client() as ball:
        ball.create_topic(TOPIC)
        rows = [{"body": os.urandom(8_000), "after": "1h"} for _ in range(10_000)]
        ball.send_many(rows, topic=TOPIC, batch_rows=500)
    compacting = threading.Thread(target=compact, args=(leader,))
    compacting.start()
    cluster.wait("a file is on its way", lambda: files_of(down, SUFFIX))
    down.kill()
    assert files_of(down, SUFFIX), "it was killed in the middle"
    compacting.join()
    assert files_of(leader) and files_of(other) == files_of(leader)
    down.start()
    cluster.wait("it has them too", lambda: files_of(down) == files_of(leader) and not files_of(down, SUFFIX))


def test_an_attach_waits_for_a_majority_and_is_only_later(cluster: Cluster) -> None:
    leader = cluster.leader()
    followers = [node for node in cluster.nodes.values() if node is not leader]
    sent = send(leader, 500, "8s")
    send(leader, 1, "1h")  # to compact, should the takeover last longer than 8 s
    for node in followers:
        node.kill()
    with pytest.raises(TimeballError):
        compact(leader)
    # The process of this leader ends, for it hears no majority: what it has not attached is in the log.
    cluster.wait("it stops", lambda: leader.text.count('"event":"ready"') == 2)
    for node in followers:
        node.start()
    second = cluster.leader(1)
    with second.client() as ball:
        assert ball.status()["schedule"]["table_rows"] == 0
    compact(second)
    cluster.wait("all are released, once", lambda: released(second) == sent)


def segments(node: NodeProcess) -> list[str]:
    return sorted(path.name for path in (node.data / "log").glob("*.log"))


def test_a_replica_that_was_down_while_the_log_was_let_go_begins_anew(tmp_path: Path, etcd: object) -> None:
    with running_cluster(tmp_path, **{"retention-ms": "1000", "checkpoint-interval-ms": "1000"}) as cluster:
        leader = cluster.leader()
        down, other = [node for node in cluster.nodes.values() if node is not leader]
        sent = send(leader, 1_000, "1h")
        compact(leader)
        cluster.wait(
            "all have the files", lambda: files_of(down) == files_of(other) == files_of(leader) != {}
        )
        down.kill()
        with leader.client() as ball:
            for _ in range(50):
                ball.send_many([{"body": os.urandom(10_000)} for _ in range(100)], topic="now")
        cluster.wait("the leader lets segments go", lambda: segments(leader)[0] > segments(down)[-1], 150)
        cluster.wait("so does the follower", lambda: segments(other)[0] == segments(leader)[0])
        down.start()
        cluster.wait("it begins with the same segment", lambda: segments(down)[:1] == segments(leader)[:1])
        replicas = {event["replica"] for event in down.events() if event["event"] == "ready"}
        assert len(replicas) == 1, "it is the same replica: its acknowledgements count"
        other.kill()
        with leader.client() as ball:
            ball.send("now", b"acknowledged by the two")
        leader.kill()
        other.start()
        second = cluster.leader(1)
        with second.client() as ball:
            assert ball.status()["schedule"]["table_rows"] == sum(sent.values())
            found = [
                ball.read_queue("now", i, q.min, q.max - q.min)
                for i, q in ball.queues("now").items()
                if q.min < q.max
            ]
            assert b"acknowledged by the two" in [
                b for rows in found for b in rows.read_all()["body"].to_pylist()
            ]
