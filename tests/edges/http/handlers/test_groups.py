"""Groups and their dead letters over HTTP."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from tests.accounts import SECRETS, guarded_node
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode

from timeball.broker.consuming.requests import ReceiveRequest
from timeball.model import limits
from timeball.model.access import ANONYMOUS


def given_up(node: RunningNode, client: Client, topic: str, group: str, *messages: dict[str, Any]) -> None:
    """Send messages, and let a group make each of them a dead letter."""
    assert client.send(topic, list(messages)).status == 201

    async def give_up() -> None:
        consuming, remaining = node.broker.consuming, len(messages)
        consuming.join(group, topic, ANONYMOUS)
        request = ReceiveRequest(
            group, topic, rows=32, invisible_ms=60_000, in_order=False, counts_times=True
        )
        while remaining:
            received = await consuming.receive(request, 5_000)
            for receipt in received.receipts:
                assert await consuming.dead_letter(receipt)
            remaining -= len(received.receipts)

    node.run(give_up())


def test_a_group_shows_its_lag_and_its_dead_letters(client: Client, node: RunningNode) -> None:
    given_up(node, client, "counted", "counters", {"body": "a"}, {"body": "b"})
    assert client.send("counted", {"body": "c"}).status == 201
    result = client.ask("GET", "/v1/groups/counters").value
    assert result in client.ask("GET", "/v1/groups").value["groups"]
    assert (result["lag"], result["dead_letters"], result["attempts_max"]) == (1, 2, 17)
    assert client.ask("GET", "/v1/groups/unknown").value["code"] == "group_not_found"


def test_groups_are_listed_in_pages(client: Client) -> None:
    client.send("counted", {"body": "x"})
    for group in ("paged-a", "paged-b", "paged-c"):
        assert client.receive("counted", group=group, wait="0s").status == 200
    first = client.ask("GET", "/v1/groups", query={"max": 2, "page": "paged"}).value
    assert [group["group"] for group in first["groups"]] == ["paged-a", "paged-b"]
    rest = client.ask("GET", "/v1/groups", query={"max": 1, "page": first["next_page"]}).value
    assert [group["group"] for group in rest["groups"]] == ["paged-c"]
    for rows in ("0", "1001", "x"):
        assert client.ask("GET", "/v1/groups", query={"max": rows}).value["code"] == "out_of_range"


def test_dead_letters_are_browsed_resent_and_deleted(client: Client, node: RunningNode) -> None:
    binary = base64.b64encode(bytes([0, 255])).decode()
    long = "é" * (1 << 20)
    given_up(node, client, "jobs", "movers", {"body": "x", "key": "k"}, {"base64": binary}, {"body": long})
    path = "/v1/groups/movers/dead-letters"
    first = client.ask("GET", path, query={"max": 2}).value
    rest = client.ask("GET", path, query={"max": 2, "page": first["next_page"]}).value
    assert "next_page" not in rest
    letters = first["dead_letters"] + rest["dead_letters"]
    assert sorted(letter.get("base64", letter.get("body", ""))[:4] for letter in letters) == [
        "AP8=",
        "x",
        "éééé",
    ]
    (cut,) = [letter for letter in letters if letter.get("body_cut")]
    assert cut["size_bytes"] == 2 << 20 and long.startswith(cut["body"])
    assert all(letter["topic"] == "jobs" and letter["died"].endswith("Z") for letter in letters)
    first_handle, second_handle, _ = (letter["dead_letter"] for letter in letters)
    answer = client.ask("POST", f"{path}/resend", {"dead_letters": [first_handle, "7-99"]}).value
    verdicts = [result["verdict"] for result in answer["results"]]
    assert (answer["count"], verdicts) == (1, ["resent", "not_found"])
    assert client.ask("POST", f"{path}/delete", {"dead_letters": [second_handle]}).value["results"][0] == {
        "dead_letter": second_handle,
        "verdict": "deleted",
    }
    assert client.ask("POST", f"{path}/delete", {"all": True}).value == {"count": 1, "results": []}
    assert client.ask("GET", path).value == {"dead_letters": []}


@pytest.mark.parametrize(
    "body", [{}, {"all": True, "dead_letters": []}, {"dead_letters": ["x"]}, {"all": "yes"}]
)
def test_a_delete_that_names_no_valid_dead_letters_is_refused(client: Client, body: dict[str, Any]) -> None:
    assert client.ask("POST", "/v1/groups/movers/dead-letters/delete", body).status == 400


def test_an_account_gets_no_groups_and_dead_letters_of_others(tmp_path: Path) -> None:
    with guarded_node(tmp_path, http_port=0) as node:
        with client_of(node, f"Bearer other:{SECRETS['other']}") as other:
            assert other.ask("GET", "/v1/groups").value == {"groups": []}
            assert other.ask("GET", "/v1/groups/workers/dead-letters").status == 403
            assert other.ask("POST", "/v1/groups/readers/dead-letters/delete", {"all": True}).status == 403


def test_the_offsets_of_a_group_are_read_and_set(client: Client) -> None:
    client.ask("PUT", "/v1/topics/offset-topic", {"queues": 1})
    client.send("offset-topic", [{"body": "a"}, {"body": "b"}])
    queues = client.ask("GET", "/v1/topics/offset-topic").value["queues"]
    assert queues == {"0": {"min": 0, "max": 2}}
    path, query = "/v1/topics/offset-topic/offsets", {"group": "offset-group"}
    assert client.ask("GET", path, query=query).value["offsets"] == {}
    assert client.ask("PUT", path, {"offsets": {"0": 1}}, query=query).value["offsets"] == {"0": 1}
    assert client.ask("GET", path, query=query).value["offsets"] == {"0": 1}
    for offsets, status in (({"0": 3}, 416), ({"0": -1}, 416), ({"x": 1}, 400)):
        assert client.ask("PUT", path, {"offsets": offsets}, query=query).status == status
    too_many = {"offsets": {str(number): -1 for number in range(limits.QUEUES_PER_TOPIC_MAX + 1)}}
    refused = client.ask("PUT", path, too_many, query=query)
    assert (refused.status, "a topic has at most 1024" in refused.value["detail"]) == (416, True)
    assert client.ask("GET", "/v1/topics/none-such").status == 404
    assert client.ask("GET", path).status == 400


def test_the_limit_of_a_key_is_set_and_shown(client: Client, node: RunningNode) -> None:
    with node.client() as ball:
        ball.limit_group("keyed", max_per_key=1)
        assert [group.max_per_key for group in ball.groups("keyed")] == [1]
    messages = [{"body": str(number), "key": key} for number, key in enumerate("aab")]
    assert client.ask("PUT", "/v1/topics/keyed", {"queues": 1}).status == 200
    assert client.send("keyed", messages).status == 201
    received = client.receive("keyed", group="keyed", max=10, wait="0s").value["messages"]
    assert [message["body"] for message in received] == ["0", "2"]
    assert client.ask("PUT", "/v1/groups/keyed", {"max_per_key": 0}).value == {"max_per_key": 0}
    assert client.ask("PUT", "/v1/groups/keyed", {"max_per_key": 10_001}).value["code"] == "out_of_range"
    assert client.ask("GET", "/v1/groups/keyed").value["max_per_key"] is None


def test_the_limit_of_a_topic_is_set_and_shown(client: Client, node: RunningNode) -> None:
    assert client.ask("PUT", "/v1/topics/paced", {"queues": 2, "max_per_second": 1}).status == 200
    assert client.send("paced", [{"body": "a"}, {"body": "b"}, {"body": "c"}]).status == 201
    received = client.receive("paced", group="paced", max=10, wait="5s").value["messages"]
    shown = client.ask("GET", "/v1/topics/paced").value
    assert len(received) == 1 and (shown["max_per_second"], shown["held"]) == (1, 2)
    assert client.ask("GET", "/v1/broker").value["held_messages"] == 2
    assert client.ask("PUT", "/v1/topics/paced", {"max_per_second": -1}).value["code"] == "out_of_range"
    with node.client() as ball:
        ball.create_topic("paced", None, max_per_second=0)
        assert len(ball.queues("paced")) == 2
    assert client.ask("GET", "/v1/topics/paced").value.keys() == {"topic", "queues"}


def test_dead_letters_are_resent_by_a_condition(client: Client, node: RunningNode) -> None:
    messages = [{"body": str(number), "properties": {"odd": str(number % 2)}} for number in range(4)]
    given_up(node, client, "chosen", "choosers", *messages)
    path = "/v1/groups/choosers/dead-letters"
    assert client.ask("POST", f"{path}/resend", {"all": True, "where": "odd = '1'"}).value["count"] == 2
    assert (
        client.ask("POST", f"{path}/resend", {"all": True, "where": "odd ="}).value["code"]
        == "invalid_filter"
    )
    assert (
        client.ask("POST", f"{path}/delete", {"all": True, "where": "TRUE"}).value["code"]
        == "invalid_message"
    )
    (handle, _) = [letter["dead_letter"] for letter in client.ask("GET", path).value["dead_letters"]]
    refused = client.ask("POST", f"{path}/resend", {"dead_letters": [handle], "where": "TRUE"})
    assert (refused.status, refused.value["code"]) == (400, "invalid_message")
    with node.client() as ball:
        assert ball.resend_dead_letters("choosers", where="topic = 'chosen'").rows == 2
