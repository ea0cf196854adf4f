"""Spans, leases, instants and types of content, without a node."""

from __future__ import annotations

import re

import pytest
from msgspec import UNSET

from timeball.edges.http import codec, send_codec
from timeball.edges.http.codec import JSON, NDJSON
from timeball.edges.shared.error_codes import Refused
from timeball.model.errors import InvalidDelay, InvalidMessage, OutOfRange


def test_types_of_content() -> None:
    assert codec.check_type("Application/JSON; charset=UTF-8", JSON, NDJSON) == JSON
    for wrong in ("", "text/json", "application/json; charset=utf-16", "application/json;"):
        with pytest.raises(Refused):
            codec.check_type(wrong, JSON)


def test_spans_and_leases() -> None:
    assert codec.lease_ms("1m30s") == codec.lease_ms("PT1M30S") == 90_000
    for wrong in ("x", "90000", "٣", "9" * 5_000):
        with pytest.raises(InvalidDelay, match="lease="):
            codec.lease_ms(wrong)
    with pytest.raises(OutOfRange, match="lease=13h"):
        codec.lease_ms("13h")
    with pytest.raises(InvalidMessage):
        codec.decode(codec.Moving, b"[]")


@pytest.mark.parametrize(
    ("body", "said"),
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
def test_a_time_that_is_refused_says_what_to_write(body: bytes, said: str) -> None:
    with pytest.raises(InvalidDelay, match=re.escape(said)):
        codec.decode(codec.Moving, body)
    with pytest.raises(InvalidDelay, match=re.escape(said)):
        send_codec.read(
            "t", JSON, b'[{"body": "x"}, ' + body[:-1] + b', "body": "x"}]', send_codec.IdSource()
        )


def test_at_and_after_are_one_time() -> None:
    with pytest.raises(InvalidDelay, match="at=2000000000000 and after=5s name two instants"):
        codec.when(2_000_000_000_000, "5s")
    assert codec.when(UNSET, "5s") == (None, 5_000)
    assert codec.when("2030-01-31T09:00:00Z", UNSET) == (1_896_080_400_000, None)
    for seconds in (1_800_000_000, "1800000000", 20_300_131, 0):
        with pytest.raises(InvalidDelay, match=f"at={seconds}: milliseconds since 1970 are meant"):
            codec.when(seconds, UNSET)


def test_an_instant_has_its_milliseconds() -> None:
    assert codec.instant_text(1_927_616_400_001) == "2031-01-31T09:00:00.001Z"


def test_a_body_is_shown_by_its_beginning() -> None:
    assert codec.shown_body(b"abc", 3) == {"size_bytes": 3, "body": "abc"}
    assert codec.shown_body("aü".encode()[:2], 3) == {"size_bytes": 3, "body_cut": True, "body": "a"}
    assert codec.shown_body(b"a\xff", 2) == {"size_bytes": 2, "base64": b"a\xff"}
