"""What names one lease of one message: two sorts, told apart by their type. No I/O.

A receipt holds all that is needed to settle its lease without a look into the log. So an edge that turns one into text
seals it: a number that was made up would settle another consumer's message.
"""

from __future__ import annotations

from typing import NamedTuple


class Receipt(NamedTuple):
    """A lease kept in the log: the promise (`seq`, `due_ms`) brings the message back. `topic`: the one asked for."""

    group: str
    topic: str
    seq: int
    due_ms: int


class PositionReceipt(NamedTuple):
    """A lease kept in memory, of a position. `topic` is where the row stands: it may be a retry topic."""

    group: str
    topic: str
    queue_id: int
    offset: int
    pop_ms: int


AnyReceipt = Receipt | PositionReceipt
