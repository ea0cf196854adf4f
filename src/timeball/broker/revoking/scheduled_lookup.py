"""Search for scheduled messages by id, key or number, and for the rows that ended them.

    id, key   finds every scheduled message that carries it
    number    finds the scheduled message with this number: the sequence number of its first row, which never changes

A lookup reads the log and the pending table. Each reschedule writes a row with a new due time. The sequence number of
that row is the *version* of the message, and only the newest version is valid. A RELEASE or CANCEL row that names the
number ends the message.

Copies that return to a consumer (topics %RETRY% and %DLQ%) are left out unless the caller names their topic. They carry
their producer's id and keys, but the producer's message has been delivered, and a cancel of a copy would lose it.

Log and files are searched in a separate thread, so that no release waits for a search. Consumers wait only while the
keys of the log are searched. A search uses the list of files from its beginning. So a scheduled message that compaction
moves meanwhile from the log to a file, or between files, is still found. A search is repeated if retention has removed
some of its input (`LookUps`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.ingress import AsyncBatcher
from timeball.broker.accepting.waiters import Gate
from timeball.broker.revoking.drain_rows import has_drain_mark
from timeball.io.threads import in_thread
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.answers import HANDED
from timeball.model.errors import Corrupt, NotFound, OutOfRange, TimeballError
from timeball.model.key_hash import UInt64Array, hash_text
from timeball.model.message import DLQ_PREFIX, RETRY_PREFIX, Int64Array, Kind, decode_properties
from timeball.model.rules import check_key
from timeball.schedule.hour_log import HourLog
from timeball.schedule.hour_log import as_scheduled as table_rows
from timeball.schedule.levels import REAL_TOPIC
from timeball.schedule.locations import KINDS, as_scheduled
from timeball.schedule.outcomes import Moved, Outcomes
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
    """A scheduled message that matches a name of the caller.

    `due_ms` and `seq` identify it in the schedule. `at_seq`: the row of the log that now contains it, if there is one.
    """

    subject: str  # the name by which it was found
    number: int  # seq of its first row, which never changes
    seq: int  # its version: the row that set its due time
    due_ms: int
    topic: str
    unique_key: str | None
    keys: str | None
    accepted_ms: int  # store time of its first row, which a move does not change
    is_level: bool = False  # it is in the queue of a delay level
    in_table: bool = False  # it is in a file of the pending table
    at_seq: int | None = None


class End(NamedTuple):
    """How and when a scheduled message ended."""

    verdict: str
    at_ms: int | None


@dataclass(slots=True)
class LookupResult:
    """The scheduled messages with a caller's names, and the ends of those that are settled, by number.

    `expired_numbers` maps a name to its number, if log and table contain nothing of that message any more.
    """

    candidates: list[Candidate] = field(default_factory=list)
    settled: dict[int, End] = field(default_factory=dict)
    expired_numbers: dict[str, int] = field(default_factory=dict)


def is_on_its_way_back(topic: str) -> bool:
    """Check whether messages of this topic are copies that return to a consumer after a failed delivery."""
    return topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


class NameKind(Enum):
    """The kinds of names by which a caller can ask for a scheduled message."""

    ID, KEY, SEQ = range(3)


class Search:
    """One search for several callers.

    Call `search` (lookup thread). Then, for each caller: scan the log for the numbers in `missing` (`scan`),
    pass the rows to `add_rows`, and call `result`.
    """

    def __init__(
        self,
        reader: LogReader,
        key_index: KeyIndex,
        file_keys: TableKeys,
        live_files: FileSet,
        moved: Moved,
        callers: Sequence[Names],
    ) -> None:
        self._reader, self._key_index, self._moved = reader, key_index, moved
        self._file_keys, self._live_files = file_keys, live_files
        self._ids = {name for names in callers for name in names.ids}
        self._keys = {name for names in callers for name in names.keys}
        self._seqs = {seq for names in callers for seq in names.seqs}
        # By (kind, name), then by number. The kind is needed because one caller's id may be another caller's key.
        self._candidates: dict[tuple[NameKind, str], dict[int, Candidate]] = defaultdict(dict)
        self._settled: dict[int, End] = {}  # by number
        self._maybe_expired: set[int] = set()  # requested numbers without a row so far

    def search(self) -> None:
        """Search log and files (lookup thread).

        Raise Corrupt, NotFound if a file was deleted meanwhile, or OutOfRange if a segment has left the log.
        """
        hashes = hash_text(pa.array([*self._ids, *self._keys], pa.string()))
        if self._seqs:
            self._search_numbers()
        self._search_log(hashes)
        if len(hashes):
            # Different texts may have the same hash, so `_matching_names` compares the texts.
            for row in self._file_keys.find_keys(self._live_files, hashes):
                for name in self._matching_names(row):
                    self._add_from_file(name, row)

    def _search_numbers(self) -> None:
        """Search the files, then the log, for the requested numbers."""
        number_by_version = self._numbers_by_version()
        for row in self._file_keys.find_seqs(
            self._live_files, np.array(list(number_by_version), dtype=np.int64)
        ).to_pylist():
            # The caller may have named the seq of a MOVED row, which is a version of another message.
            if _number_in_table(row) == number_by_version[row["seq"]]:
                self._add_from_file((NameKind.SEQ, str(number_by_version[row["seq"]])), row)
        for version, number in self._numbers_by_version().items():
            if (
                not self._add_if_in_log(version, number)
                and 0 < number < self._reader.next_seq
                and number not in self._candidates[NameKind.SEQ, str(number)]
            ):
                self._maybe_expired.add(number)

    def _search_log(self, hashes: UInt64Array) -> None:
        """Search the log's key index for the ids and keys, and for rows that ended the messages found so far."""
        # RELEASE and CANCEL rows carry the message's id. So they are found for messages that were named by number, too.
        candidate_ids = {
            found.unique_key for by_number in self._candidates.values() for found in by_number.values()
        } - {None}
        # One lookup for all names, because each lookup searches the index of every sealed segment.
        seqs = self._key_index.find_rows(
            np.concatenate([hashes, hash_text(pa.array(candidate_ids - self._ids, pa.string()))])
            if candidate_ids
            else hashes
        )
        # Usually there are none, because compaction has moved most pending messages from the log to the table.
        for row in self._reader.read_rows(seqs).select(COLUMNS).to_pylist() if len(seqs) else ():
            for name in self._matching_names(row):
                self._add_from_log(name, row)
            self._record_end(row)
            self._record_move(row)

    def missing(self, names: Names, *, thorough: bool) -> set[int]:
        """Find the numbers for which the log must be scanned.

        `thorough`: include found messages without an id, because no index leads to the rows that ended them.
        """
        maybe_expired = self._maybe_expired.intersection(names.seqs)
        return maybe_expired | {
            found.number for found in self._candidates_for(names) if thorough and found.unique_key is None
        }

    def add_rows(self, rows: list[dict[str, Any]]) -> None:
        """Add the rows that a scan of the log found for the numbers in `missing`."""
        for row in rows:
            self._record_end(row)
            self._record_move(row)
            if row["source_seq"] in self._maybe_expired:
                self._add_from_log((NameKind.SEQ, str(row["source_seq"])), row)

    def result(self, names: Names) -> LookupResult:
        """Collect the scheduled messages with one caller's names, at their newest versions."""
        candidates = [self._at_newest_version(found) for found in self._candidates_for(names)]
        found_numbers = {found.number for found in candidates}
        # These numbers were given out, but are in neither log nor table. Their end is no longer known ("expired").
        maybe_expired = self._maybe_expired.intersection(names.seqs) - found_numbers
        expired_numbers = {str(seq): seq for seq in maybe_expired if seq < self._reader.first_seq}
        # Without a topic, copies that return to a consumer are hidden: they carry the id of a delivered message.
        if names.topic is not None:
            candidates = [found for found in candidates if found.topic == names.topic]
        else:
            requested_numbers = {str(seq) for seq in names.seqs}
            candidates = [
                found
                for found in candidates
                if found.subject in requested_numbers or not is_on_its_way_back(found.topic)
            ]
        if names.may is not None:
            candidates = [found for found in candidates if names.may(found.topic)]
        return LookupResult(candidates, self._settled, expired_numbers)

    def _candidates_for(self, names: Names) -> list[Candidate]:
        """List the candidates for a caller's names: each message once per name that finds it."""
        requested = [
            *((NameKind.ID, name) for name in names.ids),
            *((NameKind.KEY, name) for name in names.keys),
            *((NameKind.SEQ, str(seq)) for seq in names.seqs),
        ]
        unique = {
            (found.subject, found.number): found
            for name in requested
            for found in self._candidates.get(name, {}).values()
        }
        return list(unique.values())

    def _at_newest_version(self, candidate: Candidate) -> Candidate:
        """Update a candidate to its newest version. A file may still contain an older version."""
        moved_to = self._moved.newest(candidate.number)
        if moved_to is None or moved_to[1] <= candidate.seq:
            return candidate
        due_ms, version = moved_to
        # Moved since the search: the MOVED row can be read, unless retention has removed it.
        at_seq = version if version >= self._reader.first_seq else None
        return replace(candidate, due_ms=due_ms, seq=version, in_table=False, at_seq=at_seq)

    # -- by number ---------------------------------------------------------------------------------------------

    def _numbers_by_version(self) -> dict[int, int]:
        """Map the newest version of each requested number back to the number."""
        number_by_version = {}
        for number in self._seqs:
            moved_to = self._moved.newest(number)
            number_by_version[number if moved_to is None else moved_to[1]] = number
        return number_by_version

    def _add_if_in_log(self, version: int, number: int) -> bool:
        """Add row `version` of the log if it is this message.

        False if the log has only a half message or no such row.
        """
        if not self._reader.first_seq <= version < self._reader.next_seq:
            return False
        is_in_log = False
        for rows in self._reader.rows(version, version + 1):
            for row in rows.select(COLUMNS).to_pylist():
                # A half message is not enough: later rows decide whether it became a scheduled message.
                is_in_log = row["kind"] != Kind.SCHEDULED or row["due_ms"] is not None
                if row["kind"] in KINDS and _number_in_log(row) == number:
                    self._add_from_log((NameKind.SEQ, str(number)), row)
        return is_in_log

    # -- rows ----------------------------------------------------------------------------------------------------

    def _add_from_log(self, name: tuple[NameKind, str], row: dict[str, Any]) -> None:
        """Add the message that a row of the log accepts, moves or ends. Half messages (no due time) are ignored."""
        if row["due_ms"] is None:
            return
        if row["kind"] in KINDS:
            accepted_ms = row["store_ms"] if row["kind"] == Kind.SCHEDULED else row["accepted_ms"]
            self._add(name, row, _number_in_log(row), _version_of(row), accepted_ms, at_seq=row["seq"])
        elif row["kind"] in SETTLING:
            # Retention may have removed the scheduled message itself, or it was never in the log (bulk).
            self._add(name, row, row["source_seq"], _version_of(row), row["accepted_ms"])

    def _add_from_file(self, name: tuple[NameKind, str], row: dict[str, Any]) -> None:
        self._add(name, row, _number_in_table(row), row["seq"], row["accepted_ms"], in_table=True)

    def _add(
        self,
        name: tuple[NameKind, str],
        row: dict[str, Any],
        number: int,
        version: int,
        accepted_ms: int | None,
        *,
        in_table: bool = False,
        at_seq: int | None = None,
    ) -> None:
        """Add a message under a name. Its newest version wins, and for the same version the last row of the log."""
        by_number = self._candidates[name]
        known = by_number.get(number)
        if known is not None and known.seq > version:
            return
        if known is not None and known.seq == version:
            by_number[number] = replace(
                known, in_table=known.in_table or in_table, at_seq=known.at_seq if at_seq is None else at_seq
            )
            return
        # Only scheduled messages of delay levels have a position in a queue.
        is_level = row.get("kind") in KINDS and row["queue_offset"] is not None
        # The CANCEL row must name the topic of the message, not that of the level.
        topic = decode_properties(row["properties"])[REAL_TOPIC] if is_level else row["topic"]
        by_number[number] = Candidate(
            name[1], number, version, row["due_ms"], topic, row["unique_key"], row["keys"], accepted_ms or 0,
            is_level, in_table, at_seq,
        )  # fmt: skip

    def _record_end(self, row: dict[str, Any]) -> None:
        if row["kind"] in SETTLING and row["due_ms"] is not None:
            verdict = RELEASED if row["kind"] == Kind.RELEASE else CANCELLED
            # A drain also ends messages with CANCEL rows. The properties of these rows name the receiving group.
            if verdict == CANCELLED and has_drain_mark(row["properties"]):
                verdict = HANDED
            self._settled[row["source_seq"]] = End(verdict, row["store_ms"])

    def _record_move(self, row: dict[str, Any]) -> None:
        """Add a MOVED row as a version of a message that was requested and found by its number."""
        name = NameKind.SEQ, str(row["source_seq"])
        if row["kind"] == Kind.MOVED and row["source_seq"] in self._candidates.get(name, ()):
            self._add_from_log(name, row)

    def _matching_names(self, row: dict[str, Any]) -> list[tuple[NameKind, str]]:
        """List the requested ids and keys that a row carries."""
        names = [(NameKind.ID, row["unique_key"])] if row["unique_key"] in self._ids else []
        if row["keys"] is not None and self._keys:
            names += [(NameKind.KEY, key) for key in self._keys.intersection(row["keys"].split(" "))]
        return names


def _number_in_log(row: dict[str, Any]) -> int:
    return int(row["source_seq"] if row["kind"] == Kind.MOVED else row["seq"])


def _number_in_table(row: dict[str, Any]) -> int:
    return int(row["seq"] if row["number"] is None else row["number"])


def _version_of(row: dict[str, Any]) -> int:
    """Find the version that a row of the log sets, writes again or ends."""
    # The first row and a reschedule set a due time, so they are versions themselves. Other rows name a version.
    if row["kind"] == Kind.SCHEDULED or row["from_due_ms"] is not None:
        return int(row["seq"])
    return int(row["source_seq"] if row["version_seq"] is None else row["version_seq"])


def read_scheduled_rows(
    reader: LogReader, file_keys: TableKeys, live_files: FileSet, candidates: Sequence[Candidate]
) -> pa.RecordBatch:
    """Read the complete rows of these scheduled messages from log and table, in READ_SCHEMA (file thread).

    The rows are in no particular order, and messages that are in neither are left out. A message of a delay level has
    the topic under which it is stored (SCHEDULE_TOPIC).
    """
    row_seqs = np.array([-1 if c.at_seq is None else c.at_seq for c in candidates], dtype=np.int64)
    # Retention may have removed rows since the lookup. Their messages are in files then.
    is_in_log = row_seqs >= reader.first_seq
    # Two names may lead to the same row, which is read once.
    batches = [as_scheduled(reader.read_rows(np.unique(row_seqs[is_in_log])))]
    in_table = [c for c, has_row in zip(candidates, is_in_log.tolist(), strict=True) if not has_row]
    if in_table:
        batches += [
            table_rows(rows)
            for rows in file_keys.rows_of(live_files, *due_version_columns(in_table))
            if rows.num_rows
        ]
    return pa.concat_batches(batches)


def due_version_columns(candidates: Sequence[Candidate]) -> tuple[Int64Array, Int64Array]:
    """Build the columns due_ms and version of these messages, in their order."""
    return np.array([candidate.due_ms for candidate in candidates], dtype=np.int64), np.array(
        [candidate.seq for candidate in candidates], dtype=np.int64
    )


# ---- requests that arrive during a search share the next search ----------------------------------------------
# A search of the log's key index and the files' key runs costs nearly the same for ten names as for one, and the lookup
# thread runs one search at a time. The result for each caller depends only on that caller's names (`Search.result`).


class LookUps:
    """The lookups of one broker. Belongs to the event loop."""

    def __init__(
        self,
        *,
        gate: Gate,
        writer: LogWriter,
        reader: LogReader,
        key_index: KeyIndex,
        hour_log: HourLog,
        outcomes: Outcomes,
        file_keys: TableKeys,
        lookup_thread: Executor,
    ) -> None:
        # Public for cancel.py: an operation passes the gate, and flushes the writer before it repeats a lookup.
        self.gate, self.writer, self.outcomes = gate, writer, outcomes
        self._reader, self._key_index, self._hour_log = reader, key_index, hour_log
        self._file_keys = file_keys
        self._lookup_thread = lookup_thread
        self._batcher: AsyncBatcher[Names, Search] = AsyncBatcher(
            self._search_together, limits.CANCELS_PER_REQUEST_MAX
        )

    async def look_up(self, names: Names, *, thorough: bool = False) -> LookupResult:
        """Search log and table for the scheduled messages with these names, and for the rows that ended them.

        `thorough`: also find the end of messages without an id, which needs a scan of the log. Raise Corrupt if a file
        that may contain one of the messages cannot be read.
        """
        search = await self._batcher.put(names, rows=len(names.subjects))
        missing = search.missing(names, thorough=thorough)
        if missing:
            search.add_rows(await asyncio.to_thread(scan, self._reader, missing))
        return search.result(names)

    async def _search_together(self, callers: Sequence[Names]) -> list[Search | TimeballError]:
        """Run one search for several callers. The result has a search or an error for each caller, in order."""
        try:
            search = await self._search(callers)
        except (Corrupt, NotFound) as error:
            if len(callers) == 1:
                return [error]
            # One caller needs a file that cannot be read. The others must not fail, so each one searches separately.
            return [result for names in callers for result in await self._search_together([names])]
        return [search] * len(callers)

    async def _search(self, callers: Sequence[Names]) -> Search:
        """Search log and files. Repeat the search if retention removed segments or files meanwhile."""
        while True:
            first_seq, live_files = self._reader.first_seq, self._hour_log.pending.live
            search = Search(
                self._reader, self._key_index, self._file_keys, live_files, self.outcomes.moved, callers
            )
            try:
                # One call for log and files, because a switch to another thread and back costs as much as the search.
                await in_thread(self._lookup_thread, search.search)
            except NotFound:
                if self._hour_log.pending.live is live_files:
                    raise  # a file of the table is missing
            except OutOfRange:
                if self._reader.first_seq == first_seq:
                    raise
            else:
                if self._reader.first_seq == first_seq:
                    return search


# ---- scan of the log by number -------------------------------------------------------------------------------
# No index maps a message number to the rows that move or end it. Such an index would need an entry for each release,
# and most scheduled messages have an id, because RocketMQ's and Timeball's clients set one. For the others the log is
# read, from the lowest number to its end. A scan may take long, so it does not run in the broker's reader thread, for
# which consumers wait. Rows that retention removes during the scan are missing from the result.

_BATCH_ROWS = 65_536


def scan(reader: LogReader, numbers: set[int]) -> list[dict[str, Any]]:
    """Read the MOVED, RELEASE and CANCEL rows of the scheduled messages with these numbers, in log order (any thread).

    Rows have the columns `COLUMNS`.
    """
    while True:
        begin_seq = max(reader.first_seq, min(numbers))
        try:
            return _scan(reader, sorted(numbers), begin_seq)
        except OutOfRange:
            if reader.first_seq <= begin_seq:
                raise
            # Retention has removed the segment since `first_seq` was read, so the scan begins at the new one.


def _scan(reader: LogReader, numbers: list[int], begin_seq: int) -> list[dict[str, Any]]:
    matches = []
    for rows in reader.coalesced(begin_seq, reader.next_seq, (*SETTLING, Kind.MOVED), _BATCH_ROWS, COLUMNS):
        # Vectorized and without bodies, because a scan may read days of log.
        is_match = np.isin(rows.column("source_seq").fill_null(-1).to_numpy(), numbers)
        if is_match.any():
            matches += rows.filter(pa.array(is_match)).to_pylist()
    return matches
