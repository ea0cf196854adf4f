"""Tests of timeball.spark.source.options: a text becomes a value, or an error of one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from timeball.spark.source import options as values


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (values.one_of("log", "queue"), "LOG", "log"),
        (values.count(1), "7", 7),
        (values.position("first"), "First", "first"),
        (values.position("first"), "12", 12),
        (values.offsets("first"), "first", "first"),
        (values.offsets("first"), "12", 12),
        (values.offsets("first"), "0=5, 3=9", {0: 5, 3: 9}),
        (values.kinds, "scheduled, 3", (2, 3)),
        (values.names, "seq, body", ("seq", "body")),
        (values.endpoint, "grpc+tls://h:1", "grpc+tls://h:1"),
        (values.instant_ms, "1970-01-01T01:00:00+01:00", 0),
        (values.instant_ms, "2030-01-31T09:00:00.5Z", 1_896_080_400_500),
        (values.instant_ms, "1895994000000", 1_895_994_000_000),
        (values.text, "any", "any"),
    ],
)
def test_a_text_becomes_its_value(parse: Any, text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (values.one_of("log", "queue"), "all", "one of log, queue"),
        (values.count(1), "0", "at least 1"),
        (values.count(1, 5), "6", "at most 5"),
        (values.position("first"), "-1", "a sequence number of 0 or more, or one of first"),
        (values.offsets("first"), "0=5,0=6", "each queue once"),
        (values.offsets("first"), "0=5,6", "first, an offset of 0 or more, or one a queue"),
        (values.offsets("first"), "x=5", "one a queue: 0=100,1=250"),
        (values.kinds, "wish", "a list of message, scheduled"),
        (values.names, "seq,,body", "column names"),
        (values.endpoint, "h:1", "grpc://host:port"),
        (values.instant_ms, "2030-01-31T09:00:00", "names no time zone"),
        (values.instant_ms, "tomorrow", "an instant such as"),
        (values.text, "", "may not be empty"),
    ],
)
def test_bad_text_raises_an_error_with_the_allowed_values(parse: Any, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)
