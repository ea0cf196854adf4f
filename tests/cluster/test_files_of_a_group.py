"""Data files of the pending table in three real processes: a majority has them before a row names them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import pytest
from tests.cluster.processes import Cluster, NodeProcess, running_cluster

from timeball import Timeball
from timeball.cluster.transport.data_files import SUFFIX
from timeball.model.errors import TimeballError

TOPIC = "later"


def files_of(node: NodeProcess, suffix: str = ".parquet") -> dict[str, bytes]:
    """Return the data files of a node's pending table: name -> bytes."""
    table = node.data / "pending"
    return {
        path.relative_to(table).as_posix(): path.read_bytes()
        for path in sorted(table.glob(f"bucket=*/*{suffix}"))
    }


def released(node: NodeProcess) -> Counter[bytes]:
    """Count the released messages that a node has of each body."""
    with node.client() as ball:
        return Counter(bodies_of(ball, TOPIC))


def bodies_of(ball: Timeball, topic: str) -> list[bytes]:
    """Read the bodies of all messages in the queues of a topic."""
    bodies: list[bytes] = []
    for queue_id, offsets in ball.queues(topic).items():
        if offsets.max > offsets.min:
            batches = ball.read_queue(topic, queue_id, offsets.min, offsets.max - offsets.min)
            bodies += batches.read_all().column("body").to_pylist()
    return bodies


def send(node: NodeProcess, count: int, after: str) -> Counter[bytes]:
    """Send scheduled messages, due after `after`. Returns how often each body was sent: once."""
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


def test_messages_in_the_table_are_released_once_after_the_leader_has_lost_its_disk(cluster: Cluster) -> None:
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
    cluster.wait("each message is released once", lambda: released(second) == sent)
    # The replica on the new disk becomes a member only when it has the files.
    cluster.wait(
        "the new replica joins", lambda: set(files_of(first)) >= names and _is_member(cluster, first)
    )


def _is_member(cluster: Cluster, node: NodeProcess) -> bool:
    replica = [str(event["replica"]) for event in node.events() if event["event"] == "ready"][-1]
    record = cluster.view().record
    return record is not None and replica in record.replicas


def test_a_follower_that_is_killed_while_it_receives_a_file_fetches_it_later(cluster: Cluster) -> None:
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
    assert files_of(down, SUFFIX), "killed while it received the file"
    compacting.join()
    assert files_of(leader) and files_of(other) == files_of(leader)
    down.start()
    cluster.wait(
        "the restarted follower has the files",
        lambda: files_of(down) == files_of(leader) and not files_of(down, SUFFIX),
    )


def test_an_attach_without_a_majority_fails_and_a_later_one_loses_nothing(cluster: Cluster) -> None:
    leader = cluster.leader()
    followers = [node for node in cluster.nodes.values() if node is not leader]
    sent = send(leader, 500, "8s")
    send(leader, 1, "1h")  # so that there is a message to compact, even if the takeover takes longer than 8 s
    for node in followers:
        node.kill()
    with pytest.raises(TimeballError):
        compact(leader)
    # No majority answers the leader, so its process restarts. The rows that were not attached are in the log.
    cluster.wait("the leader's process starts again", lambda: leader.text.count('"event":"ready"') == 2)
    for node in followers:
        node.start()
    second = cluster.leader(1)
    with second.client() as ball:
        assert ball.status()["schedule"]["table_rows"] == 0
    compact(second)
    cluster.wait("each message is released once", lambda: released(second) == sent)


def segments(node: NodeProcess) -> list[str]:
    return sorted(path.name for path in (node.data / "log").glob("*.log"))


def test_a_replica_that_lacks_deleted_segments_begins_with_the_leaders_first_segment(
    tmp_path: Path, etcd: object
) -> None:
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
        cluster.wait("the leader deletes segments", lambda: segments(leader)[0] > segments(down)[-1], 150)
        cluster.wait(
            "the follower deletes the same segments", lambda: segments(other)[0] == segments(leader)[0]
        )
        down.start()
        cluster.wait(
            "the restarted replica begins with the same segment",
            lambda: segments(down)[:1] == segments(leader)[:1],
        )
        replicas = {event["replica"] for event in down.events() if event["event"] == "ready"}
        assert len(replicas) == 1, "still the same replica, so its acknowledgements count"
        other.kill()
        with leader.client() as ball:
            ball.send("now", b"acknowledged by two replicas")
        leader.kill()
        other.start()
        second = cluster.leader(1)
        with second.client() as ball:
            assert ball.status()["schedule"]["table_rows"] == sum(sent.values())
            assert b"acknowledged by two replicas" in bodies_of(ball, "now")
