"""Bring the broker's caches up to date with rows of the log, in steps; at the end hand them to a broker.

A start applies the whole log in one step. A follower of a replicated log applies committed rows as they come, so that
a takeover has nothing left to replay. Both get the same state: the same rows, in any steps, add up to the same facts.

    apply    rows -> topics and queue indexes, META tables, attaches, leases, promises that wait, settled pairs
    finish   the data files are checked, and all is put together as `Recovered`

A committed snapshot says all that the rows before it said (log/checkpoint.py). Once its row is applied it becomes the
starting point, and what it covers is dropped: memory holds what waits, and what was settled since the last snapshot.
Rows between the snapshot's number and its own row, which came while it was made, are read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.components import Tables
from timeball.broker.queue_entries import COLUMNS
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.broker.replayed import Replayed, kinds_in
from timeball.broker.tables.attach import AttachState
from timeball.broker.tail_promises import TailPromises
from timeball.broker.transactions import Half, load
from timeball.errors import Unavailable
from timeball.log import checkpoint as cp
from timeball.log.checkpoint import Checkpoint
from timeball.log.reader import LogReader
from timeball.message import SNAPSHOT_KEY, Kind, pairs_of
from timeball.schedule import locations
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import ReleaseCursor, Settled
from timeball.table.attachment import FileEntry
from timeball.table.catalog import Catalog

logger = logging.getLogger(__name__)

# Small frames are joined up to so many rows; larger ones are applied without copying a body.
BATCH_ROWS = 8_192
FOLD_ROWS = 65_536  # rows since the last fold, or a quarter of what is kept when that is more: each is moved O(1) times


@dataclass(frozen=True, slots=True)
class Recovered:
    """State for the schedule."""

    settled: Settled
    cursor: ReleaseCursor
    waiting: Waiting  # in the tail, each in the last of its rows
    files: list[FileEntry]  # that live now, by the log
    promises_since_watermark: int  # settled ones included: compaction looks at all
    waiting_rows: int  # promises for an instant that wait anywhere
    leases: LeaseCounts
    halves: list[Half]
    moved: list[tuple[int, int, int, int]]
    levels: dict[int, cp.LevelFacts]
    snapshot_seq: int
    log_from_seq: int  # by the last snapshot: retention may have let go what stands below
    resumes: bool  # whether the strategy may go on with the state it saved
    bring_up: Callable[[], None]  # the Delta log, to the commit log; in the table's thread


class Applying:
    """The caches of one log up to a row. Blocking; belongs to one thread until it is finished."""

    def __init__(
        self, known: Checkpoint, reader: LogReader, tables: Tables, *, resumes: bool = False
    ) -> None:
        """Begin with a starting point, and with what the queues hold of the rows before it.

        `resumes`: the strategy finds promises before the starting point in files of its own.
        """
        self.reader, self.tables, self.ledger = reader, tables, AttachState()
        facts = known.facts
        # META first: topics must be there before the queues of the checkpoint and the replayed messages name them.
        tables.meta.restore((key, bytes(value)) for key, value in facts.meta.items())
        tables.topics.load(reader, facts.queues, facts.seq)
        self._replayed = Replayed(known, self.ledger)
        self._tail = TailPromises(facts.seq)
        self._resumes = resumes
        self._first_seq = 1  # queues hold no entries of rows before it
        self.applied_seq = facts.seq  # all rows below it have been applied, none at or above it
        self.snapshot_seq = facts.snapshot_seq  # the row of the last snapshot
        # The first row that the log must keep, by the last snapshot whose row was applied here; without one, all. A
        # checkpoint may say more: its broker was about to write a snapshot, which may never have been committed.
        self.log_from_seq = 1

    @property
    def files(self) -> dict[str, FileEntry]:
        """Return the data files that live, by path."""
        return self._replayed.files

    @property
    def kept_rows(self) -> int:
        """Return how many promises, settled pairs and moves are in memory."""
        return len(self._tail) + len(self._replayed)

    def read_tail(self) -> None:
        """Read the promises between the watermark and the starting point, so that `finish` need not."""
        self._tail.extend_down(self.reader, self.ledger.watermark)

    def apply(self, to_seq: int) -> None:
        """Apply the durable rows below `to_seq` that were not applied; all of them must be committed."""
        to_seq = min(to_seq, self.reader.next_seq)
        if (rows := to_seq - self.applied_seq) > FOLD_ROWS:
            self._tail.reserve(rows)
        # All columns in one read: queues, META and TABLE rows need nearly all of them, also bodies.
        for rows in self.reader.coalesced(self.applied_seq, to_seq, None, BATCH_ROWS):
            self._apply(rows)
        self.applied_seq = max(self.applied_seq, to_seq)
        if self.reader.first_seq > self._first_seq:
            # Retention may have gone on after the starting point, and what it let go must not be offered.
            self._first_seq = self.reader.first_seq
            self.tables.topics.forget(self._first_seq)
        # In proportion to what is kept: a tail of ten million rows must not be folded for each thousand that come.
        unfolded_rows = self._tail.unfolded_rows + self._replayed.unfolded_rows
        if unfolded_rows >= max(FOLD_ROWS, self.kept_rows // 4):
            self._fold()

    def finish(self, catalog: Catalog, now_ms: int) -> Recovered:
        """Return the promises that wait and all else that a broker begins with; call it once, and `apply` no more.

        Raises Corrupt when a data file is missing. The table's Delta log is a cache, and is brought up later.
        """
        assert self.applied_seq == self.reader.next_seq, "rows that are not applied would be forgotten"
        replayed, ledger = self._replayed, self.ledger
        files = list(replayed.files.values())
        attach_seq, watermark, attaches = ledger.attach_seq, ledger.watermark, replayed.attaches

        steps = [partial(catalog.bring_up, files, attaches, attach_seq, watermark, now_ms)]
        try:
            # A file that is missing must stop the start while all is as it was.
            catalog.check_data(files)
        except Unavailable as error:
            logger.warning("pending table is behind the log reason=%s", error)
            steps.insert(0, partial(catalog.check_data, files))

        def bring_up() -> None:
            for step in steps:
                step()

        # The rest of the tail, before the starting point, is read only when no files of the strategy hold it.
        if not self._resumes:
            self.read_tail()
        replayed.fold()
        facts, from_seq = replayed.facts, self._from_seq()
        # Retention moves it in memory where no compaction does (upkeep.py), and only a checkpoint would say so.
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
        if state is not None:  # a topic before the messages that follow it
            self.tables.meta.restore(pairs_of(state))
        placed = np.asarray(rows.column("queue_offset").is_valid())
        if placed.any():
            visible = rows.select(COLUMNS)
            visible = visible if placed.all() else visible.filter(pa.array(placed))
            self.tables.topics.replay(visible, visible.column("seq").to_numpy())
        if present & locations.KINDS:
            self._tail.add(rows)
        watermark = self.ledger.watermark
        # Behind the META rows and the queues, none of which a new starting point changes.
        self._replayed.apply(rows)
        # Another strategy ran meanwhile and ended without a checkpoint: the table has promises which its state holds,
        # too.
        self._resumes = self._resumes and self.ledger.watermark == watermark
        if state is not None:
            self._begin_anew(state, rows.column("seq")[-1].as_py() + 1)

    def _begin_anew(self, state: pa.RecordBatch, end_seq: int) -> None:
        """Go on from the last snapshot among these META rows; all rows below `end_seq` have been applied."""
        snapshots = state.filter(pc.equal(state.column("unique_key"), SNAPSHOT_KEY))
        if not snapshots.num_rows:
            return
        self.snapshot_seq = snapshots.column("seq")[-1].as_py()
        known = cp.decode(snapshots.column("body")[-1].as_py())
        self.log_from_seq = known.facts.log_from_seq
        # A starting point that was saved while the snapshot was on its way to the log knows more.
        if known.facts.seq < self._replayed.facts.seq:
            return
        # The tail stays: the snapshot says which promises are settled, and not where those lie that wait.
        self._replayed = Replayed(known, self.ledger)
        for rows in self.reader.coalesced(known.facts.seq, end_seq, None, BATCH_ROWS):
            self._replayed.apply(rows)
        self._fold()

    def _fold(self) -> None:
        self._replayed.fold()
        self._tail.fold(self._replayed.settled(), self._from_seq())

    def _from_seq(self) -> int:
        # Rows below the watermark are in the table, and those that retention has removed were settled.
        return max(self.ledger.watermark, self.reader.first_seq)
