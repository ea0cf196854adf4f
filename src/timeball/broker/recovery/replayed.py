"""Collect the facts in rows of the log, on top of a starting point: all except topics, queues and pending messages.

A starting point is a checkpoint or a snapshot. Rows are applied in log order from the starting point's number on, in
any number of steps: the same rows give the same facts. *Settled* means released or cancelled.

    settled(p)  =  p is named by a release or cancel record from the starting point on, or by its list,
                   or p is covered by its mark: below settled_before_seq, due before settled_before_ms,
                   and not of a bulk attach that came later than the mark

A MOVED row to another due time settles the version that it names, and is the newest version of its scheduled message. A
half message is open until a row names it. The cursor advances with every release record of a message with a due time.
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
from timeball.model.message import NO_INSTANT_MS, Int64Array, Kind
from timeball.schedule import locations
from timeball.schedule.columns import GrowingColumns
from timeball.schedule.outcomes import Holds, ReleaseCursor, Settled
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry

_NAMES = ("seq", "kind", "due_ms", "source_seq", "version_seq", "from_due_ms")
_SETTLING = frozenset({Kind.RELEASE, Kind.CANCEL})


class Replayed:
    """The facts of a starting point and of the rows after it. Belongs to the thread that applies the rows."""

    def __init__(self, known: Checkpoint, ledger: AttachState) -> None:
        facts = self.facts = known.facts
        ledger.restore(facts)
        self._ledger, self._before = ledger, _Before.of(known)
        # Columns: due_ms, version, 1 for a release. The starting point's rows come first. Rows that were added since
        # the last fold are in log order.
        self._settled = GrowingColumns(3)
        is_released = np.arange(len(known.settled_seq)) >= len(known.settled_seq) - facts.settled_released
        self._settled.add(known.settled_due, known.settled_seq, is_released)
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
        """Count the settled pairs and moves in memory."""
        return len(self._settled) + len(self._moved)

    @property
    def unfolded_rows(self) -> int:
        """The number of settled pairs and moves that were added since the last fold."""
        return len(self) - self._folded_rows

    def apply(self, rows: pa.RecordBatch) -> None:
        """Apply READ_SCHEMA rows, which follow all rows applied before."""
        kinds = rows.column("kind").to_numpy()
        # Computed once per batch: most batches have one or two kinds, and each branch below filters columns.
        present = kinds_in(kinds)
        if present & (locations.KINDS | _SETTLING):
            # Rows without a due time are half messages, and rows that end them.
            has_instant = np.asarray(rows.column("due_ms").is_valid())
            # Select the columns first: filtering rows of all columns would copy every body.
            named = rows.select(_NAMES)
            moves = (kinds == Kind.MOVED) & has_instant
            opened = rows.column("seq").to_numpy()[(kinds == Kind.SCHEDULED) & ~has_instant]
            if moves.any():
                self._replay_moves(named.filter(pa.array(moves)))
            settling = np.isin(kinds, list(_SETTLING))
            if present & _SETTLING:
                self._replay_ends(named.filter(pa.array(settling & has_instant)))
            # A move may give a half message its first due time. Other moves name no half message, so they change
            # nothing here.
            ended = moves | (settling & ~has_instant)
            if len(opened) or (len(self.halves) and ended.any()):
                self.halves = np.setdiff1d(np.concatenate([self.halves, opened]), _sources(rows, ended))
            self.leases.replay(rows)
            self.waiting_rows += int(np.count_nonzero((kinds == Kind.SCHEDULED) & has_instant))
        if Kind.TABLE in present:
            for at in np.flatnonzero(kinds == Kind.TABLE).tolist():
                self._replay_change(rows.slice(at, 1))

    def _replay_ends(self, done: pa.RecordBatch) -> None:
        """Apply RELEASE and CANCEL rows of messages with a due time."""
        due_ms, promised = done.column("due_ms").to_numpy(), done.column("from_due_ms")
        # After a step of the clock a message may be released at another time than its due time. Its row contains both:
        # `from_due_ms` is the due time.
        promised_ms = due_ms
        if promised.null_count < len(promised):
            promised_ms = promised.fill_null(0).to_numpy()
            promised_ms = np.where(np.asarray(promised.is_valid()), promised_ms, due_ms)
        released = done.column("kind").to_numpy() == Kind.RELEASE
        self._settle(promised_ms, locations.versions(done), released)
        self.cursor = self.cursor.after(due_ms[released])

    def _replay_moves(self, rows: pa.RecordBatch) -> None:
        """Apply MOVED rows, of which some are moves to another due time. Each of these settles the previous version."""
        moves = rows.filter(rows.column("from_due_ms").is_valid())
        columns = [moves.column(name).to_numpy() for name in ("due_ms", "source_seq", "seq", "from_due_ms")]
        # Keep all of them: a request may name a message by any due time that it had.
        self._moved.add(*columns)
        self._settle(columns[3], locations.versions(moves), np.zeros(moves.num_rows, np.bool_))
        # A move ends one version and begins another. `count_new` takes into account that a half message has no previous
        # version.
        self.waiting_rows += moves.num_rows

    def _settle(self, due_ms: Int64Array, seq: Int64Array, released: npt.NDArray[np.bool_]) -> None:
        # Keep it even if the mark covers it, because the mark applies only to rows below the starting point.
        self._settled.add(due_ms, seq, released)
        self.waiting_rows -= self._before.count_new(due_ms, seq)

    def _replay_change(self, row: pa.RecordBatch) -> None:
        change, seq = att.decode_change(row.column("body")[0].as_py()), row.column("seq")[0].as_py()
        if isinstance(change, att.Reservation):
            # The reservation covers the numbers directly after its own row (table_changes.reserve).
            self._ledger.reserve(seq + 1, change.rows)
            return
        self._ledger.apply(change, seq, row.column("store_ms")[0].as_py())
        self.attaches.append((seq, change))
        att.apply_to(self.files, change)
        if change.job == "bulk":
            self.waiting_rows += change.rows

    # -- what it adds up to --------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Keep each settled number and each moved message only once."""
        due_ms, seq, released = self._settled.columns()
        # The log may settle a message twice: in the starting point's list and by a row after it.
        begins, order = _grouped(seq)
        if len(begins):
            self._settled.replace(
                due_ms[order][begins], seq[order][begins], np.maximum.reduceat(released[order], begins)
            )
        due_ms, number, version, until_ms = self._moved.columns()
        begins, order = _grouped(number)
        # For each message keep its last version and the latest due time of all its versions. Until that time an answer
        # may still name an older version.
        if len(begins):
            # The last move of a message counts, but an older row of it may be in a file until its latest due time.
            last = order[np.append(begins[1:], len(order)) - 1]
            furthest_ms = np.maximum.reduceat(np.maximum(due_ms, until_ms)[order], begins)
            self._moved.replace(due_ms[last], number[last], version[last], furthest_ms)
        self._folded_rows = len(self)

    def settled(self) -> Settled:
        """Build the settled pairs; call `fold` before. The cancelled come first. Both parts are sorted by number."""
        facts = self.facts
        due_ms, seq, released = self._settled.columns()
        was_released = released.astype(np.bool_)
        # The order distinguishes them: `Settled` counts the released pairs at its end.
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
class _Before:
    """The messages that a starting point counts as settled.

    A later row may settle one of them again: a decision counts at once in memory, but its row may be durable only after
    the starting point was saved.
    """

    mark: Settled
    seq: Int64Array  # the numbers of its settled pairs, sorted
    holds: Holds

    @classmethod
    def of(cls, known: Checkpoint) -> _Before:
        facts, holds = known.facts, Holds()
        # Campaigns come from the starting point, not from the tables, which may already contain later rows.
        for name, campaign in _campaigns(facts).items():
            if campaign.held_from_ms is not None:
                holds.add(name, campaign.ranges, campaign.held_from_ms)
        none = np.empty(0, np.int64)
        before_seq = min(facts.seq, facts.settled_before_seq)
        mark = Settled(facts.settled_before_ms, none, none, before_seq=before_seq, late=tuple(facts.late))
        return cls(mark, np.sort(known.settled_seq), holds)

    def count_new(self, due_ms: Int64Array, seq: Int64Array) -> int:
        """Count the pairs that the starting point does not count as settled."""
        if (is_half := due_ms == NO_INSTANT_MS).any():
            due_ms, seq = due_ms[~is_half], seq[~is_half]
        settled = (due_ms < self.mark.before_ms) & ~self.mark.may_wait(seq)
        settled &= ~self.holds.contains(due_ms, seq)
        if len(self.seq):
            at = np.minimum(np.searchsorted(self.seq, seq), len(self.seq) - 1)
            settled |= self.seq[at] == seq
        return int(np.count_nonzero(~settled))


def _campaigns(facts: Facts) -> dict[str, CampaignFacts]:
    return {
        key.removeprefix("campaign/"): msgspec.json.decode(value, type=CampaignFacts)
        for key, value in facts.meta.items()
        if key.startswith("campaign/")
    }


def _grouped(numbers: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Sort the numbers with a stable sort. Returns the begin of each distinct number in that order, and the order."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return np.flatnonzero(is_first), order


def _sources(rows: pa.RecordBatch, chosen: npt.NDArray[np.bool_]) -> Int64Array:
    """List the numbers that these rows name in `source_seq`."""
    named = rows.column("source_seq").filter(pa.array(chosen)).drop_null()
    return np.asarray(named.to_numpy(), dtype=np.int64)
