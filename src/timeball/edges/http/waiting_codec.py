"""Parses the queries for pending messages, and builds their answers: pages of messages, and forecasts. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast, get_args

import msgspec

from timeball.broker.pending.pages import Counted, Page, Unit, Wanted
from timeball.edges.http.codec import format_time
from timeball.model import limits, time_parsing
from timeball.model.errors import InvalidMessage, OutOfRange

PAGE_ROWS = 100
_PAGE = re.compile(r"([0-9]{1,18})-([0-9]{1,19})")


class Waiting(msgspec.Struct, omit_defaults=True):
    """A pending message. `seq` is its number in the log, which also identifies it in other tools."""

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
    """An interval of time: its start, and the number of messages due in it."""

    from_ms: int
    due: int


class Forecast(msgspec.Struct):
    """The number of messages due in [from_ms, to_ms), by bucket and by topic. They were counted at the time `counted`.

    Buckets and topics without messages are left out.
    """

    by: str
    from_ms: int
    to_ms: int
    counted: str
    counted_ms: int
    buckets: list[Bucket]
    topics: dict[str, int]


def parse_page_query(query: Mapping[str, str]) -> Wanted:
    """Parse the query for a page of pending messages. Raises InvalidMessage, InvalidDelay and OutOfRange."""
    rows = query.get("max", str(PAGE_ROWS))
    if not (rows.isascii() and rows.isdecimal() and len(rows) < 9):
        raise OutOfRange(f"max={rows[:20]}: 1 to {limits.LISTED_ROWS_MAX}")
    from_ms, to_ms = parse_window(query)
    page, after = query.get("page"), None
    if page is not None:
        page_match = _PAGE.fullmatch(page)
        if page_match is None:
            raise InvalidMessage(f"page={page[:40]!r}: give back the next_page of an answer, as it stands")
        after = int(page_match[1]), min(int(page_match[2]), (1 << 63) - 1)
    return Wanted(int(rows), query.get("topic"), query.get("key"), from_ms, to_ms, after)


def parse_unit(text: str) -> Unit:
    """Parse the length of the buckets of a forecast. Raises OutOfRange."""
    for unit in get_args(Unit):
        if unit == text:
            return cast(Unit, unit)
    raise OutOfRange(f"by={text[:20]}: second, minute, hour or day")


def parse_window(query: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Parse the window of ?from=&to=, with None for a missing end. Raises InvalidDelay."""
    ends = query.get("from"), query.get("to")
    from_ms, to_ms = (None if end is None else time_parsing.due_ms(end) for end in ends)
    return from_ms, to_ms


def page_answer(page: Page) -> WaitingPage:
    """Build the answer for a page of pending messages."""
    messages = [
        Waiting(
            message.topic, format_time(message.due_ms), message.due_ms, message.seq, message.size_bytes,
            message.unique_key, (message.keys or "").split(), message.tag, message.campaign,
        )
        for message in page.messages
    ]  # fmt: skip
    return WaitingPage(messages, None if page.next_page is None else "-".join(map(str, page.next_page)))


def forecast_answer(counted: Counted) -> Forecast:
    """Build the answer for a forecast."""
    buckets = [Bucket(*bucket) for bucket in counted.buckets]
    return Forecast(
        counted.by,
        counted.from_ms,
        counted.to_ms,
        format_time(counted.counted_ms),
        counted.counted_ms,
        buckets,
        counted.topics,
    )
