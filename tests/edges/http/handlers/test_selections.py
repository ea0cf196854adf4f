"""The paths of selections: answers, refusals and permissions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.accounts import SECRETS, guarded_node
from tests.edges.http.client import Client, client_of

PATH = "/v1/selections"


def send(client: Client, topic: str, region: str) -> Any:
    """Send a message that is due in an hour, with the region as its key and as a property."""
    return client.send(topic, {"body": "x", "after": "1h", "key": region, "properties": {"region": region}})


def state(client: Client, message_id: str) -> Any:
    """Return a message as the HTTP API shows it."""
    [message] = client.ask("GET", f"/v1/messages/{message_id}").value["messages"]
    return message


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("from", {"action": "cancel", "from": "2026-12-02"}), ("to", {"action": "cancel", "to": "2026-12-02T00:00"}),
        ("shift", {"action": "shift", "shift": "x", "topics": ["t"]}),
    ],
)  # fmt: skip
def test_an_error_of_a_time_names_its_field(client: Client, named: str, wrong: dict[str, Any]) -> None:
    refused = client.ask("POST", PATH, wrong)
    assert (refused.status, refused.value["code"]) == (400, "invalid_delay")
    assert refused.value["detail"].startswith(f"{named}=")


def test_a_selection_cancels_the_counted_messages_until_it_is_undone(client: Client) -> None:
    eu, us = (send(client, "orders", region).value for region in ("eu", "us"))
    wanted = {"action": "cancel", "topics": ["orders"], "where": "region = 'eu'"}
    counted = client.ask("POST", f"{PATH}/dry-run", wanted)
    assert counted.status == 200
    load = counted.value.pop("load")
    assert [(hour["before"], hour["after"]) for hour in load] == [(2, 1)]
    assert counted.value == {
        "count": 1, "first_due": eu["due"], "last_due": eu["due"],
        "samples": [
            {"topic": "orders", "due": eu["due"], "due_ms": eu["due_ms"], "id": eu["id"], "keys": ["eu"]}
        ],
    }  # fmt: skip
    assert client.ask("GET", PATH).value == {"selections": []}

    accepted = client.ask("POST", PATH, wanted)
    assert accepted.status == 201
    name = accepted.value["id"]
    assert accepted.value == {
        "id": name, "action": "cancel", "state": "active", "topics": ["orders"], "where": "region = 'eu'",
        "accepted": accepted.value["accepted"], "accepted_ms": accepted.value["accepted_ms"],
    }  # fmt: skip
    cancelled = state(client, eu["id"])
    assert (cancelled["state"], cancelled["reason"]) == ("cancelled", f"selection {name}")
    assert state(client, us["id"])["state"] == "waiting"
    listed = client.ask("GET", "/v1/messages", query={"topic": "orders"}).value["messages"]
    assert [message["id"] for message in listed] == [us["id"]]
    moved = client.ask("PATCH", f"/v1/messages/{eu['id']}", {"after": "2h"})
    assert (moved.status, moved.value["code"]) == (409, "already_cancelled")

    undone = client.ask("POST", f"{PATH}/{name}/undo")
    assert undone.status == 200 and undone.value["state"] == "undone" and "undone" in undone.value
    assert state(client, eu["id"])["state"] == "waiting"
    assert client.ask("POST", f"{PATH}/{name}/undo").value["undone"] == undone.value["undone"]
    assert [each["id"] for each in client.ask("GET", PATH).value["selections"]] == [name]
    assert client.ask("GET", f"{PATH}/{name}").value["state"] == "undone"


def test_a_selection_shows_the_bounds_of_its_due_time(client: Client) -> None:
    window = {"from": "2030-01-01T00:00:00Z", "to": 1_893_456_001_000}
    accepted = client.ask("POST", PATH, {"action": "cancel", **window}).value
    assert (accepted["from"], accepted["to"]) == ("2030-01-01T00:00:00.000Z", "2030-01-01T00:00:01.000Z")


@pytest.mark.parametrize("path", ["", "/dry-run"])
@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("invalid_message", {}), ("invalid_message", {"action": "shift"}), ("invalid_message", {"surprise": 1}),
        ("invalid_filter", {"where": "region ="}), ("invalid_name", {"topics": ["a b"]}),
        ("invalid_delay", {"from": "soon"}),
        ("invalid_message", {"from": "2030-01-01T00:00:00Z", "to": "2029-01-01T00:00:00Z"}),
        ("out_of_range", {"topics": ["a"] * 1_001}),
    ],
)  # fmt: skip
def test_a_refused_request_selects_nothing(
    client: Client, path: str, code: str, wrong: dict[str, Any]
) -> None:
    def names() -> list[str]:
        """List the selections by name. Their counts may still change."""
        return [selection["id"] for selection in client.ask("GET", PATH).value["selections"]]

    names_before = names()
    answer = client.ask("POST", PATH + path, {"action": "cancel", **wrong})
    assert (answer.status // 100, answer.value["code"]) == (4, code)
    assert names() == names_before


@pytest.mark.parametrize(("method", "path"), [("GET", "/77"), ("POST", "/77/undo")])
def test_an_unknown_selection_is_not_found(client: Client, method: str, path: str) -> None:
    answer = client.ask(method, PATH + path)
    assert (answer.status, answer.value["code"]) == (404, "not_found")


def test_a_selection_needs_the_permission_for_all_its_topics(tmp_path: Path) -> None:
    with guarded_node(tmp_path, http_port=0) as node:

        def client(name: str) -> Any:
            return client_of(node, f"Bearer {name}:{SECRETS[name]}")

        with client("shop") as shop, client("other") as other, client("root") as root:
            wanted = {"action": "cancel", "topics": ["orders"]}
            name = shop.ask("POST", PATH, wanted).value["id"]
            assert root.ask("GET", f"{PATH}/{name}").value["by"] == "shop"
            assert other.ask("GET", PATH).value == {"selections": []}
            for method, path, body in (
                ("GET", f"/{name}", None), ("POST", f"/{name}/undo", None), ("POST", "", wanted),
                ("POST", "/dry-run", wanted), ("POST", "", {"action": "cancel", "where": "TRUE"}),
            ):  # fmt: skip
                assert other.ask(method, PATH + path, body).status == 403
            assert shop.ask("POST", PATH, {"action": "cancel", "where": "TRUE"}).status == 403
            assert root.ask("POST", PATH, {"action": "cancel", "where": "TRUE"}).status == 201
