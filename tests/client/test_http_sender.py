"""Sends over HTTP: the contents of a batch, refusals before a send, and bodies of any bytes."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec.structs import replace
from tests.client.awaited import Dial
from tests.node_fixture import RunningNode, running_node

from timeball import (
    AlreadyPending,
    AsyncTimeball,
    Conflict,
    InvalidDelay,
    InvalidMessage,
    RequestError,
    Timeball,
)
from timeball.client.http_codec import REQUEST_BYTES_MAX, send_request
from timeball.client.http_sender import BATCH_ROWS, ROWS_MAX, _batches
from timeball.client.receipts import Receipt
from timeball.client.rows import build_message

BOTH_CLIENTS = True


def sizes(rows: object, topic: str | None = "t", batch_rows: int | None = None) -> list[int]:
    """The number of messages in each batch of `send_many`."""
    batches = _batches(rows, topic, list_rows=batch_rows or ROWS_MAX, rows_max=batch_rows or BATCH_ROWS)  # type: ignore[arg-type]
    return [len(batch) for batch in batches]


def test_a_list_is_one_batch_and_a_generator_is_divided() -> None:
    rows = [{"body": "x"}] * 3_000
    assert sizes(rows) == [3_000]
    assert sizes(iter(rows)) == [1_024, 1_024, 952]
    assert sizes(rows, batch_rows=2_000) == [2_000, 1_000]
    assert sizes([{"body": bytes(3 * 1024 * 1024)}] * 3) == [1, 1, 1]
    assert sizes([]) == []


def test_a_batch_ends_where_the_topic_changes() -> None:
    assert sizes([{"topic": topic, "body": "x"} for topic in "aabbba"], None) == [2, 3, 1]


def test_all_fields_of_a_dict_arrive_in_the_message(ball: Timeball) -> None:
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
    messages = {message.id: message for message in ball.consume("fields-http", "g", until_idle="200ms")}
    first = messages["row-0"]
    assert (first.body, first.tag, first.keys, first.properties) == (b"\xff\x00", "t", ["a", "b"], {"p": "q"})
    assert messages["row-1"].body == b"text" and messages.keys() == {"row-0", "row-1"}
    assert ball.get("row-2").state == "waiting"


def test_a_refused_row_ends_the_call_or_is_collected(ball: Timeball) -> None:
    rows = [{"topic": f"bad-{row % 2}" if row != 2 else "a/b", "body": "x"} for row in range(4)]
    with pytest.raises(InvalidMessage, match="accepted: rows 0 to 1; no other row was accepted"):
        ball.send_many(rows)
    summary = ball.send_many(rows, on_refused="collect")
    assert [batch.first_row for batch in summary.refused] == [2] and summary.rows == 4
    with pytest.raises(InvalidMessage, match="unknown column 'queue_id'"):
        ball.send_many([{"body": "x", "queue_id": 1}], topic="bad-0")
    with pytest.raises(InvalidDelay, match="row 1 is None"):
        ball.send_many([{"body": "x"}, {"body": "x", "after": None}], topic="bad-0")


def test_a_table_is_refused_without_an_address_of_flight(ball: Timeball) -> None:
    with pytest.raises(RequestError, match="over Flight"):
        ball.send_many(pa.table({"body": [b"x"]}), topic="t")
    with pytest.raises(InvalidMessage, match="list of dicts"):
        ball.send_many("x", topic="t")  # type: ignore[arg-type]


def test_the_largest_body_of_control_characters_fits_into_a_request(ball: Timeball) -> None:
    """U+0001 has six bytes in JSON, so such a text travels as base64."""
    body = "\x01" * (4 * 1024 * 1024)
    message = build_message("large-http", body, None, None, None, None, None, None)
    assert len(send_request([message], None, ()).body) <= REQUEST_BYTES_MAX
    receipt = ball.send("large-http", body)
    (received,) = ball.pull("large-http", "g")
    assert (received.id, received.body) == (receipt.id, body.encode())


def test_a_receipt_has_the_due_time_that_the_broker_has_stored(ball: Timeball) -> None:
    receipt = ball.send("due-http", "x", after="1h", keys="k")
    assert ball.get(receipt.id).due_ms == receipt.due_ms
    overdue = ball.send("due-http", "x", at=receipt.store_ms - 5_000)
    assert overdue.past_ms >= 5_000 and overdue.state == "visible"
    assert msgspec.structs.asdict(ball.send("due-http", "x", after="1ms"))["past_ms"] == 0


def test_sends_of_several_threads_get_their_own_receipts(columns: Timeball) -> None:
    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda number: columns.send("threads", str(number)), range(400)))
    seqs = {receipt.seq for receipt in receipts}
    assert len(seqs) == 400 and len({receipt.id for receipt in receipts}) == 400
    rows = columns.read_log(min(seqs), max(seqs) + 1).read_all()
    stored = {row["seq"]: (row["unique_key"], row["body"]) for row in rows.to_pylist()}
    for number, receipt in enumerate(receipts):
        assert stored[receipt.seq] == (receipt.id, str(number).encode())


def test_ten_thousand_rows_are_accepted_whole_or_not_at_all(columns: Timeball) -> None:
    rows: list[dict[str, object]] = [{"body": str(row)} for row in range(10_000)]
    before = columns.send("whole-http", "before").seq
    too_far = {"body": "x", "at": 9_000_000_000_000}
    with pytest.raises(InvalidDelay, match="no row of this call was accepted") as caught:
        columns.send_many([*rows[:7_500], too_far, *rows[7_501:]], topic="whole-http")
    assert (caught.value.summary.accepted, caught.value.summary.unknown) == ([], [])
    assert columns.send_many(rows, topic="whole-http").ranges[0][1] == 10_000
    after = columns.send("whole-http", "after").seq
    assert columns.read_log(before, after + 1, kinds=[1]).read_all().num_rows == 10_002


def test_a_wrong_row_in_a_later_request_raises_an_error_that_names_the_accepted_rows(ball: Timeball) -> None:
    rows: list[dict[str, object]] = [{"body": "x"} for _ in range(12_000)]
    rows[11_000] = {"body": 5}
    with pytest.raises(InvalidMessage, match=r"accepted: rows 0 to 10239; no other row was") as caught:
        ball.send_many(rows, topic="large-http")
    assert sum(span.rows for span in caught.value.summary.accepted) == 10 * BATCH_ROWS


def test_a_send_repeated_by_its_id_is_accepted_once_also_after_a_restart(data: Path) -> None:
    with running_node(data) as node, node.client() as ball:
        receipts = [ball.send("again", "1", message_id="order-1", after="1h", retry=True) for _ in range(2)]
        node.stop()
        node.start()
        receipts.append(ball.send("again", "1", message_id="order-1", after="1h", retry=True))
        assert [receipt.outcome for receipt in receipts] == ["created", "exists", "exists"]
        assert [replace(receipt, outcome="created") for receipt in receipts[1:]] == [receipts[0], receipts[0]]
        with pytest.raises(Conflict, match="a send of other messages"):
            ball.send("again", "2", message_id="order-1", after="1h", retry=True)
        other = ball.send("others", "1", message_id="order-1", after="1h", retry=True)
        assert other.seq > receipts[0].seq, "a message of another topic may have the same id"


def test_a_repeated_send_gets_the_current_state_and_sends_again_if_settled(
    node: RunningNode, ball: Timeball
) -> None:
    async def send_async(**options: Any) -> Receipt:
        """Send the same message by an asynchronous client."""
        async with AsyncTimeball(node.http_endpoint) as other:
            return await other.send("anew", "1", message_id="order-1", after="1h", retry=True, **options)

    first = ball.send("anew", "1", message_id="order-1", after="1h", retry=True)
    moved = ball.reschedule("order-1", after="3h")
    existing_receipt = asyncio.run(send_async())
    assert (existing_receipt.outcome, existing_receipt.state, existing_receipt.due_ms) == (
        "exists",
        "waiting",
        moved.due_ms,
    )
    assert asyncio.run(send_async(if_settled="send")) == existing_receipt
    ball.cancel("order-1")
    assert asyncio.run(send_async()).state == "cancelled"
    anew = asyncio.run(send_async(if_settled="send"))
    assert (anew.outcome, anew.state) == ("created", "waiting") and anew.seq > first.seq
    assert ball.get("order-1").seq == anew.seq
    rows = [{"topic": "anew", "body": str(row), "message_id": f"n{row}", "after": "1h"} for row in range(2)]
    ball.send_many(rows, retry=True)
    (existing,) = ball.send_many(rows, retry=True).existing
    assert (existing.first_row, [message.state for message in existing.states]) == (0, ["waiting"] * 2)
    ball.cancel(ids=["n0", "n1"])
    assert ball.send_many(rows, retry=True, if_settled="send").existing == []
    for wrong in ({"if_settled": "send"}, {"if_settled": "never", "retry": True}):
        with pytest.raises(RequestError, match="if_settled="):
            ball.send("anew", "1", **wrong)


def test_a_key_with_a_blank_is_refused_and_a_list_has_several_keys(columns: Timeball) -> None:
    """If a key were split at its blank, a cancel of the key "4" would end messages of "customer 4"."""
    with_key_4 = columns.send("customers", "x", keys="4", after="1h")
    table = pa.table({"body": [b"x"], "keys": ["customer 4"]})
    for send in (
        lambda: columns.send("customers", "x", keys="customer 4", after="1h"),
        lambda: columns.send_many([{"body": "x", "keys": "customer 4"}], topic="customers"),
        lambda: columns.send_many(table, topic="customers"),
        lambda: columns.cancel(key="customer 4"),
        lambda: columns.reschedule(key="customer 4", after="2h"),
    ):
        with pytest.raises(InvalidMessage, match=r"customer 4.*a key has no blanks"):
            send()
    lists = pa.table(
        {"body": [b"x", b"y"], "keys": [["customer", "five"], ["six"]], "delay_ms": [3_600_000] * 2}
    )
    columns.send_many(lists, topic="customers")
    columns.send_many([{"body": "z", "keys": ["seven", "eight"], "after": "1h"}], topic="customers")
    for key in ("five", "six", "eight"):
        assert [verdict.verdict for verdict in columns.cancel(key=key)] == ["cancelled"]
    assert columns.get(with_key_4.id).state == "waiting"
    for wrong in ({"tag": "a\x02b"}, {"message_id": "a\x01"}):
        with pytest.raises(InvalidMessage, match="without control characters"):
            columns.send("customers", "x", **wrong)


def test_an_unknown_name_is_refused_with_the_valid_names(columns: Timeball) -> None:
    with pytest.raises(
        InvalidMessage, match=r"unknown column 'delay_s' of a row; .*valid: after, at, zone, message_id"
    ):
        columns.send_many([{"body": "x"}, {"body": "x", "delay_s": 5}], topic="t")
    for read in (columns.pull, columns.browse):
        with pytest.raises(RequestError, match="start='newest' is not known; valid: earliest, latest"):
            read("t", "g", start="newest")  # type: ignore[arg-type]


def test_an_operation_that_a_stopping_node_refused_goes_to_the_next_node(tmp_path: Path, dial: Dial) -> None:
    with running_node(tmp_path / "a") as first, running_node(tmp_path / "b") as second:
        addresses = f"{first.http_endpoint},{second.http_endpoint.removeprefix('http://')}"
        with dial(addresses) as ball:
            sent = ball.send("there", "x", after="1h")
            first.broker.log.writer._closing = (
                True  # as at the beginning of a hand-over: the log refuses new rows
            )
            try:
                (verdict,) = ball.cancel(ids=[sent.id])
            finally:
                first.broker.log.writer._closing = False
    assert verdict.verdict == "not_found", "the other node has a log of its own, without this message"


def test_a_second_send_with_a_unique_key_is_rejected_keeps_or_replaces_the_first(ball: Timeball) -> None:
    first = ball.send("unique-http", "1", after="1h", unique_key="order-17")
    with pytest.raises(AlreadyPending, match="order-17") as refusal:
        ball.send("unique-http", "2", after="1h", unique_key="order-17", on_pending="reject", retry=True)
    error = refusal.value
    assert (error.id, error.seq, error.due_ms) == (first.id, first.seq, first.due_ms)
    keeping = ball.send("unique-http", "3", after="2h", unique_key="order-17", on_pending="keep")
    assert (keeping.outcome, keeping.id, keeping.seq, keeping.due_ms) == (
        "kept",
        first.id,
        first.seq,
        first.due_ms,
    )
    replacing = ball.send(
        "unique-http", "4", after="2h", unique_key="order-17", on_pending="replace", retry=True
    )
    assert (
        replacing.outcome == "replaced"
        and replacing.replaced is not None
        and replacing.replaced.id == first.id
    )
    assert [ball.get(receipt.id).state for receipt in (first, replacing)] == ["cancelled", "waiting"]
    ball.create_topic("unique-http", on_pending="keep")
    assert ball.send("unique-http", "5", unique_key="order-17").id == replacing.id


def test_a_send_with_a_window_is_due_within_it_and_has_its_expiry(ball: Timeball) -> None:
    receipt = ball.send("options-http", "1", after="1h", window="10m", expires_in="5m", on_expiry="move")
    assert receipt.due_ms is not None
    assert receipt.store_ms + 3_600_000 <= receipt.due_ms <= receipt.store_ms + 4_200_000  # 1 h to 1 h 10 min
    content = ball.get(receipt.id).content
    assert content is not None and content.properties["TIMEBALL_EXPIRES_AFTER_MS"] == "300000"
    level = ball.send(
        "options-http", "2", after="1h", window="10m", spread="level", expires_at="2090-01-01T00:00:00Z"
    )
    assert level.due_ms is not None and level.due_ms - level.store_ms < 4_260_000
    with pytest.raises(InvalidDelay):
        ball.send("options-http", "3", expires_in="5m")
