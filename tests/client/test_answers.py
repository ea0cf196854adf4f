"""What a verb returns names what was sent."""

from timeball.client.answers import Receipt


def test_a_receipt_of_what_is_visible_at_once_has_no_instant() -> None:
    receipt = Receipt("a", 1, None, 5)
    assert receipt.due_ms is None and receipt.store_ms == 5
