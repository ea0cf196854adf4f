"""Promises whose turn is near and that somebody outside delivers: who they are, and the look behind him.

While a *dispatcher* has its lease, a gather leaves the bodies of file rows where they are and notes only who they are:
(due_ms, seq), 16 bytes each. The dispatcher reads the bodies itself and brings them when they are due.

    open  --take-->   in flight     brought by the dispatcher, or loaded here: whoever comes first
    open  --fetch-->  the wheel     not brought `grace_ms` after its instant; or the lease is over, and it is near

So whatever a dispatcher does, nothing is lost, nothing comes twice, and nothing is later than the grace and a look
into a file. A promise stays open while it is fetched: it may still be brought, and is then left out of what was
fetched. A cancelled one stays open until somebody comes by; that it is settled is `Settling`'s to know.

Refuses what is not open: numbers that nobody dispatched, and what was brought before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball import limits
from timeball.message import Int64Array
from timeball.schedule.hour_log.pending import PendingFiles, load
from timeball.schedule.hour_log.placement import NEVER
from timeball.schedule.settling import Settling
from timeball.schedule.wheel import Run, SecondWheel
from timeball.table.data_file import Position, search

Bools = npt.NDArray[np.bool_]

ROWS_MAX = 8_000_000  # open ones; beyond it the horizon waits
LEASE_MS_MAX = limits.HOUR_MS
URGENT_SHARE = 4  # of a gather's rows: what is fetched though there is no room for more


@dataclass(slots=True)
class Window:
    """What one gather left out: pairs sorted by (due_ms, seq); those before `cursor` are not open."""

    due: Int64Array
    seq: Int64Array
    is_open: Bools
    cursor: int = 0

    def skip(self) -> bool:
        """Move the cursor to the first open pair; false when there is none."""
        rest = self.is_open[self.cursor :]
        self.cursor += int(rest.argmax()) if rest.any() else len(rest)
        return self.cursor < len(self.due)

    def find(self, due: Int64Array, seq: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(which of these sorted pairs, where they are here), for those that are here, open or not."""
        begin = search(self.due, self.seq, (int(due[0]), int(seq[0])))
        end = search(self.due, self.seq, (int(due[-1]), int(seq[-1]) + 1))
        if begin == end:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        here = self.seq[begin:end]
        order = np.argsort(here, kind="stable")
        at = order[np.minimum(np.searchsorted(here, seq, sorter=order), end - begin - 1)]
        rows = np.flatnonzero((here[at] == seq) & (self.due[begin:end][at] == due))
        return rows, begin + at[rows]


class Dispatched:
    """See the module. `len` counts what is open. Belongs to the event loop."""

    def __init__(
        self,
        pending: PendingFiles,
        wheel: SecondWheel,
        settling: Settling,
        reader_thread: Executor,
        *,
        ahead_ms: int,
        grace_ms: int,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._pending, self._wheel, self._settling = pending, wheel, settling
        self._thread, self._ahead_ms, self._grace_ms = reader_thread, ahead_ms, grace_ms
        self._on_change, self._on_failure = on_change, on_failure
        self._windows: list[Window] = []
        self._size = 0
        self._lease_until_ms = 0
        self.fetching: asyncio.Task[None] | None = None
        self.fetched_rows = 0  # since the start: what the dispatcher did not bring, or not in time

    def __len__(self) -> int:
        return self._size

    @property
    def first_due_ms(self) -> int | None:
        """The earliest instant of those that are open."""
        return min((int(window.due[window.cursor]) for window in self._windows), default=None)

    @property
    def is_full(self) -> bool:
        """Whether no more should be left to the dispatcher."""
        return self._size >= ROWS_MAX

    # -- the lease -----------------------------------------------------------------------------------------

    def lease(self, now_ms: int, lease_ms: int) -> None:
        """A dispatcher is at work for so long, from now on; 0: it is no more."""
        self._lease_until_ms = now_ms + min(lease_ms, LEASE_MS_MAX)
        self._on_change()

    def is_leased(self, now_ms: int) -> bool:
        """Whether a dispatcher is at work; a clock that was set back does not make a lease longer."""
        return now_ms < self._lease_until_ms <= now_ms + LEASE_MS_MAX

    def begin(self, now_ms: int) -> Position:
        """From where on a gather should leave file rows to the dispatcher: not what is due already."""
        return (now_ms + 1, 0) if self.is_leased(now_ms) else NEVER

    # -- who they are --------------------------------------------------------------------------------------

    def add(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """These, sorted, are open now."""
        if len(due_ms):
            self._windows.append(Window(due_ms, seq, np.ones(len(due_ms), np.bool_)))
            self._size += len(due_ms)

    def contains(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Which of these, in any order, are open."""
        found = np.zeros(len(seq), np.bool_)
        if self._size and len(seq):
            order = np.lexsort((seq, due_ms))
            for window in self._windows:
                rows, at = window.find(due_ms[order], seq[order])
                found[order[rows]] |= window.is_open[at]
        return found

    def take(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Which of these sorted pairs were open until now; they are the caller's. One named twice is taken once."""
        taken = np.zeros(len(seq), np.bool_)
        if self._size == 0 or len(seq) == 0:
            return taken
        for window in self._windows:
            rows, at = window.find(due_ms, seq)
            mine = window.is_open[at]
            window.is_open[at] = False
            taken[rows[mine]] = True
        taken[1:] &= (seq[1:] != seq[:-1]) | (due_ms[1:] != due_ms[:-1])
        self._size -= int(taken.sum())
        self._windows = [window for window in self._windows if window.skip()]
        return taken

    # -- the look behind -----------------------------------------------------------------------------------

    def next_ms(self, has_room: bool) -> int | None:
        """When `fetch_if_needed` will next have something to do; a fetch under way tells its end by itself."""
        first_ms = self.first_due_ms
        if first_ms is None or self.fetching is not None:
            return None
        urgent_ms = min(first_ms + self._grace_ms, max(self._lease_until_ms, first_ms))
        if not has_room:
            return urgent_ms
        return min(urgent_ms, max(self._lease_until_ms, first_ms - self._ahead_ms // 2))

    def fetch_if_needed(self, now_ms: int, rows_max: int, has_room: bool) -> None:
        """Load what was not brought in time; and what is near, when there is no dispatcher any more."""
        at_ms = self.next_ms(has_room)
        if at_ms is None or at_ms > now_ms:
            return
        if self.is_leased(now_ms):
            until_ms = now_ms - self._grace_ms
        else:
            until_ms = now_ms + (self._ahead_ms if has_room else 0)
        rows_max = rows_max if has_room else max(1, rows_max // URGENT_SHARE)
        window = min(self._windows, key=lambda window: int(window.due[window.cursor]))
        begin = window.cursor
        end = min(search(window.due, window.seq, (until_ms + 1, 0)), begin + rows_max)
        self.fetching = asyncio.get_running_loop().create_task(self._fetch(window, begin, end))

    async def quiet(self) -> None:
        """Return when nothing is fetched."""
        while self.fetching is not None:
            await asyncio.wait([self.fetching])

    async def _fetch(self, window: Window, begin: int, end: int) -> None:
        try:
            low = int(window.due[begin]), int(window.seq[begin])
            high = int(window.due[end - 1]), int(window.seq[end - 1]) + 1
            files = self._pending.over(low[0], high[0])
            rows = await asyncio.get_running_loop().run_in_executor(self._thread, load, files, low, high)
            if rows is not None:
                self._keep(Run.of([rows]))
            self._expect_settled(window, begin, end)
        except Exception as error:
            # Whatever it was, promises are not where they should be: the broker must stop and say so.
            self._on_failure(error)
        finally:
            self.fetching = None
        self._on_change()

    def _keep(self, run: Run) -> None:
        """What is still open of these goes to the wheel."""
        keep = self.take(run.due, run.seq)
        self.fetched_rows += int(keep.sum())
        if keep.any():
            self._wheel.add(run.rows.filter(pa.array(keep)))

    def _expect_settled(self, window: Window, begin: int, end: int) -> None:
        """What no file holds any more was rewritten away, because it is settled."""
        left = begin + np.flatnonzero(window.is_open[begin:end])
        due, seq = window.due[left], window.seq[left]
        if len(left):
            assert self._settling.is_settled(due, seq).all(), f"dispatched, and in no file: seq {seq[:9]}"
            self.take(due, seq)
