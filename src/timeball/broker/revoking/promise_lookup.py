"""Look promises up by id, key or number, with what the log says became of each.

    id, key   every promise that carries it
    number    that promise

A lookup reads the log and the pending table. A promise that was moved to other instants has a row for each; the newest
of them is where it waits now, and a RELEASE or CANCEL row of its number is its end.

Copies on their way back to a consumer (topics %RETRY% and %DLQ%) are left out unless the caller names their topic: they
carry their producer's id and keys, but its message has been delivered, and to cancel a copy would lose it.

Log and files are searched in a thread of their own, where no release waits for it, and a consumer only while keys of
the log are searched. Both are searched as the table was at the beginning, so a promise that moves meanwhile from the
log to a file, or from file to file, is found all the same; a lookup is repeated when retention has removed what it was
to read (look_ups.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.answers import HANDED
from timeball.broker.handed_rows import is_handed
from timeball.errors import OutOfRange
from timeball.key_hash import UInt64Array, hash_text
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.message import DLQ_PREFIX, RETRY_PREFIX, Int64Array, Kind, decode_properties
from timeball.rules import check_key
from timeball.schedule.delay_levels.levels import REAL_TOPIC
from timeball.schedule.hour_log.pending import as_promises as table_rows
from timeball.schedule.locations import KINDS, as_promises
from timeball.schedule.moved import Moved
from timeball.table.file_set import FileSet
from timeball.table.key_index import TableKeys

COLUMNS = [
    "seq", "kind", "topic", "queue_offset", "unique_key", "keys", "due_ms", "store_ms", "accepted_ms", "source_seq",
    "version_seq", "from_due_ms", "properties",
]  # fmt: skip
SETTLING = (Kind.RELEASE, Kind.CANCEL)
CANCELLED, RELEASED = "already_cancelled", "released"


@dataclass(frozen=True, slots=True)
class Names:
    """The promises a caller asks for. `topic`: only those for it, as producers of different topics may use the same id.

    `may`: only promises for topics that it allows; the lookup hides all others.
    """

    ids: Sequence[str] = ()
    keys: Sequence[str] = ()
    seqs: Sequence[int] = ()
    topic: str | None = None
    may: Callable[[str], bool] | None = None

    def check(self) -> None:
        """Raise OutOfRange when these are too many for one request, InvalidMessage for a key that none can have."""
        if len(self.ids) + len(self.keys) + len(self.seqs) > limits.CANCELS_PER_REQUEST_MAX:
            raise OutOfRange(
                f"at most {limits.CANCELS_PER_REQUEST_MAX} scheduled messages in one request; split it"
            )
        # It would find nothing, and its caller would take that for an answer.
        for key in self.keys:
            check_key(key)

    @property
    def subjects(self) -> list[str]:
        """Return the names as the answer repeats them, in the order asked."""
        return [*self.ids, *self.keys, *map(str, self.seqs)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A promise that a caller has named, by its number, with the instant and version by which the schedule knows it.

    `at_seq`: the row of the log that holds it now, if one does.
    """

    subject: str
    number: int  # its first row, for ever
    seq: int  # its version
    due_ms: int
    topic: str
    unique_key: str | None
    keys: str | None
    accepted_ms: int  # by its first row; a move does not change it
    is_level: bool = False  # it waits in the queue of a delay level
    in_table: bool = False  # it lies in a file of the pending table
    at_seq: int | None = None


class Settled(NamedTuple):
    """The end of a promise, and when it was."""

    verdict: str
    at_ms: int | None


@dataclass(slots=True)
class Found:
    """Promises by subject, and the end of those that are settled, by number.

    `gone`: the number of a promise of which log and table know nothing any more, by the subject that named it.
    """

    candidates: list[Candidate] = field(default_factory=list)
    settled: dict[int, Settled] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)


def is_on_its_way_back(topic: str) -> bool:
    """Return whether a promise for this topic is a copy of a message that was delivered."""
    return topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


class Axis(Enum):
    """By what a caller names a promise."""

    ID, KEY, SEQ = range(3)


class Search:
    """One look-up for several callers.

    Call `search` (lookup thread). Then, for each caller, scan the log for what is `missing` (`scan`) and `add_rows`,
    then `result`.
    """

    def __init__(
        self,
        reader: LogReader,
        key_index: KeyIndex,
        file_keys: TableKeys,
        live: FileSet,
        moved: Moved,
        callers: Sequence[Names],
    ) -> None:
        self._reader, self._key_index, self._moved = reader, key_index, moved
        self._file_keys, self._live = file_keys, live
        self._ids = {name for names in callers for name in names.ids}
        self._keys = {name for names in callers for name in names.keys}
        self._seqs = {seq for names in callers for seq in names.seqs}
        # By what named it, then by number: an id of one caller may be a key of another.
        self._found: dict[tuple[Axis, str], dict[int, Candidate]] = defaultdict(dict)
        self._settled: dict[int, Settled] = {}
        self._unknown: set[int] = set()  # numbers, of which the rows that end them may be all that is left

    def search(self) -> None:
        """Search log and files (lookup thread).

        Raises Corrupt; NotFound or OutOfRange when a file has left the table, or a segment the log, and is gone.
        """
        hashes = hash_text(pa.array([*self._ids, *self._keys], pa.string()))
        if self._seqs:
            self._search_numbers()
        self._search_log(hashes)
        if len(hashes):
            for row in self._file_keys.find_keys(self._live, hashes):
                for name in self._names(row):
                    self._add_filed(name, row)

    def _search_numbers(self) -> None:
        """Search the files and the log for the numbers."""
        number_of = self._versions()
        for row in self._file_keys.find_seqs(
            self._live, np.array(list(number_of), dtype=np.int64)
        ).to_pylist():
            if _number_in_table(row) == number_of[row["seq"]]:
                self._add_filed((Axis.SEQ, str(number_of[row["seq"]])), row)
        for version, number in self._versions().items():
            if (
                not self._in_log(version, number)
                and 0 < number < self._reader.next_seq
                and number not in self._found[Axis.SEQ, str(number)]
            ):
                self._unknown.add(number)

    def _search_log(self, hashes: UInt64Array) -> None:
        """Search the log's key index for the names and for what ended the promises found so far."""
        # The rows that end a promise named by its number are found by its id.
        known = {c.unique_key for of_name in self._found.values() for c in of_name.values()} - {None}
        # One look-up for all names: each asks every sealed segment's index.
        seqs = self._key_index.find_rows(
            np.concatenate([hashes, hash_text(pa.array(known - self._ids, pa.string()))]) if known else hashes
        )
        # Mostly none: what is cancelled has been in the table for long.
        for row in self._reader.read_rows(seqs).select(COLUMNS).to_pylist() if len(seqs) else ():
            for name in self._names(row):
                self._add_logged(name, row)
            self._note_settling(row)
            self._note_move(row)

    def missing(self, names: Names, *, thorough: bool) -> set[int]:
        """Return the numbers to scan the log for; `thorough`: also those of promises without an id, for their end."""
        unknown = self._unknown.intersection(names.seqs)
        return unknown | {c.number for c in self._of(names) if thorough and c.unique_key is None}

    def add_rows(self, rows: list[dict[str, Any]]) -> None:
        """Add the rows that a scan of the log has found."""
        for row in rows:
            self._note_settling(row)
            self._note_move(row)
            if row["source_seq"] in self._unknown:
                self._add_logged((Axis.SEQ, str(row["source_seq"])), row)

    def result(self, names: Names) -> Found:
        """Return all promises with one of a caller's names."""
        candidates = [self._in_newest(c) for c in self._of(names)]
        known = {c.number for c in candidates}
        # Given out once, and now in neither log nor table: its end is not known any more ("expired").
        unknown = self._unknown.intersection(names.seqs) - known
        gone = {str(seq): seq for seq in unknown if seq < self._reader.first_seq}
        # Without a topic, copies on their way back to a group are hidden: they carry the id of a delivered message.
        if names.topic is not None:
            candidates = [c for c in candidates if c.topic == names.topic]
        else:
            numbers = {str(seq) for seq in names.seqs}
            candidates = [c for c in candidates if c.subject in numbers or not is_on_its_way_back(c.topic)]
        if names.may is not None:
            candidates = [c for c in candidates if names.may(c.topic)]
        return Found(candidates, self._settled, gone)

    def _of(self, names: Names) -> list[Candidate]:
        """Return what was found of a caller's names, each promise once a name."""
        asked = [
            *((Axis.ID, name) for name in names.ids),
            *((Axis.KEY, name) for name in names.keys),
            *((Axis.SEQ, str(seq)) for seq in names.seqs),
        ]
        found = {(c.subject, c.number): c for name in asked for c in self._found.get(name, {}).values()}
        return list(found.values())

    def _in_newest(self, candidate: Candidate) -> Candidate:
        """Return it as the schedule knows it now: what was found may be an old row of it in a file."""
        moved_to = self._moved.newest(candidate.number)
        if moved_to is None or moved_to[1] <= candidate.seq:
            return candidate
        due_ms, version = moved_to
        # Moved since the search: what moved it is there to be read, unless retention has removed it.
        at_seq = version if version >= self._reader.first_seq else None
        return replace(candidate, due_ms=due_ms, seq=version, in_table=False, at_seq=at_seq)

    # -- by number ---------------------------------------------------------------------------------------------

    def _versions(self) -> dict[int, int]:
        """Return the numbers asked for, by the version of each that is the newest."""
        found = {}
        for number in self._seqs:
            moved_to = self._moved.newest(number)
            found[number if moved_to is None else moved_to[1]] = number
        return found

    def _in_log(self, version: int, number: int) -> bool:
        """Return whether the log keeps this row; add it when it is a version of this promise."""
        if not self._reader.first_seq <= version < self._reader.next_seq:
            return False
        there = False
        for rows in self._reader.rows(version, version + 1):
            for row in rows.select(COLUMNS).to_pylist():
                # Of a half message the rows behind it say whether it became a promise.
                there = row["kind"] != Kind.PROMISE or row["due_ms"] is not None
                if row["kind"] in KINDS and _number_of(row) == number:
                    self._add_logged((Axis.SEQ, str(number)), row)
        return there

    # -- rows ----------------------------------------------------------------------------------------------------

    def _add_logged(self, name: tuple[Axis, str], row: dict[str, Any]) -> None:
        """Note the promise that a row of the log accepts, moves or ends. A half message waits for no instant."""
        if row["due_ms"] is None:
            return
        if row["kind"] in KINDS:
            accepted_ms = row["store_ms"] if row["kind"] == Kind.PROMISE else row["accepted_ms"]
            self._add(name, row, _number_of(row), _version_of(row), accepted_ms, at_seq=row["seq"])
        elif row["kind"] in SETTLING:
            # The promise itself may have been let go by retention, or never have been in the log (bulk).
            self._add(name, row, row["source_seq"], _version_of(row), row["accepted_ms"])

    def _add_filed(self, name: tuple[Axis, str], row: dict[str, Any]) -> None:
        self._add(name, row, _number_in_table(row), row["seq"], row["accepted_ms"], in_table=True)

    def _add(
        self,
        name: tuple[Axis, str],
        row: dict[str, Any],
        number: int,
        version: int,
        accepted_ms: int | None,
        *,
        in_table: bool = False,
        at_seq: int | None = None,
    ) -> None:
        """Note where a promise lies: its newest version counts, and of that the last row of the log."""
        of_name = self._found[name]
        known = of_name.get(number)
        if known is not None and known.seq > version:
            return
        if known is not None and known.seq == version:
            of_name[number] = replace(
                known, in_table=known.in_table or in_table, at_seq=known.at_seq if at_seq is None else at_seq
            )
            return
        is_level = row.get("kind") in KINDS and row["queue_offset"] is not None
        # The CANCEL row is to name the topic the message was for.
        topic = decode_properties(row["properties"])[REAL_TOPIC] if is_level else row["topic"]
        of_name[number] = Candidate(
            name[1], number, version, row["due_ms"], topic, row["unique_key"], row["keys"], accepted_ms or 0,
            is_level, in_table, at_seq,
        )  # fmt: skip

    def _note_settling(self, row: dict[str, Any]) -> None:
        if row["kind"] in SETTLING and row["due_ms"] is not None:
            verdict = RELEASED if row["kind"] == Kind.RELEASE else CANCELLED
            if verdict == CANCELLED and is_handed(row["properties"]):
                verdict = HANDED
            self._settled[row["source_seq"]] = Settled(verdict, row["store_ms"])

    def _note_move(self, row: dict[str, Any]) -> None:
        """Note that a promise found by its number was written again, in this row."""
        name = Axis.SEQ, str(row["source_seq"])
        if row["kind"] == Kind.MOVED and row["source_seq"] in self._found.get(name, ()):
            self._add_logged(name, row)

    def _names(self, row: dict[str, Any]) -> list[tuple[Axis, str]]:
        """Return which of the ids and keys asked for the row carries."""
        names = [(Axis.ID, row["unique_key"])] if row["unique_key"] in self._ids else []
        if row["keys"] is not None and self._keys:
            names += [(Axis.KEY, key) for key in self._keys.intersection(row["keys"].split(" "))]
        return names


def _number_of(row: dict[str, Any]) -> int:
    return int(row["source_seq"] if row["kind"] == Kind.MOVED else row["seq"])


def _number_in_table(row: dict[str, Any]) -> int:
    return int(row["seq"] if row["number"] is None else row["number"])


def _version_of(row: dict[str, Any]) -> int:
    """Return the version that a row of the log holds, or ends."""
    if row["kind"] == Kind.PROMISE or row["from_due_ms"] is not None:
        return int(row["seq"])
    return int(row["source_seq"] if row["version_seq"] is None else row["version_seq"])


def read(
    reader: LogReader, file_keys: TableKeys, live: FileSet, candidates: Sequence[Candidate]
) -> pa.RecordBatch:
    """Return the whole rows of those of these promises that log or table hold, in READ_SCHEMA (file thread).

    A row of a delay level comes as it waits, under the schedule's topic.
    """
    at = np.array([-1 if c.at_seq is None else c.at_seq for c in candidates], dtype=np.int64)
    # Retention may have removed rows since the lookup; these promises then lie in files.
    logged = at >= reader.first_seq
    parts = [as_promises(reader.read_rows(np.unique(at[logged])))]
    wanted = [c for c, is_logged in zip(candidates, logged.tolist(), strict=True) if not is_logged]
    if wanted:
        parts += [table_rows(rows) for rows in file_keys.rows_of(live, *pairs(wanted)) if rows.num_rows]
    return pa.concat_batches(parts)


def pairs(candidates: Sequence[Candidate]) -> tuple[Int64Array, Int64Array]:
    """Return (due_ms, version) of each, as columns."""
    return np.array([c.due_ms for c in candidates], dtype=np.int64), np.array(
        [c.seq for c in candidates], dtype=np.int64
    )
