"""Each verb over HTTP, against a real node, with the standard library's client."""

from __future__ import annotations

import base64
import json
import socket
from pathlib import Path

import pytest
from tests.accounts import SECRETS, guarded_node
from tests.node_fixture import RunningNode, eventually, running_node
from tests.protocols.http.client import Client, client_of


def receipts(client: Client, topic: str, **query: object) -> list[str]:
    return [one["receipt"] for one in client.receive(topic, **query).value["messages"]]


# ---- sends --------------------------------------------------------------------------------------------------


def test_a_message_for_now_is_received_and_acknowledged(client: Client) -> None:
    sent = client.send("now", {"body": "hello", "key": "order-7", "tag": "new", "properties": {"a": "1"}})
    assert sent.status == 201
    assert sent.value["durable"] is True
    assert "due" not in sent.value
    (got,) = client.receive("now").value["messages"]
    assert (got["body"], got["keys"], got["tag"]) == ("hello", ["order-7"], "new")
    assert got["properties"]["a"] == "1"
    assert (got["id"], got["attempt"], got["topic"]) == (sent.value["id"], 1, "now")
    answer = client.ask(
        "POST", "/v1/topics/now/ack", {"receipts": [got["receipt"]]}, query={"group": "workers"}
    )
    assert answer.value == {"results": [{"receipt": got["receipt"], "valid": True}]}
    again = client.ask(
        "POST", "/v1/topics/now/ack", {"receipts": [got["receipt"]]}, query={"group": "workers"}
    )
    assert again.value["results"][0]["valid"] is False


def test_bodies_come_back_as_they_were(client: Client) -> None:
    raw = bytes(range(256))
    messages = [{"json": {"b": [1, 2.50, None]}}, {"base64": base64.b64encode(raw).decode()}, {"body": "ü☃"}]
    assert client.send("bodies", messages).status == 201
    got = {}
    while len(got) < 3:
        got |= {one["id"]: one for one in client.receive("bodies").value["messages"]}
    found = sorted(got.values(), key=lambda one: one["seq"])
    assert json.loads(found[0]["body"]) == {"b": [1, 2.5, None]}
    assert base64.b64decode(found[1]["base64"]) == raw
    assert found[2]["body"] == "ü☃"


@pytest.mark.parametrize("after", ["30m", "PT30M", 1_800_000, "1800000", "PT0.5H"])
def test_a_delay_is_read_in_each_form(client: Client, node: RunningNode, after: object) -> None:
    before_ms = node.broker.parts.clock.now_ms()
    sent = client.send("later", {"body": "x", "delay": after})
    assert sent.status == 201, sent
    assert before_ms + 1_800_000 <= sent.value["due_ms"] <= node.broker.parts.clock.now_ms() + 1_800_000


@pytest.mark.parametrize("at", ["2031-01-31T09:00:00Z", "2031-01-31T10:00:00.000+01:00", 1_927_616_400_000])
def test_an_instant_is_read_in_each_form(client: Client, at: object) -> None:
    sent = client.send("later", {"body": "x", "deliver_at": at})
    assert sent.value["due"] == "2031-01-31T09:00:00.000Z"


def test_many_are_taken_as_an_array_or_line_by_line(client: Client) -> None:
    lines = b"".join(b'{"body": "%d", "delay": "1h"}\n' % at for at in range(3_000))
    sent = client.send("many", lines, content_type="application/x-ndjson")
    assert len({one["id"] for one in sent.value["messages"]}) == 3_000
    seqs = [one["seq"] for one in sent.value["messages"]]
    assert seqs == list(range(seqs[0], seqs[0] + 3_000))
    assert len(client.send("many", [{"body": "x"}]).value["messages"]) == 1


def test_a_cloud_event_is_a_message_with_its_attributes(client: Client) -> None:
    event = {
        "ce_specversion": "1.0",
        "ce_id": "e-1",
        "ce_source": "/shop",
        "ce_type": "paid",
        "ce_note": "a%20b",
    }
    sent = client.send("events", b"\xff\x00", **event, content_type="image/png", timeball_key="order-7")
    assert (sent.status, sent.value["id"]) == (201, "e-1")
    (got,) = client.receive("events").value["messages"]
    assert base64.b64decode(got["base64"]) == b"\xff\x00"
    assert got["keys"] == ["order-7"]
    wanted = {"ce-id": "e-1", "ce-source": "/shop", "ce-note": "a b", "content-type": "image/png"}
    assert wanted.items() <= got["properties"].items()
    later = client.send("events", b"", **event, timeball_delay="PT1H")
    assert "due" in later.value
    at = client.send("events", b"", **event, timeball_deliver_at="1927616400000")
    assert at.value["due"] == "2031-01-31T09:00:00.000Z"


@pytest.mark.parametrize("wrong", [{"ce_specversion": "0.3"}, {"ce_id": ""}, {"timeball_delay": "soon"}])
def test_a_cloud_event_that_is_none(client: Client, wrong: dict[str, str]) -> None:
    event = {"ce_specversion": "1.0", "ce_id": "e-1", "ce_source": "/shop", "ce_type": "paid"}
    assert client.send("events", b"x", **{**event, **wrong}).status == 400


def test_a_send_with_a_key_is_taken_once(client: Client) -> None:
    first = client.send("once", {"body": "a", "delay": "1h"}, idempotency_key="k1")
    again = client.send("once", {"body": "a", "delay": "1h"}, idempotency_key="k1")
    assert first.status == again.status == 201
    assert first.value == again.value
    other = client.send("once", {"body": "b", "delay": "1h"}, idempotency_key="k1")
    assert (other.status, other.value["code"]) == (409, "conflict")


# ---- scheduled messages -----------------------------------------------------------------------------------------


def test_a_scheduled_message_is_looked_at_moved_and_cancelled(client: Client) -> None:
    message_id = client.send("plans", {"body": "x", "delay": "1h"}).value["id"]
    path = f"/v1/messages/{message_id}"
    (place,) = client.ask("GET", path).value["messages"]
    assert (place["state"], place["topic"]) == ("waiting", "plans")
    moved = client.ask("PATCH", path, {"deliver_at": "2031-01-31T09:00:00Z"})
    assert (moved.status, moved.value["verdict"]) == (200, "rescheduled")
    (place,) = client.ask("GET", path).value["messages"]
    assert place["due"] == "2031-01-31T09:00:00.000Z"
    assert client.ask("DELETE", path).value["verdict"] == "cancelled"
    (place,) = client.ask("GET", path).value["messages"]
    assert place["state"] == "cancelled"
    late = client.ask("DELETE", path)
    assert (late.status, late.value["code"]) == (409, "already_cancelled")


def test_a_delivered_message_says_where_it_is(client: Client) -> None:
    message_id = client.send("plans", {"body": "x", "delay": 1}).value["id"]

    def places() -> list[dict[str, object]]:
        found: list[dict[str, object]] = client.ask("GET", f"/v1/messages/{message_id}").value["messages"]
        return found

    eventually(lambda: places()[0]["state"] == "visible", "released")
    (place,) = places()
    assert {"queue_id", "queue_offset", "at", "due"} <= place.keys()
    assert client.ask("DELETE", f"/v1/messages/{message_id}").value["code"] == "released"


def test_an_id_that_there_is_not(client: Client) -> None:
    for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"delay": "1h"})):
        answer = client.ask(method, "/v1/messages/none", body)
        assert (answer.status, answer.value["code"]) == (404, "not_found")


# ---- groups -------------------------------------------------------------------------------------------------------


def test_what_is_given_back_comes_again_and_counts(client: Client) -> None:
    client.send("again", {"body": "x"})
    (receipt,) = receipts(client, "again")
    query = {"group": "workers"}
    answer = client.ask("POST", "/v1/topics/again/nack", {"receipts": [receipt], "delay": 0}, query=query)
    assert answer.value["results"][0]["valid"]
    (got,) = client.receive("again").value["messages"]
    assert got["attempt"] == 2
    longer = client.ask(
        "POST", "/v1/topics/again/extend", {"receipts": [got["receipt"]], "lease": "5m"}, query=query
    )
    assert longer.value["results"][0]["valid"]
    assert client.receive("again", wait="0").value == {"messages": []}


def test_a_poll_waits_for_the_first_message(node: RunningNode, client: Client) -> None:
    client.send("waited", {"body": "first", "delay": 300})
    assert [one["body"] for one in client.receive("waited", wait="30s").value["messages"]] == ["first"]


def test_what_a_client_that_has_gone_was_to_get_comes_to_another(node: RunningNode, client: Client) -> None:
    node.run(node.broker.create_topic("left"))
    with socket.create_connection(("127.0.0.1", node.node.http_port)) as gone:
        gone.sendall(b"GET /v1/topics/left/messages?group=workers&wait=60s HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: node.node.http is not None and node.node.http.room.calls, "the poll is there")
    eventually(lambda: node.node.http is not None and not node.node.http.room.calls, "the poll has ended")
    client.send("left", {"body": "x"})
    assert [one["attempt"] for one in client.receive("left").value["messages"]] == [1]


def test_a_receipt_of_another_group_is_not_valid(client: Client) -> None:
    client.send("sealed", {"body": "x"})
    (receipt,) = receipts(client, "sealed")
    for group, text in (("others", receipt), ("workers", "made-up"), ("workers", "")):
        answer = client.ask("POST", "/v1/topics/sealed/ack", {"receipts": [text]}, query={"group": group})
        assert answer.value["results"] == [{"receipt": text, "valid": False}]


# ---- people, accounts -----------------------------------------------------------------------------------------------


def test_topics_and_health(client: Client) -> None:
    client.send("listed", {"body": "x"})
    assert {"topic": "listed", "queues": 8} in client.ask("GET", "/v1/topics").value["topics"]
    assert client.ask("GET", "/health/live").value == {"status": "live"}
    assert client.ask("GET", "/health/ready").value == {"status": "ready"}


def test_a_full_disk_is_not_ready(client: Client, node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(node.broker.parts.writer), "no_room", True)
    answer = client.ask("GET", "/health/ready")
    assert (answer.status, answer.value["code"]) == (503, "unavailable")
    assert "disk full" in answer.value["detail"]


def test_each_account_does_what_its_lines_say(tmp_path: Path) -> None:
    def bearer(account: str) -> str:
        return f"Bearer {account}:{SECRETS[account]}"

    with guarded_node(tmp_path, http_port=0) as node:
        with client_of(node) as stranger, client_of(node, "Bearer shop:wrong") as liar:
            for one in (stranger, liar):
                answer = one.send("orders", {"body": "x"})
                assert (answer.status, answer.value["code"]) == (401, "unauthorized")
                assert answer.headers["www-authenticate"].startswith("Bearer")
            assert stranger.ask("GET", "/health/live").status == 200
        with client_of(node, bearer("shop")) as shop, client_of(node, bearer("other")) as other:
            sent = shop.send("orders", {"body": "x", "delay": "1h"})
            assert sent.status == 201
            path = f"/v1/messages/{sent.value['id']}"
            for method, body in (("GET", None), ("PATCH", {"delay": "2h"}), ("DELETE", None)):
                assert other.ask(method, path, body).status == 404
            assert other.send("orders", {"body": "x"}).value["code"] == "forbidden"
            assert other.receive("orders", group="readers").status == 403
            acked = other.ask(
                "POST", "/v1/topics/orders/ack", {"receipts": ["x"]}, query={"group": "workers"}
            )
            assert acked.status == 403
            assert other.ask("GET", "/v1/topics").value == {"topics": []}
            assert [one["topic"] for one in shop.ask("GET", "/v1/topics").value["topics"]] == ["orders"]
            assert shop.ask("DELETE", path).status == 200


def test_without_a_port_there_is_no_edge(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", http_port=-1) as node:
        assert node.node.http_port == -1
