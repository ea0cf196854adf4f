"""The timer log: who waits in which slot, as chains of batches. Two mapped logs, links and entries.

    link     | prev      | slot      | first     | rows      | crc32c    |   40 bytes: a batch of one slot
             +-----------+-----------+-----------+-----------+-----------+
               the slot's              entries first … first + rows
               link before

    entry    | due_ms    | seq       | at        | crc32c    |               32 bytes: a promise
             +-----------+-----------+-----------+-----------+
               its instant, its identity, and the row of the log that holds it

All little-endian int64; the checksum is mapped_log.py's, of the fields before it.

As in RocketMQ the ring knows the end of each slot's chain, and the chain leads backwards; but
a link stands for all promises of one batch that share a slot, so that a slot is walked in batches and written in
batches. `prev` is -1 in the first link of a slot.

Nothing is ever changed but `at`, which becomes negative, its
complement, once the promise stands elsewhere, durably. That is true whenever a restart may read it: either it sees
the mark, or the log behind the checkpoint names the new place.

Space is given back by *spans*, stretches of the log that end after so many entries or so many slots: a span whose
last slot is behind goes, and with it the claim on the rows of the commit log that it names.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.errors import Corrupt
from timeball.files import File, Files
from timeball.message import Int64Array
from timeball.schedule import mapped_log
from timeball.schedule.mapped_log import MappedLog, RecordArray

LINK = np.dtype([("prev", "<i8"), ("slot", "<i8"), ("first", "<i8"), ("rows", "<i8")])
ENTRY = np.dtype([("due_ms", "<i8"), ("seq", "<i8"), ("at", "<i8")])
MARKED = "at"

SCAN = 1 << 18  # records looked at in one go, some megabytes
SPAN_ENTRIES = 1 << 16
SPANS_A_REACH = 64  # a span ends after this part of the ring has passed: an hour of three days

_NONE = np.empty(0, np.int64)


class Span(msgspec.Struct, array_like=True):
    """A stretch of the log: its first link and entry, when it began, its last slot, the oldest row it names."""

    first_link: int
    first_entry: int
    begun_slot: int
    last_slot: int
    first_at: int


class LogState(msgspec.Struct, frozen=True):
    """How far the log goes."""

    links: tuple[int, int]
    entries: tuple[int, int]
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class Entries:
    """Promises found, in columns: their index in the log, the slot they wait in, and what the entry says."""

    index: Int64Array
    slot: Int64Array
    due_ms: Int64Array
    seq: Int64Array
    at: Int64Array

    def __len__(self) -> int:
        return len(self.seq)

    def part(self, chosen: npt.NDArray[np.bool_] | slice) -> Entries:
        """Some of them."""
        return Entries(
            self.index[chosen], self.slot[chosen], self.due_ms[chosen], self.seq[chosen], self.at[chosen]
        )


class TimerLog:
    """See the module. `walk` is for the reader thread, the rest for the event loop."""

    def __init__(self, files: Files, folder: str, reach: int, state: LogState | None) -> None:
        """`reach` is that of the ring, in slots; None: an empty log."""
        links, entries = ((0, 0), (0, 0)) if state is None else (state.links, state.entries)
        self.links = MappedLog(files, f"{folder}/links", LINK, begin=links[0], end=links[1])
        self.entries = MappedLog(
            files, f"{folder}/entries", ENTRY, begin=entries[0], end=entries[1], marked=MARKED
        )
        self._spans: list[Span] = [] if state is None else [msgspec.structs.replace(s) for s in state.spans]
        self._span_slots = max(1, reach // SPANS_A_REACH)

    @property
    def first_at(self) -> int | None:
        """The oldest row of the commit log that an entry may name."""
        return min((span.first_at for span in self._spans), default=None)

    def append(
        self, slots: Int64Array, rows: Int64Array, prev: Int64Array, entries: RecordArray, bound: int
    ) -> Int64Array:
        """Add `entries`, of which the first rows[0] wait in slots[0] and so on; returns the index of each link.

        `prev` is the end of each slot's chain so far; `bound` says how late it is, for the spans.
        """
        self._extend_span(int(slots.max()), int(entries["at"].min()), bound)
        first = self.entries.append(entries)
        links = np.empty(len(slots), LINK)
        links["prev"], links["slot"], links["rows"] = prev, slots, rows
        links["first"] = first + np.cumsum(rows) - rows
        return self.links.append(links) + np.arange(len(slots), dtype=np.int64)

    def walk(self, slots: Int64Array, last: Int64Array) -> Entries:
        """All that waits in these slots, whose chains end in these links (reader thread); raises Corrupt."""
        found = [np.empty(0, LINK)]
        while len(last):
            links = self.links.at(last)
            if not bool(((links["slot"] == slots) & (links["prev"] < last) & (links["rows"] > 0)).all()):
                raise Corrupt(
                    f"{self.links.folder}: the chain of a slot is broken; start the broker again, and the "
                    "ring is made anew from the links"
                )
            found.append(links)
            more = links["prev"] >= 0
            slots, last = slots[more], links["prev"][more]
        return self._entries_of(np.concatenate(found))

    def gone(self, index: Int64Array) -> None:
        """These entries' promises stand elsewhere now, durably."""
        self.entries.mark(index)

    def forget(self, low: int) -> None:
        """What waits in slots before `low` is settled, or gone."""
        count = 0
        while count < len(self._spans) and self._spans[count].last_slot < low:
            count += 1
        if not count:
            return
        del self._spans[:count]
        following = self._spans[0] if self._spans else None
        self.links.drop_below(self.links.end if following is None else following.first_link)
        self.entries.drop_below(self.entries.end if following is None else following.first_entry)

    # -- restarts --------------------------------------------------------------------------------------------------

    def state(self) -> LogState:
        """For a checkpoint."""
        return LogState(
            (self.links.begin, self.links.end),
            (self.entries.begin, self.entries.end),
            [msgspec.structs.replace(span) for span in self._spans],
        )

    def link_parts(self) -> list[tuple[int, int]]:
        """[begin, end) of all links, in parts to be looked at one by one."""
        begins = range(self.links.begin, self.links.end, SCAN)
        return [(begin, min(begin + SCAN, self.links.end)) for begin in begins]

    def in_slots(self, low: int, high: int) -> Entries:
        """All that waits in slots [low, high), found without the ring: one pass over the links."""
        found = [np.empty(0, LINK)]
        for begin, end in self.link_parts():
            links = self.links.read(begin, end)
            found.append(links[(links["slot"] >= low) & (links["slot"] < high)])
        return self._entries_of(np.concatenate(found))

    def gone_by_seq(self, seq: Int64Array) -> int:
        """No entry names the place of these promises any more: one pass over the entries. Returns how many did."""
        count, seq = 0, np.sort(seq)
        if not len(seq):
            return 0
        for begin in range(self.entries.begin, self.entries.end, SCAN):
            seqs = self.entries.read(begin, min(begin + SCAN, self.entries.end))["seq"]
            found = np.minimum(np.searchsorted(seq, seqs), len(seq) - 1)
            index = begin + np.flatnonzero(seq[found] == seqs)
            self.gone(index)
            count += len(index)
        return count

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """As of a MappedLog, for both."""
        return [(log.folder, log.files_to_sync()) for log in (self.links, self.entries)]

    def sync_failed(self) -> None:
        """As of a MappedLog, for both."""
        self.links.sync_failed()
        self.entries.sync_failed()

    def close(self) -> None:
        """Let go of the files."""
        self.links.close()
        self.entries.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _extend_span(self, last_slot: int, first_at: int, bound: int) -> None:
        span = self._spans[-1] if self._spans else None
        if (
            span is None
            or self.entries.end - span.first_entry >= SPAN_ENTRIES
            or bound - span.begun_slot >= self._span_slots
        ):
            self._spans.append(Span(self.links.end, self.entries.end, bound, last_slot, first_at))
            return
        span.last_slot, span.first_at = max(span.last_slot, last_slot), min(span.first_at, first_at)

    def _entries_of(self, links: RecordArray) -> Entries:
        rows = links["rows"]
        ends = np.cumsum(rows)
        total = int(ends[-1]) if len(ends) else 0
        index = np.repeat(links["first"] - (ends - rows), rows) + np.arange(total, dtype=np.int64)
        entries = self.entries.at(index)
        found = Entries(
            index,
            np.repeat(links["slot"], rows),
            np.ascontiguousarray(entries["due_ms"]),
            np.ascontiguousarray(entries["seq"]),
            np.ascontiguousarray(entries["at"]),
        )
        here = found.at >= 0
        return found if here.all() else found.part(here)


def check(files: Files, folder: str, state: LogState) -> None:
    """Raise Corrupt with the file's name when a record of a log in this state is missing or damaged."""
    for name, record, bounds, marked in (
        ("links", LINK, state.links, None),
        ("entries", ENTRY, state.entries, MARKED),
    ):
        mapped_log.check(files, f"{folder}/{name}", record, begin=bounds[0], end=bounds[1], marked=marked)


def entries_of(due_ms: Int64Array, seq: Int64Array, at: Int64Array) -> RecordArray:
    """Entries from columns."""
    entries = np.empty(len(seq), ENTRY)
    entries["due_ms"], entries["seq"], entries["at"] = due_ms, seq, at
    return entries
