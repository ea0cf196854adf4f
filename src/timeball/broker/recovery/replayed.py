"""Apply rows of the log to the state of a starting point: all except topics, queues and pending messages.

A starting point is a checkpoint or a snapshot. Rows are applied in log order from the starting point's number on, in
any number of steps: the same rows give the same facts. *Settled* means released or cancelled.

    settled(p)  =  p is named by a release or cancel record from the starting point on, or by its list,
                   or p is covered by its mark: below settled_before_seq, due before settled_before_ms,
                   and not of a bulk attach that came later than the mark

A MOVED row to another due time settles the version that it names, and is the newest version of its scheduled message. A
half message is open until a row names it. The cursor advances with every RELEASE row of a message with a due time.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.broker.registry.attach import AttachState
from timeball.broker.registry.campaigns import CampaignFacts
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.log.checkpoint import Checkpoint, Facts
from timeball.model.message import NO_DUE_TIME_MS, Int64Array, Kind
from timeball.schedule import locations
from timeball.schedule.columns import GrowingColumns
from timeball.schedule.outcomes import Holds, ReleaseCursor, Settled
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry

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
        self._moved = GrowingColumns(4)  # columns: due_ms, number, version, until_ms, as in schedule/moved.py
        self._moved.add(*np.array(facts.moved, np.int64).reshape(-1, 4).T)
        self._folded_rows = len(self)
        self.leases = LeaseCounts()
        self.leases.restore(facts.leases)
        # Numbers of the open half messages.
        self.halves = np.array([seq for seq, _ in facts.halves], np.int64)
        self.cursor = ReleaseCursor(*facts.tick)
        self.waiting_rows = facts.waiting_rows  # pending messages with a due time, in all locations
        # The live files by path, and the attaches since the starting point, which the Delta table may lack.
        self.files = {entry.path: entry for entry in msgspec.convert(facts.files, list[FileEntry])}
        self.attaches: list[tuple[int, Attachment]] = []

    def __len__(self) -> int:
        """The number of settled pairs and moves in memory."""
        return len(self._settled) + len(self._moved)

    @property
    def unfolded_rows(self) -> int:
        """The number of settled pairs and moves that were added since the last fold."""
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
                self._replay_moves(narrow_rows.filter(pa.array(is_move)))
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
            self.leases.replay(rows)
            self.waiting_rows += int(np.count_nonzero((kinds == Kind.SCHEDULED) & has_due_time))
        if Kind.TABLE in present:
            for index in np.flatnonzero(kinds == Kind.TABLE).tolist():
                self._replay_table_row(rows.slice(index, 1))

    def _replay_ends(self, ends: pa.RecordBatch) -> None:
        """Apply RELEASE and CANCEL rows of messages with a due time."""
        due_ms, original_due = ends.column("due_ms").to_numpy(), ends.column("from_due_ms")
        # After a step of the clock a message may be released at another time than its due time. Then the RELEASE row
        # contains both times, and `from_due_ms` is the due time.
        original_due_ms = due_ms
        if original_due.null_count < len(original_due):
            original_due_ms = original_due.fill_null(0).to_numpy()
            original_due_ms = np.where(np.asarray(original_due.is_valid()), original_due_ms, due_ms)
        is_release = ends.column("kind").to_numpy() == Kind.RELEASE
        self._settle(original_due_ms, locations.versions(ends), is_release)
        self.cursor = self.cursor.after(due_ms[is_release])

    def _replay_moves(self, rows: pa.RecordBatch) -> None:
        """Apply MOVED rows.

        Rows with `from_due_ms` change the due time, and each of them settles the previous version.
        """
        moves = rows.filter(rows.column("from_due_ms").is_valid())
        columns = [moves.column(name).to_numpy() for name in ("due_ms", "source_seq", "seq", "from_due_ms")]
        # Keep every version: a request may name a message by any due time that it had.
        self._moved.add(*columns)
        self._settle(columns[3], locations.versions(moves), np.zeros(moves.num_rows, np.bool_))
        # A move ends one version (subtracted in `_settle`) and begins another one. A half message has no previous
        # version, and `count_new` does not count it.
        self.waiting_rows += moves.num_rows

    def _settle(self, due_ms: Int64Array, seq: Int64Array, is_release: npt.NDArray[np.bool_]) -> None:
        """Add settled pairs, and subtract from `waiting_rows` those that were pending."""
        # Keep the pair even if the mark covers it, because the mark applies only to rows below the starting point.
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
        """Keep each settled number and each moved message only once."""
        due_ms, seq, released = self._settled.columns()
        # A message may be settled twice: in the starting point's list and by a later row.
        begins, order = _group_equal(seq)
        if len(begins):
            self._settled.replace(
                due_ms[order][begins], seq[order][begins], np.maximum.reduceat(released[order], begins)
            )
        due_ms, number, version, until_ms = self._moved.columns()
        begins, order = _group_equal(number)
        # For each message keep its last version, and the latest due time of all its versions. Until that time a file
        # or a request may still name an older version.
        if len(begins):
            # The order is stable, so the last entry of a group is the last move.
            last_rows = order[np.append(begins[1:], len(order)) - 1]
            latest_due_ms = np.maximum.reduceat(np.maximum(due_ms, until_ms)[order], begins)
            self._moved.replace(due_ms[last_rows], number[last_rows], version[last_rows], latest_due_ms)
        self._folded_rows = len(self)

    def settled(self) -> Settled:
        """Build the settled pairs: first the cancelled ones, then the released ones, each sorted by number.

        Call `fold` before.
        """
        facts = self.facts
        due_ms, seq, released = self._settled.columns()
        was_released = released.astype(np.bool_)
        # `Settled.released` is the number of released pairs at the end, so the order tells them apart.
        return Settled(
            facts.settled_before_ms,
            np.concatenate([due_ms[~was_released], due_ms[was_released]]),
            np.concatenate([seq[~was_released], seq[was_released]]),
            released=int(np.count_nonzero(was_released)),
            # The mark applies only to rows below the starting point. Later rows are settled by pairs.
            before_seq=min(facts.seq, facts.settled_before_seq),
            late=(*facts.late, *(reserved for _, a in self.attaches for reserved in a.ranges)),
        )

    def moved(self) -> list[tuple[int, int, int, int]]:
        """List the moved messages by number, as in schedule/moved.py. Call `fold` before."""
        return list(zip(*(column.tolist() for column in self._moved.columns()), strict=True))


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
        facts, holds = start.facts, Holds()
        # Campaigns come from the starting point, not from the tables, which may already contain later rows.
        for name, campaign in _decode_campaigns(facts).items():
            if campaign.held_from_ms is not None:
                holds.add(name, campaign.ranges, campaign.held_from_ms)
        empty = np.empty(0, np.int64)
        before_seq = min(facts.seq, facts.settled_before_seq)
        mark = Settled(facts.settled_before_ms, empty, empty, before_seq=before_seq, late=tuple(facts.late))
        return cls(mark, np.sort(start.settled_seq), holds)

    def count_new(self, due_ms: Int64Array, seq: Int64Array) -> int:
        """Count the pairs that the starting point does not count as settled."""
        if (is_half := due_ms == NO_DUE_TIME_MS).any():
            due_ms, seq = due_ms[~is_half], seq[~is_half]
        is_settled = (due_ms < self.mark.before_ms) & ~self.mark.may_wait(seq)
        is_settled &= ~self.holds.contains(due_ms, seq)
        if len(self.seq):
            index = np.minimum(np.searchsorted(self.seq, seq), len(self.seq) - 1)
            is_settled |= self.seq[index] == seq
        return int(np.count_nonzero(~is_settled))


def _decode_campaigns(facts: Facts) -> dict[str, CampaignFacts]:
    return {
        key.removeprefix("campaign/"): msgspec.json.decode(value, type=CampaignFacts)
        for key, value in facts.meta.items()
        if key.startswith("campaign/")
    }


def _group_equal(numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Compute a stable sort order of the numbers, and where each distinct number begins in it.

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
