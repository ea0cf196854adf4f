"""Tests of bulk operations and recurring schedules in the views: a query and the broker's own lists agree."""

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
    """Run a query with DuckDB, with these options of the session. Returns its rows."""
    with SqlSession(node.endpoint, **options) as session:
        rows = session.run(text).rows.read_all()
        return list(zip(*[column.to_pylist() for column in rows.columns], strict=True))


def pending(node: RunningNode, **options: Any) -> list[str]:
    """Read the ids of the pending messages by SQL, sorted."""
    return [key for (key,) in ask(node, "select unique_key from pending order by 1", **options)]


STATES = "select unique_key, topic, due_ms, properties like '%TIMEBALL%' from pending order by 1"


def states(client: Client) -> list[tuple[Any, ...]]:
    """List the pending messages as the view does (STATES)."""
    messages = client.ask("GET", "/v1/messages").value["messages"]
    return sorted((each["id"], each["topic"], each["due_ms"], False) for each in messages)


def listed(client: Client) -> list[str]:
    """List the ids of the pending messages over HTTP, sorted."""
    return sorted(each["id"] for each in client.ask("GET", "/v1/messages").value["messages"])


def send(client: Client, topic: str, name: str, after: str = "2h") -> None:
    """Send a message for each region, with the ids <name>-eu and <name>-us."""
    for region in REGIONS:
        message = {"id": f"{name}-{region}", "key": name, "after": after, "body": "x"}
        sent = client.send(topic, {**message, "properties": {"region": region}})
        assert sent.status == 201


def select(client: Client, where: str, **fields: Any) -> str:
    """Start a bulk operation, by default a cancel. Returns its id."""
    answer = client.ask("POST", "/v1/selections", {"action": "cancel", "where": where} | fields)
    assert answer.status == 201, answer
    return str(answer.value["id"])


def send_everywhere(node: RunningNode, client: Client) -> None:
    """Make nine pending messages in the table, the tail and a delay level. Two of them were rescheduled."""
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


# Description -> condition of a bulk operation, and other fields of the request.
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
    where, fields = WHERE[name]
    with client_of(node) as client:
        send_everywhere(node, client)
        before = pending(node)
        assert before == listed(client) and len(before) == 9
        selection = select(client, where, **fields)
        send(client, "orders", "afterwards")  # after the bulk operation, so it is not affected
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
def test_a_message_that_a_bulk_operation_changed_is_pending_with_its_new_topic_and_due_time(
    node: RunningNode, name: str
) -> None:
    with client_of(node) as client:
        send_everywhere(node, client)
        before = ask(node, STATES)
        selection = select(client, "region = 'eu'", **ACTIONS[name])
        changed = states(client)
        assert len(changed) == 9 and (changed == before) == (name == "pause")
        assert ask(node, STATES) == changed
        node.run(node.broker.compact())
        assert ask(node, STATES) == changed
        # Bounds select messages by their new due times, wherever the due times of their rows are.
        for low, high in [(due_ms, due_ms + 1) for _, _, due_ms, _ in [*before, *changed]]:
            within = [state for state in changed if low <= state[2] < high]
            assert ask(node, STATES, due=(low, high)) == within
        upcoming = [each for each in changed if name != "pause" or not each[0].endswith("-eu")]
        assert ask(node, STATES, upcoming=True) == upcoming
        assert client.ask("POST", f"/v1/selections/{selection}/undo").status == 200
        assert ask(node, STATES) == states(client) == before


def test_a_wake_up_does_not_change_the_state_of_its_message(node: RunningNode) -> None:
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

        eventually(are_woken, "the four held messages have wake-ups")
        ids_and_due_times = [(name, due_ms) for name, _, due_ms, _ in states(client)]
        assert ids_and_due_times == [(name, due_ms) for name, _, due_ms, _ in due]
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


def test_the_property_of_a_wake_up_from_a_sender_has_no_effect(node: RunningNode) -> None:
    with client_of(node) as client:
        message = {"id": "forged", "after": "2h", "body": "x", "properties": {"TIMEBALL_BASE": "7:8"}}
        assert client.send("orders", message).status == 201
        select(client, "TRUE", action="pause")
        text = "select unique_key, topic, due_ms, false from pending"
        assert ask(node, text) == states(client)


def test_a_bulk_operation_with_bounds_of_due_times_cancels_messages_within_them(node: RunningNode) -> None:
    with client_of(node) as client:
        send_everywhere(node, client)
        now_ms = int(node.broker.status()["now_ms"])  # type: ignore[call-overload]
        bounds = {"from": now_ms + 5 * HOUR_MS // 2, "to": now_ms + 9 * HOUR_MS // 2}
        select(client, "", **bounds)
        assert pending(node) == listed(client)
        assert "table-moved-us" not in pending(node) and "tail-moved-eu" in pending(node)


def test_a_bulk_operation_or_undo_after_the_snapshot_or_version_has_no_effect(node: RunningNode) -> None:
    with client_of(node) as client, Endpoint(node.endpoint) as broker:
        send_everywhere(node, client)
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


def test_a_snapshot_leaves_out_a_bulk_operation_whose_messages_are_settled(node: RunningNode) -> None:
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


def test_the_views_schedules_and_selections_have_the_state_of_the_broker(node: RunningNode) -> None:
    with client_of(node) as client:
        send_everywhere(node, client)
        rule = {"cron": "0 9 * * *", "zone": "Europe/Berlin"}
        for name in ("daily", "paused"):
            client.ask("PUT", f"/v1/schedules/{name}", {"rule": rule, "topic": "reports", "body": "x"})
        client.ask("POST", "/v1/schedules/paused/pause")
        text = "select name, state, topic, rule, zone, next_due_ms, epoch_ms(next_due), runs from schedules"
        due_ms = client.ask("GET", "/v1/schedules/daily").value["next"]["due_ms"]
        canonical = '{"cron":"0 9 * * *","zone":"Europe/Berlin"}'
        assert ask(node, f"{text} order by name") == [
            ("daily", "active", "reports", canonical, "Europe/Berlin", due_ms, due_ms, 0),
            ("paused", "paused", "reports", canonical, "Europe/Berlin", None, None, 0),
        ]
        shift = select(client, "TRUE", topics=["mail"], action="shift", shift="2h")
        cancel = select(client, "region = 'eu'", topics=["orders"], to="2099-01-01T00:00:00Z")
        eventually(lambda: "count" in client.ask("GET", f"/v1/selections/{cancel}").value, "it is counted")
        text = "select id, action, state, condition, topics, due_from, epoch_ms(due_to), messages from selections"
        assert ask(node, f"{text} where action = 'cancel'") == [
            (cancel, "cancel", "active", "region = 'eu'", ["orders"], None, 4_070_908_800_000, 3)
        ]
        text = "select id, shift_ms, to_topic from selections where action <> 'cancel'"
        assert ask(node, text) == [(shift, 2 * HOUR_MS, None)]


def test_the_view_schedules_has_the_schedules_of_all_pages(node: RunningNode) -> None:
    """An answer of the broker has a part of the schedules."""
    rows = 203
    with client_of(node) as client:
        for number in range(rows):
            schedule = {"rule": {"every": "1h"}, "topic": "t", "body": "x"}
            assert client.ask("PUT", f"/v1/schedules/many-{number:03}", schedule).status == 201
    assert ask(node, "select count(*), count(distinct name), min(zone) from schedules") == [
        (rows, rows, "UTC")
    ]
    (batch,) = broker_state.schedule_rows(Endpoint(node.endpoint).schedules())
    assert batch.num_rows == rows


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_and_duckdb_give_the_same_answers(spark: SparkSession, tmp_path: Path) -> None:
    queries = [
        "select unique_key, topic, due_ms, place from pending order by unique_key",
        "select name, rule, zone, next_due_ms from schedules order by name",
        "select id, action, state, condition, topics, accepted_ms from selections order by id",
        "select state, count(*) as n from scheduled group by state order by state",
    ]
    with running_node(tmp_path / "data", compact_rows=0, http_port=0) as node, client_of(node) as client:
        send_everywhere(node, client)
        send_due_now(node.endpoint, 1)
        schedule = {"rule": {"every": "1h"}, "topic": "reports", "body": "x"}
        assert client.ask("PUT", "/v1/schedules/hourly", schedule).status == 201
        select(client, "region = 'eu'")
        select(client, "TRUE", action="shift", shift="-30m", topics=["mail"])
        select(client, "TRUE", action="move", to_topic="elsewhere", topics=["orders"])
        spark_views.register(spark, node.endpoint)
        for text in queries:
            assert [tuple(row) for row in spark.sql(text).collect()] == ask(node, text), text
        assert len(ask(node, queries[0])) == 5
        shot = Snapshot.pin(Endpoint(node.endpoint), upcoming=True)
        load = spark_views.due_load(spark, node.endpoint, shot, due=(None, shot.now_ms + DAY_MS))
        assert load.total == 5
