"""Cancel: find the promises a caller means, settle them if they still wait, and say definitely what happened.

    cancelled           it was waiting, and will never be delivered; the CANCEL row is durable
    already_cancelled   somebody was first
    released            too late: its release stands in the log, since the instant given
    not_found           no promise of that name is known here

The race with the due instant is decided by the schedule, on the event loop, in the order in which rows are
appended to the log: a promise handed out cannot be cancelled, a cancelled one is not handed out. There is no
third case (G7).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from timeball.key_hash import hash_text
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.message import Int64Array, Kind, build_rows, decode_properties
from timeball.schedule.delay_levels.rows import REAL_TOPIC
from timeball.table.data_file import DataFile

_COLUMNS = [
    "seq", "kind", "topic", "unique_key", "keys", "due_ms", "store_ms", "accepted_ms", "source_seq", "properties",
]  # fmt: skip
_PROMISES = (Kind.PROMISE, Kind.LEVEL_PROMISE, Kind.MOVED)


class Verdict(msgspec.Struct, frozen=True):
    """What became of one promise. `at_ms`: when it was settled."""

    subject: str
    verdict: str
    seq: int | None = None
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A promise somebody means."""

    subject: str
    seq: int
    due_ms: int
    topic: str
    unique_key: str | None
    keys: str | None
    accepted_ms: int
    is_level: bool = False  # waits in the queue of a delay level
    in_table: bool = False  # lies in a file of the pending table


@dataclass(slots=True)
class Found:
    """Promises by subject, and how those that are settled were settled: source_seq -> (verdict, at_ms)."""

    candidates: list[Candidate] = field(default_factory=list)
    settled: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    in_table: set[int] = field(default_factory=set)  # numbers of those that lie in a file
    _seen: set[tuple[str, int]] = field(default_factory=set)

    def add(self, subject: str, row: dict[str, Any], accepted_ms: int | None) -> None:
        """A row of the log or of the table that `subject` names; the same promise only once."""
        if (subject, row["seq"]) not in self._seen:
            self._seen.add((subject, row["seq"]))
            is_level = row.get("kind") == Kind.LEVEL_PROMISE
            # The CANCEL row is to name the topic the message was for.
            topic = decode_properties(row["properties"])[REAL_TOPIC] if is_level else row["topic"]
            self.candidates.append(
                Candidate(
                    subject,
                    row["seq"],
                    row["due_ms"],
                    topic,
                    row["unique_key"],
                    row["keys"],
                    accepted_ms or 0,
                    is_level,
                )
            )


def look_up(
    reader: LogReader,
    key_index: KeyIndex,
    files: list[DataFile],
    *,
    ids: Sequence[str] = (),
    keys: Sequence[str] = (),
    seqs: Sequence[int] = (),
) -> Found:
    """All promises with one of these ids, keys or sequence numbers, in the log and the table (reader thread)."""
    found = Found()
    if seqs:
        _find_seqs(found, reader, files, seqs)
    # How a promise named by its number was settled is found by its id, like everything else.
    by_id, by_key = set(ids), set(keys)
    known = {c.unique_key for c in found.candidates if c.unique_key is not None}
    hashes = hash_text(pa.array([*(by_id | known), *by_key], pa.string()))
    for row in reader.take(key_index.find(hashes)).select(_COLUMNS).to_pylist():
        if row["kind"] in _PROMISES:
            _add(found, *_promise(row), by_id, by_key)
        elif row["kind"] in (Kind.RELEASE, Kind.CANCEL):
            verdict = "released" if row["kind"] == Kind.RELEASE else "already_cancelled"
            found.settled[row["source_seq"]] = (verdict, row["store_ms"])
            # The promise itself may have been let go by retention, or never have been in the log (bulk).
            _add(found, {**row, "seq": row["source_seq"]}, row["accepted_ms"], by_id, by_key)
    if by_id or by_key:
        for file in files:
            rows = file.find(hashes)
            # Nearly always none: cancels ask every file.
            for row in rows.to_pylist() if rows.num_rows else ():
                found.in_table.add(row["seq"])
                _add(found, row, row["accepted_ms"], by_id, by_key)
    found.candidates = [replace(c, in_table=c.seq in found.in_table) for c in found.candidates]
    return found


def _find_seqs(found: Found, reader: LogReader, files: list[DataFile], seqs: Sequence[int]) -> None:
    for file in files:
        wanted = [seq for seq in seqs if file.entry.min_seq <= seq <= file.entry.max_seq]
        if wanted:
            for row in file.find_seqs(np.array(wanted, dtype=np.int64)).to_pylist():
                found.in_table.add(row["seq"])
                found.add(str(row["seq"]), row, row["accepted_ms"])
    for seq in seqs:
        if reader.first_seq <= seq < reader.next_seq:
            for rows in reader.rows(seq, seq + 1, (Kind.PROMISE, Kind.LEVEL_PROMISE)):
                for row in rows.select(_COLUMNS).to_pylist():
                    found.add(str(seq), row, row["store_ms"])
    gone = [seq for seq in seqs if seq < reader.first_seq and seq not in found.in_table]
    for rows in reader.coalesced(reader.first_seq, reader.next_seq, [Kind.MOVED], 65_536) if gone else ():
        # No index knows where such a promise has moved to; it was accepted days ago, and nobody asks often.
        mine = np.isin(rows.column("source_seq").to_numpy(), gone)
        for row in rows.filter(pa.array(mine)).select(_COLUMNS).to_pylist():
            found.add(str(row["source_seq"]), *_promise(row))


def _promise(row: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """A row of the log as the promise it holds, and when that was accepted."""
    if row["kind"] == Kind.MOVED:
        return {**row, "seq": row["source_seq"]}, row["accepted_ms"]
    return row, row["store_ms"]


def pairs(candidates: Sequence[Candidate]) -> tuple[Int64Array, Int64Array]:
    """(due_ms, seq) of each."""
    return np.array([c.due_ms for c in candidates], dtype=np.int64), np.array(
        [c.seq for c in candidates], dtype=np.int64
    )


def cancel_rows(chosen: list[Candidate], now_ms: int) -> pa.RecordBatch:
    """LOG_SCHEMA cancel records for these promises."""
    return build_rows(
        len(chosen),
        kind=int(Kind.CANCEL),
        topic=[c.topic for c in chosen],
        queue_id=-1,
        unique_key=[c.unique_key for c in chosen],
        keys=[c.keys for c in chosen],
        store_ms=now_ms,
        due_ms=[c.due_ms for c in chosen],
        accepted_ms=[c.accepted_ms for c in chosen],
        source_seq=[c.seq for c in chosen],
    )


def verdicts(subjects: Sequence[str], found: Found, cancelled: set[int], now_ms: int) -> list[Verdict]:
    """One verdict a promise, in the order of `subjects`; one `not_found` for a subject that names none."""
    by_subject: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in found.candidates:
        by_subject[candidate.subject].append(candidate)
    result = []
    for subject in subjects:
        for c in by_subject.get(subject, []):
            verdict, at_ms = found.settled.get(c.seq, ("released", None))
            if c.seq in cancelled:
                cancelled.discard(c.seq)  # the same subject named twice in one request is cancelled once
                verdict, at_ms = "cancelled", now_ms
                found.settled[c.seq] = ("already_cancelled", now_ms)
            result.append(Verdict(subject, verdict, c.seq, at_ms))
        if subject not in by_subject:
            result.append(Verdict(subject, "not_found"))
    return result


def _add(
    found: Found, row: dict[str, Any], accepted_ms: int | None, by_id: set[str], by_key: set[str]
) -> None:
    names = {row["unique_key"]} & by_id
    if row["keys"] is not None:
        names |= set(row["keys"].split(" ")) & by_key
    for name in sorted(names):
        found.add(name, row, accepted_ms)
