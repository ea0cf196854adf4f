"""Recall handles: RocketMQ's bytes, there and back, and what is no handle."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.revoking.recall_handle import Handle, decode_handle, encode_handle
from timeball.errors import InvalidMessage

NAMES = st.text(st.characters(codec="utf-8", exclude_characters=" "), min_size=1, max_size=40)


def encoded(text: str | bytes) -> str:
    return base64.urlsafe_b64encode(text.encode() if isinstance(text, str) else text).decode()


def test_the_bytes_are_rocketmqs() -> None:
    handle = encode_handle("Orders", "broker-a", 1_700_000_000_123, "7F0000010001")
    assert handle == "djEgT3JkZXJzIGJyb2tlci1hIDE3MDAwMDAwMDAxMjMgN0YwMDAwMDEwMDAx"
    assert base64.urlsafe_b64decode(handle) == b"v1 Orders broker-a 1700000000123 7F0000010001"


@given(topic=NAMES, broker=NAMES, due_ms=st.integers(0, 1 << 62), key=NAMES)
def test_a_handle_says_what_it_was_made_of(topic: str, broker: str, due_ms: int, key: str) -> None:
    handle = encode_handle(topic, broker, due_ms, key)
    assert decode_handle(handle) == Handle(topic, broker, due_ms, key)
    assert decode_handle(handle.rstrip("=")) == Handle(topic, broker, due_ms, key)


def test_items_behind_the_fifth_are_ignored() -> None:
    assert decode_handle(encoded("v1 t b 5 k later additions")) == Handle("t", "b", 5, "k")


@pytest.mark.parametrize("key", ["", "two words"])
def test_what_no_handle_can_name_gets_none(key: str) -> None:
    assert encode_handle("t", "b", 5, key) == ""


@pytest.mark.parametrize(
    "text",
    [
        "", "!", "a", "djE+", "x" * 3_000, encoded("v2 t b 5 k"), encoded("v1 t b 5"), encoded("v1 t b five k"),
        encoded("v1 t b -5 k"), encoded("v1  t b 5 k"), encoded(b"\xff\xfe v1 t b 5 k"),
    ],
)  # fmt: skip
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage, match="recall handle"):
        decode_handle(text)


@given(text=st.text(max_size=60))
def test_any_text_is_a_handle_or_refused(text: str) -> None:
    try:
        assert isinstance(decode_handle(text), Handle)
    except InvalidMessage as error:
        assert "recall handle" in str(error)
