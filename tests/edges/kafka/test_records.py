"""Records become messages and records again without a change. Records that cannot be accepted state the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.kafka import records
from timeball.edges.kafka.records import (
    BridgeMessage,
    Headers,
    Record,
    RecordLocation,
    TopicRules,
    message_of,
)
from timeball.model import limits

NOW_MS = 1_795_000_000_000
TOPICS = ("in", "out", "elsewhere", "in.dead", "positions", "timeball.other.position", "__consumer_offsets")
RULES = TopicRules("in", "out", "in.dead", "positions", TOPICS.__contains__)


def record(
    headers: Headers, key: bytes | None = b"k", value: bytes | None = b"v", partition: int = 3
) -> Record:
    """Return a record of the topic `in` with offset 17."""
    return Record("in", partition, 17, key, value, headers, NOW_MS - 1_000)


def convert(headers: Headers, **more: bytes | None) -> BridgeMessage:
    """Return the message that a record with these headers becomes."""
    return message_of(record(headers, **more), RULES, NOW_MS)  # type: ignore[arg-type]


def reason(message: BridgeMessage) -> str:
    """Assert that a message is the dead letter of `record`, and return its reason."""
    envelope = records.envelope_of(message.properties)
    assert message.is_dead and message.due_ms is None and envelope is not None and envelope.topic == "in.dead"
    headers = dict(envelope.headers)
    assert [headers[name] for name in records.REASONS[1:]] == [b"in", b"3", b"17"]
    return (headers["timeball-reason"] or b"").decode()


@pytest.mark.parametrize(
    ("name", "text", "due_ms"),
    [
        ("at", b"1795000600000", NOW_MS + 600_000),
        ("at", b"2030-01-31T09:00:00+01:00", 1_896_076_800_000),
        ("after", b"30m", NOW_MS - 1_000 + 1_800_000),
        ("after", b"PT1.5S", NOW_MS + 500),
    ],
)
def test_a_header_sets_the_due_time(name: str, text: bytes, due_ms: int) -> None:
    message = convert([(name, text)])
    assert (message.due_ms, message.body, message.keys, message.id) == (due_ms, b"v", "in/k", "in-3-17")


@given(
    key=st.none() | st.binary(max_size=300),
    value=st.none() | st.binary(max_size=300),
    headers=st.lists(
        st.tuples(st.text(max_size=20).filter(lambda name: name not in (
            records.AT, records.AFTER, *records.RENAMED_HEADERS, records.TO, records.CANCEL,
        ) and not name.lower().startswith(records.RESERVED_PREFIXES)), st.none() | st.binary(max_size=50)),
        max_size=5,
    ),
    partition=st.integers(0, 1_000),
)  # fmt: skip
def test_a_message_contains_key_value_headers_and_partition_of_its_record(
    key: bytes | None, value: bytes | None, headers: Headers, partition: int
) -> None:
    given_headers = [*headers, ("after", b"1s")]
    message = message_of(record(given_headers, key, value, partition), RULES, NOW_MS)
    envelope = records.envelope_of(message.properties)
    assert envelope is not None and not message.is_dead
    assert (envelope.topic, envelope.partition, envelope.key) == ("out", partition, key)
    assert [tuple(pair) for pair in envelope.headers] == given_headers
    assert (None if envelope.is_null else message.body) == value


def test_the_headers_of_a_dead_letter_are_accepted_again() -> None:
    dead = records.reason_headers(RecordLocation("in", 3, 17), "no reason")
    assert not convert([("after", b"1s"), *dead, ("delivered-by", b"van"), ("x-timeball", b"1")]).is_dead


def test_the_header_deliver_to_sets_the_topic() -> None:
    envelope = records.envelope_of(convert([("after", b"1s"), ("deliver-to", b"elsewhere")]).properties)
    assert envelope is not None and envelope.topic == "elsewhere"


@pytest.mark.parametrize(
    ("headers", "expected_text"),
    [
        ([], "exactly one header at or after is required; there are 0"),
        ([("after", b"1s"), ("at", b"1795000600000")], "there are 2"),
        ([("after", b"soon")], "header after: 'soon': numbers with units"),
        ([("after", b"17")], "header after"),
        ([("at", b"1800000000")], "header at: at=1800000000: milliseconds since 1970 are meant"),
        ([("delay", b"1s")], "header delay is called after"),
        ([("deliver-at", b"2030-01-31T09:00:00Z")], "header deliver-at is called at"),
        ([("after", b"1s"), ("deliver-at", b"2030-01-31T09:00:00Z")], "header deliver-at is called at"),
        (
            [("after", b"1s"), ("deliver-too", b"elsewhere")],
            "header 'deliver-too' is not known; valid are at, after, deliver-to and cancel",
        ),
        ([("at", b"1795000600000"), ("Deliver-To", b"elsewhere")], "header 'Deliver-To' is not known"),
        ([("deliver-att", b"1795000600000")], "header 'deliver-att' is not known"),
        ([("after", b"1s"), ("timeball-key", b"k")], "header 'timeball-key' is not known"),
        ([("after", None)], "header after"),
        ([("after", b"\xff")], "header after"),
        ([("at", b"2030-01-31T09:00:00")], "without a time zone"),
        ([("at", b"1795000600")], "looks like seconds"),
        ([("after", b"9999d")], "more than 3653 days ahead"),
        ([("at", b"9999-12-31T00:00:00Z")], "more than 3653 days ahead"),
        ([("after", b"1s"), ("deliver-to", b"nowhere")], "Kafka has no topic 'nowhere'"),
        ([("after", b"1s"), ("deliver-to", b"in")], "the topic it came from"),
        ([("after", b"1s"), ("deliver-to", b"positions")], "a topic for positions"),
        ([("after", b"1s"), ("deliver-to", b"timeball.other.position")], "a topic for positions"),
        ([("after", b"1s"), ("deliver-to", b"__consumer_offsets")], "or of Kafka itself"),
        ([("after", b"1s"), ("h", b"x" * limits.PROPERTIES_BYTES_MAX)], "key and headers take"),
    ],
)
def test_an_unacceptable_record_becomes_a_dead_letter_with_the_reason(
    headers: Headers, expected_text: str
) -> None:
    message = convert(headers)
    assert expected_text in reason(message) and message.body == b"v"


def test_without_out_a_record_without_deliver_to_is_refused() -> None:
    rules = RULES._replace(out=None)
    assert "no --out" in reason(message_of(record([("after", b"1s")]), rules, NOW_MS))


def test_a_too_large_value_is_left_out_of_the_dead_letter() -> None:
    message = convert([("after", b"1s")], value=b"x" * (limits.BODY_BYTES_MAX + 1))
    assert message.body == b""
    assert "4194305 bytes" in reason(message)
    assert records.VALUE_LEFT_OUT in reason(message)


def test_too_large_headers_are_left_out_of_the_dead_letter() -> None:
    message = convert([("after", b"1s"), ("h", b"x" * limits.PROPERTIES_BYTES_MAX)])
    assert "key and headers are left" in reason(message)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (b"order-17", "in/order-17"),
        ("köln".encode(), "in/köln"),
        (b"a b", None),
        (b"\xff\x00", None),
        (b"", None),
        (b"\x01", None),
        ("a\u00a0b".encode(), None),
        (b"x" * 201, None),
    ],
)
def test_a_kafka_key_is_used_as_it_is_or_as_its_hash(key: bytes, name: str | None) -> None:
    result = records.timeball_key("in", key)
    assert result == name if name else result.startswith("in/sha256:") and len(result) == 74


@pytest.mark.parametrize(
    "properties",
    [
        pytest.param(None, id="no properties"),
        pytest.param("a\x01b\x02", id="another property"),
        pytest.param("kafka\x01no base64!\x02", id="no base64"),
        pytest.param("kafka\x01aGFsbG8=\x02", id="no envelope in base64"),
    ],
)
def test_properties_without_a_valid_envelope_have_none(properties: str | None) -> None:
    assert records.envelope_of(properties) is None


def test_an_id_contains_the_location_of_its_record() -> None:
    assert RecordLocation.of(RecordLocation("a-b.c", 3, 17).id) == ("a-b.c", 3, 17)
    with pytest.raises(ValueError):
        RecordLocation.of("17")
