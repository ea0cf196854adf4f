"""Apply rows of the log to the broker's caches, in steps. Then build the state with which a broker starts.

A start applies the whole log in one step. A follower of a replicated log applies committed rows as they arrive, so it
has nothing left to replay when it becomes leader. Both reach the same state, because the size of the steps does not
matter.

    apply    rows -> topics and queue indexes, META tables, attaches, leases, pending messages, settled pairs
    finish   check the data files, and build `Recovered`

*Settled* means released or cancelled. A committed snapshot contains the state of all rows before it
(log/checkpoint.py). When its row is applied, the snapshot becomes the starting point, and the settled pairs that it
covers are dropped. So memory holds the pending messages, and the pairs settled since the last snapshot. A snapshot
covers the rows up to the number where it was taken. The rows from there to its own row are applied again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.recovery.replayed import Replayed, kinds_in
from timeball.broker.registry.attach import AttachState
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.broker.registry.queue_entries import COLUMNS
from timeball.broker.registry.tables import Tables
from timeball.broker.transacting.transactions import Half, load
from timeball.log import checkpoint as cp
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader
from timeball.model.errors import Unavailable
from timeball.model.message import SNAPSHOT_KEY, Int64Array, Kind, pairs_of
from timeball.schedule import locations
from timeball.schedule.columns import GrowingColumns, runs_of
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import ReleaseCursor, Settled
from timeball.table.attachment import FileEntry
from timeball.table.catalog import Catalog

logger = logging.getLogger(__name__)

# Small frames are joined up to this number of rows. Larger ones are applied as they are, without copying a body.
BATCH_ROWS = 8_192
# Fold after this number of new rows, or after a quarter of the kept rows if that is more. So each row moves O(1) times.
FOLD_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Recovered:
    """The recovered state for the schedule."""

    settled: Settled
    cursor: ReleaseCursor
    waiting: Waiting  # pending messages in the log's tail, each at the last of its rows
    files: list[FileEntry]  # the live files, according to the log
    scheduled_since_watermark: int  # includes settled messages, because compaction reads all rows
    waiting_rows: int  # pending messages with a due time, in all locations
    leases: LeaseCounts
    halves: list[Half]
    moved: list[tuple[int, int, int, int]]  # as in schedule/moved.py
    levels: dict[int, cp.LevelFacts]
    snapshot_seq: int
    log_from_seq: int  # of the last snapshot: retention may have removed older rows
    resumes: bool  # whether the strategy may use the state that it saved
    bring_up: Callable[[], None]  # updates the Delta log to match the commit log; runs in the table's thread


class Applying:
    """The caches of one log up to a row. Blocking. Belongs to one thread until it is finished."""

    def __init__(
        self, start: Checkpoint, reader: LogReader, tables: Tables, *, resumes: bool = False
    ) -> None:
        """Load a starting point, and the queue entries of the rows before it.

        `resumes` means that the strategy has saved the scheduled messages before the starting point in its own files.
        """
        self.reader, self.tables, self.ledger = reader, tables, AttachState()
        facts = start.facts
        # META rows first: topics must exist before the queues of the checkpoint and the replayed messages refer to
        # them.
        tables.meta.restore((key, bytes(value)) for key, value in facts.meta.items())
        tables.topics.load(reader, facts.queues, facts.seq)
        self._replayed = Replayed(start, self.ledger)
        self._tail = TailScheduled(facts.seq)
        self._resumes = resumes
        self._first_seq = 1  # queues have no entries of rows before this one
        self.applied_seq = facts.seq  # all rows below this number are applied, no others
        self.snapshot_seq = facts.snapshot_seq  # the row number of the last snapshot
        # The first row that the log must keep, according to the last snapshot that was applied here. Without a snapshot
        # the log must keep all rows. The value in a checkpoint is not used: its broker may have been about to write a
        # snapshot that was never committed.
        self.log_from_seq = 1

    @property
    def files(self) -> dict[str, FileEntry]:
        """The live data files by path."""
        return self._replayed.files

    @property
    def kept_rows(self) -> int:
        """The number of pending messages in the tail, settled pairs and moves in memory."""
        return len(self._tail) + len(self._replayed)

    def read_tail(self) -> None:
        """Read the scheduled messages between the watermark and the starting point now, which shortens `finish`."""
        self._tail.extend_down(self.reader, self.ledger.watermark)

    def apply(self, to_seq: int) -> None:
        """Apply the rows below `to_seq` that were not applied yet. They must be committed."""
        to_seq = min(to_seq, self.reader.next_seq)
        if (rows := to_seq - self.applied_seq) > FOLD_ROWS:
            self._tail.reserve(rows)
        # One read of all columns: queues, META and TABLE rows need nearly all of them, including bodies.
        for rows in self.reader.coalesced(self.applied_seq, to_seq, None, BATCH_ROWS):
            self._apply(rows)
        self.applied_seq = max(self.applied_seq, to_seq)
        if self.reader.first_seq > self._first_seq:
            # Retention has removed rows since the last step. Consumers must not be offered them.
            self._first_seq = self.reader.first_seq
            self.tables.topics.forget(self._first_seq)
        # The threshold grows with the number of kept rows: a tail of ten million rows must not be folded for every
        # thousand new ones.
        unfolded_rows = self._tail.unfolded_rows + self._replayed.unfolded_rows
        if unfolded_rows >= max(FOLD_ROWS, self.kept_rows // 4):
            self._fold()

    def finish(self, catalog: Catalog, now_ms: int) -> Recovered:
        """Check the data files, and build the state that a broker starts with.

        Call it once, and do not call `apply` after. Raises Corrupt if a data file is missing. The table's Delta log is
        a cache, which `bring_up` updates later.
        """
        assert self.applied_seq == self.reader.next_seq, "rows that are not applied would be forgotten"
        replayed, attach_state = self._replayed, self.ledger
        files = list(replayed.files.values())
        attach_seq, watermark, attaches = attach_state.attach_seq, attach_state.watermark, replayed.attaches

        steps = [partial(catalog.bring_up, files, attaches, attach_seq, watermark, now_ms)]
        try:
            # A missing data file must stop the start before anything is changed.
            catalog.check_data(files)
        except Unavailable as error:
            logger.warning("pending table is behind the log reason=%s", error)
            steps.insert(0, partial(catalog.check_data, files))

        def bring_up() -> None:
            for step in steps:
                step()

        # If the strategy has saved the messages before the starting point in its own files, they need not be read.
        if not self._resumes:
            self.read_tail()
        replayed.fold()
        facts, from_seq = replayed.facts, self._from_seq()
        # Strategies without compaction move the watermark only in memory, at retention (maintenance.py). No row of the
        # log contains that move, so repeat it here.
        attach_state.watermark = from_seq
        settled = replayed.settled()
        return Recovered(
            settled=settled,
            cursor=replayed.cursor,
            waiting=self._tail.waiting(settled, from_seq),
            files=files,
            scheduled_since_watermark=self._tail.count(self.reader, from_seq),
            waiting_rows=replayed.waiting_rows,
            leases=replayed.leases,
            halves=load(self.reader, replayed.halves, dict(facts.halves)),
            moved=replayed.moved(),
            levels=facts.levels,
            snapshot_seq=self.snapshot_seq,
            log_from_seq=facts.log_from_seq,
            resumes=self._resumes,
            bring_up=bring_up,
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _apply(self, rows: pa.RecordBatch) -> None:
        kinds = rows.column("kind").to_numpy()
        present = kinds_in(kinds)
        meta_rows = rows.filter(pa.array(kinds == Kind.META)) if Kind.META in present else None
        if meta_rows is not None:  # a topic must exist before its messages
            self.tables.meta.restore(pairs_of(meta_rows))
        has_offset = np.asarray(rows.column("queue_offset").is_valid())
        if has_offset.any():
            visible = rows.select(COLUMNS)
            visible = visible if has_offset.all() else visible.filter(pa.array(has_offset))
            self.tables.topics.replay(visible, visible.column("seq").to_numpy())
        if present & locations.KINDS:
            self._tail.add(rows)
        watermark = self.ledger.watermark
        # After the META rows and the queues, which a new starting point does not change.
        self._replayed.apply(rows)
        # If the watermark moved, the broker ran with another strategy and ended without a checkpoint. The table now has
        # messages that are also in the strategy's saved state, so that state is unusable.
        self._resumes = self._resumes and self.ledger.watermark == watermark
        if meta_rows is not None:
            self._restart_from_snapshot(meta_rows, rows.column("seq")[-1].as_py() + 1)

    def _restart_from_snapshot(self, meta_rows: pa.RecordBatch, end_seq: int) -> None:
        """Restart from the last snapshot among these META rows, and apply the later rows below `end_seq` again."""
        snapshots = meta_rows.filter(pc.equal(meta_rows.column("unique_key"), SNAPSHOT_KEY))
        if not snapshots.num_rows:
            return
        self.snapshot_seq = snapshots.column("seq")[-1].as_py()
        starting_point = cp.decode(snapshots.column("body")[-1].as_py())
        self.log_from_seq = starting_point.facts.log_from_seq
        # The current starting point is newer if it was saved while the snapshot was being written to the log.
        if starting_point.facts.seq < self._replayed.facts.seq:
            return
        # Keep the tail: the snapshot lists settled messages, but not the locations of pending ones.
        self._replayed = Replayed(starting_point, self.ledger)
        for rows in self.reader.coalesced(starting_point.facts.seq, end_seq, None, BATCH_ROWS):
            self._replayed.apply(rows)
        self._fold()

    def _fold(self) -> None:
        """Remove settled messages, and rows that later rows replace."""
        self._replayed.fold()
        self._tail.fold(self._replayed.settled(), self._from_seq())

    def _from_seq(self) -> int:
        # Messages below the watermark are in the table. Messages in rows that retention removed were settled.
        return max(self.ledger.watermark, self.reader.first_seq)


# The scheduled messages in the log's tail while rows are applied: each at the last of its rows, as three int64.
#
# Rows are added in log order. They are folded from time to time: of a message that was written again, only the last row
# stays, and settled messages (released or cancelled) and messages in the table are removed. So a follower that applies
# rows for days holds the pending messages, and the messages since the last fold.
#
# Compaction needs the number of scheduled messages since the watermark, including settled ones. They are counted in
# blocks of sequence numbers. The block that contains the watermark is counted from the log.

COUNT_BLOCK = 4_096  # sequence numbers in a block
_COLUMNS = ("seq", "kind", "due_ms", "queue_offset", "source_seq", "version_seq", "from_due_ms")
_BATCH_ROWS = 65_536


class TailScheduled:
    """The scheduled messages in rows from `from_seq` on. Belongs to the thread that applies the rows.

    After a fold, settled messages are removed and each message has one row.
    """

    def __init__(self, from_seq: int) -> None:
        self.from_seq = from_seq
        # Columns as in `Waiting`; rows added since the last fold are in log order.
        self._columns = GrowingColumns(3)
        self._folded_rows = 0
        self._counts: dict[int, int] = {}  # block of numbers -> scheduled messages accepted in it

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def unfolded_rows(self) -> int:
        """The number of rows that were added since the last fold."""
        return len(self._columns) - self._folded_rows

    def reserve(self, rows: int) -> None:
        """Allocate space for `rows` messages. Growing step by step would copy the columns each time."""
        self._columns.reserve(rows)

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the scheduled messages of READ_SCHEMA rows. The rows must follow all rows added before."""
        # Select the columns first: filtering rows of all columns would copy every body.
        waiting = locations.waiting_in(locations.waiting_rows(rows.select(_COLUMNS)))
        self._columns.add(waiting.due_ms, waiting.seq, waiting.row_seq)
        self._count(waiting)

    def extend_down(self, reader: LogReader, from_seq: int) -> None:
        """Read the scheduled messages of the rows from `from_seq` on that are not held yet. Blocking."""
        # Messages in rows that retention has removed were settled.
        from_seq = max(from_seq, reader.first_seq)
        if from_seq >= self.from_seq:
            return
        # The earlier rows must come first, because the last row of a message counts.
        later = self._columns
        self._columns, self._folded_rows = GrowingColumns(3), 0
        for rows in reader.coalesced(from_seq, self.from_seq, locations.KINDS, _BATCH_ROWS, _COLUMNS):
            self.add(rows)
        self._columns.add(*later.columns())
        self.from_seq = from_seq

    def fold(self, settled: Settled, from_seq: int) -> None:
        """Remove rows before `from_seq`, settled messages, and all rows of a message except the last one.

        Both parts of `settled`, the cancelled and the released pairs, are sorted by number.
        """
        waiting = self.waiting(settled, from_seq)
        # If nothing is removed, skip the copy, which takes longer than the check.
        if len(waiting) < len(self._columns):
            self._columns.replace(waiting.due_ms, waiting.seq, waiting.row_seq)
        self._folded_rows = len(waiting)
        first = from_seq // COUNT_BLOCK
        for block in [block for block in self._counts if block < first]:
            del self._counts[block]

    def waiting(self, settled: Settled, from_seq: int) -> Waiting:
        """Find the pending messages, sorted by number. Each is at the last of its rows from `from_seq` on.

        The columns may be views of internal memory, which are valid until the next change.
        """
        tail = locations.latest([Waiting(*self._columns.columns())], from_seq)
        is_pending = (tail.due_ms >= settled.before_ms) | settled.may_wait(tail.seq)
        cancelled_count = len(settled.seq) - settled.released
        # Numbers are never reused, so the due times need not be compared.
        for seq in (settled.seq[:cancelled_count], settled.seq[cancelled_count:]):
            _clear_settled(tail.seq, seq, is_pending)
        return tail if is_pending.all() else tail.part(is_pending)

    def count(self, reader: LogReader, from_seq: int) -> int:
        """Count the scheduled messages that were accepted in rows from `from_seq` on. Blocking."""
        from_seq = max(from_seq, self.from_seq)
        block = from_seq // COUNT_BLOCK
        total = sum(count for counted_block, count in self._counts.items() if counted_block > block)
        # Only the rest of the first block is read from the log, which takes milliseconds.
        if block not in self._counts:
            return total
        end = (block + 1) * COUNT_BLOCK
        for rows in reader.coalesced(from_seq, end, locations.KINDS, _BATCH_ROWS, _COLUMNS):
            total += len(_accepted_numbers(locations.waiting_in(locations.waiting_rows(rows))))
        return total

    def _count(self, waiting: Waiting) -> None:
        blocks = _accepted_numbers(waiting) // COUNT_BLOCK
        if len(blocks):
            # Numbers ascend within the rows of one call, so the blocks ascend too. Usually there is only one.
            begins, counts = runs_of(blocks)
            for block, count in zip(blocks[begins].tolist(), counts.tolist(), strict=True):
                self._counts[block] = self._counts.get(block, 0) + count


def _accepted_numbers(waiting: Waiting) -> Int64Array:
    """Select the messages at the row that set their due time. Their other rows repeat messages that were counted."""
    if waiting.row_seq is waiting.seq:
        return waiting.seq
    return waiting.part(waiting.seq == waiting.row_seq).seq


def _clear_settled(tail: Int64Array, settled: Int64Array, is_pending: npt.NDArray[np.bool_]) -> None:
    """Set `is_pending` to False for the numbers in `tail` that are also in `settled`. Both are sorted."""
    if not len(tail) or not len(settled):
        return
    # Only numbers within the tail's range: most settled messages were in the table, or older.
    settled = settled[np.searchsorted(settled, tail[0]) : np.searchsorted(settled, tail[-1], side="right")]
    index = np.searchsorted(tail, settled)
    is_pending[index[tail[index] == settled]] = False
