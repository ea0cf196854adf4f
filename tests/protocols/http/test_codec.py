"""Messages to columns and rows to JSON, without a node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.errors import InvalidDelay, InvalidMessage, OutOfRange, TimeballError
from timeball.protocols.error_codes import Refused
from timeball.protocols.http import codec
from timeball.protocols.http.codec import JSON, NDJSON


class Ids(codec.IdSource):
    def id_of(self, at: int) -> str:
        return f"id-{at}"


def columns(data: bytes, kind: str = JSON) -> codec.Columns:
    return codec.columns("t", kind, data, Ids())


@given(st.binary(max_size=200), st.sampled_from([JSON, NDJSON]))
def test_any_bytes_are_messages_or_an_error_of_ours(data: bytes, kind: str) -> None:
    try:
        assert columns(data, kind).batch.num_rows
    except TimeballError as error:
        assert str(error)


@given(
    st.fixed_dictionaries(
        {"body": st.text()},
        optional={
            "key": st.text(), "tag": st.text(), "delay": st.integers() | st.text(), "id": st.text(),
            "deliver_at": st.integers() | st.text(), "properties": st.dictionaries(st.text(), st.text()),
        },
    )
)  # fmt: skip
def test_any_message_is_a_row_or_an_error_of_ours(message: dict[str, object]) -> None:
    try:
        data = codec.encode(message)
    except UnicodeEncodeError:
        return  # half a surrogate pair is no JSON
    except OverflowError:
        return  # an integer of more than 64 bits
    try:
        (row,) = columns(data).batch.to_pylist()
    except TimeballError as error:
        assert str(error)
    else:
        assert row["body"] == str(message["body"]).encode()


def test_one_is_told_from_many_and_json_is_kept_as_it_stands() -> None:
    assert columns(b' {"body": ""}').is_one
    assert not columns(b' [{"body": ""}]').is_one
    (row,) = columns(b'{"json": {"a":  1.50}}').batch.to_pylist()
    assert row["body"] == b'{"a":  1.50}'
    (row,) = columns(b'{"json": null}').batch.to_pylist()
    assert row["body"] == b"null"


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
