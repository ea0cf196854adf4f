"""Pages of pending messages over HTTP from a real node, and their restriction to an account's topics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.accounts import SECRETS, guarded_node
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode, running_node

YEAR_2031_MS = 1_924_992_000_000


def bearer(account: str) -> str:
    """Return the header `authorization` of an account."""
    return f"Bearer {account}:{SECRETS[account]}"


def pages(client: Client, **query: Any) -> Iterator[dict[str, Any]]:
    """Yield the messages of all pages."""
    while True:
        answer = client.ask("GET", "/v1/messages", query=query)
        assert answer.status == 200
        yield from answer.value["messages"]
        if "next_page" not in answer.value:
            return
        query["page"] = answer.value["next_page"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node with accounts. Each of two topics has a pending message."""
    with guarded_node(tmp_path_factory.mktemp("guarded"), http_port=0) as node:
        for account, topic in (("shop", "orders"), ("other", "news")):
            with client_of(node, bearer(account)) as client:
                client.send(topic, {"body": "x", "id": topic, "key": "k", "at": YEAR_2031_MS})
        yield node


def test_pending_messages_are_paged_by_due_time(client: Client) -> None:
    sent = [
        {
            "body": "x" * i,
            "at": YEAR_2031_MS + 10 - i,
            "id": f"paged-{i}",
            "key": f"k{i % 2}",
            "tag": "t",
        }
        for i in range(10)
    ]
    client.send("paged", sent)
    result = list(pages(client, topic="paged", max=3))
    assert [item["id"] for item in result] == [f"paged-{i}" for i in reversed(range(10))]
    assert result[0] | {"seq": 0} == {
        "id": "paged-9", "topic": "paged", "due": "2031-01-01T00:00:00.001Z", "due_ms": YEAR_2031_MS + 1, "seq": 0,
        "keys": ["k1"], "tag": "t", "size_bytes": 9,
    }  # fmt: skip
    of_key = list(pages(client, topic="paged", key="k0", max=2))
    assert [item["id"] for item in of_key] == [f"paged-{i}" for i in (8, 6, 4, 2, 0)]
    window = {"from": "2031-01-01T00:00:00.003Z", "to": YEAR_2031_MS + 5}
    assert [item["id"] for item in pages(client, topic="paged", **window)] == ["paged-7", "paged-6"]


def test_held_messages_are_marked_and_not_in_the_forecast(client: Client) -> None:
    client.send("held", {"body": "x", "key": "k", "after": "1h"})

    def held_and_counted() -> tuple[list[Any], Any]:
        """Return the field `held` of the listed messages, and the counts of the forecast by topic."""
        listed = [*pages(client, topic="held"), *pages(client, topic="held", key="k")]
        forecast = client.ask("GET", "/v1/forecast", query={"by": "day", "topic": "held"}).value
        return [each.get("held") for each in listed], forecast["topics"]

    paused = client.ask("POST", "/v1/selections", {"action": "pause", "topics": ["held"]}).value["id"]
    assert held_and_counted() == ([True, True], {})
    client.ask("POST", f"/v1/selections/{paused}/undo")
    assert held_and_counted() == ([None, None], {"held": 1})


def test_cancelled_messages_are_not_listed(client: Client) -> None:
    client.send("gone", {"body": "x", "id": "gone", "after": "1h"})
    assert len(list(pages(client, topic="gone"))) == 1
    client.ask("DELETE", "/v1/messages/gone")
    assert list(pages(client, topic="gone")) == []


@pytest.mark.parametrize(
    ("query", "status", "advice"),
    [
        ({"max": "0"}, 416, "1 to 1000"),
        ({"max": "many"}, 416, "1 to 1000"),
        ({"page": "7"}, 400, "next_page"),
        ({"from": "soon"}, 400, "soon"),
    ],
)
def test_invalid_parameters_are_refused_with_advice(
    client: Client, query: dict[str, str], status: int, advice: str
) -> None:
    answer = client.ask("GET", "/v1/messages", query=query)
    assert answer.status == status
    assert advice in answer.value["detail"]


def test_an_account_lists_messages_of_its_own_topics(guarded: RunningNode) -> None:
    with client_of(guarded) as stranger:
        assert stranger.ask("GET", "/v1/messages").status == 401
    with client_of(guarded, bearer("shop")) as shop, client_of(guarded, bearer("root")) as root:
        assert [item["id"] for item in pages(shop)] == ["orders"]
        assert [item["id"] for item in pages(shop, key="k")] == ["orders"]
        assert sorted(item["id"] for item in pages(root)) == ["news", "orders"]


def test_a_forbidden_topic_looks_like_an_unknown_topic(guarded: RunningNode) -> None:
    with client_of(guarded, bearer("shop")) as shop:
        answers = [shop.ask("GET", "/v1/messages", query={"topic": topic}) for topic in ("news", "none")]
        assert [answer.status for answer in answers] == [403, 403]
        details = [
            answer.value["detail"].replace(name, "")
            for answer, name in zip(answers, ("news", "none"), strict=True)
        ]
        assert details[0] == details[1]


@pytest.mark.parametrize("strategy", ["timer_wheel", "level_cascade"])
def test_each_strategy_lists_its_pending_messages(tmp_path: Path, strategy: str) -> None:
    with running_node(tmp_path / "data", http_port=0, strategy=strategy) as node, client_of(node) as client:
        client.send("paged", [{"body": "x", "after": f"{i}h", "id": str(i)} for i in range(1, 6)])
        assert [item["id"] for item in pages(client, max=2)] == ["1", "2", "3", "4", "5"]


def test_due_messages_are_counted_by_bucket(client: Client) -> None:
    hour_ms = 3_600_000
    client.send("counted", [{"body": "x", "at": YEAR_2031_MS + i * hour_ms // 2} for i in range(5)])
    query = {"by": "hour", "from": "2031-01-01T00:00:00Z", "to": "2031-01-02T00:00:00Z", "topic": "counted"}
    answer = client.ask("GET", "/v1/forecast", query=query).value
    assert answer.pop("counted").endswith("Z")
    assert answer.pop("counted_ms") > 0
    assert answer == {
        "by": "hour", "from_ms": YEAR_2031_MS, "to_ms": YEAR_2031_MS + 24 * hour_ms, "topics": {"counted": 5},
        "buckets": [
            {"from_ms": YEAR_2031_MS, "due": 2},
            {"from_ms": YEAR_2031_MS + hour_ms, "due": 2},
            {"from_ms": YEAR_2031_MS + 2 * hour_ms, "due": 1},
        ],
    }  # fmt: skip


def test_later_times_of_schedules_are_counted_beside_the_messages(client: Client) -> None:
    rule = {"every": "20m", "starts_at": "2031-02-01T00:00:00Z"}
    put = client.ask("PUT", "/v1/schedules/counted", {"rule": rule, "topic": "recurring", "body": "x"})
    assert put.status == 201
    query = {"from": "2031-02-01T00:00:00Z", "to": "2031-02-01T02:00:00Z", "topic": "recurring"}
    answer = client.ask("GET", "/v1/forecast", query=query).value
    first_ms, second_ms = (bucket.pop("from_ms") for bucket in answer["buckets"])
    assert second_ms - first_ms == 3_600_000
    assert answer["buckets"] == [{"due": 1, "recurring": 2}, {"due": 0, "recurring": 3}]
    assert (answer["topics"], answer["recurring"]) == ({"recurring": 1}, {"recurring": 5})
    assert "recurring_to_ms" not in answer
    assert client.ask("DELETE", "/v1/schedules/counted").status == 200


def test_an_unknown_unit_is_refused_with_the_known_units(client: Client) -> None:
    answer = client.ask("GET", "/v1/forecast", query={"by": "week"})
    assert (answer.status, answer.value["code"]) == (416, "out_of_range")
    assert "second, minute, hour or day" in answer.value["detail"]


def test_a_forecast_only_counts_the_topics_of_the_account(guarded: RunningNode) -> None:
    window = {"by": "day", "from": YEAR_2031_MS, "to": YEAR_2031_MS + 1}
    with client_of(guarded, bearer("shop")) as shop, client_of(guarded, bearer("root")) as root:
        assert root.ask("GET", "/v1/forecast", query=window).value["topics"] == {"news": 1, "orders": 1}
        reported = shop.ask("GET", "/v1/forecast", query=window).value  # from the same count of all topics
        assert reported["topics"] == {"orders": 1}
        assert reported["buckets"] == [{"from_ms": YEAR_2031_MS, "due": 1}]
        assert shop.ask("GET", "/v1/forecast", query={**window, "topic": "news"}).status == 403
