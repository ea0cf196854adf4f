"""Search for scheduled messages by id, key or number, and for the rows that ended them.

    id, key   finds every scheduled message that carries it
    number    finds the scheduled message with this number: the sequence number of its first row, which never changes

A lookup reads the log and the pending table. Each reschedule writes a row with a new due time. The sequence number of
that row is the *version* of the message, and only the newest version is valid. A RELEASE or CANCEL row that names the
number ends the message.

Copies that return to a consumer (topics %RETRY% and %DLQ%) are left out unless the caller names their topic. They carry
their producer's id and keys, but the producer's message has been delivered, and a cancel of a copy would lose it.

Log and files are searched in a separate thread, which also collects the results. So no release waits for a search,
even if a key has a million messages. Consumers wait only while the keys of the log are searched. A search uses the list
of files from its beginning. So a scheduled message that compaction moves meanwhile from the log to a file, or between
files, is still found. A search is repeated if retention has removed some of its input (`LookUps`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.accepting.ingress import AsyncBatcher
from timeball.broker.accepting.waiters import Gate
from timeball.broker.registry.selections import (
    CONDITION_COLUMNS,
    Described,
    Selected,
    SelectionFacts,
    Selections,
)
from timeball.broker.revoking.drain_rows import has_drain_mark
from timeball.broker.revoking.found_rows import (
    COLUMNS,
    SCHEDULED,
    SETTLING,
    VALUES_ROWS,
    FoundRow,
    found_rows,
    rows_in_files,
    rows_in_log,
    scan,
)
from timeball.io.threads import SLICE_ROWS, in_slices, in_thread
from timeball.log.disk_thread import ConfirmLead
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.answers import HANDED
from timeball.model.errors import Corrupt, NotFound, OutOfRange, TimeballError
from timeball.model.key_hash import UInt64Array, hash_text
from timeball.model.message import (
    DLQ_PREFIX,
    READ_SCHEMA,
    RETRY_PREFIX,
    Int64Array,
    Kind,
    ReadRow,
    decode_properties,
)
from timeball.model.rules import check_key
from timeball.schedule.delay_levels import REAL_TOPIC
from timeball.schedule.hour_log import HourLog, scheduled_from_table
from timeball.schedule.locations import KINDS, as_scheduled
from timeball.schedule.outcomes import Moved, Outcomes
from timeball.table.file_keys import FileSet
from timeball.table.key_index import TableKeys

SELECT_ROWS = 65_536  # messages whose rows are read at once, to evaluate the conditions of selections
_LOOKUP_VALUES = itemgetter(*map(READ_SCHEMA.get_field_index, COLUMNS))
_UNIQUE_KEY = READ_SCHEMA.get_field_index("unique_key")
CANCELLED, RELEASED = "already_cancelled", "released"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the scheduled messages that a caller asks for.

    `topic`: only scheduled messages for this topic, because producers of different topics may use the same id. `may`:
    only scheduled messages for topics for which it returns True. The lookup leaves out all others. A message that a
    selection has moved has two topics: that of its send, and the present one (`LookUps.look_up_present`).
    """

    ids: Sequence[str] = ()
    keys: Sequence[str] = ()
    seqs: Sequence[int] = ()
    topic: str | None = None
    may: Callable[[str], bool] | None = None

    def check(self) -> None:
        """Raise OutOfRange for too many names in one request, InvalidMessage for an invalid key."""
        if len(self.ids) + len(self.keys) + len(self.seqs) > limits.CANCELS_PER_REQUEST_MAX:
            raise OutOfRange(
                f"at most {limits.CANCELS_PER_REQUEST_MAX} scheduled messages in one request; split it"
            )
        # Without this check an invalid key would get the answer `not_found`.
        for key in self.keys:
            check_key(key)

    def allows(self, topic: str) -> bool:
        """Check whether the caller asks for messages of this topic, and may see them."""
        return self.topic in (None, topic) and (self.may is None or self.may(topic))

    @property
    def subjects(self) -> list[str]:
        """The names as the answer repeats them, in the order of the request."""
        return [*self.ids, *self.keys, *map(str, self.seqs)]


class Owner(NamedTuple):
    """A selection to which a pending message belongs (registry/selections.py)."""

    name: str
    facts: SelectionFacts


class Change(NamedTuple):
    """The present state of a pending message that selections have changed."""

    owner: Owner | None  # the selection that has cancelled it
    holder: Owner | None  # the selection that holds it
    due_ms: int
    topic: str


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A scheduled message that matches a name of the caller. `due_ms` and `seq` identify it in the schedule."""

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
    at_seq: int | None = None  # the row of the log that now contains it, if there is one
    row: ReadRow | None = None  # that row, if the look-up has read all its columns
    change: Change | None = None  # its state, if `LookUps.select` found that selections have changed it

    @property
    def shown_topic(self) -> str:
        """The topic to which the message will be released."""
        return self.topic if self.change is None else self.change.topic

    @property
    def shown_due_ms(self) -> int:
        """When the message is due, as users see it."""
        return self.due_ms if self.change is None else self.change.due_ms


class End(NamedTuple):
    """How and when a scheduled message ended."""

    verdict: str
    at_ms: int | None


@dataclass(slots=True)
class LookupResult:
    """The scheduled messages with a caller's names, and the ends of those that are settled."""

    candidates: list[Candidate] = field(default_factory=list)
    settled: dict[int, End] = field(default_factory=dict)  # by the number of the message
    # Requested numbers of which log and table contain nothing any more, by the number as text.
    expired_numbers: dict[str, int] = field(default_factory=dict)
    # All rows of the log with the requested ids. None if they are many or large, so that the caller must read them.
    rows: list[ReadRow] | None = field(default=None, compare=False)
    # The selections that have cancelled messages, by the numbers of the messages. Filled by `settle_found`.
    selected: dict[int, Owner] = field(default_factory=dict, compare=False)


def is_on_its_way_back(topic: str) -> bool:
    """Check whether messages of this topic are copies that return to a consumer after a failed delivery."""
    return topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


class NameKind(IntEnum):
    """The kinds of names by which a caller can ask for a scheduled message."""

    ID, KEY, SEQ = range(3)


Name = tuple[NameKind, str]


class Search:
    """One search for several callers, in the lookup thread.

    Call `search`. Then, for each caller: scan the log for the numbers that `missing` returns (`scan`, in another
    thread), pass the rows to `add_rows`, and call `result`.
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
        """Prepare a search in the log and in `live_files`. `moved`: the newest versions of moved messages.

        `callers`: the names of each caller.
        """
        self._reader, self._key_index, self._moved = reader, key_index, moved
        self._file_keys, self._live_files = file_keys, live_files
        self._ids: dict[str, Name] = {name: (NameKind.ID, name) for names in callers for name in names.ids}
        self._keys: dict[str, Name] = {name: (NameKind.KEY, name) for names in callers for name in names.keys}
        self._seqs = {seq for names in callers for seq in names.seqs}
        # By (kind, name), then by number. The kind is needed because one caller's id may be another caller's key.
        self._candidates: dict[Name, dict[int, Candidate]] = defaultdict(dict)
        self._settled: dict[int, End] = {}  # by number
        self._maybe_expired: set[int] = set()  # requested numbers without a row so far
        # The rows that the search of the log found, by id. None before that search, or if they were many or large.
        self._rows_by_id: dict[str | None, list[ReadRow]] | None = None

    def search(self) -> None:
        """Search log and files (lookup thread).

        Raises Corrupt, NotFound if a file was deleted meanwhile, and OutOfRange if a segment has left the log.
        """
        hashes = hash_text(pa.array([*self._ids, *self._keys], pa.string()))
        if self._seqs:
            self._search_numbers()
        self._search_log(hashes)
        if len(hashes):
            # Different texts may have the same hash, so `_matching_names` compares the texts.
            for row in rows_in_files(self._file_keys.find_keys(self._live_files, hashes)):
                for name in self._matching_names(row):
                    self._add(name, row)

    def _search_numbers(self) -> None:
        """Search the files, then the log, for the requested numbers."""
        number_by_version = self._numbers_by_version()
        identities = self._file_keys.find_seqs(
            self._live_files, np.array(list(number_by_version), dtype=np.int64)
        )
        for row in rows_in_files(identities.to_pylist()):
            # The caller may have named the seq of a MOVED row, which is a version of another message.
            if row.number == number_by_version[row.version]:
                self._add((NameKind.SEQ, str(row.number)), row)
        number_by_version = self._numbers_by_version()
        in_log = self._add_from_log(number_by_version)
        for version, number in number_by_version.items():
            if (
                version not in in_log
                and 0 < number < self._reader.next_seq
                and number not in self._candidates[NameKind.SEQ, str(number)]
            ):
                self._maybe_expired.add(number)

    def _search_log(self, hashes: UInt64Array) -> None:
        """Search the log's key index for the ids and keys, and for rows that ended the messages found so far.

        `hashes`: of all requested ids and keys.
        """
        # Messages found by number: search for their ids, too. This finds the RELEASE and CANCEL rows that ended them,
        # which carry the id.
        candidate_ids = {
            found.unique_key for by_number in self._candidates.values() for found in by_number.values()
        } - {None}
        # One lookup for all names, because each lookup searches the index of every sealed segment.
        seqs = self._key_index.find_rows(
            np.concatenate([hashes, hash_text(pa.array(candidate_ids - self._ids.keys(), pa.string()))])
            if candidate_ids
            else hashes
        )
        # Few rows are read complete, as Python values, which costs less than columns. None if they are too large.
        values = self._reader.read_values(seqs.tolist()) if len(seqs) <= VALUES_ROWS else None
        if values is not None:
            self._rows_by_id = defaultdict(list)
            for row in values:
                self._rows_by_id[row[_UNIQUE_KEY]].append(row)
            self._add_log_rows(found_rows(map(_LOOKUP_VALUES, values), values))
            return
        for begin in range(0, len(seqs), VALUES_ROWS):
            # `read_rows` adds the column `seq` itself.
            rows = self._reader.read_rows(seqs[begin : begin + VALUES_ROWS], COLUMNS[1:])
            self._add_log_rows(rows_in_log(rows))

    def _add_log_rows(self, rows: Iterable[FoundRow]) -> None:
        """Add the rows of the log that carry a requested id or key, or that ended a message found so far."""
        for row in rows:
            for name in self._matching_names(row):
                self._add(name, row)
            if row.kind != SCHEDULED:  # nearly all rows are of this kind
                self._record_end(row)
                self._record_move(row)

    def missing(self, names: Names, *, thorough: bool) -> set[int]:
        """Find the numbers of one caller's messages for which the log must be scanned.

        These are requested numbers without a row so far and, if `thorough`, found messages without an id: no index
        leads to the rows that ended them.
        """
        maybe_expired = self._maybe_expired.intersection(names.seqs)
        if not thorough:
            return maybe_expired
        return maybe_expired | {
            candidate.number for candidate in self._candidates_for(names) if candidate.unique_key is None
        }

    def add_rows(self, rows: Sequence[FoundRow]) -> None:
        """Add the rows (MOVED, RELEASE, CANCEL) that a scan of the log found for the numbers from `missing`."""
        for row in rows:
            self._record_end(row)
            self._record_move(row)
            if row.number in self._maybe_expired:
                self._add((NameKind.SEQ, str(row.number)), row)

    def result(self, names: Names) -> LookupResult:
        """Collect the scheduled messages with one caller's names, at their newest versions."""
        candidates = self._at_newest_versions(self._candidates_for(names))
        found_numbers = {candidate.number for candidate in candidates}
        # These numbers were assigned, but are in neither log nor table. Their end is no longer known ("expired").
        maybe_expired = self._maybe_expired.intersection(names.seqs) - found_numbers
        expired_numbers = {str(seq): seq for seq in maybe_expired if seq < self._reader.first_seq}
        # Without a topic, copies that return to a consumer are hidden: they carry the id of a delivered message. A
        # request for their number finds them.
        requested_numbers = {str(seq) for seq in names.seqs} if names.topic is None else set()
        topics = {candidate.topic for candidate in candidates}
        if names.may is not None:
            topics = {topic for topic in topics if names.may(topic)}
        shown_topics = {
            topic
            for topic in topics
            if (not is_on_its_way_back(topic) if names.topic is None else topic == names.topic)
        }
        candidates = [
            candidate
            for candidate in candidates
            if candidate.topic in shown_topics
            or (candidate.topic in topics and candidate.subject in requested_numbers)
        ]
        # Only the ends of this caller's messages: the search may have found a million for other callers.
        numbers = {candidate.number for candidate in candidates}.union(names.seqs)
        settled = {number: self._settled[number] for number in numbers if number in self._settled}
        rows = None
        if self._rows_by_id is not None:
            rows = [row for name in names.ids for row in self._rows_by_id.get(name, ())]
        return LookupResult(candidates, settled, expired_numbers, rows)

    def _candidates_for(self, names: Names) -> list[Candidate]:
        """List the candidates for a caller's names. A message that several names find is listed once for each name."""
        requested: list[Name] = [
            *((NameKind.ID, name) for name in names.ids),
            *((NameKind.KEY, name) for name in names.keys),
            *((NameKind.SEQ, str(seq)) for seq in names.seqs),
        ]
        unique = {
            (candidate.subject, candidate.number): candidate
            for name in requested
            for candidate in self._candidates.get(name, {}).values()
        }
        return list(unique.values())

    def _at_newest_versions(self, candidates: list[Candidate]) -> list[Candidate]:
        """Replace candidates that were moved by their newest versions, in place. Returns the same list.

        A file may contain an older version.
        """
        for begin in range(0, len(candidates), VALUES_ROWS):
            part = candidates[begin : begin + VALUES_ROWS]
            old_due_ms, _ = due_version_columns(part)
            numbers = np.array([candidate.number for candidate in part], np.int64)
            due_ms, versions = self._moved.newest_of(old_due_ms, numbers)
            for index in np.flatnonzero(versions != numbers).tolist():
                candidate, version = part[index], int(versions[index])
                if version > candidate.seq:
                    # Moved since the search: the MOVED row can be read, unless retention has removed it.
                    at_seq = version if version >= self._reader.first_seq else None
                    candidates[begin + index] = msgspec.structs.replace(
                        candidate,
                        due_ms=int(due_ms[index]),
                        seq=version,
                        in_table=False,
                        at_seq=at_seq,
                        row=None,
                    )
        return candidates

    # -- by number ---------------------------------------------------------------------------------------------

    def _numbers_by_version(self) -> dict[int, int]:
        """Map the newest version of each requested number to the number."""
        number_by_version = {}
        for number in self._seqs:
            moved_to = self._moved.newest(number)
            number_by_version[number if moved_to is None else moved_to[1]] = number
        return number_by_version

    def _add_from_log(self, number_by_version: Mapping[int, int]) -> set[int]:
        """Add the messages whose newest versions are rows of the log. Returns the versions that have a row there."""
        first_seq, next_seq = self._reader.first_seq, self._reader.next_seq
        versions = sorted(version for version in number_by_version if first_seq <= version < next_seq)
        in_log = set[int]()
        for begin in range(0, len(versions), VALUES_ROWS):
            part = versions[begin : begin + VALUES_ROWS]
            values = self._reader.read_values(part)
            if values is not None:
                in_log |= self._add_versions(map(_LOOKUP_VALUES, values), number_by_version, values)
                continue
            # Large frames are read as columns, without the bodies.
            try:
                batches = [self._reader.read_rows(np.array(part), COLUMNS[1:])]
            except OutOfRange:  # some numbers have no row: they are reserved for a bulk attach
                batches = [
                    rows.select(COLUMNS)
                    for version in part
                    for rows in self._reader.rows(version, version + 1)
                ]
            for batch in batches:
                columns = (column.to_pylist() for column in batch.columns)
                in_log |= self._add_versions(zip(*columns, strict=True), number_by_version)
        return in_log

    def _add_versions(
        self,
        rows: Iterable[tuple[Any, ...]],
        number_by_version: Mapping[int, int],
        log_rows: Iterable[ReadRow | None] = repeat(None),
    ) -> set[int]:
        """Add the messages whose versions these rows are. Returns the `seq` of each row, except of half messages.

        `rows` and `log_rows`: as for `found_rows`.
        """
        rows = list(rows)
        for row in found_rows(rows, log_rows):
            if (
                row.kind in KINDS
                and row.at_seq is not None
                and row.number == number_by_version.get(row.at_seq)
            ):
                self._add((NameKind.SEQ, str(row.number)), row)
        # A half message (SCHEDULED without a due time) is left out: later rows decide whether it became a scheduled
        # message.
        seq, kind, due_ms = map(COLUMNS.index, ("seq", "kind", "due_ms"))
        return {values[seq] for values in rows if values[kind] != SCHEDULED or values[due_ms] is not None}

    # -- rows ----------------------------------------------------------------------------------------------------

    def _add(self, name: Name, row: FoundRow) -> None:
        """Add a message under a name. The row with the newest version wins.

        Rows with the same version are combined. Of two rows of the log, the last one wins.
        """
        by_number, (_, subject) = self._candidates[name], name
        before = by_number.get(row.number)
        if before is None or before.seq < row.version:
            # A message of a delay level is stored under the level's topic, and its properties contain its own topic.
            topic = decode_properties(row.properties or "")[REAL_TOPIC] if row.is_level else row.topic
            by_number[row.number] = Candidate(
                subject, row.number, row.version, row.due_ms, topic, row.unique_key, row.keys,
                row.accepted_ms or 0, row.is_level, row.in_table, row.at_seq, row.row,
            )  # fmt: skip
        elif before.seq == row.version:
            by_number[row.number] = msgspec.structs.replace(
                before,
                in_table=before.in_table or row.in_table,
                at_seq=before.at_seq if row.at_seq is None else row.at_seq,
                row=before.row if row.at_seq is None else row.row,
            )

    def _record_end(self, row: FoundRow) -> None:
        """Store the end of a message, if this is a RELEASE or CANCEL row."""
        if row.kind in SETTLING:
            verdict = RELEASED if row.kind == Kind.RELEASE else CANCELLED
            # A drain also ends messages with CANCEL rows. The properties of these rows name the receiving group.
            if verdict == CANCELLED and has_drain_mark(row.properties):
                verdict = HANDED
            self._settled[row.number] = End(verdict, row.store_ms)

    def _record_move(self, row: FoundRow) -> None:
        """Add a MOVED row as a version of a message that was requested and found by its number."""
        if row.kind == Kind.MOVED:
            name = NameKind.SEQ, str(row.number)
            if row.number in self._candidates.get(name, ()):
                self._add(name, row)

    def _matching_names(self, row: FoundRow) -> list[Name]:
        """List the requested ids and keys that a row carries."""
        names = [self._ids[row.unique_key]] if row.unique_key in self._ids else []
        if row.keys in self._keys:  # the column has one key alone; several are separated by blanks
            names.append(self._keys[row.keys])
        elif row.keys is not None and self._keys:
            names += [self._keys[key] for key in self._keys.keys() & row.keys.split(" ")]
        return names


def read_scheduled_rows(
    reader: LogReader, file_keys: TableKeys, live_files: FileSet, candidates: Sequence[Candidate]
) -> pa.RecordBatch:
    """Read the complete rows of these scheduled messages from log and table, in READ_SCHEMA (file thread).

    The rows are in no particular order. Messages that are in neither log nor table are left out. A message of a delay
    level has the topic under which it is stored (SCHEDULE_TOPIC).
    """
    row_seqs = np.array(
        [-1 if candidate.at_seq is None else candidate.at_seq for candidate in candidates], dtype=np.int64
    )
    # Retention may have removed rows since the lookup. Their messages are in files then.
    is_in_log = row_seqs >= reader.first_seq
    # Two names may lead to the same row, which is read once.
    batches = [as_scheduled(reader.read_rows(np.unique(row_seqs[is_in_log])))]
    in_table = [
        candidate for candidate, has_row in zip(candidates, is_in_log.tolist(), strict=True) if not has_row
    ]
    if in_table:
        batches += [
            scheduled_from_table(rows)
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


P = ParamSpec("P")
R = TypeVar("R")


class Question(NamedTuple):
    """The names of one caller. `thorough`: as for `LookUps.look_up`."""

    names: Names
    thorough: bool


class SearchOutcome(NamedTuple):
    """The outcome of a search for one caller: the result, or the numbers for which the log must still be scanned."""

    search: Search | None  # continues after the scan. None if the result is complete
    missing: set[int]
    result: LookupResult  # empty if numbers are missing


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
        file_thread: Executor,
        selections: Selections,
        confirm_lead: ConfirmLead,
    ) -> None:
        # Public for cancel.py: an operation passes the gate, and flushes the writer before it repeats a lookup.
        self.gate, self.writer, self.outcomes = gate, writer, outcomes
        self.confirm_lead = confirm_lead
        self._reader, self._key_index, self._hour_log = reader, key_index, hour_log
        self._file_keys = file_keys
        self._lookup_thread, self._file_thread, self._selections = lookup_thread, file_thread, selections
        self._batcher: AsyncBatcher[Question, SearchOutcome] = AsyncBatcher(
            self._search_together, limits.CANCELS_PER_REQUEST_MAX
        )

    async def look_up(self, names: Names, *, thorough: bool = False) -> LookupResult:
        """Search log and table for the scheduled messages with these names, and for the rows that ended them.

        `thorough`: also find the end of messages without an id, which needs a scan of the log. Raises Corrupt or
        NotFound if a file that may contain one of the messages cannot be read, and the error of `confirm_lead`.
        """
        search, missing, result = await self._batcher.put(
            Question(names, thorough), rows=len(names.ids) + len(names.keys) + len(names.seqs)
        )
        if search is None:
            return result
        rows = await asyncio.to_thread(scan, self._reader, missing)
        # In the lookup thread again, because other callers may have the same search.
        return await in_thread(self._lookup_thread, _result_with, search, names, rows)

    async def look_up_present(self, names: Names) -> LookupResult:
        """Search as `look_up`, and also find pending messages that selections moved to a topic that `names` allows."""
        lookup = await self.look_up(names)
        is_limited = names.topic is not None or names.may is not None
        if not is_limited or not any(map(names.allows, self._selections.selected.moves_to)):
            return lookup
        others = (await self.look_up(replace(names, topic=None, may=None))).candidates
        changes = await self.select(others)
        async for part in in_slices(others):
            lookup.candidates += [
                candidate
                for candidate in part
                if (change := changes.get(candidate.number)) is not None
                and names.allows(change.topic)
                and not names.allows(candidate.topic)
            ]
        return lookup

    async def select(self, candidates: Sequence[Candidate]) -> dict[int, Change]:
        """Find the states of the messages that are pending and that selections have changed, by number.

        A caller that decides by the result passes the gate first, so that no selection changes before its decision.
        """
        selected, changes = self._selections.selected, dict[int, Change]()
        if selected.is_empty:
            return changes
        for begin in range(0, len(candidates), SELECT_ROWS):
            part = candidates[begin : begin + SELECT_ROWS]
            # A switch to another thread and back costs more than a few messages.
            if selected.reads_rows or len(part) > SLICE_ROWS:
                changed = await in_thread(self._file_thread, self._find_changed, selected, part)
            else:
                changed = self._find_changed(selected, part)
            async for rows in in_slices(changed):
                # A message whose release has begun is not pending.
                pending = self.outcomes.are_pending(
                    *due_version_columns([candidate for candidate, _ in rows])
                )
                changes.update(
                    (candidate.number, change)
                    for (candidate, change), is_pending in zip(rows, pending.tolist(), strict=True)
                    if is_pending
                )
        return changes

    def may_be_selected(self, candidates: Sequence[Candidate]) -> bool:
        """Check whether a selection may have changed one of these messages. Cheap: no row is read."""
        selected = self._selections.selected
        return not selected.is_empty and bool(selected.may_change(*due_version_columns(candidates)).any())

    def _find_changed(
        self, selected: Selected, candidates: Sequence[Candidate]
    ) -> list[tuple[Candidate, Change]]:
        """Find the messages that selections have changed, and their states (file thread, if a condition reads rows)."""
        may_change = selected.may_change(*due_version_columns(candidates))
        covered = [candidates[index] for index in np.flatnonzero(may_change).tolist()]
        rows: pa.RecordBatch | None = None
        if covered and selected.reads_rows:
            covered, rows = self._read_conditions(covered)
        if not covered:
            return []
        due_ms, version = due_version_columns(covered)
        number = np.array([candidate.number for candidate in covered], np.int64)
        topic = pa.array([candidate.topic for candidate in covered], pa.string())
        states = selected.states(Described(due_ms, version, number, topic, rows))

        def selection(index: int) -> Owner | None:
            return None if index < 0 else Owner(selected.names[index], selected.facts[index])

        changed_indexes = np.flatnonzero(states.is_changed | (states.due_ms != due_ms))
        columns = (
            column[changed_indexes].tolist()
            for column in (states.owner, states.holder, states.mover, states.due_ms)
        )
        return [
            (
                covered[index],
                Change(
                    selection(owner), selection(holder), changed_due_ms,
                    covered[index].topic if mover < 0 else selected.facts[mover].to_topic,
                ),
            )
            for index, owner, holder, mover, changed_due_ms in zip(changed_indexes.tolist(), *columns, strict=True)
        ]  # fmt: skip

    def count_cancelled_by_name(self, owners: Iterable[Owner]) -> None:
        """Count messages that selections had cancelled, and that got CANCEL rows now. `owners`: their selections."""
        for owner in owners:
            self._selections.ended(owner.name, 1)

    def _read_conditions(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], pa.RecordBatch]:
        """Read `seq` (the version) and CONDITION_COLUMNS of these messages (file thread).

        Returns the messages whose rows exist, in their order, and a row for each. Rows of settled messages may be
        missing.
        """
        columns = ["seq", *CONDITION_COLUMNS]
        # Retention may have removed rows since the look-up. Their messages are in files then.
        first_seq = self._reader.first_seq
        in_log = [each for each in candidates if each.at_seq is not None and each.at_seq >= first_seq]
        in_table = [each for each in candidates if each.at_seq is None or each.at_seq < first_seq]
        version_by_seq = {each.at_seq: each.seq for each in in_log}
        log_rows = self._reader.read_rows(np.array(list(version_by_seq), np.int64), CONDITION_COLUMNS)
        # `seq` of a row of the log is not the version if the row repeats a message that retention had removed.
        versions = pa.array([version_by_seq[seq] for seq in log_rows.column("seq").to_pylist()], pa.int64())
        tables = [pa.table([versions, *log_rows.columns[1:]], names=columns)]
        if in_table:
            # The list of files is taken in this thread, the one that deletes files.
            live_files = self._hour_log.pending.live
            tables += self._file_keys.rows_of(live_files, *due_version_columns(in_table), columns)
        rows = pa.concat_tables(table.select(columns) for table in tables).combine_chunks()
        index_of = {seq: index for index, seq in enumerate(rows.column("seq").to_pylist())}
        present = [candidate for candidate in candidates if candidate.seq in index_of]
        rows = rows.take(pa.array([index_of[candidate.seq] for candidate in present], pa.int64()))
        return present, pa.record_batch([column.combine_chunks() for column in rows.columns], names=columns)

    async def work_through(
        self, lookup: LookupResult, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function that walks through a look-up's result: in the lookup thread if there are many candidates.

        The function must not use objects of the event loop.
        """
        if len(lookup.candidates) <= SLICE_ROWS:  # a switch to another thread and back costs more
            return call(*args, **kwargs)
        return await in_thread(self._lookup_thread, call, *args, **kwargs)

    async def _search_together(self, questions: Sequence[Question]) -> list[SearchOutcome | TimeballError]:
        """Run one search for several callers. Returns an outcome or an error for each caller, in their order."""
        try:
            return [*await self._search(questions)]
        except (Corrupt, NotFound) as error:
            if len(questions) == 1:
                return [error]
            # One caller needs a file that cannot be read. The others must not fail, so each caller gets its own search.
            return [outcome for question in questions for outcome in await self._search_together([question])]

    async def _search(self, questions: Sequence[Question]) -> list[SearchOutcome]:
        """Search log and files. Repeat the search if retention removed segments or files meanwhile.

        Raises Corrupt or NotFound if a file cannot be read.
        """
        while True:
            first_seq, live_files = self._reader.first_seq, self._hour_log.pending.live
            try:
                # One call for all, because a switch to another thread and back costs as much as the search.
                outcomes = await in_thread(
                    self._lookup_thread, _search_for, self._reader, self._key_index, self._file_keys, live_files,
                    self.outcomes.moved, questions,
                )  # fmt: skip
            except NotFound:
                if self._hour_log.pending.live is live_files:
                    raise  # a file of the table is missing
            except OutOfRange:
                if self._reader.first_seq == first_seq:
                    raise
            else:
                if self._reader.first_seq == first_seq:
                    # Later parts of an answer come from memory that only this leader's commits can have changed, so
                    # they are as new as this search.
                    await self.confirm_lead()
                    return outcomes


def _search_for(
    reader: LogReader,
    key_index: KeyIndex,
    file_keys: TableKeys,
    live_files: FileSet,
    moved: Moved,
    questions: Sequence[Question],
) -> list[SearchOutcome]:
    """Search log and files, and collect the outcome for each caller, in their order (lookup thread)."""
    # Created here, so that its objects are freed here: a million of them would hold the event loop for a while.
    search = Search(
        reader, key_index, file_keys, live_files, moved, [question.names for question in questions]
    )
    search.search()
    outcomes = []
    for names, thorough in questions:
        missing = search.missing(names, thorough=thorough)
        if missing:
            outcomes.append(SearchOutcome(search, missing, LookupResult()))
        else:
            outcomes.append(SearchOutcome(None, missing, search.result(names)))
    return outcomes


def _result_with(search: Search, names: Names, rows: Sequence[FoundRow]) -> LookupResult:
    """Add the rows of a scan, and collect the result (lookup thread)."""
    search.add_rows(rows)
    return search.result(names)
