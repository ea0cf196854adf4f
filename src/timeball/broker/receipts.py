"""What names one handing out of one message: two sorts, told apart by their type.

A receipt says all that is needed to settle what it names without a look into the log. So whoever turns one into a text
for a consumer seals it (registry/receipt_secret.py): a number made up would settle a stranger's promise.
"""

from __future__ import annotations

from typing import NamedTuple


class Receipt(NamedTuple):
    """A promise brings the message back. `topic` is the one subscribed to; `seq` and `due_ms` name the promise."""

    group: str
    topic: str
    seq: int
    due_ms: int


class PositionReceipt(NamedTuple):
    """A position of a queue is in hand. `topic` is where the row stands: it may be a retry topic."""

    group: str
    topic: str
    queue_id: int
    offset: int
    pop_ms: int


AnyReceipt = Receipt | PositionReceipt  # of `receiving`: the second for a group that consumes in order
