"""Durations, leases, times and media types, without a node."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest
from msgspec import UNSET

from timeball.edges.http import codec, send_codec
from timeball.edges.http.codec import JSON, NDJSON
from timeball.edges.shared.error_codes import Refused
from timeball.log.row_encoder import NumberedRows
from timeball.model import http_api
from timeball.model.errors import InvalidDelay, InvalidMessage, OutOfRange
from timeball.model.message import READ_SCHEMA


def test_only_known_media_types_are_accepted() -> None:
    assert codec.check_content_type("Application/JSON; charset=UTF-8", JSON, NDJSON) == JSON
    for wrong in ("", "text/json", "application/json; charset=utf-16", "application/json;"):
        with pytest.raises(Refused):
            codec.check_content_type(wrong, JSON)


def test_a_lease_is_parsed_within_its_limits() -> None:
    assert codec.parse_lease("1m30s") == codec.parse_lease("PT1M30S") == 90_000
    for wrong in ("x", "90000", "٣", "9" * 5_000):
        with pytest.raises(InvalidDelay, match="lease="):
            codec.parse_lease(wrong)
    with pytest.raises(OutOfRange, match="lease=13h"):
        codec.parse_lease("13h")


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidMessage):
        codec.decode(codec.Moving, b"[]")


@pytest.mark.parametrize(
    ("body", "expected_text"),
    [
        (b'{"after": 5}', "after is a text with its unit, such as '5s' or '30m'"),
        (b'{"after": 2.5}', "after is a text with its unit"),
        (b'{"after": null}', "such as '5s' or '30m'; leave it out to deliver at once"),
        (b'{"at": null}', "milliseconds since 1970; leave it out to deliver at once"),
        (b'{"at": 1.5}', "at is text such as '2030-01-31T09:00:00Z', or milliseconds"),
        (b'{"delay": "5s"}', "`delay` is called `after`"),
        (b'{"deliver_at": "2030-01-31T09:00:00Z"}', "`deliver_at` is called `at`"),
    ],
)
def test_an_invalid_time_is_refused_with_the_valid_form(body: bytes, expected_text: str) -> None:
    with pytest.raises(InvalidDelay, match=re.escape(expected_text)):
        codec.decode(codec.Moving, body)
    with pytest.raises(InvalidDelay, match=re.escape(expected_text)):
        send_codec.decode_messages(
            "t", JSON, b'[{"body": "x"}, ' + body[:-1] + b', "body": "x"}]', send_codec.IdSource()
        )


def test_strings_beyond_the_limit_are_not_decoded() -> None:
    # The first element is no text, so a decoder would raise another error.
    too_many = b'{"ids": [1, %b]}' % b",".join([b'""'] * codec.STRINGS_MAX)
    with pytest.raises(OutOfRange, match="more than 50000 strings"):
        codec.decode(http_api.CancellingMany, too_many)
    # A string that ends with a backslash has one quote that does not look escaped.
    too_many = too_many.replace(b'""', rb'"\\"') + b'"' * codec.STRINGS_MAX
    with pytest.raises(OutOfRange, match="more than 50000 strings"):
        codec.decode(http_api.CancellingMany, too_many)


def test_quotes_within_strings_are_not_counted() -> None:
    text = '"' * (2 * codec.STRINGS_MAX)
    assert codec.decode(http_api.CancellingMany, codec.encode({"ids": [text]})).ids == [text]


def test_a_due_time_or_a_delay_is_parsed_but_not_both() -> None:
    with pytest.raises(InvalidDelay, match="at=2000000000000 and after=5s name two due times"):
        codec.due_and_delay_ms(2_000_000_000_000, "5s")
    assert codec.due_and_delay_ms(UNSET, "5s") == (None, 5_000)
    assert codec.due_and_delay_ms("2030-01-31T09:00:00Z", UNSET) == (1_896_080_400_000, None)
    for seconds in (1_800_000_000, "1800000000", 20_300_131, 0):
        with pytest.raises(InvalidDelay, match=f"at={seconds}: milliseconds since 1970 are meant"):
            codec.due_and_delay_ms(seconds, UNSET)


def test_a_time_is_formatted_with_milliseconds() -> None:
    assert codec.format_time(1_927_616_400_001) == "2031-01-31T09:00:00.001Z"


def _row(seq: int, **values: object) -> dict[str, object]:
    """Return a row of a read with this seq. Other columns are null unless `values` has them."""
    return (
        dict.fromkeys(READ_SCHEMA.names)
        | {"seq": seq, "queue_id": 2, "queue_offset": 7, "store_ms": 5}
        | values
    )


def test_a_message_is_the_same_for_each_group_but_for_its_receipt() -> None:
    rows = [
        _row(1, topic="t", body=b"a", keys="k l", due_ms=4, accepted_ms=1),
        _row(2, topic="t", body=b"\xff", reconsume_times=3, tag="x"),
        _row(3, topic="t", body=b"L" * 4_000),
    ]
    batch, encoder = pa.RecordBatch.from_pylist(rows, READ_SCHEMA), codec.LeasedEncoder()
    values = NumberedRows([tuple(row.values()) for row in rows])
    for receipts in (["r-1", "r-2", "r-3"], ["s-1", "s-2", "s-3"]):
        encoded = encoder.encode(values, "t", receipts)
        assert encoded == codec.LeasedEncoder().encode(batch, "t", receipts)
        messages = [codec.decode(http_api.Leased, each) for each in encoded]
        assert [each.receipt for each in messages] == receipts
        assert [each.attempt for each in messages] == [1, 4, 1]
        assert messages[0].keys == ["k", "l"] and messages[0].lateness_ms == 1
        assert messages[1].base64 == b"\xff" and messages[2].text == "L" * 4_000
    # By the requested topic, as a group may receive from a retry topic by its own name.
    (other,) = encoder.encode(NumberedRows([tuple(rows[0].values())]), "u", ["r"])
    assert codec.decode(http_api.Leased, other).topic == "u"


def test_a_limited_number_of_messages_is_kept_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_KEPT_MAX", 2)
    encoder = codec.LeasedEncoder()
    for seq in (1, 2, 3, 2):
        (encoded,) = encoder.encode(NumberedRows([tuple(_row(seq, topic="t").values())]), "t", ["r"])
        assert codec.decode(http_api.Leased, encoded).seq == seq
    assert [seq for _, seq in encoder._encoded] == [2, 3]


def test_the_first_bytes_of_a_body_are_shown_as_text_or_base64() -> None:
    assert codec.body_fields(b"abc", 3) == {"size_bytes": 3, "body": "abc"}
    assert codec.body_fields("aü".encode()[:2], 3) == {"size_bytes": 3, "body_cut": True, "body": "a"}
    assert codec.body_fields(b"a\xff", 2) == {"size_bytes": 2, "base64": b"a\xff"}
