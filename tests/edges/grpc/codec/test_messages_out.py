"""Rows of the log as a gRPC client gets them."""

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
from timeball.edges.grpc.codec.messages_out import RESERVED, HandedOut, messages, timestamp
from timeball.model import limits
from timeball.model.message import READ_SCHEMA, Kind, build_rows, encode_properties

ASKED = Resource(name="orders")
NOW_MS = 1_700_000_000_123


def rows(**columns: Any) -> pa.RecordBatch:
    given: dict[str, Any] = {
        "kind": int(Kind.MESSAGE),
        "topic": "orders",
        "queue_id": 3,
        "body": b"hello",
        **columns,
    }
    built = build_rows(1, **{n: v if isinstance(v, int) and n == "kind" else [v] for n, v in given.items()})
    return pa.RecordBatch.from_arrays([pa.array([77], pa.int64()), *built.columns], schema=READ_SCHEMA)


def message(handed_out: HandedOut | None = None, **columns: Any) -> Message:
    (found,) = messages(rows(**columns), ASKED, "orders", "timeball", handed_out)
    return found


def test_everything_a_client_looks_at() -> None:
    found = message(
        HandedOut(["handle"], 1_500),
        queue_offset=9, tag="red", keys="k1 k2", unique_key="id-1", born_ms=NOW_MS, born_host="10.0.0.1:5",
        store_ms=NOW_MS + 7, store_host="broker-1", reconsume_times=2,
        properties=encode_properties({"colour": "blue", "TAGS": "red", "KEYS": "k1 k2", "UNIQ_KEY": "id-1"}),
    )  # fmt: skip
    system = found.system_properties
    assert (
        found.topic == ASKED and found.body == b"hello" and dict(found.user_properties) == {"colour": "blue"}
    )
    assert (system.tag, list(system.keys), system.message_id) == ("red", ["k1", "k2"], "id-1")
    assert (system.queue_id, system.queue_offset, system.delivery_attempt) == (3, 9, 3)
    assert (system.born_timestamp.ToMilliseconds(), system.born_host) == (NOW_MS, "10.0.0.1:5")
    assert (system.store_timestamp.ToMilliseconds(), system.store_host) == (NOW_MS + 7, "broker-1")
    assert (system.receipt_handle, system.invisible_duration.ToMilliseconds()) == ("handle", 1_500)
    assert system.message_type == MessageType.NORMAL and system.body_encoding == Encoding.IDENTITY
    assert not system.HasField("delivery_timestamp") and not system.HasField("dead_letter_queue")
    assert not system.HasField("message_group") and not system.HasField("trace_context")


def test_a_row_that_has_next_to_nothing() -> None:
    found = message(body=None)
    system = found.system_properties
    assert found.body == b"" and system.delivery_attempt == 1 and not system.HasField("tag")
    assert int(system.message_id, 16) == 77 and len(system.message_id) == 32
    assert not system.HasField("receipt_handle") and not system.HasField("invisible_duration")
    assert system.store_host == "timeball"


def test_the_digest_is_the_one_that_all_clients_spell_alike() -> None:
    digest = message().system_properties.body_digest
    assert digest.type == DigestType.MD5
    assert digest.checksum == hashlib.md5(b"hello").hexdigest().upper()


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({}, MessageType.NORMAL),
        ({"due_ms": NOW_MS}, MessageType.DELAY),
        ({"properties": encode_properties({"__SHARDINGKEY": "g1"})}, MessageType.FIFO),
        ({"sys_flag": 8}, MessageType.TRANSACTION),
        ({"sys_flag": 12}, MessageType.NORMAL),  # rolled back: nobody sees it
    ],
)
def test_the_type_is_told_by_what_became_of_it(columns: dict[str, Any], kind: MessageType) -> None:
    assert message(**columns).system_properties.message_type == kind


def test_a_delayed_message_shows_its_instant() -> None:
    system = message(due_ms=NOW_MS).system_properties
    assert system.delivery_timestamp.ToMilliseconds() == NOW_MS


def test_a_message_that_comes_again_shows_the_topic_it_was_sent_to_and_no_instant() -> None:
    found = message(topic="%RETRY%g_orders", due_ms=NOW_MS, reconsume_times=1)
    assert found.topic == ASKED and not found.system_properties.HasField("delivery_timestamp")
    assert found.system_properties.delivery_attempt == 2


def test_a_dead_letter_says_where_it_was() -> None:
    properties = encode_properties({"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "old"})
    (found,) = messages(
        rows(topic="%DLQ%g", properties=properties, unique_key="id-1"), Resource(name="%DLQ%g"), "%DLQ%g", "x"
    )
    assert found.system_properties.dead_letter_queue.topic == "orders"
    assert found.system_properties.dead_letter_queue.message_id == "id-1"


def test_group_and_trace_have_fields_of_their_own() -> None:
    found = message(
        properties=encode_properties(
            {"__SHARDINGKEY": "g1", "TRACE_CONTEXT": "abc", "TAGS": "t", "KEYS": "a b"}
        )
    )
    system = found.system_properties
    assert (system.message_group, system.trace_context, system.tag, list(system.keys)) == (
        "g1",
        "abc",
        "t",
        ["a", "b"],
    )
    assert found.user_properties == {"__SHARDINGKEY": "g1"}, "RocketMQ shows it here too"


def test_when_it_was_given_back_is_the_brokers_own() -> None:
    """Else each delivery behind a failure would have other properties than the one before."""
    kept = {"colour": "red", "NACK_REASON": "no stock"}
    assert message(properties=encode_properties(kept | {"NACK_TIME": "5"})).user_properties == kept


@given(
    st.dictionaries(
        st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"])),
        st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"])),
    )
)
def test_any_properties_that_are_not_rocketmqs_are_shown_as_they_are(properties: dict[str, str]) -> None:
    mixed = {**properties, **dict.fromkeys(sorted(messages_out.RESERVED)[:5], "x")}
    shown = dict(message(properties=encode_properties(mixed)).user_properties)
    hidden = messages_out.RESERVED | {"NACK_TIME"}
    assert shown == {n: v for n, v in properties.items() if n not in hidden}


# ---- bodies that a producer has compressed -----------------------------------------------------------------

TEXT = b"a line of text\n" * 400
PACKED = {
    "zlib": (1, zlib.compress(TEXT)),
    "zlib, said so": (1 | 3 << 8, zlib.compress(TEXT)),
    "zstd": (1 | 2 << 8, pa.compress(TEXT, "zstd", asbytes=True)),
}


@pytest.mark.parametrize("name", PACKED)
def test_what_only_some_clients_can_read_is_unpacked(name: str) -> None:
    sys_flag, packed = PACKED[name]
    found = message(sys_flag=sys_flag, body=packed)
    assert found.body == TEXT and found.system_properties.body_encoding == Encoding.IDENTITY
    assert found.system_properties.body_digest.checksum == hashlib.md5(TEXT).hexdigest().upper()


def test_lz4_frames_are_unpacked() -> None:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(TEXT)
    assert message(sys_flag=1 | 1 << 8, body=sink.getvalue().to_pybytes()).body == TEXT


def test_gzip_stays_as_it_is() -> None:
    packed = gzip.compress(TEXT)
    found = message(sys_flag=1, body=packed)
    assert found.body == packed and found.system_properties.body_encoding == Encoding.GZIP


@pytest.mark.parametrize("compression", [0, 1, 2, 3])
def test_what_cannot_be_unpacked_is_sent_as_it_came(compression: int) -> None:
    found = message(sys_flag=1 | compression << 8, body=b"not packed at all")
    assert found.body == b"not packed at all" and found.system_properties.body_encoding == Encoding.GZIP


@pytest.mark.parametrize("compression", [0, 2])
def test_a_body_does_not_grow_without_end(compression: int) -> None:
    large = bytes(messages_out.UNPACKED_BYTES_MAX + 1)
    packed = zlib.compress(large) if compression == 0 else pa.compress(large, "zstd", asbytes=True)
    assert len(packed) < limits.BODY_BYTES_MAX
    assert message(sys_flag=1 | compression << 8, body=packed).body == packed


def test_instants_have_milliseconds() -> None:
    assert timestamp(NOW_MS).ToMilliseconds() == NOW_MS


@pytest.mark.parametrize(
    "name", ["TAGS", "KEYS", "UNIQ_KEY", "DELAY", "TIMER_DELIVER_MS", "TRAN_MSG", "PGROUP", "WAIT", "POP_CK"]
)
def test_what_rocketmq_keeps_for_itself_is_reserved(name: str) -> None:
    assert name in RESERVED


def test_whatever_has_delayed_a_message_is_reserved() -> None:
    assert SPENT <= RESERVED


@pytest.mark.parametrize("name", ["", "tags", "order", "REASON", "customer-id"])
def test_other_names_are_the_users(name: str) -> None:
    assert name not in RESERVED
