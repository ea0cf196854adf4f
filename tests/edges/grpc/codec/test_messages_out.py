"""Rows of the log become messages for a gRPC client."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.consuming.retry import SPENT
from timeball.edges.grpc._generated.definition_pb2 import (
    DigestType,
    Encoding,
    Message,
    MessageType,
    Resource,
)
from timeball.edges.grpc.codec import messages_out
from timeball.edges.grpc.codec.messages_out import RESERVED, ReceiptFields, messages, timestamp
from timeball.model import limits
from timeball.model.message import READ_SCHEMA, Kind, build_rows, encode_properties
from timeball.model.time_parsing import LOCAL_TIME

TOPIC_RESOURCE = Resource(name="orders")
NOW_MS = 1_700_000_000_123


def rows(**columns: Any) -> pa.RecordBatch:
    """Return one row as a read returns it, with seq 77 and these columns."""
    given: dict[str, Any] = {
        "kind": int(Kind.MESSAGE),
        "topic": "orders",
        "queue_id": 3,
        "body": b"hello",
        **columns,
    }
    built = build_rows(1, **{n: v if isinstance(v, int) and n == "kind" else [v] for n, v in given.items()})
    return pa.RecordBatch.from_arrays([pa.array([77], pa.int64()), *built.columns], schema=READ_SCHEMA)


def message(receipt: ReceiptFields | None = None, **columns: Any) -> Message:
    """Return the message that a row with these columns becomes."""
    (result,) = messages(rows(**columns), TOPIC_RESOURCE, "orders", "timeball", receipt)
    return result


def test_a_message_has_all_fields_that_clients_read() -> None:
    result = message(
        ReceiptFields(["handle"], 1_500),
        queue_offset=9, tag="red", keys="k1 k2", unique_key="id-1", born_ms=NOW_MS, born_host="10.0.0.1:5",
        store_ms=NOW_MS + 7, store_host="broker-1", reconsume_times=2,
        properties=encode_properties({"colour": "blue", "TAGS": "red", "KEYS": "k1 k2", "UNIQ_KEY": "id-1"}),
    )  # fmt: skip
    system = result.system_properties
    assert (
        result.topic == TOPIC_RESOURCE
        and result.body == b"hello"
        and dict(result.user_properties) == {"colour": "blue"}
    )
    assert (system.tag, list(system.keys), system.message_id) == ("red", ["k1", "k2"], "id-1")
    assert (system.queue_id, system.queue_offset, system.delivery_attempt) == (3, 9, 3)
    assert (system.born_timestamp.ToMilliseconds(), system.born_host) == (NOW_MS, "10.0.0.1:5")
    assert (system.store_timestamp.ToMilliseconds(), system.store_host) == (NOW_MS + 7, "broker-1")
    assert (system.receipt_handle, system.invisible_duration.ToMilliseconds()) == ("handle", 1_500)
    assert system.message_type == MessageType.NORMAL and system.body_encoding == Encoding.IDENTITY
    assert not system.HasField("delivery_timestamp") and not system.HasField("dead_letter_queue")
    assert not system.HasField("message_group") and not system.HasField("trace_context")


def test_missing_values_of_a_row_have_defaults() -> None:
    result = message(body=None)
    system = result.system_properties
    assert result.body == b"" and system.delivery_attempt == 1 and not system.HasField("tag")
    assert int(system.message_id, 16) == 77 and len(system.message_id) == 32
    assert not system.HasField("receipt_handle") and not system.HasField("invisible_duration")
    assert system.store_host == "timeball"


def test_the_digest_is_md5_in_capitals() -> None:
    digest = message().system_properties.body_digest
    assert digest.type == DigestType.MD5
    assert digest.checksum == hashlib.md5(b"hello").hexdigest().upper()


@pytest.mark.parametrize(
    ("columns", "message_type"),
    [
        ({}, MessageType.NORMAL),
        ({"due_ms": NOW_MS}, MessageType.DELAY),
        ({"properties": encode_properties({"__SHARDINGKEY": "g1"})}, MessageType.FIFO),
        ({"sys_flag": 8}, MessageType.TRANSACTION),
        ({"sys_flag": 12}, MessageType.NORMAL),  # rolled back, so no consumer sees it
    ],
)
def test_the_message_type_follows_from_the_row(columns: dict[str, Any], message_type: MessageType) -> None:
    assert message(**columns).system_properties.message_type == message_type


def test_a_delayed_message_has_its_delivery_timestamp() -> None:
    system = message(due_ms=NOW_MS).system_properties
    assert system.delivery_timestamp.ToMilliseconds() == NOW_MS


def test_a_redelivered_message_has_its_original_topic_and_no_timestamp() -> None:
    result = message(topic="%RETRY%g_orders", due_ms=NOW_MS, reconsume_times=1)
    assert result.topic == TOPIC_RESOURCE and not result.system_properties.HasField("delivery_timestamp")
    assert result.system_properties.delivery_attempt == 2


def test_a_dead_letter_has_its_original_topic_and_id() -> None:
    properties = encode_properties({"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "old"})
    (result,) = messages(
        rows(topic="%DLQ%g", properties=properties, unique_key="id-1"), Resource(name="%DLQ%g"), "%DLQ%g", "x"
    )
    assert result.system_properties.dead_letter_queue.topic == "orders"
    assert result.system_properties.dead_letter_queue.message_id == "id-1"


def test_properties_of_rocketmq_become_fields() -> None:
    result = message(
        properties=encode_properties(
            {"__SHARDINGKEY": "g1", "TRACE_CONTEXT": "abc", "TAGS": "t", "KEYS": "a b"}
        )
    )
    system = result.system_properties
    assert (system.message_group, system.trace_context, system.tag, list(system.keys)) == (
        "g1",
        "abc",
        "t",
        ["a", "b"],
    )
    assert result.user_properties == {"__SHARDINGKEY": "g1"}, "also a user property, as in RocketMQ"


def test_the_time_of_a_nack_is_no_user_property() -> None:
    """Otherwise the properties would differ between deliveries, because NACK_TIME changes with each failure."""
    user_properties = {"colour": "red", "NACK_REASON": "no stock"}
    assert (
        message(properties=encode_properties(user_properties | {"NACK_TIME": "5"})).user_properties
        == user_properties
    )


@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"])),
        st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"])),
    )
)
def test_all_other_properties_are_user_properties(properties: dict[str, str]) -> None:
    mixed = {**properties, **dict.fromkeys(sorted(messages_out.RESERVED)[:5], "x")}
    shown = dict(message(properties=encode_properties(mixed)).user_properties)
    hidden = messages_out.RESERVED | {"NACK_TIME", "TIMEBALL_LOCAL_TIME"}
    assert shown == {n: v for n, v in properties.items() if n not in hidden}


# ---- bodies that a producer has compressed -----------------------------------------------------------------

TEXT = b"a line of text\n" * 400
COMPRESSED = {
    "zlib": (1, zlib.compress(TEXT)),
    "zlib, with its type": (1 | 3 << 8, zlib.compress(TEXT)),
    "zstd": (1 | 2 << 8, pa.compress(TEXT, "zstd", asbytes=True)),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_zlib_and_zstd_bodies_are_decompressed(name: str) -> None:
    sys_flag, compressed = COMPRESSED[name]
    result = message(sys_flag=sys_flag, body=compressed)
    assert result.body == TEXT and result.system_properties.body_encoding == Encoding.IDENTITY
    assert result.system_properties.body_digest.checksum == hashlib.md5(TEXT).hexdigest().upper()


def test_lz4_bodies_are_decompressed() -> None:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(TEXT)
    assert message(sys_flag=1 | 1 << 8, body=sink.getvalue().to_pybytes()).body == TEXT


def test_a_gzip_body_is_not_decompressed() -> None:
    compressed = gzip.compress(TEXT)
    result = message(sys_flag=1, body=compressed)
    assert result.body == compressed and result.system_properties.body_encoding == Encoding.GZIP


@pytest.mark.parametrize("compression", [0, 1, 2, 3])
def test_a_body_that_cannot_be_decompressed_is_sent_as_stored(compression: int) -> None:
    result = message(sys_flag=1 | compression << 8, body=b"not packed at all")
    assert result.body == b"not packed at all" and result.system_properties.body_encoding == Encoding.GZIP


@pytest.mark.parametrize("compression", [0, 2])
def test_a_body_that_decompresses_to_too_much_is_sent_as_stored(compression: int) -> None:
    large = bytes(limits.BODY_BYTES_MAX + 1)
    compressed = zlib.compress(large) if compression == 0 else pa.compress(large, "zstd", asbytes=True)
    assert len(compressed) < limits.BODY_BYTES_MAX
    assert message(sys_flag=1 | compression << 8, body=compressed).body == compressed


def test_a_timestamp_keeps_its_milliseconds() -> None:
    assert timestamp(NOW_MS).ToMilliseconds() == NOW_MS


@pytest.mark.parametrize(
    "name", ["TAGS", "KEYS", "UNIQ_KEY", "DELAY", "TIMER_DELIVER_MS", "TRAN_MSG", "PGROUP", "WAIT", "POP_CK"]
)
def test_names_of_rocketmq_s_properties_are_reserved(name: str) -> None:
    assert name in RESERVED


def test_properties_of_delays_are_reserved() -> None:
    assert {LOCAL_TIME} == SPENT - RESERVED, "a sender may set the local time of a delay"


@pytest.mark.parametrize("name", ["", "tags", "order", "REASON", "customer-id"])
def test_other_property_names_are_not_reserved(name: str) -> None:
    assert name not in RESERVED
