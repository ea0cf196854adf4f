"""The timer log: messages by slot, as chains of batches. It consists of two mapped logs, links and entries.

    link     | prev      | slot      | first     | rows      | crc32c    |   40 bytes: a batch of one slot
             +-----------+-----------+-----------+-----------+-----------+
               the slot's              entries first … first + rows
               link before

    entry    | due_ms    | seq       | row_seq   | crc32c    |               32 bytes: a scheduled message
             +-----------+-----------+-----------+-----------+
               its due time, the row of the log that set it, and the row that contains the message now

All fields are little-endian int64. The checksum is that of mapped_log.py, over the fields before it.

As in RocketMQ, the ring contains the newest link of each slot's chain, and each link refers to the one before it.
Unlike in RocketMQ, a link covers all messages of one batch that share a slot, so slots are read and written in batches.
The first link of a slot has -1 as `prev`.

No field is ever changed except `row_seq`. It is replaced by its complement, which is negative, when the message durably
has another entry (the *mark*). A power cut may lose the mark. Then the commit log after the checkpoint contains the new
location, and the restart marks the entry again.

Space is freed by *spans*, parts of the log that end after a number of entries or slots. When the last slot of a span is
delivered, the span is dropped, and the rows of the commit log to which it refers are no longer needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from timeball.io.files import Files
from timeball.model.errors import Corrupt
from timeball.model.message import Int64Array
from timeball.schedule import generations
from timeball.schedule.columns import Columns
from timeball.schedule.generations import LogBounds
from timeball.schedule.locations import Waiting
from timeball.schedule.mapped_log import RecordArray, RecordType

LINK = np.dtype([("prev", "<i8"), ("slot", "<i8"), ("first", "<i8"), ("rows", "<i8")])
ENTRY = np.dtype([("due_ms", "<i8"), ("seq", "<i8"), ("row_seq", "<i8")])
LINKS, ENTRIES = RecordType(LINK), RecordType(ENTRY, marked="row_seq")

# Entries after which a span ends.
SPAN_ENTRIES = 1 << 16
# A span ends after this fraction of the ring has passed: an hour, with a ring of three days.
SPANS_A_REACH = 64

_NONE = np.empty(0, np.int64)


class Span(msgspec.Struct, array_like=True):
    """A part of the log: its first link and entry, the ring's `bound` at its begin, its last slot, its oldest row."""

    first_link: int
    first_entry: int
    begun_slot: int
    last_slot: int
    first_row_seq: int


class LogState(msgspec.Struct, frozen=True):
    """The bounds of both logs, and the spans."""

    links: tuple[int, int]
    entries: tuple[int, int]
    spans: list[Span]

    def logs(self) -> list[LogBounds]:
        """List both logs with their bounds."""
        return [("links", LINKS, *self.links), ("entries", ENTRIES, *self.entries)]


@dataclass(frozen=True, slots=True)
class Entries(Columns):
    """Entries that were read: the index in the log, the slot, and the fields of the entry."""

    index: Int64Array
    slot: Int64Array
    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array


class TimerLog:
    """Links and entries. `walk` runs in the reader thread, the rest on the event loop."""

    def __init__(self, files: Files, folder: str, reach: int, state: LogState | None) -> None:
        """Open the logs of a state, or empty logs. `reach` is that of the ring, in slots."""
        state = state or LogState((0, 0), (0, 0), [])
        self.links, self.entries = generations.open_logs(files, folder, state.logs())
        self._spans = [msgspec.structs.replace(span) for span in state.spans]
        self._span_slots = max(1, reach // SPANS_A_REACH)

    @property
    def first_row_seq(self) -> int | None:
        """The oldest row of the commit log that an entry may refer to. None if there are no entries."""
        return min((span.first_row_seq for span in self._spans), default=None)

    def append(
        self, slots: Int64Array, rows: Int64Array, prev: Int64Array, waiting: Waiting, bound: int
    ) -> Int64Array:
        """Append messages. The first rows[0] of them belong to slots[0], and so on. Returns the index of each new link.

        `prev` contains the newest link of each slot so far, or -1. `bound` is that of the ring, for the spans.
        """
        entries = np.empty(len(waiting), ENTRY)
        entries["due_ms"], entries["seq"], entries["row_seq"] = waiting.due_ms, waiting.seq, waiting.row_seq
        self._extend_span(int(slots.max()), int(waiting.row_seq.min()), bound)
        # Entries first: if the disk becomes full, entries without a link only take space, but a link without entries
        # would be damage.
        first = self.entries.append(entries)
        links = np.empty(len(slots), LINK)
        links["prev"], links["slot"], links["rows"] = prev, slots, rows
        links["first"] = first + np.cumsum(rows) - rows
        return self.links.append(links) + np.arange(len(slots), dtype=np.int64)

    def walk(self, slots: Int64Array, last: Int64Array) -> Entries:
        """Read all entries of these slots, whose chains end in the links `last` (reader thread). Raise Corrupt."""
        link_batches = [np.empty(0, LINK)]
        while len(last):
            links = self.links.at(last)
            # The checksums cover single records. This checks the chain: each link refers to an earlier one of its slot.
            if not bool(((links["slot"] == slots) & (links["prev"] < last) & (links["rows"] > 0)).all()):
                fault = "the chain of a slot is broken; start the broker again, and the ring is made anew"
                raise Corrupt(f"{self.links.folder}: {fault}")
            link_batches.append(links)
            has_previous = links["prev"] >= 0
            slots, last = slots[has_previous], links["prev"][has_previous]
        return self.entries_of(np.concatenate(link_batches))

    def mark_moved(self, index: Int64Array) -> None:
        """Mark these entries, because their messages durably have another entry."""
        self.entries.mark(index)

    def forget(self, low: int) -> None:
        """Drop the spans of slots before `low`: their messages are settled, or have another entry."""
        count = next((n for n, span in enumerate(self._spans) if span.last_slot >= low), len(self._spans))
        if not count:
            return
        del self._spans[:count]
        self.links.drop_below(self._spans[0].first_link if self._spans else self.links.end)
        self.entries.drop_below(self._spans[0].first_entry if self._spans else self.entries.end)

    # -- restarts --------------------------------------------------------------------------------------------------

    def state(self) -> LogState:
        """Build the bounds and spans for a checkpoint."""
        return LogState(
            (self.links.begin, self.links.end),
            (self.entries.begin, self.entries.end),
            [msgspec.structs.replace(span) for span in self._spans],
        )

    def mark_moved_by_seq(self, seq: Int64Array) -> int:
        """Mark all entries of these messages, in one pass over the log. Returns the number of marked entries."""
        if not len(seq):
            return 0
        count, seq = 0, np.sort(seq)
        for begin, entries in self.entries.parts():
            seqs = entries["seq"]
            indexes = np.minimum(np.searchsorted(seq, seqs), len(seq) - 1)
            index = begin + np.flatnonzero(seq[indexes] == seqs)
            self.mark_moved(index)
            count += len(index)
        return count

    def entries_of(self, links: RecordArray) -> Entries:
        """Read the entries of these links, without the marked ones."""
        rows = links["rows"]
        ends = np.cumsum(rows)
        total = int(ends[-1]) if len(ends) else 0
        index = np.repeat(links["first"] - (ends - rows), rows) + np.arange(total, dtype=np.int64)
        entries = self.entries.at(index)
        columns = (np.ascontiguousarray(entries[name]) for name in ("due_ms", "seq", "row_seq"))
        result = Entries(index, np.repeat(links["slot"], rows), *columns)
        # Marked entries are skipped: their messages have another entry.
        is_valid = result.row_seq >= 0
        return result if is_valid.all() else result.part(is_valid)

    # -- internals -------------------------------------------------------------------------------------------------

    def _extend_span(self, last_slot: int, first_row_seq: int, bound: int) -> None:
        """Add a batch to the last span, or to a new one if the last span is large enough."""
        span = self._spans[-1] if self._spans else None
        if (
            span is None
            or self.entries.end - span.first_entry >= SPAN_ENTRIES
            or bound - span.begun_slot >= self._span_slots
        ):
            self._spans.append(Span(self.links.end, self.entries.end, bound, last_slot, first_row_seq))
            return
        # A span is dropped only after its last slot, which may be far away, so the limits above keep spans small.
        span.last_slot = max(span.last_slot, last_slot)
        span.first_row_seq = min(span.first_row_seq, first_row_seq)
