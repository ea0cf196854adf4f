"""The timer log: promises by slot, as chains of batches. Two mapped logs, links and entries.

    link     | prev      | slot      | first     | rows      | crc32c    |   40 bytes: a batch of one slot
             +-----------+-----------+-----------+-----------+-----------+
               the slot's              entries first … first + rows
               link before

    entry    | due_ms    | seq       | row_seq   | crc32c    |               32 bytes: a promise
             +-----------+-----------+-----------+-----------+
               its instant, its identity, and the row of the log that holds it

All little-endian int64; the checksum is mapped_log.py's, of the fields before it.

As in RocketMQ the ring knows the end of each slot's chain, and the chain leads backwards; but a link stands for all of
one batch that share a slot, so that a slot is walked and written in batches. A slot's first link has -1 as `prev`.

Nothing is ever changed but `row_seq`, which becomes negative, its complement, once the promise stands elsewhere,
durably. That is true whenever a restart may read it: either it sees the mark, or the log behind the checkpoint names
the new place.

Space is given back by *spans*, stretches of the log that end after so many entries or so many slots: a span whose
last slot is behind goes, and with it the claim on the rows of the commit log that it names.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from timeball.errors import Corrupt
from timeball.files import Files
from timeball.message import Int64Array
from timeball.schedule import generations
from timeball.schedule.columns import Columns
from timeball.schedule.generations import LogBounds
from timeball.schedule.locations import Waiting
from timeball.schedule.mapped_log import RecordArray, RecordType

LINK = np.dtype([("prev", "<i8"), ("slot", "<i8"), ("first", "<i8"), ("rows", "<i8")])
ENTRY = np.dtype([("due_ms", "<i8"), ("seq", "<i8"), ("row_seq", "<i8")])
LINKS, ENTRIES = RecordType(LINK), RecordType(ENTRY, marked="row_seq")

SPAN_ENTRIES = 1 << 16
SPANS_A_REACH = 64  # a span ends after this part of the ring has passed: an hour of three days

_NONE = np.empty(0, np.int64)


class Span(msgspec.Struct, array_like=True):
    """A stretch of the log: its first link and entry, when it began, its last slot, the oldest row it names."""

    first_link: int
    first_entry: int
    begun_slot: int
    last_slot: int
    first_row_seq: int


class LogState(msgspec.Struct, frozen=True):
    """How far the log goes."""

    links: tuple[int, int]
    entries: tuple[int, int]
    spans: list[Span]

    def logs(self) -> list[LogBounds]:
        """Return both logs, and how far they go."""
        return [("links", LINKS, *self.links), ("entries", ENTRIES, *self.entries)]


@dataclass(frozen=True, slots=True)
class Entries(Columns):
    """Promises found: their index in the log, the slot they wait in, and what the entry says."""

    index: Int64Array
    slot: Int64Array
    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array


class TimerLog:
    """Links and entries. `walk` runs in the reader thread, the rest on the event loop."""

    def __init__(self, files: Files, folder: str, reach: int, state: LogState | None) -> None:
        """Open the logs of a state, None for empty ones; `reach` is the ring's, in slots."""
        state = state or LogState((0, 0), (0, 0), [])
        self.links, self.entries = generations.open_logs(files, folder, state.logs())
        self._spans = [msgspec.structs.replace(span) for span in state.spans]
        self._span_slots = max(1, reach // SPANS_A_REACH)

    @property
    def first_row_seq(self) -> int | None:
        """Return the oldest row of the commit log that an entry may name."""
        return min((span.first_row_seq for span in self._spans), default=None)

    def append(
        self, slots: Int64Array, rows: Int64Array, prev: Int64Array, waiting: Waiting, bound: int
    ) -> Int64Array:
        """Add promises, of which the first rows[0] wait in slots[0] and so on; return the index of each link.

        `prev` is the end of each slot's chain so far; `bound` says how late it is, for the spans.
        """
        entries = np.empty(len(waiting), ENTRY)
        entries["due_ms"], entries["seq"], entries["row_seq"] = waiting.due_ms, waiting.seq, waiting.row_seq
        self._extend_span(int(slots.max()), int(waiting.row_seq.min()), bound)
        # Entries before links: on a full disk an entry without a link costs space; the other way round is a fault.
        first = self.entries.append(entries)
        links = np.empty(len(slots), LINK)
        links["prev"], links["slot"], links["rows"] = prev, slots, rows
        links["first"] = first + np.cumsum(rows) - rows
        return self.links.append(links) + np.arange(len(slots), dtype=np.int64)

    def walk(self, slots: Int64Array, last: Int64Array) -> Entries:
        """Return all that waits in these slots, whose chains end in these links (reader thread); raise Corrupt."""
        found = [np.empty(0, LINK)]
        while len(last):
            links = self.links.at(last)
            # Checksums hold for each record alone; that a chain leads backwards, and so ends, is checked here.
            if not bool(((links["slot"] == slots) & (links["prev"] < last) & (links["rows"] > 0)).all()):
                fault = "the chain of a slot is broken; start the broker again, and the ring is made anew"
                raise Corrupt(f"{self.links.folder}: {fault}")
            found.append(links)
            more = links["prev"] >= 0
            slots, last = slots[more], links["prev"][more]
        return self.entries_of(np.concatenate(found))

    def gone(self, index: Int64Array) -> None:
        """Mark these entries: their promises stand elsewhere now, durably."""
        self.entries.mark(index)

    def forget(self, low: int) -> None:
        """Give up entries of slots before `low`: their promises are settled, or stand elsewhere."""
        count = next((n for n, span in enumerate(self._spans) if span.last_slot >= low), len(self._spans))
        if not count:
            return
        del self._spans[:count]
        self.links.drop_below(self._spans[0].first_link if self._spans else self.links.end)
        self.entries.drop_below(self._spans[0].first_entry if self._spans else self.entries.end)

    # -- restarts --------------------------------------------------------------------------------------------------

    def state(self) -> LogState:
        """Return how far the logs go, for a checkpoint."""
        return LogState(
            (self.links.begin, self.links.end),
            (self.entries.begin, self.entries.end),
            [msgspec.structs.replace(span) for span in self._spans],
        )

    def gone_by_seq(self, seq: Int64Array) -> int:
        """Mark all entries of these promises, in one pass over the entries; return how many they were."""
        if not len(seq):
            return 0
        count, seq = 0, np.sort(seq)
        for begin, entries in self.entries.parts():
            seqs = entries["seq"]
            found = np.minimum(np.searchsorted(seq, seqs), len(seq) - 1)
            index = begin + np.flatnonzero(seq[found] == seqs)
            self.gone(index)
            count += len(index)
        return count

    def entries_of(self, links: RecordArray) -> Entries:
        """Return the promises of these links that do not stand elsewhere."""
        rows = links["rows"]
        ends = np.cumsum(rows)
        total = int(ends[-1]) if len(ends) else 0
        index = np.repeat(links["first"] - (ends - rows), rows) + np.arange(total, dtype=np.int64)
        entries = self.entries.at(index)
        columns = (np.ascontiguousarray(entries[name]) for name in ("due_ms", "seq", "row_seq"))
        found = Entries(index, np.repeat(links["slot"], rows), *columns)
        # A marked entry stands elsewhere: another entry has its promise.
        here = found.row_seq >= 0
        return found if here.all() else found.part(here)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _extend_span(self, last_slot: int, first_row_seq: int, bound: int) -> None:
        span = self._spans[-1] if self._spans else None
        if (
            span is None
            or self.entries.end - span.first_entry >= SPAN_ENTRIES
            or bound - span.begun_slot >= self._span_slots
        ):
            self._spans.append(Span(self.links.end, self.entries.end, bound, last_slot, first_row_seq))
            return
        # A span goes when its last slot is behind: one promise of next year keeps all of it, hence the bounds.
        span.last_slot = max(span.last_slot, last_slot)
        span.first_row_seq = min(span.first_row_seq, first_row_seq)
