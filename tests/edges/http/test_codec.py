"""Durations, leases, times and media types, without a node."""

from __future__ import annotations

import re

import pytest
from msgspec import UNSET

from timeball.edges.http import codec, send_codec
from timeball.edges.http.codec import JSON, NDJSON
from timeball.edges.shared.error_codes import Refused
from timeball.model.errors import InvalidDelay, InvalidMessage, OutOfRange


def test_only_known_media_types_are_accepted() -> None:
    assert codec.check_content_type("Application/JSON; charset=UTF-8", JSON, NDJSON) == JSON
    for wrong in ("", "text/json", "application/json; charset=utf-16", "application/json;"):
        with pytest.raises(Refused):
            codec.check_content_type(wrong, JSON)


def test_durations_and_leases_are_parsed_or_refused() -> None:
    assert codec.lease_ms("1m30s") == codec.lease_ms("PT1M30S") == 90_000
    for wrong in ("x", "90000", "٣", "9" * 5_000):
        with pytest.raises(InvalidDelay, match="lease="):
            codec.lease_ms(wrong)
    with pytest.raises(OutOfRange, match="lease=13h"):
        codec.lease_ms("13h")
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


def test_at_and_after_together_are_refused() -> None:
    with pytest.raises(InvalidDelay, match="at=2000000000000 and after=5s name two due times"):
        codec.due_and_delay_ms(2_000_000_000_000, "5s")
    assert codec.due_and_delay_ms(UNSET, "5s") == (None, 5_000)
    assert codec.due_and_delay_ms("2030-01-31T09:00:00Z", UNSET) == (1_896_080_400_000, None)
    for seconds in (1_800_000_000, "1800000000", 20_300_131, 0):
        with pytest.raises(InvalidDelay, match=f"at={seconds}: milliseconds since 1970 are meant"):
            codec.due_and_delay_ms(seconds, UNSET)


def test_a_time_is_formatted_with_milliseconds() -> None:
    assert codec.format_time(1_927_616_400_001) == "2031-01-31T09:00:00.001Z"


def test_the_first_bytes_of_a_body_are_shown_as_text_or_base64() -> None:
    assert codec.body_fields(b"abc", 3) == {"size_bytes": 3, "body": "abc"}
    assert codec.body_fields("aü".encode()[:2], 3) == {"size_bytes": 3, "body_cut": True, "body": "a"}
    assert codec.body_fields(b"a\xff", 2) == {"size_bytes": 2, "base64": b"a\xff"}
