"""Where a promise lies: the row of the log that holds its body now, and the promise in that row.

A promise is known by its first row's number. Its *place* is that row until the promise is written again, and then
the row of kind MOVED that says so. Whoever reads a place gets the promise, under its own number and with the time
it was accepted at, so that nobody further on has to know how often it has moved.
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
class Placed:
    """Promises and where they lie, as columns: instant, number, place."""

    due_ms: Int64Array
    seq: Int64Array
    at: Int64Array

    def __len__(self) -> int:
        return len(self.seq)

    def part(self, chosen: npt.NDArray[np.bool_]) -> Placed:
        """Some of them."""
        return Placed(self.due_ms[chosen], self.seq[chosen], self.at[chosen])


def waiting_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows that hold a promise for an instant: no half message, and none of a delay level."""
    mask = np.isin(rows.column("kind").to_numpy(), list(KINDS))
    mask &= np.asarray(rows.column("due_ms").is_valid()) & np.asarray(rows.column("queue_offset").is_null())
    return rows if mask.all() else rows.filter(pa.array(mask))


def placed(rows: pa.RecordBatch) -> Placed:
    """What READ_SCHEMA rows of these `KINDS` hold."""
    at = int64(rows.column("seq"))
    seq = rows.column("source_seq").fill_null(0).to_numpy()
    moved = rows.column("kind").to_numpy() == Kind.MOVED
    return Placed(int64(rows.column("due_ms")), np.where(moved, seq, at), at)


def latest(found: Iterable[Placed], from_seq: int) -> Placed:
    """Of each promise the last of its places, from `from_seq` on, sorted by number; `found` is in the log's order."""
    parts = list(found)
    if not parts:
        return Placed(_NONE, _NONE, _NONE)
    due, seq, at = (np.concatenate([getattr(p, name) for p in parts]) for name in ("due_ms", "seq", "at"))
    inside = at >= from_seq
    due, seq, at = due[inside][::-1], seq[inside][::-1], at[inside][::-1]
    seq, last = np.unique(seq, return_index=True)
    return Placed(due[last], seq, at[last])


def take_promises(reader: LogReader, at: Int64Array) -> pa.RecordBatch:
    """The promises at these places, in the order given, in READ_SCHEMA; raises OutOfRange (reader thread)."""
    return as_promises(reader.take(at))


def as_promises(rows: pa.RecordBatch) -> pa.RecordBatch:
    """READ_SCHEMA rows of kinds PROMISE and MOVED as the promises they hold."""
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


class Places:
    """Where promises lie that do not lie in their first row: number -> place, two int64 each."""

    def __init__(self) -> None:
        self._seq = self._at = _NONE

    def __len__(self) -> int:
        return len(self._seq)

    def add(self, seq: Int64Array, at: Int64Array) -> None:
        """These promises lie at these places; what lies in its first row is not remembered."""
        elsewhere = seq != at
        if elsewhere.any():
            seqs, ats = (np.concatenate(c) for c in ((self._seq, seq[elsewhere]), (self._at, at[elsewhere])))
            order = np.argsort(seqs, kind="stable")
            self._seq, self._at = seqs[order], ats[order]

    def pop(self, seq: Int64Array) -> Int64Array:
        """The places of these promises, which need not be known any longer."""
        if not len(self._seq):
            return seq
        found = np.minimum(np.searchsorted(self._seq, seq), len(self._seq) - 1)
        known = self._seq[found] == seq
        at = np.where(known, self._at[found], seq)
        left = np.ones(len(self._seq), dtype=np.bool_)
        left[found[known]] = False
        self._seq, self._at = self._seq[left], self._at[left]
        return at
