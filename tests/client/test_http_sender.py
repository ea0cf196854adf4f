"""Sends over HTTP: the contents of a batch, refusals before a send, and bodies of any bytes."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest
from tests.node_fixture import RunningNode

from timeball import InvalidDelay, InvalidMessage, RequestError, Timeball
from timeball.client.http_codec import REQUEST_BYTES_MAX, send_request
from timeball.client.http_sender import BATCH_ROWS, ROWS_MAX, _batches
from timeball.client.rows import outgoing


@pytest.fixture(scope="session")
def node(http_node: RunningNode) -> RunningNode:
    """This module is about HTTP."""
    return http_node


def sizes(rows: object, topic: str | None = "t", batch_rows: int | None = None) -> list[int]:
    return [len(batch) for batch in _batches(rows, topic, batch_rows or ROWS_MAX, batch_rows or BATCH_ROWS)]  # type: ignore[arg-type]


def test_a_list_is_one_batch_and_a_generator_several() -> None:
    rows = [{"body": "x"}] * 3_000
    assert sizes(rows) == [3_000]
    assert sizes(iter(rows)) == [1_024, 1_024, 952]
    assert sizes(rows, batch_rows=2_000) == [2_000, 1_000]
    assert sizes([{"body": bytes(3 * 1024 * 1024)}] * 3) == [1, 1, 1]
    assert sizes([]) == []


def test_neighbours_of_one_topic_are_a_batch() -> None:
    assert sizes([{"topic": topic, "body": "x"} for topic in "aabbba"], None) == [2, 3, 1]


def test_all_fields_of_a_row_arrive(ball: Timeball) -> None:
    rows = [
        {
            "body": b"\xff\x00",
            "tag": "t",
            "keys": ["a", "b"],
            "properties": {"p": "q"},
            "message_id": "row-0",
        },
        {"body": "text", "unique_key": "row-1", "at": 1_000_000_000_000},
        {"body": "later", "message_id": "row-2", "delay_ms": 3_600_000},
    ]
    summary = ball.send_many(rows, topic="fields-http")
    assert summary.ids == ["row-0", "row-1", "row-2"] and summary.past_rows == 1 and summary.past_ms > 0
    messages = {m.id: m for m in ball.consume("fields-http", "g", until_idle="200ms")}
    first = messages["row-0"]
    assert (first.body, first.tag, first.keys, first.properties) == (b"\xff\x00", "t", ["a", "b"], {"p": "q"})
    assert messages["row-1"].body == b"text" and messages.keys() == {"row-0", "row-1"}
    assert ball.get("row-2").state == "waiting"


def test_a_bad_row_ends_the_call_or_is_collected(ball: Timeball) -> None:
    rows = [{"topic": f"bad-{n % 2}" if n != 2 else "a/b", "body": "x"} for n in range(4)]
    with pytest.raises(InvalidMessage, match="accepted: rows 0 to 1; no other row was accepted"):
        ball.send_many(rows)
    summary = ball.send_many(rows, on_refused="collect")
    assert [each.first_row for each in summary.refused] == [2] and summary.rows == 4
    with pytest.raises(InvalidMessage, match="unknown column 'queue_id'"):
        ball.send_many([{"body": "x", "queue_id": 1}], topic="bad-0")
    with pytest.raises(InvalidDelay, match="row 1 is None"):
        ball.send_many([{"body": "x"}, {"body": "x", "after": None}], topic="bad-0")


def test_columns_are_sent_over_flight(ball: Timeball) -> None:
    with pytest.raises(RequestError, match="over Flight"):
        ball.send_many(pa.table({"body": [b"x"]}), topic="t")
    with pytest.raises(InvalidMessage, match="list of dicts"):
        ball.send_many("x", topic="t")  # type: ignore[arg-type]


def test_any_body_fits_into_a_request(ball: Timeball) -> None:
    """U+0001 has six bytes in JSON, so such a text travels as base64."""
    body = "\x01" * (4 * 1024 * 1024)
    message = outgoing("large-http", body, None, None, None, None, None, None)
    assert len(send_request([message], None, ()).body) <= REQUEST_BYTES_MAX
    receipt = ball.send("large-http", body)
    (received,) = ball.pull("large-http", "g")
    assert (received.id, received.body) == (receipt.id, body.encode())


def test_a_receipt_has_the_due_time_of_the_broker(ball: Timeball) -> None:
    receipt = ball.send("due-http", "x", after="1h", keys="k")
    assert ball.get(receipt.id).due_ms == receipt.due_ms
    again = ball.send("due-http", "x", at=receipt.store_ms - 5_000)
    assert again.past_ms >= 5_000 and again.state == "visible"
    assert msgspec.structs.asdict(ball.send("due-http", "x", after="1ms"))["past_ms"] == 0
