"""Browsing: positions and commits, and topics that are created later."""

import threading
import zlib
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball import Timeball
from timeball.client.browser import as_messages
from timeball.client.messages import Message
from timeball.model.errors import NotFound, RequestError
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.model.message import READ_SCHEMA, Kind, build_rows, encode_properties


def send(columns: Timeball, topic: str, count: int) -> list[bytes]:
    """Send messages with the bodies 0 to `count` - 1, and return their bodies."""
    bodies = [b"%d" % i for i in range(count)]
    columns.send_many([{"body": body} for body in bodies], topic=topic)
    return bodies


def browse_all(columns: Timeball, topic: str, group: str, count: int) -> list[Message]:
    """Browse in several calls until there are `count` messages."""
    messages: list[Message] = []
    while len(messages) < count:
        messages += columns.browse(topic, group, max_messages=7)
    return messages


def test_a_new_client_browses_from_the_committed_offsets_on(node: RunningNode, columns: Timeball) -> None:
    bodies = send(columns, "pulled", 50)
    messages = browse_all(columns, "pulled", "g", 50)
    assert sorted(message.body for message in messages) == sorted(bodies)
    with node.client() as before_commit:
        assert len(browse_all(before_commit, "pulled", "g", 50)) == 50
    columns.commit("pulled", "g")
    with node.client() as after_commit:
        assert after_commit.browse("pulled", "g", wait=0) == []
        assert sum(after_commit.offsets("g", "pulled").values()) == 50


def test_browsed_batches_have_each_row_of_each_queue_once_and_in_order(columns: Timeball) -> None:
    send(columns, "columns", 30)
    rows: list[tuple[int, int]] = []  # queue and offset
    while len(rows) < 30:
        batch = columns.browse_batch("columns", "g", max_messages=30)
        rows += zip(
            batch.column("queue_id").to_pylist(), batch.column("queue_offset").to_pylist(), strict=True
        )
    for queue in {queue for queue, _ in rows}:
        offsets = [offset for row_queue, offset in rows if row_queue == queue]
        assert offsets == list(range(len(offsets)))
    assert columns.browse_batch("columns", "g", wait=0).num_rows == 0


def test_a_group_that_starts_at_latest_gets_only_later_messages(columns: Timeball) -> None:
    send(columns, "latest", 5)
    assert columns.browse("latest", "late", wait=0, start="latest") == []
    columns.send("latest", "new")
    assert [message.body for message in columns.browse("latest", "late", wait="10s")] == [b"new"]


def test_a_waiting_browse_returns_the_message_that_becomes_due(columns: Timeball) -> None:
    columns.create_topic("polled", 1)
    receipt = columns.send("polled", "later", after="200ms")
    (message,) = columns.browse("polled", "g", wait="60s")
    assert message.body == b"later" and message.id == receipt.id and message.scheduled_seq == receipt.seq
    assert message.due_ms == receipt.due_ms
    assert message.lateness_ms is not None and message.lateness_ms >= 0  # never early


def test_a_due_time_in_the_past_does_not_count_as_lateness(node: RunningNode, columns: Timeball) -> None:
    past_ms = columns.status()["now_ms"] - DAY_MS
    assert columns.send("overdue", b"x", at=past_ms).past_ms >= DAY_MS
    assert columns.send("other", b"x").past_ms == columns.send("other", b"x", after=0).past_ms == 0
    (message,) = columns.browse("overdue", "g", wait="60s")
    assert message.due_ms == past_ms, "the requested due time"
    assert message.lateness_ms is not None and message.lateness_ms < HOUR_MS
    assert columns.status()["lateness"]["max_ms"] < HOUR_MS


def test_send_many_counts_the_rows_that_were_due_in_the_past(node: RunningNode, columns: Timeball) -> None:
    now_ms = columns.status()["now_ms"]
    rows: list[dict[str, object]] = [{"body": b"x", "at": now_ms - HOUR_MS * hours} for hours in (1, 24)]
    rows += [{"body": b"x"}, {"body": b"x", "after": "0ms"}, {"body": b"x", "at": now_ms + DAY_MS}]
    summary = columns.send_many(rows, topic="overdue-many", retry=True)
    assert summary.past_rows == 2 and DAY_MS <= summary.past_ms < DAY_MS + HOUR_MS
    in_five_batches = columns.send_many(rows, topic="overdue-many", batch_rows=1)
    assert (in_five_batches.past_rows, in_five_batches.past_ms >= DAY_MS) == (2, True)
    summary_of_now = columns.send_many([{"body": b"x"}], topic="overdue-many")
    assert (summary_of_now.past_rows, summary_of_now.past_ms) == (0, 0)
    assert len(columns.browse("overdue-many", "g", wait="60s")) > 0
    assert columns.status()["lateness"]["max_ms"] < HOUR_MS


def test_queues_that_are_added_while_a_client_browses_are_read_too(columns: Timeball) -> None:
    columns.create_topic("grown", 1)
    assert columns.browse("grown", "g", wait=0) == []
    columns.create_topic("grown", 4)
    columns.send_many(pa.table({"body": [b"x"], "queue_id": [3]}), topic="grown")
    # The first read finds no message and looks up the queues. The second one reads the new queue.
    messages = columns.browse("grown", "g") or columns.browse("grown", "g", wait="10s")
    assert [message.queue_id for message in messages] == [3]


def test_a_browse_of_an_unknown_topic_or_of_zero_messages_is_refused(columns: Timeball) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        columns.browse("nowhere", "g", wait=0)
    with pytest.raises(RequestError, match="max_messages"):
        columns.browse("nowhere", "g", max_messages=0)


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_browse_that_waits_for_its_topic_gets_the_first_messages(
    node: RunningNode, columns: Timeball, start: Literal["earliest", "latest"]
) -> None:
    topic = f"not-yet-{start}"
    received: list[Message] = []

    def browse() -> None:
        with node.client() as early:
            while len(received) < 3:
                received.extend(early.browse(topic, "g", wait=f"{BOUND_S}s", start=start))

    waiting = threading.Thread(target=browse)
    waiting.start()
    waiters = node.broker.waiters
    eventually(lambda: topic in waiters._by_topic, "a browse waits for the topic")
    assert topic not in columns.topics()
    bodies = send(columns, topic, 3)
    waiting.join(BOUND_S)
    assert sorted(message.body for message in received) == bodies


def test_a_browse_of_an_unknown_topic_is_refused_if_messages_create_no_topics(tmp_path: Path) -> None:
    with running_node(tmp_path / "d", auto_create_topics=False) as strict, strict.client() as columns:
        with pytest.raises(NotFound, match="auto-create-topics"):
            columns.browse("nowhere", "g", wait="10s")
        assert columns.topics() == {}
        columns.create_topic("somewhere")
        assert columns.browse("somewhere", "g", wait="50ms") == []


# ---- rows as messages --------------------------------------------------------------------------------------


def two_rows() -> pa.RecordBatch:
    """The release of a scheduled message with all fields, and a message with the required fields only."""
    log = build_rows(
        2,
        kind=[Kind.RELEASE, Kind.MESSAGE],
        topic="orders",
        queue_id=[3, 4],
        queue_offset=[7, 0],
        tag=["a", None],
        keys=["k1 k2", None],
        unique_key=["id1", None],
        body=[b"x", None],
        properties=[encode_properties({"p": "q"}), None],
        born_ms=[1, None],
        store_ms=[1_010, 5],
        due_ms=[1_000, None],
        source_seq=[2, None],
        reconsume_times=[1, None],
    )
    return pa.RecordBatch.from_arrays([pa.array([9, 10]), *log.columns], schema=READ_SCHEMA)


def test_a_browsed_message_has_the_fields_of_its_row() -> None:
    message = as_messages(two_rows(), received_ms=2_000)[0]
    assert (message.topic, message.body, message.tag, message.id) == ("orders", b"x", "a", "id1")
    assert message.keys == ["k1", "k2"] and message.properties == {"p": "q"}
    assert (message.seq, message.scheduled_seq) == (9, 2)
    assert (message.queue_id, message.queue_offset) == (3, 7)
    assert (message.born_ms, message.store_ms, message.due_ms) == (1, 1_010, 1_000)
    assert message.received_ms == 2_000
    assert message.lateness_ms == 10 and message.attempts == 1
    assert "orders" in repr(message) and "id1" in repr(message)


def test_the_lateness_of_a_message_due_before_its_acceptance_counts_from_the_acceptance() -> None:
    # The first row is due at 1,000 ms and visible at 1,010 ms.
    for accepted_ms, late_ms in ((500, 10), (1_004, 6), (1_010, 0), (2_000, 0)):
        column = READ_SCHEMA.get_field_index("accepted_ms")
        batch = two_rows().set_column(
            column, READ_SCHEMA.field(column), pa.array([accepted_ms, None], pa.int64())
        )
        assert as_messages(batch, received_ms=2_000)[0].lateness_ms == late_ms


def test_a_body_that_the_producer_compressed_is_decompressed() -> None:
    """Bit 0 of `sys_flag` marks a compressed body."""
    batch = two_rows()
    for name, values in (
        ("body", pa.array([zlib.compress(b"x")] * 2)),
        ("sys_flag", pa.array([1, 0], pa.int32())),
    ):
        column = READ_SCHEMA.get_field_index(name)
        batch = batch.set_column(column, READ_SCHEMA.field(column), values)
    assert [message.body for message in as_messages(batch, received_ms=2_000)] == [b"x", zlib.compress(b"x")]


def test_fields_that_a_browsed_message_does_not_have_are_none_or_empty() -> None:
    message = as_messages(two_rows(), received_ms=2_000)[1]
    assert message.body == b"" and message.keys == [] and message.properties == {}
    assert message.tag is message.id is message.due_ms is message.lateness_ms is message.scheduled_seq is None
    assert message.attempts == 0
