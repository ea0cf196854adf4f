"""The request for a page of pending messages, the page, and the answer of a forecast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Unit = Literal["second", "minute", "hour", "day"]
Position = tuple[int, int]  # (due_ms, version), as in the files of the table
FIRST: Position = (-(1 << 62), 0)
LAST: Position = (1 << 62, 0)


class Waiting(NamedTuple):
    """A pending message, as a page shows it. `seq` is its number, by which it may be cancelled."""

    seq: int
    topic: str
    due_ms: int
    unique_key: str | None  # the message's id
    keys: str | None
    tag: str | None
    size_bytes: int  # of the body
    campaign: str | None  # id of the campaign that attached it


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for a page: messages due in [from_ms, to_ms), from the position `after` on."""

    rows: int
    topic: str | None = None
    key: str | None = None  # only messages with this key
    from_ms: int | None = None
    to_ms: int | None = None
    after: Position | None = None

    @property
    def low(self) -> Position:
        """The first position of the page."""
        low = FIRST if self.from_ms is None else (self.from_ms, 0)
        return low if self.after is None else max(low, self.after)

    @property
    def high(self) -> Position:
        """The end of the requested positions (exclusive)."""
        return LAST if self.to_ms is None else (self.to_ms, 0)


class Page(NamedTuple):
    """Messages in order, and the position where the next page begins, or None after the last page."""

    messages: list[Waiting]
    next_page: Position | None


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer of a forecast: messages per bucket, as (begin of the bucket in ms, number), and per topic.

    Empty buckets are left out.
    """

    by: Unit  # the width of a bucket
    from_ms: int
    to_ms: int
    counted_ms: int  # time of the count, which may be some seconds old
    buckets: list[tuple[int, int]]
    topics: dict[str, int]
