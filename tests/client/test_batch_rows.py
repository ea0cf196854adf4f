"""A browsed message is a view of its row."""

import zlib

import pyarrow as pa

from timeball.client.batch_rows import view
from timeball.model.message import READ_SCHEMA, Kind, build_rows, encode_properties


def rows() -> pa.RecordBatch:
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


def test_all_that_a_delayed_message_says() -> None:
    message = view(rows(), received_ms=2_000)[0]
    assert (message.topic, message.body, message.tag, message.id) == ("orders", b"x", "a", "id1")
    assert message.keys == ["k1", "k2"] and message.properties == {"p": "q"}
    assert (message.seq, message.scheduled_seq) == (9, 2)
    assert (message.queue_id, message.queue_offset) == (3, 7)
    assert (message.born_ms, message.store_ms, message.due_ms, message.received_ms) == (
        1,
        1_010,
        1_000,
        2_000,
    )
    assert message.lateness_ms == 10 and message.attempts == 1
    assert "orders" in repr(message) and "id1" in repr(message)


def test_a_message_due_before_its_acceptance_is_late_from_there() -> None:
    for accepted_ms, late_ms in ((500, 10), (1_004, 6), (1_010, 0), (2_000, 0)):
        at = READ_SCHEMA.get_field_index("accepted_ms")
        batch = rows().set_column(at, READ_SCHEMA.field(at), pa.array([accepted_ms, None], pa.int64()))
        assert view(batch, received_ms=2_000)[0].lateness_ms == late_ms


def test_a_body_that_the_producer_compressed_is_readable() -> None:
    batch = rows()
    for name, values in (
        ("body", pa.array([zlib.compress(b"x")] * 2)),
        ("sys_flag", pa.array([1, 0], pa.int32())),
    ):
        at = READ_SCHEMA.get_field_index(name)
        batch = batch.set_column(at, READ_SCHEMA.field(at), values)
    assert [message.body for message in view(batch, received_ms=2_000)] == [b"x", zlib.compress(b"x")]


def test_missing_things_are_none_or_empty() -> None:
    message = view(rows(), received_ms=2_000)[1]
    assert message.body == b"" and message.keys == [] and message.properties == {}
    assert message.tag is message.id is message.due_ms is message.lateness_ms is message.scheduled_seq is None
    assert message.attempts == 0
