"""Apply rows of the log to the broker's caches, in steps, and then pass the caches to a broker.

A start applies the whole log in one step. A follower of a replicated log applies committed rows as they arrive, so a
takeover has nothing left to replay. Both reach the same state, because the size of the steps does not matter.

    apply    rows -> topics and queue indexes, META tables, attaches, leases, pending messages, settled pairs
    finish   check the data files, and put all together as `Recovered`

*Settled* means released or cancelled. A committed snapshot contains the state of all rows before it
(log/checkpoint.py). When its row is applied, it becomes the starting point, and all that it covers is dropped from
memory. So memory holds the pending messages, and the pairs settled since the last snapshot. Rows between the snapshot's
number and its own row arrived while the snapshot was made. They are read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.accepting.components import Tables
from timeball.broker.recovery.replayed import Replayed, kinds_in
from timeball.broker.recovery.tail_promises import TailPromises
from timeball.broker.registry.attach import AttachState
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.broker.registry.queue_entries import COLUMNS
from timeball.broker.transacting.transactions import Half, load
from timeball.log import checkpoint as cp
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader
from timeball.model.errors import Unavailable
from timeball.model.message import SNAPSHOT_KEY, Kind, pairs_of
from timeball.schedule import locations
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import ReleaseCursor, Settled
from timeball.table.attachment import FileEntry
from timeball.table.catalog import Catalog

logger = logging.getLogger(__name__)

# Small frames are joined up to this number of rows. Larger ones are applied as they are, without copying a body.
BATCH_ROWS = 8_192
# Fold after this number of rows, or after a quarter of the kept rows if that is more. So each row is moved O(1) times.
FOLD_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Recovered:
    """The recovered state for the schedule."""

    settled: Settled
    cursor: ReleaseCursor
    waiting: Waiting  # those in the log's tail, each at the last of its rows
    files: list[FileEntry]  # the live files, according to the log
    promises_since_watermark: int  # includes settled ones, because compaction reads all
    waiting_rows: int  # pending messages with a due time, in all locations
    leases: LeaseCounts
    halves: list[Half]
    moved: list[tuple[int, int, int, int]]
    levels: dict[int, cp.LevelFacts]
    snapshot_seq: int
    log_from_seq: int  # from the last snapshot: retention may have removed older rows
    resumes: bool  # whether the strategy may use the state that it saved
    bring_up: Callable[[], None]  # updates the Delta log to match the commit log; runs in the table's thread


class Applying:
    """The caches of one log up to a row. Blocking. Belongs to one thread until it is finished."""

    def __init__(
        self, known: Checkpoint, reader: LogReader, tables: Tables, *, resumes: bool = False
    ) -> None:
        """Begin with a starting point, and with the queue entries of the rows before it.

        `resumes` means that the strategy has saved the scheduled messages before the starting point in its own files.
        """
        self.reader, self.tables, self.ledger = reader, tables, AttachState()
        facts = known.facts
        # META rows first: topics must exist before the queues of the checkpoint and the replayed messages refer to
        # them.
        tables.meta.restore((key, bytes(value)) for key, value in facts.meta.items())
        tables.topics.load(reader, facts.queues, facts.seq)
        self._replayed = Replayed(known, self.ledger)
        self._tail = TailPromises(facts.seq)
        self._resumes = resumes
        self._first_seq = 1  # queues have no entries of rows before this one
        self.applied_seq = facts.seq  # all rows below this number are applied, no others
        self.snapshot_seq = facts.snapshot_seq  # the row number of the last snapshot
        # The first row that the log must keep. It comes from the last snapshot whose row was applied here, and without
        # one the log must keep all rows. A checkpoint may contain a later row: its broker was about to write a
        # snapshot, which may never have been committed.
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
        """Read the scheduled messages between the watermark and the starting point, so that `finish` need not do it."""
        self._tail.extend_down(self.reader, self.ledger.watermark)

    def apply(self, to_seq: int) -> None:
        """Apply the rows below `to_seq` that were not applied yet. All of them must be committed."""
        to_seq = min(to_seq, self.reader.next_seq)
        if (rows := to_seq - self.applied_seq) > FOLD_ROWS:
            self._tail.reserve(rows)
        # One read of all columns: queues, META and TABLE rows need nearly all of them, including bodies.
        for rows in self.reader.coalesced(self.applied_seq, to_seq, None, BATCH_ROWS):
            self._apply(rows)
        self.applied_seq = max(self.applied_seq, to_seq)
        if self.reader.first_seq > self._first_seq:
            # Retention may have removed more rows since the starting point. Consumers must not be offered these.
            self._first_seq = self.reader.first_seq
            self.tables.topics.forget(self._first_seq)
        # The threshold grows with the number of kept rows: a tail of ten million rows must not be folded for every
        # thousand new ones.
        unfolded_rows = self._tail.unfolded_rows + self._replayed.unfolded_rows
        if unfolded_rows >= max(FOLD_ROWS, self.kept_rows // 4):
            self._fold()

    def finish(self, catalog: Catalog, now_ms: int) -> Recovered:
        """Return the pending messages and the other state that a broker starts with.

        Call it once, and do not call `apply` after. Raises Corrupt if a data file is missing. The table's Delta log is
        a cache, which `bring_up` updates later.
        """
        assert self.applied_seq == self.reader.next_seq, "rows that are not applied would be forgotten"
        replayed, ledger = self._replayed, self.ledger
        files = list(replayed.files.values())
        attach_seq, watermark, attaches = ledger.attach_seq, ledger.watermark, replayed.attaches

        steps = [partial(catalog.bring_up, files, attaches, attach_seq, watermark, now_ms)]
        try:
            # A missing file must stop the start before anything is changed.
            catalog.check_data(files)
        except Unavailable as error:
            logger.warning("pending table is behind the log reason=%s", error)
            steps.insert(0, partial(catalog.check_data, files))

        def bring_up() -> None:
            for step in steps:
                step()

        # The part of the tail before the starting point is needed only if the strategy has no files with these
        # messages.
        if not self._resumes:
            self.read_tail()
        replayed.fold()
        facts, from_seq = replayed.facts, self._from_seq()
        # Strategies without compaction move the watermark only in memory, at retention (upkeep.py). No row of the log
        # contains that move, so repeat it here.
        ledger.watermark = from_seq
        settled = replayed.settled()
        return Recovered(
            settled,
            replayed.cursor,
            self._tail.waiting(settled, from_seq),
            files,
            self._tail.count(self.reader, from_seq),
            replayed.waiting_rows,
            replayed.leases,
            load(self.reader, replayed.halves, dict(facts.halves)),
            replayed.moved(),
            facts.levels,
            self.snapshot_seq,
            facts.log_from_seq,
            self._resumes,
            bring_up,
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _apply(self, rows: pa.RecordBatch) -> None:
        kinds = rows.column("kind").to_numpy()
        present = kinds_in(kinds)
        state = rows.filter(pa.array(kinds == Kind.META)) if Kind.META in present else None
        if state is not None:  # a topic must exist before its messages
            self.tables.meta.restore(pairs_of(state))
        placed = np.asarray(rows.column("queue_offset").is_valid())
        if placed.any():
            visible = rows.select(COLUMNS)
            visible = visible if placed.all() else visible.filter(pa.array(placed))
            self.tables.topics.replay(visible, visible.column("seq").to_numpy())
        if present & locations.KINDS:
            self._tail.add(rows)
        watermark = self.ledger.watermark
        # After the META rows and the queues, which a new starting point does not change.
        self._replayed.apply(rows)
        # The watermark moved, so another strategy ran and ended without a checkpoint. The table now also has messages
        # that the saved state contains, so the saved state is unusable.
        self._resumes = self._resumes and self.ledger.watermark == watermark
        if state is not None:
            self._begin_anew(state, rows.column("seq")[-1].as_py() + 1)

    def _begin_anew(self, state: pa.RecordBatch, end_seq: int) -> None:
        """Start anew from the last snapshot among these META rows. All rows below `end_seq` have been applied."""
        snapshots = state.filter(pc.equal(state.column("unique_key"), SNAPSHOT_KEY))
        if not snapshots.num_rows:
            return
        self.snapshot_seq = snapshots.column("seq")[-1].as_py()
        known = cp.decode(snapshots.column("body")[-1].as_py())
        self.log_from_seq = known.facts.log_from_seq
        # A starting point that was saved while the snapshot was being written to the log is newer.
        if known.facts.seq < self._replayed.facts.seq:
            return
        # Keep the tail: the snapshot lists settled messages, but not the locations of pending ones.
        self._replayed = Replayed(known, self.ledger)
        for rows in self.reader.coalesced(known.facts.seq, end_seq, None, BATCH_ROWS):
            self._replayed.apply(rows)
        self._fold()

    def _fold(self) -> None:
        self._replayed.fold()
        self._tail.fold(self._replayed.settled(), self._from_seq())

    def _from_seq(self) -> int:
        # Messages below the watermark are in the table. Messages in rows that retention removed were settled.
        return max(self.ledger.watermark, self.reader.first_seq)
