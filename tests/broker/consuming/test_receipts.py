"""Receipts of the two ways of handing out are told apart by their type, whatever is in them."""

from __future__ import annotations

from timeball.broker.consuming.receipts import PositionReceipt, Receipt


def test_a_receipt_of_a_promise_is_none_of_a_position() -> None:
    receipt = Receipt("g", "t", 7, 1_000)
    assert (receipt.group, receipt.topic, receipt.seq, receipt.due_ms) == ("g", "t", 7, 1_000)
    assert not isinstance(receipt, PositionReceipt)
    assert not isinstance(PositionReceipt("g", "t", 0, 7, 1_000), Receipt)
