"""Streams with credit over HTTP, against a real node: read with the standard library, a line at a time."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.accounts import ACCESS_FILE, SECRETS, guarded_node
from tests.bounds import BOUND_S
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode, eventually

from timeball.broker.consuming.engine import Consuming
from timeball.edges.http import requests
from timeball.edges.http.handlers import receives
from timeball.model import limits
from timeball.model.access import parse


class Lines:
    """The lines of one stream, read as they arrive. `empty_lines` is the number of lines without a message."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.answer = answer
        self.empty_lines = 0

    def messages(self, count: int) -> list[dict[str, Any]]:
        """Read lines until there are `count` messages."""
        messages: list[dict[str, Any]] = []
        while len(messages) < count and (line := self.answer.readline()):
            if line == b"\n":
                self.empty_lines += 1
            else:
                messages.append(json.loads(line))
        return messages


@contextmanager
def stream(node: RunningNode, topic: str, query: str = "", account: str = "") -> Iterator[Lines]:
    """Open a stream of the group `workers` during a block."""
    client = http.client.HTTPConnection("127.0.0.1", node.node.http_port, timeout=BOUND_S)
    headers = {"authorization": f"Bearer {account}:{SECRETS[account]}"} if account else {}
    client.request("POST", f"/v1/topics/{topic}/stream?group=workers{query}", headers=headers)
    answer = client.getresponse()
    try:
        yield Lines(answer)
    finally:
        answer.close()
        client.close()


def acknowledge(client: Client, topic: str, messages: list[dict[str, Any]]) -> list[bool]:
    """Acknowledge messages, and return for each whether its receipt was valid."""
    receipts = {"receipts": [message["receipt"] for message in messages]}
    answer = client.ask("POST", f"/v1/topics/{topic}/ack", receipts, query={"group": "workers"})
    return [result["valid"] for result in answer.value["results"]]


def consuming(node: RunningNode) -> Consuming:
    """Return the broker's part with the leases."""
    part: Consuming = node.broker.consuming
    return part


def held(node: RunningNode, topic: str) -> int:
    """Count the leased messages of a topic."""
    return sum(queue.open_rows for queue in consuming(node).leases.all() if queue.topic == topic)


def test_a_stream_delivers_messages_as_they_become_visible(node: RunningNode, client: Client) -> None:
    with stream(node, "flowing") as lines:  # the first message creates the topic
        assert lines.answer.status == 200
        assert lines.answer.getheader("content-type") == "application/x-ndjson"
        client.send("flowing", {"body": "now"})
        client.send("flowing", {"body": "later", "after": "200ms"})
        received = lines.messages(2)
        assert [message["body"] for message in received] == ["now", "later"]
        assert received[1]["lateness_ms"] >= 0
        assert acknowledge(client, "flowing", received) == [True, True]
    assert held(node, "flowing") == 0


def test_a_stream_holds_no_more_messages_than_its_credit(node: RunningNode, client: Client) -> None:
    client.send("scarce", [{"body": str(n)} for n in range(5)])
    with stream(node, "scarce", "&credit=2") as lines:
        first = lines.messages(2)
        assert held(node, "scarce") == 2
        assert acknowledge(client, "scarce", first[:1]) == [True]
        (third,) = lines.messages(1)
        # A message that is given back returns credit, too.
        query = {"group": "workers"}
        back = {"receipts": [first[1]["receipt"]], "after": "1h"}
        assert client.ask("POST", "/v1/topics/scarce/nack", back, query=query).value["results"][0]["valid"]
        (fourth,) = lines.messages(1)
        assert acknowledge(client, "scarce", [third, fourth]) == [True, True]
        (fifth,) = lines.messages(1)
        bodies = {message["body"] for message in (*first, third, fourth, fifth)}
        assert bodies == {"0", "1", "2", "3", "4"}


def test_a_lease_that_ends_returns_credit(node: RunningNode, client: Client) -> None:
    client.send("ending", [{"body": str(n)} for n in range(2)])
    with stream(node, "ending", "&credit=1&lease=1s") as lines:
        received = lines.messages(3)
    attempts = sorted((message["body"], message["attempt"]) for message in received)
    assert len({body for body, _ in attempts}) == 2
    assert sum(attempt == 2 for _, attempt in attempts) >= 1


def test_a_slow_stream_delays_no_other_consumer(node: RunningNode, client: Client) -> None:
    with stream(node, "shared", "&credit=1") as slow:
        client.send("shared", [{"body": str(n)} for n in range(4)])
        assert len(slow.messages(1)) == 1
        received = client.receive("shared", max=10).value["messages"]
        assert len(received) == 3


def test_messages_of_a_closed_stream_stay_valid_until_their_leases_end(
    node: RunningNode, client: Client
) -> None:
    client.send("closed", {"body": "x"})
    with stream(node, "closed") as lines:
        received = lines.messages(1)
    eventually(
        lambda: node.node.edges is not None and not node.node.edges.http.limits.streams.taken, "it has ended"
    )
    assert acknowledge(client, "closed", received) == [True]


def test_messages_that_a_stream_could_not_write_come_back(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "STREAM_READ_S", 0.1)
    size_bytes = 4_000_000  # more than the buffers of both sockets
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        unread.connect(("127.0.0.1", node.node.http_port))
        unread.sendall(
            b"POST /v1/topics/unread/stream?group=workers&lease=1h HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        # One message in each chunk. The first one fills the buffer of the transport, and the second one waits.
        client.send("unread", {"body": "x" * size_bytes})
        eventually(lambda: held(node, "unread") == 1, "the first is leased")
        client.send("unread", {"body": "x" * size_bytes})
        eventually(lambda: not node.node.edges.http.limits.streams.taken, "the stream is given up")  # type: ignore[union-attr]
    (message,) = client.receive("unread", wait="10s").value["messages"]
    assert message["attempt"] == 1
    assert held(node, "unread") == 2, "the first one may have been read"


def test_an_idle_stream_sends_empty_lines(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receives, "KEEP_ALIVE_S", 0.05)
    client.send("idle", [{"body": "x"}, {"body": "y"}])
    with stream(node, "idle", "&credit=1") as lines:
        received = lines.messages(1)
        while lines.empty_lines < 3:  # without credit
            lines.empty_lines += lines.answer.readline() == b"\n"
        acknowledge(client, "idle", received)
        acknowledge(client, "idle", lines.messages(1))
        lines.empty_lines = 0
        while lines.empty_lines < 3:  # without messages
            lines.empty_lines += lines.answer.readline() == b"\n"


def test_a_stream_continues_after_the_limit_of_waiting_receives_is_reached(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receives, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(receives, "OVER_LIMIT_PAUSE_S", 0.01)
    client.send("limited", {"body": "x"})
    with stream(node, "limited") as lines:
        lines.messages(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "PULLS_WAITING_MAX", 0)
            assert client.receive("limited", wait="1s").status == 429
            for _ in range(10):
                assert lines.answer.readline() == b"\n"
        client.send("limited", {"body": "y"})
        assert [message["body"] for message in lines.messages(1)] == ["y"]


def test_a_stream_ends_in_order_when_its_topic_is_deleted(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receives, "KEEP_ALIVE_S", 0.05)
    client.send("deleted", {"body": "x"})
    with stream(node, "deleted") as lines:
        acknowledge(client, "deleted", lines.messages(1))
        assert client.ask("DELETE", "/v1/topics/deleted").status == 200
        assert not lines.answer.read().strip()  # raises IncompleteRead if the connection breaks


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("&credit=0", 416),
        ("&credit=10001", 416),
        ("&credit=x", 416),
        ("&lease=0", 416),
        ("&tag=a&sql=b", 400),
    ],
)
def test_an_invalid_stream_is_refused(node: RunningNode, client: Client, query: str, status: int) -> None:
    client.send("refused", {"body": "x"})
    with stream(node, "refused", query) as lines:
        assert lines.answer.status == status


def test_a_removed_account_gets_no_message_that_it_waited_for(tmp_path: Path) -> None:
    with guarded_node(tmp_path, http_port=0) as node, ThreadPoolExecutor(1) as threads:
        node.run(node.broker.create_topic("orders"))
        with (
            stream(node, "orders", account="shop") as lines,
            client_of(node, f"Bearer shop:{SECRETS['shop']}") as shop,
            client_of(node, f"Bearer root:{SECRETS['root']}") as root,
        ):
            polling = threads.submit(shop.receive, "orders", wait="60s")
            eventually(lambda: consuming(node).waiting_receives == 2, "both wait")
            access, accounts = node.node.security.access, parse(ACCESS_FILE.encode(), "access.toml")
            assert access is not None
            access.replace({name: account for name, account in accounts.items() if name != "shop"})
            root.send("orders", {"body": "x"})
            assert polling.result().status == 401
            assert lines.messages(1) == [], "the stream has ended"
            (received,) = root.receive("orders", wait="60s").value["messages"]
            assert received["attempt"] == 1


def test_a_stream_needs_the_right_to_receive(tmp_path: Path) -> None:
    with guarded_node(tmp_path, http_port=0) as node:
        with client_of(node, f"Bearer shop:{SECRETS['shop']}") as shop:
            shop.send("orders", {"body": "x"})
        with stream(node, "orders", account="other") as lines:
            assert lines.answer.status == 403
        with stream(node, "orders") as lines:
            assert lines.answer.status == 401
