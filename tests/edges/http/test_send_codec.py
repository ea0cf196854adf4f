"""Decoding the messages of a send, without a node: JSON, raw bodies, and Arrow streams."""

from __future__ import annotations

import io

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.accepting import admission
from timeball.edges.http import codec, send_codec
from timeball.edges.http.codec import JSON, NDJSON
from timeball.edges.http.send_codec import ARROW, DecodedSend
from timeball.edges.shared.error_codes import Refused
from timeball.model import http_api, limits
from timeball.model.errors import InvalidDelay, InvalidMessage, TimeballError
from timeball.model.values import decode_properties

NOW_MS = 1_800_000_000_000


class Ids(send_codec.IdSource):
    """Ids that name the index of their message."""

    def id_of(self, index: int) -> str:
        return f"id-{index}"


def decode(data: bytes, kind: str = JSON, now_ms: int | None = None) -> DecodedSend:
    """Decode the body of a send to the topic `t`."""
    return send_codec.decode_messages("t", kind, data, Ids(), now_ms)


def rows_of(sending: DecodedSend) -> list[dict[str, object]]:
    """Return the rows of a send by column."""
    rows: list[dict[str, object]] = admission.as_columns(sending.rows).to_pylist()
    return rows


@given(st.binary(max_size=200), st.sampled_from([JSON, NDJSON]))
def test_any_bytes_decode_to_messages_or_raise_a_timeball_error(data: bytes, kind: str) -> None:
    try:
        assert decode(data, kind).row_count
    except TimeballError as error:
        assert str(error)


# ---- the number of messages --------------------------------------------------------------------------------------


def join_messages(messages: list[bytes], kind: str) -> bytes:
    """Return the body of a send with several encoded messages."""
    return b"[" + b",".join(messages) + b"]" if kind == JSON else b"\n".join(messages)


@pytest.mark.parametrize("kind", [JSON, NDJSON])
def test_messages_beyond_the_limit_are_not_decoded(kind: str) -> None:
    # The messages have an unknown field, so decoding would raise another error than the count.
    invalid = b'{"no field": 1}'
    with pytest.raises(Refused, match="more than 10000 messages") as refused:
        decode(join_messages([invalid] * (send_codec.MESSAGES_MAX + 1), kind), kind)
    assert refused.value.protocol_code == 413
    with pytest.raises(InvalidMessage, match="no field"):
        decode(join_messages([invalid] * send_codec.MESSAGES_MAX, kind), kind)


def test_several_messages_in_a_line_and_empty_lines_are_counted_as_messages_alone() -> None:
    too_many = send_codec.MESSAGES_MAX + 1
    with pytest.raises(Refused, match="more than 10000 messages"):
        decode(b'{"no field": 1} ' * too_many, NDJSON)
    assert decode(b'{"body": "x"}' + b"\n" * too_many + b'{"body": "y"}', NDJSON).row_count == 2


@pytest.mark.parametrize("kind", [JSON, NDJSON])
def test_braces_within_messages_are_not_counted(kind: str) -> None:
    many = send_codec.MESSAGES_MAX + 1
    text, value = b'{"body": "%b"}' % (b"{" * many), b'{"json": [%b]}' % b",".join([b"{}"] * many)
    assert decode(join_messages([text, value], kind), kind).row_count == 2


@given(
    st.fixed_dictionaries(
        {"body": st.text()},
        optional={
            "key": st.text(), "tag": st.text(), "after": st.integers() | st.text(), "id": st.text(),
            "at": st.integers() | st.text(), "zone": st.text(), "properties": st.dictionaries(st.text(), st.text()),
        },
    )
)  # fmt: skip
def test_any_message_becomes_a_row_or_raises_a_timeball_error(message: dict[str, object]) -> None:
    try:
        data = codec.encode(message)
    except UnicodeEncodeError:
        return  # a lone surrogate cannot be encoded as JSON
    except OverflowError:
        return  # an integer of more than 64 bits
    try:
        (row,) = rows_of(decode(data))
        (few,) = rows_of(decode(data, now_ms=NOW_MS))
    except TimeballError as error:
        assert str(error)
    else:
        assert row["body"] == str(message["body"]).encode()
        delay_ms = row.pop("delay_ms", None)
        if delay_ms is not None:
            assert few["due_ms"] == NOW_MS + delay_ms
            row["due_ms"] = few["due_ms"]
        assert {name: few.get(name) for name in row} == row


def test_a_single_message_is_recognized_and_a_json_body_keeps_its_text() -> None:
    assert decode(b' {"body": ""}').is_single
    assert not decode(b' [{"body": ""}]').is_single
    (row,) = rows_of(decode(b'{"json": {"a":  1.50}}'))
    assert row["body"] == b'{"a":  1.50}'
    (row,) = rows_of(decode(b'{"json": null}'))
    assert row["body"] == b"null"


def test_a_local_time_becomes_a_due_time_and_a_property() -> None:
    local = b'{"body": "x", "at": "2030-01-31T09:00", "zone": "Europe/Berlin", "properties": {"a": "b"}}'
    stored = "a\x01b\x02TIMEBALL_LOCAL_TIME\x012030-01-31T09:00:00 Europe/Berlin\x02"
    for sending in (decode(local), decode(local, now_ms=NOW_MS)):
        (row,) = rows_of(sending)
        assert (row["due_ms"], row["properties"]) == (1_896_076_800_000, stored)
    headers = {"timeball-at": "2030-01-31T09:00", "timeball-zone": "Europe/Berlin"}
    (row,) = rows_of(send_codec.decode_raw("t", headers, b"x", Ids()))
    assert row["due_ms"] == 1_896_076_800_000


@pytest.mark.parametrize(
    ("message", "kind", "named"),
    [
        ({"zone": "UTC"}, InvalidDelay, "needs at"),
        ({"zone": "UTC", "at": 1_896_076_800_000}, InvalidDelay, "needs at"),
        ({"zone": "UTC", "after": "1h"}, InvalidDelay, "needs at"),
        ({"zone": "UTC", "at": "2030-01-31T09:00", "after": "1h"}, InvalidDelay, "needs at"),
        ({"zone": "UTC", "at": "2030-01-31T09:00Z"}, InvalidDelay, "without an offset"),
        ({"zone": "UTC", "at": "2030-01-31"}, InvalidDelay, "write a local time"),
        ({"zone": "CEST", "at": "2030-01-31T09:00"}, InvalidDelay, "no time zone"),
        ({"zone": "Asia/Tokyo", "at": "1970-01-01T08:59"}, InvalidDelay, "between 1970 and 9999"),
        ({"at": "2030-01-31T09:00"}, InvalidDelay, "time zone"),
        ({"properties": {"TIMEBALL_LOCAL_TIME": "x"}}, InvalidMessage, "give at and zone"),
    ],
)
def test_a_local_time_that_is_incomplete_is_refused(
    message: dict[str, object], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        decode(codec.encode({"body": "x", **message}))


def test_small_sends_become_rows_and_large_sends_columns() -> None:
    few = decode(b'[{"body": "a", "after": "5ms"}, {"body": "b"}]', now_ms=NOW_MS)
    assert isinstance(few.rows, list)
    assert [row["due_ms"] for row in rows_of(few)] == [NOW_MS + 5, None]
    many = decode(
        b'{"body": "a", "after": "5ms"}\n' * (send_codec.SMALL_BATCH_ROWS + 1), NDJSON, now_ms=NOW_MS
    )
    assert isinstance(many.rows, pa.RecordBatch)
    sent = send_codec.build_answer(many, 7, NOW_MS, durable=True)
    assert isinstance(sent, http_api.SentMany)
    assert {(item.seq, item.due_ms) for item in sent.messages} == {
        (7 + at, NOW_MS + 5) for at in range(send_codec.SMALL_BATCH_ROWS + 1)
    }


def encode_stream(*batches: pa.RecordBatch) -> bytes:
    """Return batches as an Arrow stream."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


ROWS = pa.RecordBatch.from_pydict({"body": [b"a", b"b"], "delay_ms": pa.array([0, 5], pa.int32())})


def test_the_batches_of_an_arrow_stream_are_joined() -> None:
    sending = decode(encode_stream(ROWS, ROWS), ARROW)
    rows = rows_of(sending)
    assert [(row["topic"], row["body"], row["delay_ms"]) for row in rows] == [
        ("t", b"a", 0), ("t", b"b", 5), ("t", b"a", 0), ("t", b"b", 5),
    ]  # fmt: skip
    assert send_codec.build_answer(sending, 9, NOW_MS, durable=False) == send_codec.SentRows(9, 4, False)


@pytest.mark.parametrize("name", ["delay_ms", "due_ms"])
def test_a_null_in_a_column_of_times_is_refused(name: str) -> None:
    times = pa.array([1_800_000_000_000, None], pa.int64())
    rows = pa.RecordBatch.from_arrays([pa.array([b"a", b"b"]), times], names=["body", name])
    with pytest.raises(InvalidDelay, match=f"{name} of row 1 is null; leave the column out"):
        decode(encode_stream(rows), ARROW)


def test_a_topic_column_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="the path names the topic"):
        decode(encode_stream(pa.RecordBatch.from_pydict({"body": [b"a"], "topic": ["u"]})), ARROW)


def test_rows_without_bytes_are_limited_by_their_number() -> None:
    nothing = pa.RecordBatch.from_arrays([pa.nulls(limits.ROWS_PER_REQUEST_MAX + 1)], names=["body"])
    with pytest.raises(Refused, match="rows in one batch"):
        decode(encode_stream(nothing), ARROW)
    empty = pa.record_batch({"body": [b""] * (limits.ROWS_PER_REQUEST_MAX // 2 + 1)})
    with pytest.raises(Refused, match="rows in one request"):
        decode(encode_stream(empty, empty), ARROW)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_arrow_stream_or_raise_a_timeball_error(data: bytes) -> None:
    with pytest.raises(TimeballError):
        decode(data, ARROW)


@given(st.integers(0, len(encode_stream(ROWS)) - 9), st.integers(0, 255))
def test_an_arrow_stream_with_a_changed_byte_decodes_or_raises_a_timeball_error(at: int, byte: int) -> None:
    complete = bytearray(encode_stream(ROWS))
    complete[at] = byte
    try:
        assert decode(bytes(complete), ARROW).row_count <= 2
    except TimeballError as error:
        assert str(error)


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "TEXT/plain; x=y", "application/x-www-form-urlencoded", JSON, NDJSON]
)
def test_a_body_of_a_type_without_preflight_is_only_raw_with_a_header(kind: str) -> None:
    assert not send_codec.is_raw({"content-type": kind})
    assert send_codec.is_raw({"content-type": kind, "timeball-raw": "true"})


@pytest.mark.parametrize(
    "kind", ["text/plain, image/png", "image", "image /png", "/", "multipart/form-data; boundary=a/b"]
)
def test_a_body_with_an_invalid_type_is_not_raw(kind: str) -> None:
    assert not send_codec.is_raw({"content-type": kind})
    assert send_codec.is_raw({"content-type": "image/png"})


EVENT = {"ce-specversion": "1.0", "ce-id": "e-1", "ce-source": "/shop", "ce-type": "paid"}


def test_a_cloud_event_has_the_properties_of_its_headers() -> None:
    headers = {**EVENT, "timeball-property-region": "eu%20west"}
    (row,) = rows_of(send_codec.decode_cloud_event("t", headers, b"{}", Ids()))
    assert decode_properties(str(row["properties"])) == {**EVENT, "region": "eu west"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("timeball-id", "the id of a CloudEvent is its ce-id"),
     ("timeball-property-ce-source", "also the attribute 'ce-source' of the CloudEvent")],
)  # fmt: skip
def test_a_cloud_event_with_a_second_value_of_an_attribute_is_refused(name: str, reason: str) -> None:
    with pytest.raises(InvalidMessage, match=reason):
        send_codec.decode_cloud_event("t", {**EVENT, name: "x"}, b"{}", Ids())


@given(st.dictionaries(st.sampled_from(["id", "key", "tag", "after", "at", "property-a"]), st.text()))
def test_any_headers_are_a_message_or_raise_a_timeball_error(values: dict[str, str]) -> None:
    headers = {f"timeball-{name}": value for name, value in values.items()}
    try:
        (row,) = rows_of(send_codec.decode_raw("t", headers, b"\0", Ids()))
    except TimeballError as error:
        assert str(error)
    else:
        assert row["body"] == b"\0"
