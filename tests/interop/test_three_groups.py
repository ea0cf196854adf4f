"""Three groups on three machines, one of which is killed: RocketMQ's producer continues without a failed call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.supervised import Supervised, blocks_of_ports, run_cluster
from tests.cluster.etcd_cluster import EtcdCluster, need_etcd
from tests.interop.conversation import JAVA5
from tests.interop.drivers import ClientError, Driver, Json, driving
from tests.interop.stock_clients import command
from tests.rounds import only_in_a_siege

from timeball import Timeball
from timeball.cli.serve import PORTS_APART

pytestmark = [
    pytest.mark.interop,
    pytest.mark.xdist_group("etcd"),
    # No call may fail, so it wants a disk that does not stall: with etcd without an answer for half a minute no group
    # has a leader. For a machine that does nothing else.
    pytest.mark.siege,
    only_in_a_siege,
]

MACHINES, GROUPS = ("a", "b", "c"), ("g1", "g2", "g3")
TOPIC, THREADS = "three-groups", 8
BEFORE, AFTER = 400, 1_200  # messages


@contextmanager
def three_machines(folder: Path) -> Iterator[dict[str, Supervised]]:
    """Run three machines, by name, each with a node of each group. Each machine leads one group."""
    with EtcdCluster(folder / "etcd") as etcd:
        machines: dict[str, Supervised] = {}
        try:
            for name, ports in zip(MACHINES, blocks_of_ports(len(MACHINES), len(GROUPS)), strict=True):
                machines[name] = Supervised(
                    folder / name, etcd.endpoints, ports, node=name, groups=",".join(GROUPS)
                )
            for machine in machines.values():
                machine.wait(lambda machine=machine: len(machine.events(event="ready")) == len(GROUPS))
            for leader, group in zip(MACHINES, GROUPS, strict=True):
                nodes = ",".join(f"{name}.{group}" for name in MACHINES)
                run_cluster(etcd.endpoints, "init", "--group", group, "--nodes", nodes)
                wait_leader(machines, group)
                run_cluster(etcd.endpoints, "hand-over", "--group", group, "--to", f"{leader}.{group}")
                machines[leader].wait(
                    lambda leader=leader, group=group: machines[leader].events(event="leads", group=group)
                )
                index = GROUPS.index(group)
                port = machines[leader].ports["http-port"] + index * PORTS_APART
                with Timeball(f"http://127.0.0.1:{port}") as ball:
                    ball.create_topic(TOPIC, 4)
            yield machines
        finally:
            running = [machine for machine in machines.values() if machine.process.poll() is None]
            with ThreadPoolExecutor(len(MACHINES)) as pool:
                list(pool.map(Supervised.end, running))


def wait_leader(machines: dict[str, Supervised], group: str) -> None:
    """Wait until a group has a leader."""
    first = machines[MACHINES[0]]  # `wait` of any machine waits for a condition
    first.wait(lambda: [each for each in machines.values() if each.events(event="leads", group=group)])


class Producer:
    """RocketMQ's producer. Any thread may send. `sent` has the results by body, and `failures` the failed calls."""

    def __init__(self, client: Driver) -> None:
        self._client = client
        self.sent: dict[str, Json] = {}
        self.failures: list[ClientError] = []
        self.slowest_s = 0.0
        client.call("producer", name="producer", group="producers")

    def send(self, body: str) -> None:
        """Send a message, note the result or the error, and the duration of the slowest call."""
        begin_s = time.monotonic()
        try:
            sent = self._client.call("send", producer="producer", topic=TOPIC, body=body)
        except ClientError as error:
            self.failures.append(error)
        else:
            self.sent[body] = sent
        self.slowest_s = max(self.slowest_s, time.monotonic() - begin_s)


def test_no_send_fails_and_no_message_is_lost_when_one_of_three_machines_is_killed(tmp_path: Path) -> None:
    need_etcd()
    start = command(JAVA5)
    with three_machines(tmp_path) as machines:
        name_servers = ";".join(f"127.0.0.1:{each.ports['name-server-port']}" for each in machines.values())
        with driving(start, name_servers, tmp_path / "home") as client, ThreadPoolExecutor(THREADS) as pool:
            client.call("consumer", name="consumer", group="consumers", topic=TOPIC, expression="*")
            producer = Producer(client)
            list(pool.map(producer.send, [f"before {n}" for n in range(BEFORE)]))
            assert {sent["broker"] for sent in producer.sent.values()} == set(GROUPS)
            kill = pool.submit(machines["c"].kill)
            list(pool.map(producer.send, [f"after {n}" for n in range(AFTER)]))
            kill.result()

            def consumed() -> Counter[str]:
                return Counter(message["body"] for message in client.deliveries("consumer", done=True))

            client.wait_until(
                lambda: consumed().keys() >= producer.sent.keys(),
                lambda: f"lost: {sorted(producer.sent.keys() - consumed().keys())[:20]}",
            )
    shares = Counter(sent["broker"] for body, sent in producer.sent.items() if body.startswith("after"))
    print(
        f"{len(producer.failures)} calls failed, slowest {producer.slowest_s:.2f} s, sent after to {dict(shares)}"
    )
    assert not producer.failures
    assert {"g1", "g2"} <= shares.keys()
