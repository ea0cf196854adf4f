"""Server-sent events: visible messages to events, and their ids, which are positions, to offsets. No I/O.

The id of an event is the position behind it, an offset for each queue: "12-7-0-4". A client that gives the last id it
saw goes on from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pyarrow as pa

from timeball import limits
from timeball.errors import InvalidMessage
from timeball.message import decode_properties, lateness_ms
from timeball.protocols.http.codec import encode, instant_text, shown

EVENTS = "text/event-stream"
KEEP_ALIVE = b": still here\n\n"
RETRY_MS = 1_000  # after which a browser connects again
_ID = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})*")
_COLUMNS = (
    "seq", "queue_id", "queue_offset", "store_ms", "unique_key", "body", "tag", "keys", "properties", "due_ms",
    "accepted_ms",
)  # fmt: skip


class Event(msgspec.Struct, omit_defaults=True):
    """A visible message. `base64`: a body that is no UTF-8."""

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
    """Return the offsets that an id names; raise InvalidMessage."""
    found = last_event_id.strip()
    if len(found) > 20 * limits.QUEUES_PER_TOPIC_MAX or not _ID.fullmatch(found):
        raise InvalidMessage(f"Last-Event-ID {found[:40]!r}: give back the id of an event, as it stands")
    return [int(offset) for offset in found.split("-")]


def beginning(offsets: Sequence[int]) -> bytes:
    """Return what a stream begins with: its position, also for a client that sees no event before it goes."""
    return b"retry: %d\nid: %s\n\n" % (RETRY_MS, id_of(offsets))


def id_of(offsets: Sequence[int]) -> bytes:
    """Return the id of a position."""
    return "-".join(map(str, offsets)).encode()


def events(rows: pa.RecordBatch, offsets: Sequence[int]) -> bytes:
    """Return READ_SCHEMA rows of queues as events, each with the position behind it; `offsets`: the one before."""
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
