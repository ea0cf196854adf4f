"""The slots of `timer_wheel` and its ring: for each slot, where its chain in the timer log ends. One mapped file.

    byte  0                8          12         16
          +----------------+----------+----------+
          | last           | lap      | rows     |   little-endian, 16 bytes a slot
          +----------------+----------+----------+
            newest link      slot //    placed in
            of the slot      count      the slot; 0: unused

Slot n stands at byte (n mod count) * 16, and `lap` says which of the slots that share the place it is. At 1000 ms and
three days it is 4 MB; at 1 ms 4 GB, reserved when the ring is made: a full disk shows at the start and not on a page
fault. It is never synced and no start reads it: each start makes an empty one, and the backlog pushes the links that
are durable, whose checksums vouch for what the ring says.

Slots are numbered for ever, instant // precision. Counted from `bound`, the first slot that has not been opened:

    … | low … handed out, not all durable … | bound … in reach … | bound + reach
    <------------------------------ count ------------------------------------>

The reach is a length of *time*: a finer precision makes more slots and not a shorter ring. (RocketMQ's number of
slots is fixed, so that at 100 ms its seven days are 17 hours.) What `count` has beyond the reach is for slots that
are opened and not settled yet: their records stay readable for a restart until the delivery lags by `MARGIN_MS`.

A promise due out of reach waits in a slot within it, and is rolled when that is opened: written again, placed anew.
A roll must not be urgent. So a promise due just beyond waits in the middle, not at the end (RocketMQ does the same),
and a roll is never made less than a third of the ring before its promise is due.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from timeball import limits
from timeball.errors import OverLimit, SetupError
from timeball.files import File, Files
from timeball.message import Int64Array

MARGIN_MS = limits.MINUTE_MS


@dataclass(frozen=True, slots=True)
class Slots:
    """The numbers of a ring: a slot's width, how many slots ahead are in reach, and how many there are."""

    precision_ms: int
    reach: int
    count: int

    @classmethod
    def of(cls, precision_ms: int, wheel_ms: int, ahead_ms: int) -> Slots:
        """Return the slots of a ring that reaches `wheel_ms` beyond the slots opened `ahead_ms` ahead."""
        reach = max(4, -(-wheel_ms // precision_ms) + 1)
        count = reach + -(-(ahead_ms + MARGIN_MS) // precision_ms) + 1
        # A record has 32 bits for its lap: with a ring of a minute they last until the year 9999.
        assert limits.INSTANT_MS_MAX // precision_ms // count < 1 << 32
        return cls(precision_ms, reach, count)

    @property
    def margin(self) -> int:
        """Return how many slots before `bound` keep their records."""
        return self.count - self.reach

    def of_instant(self, ms: int) -> int:
        """Return the slot of an instant."""
        return ms // self.precision_ms

    def of_instants(self, ms: Int64Array) -> Int64Array:
        """Return the slot of each instant."""
        return np.asarray(ms // self.precision_ms)

    def begin_ms(self, slot: int) -> int:
        """Return the first instant of a slot."""
        return slot * self.precision_ms

    def index(self, slots: Int64Array) -> Int64Array:
        """Return where these stand in the ring."""
        return np.asarray(slots % self.count)

    def place(self, slots: Int64Array, bound: int) -> Int64Array:
        """Return where promises wait that are due in these slots, none of them before `bound`."""
        last = bound + self.reach - 1
        beyond = slots - last
        if not (beyond > 0).any():
            return slots
        elsewhere = np.where(beyond < self.reach // 3, bound + self.reach // 2, last)
        return np.where(beyond > 0, elsewhere, slots)


RECORD = np.dtype([("last", "<i8"), ("lap", "<u4"), ("rows", "<u4")])
assert RECORD.itemsize == 16  # A power of two: no record crosses a sector.

BLOCK = 4_096  # slots counted together
SCAN = 1 << 20  # records looked at in one go
ROWS_MAX = (1 << 32) - 1

Records = npt.NDArray[np.void]


class Ring:
    """The ends of all chains. `bound` is the first slot that has not been opened; slots from there on are counted."""

    def __init__(self, files: Files, name: str, slots: Slots, *, bound: int) -> None:
        """Make an empty ring `name` in place of one that may be there; raises SetupError when it does not fit."""
        self._slots, self.bound = slots, bound
        size_bytes = slots.count * RECORD.itemsize
        # Never reused: it is not synced, so after a power cut its pages may be of any moment.
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
        # A slot is some sixteen bytes of a page: with what lies around it, a fine ring would fill the memory.
        mapped = self._file.map(at_random=True)
        self._records: Records = np.frombuffer(mapped, dtype=RECORD, count=slots.count)
        # How many slots from `bound` on are in use in each block of the ring, so that the next is found without a walk.
        self._used = np.zeros(-(-slots.count // BLOCK), np.int64)
        self.rows = 0  # in slots from `bound` on
        self._first: int | None = None  # the first slot in use; None: none, or not known

    @property
    def used(self) -> int:
        """Return how many slots from `bound` on are in use."""
        return int(self._used.sum())

    def heads(self, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return (newest link, rows) of these slots; (-1, 0) of one that is not in use, or not here any more."""
        records = self._records[self._slots.index(slots)]
        # The place may belong to a slot of another revolution; its lap tells them apart.
        mine = (records["rows"] > 0) & (records["lap"] == slots // self._slots.count)
        rows = records["rows"].astype(np.int64)
        return np.where(mine, records["last"], -1), np.where(mine, rows, 0)

    def push(self, slots: Int64Array, last: Int64Array, rows: Int64Array) -> None:
        """Give these slots, distinct and ascending, new ends, and so many rows more.

        A slot whose place has been taken by a later revolution is left out: it is an opened one, far behind.
        """
        count = self._slots.count
        index, lap = self._slots.index(slots), slots // count
        old = self._records[index]
        in_use = old["rows"] > 0
        mine = in_use & (old["lap"] == lap)
        ours = ~in_use | (old["lap"] <= lap)
        fresh = np.empty(len(slots), RECORD)
        fresh["last"], fresh["lap"] = last, lap
        fresh["rows"] = np.minimum(np.where(mine, old["rows"], 0) + rows, ROWS_MAX)
        # Whole records, so that what the kernel writes back meanwhile is either the old or the new one.
        self._records[index[ours]] = fresh[ours]
        ahead = slots >= self.bound
        self.rows += int(rows[ahead].sum())
        new = ahead & ~mine
        if new.any():
            np.add.at(self._used, index[new] // BLOCK, 1)
        if ahead.any() and self._first is not None:
            self._first = min(self._first, int(slots[ahead][0]))

    def first_used(self) -> int | None:
        """Return the first slot from `bound` on that is in use."""
        if self._first is None and self._used.any():
            self._first = self._find_first()
        return self._first

    def open(self, to: int, rows_max: int) -> tuple[Int64Array, Int64Array]:
        """Move `bound` up to `to`; return the slots in use that it passed, ascending, and the newest link of each.

        Less far, but past one slot in use at least, when they hold more than `rows_max` rows.
        """
        first = self.first_used()
        if first is None or first >= to:
            self.bound = max(self.bound, to)
            return np.empty(0, np.int64), np.empty(0, np.int64)
        # A fine ring may have millions of unused slots in a row: one step looks at a bounded number of them.
        to = min(to, first + SCAN)
        slots = np.arange(first, to, dtype=np.int64)
        last, rows = self.heads(slots)
        in_use = np.flatnonzero(rows)
        fitting = int(np.searchsorted(np.cumsum(rows[in_use]), rows_max, side="right"))
        if fitting < len(in_use):
            in_use = in_use[: max(1, fitting)]
            to = int(slots[in_use[-1]]) + 1
        self.bound = to
        self.rows -= int(rows[in_use].sum())
        np.subtract.at(self._used, self._slots.index(slots[in_use]) // BLOCK, 1)
        # Not known now: the next call of `first_used` searches, by the counts of the blocks.
        self._first = None
        return slots[in_use], last[in_use]

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _find_first(self) -> int:
        """Search the blocks in the order of their slots: that of `bound` first, and again last for the next lap."""
        begin = self.bound % self._slots.count
        next_lap, home = self.bound - begin + self._slots.count, begin // BLOCK
        blocks = np.flatnonzero(self._used)
        for part, end in ((blocks[blocks >= home], next_lap), (blocks[blocks <= home], 1 << 62)):
            for block in part.tolist():
                slots = self._slots_in(block)
                slots = slots[(slots >= self.bound) & (slots < end)]
                if len(slots):
                    return int(slots.min())
        raise AssertionError("a slot is counted and not in the ring")

    def _slots_in(self, block: int) -> Int64Array:
        begin = block * BLOCK
        records = self._records[begin : begin + BLOCK]
        in_use = np.flatnonzero(records["rows"])
        return np.asarray(records["lap"][in_use].astype(np.int64) * self._slots.count + begin + in_use)
