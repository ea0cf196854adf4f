"""Wake messages that selections have made due earlier than the schedule knows (registry/selections.py).

After each event (a selection, an undo, a start) one walk through all pending messages finds the messages that are due
earlier in their state than in the schedule, and writes their wake-ups. Messages that are earlier only by a shift and
far from their due times are left to later walks, `LEAD_MS` ahead of their due times. So a shift of ten million messages
by an hour writes their wake-ups little by little, and an undo before that has nothing to repair.

The walk goes in the order of the schedule, so messages that were held are released in the order of their due times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.delivery import names, split_into_frames
from timeball.broker.accepting.waiters import Gate
from timeball.broker.accepting.wake_ups import build_wake_ups
from timeball.broker.pending.listing import Filed, TableWalk, is_before, rows_in_log, rows_in_table
from timeball.broker.pending.snapshot import (
    Codes,
    DescribedPart,
    Logged,
    LogTail,
    Snapshot,
    Snapshots,
    TopicCodes,
    described_in_log,
)
from timeball.broker.recurring.successors import Successors
from timeball.broker.registry.selections import LAST_MS, Selections
from timeball.io.clock import SchedulerClock
from timeball.io.threads import Threads, in_thread
from timeball.log.row_encoder import pairs_of
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.answers import FIRST_POSITION, LAST_POSITION, PagePosition
from timeball.model.errors import OutOfRange
from timeball.model.message import Int64Array, int64
from timeball.schedule.scheduler import Scheduling

LEAD_MS = 60_000  # a shifted message is woken this long before it is due, or at least half as long
CHECK_S = 10.0  # the interval of checks whether the walk for shifted messages must continue
PAGE_ROWS = 16_384  # messages that a step of the walk examines
# Steps with one snapshot. The background thread sorts its settled messages, which may be ten million.
SNAPSHOT_PAGES = 16
ROWS_FIRST, ROWS_MAX, BYTES_MAX = 64, 1_024, limits.BODY_BYTES_MAX  # in one frame of wake-ups


class Wakers:
    """Writes the wake-ups of messages that are due earlier. Belongs to the event loop."""

    def __init__(
        self,
        snapshots: Snapshots,
        appender: Appender,
        successors: Successors,
        *,
        gate: Gate,
        clock: SchedulerClock,
        log: CommitLog,
        selections: Selections,
        scheduling: Scheduling,
        threads: Threads,
        host: str,
    ) -> None:
        self._snapshots, self._appender, self._successors = snapshots, appender, successors
        self._gate, self._clock, self._log, self._selections = gate, clock, log, selections
        self._scheduling, self._background, self._host = scheduling, threads.background, host
        self._codes = TopicCodes()
        self._tail = LogTail(log.reader, self._codes)
        self._rows_at_once = ROWS_FIRST
        # All messages due in the schedule before `_walked_ms` were examined, in the states of `_epoch`, a count of the
        # events so far.
        self._walked_ms, self._epoch = -LAST_MS, -1
        self._lock = asyncio.Lock()

    async def wait_and_wake(self) -> None:
        """Wait for the next event, at most CHECK_S, and call `wake`."""
        changed = self._selections.has_changed
        if self._epoch == self._selections.epoch:
            # Not wait_for: until Python 3.12 it may ignore a cancel that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await changed.wait()
        changed.clear()
        await self.wake()

    async def wake(self, ahead_ms: int = 0) -> None:
        """Write the wake-ups that are needed within `ahead_ms`, at least within LEAD_MS. On return they are durable."""
        async with self._lock:
            while True:
                epoch, selected = self._selections.epoch, self._selections.selected
                if not selected.wakes:
                    self._epoch = epoch
                    return
                # Shifted messages due in the schedule before this time are woken now.
                until_ms = self._clock.now_ms() + selected.shifted_earlier_ms + max(ahead_ms, LEAD_MS)
                is_new = epoch != self._epoch
                if not is_new and (
                    not selected.shifted_earlier_ms or until_ms - self._walked_ms < LEAD_MS // 2
                ):
                    return
                low = FIRST_POSITION if is_new else (self._walked_ms, 0)
                high = LAST_POSITION if is_new else (until_ms, 0)
                if await self._walk(epoch, low, high, until_ms):
                    self._epoch, self._walked_ms = epoch, until_ms
                    await in_thread(self._background, self._tail.forget)

    async def _walk(self, epoch: int, low: PagePosition, high: PagePosition, until_ms: int) -> bool:
        """Wake the messages in [low, high). Returns False if an event came meanwhile."""
        while low < high:
            # For a message that ends after the snapshot no wake-up is written (`_wake`). No selection covers a message
            # that comes after it.
            async with self._snapshots.taken() as snapshot:
                # Retention may have removed a row since the snapshot: its message is settled or in a file.
                with suppress(OutOfRange):
                    for _ in range(SNAPSHOT_PAGES):
                        upto = await self._wake_page(epoch, snapshot, low, high, until_ms)
                        if upto is None:
                            return False
                        low = upto
                        if low >= high:
                            break
        return True

    async def _wake_page(
        self, epoch: int, snapshot: Snapshot, low: PagePosition, high: PagePosition, until_ms: int
    ) -> PagePosition | None:
        """Wake the first messages from `low` on. Returns where the next page begins, None if an event came meanwhile.

        Raises OutOfRange if retention has removed a row.
        """
        page = await in_thread(self._background, self._read_page, snapshot, low, high, until_ms)
        for begin in range(0, len(page.due_ms), ROWS_MAX):
            if not await self._wake_part(epoch, page, slice(begin, begin + ROWS_MAX)):
                return None
        return page.upto if epoch == self._selections.epoch else None

    def _read_page(self, snapshot: Snapshot, low: PagePosition, high: PagePosition, until_ms: int) -> _Page:
        """Find the messages to wake among the first messages from `low` on (background thread)."""
        selected, choose = snapshot.selected, partial(_choose, snapshot, until_ms)
        walk = TableWalk(snapshot, self._snapshots.open_file, self._codes, None)
        logged, log_upto = self._tail.after(snapshot, low, high, PAGE_ROWS)
        filed, files_upto = walk.after(low, high, PAGE_ROWS, choose)
        upto = min(log_upto, files_upto)
        logged, filed = logged.part(is_before(logged, upto)), filed.part(is_before(filed, upto))
        index, log_ms, _ = choose(
            logged.due_ms, logged.seq, logged.topic,
            lambda index: described_in_log(selected, self._log.reader, logged.part(index), self._codes.names),
        )  # fmt: skip
        logged = logged.part(index)
        due_ms = np.concatenate((log_ms, filed.shown_ms))
        order = np.lexsort((np.concatenate((logged.seq, filed.seq)), due_ms))
        return _Page(walk, logged, filed, due_ms[order], order, upto)

    def _read_rows(self, page: _Page, part: slice) -> tuple[pa.RecordBatch, Int64Array]:
        """Read the rows (READ_SCHEMA) of a part of a page, sorted by their new due times (background thread).

        Also returns the new due times.
        """
        order, count = page.order[part], len(page.logged)
        logged, filed = page.logged.part(order[order < count]), page.filed.part(order[order >= count] - count)
        batches = []
        if len(logged):
            batches.append(rows_in_log(self._log.reader, logged))
        if len(filed):
            batches.append(rows_in_table(page.walk, filed))
        rows = pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
        versions = np.concatenate((page.logged.seq, page.filed.seq))[order]
        due_by_version = dict(zip(versions.tolist(), page.due_ms[part].tolist(), strict=True))
        due_ms = np.array([due_by_version[seq] for seq in rows.column("seq").to_pylist()], np.int64)
        order = np.lexsort((int64(rows.column("seq")), due_ms))
        return rows.take(pa.array(order)), due_ms[order]

    async def _wake_part(self, epoch: int, page: _Page, part: slice) -> bool:
        """Write the wake-ups of a part of a page. Returns False if an event came meanwhile."""
        begin, end = part.start, min(part.stop, len(page.due_ms))
        while begin < end:
            # Messages may be large. The number of rows is adapted to the size of the rows that were read before.
            chunk = slice(begin, min(end, begin + self._rows_at_once))
            rows, due_ms = await in_thread(self._background, self._read_rows, page, chunk)
            async with self._gate.passing():  # no selection changes before the append
                if epoch != self._selections.epoch:
                    return False
                durable = None
                for frame in split_into_frames(rows):
                    # In parts, because the rules of schedules take time.
                    for part_of_frame in self._successors.parts(names(frame)[0].to_numpy()):
                        part_rows = frame.slice(part_of_frame.start, part_of_frame.stop - part_of_frame.start)
                        durable = self._wake(part_rows, due_ms[part_of_frame]) or durable
                        await asyncio.sleep(0)
                    due_ms = due_ms[frame.num_rows :]
            if durable is not None:
                await durable
            begin = chunk.stop
            fitting_rows = rows.num_rows * BYTES_MAX // max(1, rows.nbytes)
            self._rows_at_once = min(max(1, fitting_rows), 4 * self._rows_at_once, ROWS_MAX)
        return True

    def _wake(self, rows: pa.RecordBatch, due_ms: Int64Array) -> asyncio.Future[int] | None:
        """Append the wake-ups of these messages, as far as they are pending and not held by a paused campaign.

        The future is done when they are durable. None if there are none. Raises OverLimit if the log accepts no rows.
        """
        self._log.writer.check_admission()
        now_ms, scheduling = self._clock.now_ms(), self._scheduling
        pairs = pairs_of(rows)
        # A pause or a cancel of a campaign may have begun since the page was read. No await from here on.
        is_woken = ~scheduling.outcomes.holds.contains(*pairs)
        # This call decides whether the message is released or woken, as for a reschedule.
        is_woken[is_woken] = scheduling.scheduler.cancel(*(column[is_woken] for column in pairs))
        if not is_woken.any():
            return None
        rows, due_ms = rows.filter(pa.array(is_woken)), due_ms[is_woken]
        woken = self._selections.woken
        # Not before now, so that the release does not count as late.
        wake_ups = build_wake_ups(
            rows, np.maximum(due_ms, now_ms), references=names(rows), from_due_ms=int64(rows.column("due_ms")),
            woken=woken, now_ms=now_ms, host=self._host, encode=self._appender.encode_scheduled,
        )  # fmt: skip
        first_seq = self._log.writer.next_seq
        return self._appender.append(
            wake_ups.rows, lambda: wake_ups.remember(first_seq, scheduling.outcomes.moved, woken),
            continuation=self._successors.after_end(wake_ups.number.tolist(), now_ms),
        ).durable  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Page:
    """Messages to wake, from the log and from files."""

    walk: TableWalk
    logged: Logged
    filed: Filed
    due_ms: Int64Array  # the new due times, sorted
    order: Int64Array  # the message of each of `due_ms`: an index into `logged` and, after it, `filed`
    upto: PagePosition  # where the next page begins, in the order of the schedule


def _choose(
    snapshot: Snapshot,
    until_ms: int,
    due_ms: Int64Array,
    seq: Int64Array,
    topic: Codes,
    describe: Callable[[Int64Array], Iterator[DescribedPart]],
) -> tuple[Int64Array, Int64Array, Codes]:
    """Choose the messages that are due earlier than in the schedule, and must be woken now (a `Choose`).

    `due_ms` contains the due times in the schedule. Messages that are only shifted are chosen if these are before
    `until_ms`.
    """
    selected, chosen, chosen_ms = snapshot.selected, [_NONE], [_NONE]
    for index, described in describe(np.arange(len(seq))):
        states = selected.states(described)
        earlier_ms = due_ms[index] - states.due_ms
        # Cancelled messages are included: they are cancelled for good when they are due.
        is_early = (earlier_ms > 0) & (states.holder < 0)
        # Shifted messages that are due later are left for a later walk.
        is_early &= (due_ms[index] < until_ms) | (earlier_ms > selected.shifted_earlier_ms)
        # The resume of a paused campaign writes its messages again.
        is_early &= ~snapshot.holds.contains(due_ms[index], seq[index])
        chosen.append(index[is_early])
        chosen_ms.append(states.due_ms[is_early])
    index = np.concatenate(chosen)
    return index, np.concatenate(chosen_ms), topic[index]


_NONE = np.empty(0, np.int64)
