"""Parameters and answers of the queries for pending messages: windows of time, pages, buckets. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast, get_args

import msgspec

from timeball.broker.pending.pages import Counted, Page, Unit, Wanted
from timeball.edges.http.codec import instant_text
from timeball.model import limits, time_parsing
from timeball.model.errors import InvalidMessage, OutOfRange

PAGE_ROWS = 100
_PAGE = re.compile(r"([0-9]{1,18})-([0-9]{1,19})")


class Waiting(msgspec.Struct, omit_defaults=True):
    """A pending message. `seq` is its number in the log, by which other tools name it."""

    topic: str
    due: str
    due_ms: int
    seq: int
    size_bytes: int
    id: str | None = None
    keys: list[str] = []
    tag: str | None = None
    campaign: str | None = None


class WaitingPage(msgspec.Struct, omit_defaults=True):
    """Pending messages by due time. `next_page`, as ?page=, leads to the next ones; the last page has none."""

    messages: list[Waiting]
    next_page: str | None = None


class Bucket(msgspec.Struct):
    """A bucket: its begin, and the number of messages due in it."""

    from_ms: int
    due: int


class Forecast(msgspec.Struct):
    """Numbers of messages due in [from_ms, to_ms), as of `counted`.

    Buckets and topics without messages are left out.
    """

    by: str
    from_ms: int
    to_ms: int
    counted: str
    counted_ms: int
    buckets: list[Bucket]
    topics: dict[str, int]


def wanted(query: Mapping[str, str]) -> Wanted:
    """Parse the query for a page. Raises InvalidMessage, InvalidDelay and OutOfRange."""
    rows = query.get("max", str(PAGE_ROWS))
    if not (rows.isascii() and rows.isdecimal() and len(rows) < 9):
        raise OutOfRange(f"max={rows[:20]}: 1 to {limits.LISTED_ROWS_MAX}")
    from_ms, to_ms = window(query)
    page, after = query.get("page"), None
    if page is not None:
        found = _PAGE.fullmatch(page)
        if found is None:
            raise InvalidMessage(f"page={page[:40]!r}: give back the next_page of an answer, as it stands")
        after = int(found[1]), min(int(found[2]), (1 << 63) - 1)
    return Wanted(int(rows), query.get("topic"), query.get("key"), from_ms, to_ms, after)


def unit(text: str) -> Unit:
    """Parse the length of buckets. Raises OutOfRange."""
    for each in get_args(Unit):
        if each == text:
            return cast(Unit, each)
    raise OutOfRange(f"by={text[:20]}: second, minute, hour or day")


def window(query: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Parse the window of ?from=&to=, with None for a missing end. Raises InvalidDelay."""
    ends = query.get("from"), query.get("to")
    from_ms, to_ms = (None if end is None else time_parsing.due_ms(end) for end in ends)
    return from_ms, to_ms


def page(found: Page) -> WaitingPage:
    """Build the answer for a page."""
    messages = [
        Waiting(
            one.topic, instant_text(one.due_ms), one.due_ms, one.seq, one.size_bytes,
            one.unique_key, (one.keys or "").split(), one.tag, one.campaign,
        )
        for one in found.messages
    ]  # fmt: skip
    return WaitingPage(messages, None if found.next_page is None else "-".join(map(str, found.next_page)))


def forecast(found: Counted) -> Forecast:
    """Build the answer for counts."""
    buckets = [Bucket(*one) for one in found.buckets]
    return Forecast(
        found.by,
        found.from_ms,
        found.to_ms,
        instant_text(found.counted_ms),
        found.counted_ms,
        buckets,
        found.topics,
    )
