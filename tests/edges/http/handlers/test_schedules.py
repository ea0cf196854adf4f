"""The paths of recurring schedules: answers, refusals, permissions, and the conversions between JSON and facts."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.datastructures import QueryParams
from tests.accounts import SECRETS, guarded_node
from tests.broker.on_node import on_node
from tests.broker.recurring.schedule_lives import facts_of
from tests.crash.world import World
from tests.edges.http.client import Client, Reply, client_of
from tests.edges.http.test_connection import RecordingTransport
from tests.edges.http.test_exchange import Flow
from uvicorn.protocols.http.flow_control import FlowControl

from timeball.broker.admin.schedule_changes import Past, Shown
from timeball.broker.recurring.rule import Occurrence
from timeball.broker.registry.schedules import Progress, State
from timeball.edges.http.exchange import Exchange, Target
from timeball.edges.http.handlers.schedules import (
    Schedules,
    preview_after_ms,
    show_history,
    show_schedule,
    show_times,
    to_facts,
)
from timeball.edges.http.requests import Call, RequestLimits
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.answers import MessagePlace
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.http_api import Previewing, Schedule, SchedulePut

PATH = "/v1/schedules"
RULE = {"cron": "0 9 * * 1", "zone": "UTC"}
WANTED = {"rule": RULE, "topic": "orders", "body": "close"}


def put(client: Client, name: str, **fields: Any) -> Reply:
    """Put a schedule that has the fields of WANTED, changed by `fields`. A field with None is left out."""
    wanted = {**WANTED, **fields}
    return client.ask(
        "PUT", f"{PATH}/{name}", {key: value for key, value in wanted.items() if value is not None}
    )


def test_a_schedule_is_created_shown_changed_and_deleted(client: Client) -> None:
    created = put(client, "a", keys=["k1", "k2"], tag="t", properties={"p": "1"}, catch_up_within="90m")
    assert created.status == 201
    pending = created.value.pop("next")
    assert pending["id"] == f"a.{pending['due_ms']}" and pending["local"].endswith("T09:00:00")
    assert created.value == {
        "name": "a", "state": "active", "topic": "orders", "rule": created.value["rule"], "body": "close",
        "tag": "t", "keys": ["k1", "k2"], "properties": {"p": "1"}, "catch_up": "latest", "catch_up_within": "90m",
        "runs": 0, "outcome": "created",
    }  # fmt: skip
    again = put(client, "a", keys=["k1", "k2"], tag="t", properties={"p": "1"}, catch_up_within="90m")
    assert (again.status, again.value["outcome"], again.value["next"]) == (200, "unchanged", pending)
    changed = put(client, "a", body=None, base64=base64.b64encode(b"\xff").decode(), key="k")
    assert (changed.status, changed.value["outcome"]) == (200, "replaced")
    assert (
        changed.value["base64"] == "/w==" and changed.value["keys"] == ["k"] and "body" not in changed.value
    )
    assert changed.value["next"] == pending, "an equal rule keeps its next time"
    waiting = client.ask("GET", f"/v1/messages/{pending['id']}").value["messages"]
    assert [message["state"] for message in waiting] == ["waiting", "cancelled"]

    skipping = put(client, "a", overlap="skip", group="makers").value
    assert (skipping["outcome"], skipping["overlap"], skipping["group"]) == ("replaced", "skip", "makers")
    paused = client.ask("POST", f"{PATH}/a/pause").value
    assert paused["state"] == "paused" and "next" not in paused
    resumed = client.ask("POST", f"{PATH}/a/resume").value
    assert (resumed["state"], resumed["next"]) == ("active", pending)
    run = client.ask("POST", f"{PATH}/a/run")
    assert run.status == 201 and run.value["id"].startswith("a.run-")
    [sent] = client.ask("GET", f"/v1/messages/{run.value['id']}").value["messages"]
    assert (sent["state"], sent["topic"]) == ("visible", "orders")
    history = client.ask("GET", f"{PATH}/a/history").value
    assert history["name"] == "a" and history["occurrences"][0]["state"] == "unknown"

    assert [each["name"] for each in client.ask("GET", PATH).value["schedules"]] == ["a"]
    assert client.ask("DELETE", f"{PATH}/a").value == {"name": "a", "verdict": "deleted"}
    assert client.ask("GET", PATH).value == {"schedules": [], "next_page": None}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/run"),
                         ("GET", "/history")):  # fmt: skip
        answer = client.ask(method, f"{PATH}/a{path}")
        assert (answer.status, answer.value["code"]) == (404, "not_found")


def test_schedules_are_listed_in_pages(client: Client) -> None:
    for name in ("p1", "p2", "p3"):
        put(client, name, topic="paged")
    first = client.ask("GET", PATH, query={"max": 2, "topic": "paged"}).value
    assert [each["name"] for each in first["schedules"]] == ["p1", "p2"]
    rest = client.ask("GET", PATH, query={"page": first["next_page"], "topic": "paged"}).value
    assert [each["name"] for each in rest["schedules"]] == ["p3"] and rest["next_page"] is None
    assert client.ask("GET", PATH, query={"max": 0}).value["code"] == "out_of_range"


def test_a_preview_shows_the_next_times_of_a_rule(client: Client) -> None:
    asked = {"rule": {"every": "90m"}, "from": "2030-01-01T00:00:00Z", "count": 2}
    times = client.ask("POST", "/v1/preview", asked).value["times"]
    assert [time["due"] for time in times] == ["2030-01-01T01:30:00.000Z", "2030-01-01T03:00:00.000Z"]
    assert len(client.ask("POST", "/v1/preview", {"rule": RULE}).value["times"]) == 10
    ended = client.ask("POST", "/v1/preview", {"rule": {"at": ["2020-01-01T00:00"], "zone": "UTC"}})
    assert ended.value == {"times": []}
    refused = client.ask("POST", "/v1/preview", {"rule": {"cron": "nonsense", "zone": "UTC"}})
    assert (refused.status, refused.value["code"]) == (400, "invalid_delay")
    refused = client.ask("POST", "/v1/preview", {"rule": RULE, "from": "2030-01-01T00:00"})
    assert refused.value["detail"].startswith("from=2030-01-01T00:00:00: without a time zone")


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("invalid_message", {"body": None}), ("invalid_message", {"json": {"a": 1}}),
        ("invalid_message", {"surprise": 1}), ("invalid_message", {"catch_up": "some"}),
        ("invalid_message", {"keys": ["a b"]}), ("invalid_message", {"properties": {"schedule": "x"}}),
        ("invalid_message", {"properties": {"": "x"}}), ("invalid_message", {"rule": 7}),
        ("invalid_delay", {"rule": {"cron": "61 * * * *", "zone": "UTC"}}), ("invalid_delay", {"rule": {}}),
        ("invalid_delay", {"rule": {"cron": "0 9 * * *"}}), ("invalid_delay", {"catch_up_within": "soon"}),
        ("invalid_name", {"topic": "a b"}), ("out_of_range", {"body": "x" * 65_537}),
    ],
)  # fmt: skip
def test_a_refused_request_creates_no_schedule(client: Client, code: str, wrong: dict[str, Any]) -> None:
    answer = put(client, "wrong", **wrong)
    assert (answer.status // 100, answer.value["code"]) == (4, code)
    assert client.ask("GET", f"{PATH}/wrong").status == 404


def test_a_schedule_that_is_not_json_is_refused(client: Client) -> None:
    assert client.ask("PUT", f"{PATH}/a", b"{}", content_type="text/plain").status == 415


def test_a_schedule_needs_the_permission_for_its_topic(tmp_path: Path) -> None:
    with guarded_node(tmp_path, http_port=0) as node:

        def client(name: str) -> Any:
            return client_of(node, f"Bearer {name}:{SECRETS[name]}")

        with client("shop") as shop, client("other") as other:
            assert put(shop, "a").status == 201
            assert put(other, "b").status == 403
            assert put(other, "a", topic="news").status == 403
            assert other.ask("GET", PATH).value["schedules"] == []
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/run")):
                assert other.ask(method, f"{PATH}/a{path}").status == 404
            assert shop.ask("GET", f"{PATH}/a").value["body"] == "close"
            assert shop.ask("DELETE", f"{PATH}/a").status == 200


@on_node()
async def test_the_rule_of_a_put_is_read_in_a_thread(world: World) -> None:
    exchange = Exchange(
        "PUT", Target(f"{PATH}/a", QueryParams(""), {"name": "a"}), {"content-type": "application/json"}, peer="",
        transport=RecordingTransport(), flow=cast(FlowControl, Flow()), keep_alive=True, expects_continue=False,
    )  # fmt: skip
    exchange.add_body(json.dumps({**WANTED, "rule": {"every": "often"}}).encode())
    exchange.more_body = False
    call = Call(exchange, RequestLimits())
    call.caller = ANONYMOUS
    put_request = asyncio.ensure_future(Schedules(world.broker).paths[f"{PATH}/{{name}}"]["PUT"](call))
    await asyncio.sleep(0)
    assert not put_request.done(), "other tasks have their turns meanwhile"
    with pytest.raises(InvalidDelay):
        await put_request


# ---- schedules as JSON ------------------------------------------------------------------------------------------

PROGRESS = Progress(State.ACTIVE, 5, number=7, due_ms=60_000, at_ms=5)


def show(progress: Progress = PROGRESS, *, may_read: bool = True, **changes: object) -> Schedule:
    """Build the answer that shows a schedule with these changes of its facts."""
    return show_schedule(Shown("a", facts_of(**changes), progress, "1970-01-01T00:01:00", may_read))  # type: ignore[arg-type]


def test_a_shown_schedule_is_a_valid_request_for_an_equal_schedule() -> None:
    stored = facts_of(
        tag="t", keys="k1 k2", properties={"p": "1"}, catch_up_within_ms=90 * limits.MINUTE_MS,
        overlap="skip", group="g",
    )  # fmt: skip
    fields = msgspec.to_builtins(show_schedule(Shown("a", stored, PROGRESS, "", True)))
    again = {name: value for name, value in fields.items() if name in SchedulePut.__struct_fields__}
    assert to_facts(msgspec.convert(again, SchedulePut)) == stored


@pytest.mark.parametrize(
    ("within_ms", "text"),
    [
        (0, "0d"),
        (1, "1ms"),
        (1_500, "1500ms"),
        (90_000, "90s"),
        (limits.HOUR_MS, "1h"),
        (limits.DAY_MS, "1d"),
    ],
)
def test_a_duration_is_shown_in_its_largest_unit(within_ms: int, text: str) -> None:
    schedule = show(catch_up_within_ms=within_ms)
    assert schedule.catch_up_within == text
    assert to_facts(
        SchedulePut(rule=schedule.rule, topic="t", body="b", catch_up_within=text)
    ).catch_up_within_ms == (within_ms)


def test_the_pending_occurrence_and_the_last_release_are_shown() -> None:
    schedule = show()
    assert schedule.next is not None and (schedule.next.id, schedule.next.due) == (
        "a.60000",
        "1970-01-01T00:01:00.000Z",
    )
    assert (schedule.last, schedule.last_due, schedule.state) == (None, None, "active")
    ended = show(Progress(State.ENDED, 60_000, runs=1, last_due_ms=60_000, last_ms=60_002))
    assert (ended.next, ended.state, ended.last_due) == (None, "ended", "1970-01-01T00:01:00.000Z")
    assert ended.last == "1970-01-01T00:01:00.002Z"
    assert show(Progress(State.FAILED, 5, error="no zone")).error == "no zone"


def test_a_body_is_shown_only_to_accounts_that_may_receive() -> None:
    assert (show().body, show(body=b"\xff").base64) == ("tick", b"\xff")
    hidden = show(may_read=False)
    assert (hidden.body, hidden.base64) == (None, None)


def test_an_invalid_rule_time_or_body_is_refused() -> None:
    with pytest.raises(InvalidDelay):
        to_facts(SchedulePut(rule={}, topic="t", body="b"))
    with pytest.raises(InvalidDelay):
        to_facts(SchedulePut(rule={"every": "1m"}, topic="t", body="b", catch_up_within="soon"))
    with pytest.raises(InvalidMessage):
        to_facts(SchedulePut(rule={"every": "1m"}, topic="t"))
    with pytest.raises(InvalidDelay):
        preview_after_ms(Previewing(rule={}, start="soon"))


def test_times_and_the_history_of_a_schedule_are_shown() -> None:
    occurrence = Occurrence(60_000, "1970-01-01T00:01:00Z")
    [time] = show_times([occurrence]).times
    assert (time.due, time.due_ms, time.local) == ("1970-01-01T00:01:00.000Z", 60_000, "1970-01-01T00:01:00Z")
    missed = MessagePlace("cancelled", 7, "t", at_ms=90_000, reason="missed")
    past = [Past(occurrence, "a.60000", [missed]), Past(occurrence, "a.60000", [])]
    first, second = show_history("a", past).occurrences
    assert (first.state, first.at, first.reason) == ("cancelled", "1970-01-01T00:01:30.000Z", "missed")
    assert (second.state, second.at, second.reason) == ("unknown", None, None)
