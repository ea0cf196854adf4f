"""Build the state of a broker from the log: at a start from the checkpoint, on a follower with each committed row.

All caches are rebuilt from the log, beginning at the checkpoint, at the last snapshot, or at the first row.

Below, "the checkpoint" means the starting point that a start uses: a checkpoint file, or a snapshot, which is a row of
the log with the same content. *Settled* means released or cancelled.

    1. The checkpoint contains the state at sequence number C. The files of the queue index contain the positions of
       the messages before C. If the files are damaged or missing, these entries are rebuilt from the log.
    2. Rows from C on are replayed: visible rows into the queue indexes, releases and cancels into the set of settled
       scheduled messages, TABLE rows into the state of attaches and reservations.
    3. The live data files are those of the checkpoint, changed by the attaches from C on. Each file must exist. The
       Delta table is a cache of this list. It is updated, or created again.
    4. The pending messages of the log's tail are the scheduled messages from the watermark W on that are not settled.
       Each is represented by the last of its rows. If a strategy has its own files and they match the checkpoint, only
       scheduled messages from C on are needed.
    5. A RELEASE or CANCEL row settles a scheduled message wherever it is pending, also in the queue of a delay level.
    6. The release cursor continues from the checkpoint's value, with every RELEASE row of a message with a due time.
    7. A MOVED row to another due time settles the version that it names, and is the newest version of its message.
    8. Half messages (scheduled messages without a due time) in the checkpoint's list and in rows from C on are open,
       unless a later row ends them.
    9. The number of pending messages and the redeliveries are those of the checkpoint, changed by the rows from C on.

Invariant: the same log gives the same state, however often a recovery was interrupted.

`starting_point` chooses the checkpoint. `Applying` applies the rows to topics, queue indexes and META tables itself,
and to the caches of two other classes:

    TailScheduled   the scheduled messages in the log's tail
    Replayed        attaches, settled pairs, moves, redeliveries and half messages
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.accepting.transacting import Half, load
from timeball.broker.accepting.wake_ups import bases_in
from timeball.broker.registry.campaigns import AttachState, CampaignFacts
from timeball.broker.registry.redeliveries import Redeliveries
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topics import COLUMNS
from timeball.log import checkpoint as cp
from timeball.log.checkpoint import Checkpoint, Facts, last_snapshot
from timeball.log.reader import LogReader
from timeball.log.segment import Segments, segment_name
from timeball.model.errors import Corrupt, Unavailable
from timeball.model.message import NO_DUE_TIME_MS, SNAPSHOT_KEY, Int64Array, Kind, pairs_of
from timeball.schedule import locations
from timeball.schedule.locations import GrowingColumns, Waiting, runs_of
from timeball.schedule.outcomes import Holds, ReleaseCursor, Settled
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.catalog import Catalog

logger = logging.getLogger(__name__)

_EMPTY = np.empty(0, np.int64)


def newest_starting_point(
    checkpoint: cp.Checkpoint | None, segments: Segments, to_seq: int | None = None
) -> cp.Checkpoint:
    """Choose the checkpoint if the log has the rows that it needs, else the last snapshot, else an empty state.

    The log may lack rows that the result needs. `starting_point` refuses that.
    """
    if checkpoint is not None and not lacks_rows(checkpoint, segments):
        return checkpoint
    # There is no checkpoint, or retention has removed rows that it needs. Retention does so only after a later
    # snapshot. Without a snapshot, recovery replays the log from its first row.
    return last_snapshot(segments, to_seq) or cp.Checkpoint(cp.Facts(seq=1), _EMPTY, _EMPTY)


def lacks_rows(start: cp.Checkpoint, segments: Segments) -> bool:
    """Check whether the log no longer has rows that this starting point needs."""
    return segments.first_seq > start.facts.log_from_seq


def starting_point(
    checkpoint: cp.Checkpoint | None, segments: Segments, to_seq: int | None = None
) -> cp.Checkpoint:
    """Choose the starting point: the checkpoint if it fits the log, else the last snapshot, else an empty state.

    Only rows below `to_seq` are committed. A later snapshot may still be truncated from a replicated log, so it is not
    used. Raises Corrupt if the log lacks rows that retention cannot have removed.
    """
    start = newest_starting_point(checkpoint, segments, to_seq)
    # Retention never removes rows from `log_from_seq` on, so a file must be missing.
    if lacks_rows(start, segments):
        raise Corrupt(
            f"{segment_name(segments.all[0].ordinal - 1)} is missing: the log begins with seq {segments.first_seq}, "
            f"but retention has removed nothing from seq {start.facts.log_from_seq} on; restore the file from a copy"
        )
    return start


def apply_log(start: cp.Checkpoint, reader: LogReader, tables: Tables, *, resumes: bool = False) -> Applying:
    """Apply the whole log from a starting point on, fill `tables`, and return the caches. This blocks.

    `resumes` means that the strategy has saved the scheduled messages before the starting point in its own files.
    """
    applying = Applying(start, reader, tables, resumes=resumes)
    applying.apply(reader.next_seq)
    return applying


# ---- apply rows in steps, and build the state of a start -----------------------------------------------------
# A start applies the whole log in one step. A follower of a replicated log applies committed rows as they arrive, so it
# has nothing left to replay when it becomes leader. Both reach the same state, because the size of the steps does not
# matter.


# Small frames are joined up to this number of rows. Larger ones are applied as they are, without copying a body. With
# batches of 8,192 rows, a row takes half as long again: malloc returns their memory to the system after each batch.
BATCH_ROWS = 1_024
# To *fold* means to drop rows that later rows have replaced. Done after this number of new rows, or after a quarter of
# the kept rows if that is more, so each row is copied O(1) times.
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
    redeliveries: Redeliveries
    halves: list[Half]
    moved: Int64Array  # the columns of `Moved` (schedule/outcomes.py)
    woken: tuple[Int64Array, ...]  # the columns of `Woken` (registry/selections.py)
    levels: dict[int, cp.LevelFacts]
    snapshot_seq: int
    log_from_seq: int  # of the last snapshot: retention may have removed older rows
    resumes: bool  # whether the strategy may use the state that it saved
    bring_up: Callable[[], None]  # updates the Delta log to match the commit log; runs in the table's thread


class Applying:
    """The caches of one log up to a row. All methods block. Belongs to one thread until it is finished.

    When the row of a committed snapshot (log/checkpoint.py) is applied, the snapshot becomes the starting point, and
    the settled pairs that it covers are dropped. So memory holds the pending messages, and the pairs settled since the
    last snapshot. A snapshot covers the rows up to the number where it was taken. The rows from there to its own row
    are applied again.
    """

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
        self.applied_seq = facts.seq  # all rows below this number are applied, and no later rows
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
        """Read the scheduled messages between the watermark and the starting point. Otherwise `finish` does it."""
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
            # Retention has removed rows since the last step, and consumers must not get them.
            self._first_seq = self.reader.first_seq
            self.tables.topics.forget(self._first_seq)
        # The threshold grows with the number of kept rows: a tail of ten million rows must not be folded for every
        # thousand new ones.
        unfolded_rows = self._tail.unfolded_rows + self._replayed.unfolded_rows
        if unfolded_rows >= max(FOLD_ROWS, self.kept_rows // 4):
            self._fold()

    def finish(self, catalog: Catalog, now_ms: int) -> Recovered:
        """Check the data files, and build the state that a broker starts with.

        Call it once, and do not call `apply` after. The table's Delta log is a cache, which the result's `bring_up`
        updates later. Raises Corrupt if a data file is missing. If an object store does not answer now, `bring_up`
        checks the files.
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
            redeliveries=replayed.redeliveries,
            halves=load(self.reader, replayed.halves, dict(facts.halves)),
            moved=replayed.moved(),
            woken=replayed.woken(),
            levels=facts.levels,
            snapshot_seq=self.snapshot_seq,
            log_from_seq=facts.log_from_seq,
            resumes=self._resumes,
            bring_up=bring_up,
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _apply(self, rows: pa.RecordBatch) -> None:
        """Apply READ_SCHEMA rows to all caches, in the order of the dependencies between them."""
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
        self._replayed.apply(rows)
        # If the watermark moved, the broker ran with another strategy and ended without a checkpoint. The table now has
        # messages that are also in the strategy's saved state, so that state is unusable.
        self._resumes = self._resumes and self.ledger.watermark == watermark
        # Last, because a new starting point replaces only `_replayed`.
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
        # Keep the tail: the snapshot lists settled messages, but not the locations of pending messages.
        self._replayed = Replayed(starting_point, self.ledger)
        for rows in self.reader.coalesced(starting_point.facts.seq, end_seq, None, BATCH_ROWS):
            self._replayed.apply(rows)
        self._fold()

    def _fold(self) -> None:
        """Remove settled messages, and rows that later rows replace."""
        self._replayed.fold()
        self._tail.fold(self._replayed.settled(), self._from_seq())

    def _from_seq(self) -> int:
        """Find the first row of the log's tail."""
        # Messages below the watermark are in the table. Messages in rows that retention removed were settled.
        return max(self.ledger.watermark, self.reader.first_seq)


# ---- the scheduled messages in the log's tail ----------------------------------------------------------------
# Each message takes three int64. Rows are folded from time to time: settled messages and messages in the table are
# removed, and each other message keeps only its last row. So a follower that applies rows for days holds the pending
# messages, and the messages since the last fold.

COUNT_BLOCK = 4_096  # sequence numbers in a block
_COLUMNS = ("seq", "kind", "due_ms", "queue_offset", "source_seq", "version_seq", "from_due_ms")
_BATCH_ROWS = 65_536


class TailScheduled:
    """The scheduled messages in rows from `from_seq` on. Belongs to the thread that applies the rows.

    Compaction needs the number of versions of scheduled messages since the watermark, including settled messages. They
    are counted in blocks of sequence numbers. The block that contains the watermark is counted from the log.
    """

    def __init__(self, from_seq: int) -> None:
        self.from_seq = from_seq
        # Columns as in `Waiting`. Rows that were added since the last fold are in log order.
        self._columns = GrowingColumns(3)
        self._folded_rows = 0
        self._counts: dict[int, int] = {}  # block of numbers -> versions that begin in it

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
        """Add the scheduled messages in the rows from `from_seq` to `self.from_seq`. This blocks."""
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
        tail = locations.latest_locations([Waiting(*self._columns.columns())], from_seq)
        is_pending = (tail.due_ms >= settled.before_ms) | settled.may_be_pending(tail.seq)
        cancelled_count = len(settled.seq) - settled.released
        # A version has one due time, so the due times need not be compared.
        for seq in (settled.seq[:cancelled_count], settled.seq[cancelled_count:]):
            _clear_settled(tail.seq, seq, is_pending)
        return tail if is_pending.all() else tail.part(is_pending)

    def count(self, reader: LogReader, from_seq: int) -> int:
        """Count the versions of scheduled messages that begin in rows from `from_seq` on. This blocks."""
        from_seq = max(from_seq, self.from_seq)
        block = from_seq // COUNT_BLOCK
        total = sum(count for counted_block, count in self._counts.items() if counted_block > block)
        # The end of the first block is counted from the log, which takes milliseconds.
        if block not in self._counts:
            return total
        end = (block + 1) * COUNT_BLOCK
        for rows in reader.coalesced(from_seq, end, locations.KINDS, _BATCH_ROWS, _COLUMNS):
            total += len(_new_versions(locations.waiting_in(locations.waiting_rows(rows))))
        return total

    def _count(self, waiting: Waiting) -> None:
        """Count the versions that begin in these rows, by block of sequence numbers."""
        blocks = _new_versions(waiting) // COUNT_BLOCK
        if len(blocks):
            # Numbers ascend within the rows of one call, so the blocks ascend too. Usually there is only one.
            begins, counts = runs_of(blocks)
            for block, count in zip(blocks[begins].tolist(), counts.tolist(), strict=True):
                self._counts[block] = self._counts.get(block, 0) + count


def _new_versions(waiting: Waiting) -> Int64Array:
    """List the versions that begin with these rows. A row that only repeats a message begins none."""
    if waiting.row_seq is waiting.seq:  # no MOVED rows (`waiting_in`)
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


# ---- attaches, settled pairs, moves, redeliveries, half messages ---------------------------------------------
# Rows are applied in log order from the starting point's number on, in any number of steps: the same rows give the same
# facts.
#
#     a pair is settled if a RELEASE, CANCEL or MOVED row from the starting point on names it, or if it is in the list
#     of the starting point, or if the mark of the starting point covers it (`Settled` in schedule/outcomes.py)

_NAMES = ("seq", "kind", "due_ms", "source_seq", "version_seq", "from_due_ms")
_SETTLING = frozenset({Kind.RELEASE, Kind.CANCEL})


class Replayed:
    """The state of a starting point and of the rows after it. Belongs to the thread that applies the rows."""

    def __init__(self, start: Checkpoint, attach_state: AttachState) -> None:
        facts = self.facts = start.facts
        attach_state.restore(facts)
        self._attach_state, self._baseline = attach_state, _Baseline.of(start)
        # Columns: due_ms, version, and 1 for a release or 0 for a cancel. The pairs of the starting point come first.
        # Pairs that were added since the last fold are in log order.
        self._settled = GrowingColumns(3)
        is_released = np.arange(len(start.settled_seq)) >= len(start.settled_seq) - facts.settled_released
        self._settled.add(start.settled_due, start.settled_seq, is_released)
        self._moved = GrowingColumns(4)  # columns: due_ms, number, version, until_ms, as for `Moved.restore`
        self._moved.add(*start.moved)
        self._woken = GrowingColumns(4)  # columns: version, base_ms, base version, due_ms, as for `Woken.add`
        self._woken.add(*start.woken)
        self._folded_rows = len(self)
        self.redeliveries = Redeliveries()
        self.redeliveries.restore(facts.redeliveries)
        # Numbers of the open half messages.
        self.halves = np.array([seq for seq, _ in facts.halves], np.int64)
        self.cursor = ReleaseCursor(*facts.tick)
        self.waiting_rows = facts.waiting_rows  # pending messages with a due time, in all locations
        # The live files by path, and the attaches since the starting point, which the Delta table may lack.
        self.files = {entry.path: entry for entry in msgspec.convert(facts.files, list[FileEntry])}
        self.attaches: list[tuple[int, Attachment]] = []

    def __len__(self) -> int:
        """The number of settled pairs, moves and wake-ups in memory."""
        return len(self._settled) + len(self._moved) + len(self._woken)

    @property
    def unfolded_rows(self) -> int:
        """The number of settled pairs, moves and wake-ups that were added since the last fold."""
        return len(self) - self._folded_rows

    def apply(self, rows: pa.RecordBatch) -> None:
        """Apply READ_SCHEMA rows, which follow all rows applied before."""
        kinds = rows.column("kind").to_numpy()
        # Most batches have one or two kinds, so most of the branches below are skipped.
        present = kinds_in(kinds)
        if present & (locations.KINDS | _SETTLING):
            # Rows without a due time are half messages, and rows that end them.
            has_due_time = np.asarray(rows.column("due_ms").is_valid())
            # Select the columns first: filtering rows of all columns would copy every body.
            narrow_rows = rows.select(_NAMES)
            is_move = (kinds == Kind.MOVED) & has_due_time
            new_halves = rows.column("seq").to_numpy()[(kinds == Kind.SCHEDULED) & ~has_due_time]
            if is_move.any():
                self._replay_moves(rows.select([*_NAMES, "properties"]).filter(pa.array(is_move)))
            is_end = np.isin(kinds, list(_SETTLING))
            if present & _SETTLING:
                self._replay_ends(narrow_rows.filter(pa.array(is_end & has_due_time)))
            # A half message ends with a RELEASE or CANCEL row, or with a MOVED row that gives it its first due time.
            # Other moves name no half message.
            ends_half = is_move | (is_end & ~has_due_time)
            if len(new_halves) or (len(self.halves) and ends_half.any()):
                self.halves = np.setdiff1d(
                    np.concatenate([self.halves, new_halves]), _source_seqs(rows, ends_half)
                )
            self.redeliveries.replay(rows)
            self.waiting_rows += int(np.count_nonzero((kinds == Kind.SCHEDULED) & has_due_time))
        if Kind.TABLE in present:
            for index in np.flatnonzero(kinds == Kind.TABLE).tolist():
                self._replay_table_row(rows.slice(index, 1))

    def _replay_ends(self, ends: pa.RecordBatch) -> None:
        """Apply RELEASE and CANCEL rows of messages with a due time."""
        due_ms, original_due = ends.column("due_ms").to_numpy(), ends.column("from_due_ms")
        # After a step of the clock a message may be released at another time than its original due time. Then the
        # RELEASE row contains the original time as `from_due_ms`.
        original_due_ms = due_ms
        if original_due.null_count < len(original_due):
            original_due_ms = original_due.fill_null(0).to_numpy()
            original_due_ms = np.where(np.asarray(original_due.is_valid()), original_due_ms, due_ms)
        is_release = ends.column("kind").to_numpy() == Kind.RELEASE
        self._settle(original_due_ms, locations.versions(ends), is_release)
        self.cursor = self.cursor.after(due_ms[is_release])

    def _replay_moves(self, rows: pa.RecordBatch) -> None:
        """Apply MOVED rows. A row with `from_due_ms` changes the due time and settles the previous version.

        A row without it only repeats a message.
        """
        moves = rows.filter(rows.column("from_due_ms").is_valid())
        columns = [moves.column(name).to_numpy() for name in ("due_ms", "source_seq", "seq", "from_due_ms")]
        # `from_due_ms` is the `until_ms` of a move so far: `fold` computes the latest due time of all versions.
        self._moved.add(*columns)
        due_ms, _, version, from_due_ms = columns
        index, base_ms, base = bases_in(moves.column("properties"))
        # The first due time of a half message is no wake-up, even if its sender has set the property BASE.
        is_woken = from_due_ms[index] != NO_DUE_TIME_MS
        if len(index := index[is_woken]):
            self._woken.add(version[index], base_ms[is_woken], base[is_woken], due_ms[index])
        self._settle(from_due_ms, locations.versions(moves), np.zeros(moves.num_rows, np.bool_))
        # A move ends one version (subtracted in `_settle`) and begins another one. A half message has no previous
        # version, and `count_new` does not count it.
        self.waiting_rows += moves.num_rows

    def _settle(self, due_ms: Int64Array, seq: Int64Array, is_release: npt.NDArray[np.bool_]) -> None:
        """Add settled pairs, and subtract the pairs that were pending from `waiting_rows`."""
        # Even pairs due before the mark are added, because it covers only rows before the starting point.
        self._settled.add(due_ms, seq, is_release)
        self.waiting_rows -= self._baseline.count_new(due_ms, seq)

    def _replay_table_row(self, row: pa.RecordBatch) -> None:
        """Apply a TABLE row: a reservation or an attach."""
        change, seq = att.decode_change(row.column("body")[0].as_py()), row.column("seq")[0].as_py()
        if isinstance(change, att.Reservation):
            # The reservation covers the numbers directly after its own row (table_changes.reserve).
            self._attach_state.reserve(seq + 1, change.rows)
            return
        self._attach_state.apply(change, seq, row.column("store_ms")[0].as_py())
        self.attaches.append((seq, change))
        att.apply_to(self.files, change)
        if change.job == "bulk":
            self.waiting_rows += change.rows

    # -- results -------------------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Sort the settled pairs, moves and wake-ups, and keep one entry for each number."""
        due_ms, seq, released = self._settled.columns()
        # A message may be settled twice: in the starting point's list and by a later row. If either is a release, it
        # was released.
        begins, order = _group_equal(seq)
        if len(begins):
            self._settled.replace(
                due_ms[order][begins], seq[order][begins], np.maximum.reduceat(released[order], begins)
            )
        due_ms, number, version, until_ms = self._moved.columns()
        begins, order = _group_equal(number)
        # Each message keeps its last version, and the latest due time of all its versions. Until that time a file or a
        # request may still name an older version.
        if len(begins):
            # The order is stable, so the last entry of a group is the last move.
            last_rows = order[np.append(begins[1:], len(order)) - 1]
            latest_due_ms = np.maximum.reduceat(np.maximum(due_ms, until_ms)[order], begins)
            self._moved.replace(due_ms[last_rows], number[last_rows], version[last_rows], latest_due_ms)
        self._woken.replace(*self.woken())
        self._folded_rows = len(self)

    def woken(self) -> tuple[Int64Array, ...]:
        """Build the columns of the wake-ups that the mark does not cover, each once, sorted by version."""
        columns, mark = np.stack(self._woken.columns()), self._baseline.mark
        version, _, _, due_ms = columns
        # After the clock was set back, a wake-up may be due before the mark and still be pending.
        columns = columns[:, (due_ms >= mark.before_ms) | mark.may_be_pending(version)]
        return tuple(columns[:, np.unique(columns[0], return_index=True)[1]])

    def settled(self) -> Settled:
        """Build the settled pairs: first the cancelled messages, then the released messages, each sorted by number.

        Call `fold` before.
        """
        facts = self.facts
        due_ms, seq, released = self._settled.columns()
        was_released = released.astype(np.bool_)
        # `Settled.released` is the number of released pairs at the end, so the order tells them apart.
        return Settled(
            facts.settled_before_ms,
            tuple((due_ms[is_part], seq[is_part]) for is_part in (~was_released, was_released)),
            released=int(np.count_nonzero(was_released)),
            # The mark applies only to rows below the starting point. Later rows are settled by pairs.
            before_seq=min(facts.seq, facts.settled_before_seq),
            late=(*facts.late, *(each for _, attachment in self.attaches for each in attachment.ranges)),
        )

    def moved(self) -> Int64Array:
        """Build the columns of the moved messages by number, as in schedule/outcomes.py. Call `fold` before."""
        return np.stack(self._moved.columns())


def kinds_in(kinds: npt.NDArray[np.int8]) -> set[int]:
    """Find the distinct kinds of some rows."""
    return set(np.flatnonzero(np.bincount(kinds)).tolist())


@dataclass(frozen=True, slots=True)
class _Baseline:
    """The messages that a starting point already counts as settled.

    A later row may settle such a message again: a decision takes effect in memory at once, and its row may become
    durable after the starting point was saved.
    """

    mark: Settled
    seq: Int64Array  # the numbers of its settled pairs, sorted
    holds: Holds

    @classmethod
    def of(cls, start: Checkpoint) -> _Baseline:
        """Build the baseline of a starting point."""
        facts, holds = start.facts, Holds()
        # Campaigns come from the starting point, not from the tables, which may already contain later rows.
        for name, campaign in _decode_campaigns(facts).items():
            if campaign.held_from_ms is not None:
                holds.add(name, campaign.ranges, campaign.held_from_ms)
        before_seq = min(facts.seq, facts.settled_before_seq)
        mark = Settled(facts.settled_before_ms, before_seq=before_seq, late=tuple(facts.late))
        return cls(mark, np.sort(start.settled_seq), holds)

    def count_new(self, due_ms: Int64Array, seq: Int64Array) -> int:
        """Count the pairs that the starting point does not count as settled. Half messages are not counted."""
        if (is_half := due_ms == NO_DUE_TIME_MS).any():
            due_ms, seq = due_ms[~is_half], seq[~is_half]
        is_settled = (due_ms < self.mark.before_ms) & ~self.mark.may_be_pending(seq)
        is_settled &= ~self.holds.contains(due_ms, seq)
        if len(self.seq):
            index = np.minimum(np.searchsorted(self.seq, seq), len(self.seq) - 1)
            is_settled |= self.seq[index] == seq
        return int(np.count_nonzero(~is_settled))


def _decode_campaigns(facts: Facts) -> dict[str, CampaignFacts]:
    """Decode the campaigns in the META values of a starting point, by name."""
    return {
        key.removeprefix("campaign/"): msgspec.json.decode(value, type=CampaignFacts)
        for key, value in facts.meta.items()
        if key.startswith("campaign/")
    }


def _group_equal(numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Compute a stable sort order of the numbers, and the index in this order at which each distinct number begins.

    Returns (begins, order).
    """
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return np.flatnonzero(is_first), order


def _source_seqs(rows: pa.RecordBatch, is_selected: npt.NDArray[np.bool_]) -> Int64Array:
    """List the numbers that these rows name in `source_seq`."""
    sources = rows.column("source_seq").filter(pa.array(is_selected)).drop_null()
    return np.asarray(sources.to_numpy(), dtype=np.int64)
