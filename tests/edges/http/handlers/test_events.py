"""Live tails over HTTP from a real node, read with the standard library, one event at a time."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.accounts import SECRETS, guarded_node
from tests.bounds import BOUND_S
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.edges.http import connection, requests
from timeball.edges.http.handlers import receives
from timeball.model.access import ANONYMOUS


class Event(NamedTuple):
    """The id of an event, and its message."""

    id: str
    message: dict[str, Any]


class Tail:
    """The events of one stream, read as they arrive."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.answer = answer
        self.comments = 0

    def blocks(self) -> Iterator[dict[str, str]]:
        """Yield the fields of each block of server-sent events, {} for one with comments only. Count the comments."""
        fields: dict[str, str] = {}
        while line := self.answer.readline():
            name, _, value = line.decode().rstrip("\n").partition(":")
            if not line.strip():
                yield fields
                fields = {}
            elif name:
                fields[name] = value.strip()
            else:
                self.comments += 1

    def events(self) -> Iterator[Event]:
        """Yield the events with data."""
        for fields in self.blocks():
            if "data" in fields:
                yield Event(fields["id"], json.loads(fields["data"]))


@contextmanager
def tail(
    node: RunningNode, topic: str, *, query: str = "", account: str = "", last: str = ""
) -> Iterator[Tail]:
    """Open a tail during a block. `last` is the id of the last event that the client has."""
    client = http.client.HTTPConnection("127.0.0.1", node.node.http_port, timeout=BOUND_S)
    headers = {"authorization": f"Bearer {account}:{SECRETS[account]}"} if account else {}
    headers |= {"last-event-id": last} if last else {}
    client.request("GET", f"/v1/topics/{topic}/events{query}", headers=headers)
    answer = client.getresponse()
    try:
        yield Tail(answer)
    finally:
        answer.close()
        client.close()


def request_limits(node: RunningNode) -> requests.RequestLimits:
    """Return the limits of the HTTP edge."""
    assert node.node.edges is not None
    return node.node.edges.http.limits


def open_streams(node: RunningNode) -> int:
    """Return the number of open streams of the HTTP edge."""
    return request_limits(node).streams.taken


def test_a_tail_shows_new_messages_and_ends_when_its_client_disconnects(
    node: RunningNode, client: Client
) -> None:
    client.send("tailed", {"body": "before"})
    with tail(node, "tailed") as seen:
        assert seen.answer.headers["content-type"] == "text/event-stream"
        assert "id" in next(seen.blocks())
        sent = client.send("tailed", {"body": "x", "after": "1ms", "key": "k", "tag": "t", "id": "tailed-1"})
        event = next(seen.events())
        assert event.message["body"] == "x"
        assert event.message["id"] == "tailed-1"
        assert event.message["due"] == sent.value["due"]
        assert open_streams(node) == 1
    eventually(lambda: open_streams(node) == 0, "the stream has ended")


def test_a_client_that_reconnects_misses_no_message(node: RunningNode, client: Client) -> None:
    client.send("again", [{"body": "x"}])
    with tail(node, "again") as seen:
        begun = next(seen.blocks())["id"]
    client.send("again", [{"body": str(i)} for i in range(20)])
    with tail(node, "again", last=begun) as seen:
        first = [next(seen.events()) for _ in range(7)]
    with tail(node, "again", last=first[-1].id) as seen:
        others = [next(seen.events()) for _ in range(13)]
    assert sorted(int(event.message["body"]) for event in first + others) == list(range(20))


def test_only_messages_with_the_tag_are_shown(node: RunningNode, client: Client) -> None:
    client.send("tagged", {"body": "x"})
    with tail(node, "tagged", query="?tag=red%20%7C%7C%20blue") as seen:
        next(seen.blocks())
        client.send("tagged", [{"body": tag, "tag": tag} for tag in ("green", "red", "blue", "green")])
        result = [next(seen.events()).message["tag"] for _ in range(2)]
    assert sorted(result) == ["blue", "red"]


def test_a_tail_without_messages_sends_keep_alives(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receives, "KEEP_ALIVE_S", 0.01)
    client.send("silent", {"body": "x"})
    with tail(node, "silent") as seen:
        blocks = seen.blocks()
        while seen.comments < 3:
            next(blocks)


def test_a_tail_ends_with_its_topic(node: RunningNode, client: Client) -> None:
    client.send("ending", {"body": "x"})
    with tail(node, "ending") as seen:
        next(seen.blocks())
        node.run(node.broker.administration.delete_topic("ending", ANONYMOUS))
        assert list(seen.events()) == []
    eventually(lambda: open_streams(node) == 0, "the stream has ended")


def test_a_client_that_does_not_read_is_closed(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "STREAM_READ_S", 0.05)
    monkeypatch.setattr(connection, "LAST_BYTES_S", 0.05)
    client.send("unread", {"body": "x"})
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        stuck.connect(("127.0.0.1", node.node.http_port))
        stuck.sendall(b"GET /v1/topics/unread/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: open_streams(node) == 1, "it has begun")

        def sent_and_closed() -> bool:
            """Send more messages, and check that the stream is closed."""
            client.send("unread", [{"body": "x" * 100_000} for _ in range(20)])
            return open_streams(node) == 0

        eventually(sent_and_closed, "a client that reads nothing is closed")
        eventually(lambda: request_limits(node).sent.held_bytes == 0, "nothing is held for it")
        eventually(
            lambda: node.node.edges is not None and node.node.edges.http.connections == 1,
            "its connection is gone",
        )


def test_a_head_request_has_no_body_and_streams_beyond_the_limit_are_refused(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.send("bounded", {"body": "x"})
    assert client.ask("HEAD", "/v1/topics/bounded/events").status == 200
    assert node.node.edges is not None
    monkeypatch.setattr(node.node.edges.http.limits.streams, "limit", 1)
    with tail(node, "bounded") as seen:
        next(seen.blocks())
        answer = client.ask("GET", "/v1/topics/bounded/events")
        assert (answer.status, answer.value["code"]) == (429, "over_limit")


def test_an_invalid_tail_request_gets_a_problem_document(client: Client) -> None:
    client.send("refusing", {"body": "x"})
    path = "/v1/topics/refusing/events"
    assert client.ask("GET", "/v1/topics/none-such/events").status == 404
    assert client.ask("GET", path, last_event_id="first").status == 400
    too_long = client.ask("GET", path, query={"tag": "a || b" * 3_000})  # encoded, it still fits into a head
    assert (too_long.status, too_long.value["code"]) == (400, "invalid_filter")


def test_an_account_without_receive_permission_gets_no_tail(tmp_path: Path) -> None:
    with guarded_node(tmp_path, http_port=0) as node:
        with client_of(node, f"Bearer shop:{SECRETS['shop']}") as shop:
            shop.send("orders", {"body": "x"})
            with client_of(node, f"Bearer other:{SECRETS['other']}") as other, client_of(node) as stranger:
                assert other.ask("GET", "/v1/topics/orders/events").status == 403
                assert other.ask("GET", "/v1/topics/none-such/events").status == 403
                assert stranger.ask("GET", "/v1/topics/orders/events").status == 401
            with tail(node, "orders", account="shop") as seen:
                next(seen.blocks())
                shop.send("orders", {"body": "seen"})
                assert next(seen.events()).message["body"] == "seen"


def test_a_broker_that_stops_ends_its_tails(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", http_port=0) as node, client_of(node) as client:
        client.send("stopping", {"body": "x"})
        with tail(node, "stopping") as seen:
            next(seen.blocks())
            assert node.node.edges is not None
            node.run(node.node.edges.http.close())
            assert open_streams(node) == 0
