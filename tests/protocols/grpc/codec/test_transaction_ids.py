"""Names of transactions: they find their half message again, and nobody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.protocols.grpc.codec.transaction_ids import SEQ_MAX, seq_of, transaction_id


@given(seq=st.integers(0, SEQ_MAX), topic=st.text(), message_id=st.text())
def test_a_name_finds_its_half_again(seq: int, topic: str, message_id: str) -> None:
    assert seq_of(transaction_id(seq, topic, message_id), topic, message_id) == seq


def test_another_topics_or_messages_name_finds_nothing() -> None:
    text = transaction_id(17, "orders", "A")
    assert seq_of(text, "others", "A") is None
    assert seq_of(text, "orders", "B") is None


@pytest.mark.parametrize(
    "text", ["", "17", "x" * 24, "é" * 24, "f" * 24, "F" * 24, "0" * 25, "0" * 24 + "\n"]
)
def test_what_is_no_name(text: str) -> None:
    assert seq_of(text, "orders", "A") is None


@given(text=st.text(alphabet="0123456789ABCDEFabcdef \n", max_size=26))
def test_any_text_is_a_name_or_none(text: str) -> None:
    seq = seq_of(text, "orders", "A")
    assert seq is None or transaction_id(seq, "orders", "A") == text
