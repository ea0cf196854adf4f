"""Handles: what is encoded comes back, and nothing else is taken for one."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.protocols.grpc._generated.definition_pb2 import Code
from timeball.protocols.grpc.codec.receipt_handles import CHARACTERS_MAX, InOrder, Promised, ReceiptHandles
from timeball.protocols.grpc.codec.statuses import Refused

SECRET = bytes(range(32))
HANDLES = ReceiptHandles(SECRET)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
NAMED = st.one_of(st.builds(Promised, INT64, INT64), st.builds(InOrder, INT32, INT64, INT64))
NAMES = st.from_regex(r"[%|a-zA-Z0-9_-]{1,20}", fullmatch=True)


def refused(group: str, topic: str, text: str, handles: ReceiptHandles = HANDLES) -> None:
    with pytest.raises(Refused) as error:
        handles.decode(group, topic, text)
    assert error.value.status_code == Code.INVALID_RECEIPT_HANDLE


@given(NAMES, NAMES, NAMED)
def test_a_handle_comes_back(group: str, topic: str, named: Promised | InOrder) -> None:
    text = HANDLES.encode(group, topic, named)
    found = HANDLES.decode(group, topic, text)
    assert found == named and type(found) is type(named)
    assert len(text) <= CHARACTERS_MAX and text.isascii() and " " not in text


@given(NAMES, NAMES, NAMES, NAMES, NAMED)
def test_a_handle_is_for_its_group_and_topic(
    group: str, topic: str, other_group: str, other_topic: str, named: Promised | InOrder
) -> None:
    text = HANDLES.encode(group, topic, named)
    if (other_group, other_topic) != (group, topic):
        refused(other_group, other_topic, text)


@given(NAMED, st.data())
def test_no_changed_handle_is_read(named: Promised | InOrder, data: st.DataObject) -> None:
    text = HANDLES.encode("g", "t", named)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("ABCxyz019-_=. \n").filter(lambda c: c != text[at]))
    refused("g", "t", text[:at] + other + text[at + 1 :])
    refused("g", "t", text[:at])
    refused("g", "t", text + "A")
    refused("g", "t", text + "=")


@given(st.one_of(st.text(), st.binary(max_size=80).map(lambda b: base64.urlsafe_b64encode(b).decode())))
def test_garbage_is_none(text: str) -> None:
    refused("g", "t", text)


def test_another_folders_handle_is_none() -> None:
    refused("g", "t", ReceiptHandles(bytes(32)).encode("g", "t", Promised(1, 2)))


def test_a_kind_cannot_pass_for_the_other() -> None:
    # A promise's handle is four bytes shorter; with those from the group's name it would be as long as the other.
    text = HANDLES.encode("abcdg", "t", Promised(1, 2))
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    longer = data[:18] + b"abcd" + data[18:]
    refused("g", "t", base64.urlsafe_b64encode(longer).rstrip(b"=").decode())


def test_a_text_of_any_size_is_refused_at_once() -> None:
    refused("g", "t", "A" * 4_000_000)
