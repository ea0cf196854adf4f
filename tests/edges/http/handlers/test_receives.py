"""Receives and receipts over HTTP, against a real node."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor

from tests.bounds import BOUND_S
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode, eventually

from timeball.broker.consuming.requests import Received, ReceiveRequest
from timeball.broker.registry.groups import SubscriptionGroup


def receipts(client: Client, topic: str, **query: object) -> list[str]:
    """Receive messages, and return their receipts."""
    return [item["receipt"] for item in client.receive(topic, **query).value["messages"]]


def test_a_message_that_is_given_back_is_redelivered_and_counted(client: Client) -> None:
    client.send("again", {"body": "x"})
    (receipt,) = receipts(client, "again")
    query = {"group": "workers"}
    answer = client.ask("POST", "/v1/topics/again/nack", {"receipts": [receipt], "after": "0s"}, query=query)
    assert answer.value["results"][0]["valid"]
    (received,) = client.receive("again").value["messages"]
    assert received["attempt"] == 2
    longer = client.ask(
        "POST", "/v1/topics/again/extend", {"receipts": [received["receipt"]], "lease": "5m"}, query=query
    )
    assert longer.value["results"][0]["valid"]
    assert client.receive("again", wait="0").value == {"messages": []}


def test_a_poll_waits_for_the_first_message(node: RunningNode, client: Client) -> None:
    client.send("waited", {"body": "first", "after": "300ms"})
    assert [item["body"] for item in client.receive("waited", wait="30s").value["messages"]] == ["first"]


def test_messages_for_a_disconnected_client_go_to_another(node: RunningNode, client: Client) -> None:
    node.run(node.broker.create_topic("left"))
    with socket.create_connection(("127.0.0.1", node.node.http_port)) as disconnected:
        disconnected.sendall(
            b"POST /v1/topics/left/receive?group=workers&wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        eventually(
            lambda: node.node.edges is not None and node.node.edges.http.limits.calls.taken,
            "the poll is there",
        )
    eventually(
        lambda: node.node.edges is not None and not node.node.edges.http.limits.calls.taken,
        "the poll has ended",
    )
    client.send("left", {"body": "x"})
    assert [item["attempt"] for item in client.receive("left").value["messages"]] == [1]


def test_a_client_that_ends_its_direction_at_any_moment_takes_no_message(
    node: RunningNode, client: Client
) -> None:
    """The direction ends a varying number of loop turns after the message: before, during and after the hand-out."""
    consuming, server = node.broker.consuming, node.node.edges.http._server  # type: ignore[union-attr]
    request, query = ReceiveRequest("workers", "half-closed", invisible_ms=60_000), {"group": "workers"}
    node.run(node.broker.create_topic("half-closed", 1))

    async def return_and_end(held: Received, turns: int) -> None:
        """Give the message back, and end the direction of the waiting client after some turns of the loop."""
        while not consuming.waiting_receives:
            await asyncio.sleep(0)
        (connection,) = [each for each in server.server_state.connections if each._serving is not None]
        consuming.return_unseen(held.receipts)
        for _ in range(turns):
            await asyncio.sleep(0)
        connection.eof_received()

    answered = 0
    for turns in range(12):
        client.send("half-closed", {"body": "x"})
        held = node.run(consuming.receive(request, 0))
        with socket.create_connection(("127.0.0.1", node.node.http_port), BOUND_S) as leaving:
            leaving.sendall(
                b"POST /v1/topics/half-closed/receive?group=workers&wait=60s&lease=1h HTTP/1.1\r\n"
                b"Host: localhost\r\n\r\n"
            )
            node.run(return_and_end(held, turns))
            answer = leaving.makefile("rb").read()
        answered += bool(answer)
        value = (
            json.loads(answer.partition(b"\r\n\r\n")[2]) if answer else client.receive("half-closed").value
        )
        (message,) = value["messages"]
        assert message["attempt"] == 1
        client.ask("POST", "/v1/topics/half-closed/ack", {"receipts": [message["receipt"]]}, query=query)
    assert 0 < answered < 12


def test_a_receive_begins_when_the_client_reads_earlier_answers(node: RunningNode, client: Client) -> None:
    topics = ("unread-large", "unread-small")
    # The first message is larger than the buffers of both sockets.
    for topic, size_bytes in zip(topics, (4_000_000, 1), strict=True):
        client.send(topic, {"body": "x" * size_bytes})

    def held() -> list[str]:
        """Return the topics with leased messages."""
        return [
            queue.topic
            for queue in node.broker.consuming.leases.all()
            if queue.open_rows and queue.topic in topics
        ]

    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        unread.connect(("127.0.0.1", node.node.http_port))
        for topic in topics:
            head = (
                f"POST /v1/topics/{topic}/receive?group=workers&lease=1h HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            unread.sendall(head.encode())
        eventually(lambda: "unread-large" in held(), "the first is leased")
        server = node.node.edges.http._server  # type: ignore[union-attr]
        eventually(
            lambda: any(
                each._serving is not None and "unread-small" in each._serving.target.path
                for each in server.server_state.connections
            ),
            "the second is served",
        )
        assert held() == ["unread-large"]
    (received,) = client.receive("unread-small", wait="10s").value["messages"]
    assert received["attempt"] == 1


def test_messages_are_filtered_by_tags_or_by_sql(client: Client) -> None:
    client.send(
        "filtered", [{"body": tag, "tag": tag, "properties": {"n": str(n)}} for n, tag in enumerate("abc")]
    )

    def bodies(**query: str) -> set[str]:
        """Receive until no more messages come, and return their bodies."""
        result: set[str] = set()
        while messages := client.receive("filtered", wait="0", **query).value["messages"]:
            result |= {item["body"] for item in messages}
        return result

    assert bodies(group="by-tag", tag="a || c") == {"a", "c"}
    assert bodies(group="by-sql", sql="n > 0") == {"b", "c"}
    assert bodies(group="by-tag") == set(), "a message that a filter has skipped is not delivered later"
    for wrong in ({"tag": "a", "sql": "n > 0"}, {"sql": "n >"}):
        for topic in ("filtered", "not-there-yet"):
            answer = client.receive(topic, wait="30s", **wrong)
            assert (answer.status, answer.value["code"]) in {
                (400, "invalid_message"),
                (400, "invalid_filter"),
            }


def test_a_receipt_of_another_group_is_not_valid(client: Client) -> None:
    client.send("sealed", {"body": "x"})
    (receipt,) = receipts(client, "sealed")
    for group, text in (("others", receipt), ("workers", "made-up"), ("workers", "")):
        answer = client.ask("POST", "/v1/topics/sealed/ack", {"receipts": [text]}, query={"group": group})
        assert answer.value["results"] == [{"receipt": text, "valid": False}]


def test_a_receive_waits_for_the_creation_of_its_topic(node: RunningNode, client: Client) -> None:
    assert client.receive("to-come", wait="0").status == 404
    assert client.receive("to-come", wait="10ms").value == {"messages": []}
    assert "to-come" not in {item["topic"] for item in client.ask("GET", "/v1/topics").value["topics"]}
    with client_of(node) as other, ThreadPoolExecutor(1) as threads:
        polling = threads.submit(other.receive, "to-come", "early", wait="60s")
        eventually(lambda: node.broker.tables.groups.find_group("early") is not None, "the poll has come")
        client.send("to-come", {"body": "first"})
        (received,) = polling.result().value["messages"]
    assert received["body"] == "first"


def test_the_reason_of_a_nack_or_dead_letter_is_kept(client: Client) -> None:
    client.send("reasons", {"body": "x"})
    query, path = {"group": "workers"}, "/v1/topics/reasons"
    for reason, seen in (("no stock", None), ("<b>\x00" + "é" * 4_000, "no stock")):
        (received,) = client.receive("reasons").value["messages"]
        assert received.get("properties", {}).get("NACK_REASON") == seen
        given_back = {"receipts": [received["receipt"]], "after": "0s", "reason": reason}
        assert client.ask("POST", f"{path}/nack", given_back, query=query).value["results"][0]["valid"]
    (received,) = client.receive("reasons").value["messages"]
    assert received["properties"]["NACK_REASON"] == "<b> " + "é" * 510
    given_up = {"receipts": [received["receipt"]], "reason": "gone"}
    assert client.ask("POST", f"{path}/dead-letter", given_up, query=query).value["results"][0]["valid"]
    (letter,) = client.ask("GET", "/v1/groups/workers/dead-letters").value["dead_letters"]
    assert letter["reason"] == "gone"
    refused = client.ask("POST", f"{path}/nack", {"receipts": ["x"], "reason": 5}, query=query)
    assert refused.status == 400


def test_the_leases_of_a_group_are_counted(client: Client) -> None:
    client.send("held", {"body": "x"})
    (receipt,) = receipts(client, "held", group="holders")
    state = client.ask("GET", "/v1/groups/holders").value
    assert (state["in_flight"], state["topics"][0]["in_flight"]) == (1, 1)
    client.ask("POST", "/v1/topics/held/ack", {"receipts": [receipt]}, query={"group": "holders"})
    assert client.ask("GET", "/v1/groups/holders").value["in_flight"] == 0


def test_a_new_group_begins_at_the_given_start(node: RunningNode, client: Client) -> None:
    for body in ("first", "second"):
        client.send("begun", {"body": body})

    def bodies(group: str, **query: object) -> list[str]:
        """Receive once, and return the bodies."""
        return [item["body"] for item in client.receive("begun", group, wait="0", **query).value["messages"]]

    assert bodies("latest", start="latest") == []
    assert sorted(bodies("earliest", start="earliest")) == sorted(bodies("default")) == ["first", "second"]
    assert bodies("tomorrow", start=str(node.broker.clock.now_ms() + 86_400_000)) == []
    assert len(bodies("long-ago", start="2001-01-01T00:00:00Z")) == 2
    client.send("begun", {"body": "third"})
    for group in ("latest", "tomorrow"):  # it is not new any more
        assert bodies(group, start="earliest") == ["third"]


def test_an_invalid_start_is_refused(client: Client) -> None:
    client.send("begun", {"body": "first"})
    for start in ("newest", "yesterday", "-1", "1800000000"):
        answer = client.receive("begun", start=start)
        assert answer.status == 400
        assert f"start={start}: earliest, latest, or an instant" in answer.value["detail"]


def test_a_message_that_no_handler_saw_is_given_back_without_an_attempt(client: Client) -> None:
    client.send("unseen", {"body": "x", "after": "1ms"})
    query = {"group": "workers"}
    (received,) = client.receive("unseen", lease="1ms", wait="10s").value["messages"]
    assert received["scheduled_seq"] < received["seq"]
    for verb, fields, attempt in (
        ("extend", {"lease": "0s", "counts": False}, 2),  # the lease of 1 ms had ended by itself
        ("nack", {"after": "0s", "counts": False}, 2),
        ("nack", {"after": "0s"}, 2),
    ):
        (received,) = client.receive("unseen", wait="10s").value["messages"]
        assert received["attempt"] == attempt, verb
        body = {"receipts": [received["receipt"]], **fields}
        assert client.ask("POST", f"/v1/topics/unseen/{verb}", body, query=query).value["results"][0]["valid"]
    (received,) = client.receive("unseen", wait="10s").value["messages"]
    assert received["attempt"] == 3


def test_a_message_may_be_given_back_for_longer_than_a_lease(client: Client) -> None:
    client.send("days", {"body": "x"})
    (receipt,) = receipts(client, "days")
    body = {"receipts": [receipt], "after": "365d"}
    answer = client.ask("POST", "/v1/topics/days/nack", body, query={"group": "workers"})
    assert answer.value["results"][0]["valid"]


def test_a_nack_in_order_is_at_most_as_long_as_a_lease(node: RunningNode, client: Client) -> None:
    node.broker.tables.groups.update(SubscriptionGroup("in-order", consume_message_orderly=True))
    client.send("ordered-days", {"body": "x"})
    (receipt,) = receipts(client, "ordered-days", group="in-order")
    body = {"receipts": [receipt], "after": "13h"}
    refused = client.ask("POST", "/v1/topics/ordered-days/nack", body, query={"group": "in-order"})
    assert (refused.status, refused.value["code"]) == (400, "invalid_delay")
    assert refused.value["detail"] == (
        "after=46800000 ms: between 0 and 43200000 ms for a message that is leased in order"
    )
