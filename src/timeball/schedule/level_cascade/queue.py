"""One queue of the cascade: who waits for the end of a hop, on disk, first in, first out.

    … done … | opened: near, or on the move | stretch: waits on disk | stretch: … |
             low                            next                                  end

    entry   | hop_end_ms | due_ms    | seq       | at        | hops      | crc32c    |   48 bytes, little-endian
            +------------+-----------+-----------+-----------+-----------+-----------+

All wait equally long, so entries are sorted by the end of their hop as they come, and what is over is found by a
search. A clock that is set back breaks that, once a step, and so do promises that lie elsewhere in the log than in
its order, after a restart; then the queue is several *stretches*, each sorted by hop and by place, none blocking
another.

Opened entries stay until the promise is settled or stands elsewhere; `low` is the first of which that is not
known. Settled ones are known to `Settling`. Those that stand elsewhere are `gone`: named here as long as `low` is
before them, and saved, so that no restart finds a promise in two places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.files import Files
from timeball.message import Int64Array
from timeball.schedule.mapped_log import MappedLog, RecordArray, check

RECORD = np.dtype(
    [
        ("hop_end_ms", "<i8"),  # when the hop is over
        ("due_ms", "<i8"),
        ("seq", "<i8"),  # the promise
        ("at", "<i8"),  # the row of the log where it lies
        ("hops", "<i8"),  # the levels left when the hop is over
    ]
)
FILE_RECORDS = 1 << 17  # 5 MB, of 65 queues
PROBE = 4_096  # entries looked at in one go
CHUNK = 65_536

Mask = npt.NDArray[np.bool_]
IsSettled = Callable[[Int64Array, Int64Array], Mask]

_NONE = np.empty(0, np.int64)


class QueueState(msgspec.Struct, array_like=True):
    """One queue in a checkpoint."""

    number: int
    low: int
    end: int
    cuts: list[int]  # where stretches end, of those that end behind `low`
    gone: list[tuple[int, int]]  # (first, count) of entries from `low` on whose promises stand elsewhere


@dataclass(slots=True)
class Stretch:
    """Entries up to `end`, sorted; those from `next` on wait on disk."""

    next: int
    end: int
    head_ms: int  # when the hop of entry `next` is over
    last_ms: int  # and that of the last entry
    last_at: int


@dataclass(frozen=True, slots=True)
class Entries:
    """Columns of some entries."""

    index: Int64Array
    due_ms: Int64Array
    seq: Int64Array
    at: Int64Array
    hops: Int64Array

    def __len__(self) -> int:
        return len(self.index)

    def part(self, chosen: Mask) -> Entries:
        """Some of them."""
        if chosen.all():
            return self
        return Entries(*(getattr(self, name)[chosen] for name in self.__slots__))


class HopQueue:
    """See the module."""

    def __init__(self, files: Files, folder: str, number: int, state: QueueState | None = None) -> None:
        """Open what a checkpoint vouches for of a queue below `folder`; None: nothing."""
        state = state or QueueState(number, 0, 0, [], [])
        self.number, self.low = number, state.low
        self.log = MappedLog(
            files, _name(folder, number), RECORD, begin=state.low, end=state.end, file_records=FILE_RECORDS
        )
        self.head_ms: int | None = None  # the earliest end of a hop among those that wait on disk
        self._stretches = [
            self._stretch(begin, end)
            for begin, end in zip([state.low, *state.cuts], state.cuts, strict=False)
        ]
        self._opened: list[Entries] = []
        self._gone = np.concatenate(
            [_NONE, *(np.arange(first, first + count) for first, count in state.gone)]
        )
        self._find_head()

    @property
    def rows(self) -> int:
        """Entries that are not known to be done."""
        return self.unopened_rows + self.opened_rows

    @property
    def unopened_rows(self) -> int:
        """Those of them whose hop is not over."""
        rows = 0
        for stretch in self._stretches:
            gone = np.count_nonzero((self._gone >= stretch.next) & (self._gone < stretch.end))
            rows += stretch.end - stretch.next - int(gone)
        return rows

    @property
    def opened_rows(self) -> int:
        """Those that are opened, as of the last `advance`."""
        return sum(map(len, self._opened))

    def append(self, records: RecordArray) -> None:
        """Add entries whose hops are all over at one time, sorted by place."""
        begin = self.log.append(records)
        hop_end_ms, first_at = int(records["hop_end_ms"][0]), int(records["at"][0])
        last = self._stretches[-1] if self._stretches else None
        if last and last.last_ms <= hop_end_ms and last.last_at < first_at:
            if last.next == last.end:
                last.head_ms = hop_end_ms
            last.end, last.last_ms, last.last_at = self.log.end, hop_end_ms, int(records["at"][-1])
        else:
            self._stretches.append(
                Stretch(begin, self.log.end, hop_end_ms, hop_end_ms, int(records["at"][-1]))
            )
        self.head_ms = hop_end_ms if self.head_ms is None else min(self.head_ms, hop_end_ms)

    def take(self, until_ms: int, rows_max: int) -> Entries:
        """Open the first entries of the stretch whose hop ends first: those that end until then.

        The caller says with `hold` which of them are neither settled nor elsewhere at once.
        """
        stretch = min((s for s in self._stretches if s.next < s.end), key=lambda s: s.head_ms)
        parts: list[RecordArray] = []
        first, step = stretch.next, PROBE
        while stretch.next < stretch.end and stretch.next - first < rows_max:
            count = min(step, stretch.end - stretch.next, rows_max - (stretch.next - first))
            records = self.log.read(stretch.next, stretch.next + count)
            cut = int(np.searchsorted(records["hop_end_ms"], until_ms, side="right"))
            parts.append(records[:cut])
            stretch.next += cut
            if cut < count:
                stretch.head_ms = int(records["hop_end_ms"][cut])
                break
            step = CHUNK
        else:
            if stretch.next < stretch.end:
                stretch.head_ms = int(self.log.read(stretch.next, stretch.next + 1)["hop_end_ms"][0])
        self._find_head()
        entries = _entries(first, np.concatenate(parts))
        return entries.part(~np.isin(entries.index, self._gone)) if len(self._gone) else entries

    def hold(self, entries: Entries) -> None:
        """These, which were taken, are near or on the move."""
        if len(entries):
            self._opened.append(entries)

    def forget(self, index: Int64Array) -> None:
        """The promises of these entries, which are not held, stand elsewhere."""
        self._gone = np.concatenate([self._gone, index])

    def find(self, seq: Int64Array, begin: int) -> tuple[Int64Array, int]:
        """Which entries from `begin` on, of the next some thousands, are of these promises; where to go on."""
        end = min(begin + CHUNK, self.log.end)
        found = begin + np.flatnonzero(np.isin(self.log.read(begin, end)["seq"], seq))
        return found[~np.isin(found, self._gone)], end

    def advance(self, is_settled: IsSettled, moved_from: Int64Array) -> None:
        """Let go of opened entries that are done: settled, or moved from these places."""
        if self.low == self.log.end:
            return
        if self._opened:
            opened = _joined(self._opened)
            moved = np.isin(opened.at, moved_from)
            done = moved | is_settled(opened.due_ms, opened.seq)
            self.forget(opened.index[moved])
            opened = opened.part(~done)
            self._opened = [opened] if len(opened) else []
        waiting = [int(opened.index.min()) for opened in self._opened]
        waiting += [stretch.next for stretch in self._stretches if stretch.next < stretch.end]
        self.low = min(waiting, default=self.log.end)
        self._gone = self._gone[self._gone >= self.low]
        self._stretches = [stretch for stretch in self._stretches if stretch.end > self.low]
        self.log.drop_below(self.low)

    @property
    def first_at(self) -> int | None:
        """The oldest place of a promise that waits here, as of the last `advance`, or an older one."""
        places = [int(opened.at.min()) for opened in self._opened]
        heads = [stretch.next for stretch in self._stretches if stretch.next < stretch.end]
        if heads:
            places.append(int(self.log.at(np.array(heads))["at"].min()))
        return min(places, default=None)

    def state(self) -> QueueState:
        """For a checkpoint, after an `advance`."""
        cuts = [stretch.end for stretch in self._stretches]
        return QueueState(self.number, self.low, self.log.end, cuts, _ranges(np.sort(self._gone)))

    # -- inside ----------------------------------------------------------------------------------------------

    def _stretch(self, begin: int, end: int) -> Stretch:
        head, last = self.log.at(np.array([begin, end - 1]))
        return Stretch(begin, end, int(head["hop_end_ms"]), int(last["hop_end_ms"]), int(last["at"]))

    def _find_head(self) -> None:
        self.head_ms = min((s.head_ms for s in self._stretches if s.next < s.end), default=None)


def check_queue(files: Files, folder: str, state: QueueState) -> None:
    """Raise Corrupt with the file's name when an entry that a checkpoint vouches for is missing or damaged."""
    name = _name(folder, state.number)
    check(files, name, RECORD, begin=state.low, end=state.end, file_records=FILE_RECORDS)


def _name(folder: str, number: int) -> str:
    return f"{folder}/{number:02d}"


def _entries(first: int, records: RecordArray) -> Entries:
    columns = (np.ascontiguousarray(records[name]) for name in ("due_ms", "seq", "at", "hops"))
    return Entries(np.arange(first, first + len(records)), *columns)


def _joined(parts: list[Entries]) -> Entries:
    if len(parts) == 1:
        return parts[0]
    return Entries(*(np.concatenate([getattr(part, name) for part in parts]) for name in Entries.__slots__))


def _ranges(index: Int64Array) -> list[tuple[int, int]]:
    """Sorted indexes as (first, count)."""
    if len(index) == 0:
        return []
    begins = np.concatenate(([0], np.flatnonzero(np.diff(index) != 1) + 1))
    counts = np.diff(np.append(begins, len(index)))
    return list(zip(index[begins].tolist(), counts.tolist(), strict=True))
