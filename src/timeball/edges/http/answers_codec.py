"""Codec of the HTTP answers: structs for JSON, server-sent events, and pages and forecasts of pending messages. No I/O.

The structs are built from the results of the broker's verbs. model/http_api.py has those that clients use, too, and the
rules for all of them.

The ids of events and the queries for pending messages are parsed here, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import msgspec
import pyarrow as pa

from timeball.edges.http.codec import body_fields, encode, format_time, text_or_bytes
from timeball.model import limits, time_parsing
from timeball.model.answers import (
    BucketUnit,
    Campaign,
    DeadLetterPage,
    DeadLetterRow,
    DueCounts,
    GroupPlace,
    MessagePlace,
    PageRequest,
    PendingPage,
    Verdict,
)
from timeball.model.bodies import readable_body
from timeball.model.errors import InvalidMessage, OutOfRange
from timeball.model.http_api import (
    DeadLetter,
    DeadLetters,
    Dealt,
    DealtMany,
    GroupAt,
    Place,
    Settled,
)
from timeball.model.message import decode_properties, lateness_ms
from timeball.monitoring.figures import ReplicaGroup

# ---- structs of the answers ----------------------------------------------------------------------------------


class Granted(msgspec.Struct, omit_defaults=True):
    """A reschedule or cancel that was carried out: `verdict` is rescheduled or cancelled."""

    id: str
    seq: int | None
    verdict: str
    at: str | None = None
    due: str | None = None
    due_ms: int | None = None


class CampaignShown(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A campaign, and its state since the time `since`: planned, running, paused, cancelled or finished.

    `groups`: in a cluster, the groups that each store a part of its messages.
    """

    campaign: str
    state: str
    since_ms: int
    since: str
    planned_ms: int
    planned: str
    planned_seq: int
    rows: int
    ranges: list[tuple[int, int]] | None = None
    held_from_ms: int | None = None
    held_from: str | None = None
    cancelled: int | None = None
    repeated: bool | None = None
    count: int | None = None
    shift_ms: int | None = None
    groups: list[str] = []


class Campaigns(msgspec.Struct):
    """Campaigns, without their ranges."""

    campaigns: list[CampaignShown]


class Jobs(msgspec.Struct, omit_defaults=True):
    """Reports of the pipeline's jobs, as the jobs wrote them, and the report of the last audit, if there was one."""

    jobs: list[dict[str, Any]]
    audit: dict[str, Any] | None = None


class TopicSize(msgspec.Struct):
    """A topic, and the current number of its queues."""

    topic: str
    queues: int


class TopicDeleted(msgspec.Struct):
    """A topic that was deleted.

    `unread`: messages that consumer groups had not read. `dead_letters`: the dead letters in the topic, if it held
    those of a group. `pending`: pending messages of the topic, which create it again when they are due. Without
    `pending` they are too many to count.
    """

    topic: str
    unread: int
    dead_letters: int
    pending: int | None = None
    verdict: str = "deleted"


class SubscriptionDeleted(msgspec.Struct):
    """A push subscription that was deleted."""

    name: str
    verdict: str = "deleted"


class Health(msgspec.Struct):
    """The status "live" or "ready"."""

    status: str


class ReleasedMessage(msgspec.Struct, omit_defaults=True):
    """A message that became visible while a manual clock was advanced. Times are those of the broker's clock."""

    topic: str
    due: str
    due_ms: int
    id: str | None = None
    keys: list[str] = []


class ClockState(msgspec.Struct, omit_defaults=True):
    """The time of a manual clock, the number of messages that an advance released, and the first 1,000 of them."""

    now: str
    now_ms: int
    released_rows: int | None = None
    released: list[ReleasedMessage] | None = None


class Leads(msgspec.Struct):
    """The leader of a cluster group, and the role of this node. Only the leader answers with status 200."""

    group: str
    leader: str
    role: str


class ReplicaGroups(msgspec.Struct):
    """The groups of the cluster, ordered by name."""

    groups: list[ReplicaGroup]


def clock_answer(
    now_ms: int, released_rows: int | None = None, released: list[ReleasedMessage] | None = None
) -> ClockState:
    """Build the answer of a manual clock."""
    return ClockState(format_time(now_ms), now_ms, released_rows, released)


def released_messages(rows: pa.RecordBatch) -> list[ReleasedMessage]:
    """Build the list of released messages from READ_SCHEMA rows."""
    columns = (rows.column(name).to_pylist() for name in ("topic", "due_ms", "unique_key", "keys"))
    return [
        ReleasedMessage(topic, format_time(due_ms), due_ms, unique_key, (keys or "").split())
        for topic, due_ms, unique_key, keys in zip(*columns, strict=True)
    ]


def show_message(message: MessagePlace) -> Place:
    """Build the answer that shows the state and location of a message, and its content if the caller may see it."""
    place = Place(
        state=message.state, seq=message.seq, topic=message.topic, queue_id=message.queue_id,
        queue_offset=message.queue_offset, at_ms=message.at_ms, due_ms=message.due_ms,
        at=_format_optional_time(message.at_ms), due=_format_optional_time(message.due_ms),
        groups=[_show_group(group) for group in message.groups], by=message.by, reason=message.reason,
        content_cut=message.content_cut,
    )  # fmt: skip
    content = message.content
    if content is None:
        return place
    body = body_fields(content.body, content.size_bytes)
    return msgspec.structs.replace(
        place, keys=content.keys, properties=content.properties, tag=content.tag, **body
    )


def show_verdict(verdict: Verdict) -> Granted:
    """Build the answer to a reschedule or cancel that was carried out."""
    return Granted(
        verdict.subject,
        verdict.seq,
        verdict.verdict,
        _format_optional_time(verdict.at_ms),
        _format_optional_time(verdict.due_ms),
        verdict.due_ms,
    )


def show_verdicts(verdicts: Sequence[Verdict]) -> list[Settled]:
    """Build the outcomes in the answer (`SettledMany`) to a cancel or reschedule of several messages."""
    return [
        Settled(
            each.subject, each.verdict, each.seq, _format_optional_time(each.at_ms), each.at_ms,
            _format_optional_time(each.due_ms), each.due_ms,
        )
        for each in verdicts
    ]  # fmt: skip


def show_dead_letters(page: DeadLetterPage) -> DeadLetters:
    """Build the answer that shows a page of dead letters."""
    return DeadLetters([_show_dead_letter(row) for row in page.dead_letters], page.next_page)


def show_outcomes(handles: Sequence[str], was_found: Sequence[bool], count: int, verdict: str) -> DealtMany:
    """Build the answer to a resend or delete of `count` dead letters.

    `was_found` has for each handle whether the dead letter existed. `verdict` is the outcome of those that did.
    """
    pairs = zip(handles, was_found, strict=True)
    return DealtMany(
        count, [Dealt(handle, verdict if is_found else "not_found") for handle, is_found in pairs]
    )


def show_campaign(campaign: Campaign) -> CampaignShown:
    """Build the answer that shows a campaign."""
    fields = msgspec.structs.asdict(campaign)
    return CampaignShown(
        **fields, since=format_time(campaign.since_ms), planned=format_time(campaign.planned_ms),
        held_from=_format_optional_time(campaign.held_from_ms),
    )  # fmt: skip


def _show_dead_letter(row: DeadLetterRow) -> DeadLetter:
    """Build the answer that shows a dead letter. Its body is shown as text or base64."""
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(row).items()
        if name not in ("body", "size_bytes")
    }
    return DeadLetter(**fields, died=format_time(row.died_ms), **body_fields(row.body, row.size_bytes))


def _show_group(group: GroupPlace) -> GroupAt:
    return GroupAt(
        group.group, group.state, group.attempts, _format_optional_time(group.until_ms), group.until_ms
    )


def _format_optional_time(time_ms: int | None) -> str | None:
    return None if time_ms is None else format_time(time_ms)


# ---- server-sent events --------------------------------------------------------------------------------------
# The id of an event is the position after it: one offset for each queue, as in "12-7-0-4". A client that sends the last
# id it has seen continues from there.

EVENTS = "text/event-stream"
KEEP_ALIVE = b": still here\n\n"
RETRY_MS = 1_000  # after this time a browser connects again
_ID = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})*")
_COLUMNS = (
    "seq", "queue_id", "queue_offset", "store_ms", "unique_key", "body", "tag", "keys", "properties", "due_ms",
    "accepted_ms", "sys_flag",
)  # fmt: skip
# Of the events of one read together. A compressed body may become a thousand times as large.
EVENTS_BYTES_MAX = 2 * limits.POP_BYTES_MAX


class Event(msgspec.Struct, omit_defaults=True):
    """A visible message. `base64` holds a body that is not UTF-8."""

    seq: int
    queue: int
    offset: int
    released: str
    id: str | None = None
    body: str | None = None
    base64: bytes | None = None
    tag: str | None = None
    keys: list[str] = []
    properties: dict[str, str] = {}
    due: str | None = None
    lateness_ms: int | None = None


def parse_event_id(last_event_id: str) -> list[int]:
    """Parse an event id to the offsets of the queues. Raises InvalidMessage."""
    text = last_event_id.strip()
    if len(text) > 20 * limits.QUEUES_PER_TOPIC_MAX or not _ID.fullmatch(text):
        raise InvalidMessage(f"Last-Event-ID {text[:40]!r}: give back the id of an event, as it stands")
    return [int(offset) for offset in text.split("-")]


def stream_start(offsets: Sequence[int]) -> bytes:
    """Encode the start of a stream. It has the position, for a client that disconnects before its first event."""
    return b"retry: %d\nid: %s\n\n" % (RETRY_MS, format_event_id(offsets))


def format_event_id(offsets: Sequence[int]) -> bytes:
    """Format the offsets of the queues as an event id."""
    return "-".join(map(str, offsets)).encode()


def encode_events(rows: pa.RecordBatch, offsets: Sequence[int]) -> tuple[bytes, tuple[int, ...] | None]:
    """Encode rows in READ_SCHEMA as events, each with the position after it.

    `offsets` is the position before the first row. Returns the events, and None if all rows are in them. If the events
    exceed EVENTS_BYTES_MAX, the following rows are left out, and the second value is the position before those.
    """
    position, encoded, free_bytes = list(offsets), list[bytes](), EVENTS_BYTES_MAX
    for values in zip(*(rows.column(name).to_pylist() for name in _COLUMNS), strict=True):
        if free_bytes < 0:
            return b"".join(encoded), tuple(position)
        (
            seq, queue, offset, store_ms, unique_key, body, tag, keys, properties, due_ms, accepted_ms, sys_flag,
        ) = values  # fmt: skip
        text, not_utf8 = text_or_bytes(readable_body(body or b"", sys_flag))
        event = Event(
            seq, queue, offset, format_time(store_ms), unique_key, text, not_utf8, tag, (keys or "").split(),
            decode_properties(properties or ""),
        )  # fmt: skip
        if due_ms is not None:
            event.due, event.lateness_ms = format_time(due_ms), lateness_ms(due_ms, accepted_ms, store_ms)
        position[queue] = offset + 1
        encoded.append(b"id: %s\ndata: %s\n\n" % (format_event_id(position), encode(event)))
        free_bytes -= len(encoded[-1])
    return b"".join(encoded), None


# ---- pending messages: queries, pages and forecasts ----------------------------------------------------------

PAGE_ROWS = 100
_PAGE = re.compile(r"([0-9]{1,18})-([0-9]{1,19})")


class Waiting(msgspec.Struct, omit_defaults=True):
    """A pending message. `seq` is its number in the log, which also identifies it in other tools.

    It is `held` by a selection or a paused campaign: not released before a resume.
    """

    topic: str
    due: str
    due_ms: int
    seq: int
    size_bytes: int
    id: str | None = None
    keys: list[str] = []
    tag: str | None = None
    campaign: str | None = None
    held: bool = False


class WaitingPage(msgspec.Struct, omit_defaults=True):
    """Pending messages by due time. `next_page`, as ?page=, leads to the next ones; the last page has none."""

    messages: list[Waiting]
    next_page: str | None = None


class Bucket(msgspec.Struct, omit_defaults=True):
    """An interval of time: its start, and the number of messages due in it.

    `recurring`: the number of later occurrences of recurring schedules in it, which are no messages yet.
    """

    from_ms: int
    due: int
    recurring: int = 0


class Forecast(msgspec.Struct, omit_defaults=True):
    """The number of messages due in [from_ms, to_ms), by bucket and by topic. They were counted at the time `counted`.

    Buckets and topics without messages are left out. `recurring` has the occurrences by topic. With `recurring_to_ms`
    there were too many of them: they are counted up to this time.
    """

    by: str
    from_ms: int
    to_ms: int
    counted: str
    counted_ms: int
    buckets: list[Bucket]
    topics: dict[str, int]
    recurring: dict[str, int] = {}
    recurring_to_ms: int | None = None


def parse_page_query(query: Mapping[str, str]) -> PageRequest:
    """Parse the query for a page of pending messages. Raises InvalidMessage, InvalidDelay and OutOfRange.

    Only the form of `max` is checked here. The broker checks its range.
    """
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
    return PageRequest(int(rows), query.get("topic"), query.get("key"), from_ms, to_ms, after)


def parse_unit(text: str) -> BucketUnit:
    """Parse the length of the buckets of a forecast. Raises OutOfRange."""
    for unit in get_args(BucketUnit):
        if unit == text:
            return cast(BucketUnit, unit)
    raise OutOfRange(f"by={text[:20]}: second, minute, hour or day")


def parse_window(query: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Parse the window of ?from=&to=, in ms since 1970, with None for a missing bound. Raises InvalidDelay."""
    from_ms, to_ms = (
        time_parsing.due_ms(query[name], name) if name in query else None for name in ("from", "to")
    )
    return from_ms, to_ms


def page_answer(page: PendingPage) -> WaitingPage:
    """Build the answer for a page of pending messages."""
    messages = [
        Waiting(
            message.topic, format_time(message.due_ms), message.due_ms, message.seq, message.size_bytes,
            message.unique_key, (message.keys or "").split(), message.tag, message.campaign,
            message.is_held,
        )
        for message in page.messages
    ]  # fmt: skip
    return WaitingPage(messages, None if page.next_page is None else "-".join(map(str, page.next_page)))


def forecast_answer(counts: DueCounts) -> Forecast:
    """Build the answer for a forecast. A bucket is in it if messages or occurrences are due in it."""
    due, recurring = dict(counts.buckets), dict(counts.recurring)
    buckets = [Bucket(ms, due.get(ms, 0), recurring.get(ms, 0)) for ms in sorted({*due, *recurring})]
    return Forecast(
        counts.by,
        counts.from_ms,
        counts.to_ms,
        format_time(counts.counted_ms),
        counts.counted_ms,
        buckets,
        counts.topics,
        counts.recurring_topics,
        counts.recurring_to_ms if counts.recurring_to_ms < counts.to_ms else None,
    )
