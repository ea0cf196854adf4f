"""The slots of `timer_wheel`, and the ring: one mapped file with the end of each slot's chain in the timer log.

    byte  0                8          12         16
          +----------------+----------+----------+
          | last           | lap      | rows     |   little-endian, 16 bytes a slot
          +----------------+----------+----------+
            newest link      slot //    placed in
            of the slot      count      the slot; 0: unused

Slot n is at byte (n mod count) * 16. Several slots share this position, and `lap` distinguishes them. With slots of
1000 ms and three days the ring takes 4 MB, with slots of 1 ms 4 GB. The space is allocated when the ring is made, so a
full disk is an error at the start instead of a fault when a page is written. The ring is never synced, and no start
reads it: each start makes an empty ring and pushes the durable links of the timer log, which have checksums.

Slots are numbered for ever, due time // precision. Counted from `bound`, the first slot that is not opened:

    … | low … handed out, not all durable … | bound … in reach … | bound + reach
    <------------------------------ count ------------------------------------>

The reach is a length of *time*: a finer precision makes more slots, not a shorter ring. (RocketMQ's number of slots is
fixed, so that at 100 ms its seven days are 17 hours.) The part of `count` beyond the reach is for slots that are opened
but whose messages are not all settled (released or cancelled) yet. Their records stay readable for a restart, unless
the delivery lags by more than `MARGIN_MS`.

A message due beyond the reach waits in a slot within it and is *rolled* when that slot is opened: it is rewritten and
placed again. A roll must not be urgent. So a message due just beyond the reach waits in the middle of the reach, not at
the end as in RocketMQ. A roll is never made later than a third of the reach before its message is due.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from timeball.io.files import File, Files
from timeball.model import limits
from timeball.model.errors import OverLimit, SetupError
from timeball.model.message import Int64Array

# The delivery lag up to which opened slots keep their records, in ms.
MARGIN_MS = limits.MINUTE_MS


@dataclass(frozen=True, slots=True)
class Slots:
    """The dimensions of a ring: the width of a slot, the number of slots in reach, and the number of all slots."""

    precision_ms: int
    reach: int
    count: int

    @classmethod
    def of(cls, precision_ms: int, wheel_ms: int, ahead_ms: int) -> Slots:
        """Compute the slots of a ring that reaches `wheel_ms` beyond the slots that are opened `ahead_ms` ahead."""
        reach = max(4, -(-wheel_ms // precision_ms) + 1)
        count = reach + -(-(ahead_ms + MARGIN_MS) // precision_ms) + 1
        # A record has 32 bits for its lap. With a ring of one minute they last until the year 9999.
        assert limits.INSTANT_MS_MAX // precision_ms // count < 1 << 32
        return cls(precision_ms, reach, count)

    @property
    def margin(self) -> int:
        """The number of slots before `bound` that keep their records."""
        return self.count - self.reach

    def slot_at(self, ms: int) -> int:
        """Compute the slot of a due time."""
        return ms // self.precision_ms

    def slots_at(self, ms: Int64Array) -> Int64Array:
        """Compute the slot of each due time."""
        return np.asarray(ms // self.precision_ms)

    def begin_ms(self, slot: int) -> int:
        """Compute the first ms of a slot."""
        return slot * self.precision_ms

    def index(self, slots: Int64Array) -> Int64Array:
        """Compute the positions of slots in the ring."""
        return np.asarray(slots % self.count)

    def choose_slots(self, slots: Int64Array, bound: int) -> Int64Array:
        """Choose the slots in which messages due in `slots` are stored. None of `slots` may be before `bound`."""
        last = bound + self.reach - 1
        beyond = slots - last
        if not (beyond > 0).any():
            return slots
        # Just beyond the reach: the middle, so that the roll is not urgent. Farther away: the last slot.
        roll_slots = np.where(beyond < self.reach // 3, bound + self.reach // 2, last)
        return np.where(beyond > 0, roll_slots, slots)


RECORD = np.dtype([("last", "<i8"), ("lap", "<u4"), ("rows", "<u4")])
assert RECORD.itemsize == 16  # a power of two, so no record crosses a sector

BLOCK = 4_096  # slots that are counted together
SCAN = 1 << 20  # records read at a time
# A record has 32 bits for its row count.
ROWS_MAX = (1 << 32) - 1

Records = npt.NDArray[np.void]


class Ring:
    """The ends of all chains. `bound` is the first slot that is not opened. Slots from there on are counted."""

    def __init__(self, files: Files, name: str, slots: Slots, *, bound: int) -> None:
        """Replace the ring `name` by an empty one. Raise SetupError if the disk has no room for it."""
        self._slots, self.bound = slots, bound
        size_bytes = slots.count * RECORD.itemsize
        # Never reused: it is not synced, so after a power cut each page may have the content of any time.
        if files.exists(name):
            files.remove(name)
        self._file: File = files.create(name)
        try:
            self._file.allocate(size_bytes)
        except OverLimit as error:
            self._file.close()
            files.remove(name)
            raise SetupError(
                f"the timer wheel's ring takes {size_bytes} bytes, {slots.count} slots of {slots.precision_ms} ms "
                "each, and the disk has no room for it: free some space, raise --timer-precision-ms or lower "
                "--timer-wheel-ms"
            ) from error
        # A slot is 16 bytes of a page. Read-ahead of the pages around it would fill the memory with a fine ring.
        mapped = self._file.map(at_random=True)
        self._records: Records = np.frombuffer(mapped, dtype=RECORD, count=slots.count)
        # Used slots from `bound` on in each block of the ring. They find the next one without a scan.
        self._used = np.zeros(-(-slots.count // BLOCK), np.int64)
        self.rows = 0  # in slots from `bound` on
        self._first: int | None = None  # the first used slot; None: there is none, or it is not known

    @property
    def used(self) -> int:
        """The number of used slots from `bound` on."""
        return int(self._used.sum())

    def heads(self, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Read (newest link, rows) of these slots. (-1, 0) for a slot that is unused or no longer in the ring."""
        records = self._records[self._slots.index(slots)]
        # The position may belong to a slot of another lap.
        is_current = (records["rows"] > 0) & (records["lap"] == slots // self._slots.count)
        rows = records["rows"].astype(np.int64)
        return np.where(is_current, records["last"], -1), np.where(is_current, rows, 0)

    def push(self, slots: Int64Array, last: Int64Array, rows: Int64Array) -> None:
        """Set the newest links of these slots, and add `rows` to their row counts. `slots` is distinct and ascends.

        A slot whose position belongs to a later lap is skipped: it was opened long ago.
        """
        count = self._slots.count
        index, lap = self._slots.index(slots), slots // count
        old_records = self._records[index]
        in_use = old_records["rows"] > 0
        is_current = in_use & (old_records["lap"] == lap)
        is_writable = ~in_use | (old_records["lap"] <= lap)
        new_records = np.empty(len(slots), RECORD)
        new_records["last"], new_records["lap"] = last, lap
        new_records["rows"] = np.minimum(np.where(is_current, old_records["rows"], 0) + rows, ROWS_MAX)
        # Whole records are written, so that a page on disk contains either the old or the new record.
        self._records[index[is_writable]] = new_records[is_writable]
        is_unopened = slots >= self.bound
        self.rows += int(rows[is_unopened].sum())
        is_new = is_unopened & ~is_current
        if is_new.any():
            np.add.at(self._used, index[is_new] // BLOCK, 1)
        if is_unopened.any() and self._first is not None:
            self._first = min(self._first, int(slots[is_unopened][0]))

    def first_used(self) -> int | None:
        """Find the first used slot from `bound` on. None if there is none."""
        if self._first is None and self._used.any():
            self._first = self._find_first()
        return self._first

    def open(self, to: int, rows_max: int) -> tuple[Int64Array, Int64Array]:
        """Move `bound` towards `to`. Returns the used slots that it passed, ascending, and the newest link of each.

        The bound stops earlier if the slots contain more than `rows_max` rows, but it passes at least one used slot.
        """
        first = self.first_used()
        if first is None or first >= to:
            self.bound = max(self.bound, to)
            return np.empty(0, np.int64), np.empty(0, np.int64)
        # A fine ring may have millions of unused slots in a row. One step scans a bounded number of them.
        to = min(to, first + SCAN)
        slots = np.arange(first, to, dtype=np.int64)
        last, rows = self.heads(slots)
        in_use = np.flatnonzero(rows)
        fitting_count = int(np.searchsorted(np.cumsum(rows[in_use]), rows_max, side="right"))
        if fitting_count < len(in_use):
            in_use = in_use[: max(1, fitting_count)]
            to = int(slots[in_use[-1]]) + 1
        self.bound = to
        self.rows -= int(rows[in_use].sum())
        np.subtract.at(self._used, self._slots.index(slots[in_use]) // BLOCK, 1)
        # Unknown now: the next call of `first_used` searches with the counts of the blocks.
        self._first = None
        return slots[in_use], last[in_use]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _find_first(self) -> int:
        """Search the used blocks in slot order.

        The block of `bound` comes first, and once more last: its positions before `bound` belong to the next lap.
        """
        begin = self.bound % self._slots.count
        next_lap, first_block = self.bound - begin + self._slots.count, begin // BLOCK
        blocks = np.flatnonzero(self._used)
        for chosen_blocks, end in (
            (blocks[blocks >= first_block], next_lap),
            (blocks[blocks <= first_block], 1 << 62),
        ):
            for block in chosen_blocks.tolist():
                slots = self._slots_in(block)
                slots = slots[(slots >= self.bound) & (slots < end)]
                if len(slots):
                    return int(slots.min())
        raise AssertionError("a slot is counted and not in the ring")

    def _slots_in(self, block: int) -> Int64Array:
        """List the used slots whose positions are in a block."""
        begin = block * BLOCK
        records = self._records[begin : begin + BLOCK]
        in_use = np.flatnonzero(records["rows"])
        return np.asarray(records["lap"][in_use].astype(np.int64) * self._slots.count + begin + in_use)
