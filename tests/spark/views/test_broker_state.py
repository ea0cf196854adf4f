"""Bulk operations and recurring schedules in the views: a query and the broker's own lists agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.traffic import send_due_now

from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.model.message import encode_properties
from timeball.spark.endpoint import Endpoint
from timeball.spark.views import broker_state, spark_views
from timeball.spark.views.duckdb_session import SqlSession
from timeball.spark.views.snapshot import Snapshot

REGIONS = ("eu", "us")


def ask(node: RunningNode, text: str, **options: Any) -> list[tuple[Any, ...]]:
    with SqlSession(node.endpoint, **options) as session:
        rows = session.run(text).rows.read_all()
        return list(zip(*[column.to_pylist() for column in rows.columns], strict=True))


def pending(node: RunningNode, **options: Any) -> list[str]:
    return [key for (key,) in ask(node, "select unique_key from pending order by 1", **options)]


STATES = "select unique_key, topic, due_ms, properties like '%TIMEBALL%' from pending order by 1"


def states(client: Client) -> list[tuple[Any, ...]]:
    """List the pending messages as the view does (STATES)."""
    messages = client.ask("GET", "/v1/messages").value["messages"]
    return sorted((each["id"], each["topic"], each["due_ms"], False) for each in messages)


def listed(client: Client) -> list[str]:
    return sorted(each["id"] for each in client.ask("GET", "/v1/messages").value["messages"])


def send(client: Client, topic: str, name: str, after: str = "2h") -> None:
    """Send a message of each region."""
    for region in REGIONS:
        message = {"id": f"{name}-{region}", "key": name, "after": after, "body": "x"}
        sent = client.send(topic, {**message, "properties": {"region": region}})
        assert sent.status == 201


def select(client: Client, where: str, **more: Any) -> str:
    accepted = client.ask("POST", "/v1/selections", {"action": "cancel", "where": where} | more)
    assert accepted.status == 201, accepted
    return str(accepted.value["id"])


def everywhere(node: RunningNode, client: Client) -> None:
    """Pending messages in the table, the tail and a level, some of them rescheduled before."""
    send(client, "orders", "table")
    send(client, "orders", "table-moved", "3h")
    assert client.ask("PATCH", "/v1/messages/table-moved-eu", {"after": "4h"}).status == 200
    node.run(node.broker.compact())
    send(client, "orders", "tail")
    send(client, "mail", "tail-moved")
    assert client.ask("PATCH", "/v1/messages/tail-moved-eu", {"after": "5h"}).status == 200
    level = {
        "topic": ["later"], "body": [b"x"], "unique_key": ["level-eu"],
        "properties": [encode_properties({"region": "eu"})], "delay_level": pa.array([18], pa.int32()),
    }  # fmt: skip
    node.run(node.broker.send(pa.record_batch(level)))


WHERE = {
    "a property": ("region = 'eu'", {}),
    "the topic": ("topic = 'later' OR topic = 'mail'", {}),
    "keys": ("keys IN ('tail', 'table-moved')", {}),
    "all": ("TRUE", {}),
    "nothing": ("region = 'asia'", {}),
    "topics": ("", {"topics": ["orders"]}),
}


@pytest.mark.parametrize("name", WHERE)
def test_a_cancelled_message_is_not_pending_until_the_undo(node: RunningNode, name: str) -> None:
    where, bounds = WHERE[name]
    with client_of(node) as client:
        everywhere(node, client)
        before = pending(node)
        assert before == listed(client) and len(before) == 9
        selection = select(client, where, **bounds)
        send(client, "orders", "afterwards")  # not covered
        after = pending(node)
        assert after == listed(client)
        assert {"afterwards-eu", "afterwards-us"} <= {*after}
        node.run(node.broker.compact())
        assert pending(node) == after
        [(rows,)] = ask(node, "select count(*) from pending where due > now()")
        assert rows == len(after)
        load = "select coalesce(sum(due_ms), 0) from pending"
        assert ask(node, load) == ask(node, f"{load} where true", upcoming=True, bodies=False)
        assert client.ask("POST", f"/v1/selections/{selection}/undo").status == 200
        assert pending(node) == sorted([*before, "afterwards-eu", "afterwards-us"])


ACTIONS = {
    "later": {"action": "shift", "shift": "90m"},
    "earlier": {"action": "shift", "shift": "-30m"},
    "move": {"action": "move", "to_topic": "elsewhere"},
    "pause": {"action": "pause"},
}


@pytest.mark.parametrize("name", ACTIONS)
def test_a_changed_message_is_pending_with_its_state(node: RunningNode, name: str) -> None:
    with client_of(node) as client:
        everywhere(node, client)
        before = ask(node, STATES)
        selection = select(client, "region = 'eu'", **ACTIONS[name])
        changed = states(client)
        assert len(changed) == 9 and (changed == before) == (name == "pause")
        assert ask(node, STATES) == changed
        node.run(node.broker.compact())
        assert ask(node, STATES) == changed
        # Rows whose due times are outside, with states inside, and the reverse.
        for bounds in [(due_ms, due_ms + 1) for _, _, due_ms, _ in [*before, *changed]]:
            inside = [each for each in changed if bounds[0] <= each[2] < bounds[1]]
            assert ask(node, STATES, due=bounds) == inside
        upcoming = [each for each in changed if name != "pause" or not each[0].endswith("-eu")]
        assert ask(node, STATES, upcoming=True) == upcoming
        assert client.ask("POST", f"/v1/selections/{selection}/undo").status == 200
        assert ask(node, STATES) == states(client) == before


def test_wake_ups_keep_the_state_of_their_messages(node: RunningNode) -> None:
    with client_of(node) as client, Endpoint(node.endpoint) as broker:
        for name in ("a", "b"):
            send(client, "orders", name, "1s")
        send(client, "orders", "far", "2h")
        due = states(client)
        node.run(node.broker.compact())
        version = broker.status().table.version
        held = select(client, "", topics=["orders"], action="pause")
        moved = select(client, "keys = 'a'", action="move", to_topic="elsewhere")

        def are_woken() -> bool:
            text = "select count(*) from log where kind = 3 and properties like '%TIMEBALL_BASE%'"
            return ask(node, text) == [(4,)]

        eventually(are_woken, "the held messages were due in the schedule")
        assert [each[:3:2] for each in states(client)] == [each[:3:2] for each in due]
        assert ask(node, STATES) == states(client)
        node.run(node.broker.compact())
        assert ask(node, STATES) == states(client)
        assert [topic for _, topic, *_ in states(client)] == ["elsewhere"] * 2 + ["orders"] * 4
        client.ask("POST", f"/v1/selections/{moved}/undo")
        assert ask(node, STATES) == states(client) == due
        assert ask(node, STATES, version=version) == due
        client.ask("POST", f"/v1/selections/{held}/undo")
        eventually(lambda: len(states(client)) == 2, "they are released")
        assert ask(node, STATES) == states(client)


def test_a_property_of_a_sender_is_no_wake_up(node: RunningNode) -> None:
    with client_of(node) as client:
        message = {"id": "forged", "after": "2h", "body": "x", "properties": {"TIMEBALL_BASE": "7:8"}}
        assert client.send("orders", message).status == 201
        select(client, "TRUE", action="pause")
        text = "select unique_key, topic, due_ms, false from pending"
        assert ask(node, text) == states(client)


def test_bounds_of_due_time(node: RunningNode) -> None:
    with client_of(node) as client:
        everywhere(node, client)
        now_ms = int(node.broker.status()["now_ms"])  # type: ignore[call-overload]
        bounds = {"from": now_ms + 5 * HOUR_MS // 2, "to": now_ms + 9 * HOUR_MS // 2}
        select(client, "", **bounds)
        assert pending(node) == listed(client)
        assert "table-moved-us" not in pending(node) and "tail-moved-eu" in pending(node)


def test_a_selection_after_the_snapshot_or_the_version_has_no_effect(node: RunningNode) -> None:
    with client_of(node) as client, Endpoint(node.endpoint) as broker:
        everywhere(node, client)
        node.run(node.broker.compact())
        snapshot, version = Snapshot.pin(broker), broker.status().table.version
        selection = select(client, "region = 'eu'")
        count = "select count(*) from pending"
        assert ask(node, count, snapshot=snapshot) == [(9,)]
        assert ask(node, count, version=version) == [(9,)]
        assert ask(node, count) == [(4,)]
        send(client, "orders", "new")
        node.run(node.broker.compact())
        # The version was made after the selection, and before its undo.
        assert client.ask("POST", f"/v1/selections/{selection}/undo").status == 200
        assert ask(node, count, version=version + 1) == [(6,)]
        assert ask(node, count) == [(11,)]


def test_a_selection_whose_messages_are_settled_is_not_evaluated(node: RunningNode) -> None:
    with client_of(node) as client, Endpoint(node.endpoint) as broker:
        send(client, "orders", "soon", "1s")
        select(client, "TRUE")
        assert Snapshot.pin(broker).selections

        def is_over() -> bool:
            [selection] = client.ask("GET", "/v1/selections").value["selections"]
            return bool(selection["state"] == "over")

        eventually(is_over, "its messages were due")
        assert not Snapshot.pin(broker).selections
        assert pending(node) == []


def test_schedules_and_selections_are_views(node: RunningNode) -> None:
    with client_of(node) as client:
        everywhere(node, client)
        rule = {"cron": "0 9 * * *", "zone": "Europe/Berlin"}
        for name in ("daily", "paused"):
            client.ask("PUT", f"/v1/schedules/{name}", {"rule": rule, "topic": "reports", "body": "x"})
        client.ask("POST", "/v1/schedules/paused/pause")
        made = client.ask("GET", "/v1/schedules/daily").value
        text = "select name, state, topic, rule, zone, next_due_ms, epoch_ms(next_due), runs from schedules"
        due_ms = made["next"]["due_ms"]
        canonical = '{"cron":"0 9 * * *","zone":"Europe/Berlin"}'
        assert ask(node, f"{text} order by name") == [
            ("daily", "active", "reports", canonical, "Europe/Berlin", due_ms, due_ms, 0),
            ("paused", "paused", "reports", canonical, "Europe/Berlin", None, None, 0),
        ]
        later = select(client, "TRUE", topics=["mail"], action="shift", shift="2h")
        selection = select(client, "region = 'eu'", topics=["orders"], to="2099-01-01T00:00:00Z")
        eventually(lambda: "count" in client.ask("GET", f"/v1/selections/{selection}").value, "it is counted")
        text = "select id, action, state, condition, topics, due_from, epoch_ms(due_to), messages from selections"
        assert ask(node, f"{text} where action = 'cancel'") == [
            (selection, "cancel", "active", "region = 'eu'", ["orders"], None, 4_070_908_800_000, 3)
        ]
        text = "select id, shift_ms, to_topic from selections where action <> 'cancel'"
        assert ask(node, text) == [(later, 2 * HOUR_MS, None)]


def test_more_schedules_than_an_answer_has(node: RunningNode) -> None:
    rows = 203
    with client_of(node) as client:
        for number in range(rows):
            wanted = {"rule": {"every": "1h"}, "topic": "t", "body": "x"}
            assert client.ask("PUT", f"/v1/schedules/many-{number:03}", wanted).status == 201
    assert ask(node, "select count(*), count(distinct name), min(zone) from schedules") == [
        (rows, rows, "UTC")
    ]
    (batch,) = broker_state.schedule_rows(Endpoint(node.endpoint).schedules())
    assert batch.num_rows == rows


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_both_engines_agree(spark: SparkSession, tmp_path: Path) -> None:
    questions = [
        "select unique_key, topic, due_ms, place from pending order by unique_key",
        "select name, rule, zone, next_due_ms from schedules order by name",
        "select id, action, state, condition, topics, accepted_ms from selections order by id",
        "select state, count(*) as n from scheduled group by state order by state",
    ]
    with running_node(tmp_path / "data", compact_rows=0, http_port=0) as node, client_of(node) as client:
        everywhere(node, client)
        send_due_now(node.endpoint, 1)
        wanted = {"rule": {"every": "1h"}, "topic": "reports", "body": "x"}
        assert client.ask("PUT", "/v1/schedules/hourly", wanted).status == 201
        select(client, "region = 'eu'")
        select(client, "TRUE", action="shift", shift="-30m", topics=["mail"])
        select(client, "TRUE", action="move", to_topic="elsewhere", topics=["orders"])
        spark_views.register(spark, node.endpoint)
        for text in questions:
            assert [tuple(row) for row in spark.sql(text).collect()] == ask(node, text), text
        assert len(ask(node, questions[0])) == 5
        shot = Snapshot.pin(Endpoint(node.endpoint), upcoming=True)
        load = spark_views.due_load(spark, node.endpoint, shot, due=(None, shot.now_ms + DAY_MS))
        assert load.total == 5
