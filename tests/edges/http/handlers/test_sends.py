"""Sends over HTTP, against a real node, with the standard library's client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import pyarrow as pa
import pytest
from tests.edges.arrow_types import ROWS, TYPES, column
from tests.edges.http.client import Client
from tests.loop_turns import LoopTurns
from tests.node_fixture import RunningNode

from timeball.edges.http import answers_codec, codec
from timeball.edges.http.handlers.sends import build_verdicts_answer
from timeball.io.threads import SLICE_ROWS
from timeball.model import http_api
from timeball.model.answers import Verdict
from timeball.model.limits import DAY_MS, HOUR_MS

ARROW = "application/vnd.apache.arrow.stream"


def encode_arrow(rows: pa.RecordBatch) -> bytes:
    """Encode rows as an Arrow stream."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue()


def test_a_message_without_a_due_time_is_received_and_acknowledged(client: Client) -> None:
    sent = client.send("now", {"body": "hello", "key": "order-7", "tag": "new", "properties": {"a": "1"}})
    assert sent.status == 201
    assert sent.value["durable"] is True
    assert "due" not in sent.value
    (received,) = client.receive("now").value["messages"]
    assert (received["body"], received["keys"], received["tag"]) == ("hello", ["order-7"], "new")
    assert received["properties"]["a"] == "1"
    assert (received["id"], received["attempt"], received["topic"]) == (sent.value["id"], 1, "now")
    answer = client.ask(
        "POST", "/v1/topics/now/ack", {"receipts": [received["receipt"]]}, query={"group": "workers"}
    )
    assert answer.value == {"results": [{"receipt": received["receipt"], "valid": True}]}
    again = client.ask(
        "POST", "/v1/topics/now/ack", {"receipts": [received["receipt"]]}, query={"group": "workers"}
    )
    assert again.value["results"][0]["valid"] is False


def test_bodies_are_returned_unchanged(client: Client) -> None:
    raw = bytes(range(256))
    messages = [{"json": {"b": [1, 2.50, None]}}, {"base64": base64.b64encode(raw).decode()}, {"body": "ü☃"}]
    assert client.send("bodies", messages).status == 201
    received = {}
    while len(received) < 3:
        received |= {one["id"]: one for one in client.receive("bodies").value["messages"]}
    result = sorted(received.values(), key=lambda one: one["seq"])
    assert json.loads(result[0]["body"]) == {"b": [1, 2.5, None]}
    assert base64.b64decode(result[1]["base64"]) == raw
    assert result[2]["body"] == "ü☃"


@pytest.mark.parametrize("after", ["30m", "PT30M", "1800s", "PT0.5H"])
def test_a_delay_is_parsed_in_each_form(client: Client, node: RunningNode, after: object) -> None:
    before_ms = node.broker.clock.now_ms()
    sent = client.send("later", {"body": "x", "after": after})
    assert sent.status == 201, sent
    assert before_ms + 1_800_000 <= sent.value["due_ms"] <= node.broker.clock.now_ms() + 1_800_000


def test_a_due_time_in_the_past_is_no_lateness(client: Client, node: RunningNode) -> None:
    past_ms = node.broker.clock.now_ms() - DAY_MS
    sent = client.send("overdue", {"body": "x", "at": past_ms})
    assert sent.value["due_ms"] == past_ms and sent.value["past_ms"] >= DAY_MS
    (received,) = client.receive("overdue", wait="30s").value["messages"]
    assert received["lateness_ms"] < HOUR_MS and node.broker.lateness.max_ms < HOUR_MS


def test_the_answer_to_columns_counts_the_rows_with_a_past_due_time(
    client: Client, node: RunningNode
) -> None:
    now_ms = node.broker.clock.now_ms()
    due_ms = pa.array([now_ms - DAY_MS, now_ms - HOUR_MS, now_ms + DAY_MS], pa.uint64())
    rows = pa.RecordBatch.from_arrays([pa.array([b"a", b"b", b"c"]), due_ms], names=["body", "due_ms"])
    arrow = {"content_type": ARROW}
    sent = client.send("past-columns", encode_arrow(rows), **arrow, idempotency_key="past")
    assert sent.value["past_rows"] == 2 and DAY_MS <= sent.value["past_ms"] < DAY_MS + HOUR_MS
    again = client.send("past-columns", encode_arrow(rows), **arrow, idempotency_key="past")
    assert again.value["states"] and "past_rows" not in again.value
    relative = pa.RecordBatch.from_arrays([pa.array([b"d"]), pa.array([0])], names=["body", "delay_ms"])
    assert "past_rows" not in client.send("past-columns", encode_arrow(relative), **arrow).value
    received = client.receive("past-columns", wait="30s").value["messages"]
    assert received and all(item.get("lateness_ms", 0) < HOUR_MS for item in received)
    assert node.broker.lateness.max_ms < HOUR_MS


@pytest.mark.parametrize("when", [{}, {"after": "0"}, {"after": "1ms"}, {"at": "2031-01-31T09:00:00Z"}])
def test_only_a_due_time_is_reported_as_past(client: Client, when: dict[str, object]) -> None:
    for messages in ([{"body": "x"} | when], [{"body": "x"} | when] * 200):
        sent = client.send("later", messages).value["messages"]
        assert not any("past_ms" in item for item in sent)


@pytest.mark.parametrize("at", ["2031-01-31T09:00:00Z", "2031-01-31T10:00:00.000+01:00", 1_927_616_400_000])
def test_a_due_time_is_parsed_in_each_form(client: Client, at: object) -> None:
    sent = client.send("later", {"body": "x", "at": at})
    assert sent.value["due"] == "2031-01-31T09:00:00.000Z"


def test_many_messages_are_sent_as_an_array_or_as_lines(client: Client) -> None:
    lines = b"".join(b'{"body": "%d", "after": "1h"}\n' % at for at in range(3_000))
    sent = client.send("many", lines, content_type="application/x-ndjson")
    assert len({item["id"] for item in sent.value["messages"]}) == 3_000
    seqs = [item["seq"] for item in sent.value["messages"]]
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
    (received,) = client.receive("events").value["messages"]
    assert base64.b64decode(received["base64"]) == b"\xff\x00"
    assert received["keys"] == ["order-7"]
    wanted = {"ce-id": "e-1", "ce-source": "/shop", "ce-note": "a b", "content-type": "image/png"}
    assert wanted.items() <= received["properties"].items()
    later = client.send("events", b"", **event, timeball_after="PT1H")
    assert "due" in later.value
    at = client.send("events", b"", **event, timeball_at="1927616400000")
    assert at.value["due"] == "2031-01-31T09:00:00.000Z"


@pytest.mark.parametrize(
    "wrong",
    [
        {"ce_specversion": "0.3"},
        {"ce_id": ""},
        {"timeball_after": "soon"},
        {"timeball_delay": "1h"},
        {"timeball_dealy": "1h"},
    ],
)
def test_an_invalid_cloud_event_is_refused(client: Client, wrong: dict[str, str]) -> None:
    event = {"ce_specversion": "1.0", "ce_id": "e-1", "ce_source": "/shop", "ce_type": "paid"}
    assert client.send("events", b"x", **{**event, **wrong}).status == 400


def test_a_raw_body_is_a_message_with_its_fields_in_headers(client: Client) -> None:
    headers = {
        "timeball_id": "raw-1", "timeball_key": "a%2Fbb", "timeball_tag": "new",
        "timeball_property_shop": "M%C3%BCnchen",
    }  # fmt: skip
    sent = client.send("raw", b"\xff{", content_type="image/png", **headers)
    assert (sent.status, sent.value["id"]) == (201, "raw-1")
    (received,) = client.receive("raw").value["messages"]
    assert base64.b64decode(received["base64"]) == b"\xff{"
    assert (received["keys"], received["tag"]) == (["a/bb"], "new")
    assert {"shop": "München", "content-type": "image/png"}.items() <= received["properties"].items()
    later = client.send("raw", b'{"a": 1}', timeball_after="PT1H")  # of JSON's type, and no message in JSON
    (place,) = client.ask("GET", f"/v1/messages/{later.value['id']}").value["messages"]
    assert (place["state"], place["body"], "due" in later.value) == ("waiting", '{"a": 1}', True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeball_dealy": "1h"},
        {"timeball_delay": "1h"},
        {"timeball_after": "1000"},
        {"timeball_raw": "no"},
        {"timeball_id": ""},
    ],
)
def test_a_raw_body_with_invalid_headers_is_refused(client: Client, wrong: dict[str, str]) -> None:
    assert client.send("raw", b"x", content_type="text/plain", **wrong).status == 400


def test_a_raw_body_of_a_type_without_preflight_needs_a_header(client: Client) -> None:
    refused = client.send("raw", b"x", content_type="text/plain")
    assert refused.status == 415
    assert "timeball-raw: true" in refused.value["detail"]
    assert client.send("raw", b"x", content_type="text/plain", timeball_raw="true").status == 201


def test_a_raw_send_with_a_key_is_accepted_once(client: Client) -> None:
    first, again = (client.send("raw", b"x", timeball_after="1h", idempotency_key="k-raw") for _ in range(2))
    assert (first.status, first.value["outcome"]) == (201, "created")
    assert (again.status, again.value) == (200, first.value | {"outcome": "exists", "state": "waiting"})


def test_a_send_with_a_key_is_accepted_once(client: Client) -> None:
    first = client.send("once", {"body": "a", "after": "1h"}, idempotency_key="k1")
    again = client.send("once", {"body": "a", "after": "1h"}, idempotency_key="k1")
    assert (first.status, again.status) == (201, 200)
    assert again.value == first.value | {"outcome": "exists", "state": "waiting"}
    other = client.send("once", {"body": "b", "after": "1h"}, idempotency_key="k1")
    assert (other.status, other.value["code"]) == (409, "conflict")


def test_columns_are_accepted_whole_and_answered_with_counts(client: Client) -> None:
    rows = pa.RecordBatch.from_pydict({"body": [b"x"] * 500, "unique_key": [f"c-{at}" for at in range(500)]})
    data = encode_arrow(rows)
    sent = client.send("columns", data, content_type=ARROW)
    assert (sent.status, sent.value["rows"], sent.value["durable"]) == (201, 500, True)
    (place,) = client.ask("GET", "/v1/messages/c-499").value["messages"]
    assert place["seq"] == sent.value["first_seq"] + 499
    again = client.send("columns", data, content_type=ARROW, idempotency_key="c")
    assert again.status == 201
    repeated = client.send("columns", data, content_type=ARROW, idempotency_key="c")
    assert (repeated.status, repeated.value) == (
        200,
        again.value | {"outcome": "exists", "states": {"visible": 500}},
    )


def test_a_repeated_send_gets_the_current_states_and_may_be_sent_again(client: Client) -> None:
    def send(body: str = "a", **headers: str) -> tuple[int, Any]:
        """Send two messages with one idempotency key, and return the status and the answer."""
        answer = client.send(
            "anew", [{"body": body, "after": "1h"}, {"body": "now"}], idempotency_key="k", **headers
        )
        return answer.status, answer.value

    status, first = send()
    ids = [item["id"] for item in first["messages"]]
    assert (status, [item["outcome"] for item in first["messages"]]) == (201, ["created"] * 2)
    moved = client.ask("PATCH", f"/v1/messages/{ids[0]}", {"after": "2h"}).value
    status, again = send()
    assert [item.get("due") for item in again["messages"]] == [moved["due"], None]
    assert (status, [item["state"] for item in again["messages"]]) == (200, ["waiting", "visible"])
    assert send(idempotency_attempt="1", idempotency_if_settled="send") == (status, again)
    client.ask("DELETE", f"/v1/messages/{ids[0]}")
    status, again = send()
    assert (status, [item["state"] for item in again["messages"]]) == (200, ["cancelled", "visible"])
    status, anew = send(idempotency_attempt="1", idempotency_if_settled="send")
    assert (status, anew["messages"][0]["outcome"]) == (201, "created")
    assert anew["messages"][0]["seq"] > first["messages"][1]["seq"]
    # The answer was lost: the same attempt makes no second message.
    status, lost = send(idempotency_attempt="1", idempotency_if_settled="send")
    assert (status, lost["messages"][0]) == (201, anew["messages"][0] | {"state": "waiting"})
    status, problem = send("b", idempotency_attempt="2", idempotency_if_settled="send")
    assert (status, problem["code"]) == (409, "conflict")
    for wrong in (
        {"idempotency_if_settled": "send"},
        {"idempotency_attempt": "1", "idempotency_if_settled": "never", "idempotency_key": "k"},
        {"idempotency_key": "k", "idempotency_if_settled": "send"},
    ):
        refused = client.send("anew", {"body": "a"}, **wrong)
        assert (refused.status, refused.value["code"]) == (400, "invalid_message")


@pytest.mark.parametrize("name", ["string_view", "binary_view", "list_view<item: string>"])
def test_view_columns_are_refused_by_their_schema(client: Client, name: str) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array([b"x"] * ROWS), column(TYPES[name])], names=["body", "tag"])
    refused = client.send("columns", encode_arrow(rows), content_type=ARROW)
    assert (refused.status, refused.value["code"]) == (400, "invalid_message")
    assert "column 'tag' is" in refused.value["detail"] and "_view; cast it to" in refused.value["detail"]


def test_one_wrong_message_refuses_its_request_and_no_other(client: Client) -> None:
    wrong = client.send("whole", [{"body": "x"}, {"body": "y", "tag": "t" * 1_000_000}])
    assert (wrong.status, wrong.value["code"]) == (400, "invalid_message")
    assert client.send("whole", {"body": "z"}).status == 201
    assert [item["body"] for item in client.receive("whole").value["messages"]] == ["z"]


def test_a_key_with_a_blank_and_a_tag_with_a_control_character_are_refused(client: Client) -> None:
    rows = pa.RecordBatch.from_pydict({"body": [b"x"], "keys": ["customer 4"]})
    for refused in (
        client.send("keys", {"body": "x", "key": "customer 4"}),
        client.send("keys", {"body": "x", "keys": ["customer 4"]}),
        client.send("keys", b"x", timeball_key="customer 4"),
        client.send("keys", b"x", timeball_key="customer%204"),
        client.send("keys", encode_arrow(rows), content_type=ARROW),
        client.send("keys", {"body": "x", "tag": "a\x02b"}),
    ):
        assert (refused.status, refused.value["code"]) == (400, "invalid_message"), refused


def test_an_answer_with_many_verdicts_is_encoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key may name a million messages, and no other request may wait for more than a slice."""
    turns, encode = LoopTurns(), codec.encode

    def counted(answer: Any) -> bytes:
        for _ in answer:
            turns.count()
        return encode(answer)

    monkeypatch.setattr(codec, "encode", counted)
    for rows in (0, 1, SLICE_ROWS, SLICE_ROWS + 1, 3 * SLICE_ROWS):
        verdicts = [Verdict(f"[k{row}]", "cancelled", row, 5) for row in range(rows)]
        answer, most = asyncio.run(turns.most(build_verdicts_answer(verdicts)))
        assert answer.value == encode(http_api.SettledMany(answers_codec.show_verdicts(verdicts)))
        assert most <= SLICE_ROWS and answer.size_bytes == len(answer.value)


# ---- unique keys -----------------------------------------------------------------------------------------------


def test_a_send_with_a_pending_unique_key_is_refused_kept_or_replaces(client: Client) -> None:
    message = {"body": "x", "after": "1h", "unique_key": "order-17"}
    first = client.send("unique", message)
    assert (first.status, first.value["outcome"]) == (201, "created")
    rejected = client.send("unique", message)
    assert rejected.status == 409
    found = {name: first.value[name] for name in ("id", "seq", "due", "due_ms")}
    assert rejected.value == rejected.value | {"code": "already_pending", **found}
    kept = client.send("unique", message | {"on_pending": "keep"})
    assert (kept.status, kept.value["outcome"]) == (200, "kept") and kept.value == kept.value | found
    replaced = client.send("unique", message | {"on_pending": "replace"})
    assert (replaced.status, replaced.value["outcome"], replaced.value["replaced"]) == (
        201,
        "replaced",
        found,
    )
    assert replaced.value["id"] != first.value["id"]
    shown = client.ask("GET", f"/v1/messages/{first.value['id']}").value["messages"][0]
    assert (shown["state"], shown["reason"]) == ("cancelled", "replaced")
    cancelled = client.ask("POST", "/v1/cancel", {"keys": ["unique:order-17"]}).value["verdicts"]
    assert [verdict["verdict"] for verdict in cancelled] == ["cancelled", "already_cancelled"]


def test_a_unique_key_may_come_in_a_header_and_be_combined_with_an_idempotency_key(client: Client) -> None:
    raw = {"timeball_unique_key": "order%2017", "timeball_after": "1h"}
    assert client.send("raw", b"x", **raw).status == 400  # it has a blank
    raw["timeball_unique_key"] = "order-17"
    assert client.send("raw", b"x", **raw).value["outcome"] == "created"
    raw |= {"timeball_on_pending": "replace", "idempotency_key": "unique-k"}
    first, again = client.send("raw", b"x", **raw), client.send("raw", b"x", **raw)
    assert (first.status, again.status) == (201, 200), (first, again)
    assert (first.value["outcome"], again.value["outcome"]) == ("replaced", "exists")
    assert first.value["seq"] == again.value["seq"]


def test_the_rule_of_a_topic_applies_to_unique_keys_that_name_none(client: Client) -> None:
    assert client.ask("PUT", "/v1/topics/ruled", {"queues": 2, "on_pending": "keep"}).status == 200
    message = {"body": "x", "after": "1h", "unique_key": "a"}
    assert [client.send("ruled", message).value["outcome"] for _ in range(2)] == ["created", "kept"]
    assert client.ask("PUT", "/v1/topics/ruled", {"on_pending": "drop"}).status == 400


@pytest.mark.parametrize(
    "messages",
    [
        {"body": "x", "on_pending": "keep"},
        {"body": "x", "unique_key": "a", "on_pending": "drop"},
        {"body": "x", "unique_key": "a b"},
        [{"body": "x", "unique_key": "a"}, {"body": "y"}],
    ],
)
def test_an_invalid_unique_key_is_refused(client: Client, messages: Any) -> None:
    assert client.send("unique-bad", messages).status == 400


# ---- expiry and delivery windows ---------------------------------------------------------------------------------


def test_an_expiry_is_stored_with_the_message(client: Client) -> None:
    sent = client.send("expiring", {"body": "x", "after": "1h", "expires_in": "5m", "on_expiry": "move"})
    shown = client.ask("GET", f"/v1/messages/{sent.value['id']}").value["messages"][0]["properties"]
    assert shown == {"TIMEBALL_EXPIRES_AFTER_MS": "300000", "TIMEBALL_ON_EXPIRY": "move"}
    raw = client.send("expiring", b"x", timeball_after="1h", timeball_expires_at="2090-01-31T09:00:00Z")
    shown = client.ask("GET", f"/v1/messages/{raw.value['id']}").value["messages"][0]["properties"]
    assert shown["TIMEBALL_EXPIRES_MS"] == "3789536400000"
    as_property = {"body": "x", "after": "1h", "properties": {"TIMEBALL_EXPIRES_AFTER_MS": "300000"}}
    assert client.send("expiring", as_property).status == 201


@pytest.mark.parametrize(
    "fields",
    [
        {"expires_in": "5m"},
        {"after": "1h", "on_expiry": "move"},
        {"after": "1h", "expires_in": "5m", "on_expiry": "drop"},
        {"at": "2090-01-31T09:00:00Z", "expires_at": "2090-01-31T08:00:00Z"},
        {"after": "1h", "expires_in": "5m", "expires_at": "2090-01-31T08:00:00Z"},
        {"after": "1h", "expires_in": 5},
        {"after": "1h", "expires_at": "2020-01-31T08:00:00Z"},
        {"after": "1h", "window": "5m", "expires_at": "2020-01-31T08:00:00Z"},
        {"after": "1h", "expires_in": "5m", "properties": {"TIMEBALL_EXPIRES_AFTER_MS": "7"}},
        {"after": "1h", "properties": {"TIMEBALL_EXPIRES_AFTER_MS": "5m"}},
        {"after": "1h", "properties": {"TIMEBALL_ON_EXPIRY": "move"}},
        {"after": "1h", "spread": "level"},
        {"after": "1h", "window": "5m", "spread": "odd"},
        {"window": "5m"},
        {"after": "1h", "window": "1d", "spread": "level"},
        {"at": "2031-01-31T09:00", "zone": "Europe/Berlin", "window": "5m"},
        {"at": "2031-01-31T09:00:00Z", "window": "5m", "expires_at": "2031-01-31T09:04:58Z"},
        {
            "at": "2031-01-31T09:00:00Z",
            "window": "5m",
            "spread": "level",
            "expires_at": "2031-01-31T09:04:58Z",
        },
    ],
)
def test_an_invalid_expiry_or_window_is_refused(client: Client, fields: dict[str, object]) -> None:
    assert client.send("bad-options", {"body": "x", **fields}).status == 400
    assert client.send("bad-options", [{"body": "x", **fields}] * 300).status == 400


def test_a_repeated_send_is_answered_after_its_expiry(client: Client, node: RunningNode) -> None:
    at_ms = node.broker.clock.now_ms() - 1
    fields = {"body": "x", "after": "1h", "expires_at": at_ms}
    assert client.send("expired", fields).status == 400
    assert client.send("expired", fields, idempotency_key="expired").status == 201, (
        "as when it was sent first"
    )


def test_an_error_of_a_time_names_its_field(client: Client) -> None:
    sent = client.send("bad-options", {"body": "x", "after": "1h", "expires_at": "2090-01-31T09:00:00"})
    assert sent.value["detail"].startswith("expires_at=2090")
    for name in ("from", "to"):
        listed = client.ask("GET", "/v1/messages", query={name: "soon"})
        assert listed.value["detail"].startswith(f"{name}='soon'")


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("spread", ["even", "level"])
def test_the_answer_has_the_due_time_in_the_window(
    client: Client, node: RunningNode, spread: str, rows: int
) -> None:
    begin_ms = node.broker.clock.now_ms() + HOUR_MS
    window = {"window": "10m", "spread": spread}
    messages = [
        {"body": "x", "id": f"{spread}-{rows}-{number}", "at": begin_ms, **window} for number in range(rows)
    ]
    sent = client.send(f"windows-{spread}", messages if rows > 1 else messages[0])
    answers = sent.value["messages"] if rows > 1 else [sent.value]
    assert all(begin_ms <= answer["due_ms"] <= begin_ms + 600_000 for answer in answers)
    for answer in (answers[0], answers[-1]):
        shown = client.ask("GET", f"/v1/messages/{answer['id']}").value["messages"][0]
        assert shown["due_ms"] == answer["due_ms"]
    if rows == 300:
        assert len({answer["due_ms"] // 1_000 for answer in answers}) == 300 or spread == "even"


def test_a_delay_may_have_a_window_and_a_level_window_no_idempotency_key(
    client: Client, node: RunningNode
) -> None:
    for spread in ("even", "level"):
        before_ms = node.broker.clock.now_ms()
        sent = client.send("window-after", {"body": "x", "after": "1h", "window": "10m", "spread": spread})
        assert before_ms + HOUR_MS <= sent.value["due_ms"] <= node.broker.clock.now_ms() + HOUR_MS + 600_000
    message = {"body": "x", "after": "1h", "window": "10m"}
    even = [client.send("window-key", message, idempotency_key="window-k").value for _ in range(2)]
    assert even[0]["due_ms"] == even[1]["due_ms"] and even[1]["outcome"] == "exists"
    assert client.send("window-key", message | {"spread": "level"}, idempotency_key="l").status == 400
