"""Receipt handles: encoded handles are decoded to the same receipt, and all other texts are refused."""

from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.consuming.redelivery_rows import pop_retry_topic
from timeball.broker.consuming.requests import Receipt
from timeball.edges.shared.receipt_handles import (
    ANSWERS_KEPT_MAX,
    CHARACTERS_MAX,
    ROWS_KEPT_MAX,
    ReceiptHandles,
)
from timeball.model.errors import InvalidReceipt

SECRET = bytes(range(32))
HANDLES = ReceiptHandles(lambda: SECRET)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
NAMES = st.from_regex(r"[%|a-zA-Z0-9_-]{1,20}", fullmatch=True)
RECEIPTS = st.builds(Receipt, NAMES, NAMES, INT32, INT64, INT64)


def check_refused(group: str, topic: str, text: str, handles: ReceiptHandles = HANDLES) -> None:
    """Assert that a text is no receipt handle of the group and topic."""
    with pytest.raises(InvalidReceipt) as error:
        handles.decode(text, group, topic)
    assert error.value.code == "invalid_receipt"


def of_retry_topic(receipt: Receipt) -> Receipt:
    """Return the receipt of the same position in the retry topic of the group and topic."""
    return receipt._replace(topic=pop_retry_topic(receipt.group, receipt.topic))


@given(RECEIPTS)
def test_an_encoded_handle_is_decoded_to_the_same(receipt: Receipt) -> None:
    text = HANDLES.encode(receipt)
    assert HANDLES.decode(text, receipt.group, receipt.topic) == receipt
    assert len(text) <= CHARACTERS_MAX and text.isascii() and " " not in text


@given(st.lists(st.one_of(RECEIPTS, RECEIPTS.map(lambda one: of_retry_topic(one))), max_size=8))
def test_the_receipts_of_an_answer_are_encoded_as_each_alone(receipts: list[Receipt]) -> None:
    assert HANDLES.encode_all(receipts) == [HANDLES.encode(receipt) for receipt in receipts]


@given(st.lists(RECEIPTS, min_size=1, max_size=4), st.data())
def test_handles_of_a_whole_answer_and_some_of_them_are_decoded_as_each_alone(
    positions: list[Receipt], data: st.DataObject
) -> None:
    """A call that names another group or topic decodes none of them."""
    group, topic = positions[0][:2]
    receipts = [each._replace(group=group, topic=topic) for each in positions]
    receipts = [data.draw(st.sampled_from([each, of_retry_topic(each)])) for each in receipts]
    handles = ReceiptHandles(lambda: SECRET)
    texts = handles.encode_answer(receipts, group, topic)
    assert texts == HANDLES.encode_all(receipts)
    assert handles.decode_all(texts, group, topic) == receipts
    assert handles.decode_all(texts, f"{group}2", topic) == [None] * len(texts)
    assert handles.decode_all(texts, group, f"{topic}2") == [None] * len(texts)
    returned = data.draw(st.permutations(texts))[: data.draw(st.integers(1, len(texts)))]
    assert handles.decode_all([*returned, "x"], group, topic) == [
        *(HANDLES.decode(text, group, topic) for text in returned), None
    ]  # fmt: skip


def test_the_receipts_of_a_limited_number_of_answers_are_kept() -> None:
    handles = ReceiptHandles(lambda: SECRET)
    sizes = [2] * (ANSWERS_KEPT_MAX + 10) + [ROWS_KEPT_MAX // 20] * 30
    for answer, size in enumerate(sizes):
        receipts = [Receipt("g", "t", 0, offset, answer) for offset in range(size)]
        texts = handles.encode_answer(receipts, "g", "t")
        assert handles.decode_all(texts, "g", "t") == receipts
        kept = [len(each.handles) for each in handles._answers.values()]
        assert sum(kept) == handles._kept_rows <= ROWS_KEPT_MAX and len(kept) <= ANSWERS_KEPT_MAX
    assert handles.decode_all(HANDLES.encode_all([Receipt("g", "t", 0, 0, 0)]), "g", "t") == [
        Receipt("g", "t", 0, 0, 0)
    ]


@given(RECEIPTS)
def test_a_handle_of_the_retry_topic_is_decoded_with_the_name_of_either_topic(receipt: Receipt) -> None:
    """A consumer names the topic that it receives from, also for messages of the retry topic."""
    again = of_retry_topic(receipt)
    text = HANDLES.encode(again)
    assert HANDLES.decode(text, receipt.group, receipt.topic) == again
    assert HANDLES.decode(text, receipt.group, again.topic) == again
    assert text != HANDLES.encode(receipt) and len(text) <= CHARACTERS_MAX


@given(RECEIPTS, NAMES, NAMES)
def test_a_handle_of_another_group_or_topic_is_refused(receipt: Receipt, group: str, topic: str) -> None:
    if (group, topic) != (receipt.group, receipt.topic):
        for leased in (receipt, of_retry_topic(receipt)):
            check_refused(group, topic, HANDLES.encode(leased))
            check_refused(group, pop_retry_topic(group, topic), HANDLES.encode(leased))


@given(RECEIPTS, st.data())
def test_a_changed_handle_is_refused(receipt: Receipt, data: st.DataObject) -> None:
    text, names = HANDLES.encode(receipt), (receipt.group, receipt.topic)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("ABCxyz019-_=. \n").filter(lambda c: c != text[at]))
    check_refused(*names, text[:at] + other + text[at + 1 :])
    check_refused(*names, text[:at])
    check_refused(*names, text + "A")
    check_refused(*names, text + "=")


@given(st.one_of(st.text(), st.binary(max_size=80).map(lambda b: base64.urlsafe_b64encode(b).decode())))
def test_a_text_that_is_not_a_handle_is_refused(text: str) -> None:
    check_refused("g", "t", text)


def test_a_handle_of_another_data_folder_is_refused() -> None:
    check_refused("g", "t", ReceiptHandles(lambda: bytes(32)).encode(Receipt("g", "t", 1, 2, 3)))


def test_a_handle_of_a_former_version_is_refused() -> None:
    data = struct.pack(">BBqq", 1, 1, 41, 60_000)  # a number and a due time
    text = base64.urlsafe_b64encode(data + HANDLES._seal(data, b"g/t")).rstrip(b"=").decode()
    with pytest.raises(InvalidReceipt, match="made by another version"):
        HANDLES.decode(text, "g", "t")


def test_a_handle_with_the_first_letters_of_the_group_in_its_content_is_refused() -> None:
    # The seal is a hash of the content and the names, so it stays the same if letters move from a name to the content.
    text = HANDLES.encode(Receipt("abcdg", "t", 1, 2, 3))
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    longer = data[:-16] + b"abcd" + data[-16:]
    check_refused("g", "t", base64.urlsafe_b64encode(longer).rstrip(b"=").decode())


def test_a_long_text_is_refused_at_once() -> None:
    check_refused("g", "t", "A" * 4_000_000)
