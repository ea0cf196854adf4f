"""Where a promise lies: the row of the log that holds its body now, and the promise in that row.

A promise is known by its first row's number. It lies in that row until it is written again, and then in the row of
kind MOVED that says so. Reading such a row gives the promise, under its own number and with the time it was accepted
at, so that no other module has to know how often it has moved.
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

_NONE = np.empty(0, np.int64)


KINDS = frozenset({Kind.PROMISE, Kind.MOVED})


@dataclass(frozen=True, slots=True)
class Waiting:
    """Promises that wait and where they lie, as columns: instant, number, row of the log."""

    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array

    def __len__(self) -> int:
        return len(self.seq)

    def part(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Waiting:
        """Return some of them."""
        return Waiting(self.due_ms[chosen], self.seq[chosen], self.row_seq[chosen])


NOTHING = Waiting(_NONE, _NONE, _NONE)


def waiting_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows that hold a promise for an instant: no half message, and none of a delay level."""
    mask = np.isin(rows.column("kind").to_numpy(), list(KINDS))
    mask &= np.asarray(rows.column("due_ms").is_valid()) & np.asarray(rows.column("queue_offset").is_null())
    return rows if mask.all() else rows.filter(pa.array(mask))


def waiting_in(rows: pa.RecordBatch) -> Waiting:
    """Return the promises that READ_SCHEMA rows of these `KINDS` hold."""
    row_seq = int64(rows.column("seq"))
    seq = rows.column("source_seq").fill_null(0).to_numpy()
    moved = rows.column("kind").to_numpy() == Kind.MOVED
    return Waiting(int64(rows.column("due_ms")), np.where(moved, seq, row_seq), row_seq)


def latest(found: Iterable[Waiting], from_seq: int) -> Waiting:
    """Return each promise where it lies last, from `from_seq` on, sorted by number; `found` is in the log's order."""
    parts = list(found)
    if not parts:
        return NOTHING
    due, seq, row_seq = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("due_ms", "seq", "row_seq")
    )
    inside = row_seq >= from_seq
    due, seq, row_seq = due[inside][::-1], seq[inside][::-1], row_seq[inside][::-1]
    seq, last = np.unique(seq, return_index=True)
    return Waiting(due[last], seq, row_seq[last])


def take_promises(reader: LogReader, row_seq: Int64Array) -> pa.RecordBatch:
    """Read the promises in these rows, in the order given, in READ_SCHEMA; raises OutOfRange (reader thread)."""
    return as_promises(reader.take(row_seq))


def as_promises(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return READ_SCHEMA rows of kinds PROMISE and MOVED as the promises they hold."""
    moved = rows.column("kind").to_numpy() == Kind.MOVED
    if not moved.any():
        return rows
    mask, count = pa.array(moved), rows.num_rows
    nothing = pa.nulls(count, pa.int64())
    changed = {
        "seq": pc.if_else(mask, rows.column("source_seq"), rows.column("seq")),
        "kind": pa.array(np.full(count, Kind.PROMISE, dtype=np.int8)),
        "store_ms": pc.if_else(mask, rows.column("accepted_ms"), rows.column("store_ms")),
        "accepted_ms": nothing,
        "source_seq": nothing,
    }
    columns = [changed.get(name, rows.column(name)) for name in READ_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)


class Locations:
    """The rows of promises that do not lie in their first row: number -> row, two int64 each."""

    def __init__(self) -> None:
        self._seq = self._row_seq = _NONE  # sorted by number

    def __len__(self) -> int:
        return len(self._seq)

    def add(self, seq: Int64Array, row_seq: Int64Array) -> None:
        """Remember where these promises lie; one that lies in its first row takes no memory."""
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
            left[found[known]] = False
            self._seq, self._row_seq = self._seq[left], self._row_seq[left]
        return row_seq

    def _find(self, seq: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Return where these stand among those that lie elsewhere, and which of them do."""
        if not len(self._seq):
            return seq, np.zeros(len(seq), np.bool_)
        found = np.minimum(np.searchsorted(self._seq, seq), len(self._seq) - 1)
        return found, self._seq[found] == seq
