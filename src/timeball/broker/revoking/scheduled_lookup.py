"""Search for scheduled messages by id, key or number, and for the rows that ended them.

    id, key   every scheduled message that carries it
    number    that scheduled message

A lookup reads the log and the pending table. A scheduled message that was moved has a row for each due time. The newest
one is valid, and a RELEASE or CANCEL row with its number is its end.

Copies on their way back to a consumer (topics %RETRY% and %DLQ%) are left out unless the caller names their topic. They
carry their producer's id and keys, but the producer's message has been delivered, and a cancel of a copy would lose it.

Log and files are searched in a separate thread, so that no release waits for it, and consumers wait only while keys of
the log are searched. Both are searched in the state of the table at the beginning. So a scheduled message that is moved
meanwhile from the log to a file, or between files, is still found. A lookup is repeated if retention has removed some
of its input (look_ups.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from timeball.broker.revoking.drain_rows import is_handed
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.answers import HANDED
from timeball.model.errors import OutOfRange
from timeball.model.key_hash import UInt64Array, hash_text
from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX, Int64Array, Kind, decode_properties
from timeball.model.rules import check_key
from timeball.schedule.delay_levels.levels import REAL_TOPIC
from timeball.schedule.hour_log.pending import as_scheduled as table_rows
from timeball.schedule.locations import KINDS, as_scheduled
from timeball.schedule.moved import Moved
from timeball.table.file_keys import FileSet
from timeball.table.key_index import TableKeys

COLUMNS = [
    "seq", "kind", "topic", "queue_offset", "unique_key", "keys", "due_ms", "store_ms", "accepted_ms", "source_seq",
    "version_seq", "from_due_ms", "properties",
]  # fmt: skip
# The kinds of rows that end a scheduled message.
SETTLING = (Kind.RELEASE, Kind.CANCEL)
CANCELLED, RELEASED = "already_cancelled", "released"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the scheduled messages that a caller asks for.

    `topic`: only scheduled messages for this topic, because producers of different topics may use the same id. `may`:
    only scheduled messages for topics that it allows. The lookup hides all others.
    """

    ids: Sequence[str] = ()
    keys: Sequence[str] = ()
    seqs: Sequence[int] = ()
    topic: str | None = None
    may: Callable[[str], bool] | None = None

    def check(self) -> None:
        """Raise OutOfRange if these are too many names for one request, InvalidMessage for an invalid key."""
        if len(self.ids) + len(self.keys) + len(self.seqs) > limits.CANCELS_PER_REQUEST_MAX:
            raise OutOfRange(
                f"at most {limits.CANCELS_PER_REQUEST_MAX} scheduled messages in one request; split it"
            )
        # An invalid key would find nothing, and its caller would take that for an answer.
        for key in self.keys:
            check_key(key)

    @property
    def subjects(self) -> list[str]:
        """The names as the answer repeats them, in the order of the request."""
        return [*self.ids, *self.keys, *map(str, self.seqs)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A scheduled message that a caller has named: its number, and its due time and version in the schedule.

    `at_seq`: the row of the log that now contains it, if there is one.
    """

    subject: str
    number: int  # its first row, which never changes
    seq: int  # its version
    due_ms: int
    topic: str
    unique_key: str | None
    keys: str | None
    accepted_ms: int  # from its first row. A move does not change it
    is_level: bool = False  # it is in the queue of a delay level
    in_table: bool = False  # it is in a file of the pending table
    at_seq: int | None = None


class Settled(NamedTuple):
    """The end of a scheduled message, and the time when it ended."""

    verdict: str
    at_ms: int | None


@dataclass(slots=True)
class Found:
    """The scheduled messages found, and the ends of those that are settled, by number.

    `gone`: the numbers of scheduled messages that are in neither log nor table any more, by the name used for them.
    """

    candidates: list[Candidate] = field(default_factory=list)
    settled: dict[int, Settled] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)


def is_on_its_way_back(topic: str) -> bool:
    """Return whether a scheduled message for this topic is a copy of a message that was delivered."""
    return topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


class Axis(Enum):
    """The kinds of names of a scheduled message."""

    ID, KEY, SEQ = range(3)


class Search:
    """One search for several callers.

    Call `search` (lookup thread). Then, for each caller: scan the log for the numbers in `missing` (look_ups.scan),
    pass the rows to `add_rows`, and call `result`.
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
        # By name and its kind, then by number: one caller's id may be another caller's key.
        self._found: dict[tuple[Axis, str], dict[int, Candidate]] = defaultdict(dict)
        self._settled: dict[int, Settled] = {}  # by number
        self._unknown: set[int] = set()  # numbers of which only the rows that end them may be left

    def search(self) -> None:
        """Search log and files (lookup thread).

        Raise Corrupt, NotFound if a file was deleted meanwhile, or OutOfRange if a segment has left the log.
        """
        hashes = hash_text(pa.array([*self._ids, *self._keys], pa.string()))
        if self._seqs:
            self._search_numbers()
        self._search_log(hashes)
        if len(hashes):
            # Hashes of different texts may be equal, so `_names` compares the texts.
            for row in self._file_keys.find_keys(self._live, hashes):
                for name in self._names(row):
                    self._add_filed(name, row)

    def _search_numbers(self) -> None:
        """Search the files and the log for the numbers."""
        number_of = self._versions()
        for row in self._file_keys.find_seqs(
            self._live, np.array(list(number_of), dtype=np.int64)
        ).to_pylist():
            # The caller may have named the row of a move, which is a version of another scheduled message.
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
        """Search the log's key index for the names, and for the rows that ended the scheduled messages found so far."""
        # The rows that end a scheduled message named by its number are found by its id.
        known = {c.unique_key for of_name in self._found.values() for c in of_name.values()} - {None}
        # One lookup for all names, because each lookup searches the index of every sealed segment.
        seqs = self._key_index.find_rows(
            np.concatenate([hashes, hash_text(pa.array(known - self._ids, pa.string()))]) if known else hashes
        )
        # Usually there are none: most scheduled messages that are cancelled have been in the table for long.
        for row in self._reader.read_rows(seqs).select(COLUMNS).to_pylist() if len(seqs) else ():
            for name in self._names(row):
                self._add_logged(name, row)
            self._note_settling(row)
            self._note_move(row)

    def missing(self, names: Names, *, thorough: bool) -> set[int]:
        """Return the numbers to scan the log for. `thorough`: also those of messages without an id, for their ends."""
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
        """Return all scheduled messages with one of a caller's names."""
        candidates = [self._in_newest(c) for c in self._of(names)]
        known = {c.number for c in candidates}
        # These numbers were given out, but are in neither log nor table. The end is no longer known ("expired").
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
        """Return the scheduled messages found for a caller's names, each scheduled message once for each name."""
        asked = [
            *((Axis.ID, name) for name in names.ids),
            *((Axis.KEY, name) for name in names.keys),
            *((Axis.SEQ, str(seq)) for seq in names.seqs),
        ]
        found = {(c.subject, c.number): c for name in asked for c in self._found.get(name, {}).values()}
        return list(found.values())

    def _in_newest(self, candidate: Candidate) -> Candidate:
        """Update a candidate to its newest version in the schedule: the row found may be an old one in a file."""
        moved_to = self._moved.newest(candidate.number)
        if moved_to is None or moved_to[1] <= candidate.seq:
            return candidate
        due_ms, version = moved_to
        # Moved since the search: the row that moved it can be read, unless retention has removed it.
        at_seq = version if version >= self._reader.first_seq else None
        return replace(candidate, due_ms=due_ms, seq=version, in_table=False, at_seq=at_seq)

    # -- by number ---------------------------------------------------------------------------------------------

    def _versions(self) -> dict[int, int]:
        """Map the newest version of each requested number to that number."""
        found = {}
        for number in self._seqs:
            moved_to = self._moved.newest(number)
            found[number if moved_to is None else moved_to[1]] = number
        return found

    def _in_log(self, version: int, number: int) -> bool:
        """Return whether this row is still in the log. Add it if it is a version of this scheduled message."""
        if not self._reader.first_seq <= version < self._reader.next_seq:
            return False
        there = False
        for rows in self._reader.rows(version, version + 1):
            for row in rows.select(COLUMNS).to_pylist():
                # A half message is not enough: later rows decide whether it became a scheduled message.
                there = row["kind"] != Kind.SCHEDULED or row["due_ms"] is not None
                if row["kind"] in KINDS and _number_of(row) == number:
                    self._add_logged((Axis.SEQ, str(number)), row)
        return there

    # -- rows ----------------------------------------------------------------------------------------------------

    def _add_logged(self, name: tuple[Axis, str], row: dict[str, Any]) -> None:
        """Add the message that a row of the log accepts, moves or ends. Half messages have no due time: ignored."""
        if row["due_ms"] is None:
            return
        if row["kind"] in KINDS:
            accepted_ms = row["store_ms"] if row["kind"] == Kind.SCHEDULED else row["accepted_ms"]
            self._add(name, row, _number_of(row), _version_of(row), accepted_ms, at_seq=row["seq"])
        elif row["kind"] in SETTLING:
            # Retention may have removed the scheduled message itself, or it was never in the log (bulk).
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
        """Add the position of a message: its newest version counts, and of that version the last row of the log."""
        of_name = self._found[name]
        known = of_name.get(number)
        if known is not None and known.seq > version:
            return
        if known is not None and known.seq == version:
            of_name[number] = replace(
                known, in_table=known.in_table or in_table, at_seq=known.at_seq if at_seq is None else at_seq
            )
            return
        # Only scheduled messages of delay levels have a position in a queue.
        is_level = row.get("kind") in KINDS and row["queue_offset"] is not None
        # The CANCEL row must name the topic of the message, not that of the level.
        topic = decode_properties(row["properties"])[REAL_TOPIC] if is_level else row["topic"]
        of_name[number] = Candidate(
            name[1], number, version, row["due_ms"], topic, row["unique_key"], row["keys"], accepted_ms or 0,
            is_level, in_table, at_seq,
        )  # fmt: skip

    def _note_settling(self, row: dict[str, Any]) -> None:
        if row["kind"] in SETTLING and row["due_ms"] is not None:
            verdict = RELEASED if row["kind"] == Kind.RELEASE else CANCELLED
            # A drain ends scheduled messages by CANCEL rows whose properties name the other group.
            if verdict == CANCELLED and is_handed(row["properties"]):
                verdict = HANDED
            self._settled[row["source_seq"]] = Settled(verdict, row["store_ms"])

    def _note_move(self, row: dict[str, Any]) -> None:
        """Add the row that moved a scheduled message which was found by its number."""
        name = Axis.SEQ, str(row["source_seq"])
        if row["kind"] == Kind.MOVED and row["source_seq"] in self._found.get(name, ()):
            self._add_logged(name, row)

    def _names(self, row: dict[str, Any]) -> list[tuple[Axis, str]]:
        """Return the requested ids and keys that the row carries."""
        names = [(Axis.ID, row["unique_key"])] if row["unique_key"] in self._ids else []
        if row["keys"] is not None and self._keys:
            names += [(Axis.KEY, key) for key in self._keys.intersection(row["keys"].split(" "))]
        return names


def _number_of(row: dict[str, Any]) -> int:
    return int(row["source_seq"] if row["kind"] == Kind.MOVED else row["seq"])


def _number_in_table(row: dict[str, Any]) -> int:
    return int(row["seq"] if row["number"] is None else row["number"])


def _version_of(row: dict[str, Any]) -> int:
    """Return the version of a scheduled message that a row of the log contains or ends."""
    # Such a row sets a due time, so it is a version itself. Other rows name the version that they repeat or end.
    if row["kind"] == Kind.SCHEDULED or row["from_due_ms"] is not None:
        return int(row["seq"])
    return int(row["source_seq"] if row["version_seq"] is None else row["version_seq"])


def read(
    reader: LogReader, file_keys: TableKeys, live: FileSet, candidates: Sequence[Candidate]
) -> pa.RecordBatch:
    """Read the complete rows of these scheduled messages from log and table, in READ_SCHEMA (file thread).

    Scheduled messages that are in neither are left out. A row of a delay level is returned as stored, under the
    schedule's topic.
    """
    at = np.array([-1 if c.at_seq is None else c.at_seq for c in candidates], dtype=np.int64)
    # Retention may have removed rows since the lookup. These scheduled messages are in files then.
    logged = at >= reader.first_seq
    # Two names may lead to the same row, which is read once.
    parts = [as_scheduled(reader.read_rows(np.unique(at[logged])))]
    wanted = [c for c, is_logged in zip(candidates, logged.tolist(), strict=True) if not is_logged]
    if wanted:
        parts += [table_rows(rows) for rows in file_keys.rows_of(live, *pairs(wanted)) if rows.num_rows]
    return pa.concat_batches(parts)


def pairs(candidates: Sequence[Candidate]) -> tuple[Int64Array, Int64Array]:
    """Return (due_ms, version) of each scheduled message, as columns."""
    return np.array([c.due_ms for c in candidates], dtype=np.int64), np.array(
        [c.seq for c in candidates], dtype=np.int64
    )
