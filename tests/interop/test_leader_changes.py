"""Stock clients of both protocols while the leader of their group is killed again and again: no message is lost.

Each client sends, immediately and delayed, and consumes. Its answers are compared with the deliveries (a total queue):
every acknowledged message comes, and no other one. After a failed call a client sends the next message.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import Cluster, client_of, running_cluster
from tests.interop.conversation import JAVA4, JAVA5
from tests.interop.drivers import ClientError, Driver, Json, driving
from tests.interop.grpc_conversation import GO, JAVA, PYTHON
from tests.interop.stock_clients import command
from tests.rounds import rounds

from timeball.io.clock import SystemClock

pytestmark = [pytest.mark.interop, pytest.mark.siege, pytest.mark.xdist_group("etcd")]

GRPC = (PYTHON, JAVA, GO)
CHANGES, SENDS_BETWEEN, EVERY_S = rounds(3, 10), 10, 0.1
LATER_MS = 2_000
CLOCK = SystemClock()


class Client:
    """One stock client with a topic of its own."""

    def __init__(self, which: str, driver: Driver) -> None:
        self.which, self.topic, self._driver = which, topic_of(which), driver
        self.acknowledged: set[str] = set()
        self.attempted: set[str] = set()
        self.failed_calls = 0
        self.longest_s = 0.0  # without an acknowledgement
        is_grpc = which in GRPC
        producer = {"topic": self.topic} if is_grpc else {"group": f"{which}-producers"}
        driver.call("producer", name="producer", **producer)
        driver.call(
            "push" if is_grpc else "consumer",
            name="consumer", group=f"{which}-consumers", topic=self.topic, expression="*",
        )  # fmt: skip
        self._later: Callable[[int], Json] = (
            (lambda due_ms: {"due_ms": due_ms})
            if is_grpc
            else (lambda due_ms: {"timer": "TIMER_DELIVER_MS", "timer_value": due_ms})
        )

    def send_until(self, ended: threading.Event) -> None:
        """Send one message after the other until `ended` is set, every other message with a due time."""
        number, last_s = 0, time.monotonic()
        while not ended.wait(EVERY_S):
            number += 1
            body = f"{self.which} {number}"
            # Whole seconds, rounded up, because the Python client sends whole seconds.
            later = self._later(-(-(CLOCK.wall_ms() + LATER_MS) // 1_000) * 1_000) if number % 2 else {}
            self.attempted.add(body)
            try:
                self._driver.call("send", producer="producer", topic=self.topic, body=body, **later)
            except ClientError:
                self.failed_calls += 1
            else:
                self.acknowledged.add(body)
                self.longest_s = max(self.longest_s, time.monotonic() - last_s)
                last_s = time.monotonic()

    def consumed(self) -> Counter[str]:
        """Return how often each body was consumed."""
        return Counter(message["body"] for message in self._driver.deliveries("consumer", done=True))

    def check(self) -> str:
        """Wait until all acknowledged messages are consumed. Return a line about the client for the output."""
        self._driver.wait_until(
            lambda: self.consumed().keys() >= self.acknowledged,
            lambda: f"lost: {sorted(self.acknowledged - self.consumed().keys())[:20]}",
        )
        consumed = self.consumed()
        assert consumed.keys() <= self.attempted, "a message that was never sent"
        twice = sum(count > 1 for count in consumed.values())
        return (
            f"{self.which}: {len(self.acknowledged)} acknowledged, {self.failed_calls} failed calls, {twice} twice, "
            f"longest without an acknowledgement {self.longest_s:.1f} s"
        )


def topic_of(which: str) -> str:
    """Return the name of a client's topic."""
    return f"leaders-{which.replace('_', '-')}"


def change_leader(cluster: Cluster) -> None:
    """Kill the leader, wait until another node leads, and start the killed node again."""
    leader, epoch = cluster.leader(), cluster.epoch()
    leader.kill(signal.SIGKILL)
    cluster.leader(epoch)
    leader.start()
    cluster.wait("three nodes are registered", lambda: len(cluster.ask("nodes")) == 3)  # type: ignore[arg-type]


def test_no_message_is_lost_over_many_leader_changes(tmp_path: Path) -> None:
    need_etcd()
    commands = {which: command(which) for which in (JAVA4, JAVA5, *GRPC)}
    with running_cluster(tmp_path) as cluster:
        cluster.leader()
        nodes = list(cluster.nodes.values())
        with client_of(nodes) as ball:
            for which in commands:
                ball.create_topic(topic_of(which), 2)
        ports = {edge: [f"127.0.0.1:{node.ports[edge]}" for node in nodes] for edge in nodes[0].ports}
        dialled = {
            which: ";".join(ports["grpc-port" if which in GRPC else "name-server-port"]) for which in commands
        }
        ended = threading.Event()
        with ThreadPoolExecutor(2 * len(commands)) as pool:

            def live(which: str) -> str:
                """Let a client send until `ended`, and check its messages. Return its line for the output."""
                with driving(commands[which], dialled[which], tmp_path / which) as driver:
                    client = Client(which, driver)
                    clients.append(client)
                    client.send_until(ended)
                    return client.check()

            clients: list[Client] = []
            stories = [pool.submit(live, which) for which in commands]
            try:
                for _ in range(CHANGES):
                    wait_sends(clients, stories, len(commands))
                    change_leader(cluster)
                wait_sends(clients, stories, len(commands))
            finally:
                ended.set()
            print("\n".join(story.result() for story in stories))


def wait_sends(clients: list[Client], stories: list[object], count: int) -> None:
    """Wait until all `count` clients run, and each has SENDS_BETWEEN more acknowledged sends.

    `stories` are the futures of `live`. Raises the error of a client that has ended.
    """
    while len(clients) < count:
        raise_first(stories)
        time.sleep(0.05)
    wanted = {client.which: len(client.acknowledged) + SENDS_BETWEEN for client in clients}
    while any(len(client.acknowledged) < wanted[client.which] for client in clients):
        raise_first(stories)
        time.sleep(0.05)


def raise_first(stories: list[object]) -> None:
    """Raise the error of a client that has ended, AssertionError for a client that has ended without an error."""
    for story in stories:
        if story.done():  # type: ignore[attr-defined]
            story.result()  # type: ignore[attr-defined]
            raise AssertionError("a client has ended")
