"""Where a promise lies: the row of the log that holds its body now, and the promise in that row.

    number     the promise's first row, for ever: what all that leaves the broker names
    version    the row that gave the promise its present instant; the schedule knows it by (instant, version)
    location   the row that holds the body now

All three are the same row until the promise is written again, by a row of kind MOVED. Reading that row gives the
promise with its version as `seq` and the time it was accepted at: no other module has to know how often it has moved.
Where number and version differ the kind stays MOVED, and `source_seq` is the number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.log.reader import LogReader
from timeball.message import READ_SCHEMA, Int64Array, Kind, int64
from timeball.schedule.columns import Columns

_NONE = np.empty(0, np.int64)


KINDS = frozenset({Kind.PROMISE, Kind.MOVED})


@dataclass(frozen=True, slots=True)
class Waiting(Columns):
    """Promises that wait and where they lie, as columns: instant, version, row of the log."""

    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array


NOTHING = Waiting(_NONE, _NONE, _NONE)


def waiting_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows that hold a promise for an instant: no half message, and none of a delay level."""
    mask = np.isin(rows.column("kind").to_numpy(), list(KINDS))
    # A half message has no instant; a promise of a delay level has a place in its level's queue, where it is kept.
    mask &= np.asarray(rows.column("due_ms").is_valid()) & np.asarray(rows.column("queue_offset").is_null())
    return rows if mask.all() else rows.filter(pa.array(mask))


def versions_in(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows, of those that `waiting_rows` gives, that gave a promise its instant."""
    rows = waiting_rows(rows)
    mask = rows.column("kind").to_numpy() == Kind.PROMISE
    mask |= np.asarray(rows.column("from_due_ms").is_valid())
    return rows if mask.all() else rows.filter(pa.array(mask))


def waiting_in(rows: pa.RecordBatch) -> Waiting:
    """Return the promises that READ_SCHEMA rows of these `KINDS` hold."""
    row_seq = int64(rows.column("seq"))
    moved = rows.column("kind").to_numpy() == Kind.MOVED
    seq = np.where(moved, moved_versions(rows), row_seq) if moved.any() else row_seq
    return Waiting(int64(rows.column("due_ms")), seq, row_seq)


def moved_versions(rows: pa.RecordBatch) -> Int64Array:
    """Return the versions that MOVED rows hold: a row to another instant is one, others name the one they hold."""
    return np.where(
        np.asarray(rows.column("from_due_ms").is_valid()), int64(rows.column("seq")), versions(rows)
    )


def versions(rows: pa.RecordBatch) -> Int64Array:
    """Return the versions that rows of kinds RELEASE, CANCEL and MOVED name; 0 where they name none."""
    named, number = rows.column("version_seq"), rows.column("source_seq")
    named = number if named.null_count == len(named) else pc.coalesce(named, number)
    return np.asarray(named.fill_null(0).to_numpy(), dtype=np.int64)


def latest(found: Iterable[Waiting], from_seq: int) -> Waiting:
    """Return each promise where it lies last, from `from_seq` on, sorted by number; `found` is in the log's order."""
    parts = list(found)
    if not parts:
        return NOTHING
    waiting = Waiting.joined(parts)
    if not (kept := waiting.row_seq >= from_seq).all():
        waiting = waiting.part(kept)
    # Each once and in order, as nearly always: few promises are written again.
    if (waiting.seq[1:] > waiting.seq[:-1]).all():
        return waiting
    # Reversed, since `unique` names the first index of each number: now that is the row which came last.
    waiting = waiting.part(slice(None, None, -1))
    _, last = np.unique(waiting.seq, return_index=True)
    return waiting.part(last)


def take_promises(reader: LogReader, row_seq: Int64Array) -> pa.RecordBatch:
    """Read the promises in these rows, in the order given, in READ_SCHEMA; raises OutOfRange (reader thread)."""
    return as_promises(reader.read_rows(row_seq))


def as_promises(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return READ_SCHEMA rows of kinds PROMISE and MOVED as the promises they hold."""
    moved = rows.column("kind").to_numpy() == Kind.MOVED
    if not moved.any():
        return rows
    mask, count = pa.array(moved), rows.num_rows
    nothing, number = pa.nulls(count, pa.int64()), rows.column("source_seq")
    seq = np.where(moved, moved_versions(rows), int64(rows.column("seq")))
    # A row that was only rolled or hopped reads as its first row would: its number and version are the same.
    keeps_number = moved & (seq != number.fill_null(0).to_numpy())
    # The fields that say how the row came to be are emptied: a promise that was rolled ten times equals one that was
    # not.
    changed = {
        "seq": pa.array(seq),
        "kind": pa.array(np.where(keeps_number, Kind.MOVED, Kind.PROMISE).astype(np.int8)),
        "store_ms": pc.if_else(mask, rows.column("accepted_ms"), rows.column("store_ms")),
        "accepted_ms": nothing,
        "source_seq": pc.if_else(pa.array(keeps_number), number, pa.scalar(None, pa.int64())),
        "version_seq": nothing,
        "from_due_ms": nothing,
    }
    columns = [changed.get(name, rows.column(name)) for name in READ_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)


class Locations:
    """The rows of promises that do not lie where they got their instant: version -> row, two int64 each."""

    def __init__(self) -> None:
        self._seq = self._row_seq = _NONE  # sorted by version

    def __len__(self) -> int:
        return len(self._seq)

    def add(self, seq: Int64Array, row_seq: Int64Array) -> None:
        """Remember where these promises lie; one that lies in the row of its version takes no memory."""
        # Nearly all promises lie in the row of their version, so nearly all sends cost nothing here.
        elsewhere = seq != row_seq
        if elsewhere.any():
            seqs = np.concatenate((self._seq, seq[elsewhere]))
            order = np.argsort(seqs, kind="stable")
            self._seq = seqs[order]
            self._row_seq = np.concatenate((self._row_seq, row_seq[elsewhere]))[order]

    def rows_of(self, seq: Int64Array) -> Int64Array:
        """Return the rows of these promises."""
        found, known = self._find(seq)
        return np.where(known, self._row_seq[found], seq) if known.any() else seq

    def pop(self, seq: Int64Array) -> Int64Array:
        """Return the rows of these promises, and forget them."""
        row_seq, (found, known) = self.rows_of(seq), self._find(seq)
        if known.any():
            left = np.ones(len(self._seq), dtype=np.bool_)
            # A promise is opened once, so its location is of no use after this.
            left[found[known]] = False
            self._seq, self._row_seq = self._seq[left], self._row_seq[left]
        return row_seq

    def _find(self, seq: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Return where these stand among those that lie elsewhere, and which of them do."""
        if not len(self._seq):
            return seq, np.zeros(len(seq), np.bool_)
        found = np.minimum(np.searchsorted(self._seq, seq), len(self._seq) - 1)
        return found, self._seq[found] == seq
