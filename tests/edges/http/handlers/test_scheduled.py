"""Scheduled messages over HTTP, against a real node."""

from __future__ import annotations

import pytest
from tests.edges.http.client import Client
from tests.node_fixture import RunningNode, eventually

from timeball import Timeball
from timeball.io import threads
from timeball.model import limits


def test_a_scheduled_message_is_shown_rescheduled_and_cancelled(client: Client) -> None:
    message_id = client.send("plans", {"body": "x", "after": "1h"}).value["id"]
    path = f"/v1/messages/{message_id}"
    (place,) = client.ask("GET", path).value["messages"]
    assert (place["state"], place["topic"]) == ("waiting", "plans")
    assert (place["body"], place["size_bytes"], place["keys"]) == ("x", 1, [])
    moved = client.ask("PATCH", path, {"at": "2031-01-31T09:00:00Z"})
    assert (moved.status, moved.value["verdict"]) == (200, "rescheduled")
    (place,) = client.ask("GET", path).value["messages"]
    assert place["due"] == "2031-01-31T09:00:00.000Z"
    assert client.ask("DELETE", path).value["verdict"] == "cancelled"
    (place,) = client.ask("GET", path).value["messages"]
    assert place["state"] == "cancelled"
    late = client.ask("DELETE", path)
    assert (late.status, late.value["code"]) == (409, "already_cancelled")


def test_a_visible_message_is_shown_with_its_location(client: Client) -> None:
    message_id = client.send("plans", {"body": "x", "after": "1ms"}).value["id"]

    def places() -> list[dict[str, object]]:
        """Return the message as the HTTP API shows it."""
        result: list[dict[str, object]] = client.ask("GET", f"/v1/messages/{message_id}").value["messages"]
        return result

    eventually(lambda: places()[0]["state"] == "visible", "released")
    (place,) = places()
    assert {"queue_id", "queue_offset", "at", "due"} <= place.keys()
    assert client.ask("DELETE", f"/v1/messages/{message_id}").value["code"] == "released"


def test_a_message_is_shown_with_its_state_in_each_group(client: Client) -> None:
    client.send("plans-of-groups", {"id": "g-1", "body": "x"})

    def groups() -> list[dict[str, object]]:
        """Return the states of the message in its groups."""
        (place,) = client.ask("GET", "/v1/messages/g-1").value["messages"]
        result: list[dict[str, object]] = place.get("groups", [])
        return result

    assert groups() == []
    (received,) = client.receive("plans-of-groups", group="planners").value["messages"]
    (leased,) = groups()
    assert (leased["group"], leased["state"], leased["attempts"]) == ("planners", "leased", 1)
    assert {"until", "until_ms"} <= leased.keys()
    path, query = "/v1/topics/plans-of-groups/ack", {"group": "planners"}
    client.ask("POST", path, {"receipts": [received["receipt"]]}, query=query)
    assert groups() == [{"group": "planners", "state": "done"}]


def test_the_messages_with_one_id_are_limited_in_their_number_and_bytes(
    client: Client, node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.send("plans-of-one", [{"id": "one-id", "body": text, "after": "1h"} for text in "abcd"])
    whole = client.ask("GET", "/v1/messages/one-id").value
    assert [place["body"] for place in whole["messages"]] == ["d", "c", "b", "a"]
    assert "messages_cut" not in whole and "content_cut" not in whole["messages"][3]
    monkeypatch.setattr(limits, "FOUND_BODY_BYTES_MAX", 2)
    monkeypatch.setattr(threads, "SLICE_ROWS", 2)
    *first, last = client.ask("GET", "/v1/messages/one-id").value["messages"]
    assert [place.get("body") for place in (*first, last)] == ["d", "c", None, None]
    assert last["content_cut"] and not {"size_bytes", "keys", "properties"} & last.keys()
    monkeypatch.setattr(limits, "FOUND_MESSAGES_MAX", 3)
    cut = client.ask("GET", "/v1/messages/one-id").value
    assert (cut["messages"], cut["messages_cut"]) == (first, True)
    with Timeball(node.http_endpoint) as timeball:
        newest = timeball.get("one-id")
    assert newest.content is not None and newest.content.body == b"d"


def test_an_unknown_id_is_not_found(client: Client) -> None:
    for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"after": "1h"})):
        answer = client.ask(method, "/v1/messages/none", body)
        assert (answer.status, answer.value["code"]) == (404, "not_found")


def test_messages_are_cancelled_and_rescheduled_by_ids_or_keys(client: Client) -> None:
    for number in range(3):
        client.send("many-plans", {"id": f"many-{number}", "body": "x", "after": "1h", "key": "many-key"})
    moved = client.ask("POST", "/v1/reschedule", {"ids": ["many-0", "none"], "after": "2h"}).value["verdicts"]
    assert [(each["id"], each["verdict"]) for each in moved] == [
        ("many-0", "rescheduled"),
        ("none", "not_found"),
    ]
    assert moved[0]["due_ms"] > 0 and moved[0]["due"].endswith("Z")
    (cancelled,) = client.ask("POST", "/v1/cancel", {"ids": ["many-1"]}).value["verdicts"]
    assert (cancelled["id"], cancelled["verdict"]) == ("many-1", "cancelled") and cancelled["at_ms"] > 0
    by_key = client.ask("POST", "/v1/cancel", {"keys": ["many-key"]}).value["verdicts"]
    assert sorted(each["verdict"] for each in by_key) == ["already_cancelled", "cancelled", "cancelled"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/cancel", {}, 400),
        ("/v1/cancel", {"ids": ["a"], "keys": ["b"]}, 400),
        ("/v1/cancel", {"ids": [""]}, 400),
        ("/v1/cancel", {"ids": ["a" * 300]}, 400),
        ("/v1/cancel", {"ids": ["a"] * 10_001}, 416),
        ("/v1/cancel", {"ids": [""] * 10_001}, 416),  # counted before they are checked
        ("/v1/reschedule", {"ids": ["a"]}, 400),
        ("/v1/reschedule", {"ids": ["a"], "at": 5_000_000_000_000, "after": "1h"}, 400),
    ],
)
def test_a_request_for_several_messages_must_name_them_and_a_time(
    client: Client, path: str, body: dict[str, object], status: int
) -> None:
    assert client.ask("POST", path, body).status == status
