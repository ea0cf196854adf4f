"""Server-sent events: visible messages to events, and the ids of events, which are positions, to offsets. No I/O.

The id of an event is the position after it: one offset for each queue, as in "12-7-0-4". A client that sends the last
id it has seen continues from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pyarrow as pa

from timeball.edges.http.codec import encode, instant_text, shown
from timeball.model import limits
from timeball.model.errors import InvalidMessage
from timeball.model.message import decode_properties, lateness_ms

EVENTS = "text/event-stream"
KEEP_ALIVE = b": still here\n\n"
RETRY_MS = 1_000  # the time after which a browser connects again
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


def offsets_of(last_event_id: str) -> list[int]:
    """Parse the offsets of an event id. Raises InvalidMessage."""
    found = last_event_id.strip()
    if len(found) > 20 * limits.QUEUES_PER_TOPIC_MAX or not _ID.fullmatch(found):
        raise InvalidMessage(f"Last-Event-ID {found[:40]!r}: give back the id of an event, as it stands")
    return [int(offset) for offset in found.split("-")]


def beginning(offsets: Sequence[int]) -> bytes:
    """Build the beginning of a stream: its position, for a client that disconnects before it has seen an event."""
    return b"retry: %d\nid: %s\n\n" % (RETRY_MS, id_of(offsets))


def id_of(offsets: Sequence[int]) -> bytes:
    """Format a position as an event id."""
    return "-".join(map(str, offsets)).encode()


def events(rows: pa.RecordBatch, offsets: Sequence[int]) -> bytes:
    """Encode rows in READ_SCHEMA as events, each with the position after it.

    `offsets` is the position before the first row.
    """
    position, parts = list(offsets), []
    for values in zip(*(rows.column(name).to_pylist() for name in _COLUMNS), strict=True):
        seq, queue, offset, store_ms, unique_key, body, tag, keys, properties, due_ms, accepted_ms = values
        text, raw = shown(body or b"")
        event = Event(
            seq, queue, offset, instant_text(store_ms), unique_key, text, raw, tag, (keys or "").split(),
            decode_properties(properties or ""),
        )  # fmt: skip
        if due_ms is not None:
            event.due, event.lateness_ms = instant_text(due_ms), lateness_ms(due_ms, accepted_ms, store_ms)
        position[queue] = offset + 1
        parts.append(b"id: %s\ndata: %s\n\n" % (id_of(position), encode(event)))
    return b"".join(parts)
