"""Python clients over HTTP with the addresses of all nodes, while the leader is killed: each message is stored once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import running_cluster

from timeball import Timeball, Unavailable


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.xdist_group("etcd")
def test_no_message_is_lost_or_doubled_when_the_leader_is_killed(tmp_path: Path) -> None:
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s"}) as cluster:
        leader, record = cluster.leader(), cluster.view().record
        assert record is not None
        nodes = sorted(cluster.nodes.values(), key=lambda node: node is not leader)
        endpoint = "http://" + ",".join(f"{node.host}:{node.ports['http-port']}" for node in nodes)
        stopping, sent, failed = threading.Event(), list[str](), list[BaseException]()
        progress = threading.Semaphore(0)

        def send(number: int) -> None:
            count = 0
            with Timeball(endpoint, timeout_ms=10_000) as ball:
                while not stopping.is_set():
                    message_id = f"{number}-{count}"
                    try:
                        ball.send("killed-leader", message_id, message_id=message_id, retry=True)
                    except Unavailable:
                        continue  # no node leads yet: repeat the same send
                    except BaseException as error:  # reported below
                        failed.append(error)
                        return
                    sent.append(message_id)
                    count += 1
                    progress.release()

        threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(60):
                assert progress.acquire(timeout=BOUND_S), failed
            leader.kill()
            cluster.leader(record.epoch)
            for _ in range(60):
                assert progress.acquire(timeout=BOUND_S), failed
        finally:
            stopping.set()
            for thread in threads:
                thread.join(BOUND_S)
        assert not failed
        with Timeball(endpoint) as ball:
            received = Counter(
                message.body.decode() for message in ball.consume("killed-leader", "g", until_idle="2s")
            )
        assert received == Counter(sent)
