"""Spans, leases, instants and types of content, without a node."""

from __future__ import annotations

import pytest

from timeball.errors import InvalidDelay, InvalidMessage, OutOfRange
from timeball.protocols.error_codes import Refused
from timeball.protocols.http import codec
from timeball.protocols.http.codec import JSON, NDJSON


def test_types_of_content() -> None:
    assert codec.check_type("Application/JSON; charset=UTF-8", JSON, NDJSON) == JSON
    for wrong in ("", "text/json", "application/json; charset=utf-16", "application/json;"):
        with pytest.raises(Refused):
            codec.check_type(wrong, JSON)


def test_spans_and_leases() -> None:
    assert codec.span_ms("90") == 90
    assert codec.span_ms("1m30s") == codec.span_ms("PT1M30S") == codec.lease_ms(90_000)
    for wrong in ("x", -1, 10**30, "٣", "9" * 5_000):
        with pytest.raises(InvalidDelay):
            codec.span_ms(wrong)
    with pytest.raises(OutOfRange):
        codec.lease_ms("13h")
    with pytest.raises(InvalidMessage):
        codec.decode(codec.Moving, b"[]")


def test_an_instant_has_its_milliseconds() -> None:
    assert codec.instant_text(1_927_616_400_001) == "2031-01-31T09:00:00.001Z"


def test_a_body_is_shown_by_its_beginning() -> None:
    assert codec.shown_body(b"abc", 3) == {"size_bytes": 3, "body": "abc"}
    assert codec.shown_body("aü".encode()[:2], 3) == {"size_bytes": 3, "body_cut": True, "body": "a"}
    assert codec.shown_body(b"a\xff", 2) == {"size_bytes": 2, "base64": b"a\xff"}
