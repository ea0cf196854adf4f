"""Encodes visible messages as server-sent events, and parses the ids of events. No I/O.

The id of an event is the position after it: one offset for each queue, as in "12-7-0-4". A client that sends the last
id it has seen continues from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pyarrow as pa

from timeball.edges.http.codec import encode, format_time, text_or_bytes
from timeball.model import limits
from timeball.model.errors import InvalidMessage
from timeball.model.message import decode_properties, lateness_ms

EVENTS = "text/event-stream"
KEEP_ALIVE = b": still here\n\n"
RETRY_MS = 1_000  # after this time a browser connects again
_ID = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})*")
_COLUMNS = (
    "seq", "queue_id", "queue_offset", "store_ms", "unique_key", "body", "tag", "keys", "properties", "due_ms",
    "accepted_ms",
)  # fmt: skip


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


def encode_events(rows: pa.RecordBatch, offsets: Sequence[int]) -> bytes:
    """Encode rows in READ_SCHEMA as events, each with the position after it.

    `offsets` is the position before the first row.
    """
    position, encoded = list(offsets), []
    for values in zip(*(rows.column(name).to_pylist() for name in _COLUMNS), strict=True):
        seq, queue, offset, store_ms, unique_key, body, tag, keys, properties, due_ms, accepted_ms = values
        text, not_utf8 = text_or_bytes(body or b"")
        event = Event(
            seq, queue, offset, format_time(store_ms), unique_key, text, not_utf8, tag, (keys or "").split(),
            decode_properties(properties or ""),
        )  # fmt: skip
        if due_ms is not None:
            event.due, event.lateness_ms = format_time(due_ms), lateness_ms(due_ms, accepted_ms, store_ms)
        position[queue] = offset + 1
        encoded.append(b"id: %s\ndata: %s\n\n" % (format_event_id(position), encode(event)))
    return b"".join(encoded)
