"""Pages of the pending messages by due time, and the walk through the table that reads them.

Messages with the same due time are sorted by version, the order in which they got this due time. A page shows the state
at one moment. A message that is rescheduled between two pages may be in both or in neither. Any other message is in
exactly one page. Pages are cut in the order of the schedule. If selections have changed due times, the new ones are
shown, and the messages within a page are sorted by them. The work for a page is bounded. So a page may have fewer
messages than requested, or none, although there is a next page.

A page merges two sources: the sorted messages of the log (`LogTail` of snapshot.py) and those of the table
(`TableWalk`, which the drain of a group uses, too).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.pending.snapshot import (
    Codes,
    DescribedPart,
    Logged,
    LogTail,
    Snapshot,
    Snapshots,
    TopicCodes,
    described_in_group,
    described_in_log,
    is_shown,
    view_of,
)
from timeball.broker.policy import Policy
from timeball.broker.registry.campaigns import Campaigns
from timeball.broker.registry.selections import FIRST_MS, LAST_MS, Selected, Selections
from timeball.broker.revoking.cancel import with_changes
from timeball.broker.revoking.scheduled_lookup import (
    Candidate,
    LookupResult,
    LookUps,
    Names,
    due_version_columns,
    read_scheduled_rows,
)
from timeball.io.threads import Threads, in_slices, in_thread
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.answers import (
    FIRST_POSITION,
    LAST_POSITION,
    PagePosition,
    PageRequest,
    PendingMessage,
    PendingPage,
)
from timeball.model.errors import OutOfRange, Unavailable
from timeball.model.message import TABLE_SCHEMA, Int64Array, Kind
from timeball.schedule.backlog import Bools
from timeball.schedule.delay_levels import with_original_topics
from timeball.schedule.hour_log import scheduled_from_table
from timeball.schedule.locations import Columns, as_scheduled
from timeball.schedule.scheduler import Scheduling
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile
from timeball.table.key_index import TableKeys

LOOK_ROWS = 65_536  # scheduled messages of the log that are examined for one page
KEPT_S = 60.0  # how long the sorted scheduled messages of the log are kept after a page
_SHOWN = ["due_ms", "seq", "number", "topic", "unique_key", "keys", "tag", "body"]


class CampaignRanges(NamedTuple):
    """The ranges of numbers of all campaigns as parallel columns, sorted by `first_seq`. They do not overlap."""

    first_seq: Int64Array
    end_seq: Int64Array  # exclusive
    names: list[str]  # of the campaigns


class Listing:
    """Pages of pending messages. Belongs to the event loop. Reads of log and table run in the background thread."""

    def __init__(
        self,
        look_ups: LookUps,
        policy: Policy,
        snapshots: Snapshots,
        *,
        reader: LogReader,
        campaigns: Campaigns,
        selections: Selections,
        scheduling: Scheduling,
        file_keys: TableKeys,
        threads: Threads,
    ) -> None:
        self._look_ups, self._policy, self._snapshots = look_ups, policy, snapshots
        self._reader, self._campaigns, self._scheduling = reader, campaigns, scheduling
        self._selections = selections
        self._file_keys, self._threads = file_keys, threads
        self._codes = TopicCodes()
        self._tail = LogTail(reader, self._codes)
        self._forget_timer: asyncio.TimerHandle | None = None

    async def page(self, request: PageRequest, caller: Caller = ANONYMOUS) -> PendingPage:
        """Read a page of pending messages of topics that the caller may see.

        Raises Forbidden, NotFound, OutOfRange, and Unavailable if retention removed rows twice during the read.
        """
        if not 1 <= request.rows <= limits.LISTED_ROWS_MAX:
            raise OutOfRange(f"{request.rows} messages in a page: 1 to {limits.LISTED_ROWS_MAX}")
        self._policy.allow(caller, Verb.LOOK, topic=request.topic)
        key = request.key
        page = await (
            self._page_by_position(request, caller)
            if key is None
            else self._page_by_key(request, key, caller)
        )
        # Only for the first page: a topic without pending messages must exist. A later page may be empty.
        is_first = request.after is None
        has_messages = bool(page.messages) or page.next_page is not None or not is_first
        self._policy.check_known(request.topic, has_messages=has_messages)
        return page

    # -- by position ---------------------------------------------------------------------------------------------

    async def _page_by_position(self, request: PageRequest, caller: Caller) -> PendingPage:
        """Read a page in the order of due times. Raises Unavailable after two attempts."""
        may = partial(self._policy.allows, caller, Verb.LOOK)
        background = self._threads.background
        try:
            # A second attempt uses a new snapshot, taken after retention removed the rows.
            for _ in range(2):
                async with self._snapshots.taken() as snapshot:
                    try:
                        return await in_thread(
                            background, self._read_page, snapshot, request, may, self._campaign_ranges()
                        )
                    except OutOfRange:
                        # Retention has removed a row since the snapshot, so its message is settled or in a file.
                        continue
        finally:
            # Also after an error, because the sorted scheduled messages take memory.
            self._forget_later()
        raise Unavailable("retention removed rows twice during the read; ask again")

    def _read_page(
        self, snapshot: Snapshot, request: PageRequest, may: Callable[..., bool], ranges: CampaignRanges
    ) -> PendingPage:
        """Read a page from log and table (background thread). `may` checks whether the caller may see a topic.

        Raises OutOfRange if retention has removed a row that is needed.
        """
        selected, shown = snapshot.selected, Shown(self._codes, request.topic, may)
        low, high = _bounds(request, selected)
        held = set[int]()  # the versions of held messages, which `choose` adds
        choose = _build_choose(request, selected, shown, self._codes, held)
        # The statistics of files have the topics before the moves of selections.
        topic = None if request.topic in selected.moves_to else request.topic
        walk = TableWalk(snapshot, self._snapshots.open_file, self._codes, topic)
        page, log_upto = self._tail.after(snapshot, low, high, LOOK_ROWS)
        index, log_ms, log_topic = choose(
            page.due_ms, page.seq, page.topic,
            lambda index: described_in_log(selected, self._reader, page.part(index), self._codes.names),
        )  # fmt: skip
        in_log = page.part(index)
        in_files, files_upto = walk.after(low, high, request.rows, choose)
        upto = min(log_upto, files_upto)
        due_ms = np.concatenate((in_log.due_ms, in_files.due_ms))
        seq = np.concatenate((in_log.seq, in_files.seq))
        # Each source is complete only up to its own position. Later messages are left for the next page.
        order = np.lexsort((seq, due_ms))
        order = order[(due_ms[order] < upto[0]) | ((due_ms[order] == upto[0]) & (seq[order] < upto[1]))]
        chosen = order[: request.rows]
        if len(order) > len(chosen):
            last = chosen[-1]
            upto = int(due_ms[last]), int(seq[last]) + 1
        # Bodies and names are read only for the chosen scheduled messages.
        log_rows = chosen[chosen < len(in_log)]
        file_rows = chosen[chosen >= len(in_log)] - len(in_log)
        rows = [*self._read_log(in_log.part(log_rows))]
        if len(file_rows):
            rows.append(walk.rows_of(in_files.part(file_rows), _SHOWN))
        seqs = np.concatenate((in_log.seq[log_rows], in_files.seq[file_rows]))
        shown_ms = np.concatenate((log_ms[log_rows], in_files.shown_ms[file_rows]))
        topics = np.concatenate((log_topic[log_rows], in_files.topic[file_rows]))
        names = [self._codes.names[code] for code in topics.tolist()]
        in_schedule_ms = np.concatenate((in_log.due_ms[log_rows], in_files.due_ms[file_rows]))
        held.update(seqs[snapshot.holds.contains(in_schedule_ms, seqs)].tolist())
        shown_by_seq = dict(zip(seqs.tolist(), zip(shown_ms.tolist(), names, strict=True), strict=True))
        messages = _build_messages(rows, ranges, shown_by_seq, held)
        return PendingPage(messages, None if upto >= high else upto)

    def _read_log(self, logged: Logged) -> list[pa.Table]:
        """Read the columns `_SHOWN` of these messages of the log, in the form of the table's rows."""
        tables = []
        for is_level in (False, True):
            messages = logged.part(logged.is_level == is_level)
            if not len(messages):
                continue
            rows = self._reader.read_rows(messages.row_seq)
            rows = with_original_topics(rows) if is_level else rows
            # A MOVED row contains the message's number in `source_seq`.
            number = pc.if_else(
                pc.equal(rows.column("kind"), int(Kind.MOVED)), rows.column("source_seq"), messages.row_seq
            )
            columns = {name: rows.column(name) for name in _SHOWN if name != "number"}
            columns |= {"due_ms": pa.array(messages.due_ms), "seq": pa.array(messages.seq), "number": number}
            tables.append(pa.table(columns).select(_SHOWN))
        return tables

    def _campaign_ranges(self) -> CampaignRanges:
        """Collect the ranges of all campaigns."""
        ranges = sorted(
            (first_seq, first_seq + rows, name)
            for name, facts in self._campaigns.all().items()
            for first_seq, rows in facts.ranges
        )
        first_seqs = np.array([first_seq for first_seq, _, _ in ranges], np.int64)
        end_seqs = np.array([end_seq for _, end_seq, _ in ranges], np.int64)
        return CampaignRanges(first_seqs, end_seqs, [name for _, _, name in ranges])

    def close(self) -> None:
        """End the timer, which would keep the broker's objects in memory."""
        if self._forget_timer is not None:
            self._forget_timer.cancel()

    def _forget_later(self) -> None:
        """Free the memory of the sorted log if no other page is read for KEPT_S seconds."""
        self.close()
        loop = asyncio.get_running_loop()
        self._forget_timer = loop.call_later(
            KEPT_S, lambda: loop.run_in_executor(self._threads.background, self._tail.forget)
        )

    # -- by key --------------------------------------------------------------------------------------------------

    async def _page_by_key(self, request: PageRequest, key: str, caller: Caller) -> PendingPage:
        """Read a page of pending messages with this key, found by the key index."""
        # The lookup hides scheduled messages that the caller may not see, and copies on their way back to a group.
        names = Names(keys=[key], topic=request.topic, may=self._policy.visible(caller))
        lookup = await self._look_ups.look_up_present(names)
        low, high = _bounds(request, self._selections.selected)
        from_ms, to_ms = _window(request)
        candidates = await self._look_ups.work_through(lookup, _due_between, lookup, low, high)
        pending = list[Candidate]()
        # Checked after the lookup on the event loop, because a release that has begun may have no row in the log yet.
        async for part in in_slices(candidates):
            changes = await self._look_ups.select(part)
            are_pending = self._scheduling.outcomes.are_pending(*due_version_columns(part)).tolist()
            waiting = [
                candidate for candidate, is_pending in zip(part, are_pending, strict=True) if is_pending
            ]
            pending += [
                candidate
                for candidate in with_changes(waiting, changes)
                if from_ms <= candidate.shown_due_ms < to_ms and names.allows(candidate.shown_topic)
            ]
            if len(pending) > request.rows:
                break
        chosen = pending[: request.rows]
        messages = await in_thread(
            self._threads.files, self._read_candidates, chosen, self._campaign_ranges()
        )
        # The lookup finds all messages with the key, so there is a next page only if it has more candidates.
        is_last = len(pending) == len(chosen)
        return PendingPage(messages, None if is_last else (chosen[-1].due_ms, chosen[-1].seq + 1))

    def _read_candidates(self, chosen: list[Candidate], ranges: CampaignRanges) -> list[PendingMessage]:
        """Read the tags and bodies of messages that a look-up has found, and build the messages of a page."""
        rows = read_scheduled_rows(
            self._reader, self._file_keys, self._scheduling.hour_log.pending.live, chosen
        )
        # A message whose row has left log and table since the lookup is settled. It is left out of the page.
        by_seq = {row["seq"]: row for row in rows.select(["seq", "tag", "body"]).to_pylist()}
        # A message is held by its paused campaign, or by a selection (`change.holder`).
        held_by_campaign = self._scheduling.outcomes.holds.contains(*due_version_columns(chosen)).tolist()
        campaigns = _find_campaigns(np.array([candidate.number for candidate in chosen], np.int64), ranges)
        return [
            PendingMessage(
                candidate.number, candidate.shown_topic, candidate.shown_due_ms, candidate.unique_key, candidate.keys,
                by_seq[candidate.seq]["tag"], len(by_seq[candidate.seq]["body"] or b""), campaign,
                is_held or (candidate.change is not None and candidate.change.holder is not None),
            )
            for candidate, campaign, is_held in zip(chosen, campaigns, held_by_campaign, strict=True)
            if candidate.seq in by_seq
        ]  # fmt: skip


def _window(request: PageRequest) -> tuple[int, int]:
    """Find the due times that a page may show: [from_ms, to_ms)."""
    from_ms = FIRST_MS if request.from_ms is None else request.from_ms
    return from_ms, LAST_MS if request.to_ms is None else request.to_ms


def _bounds(request: PageRequest, selected: Selected) -> tuple[PagePosition, PagePosition]:
    """Find the positions [low, high), in the order of the schedule, between which the messages of the page may be.

    They are wider than the requested window if selections may have moved messages into it.
    """
    from_ms, to_ms = _window(request)
    low = FIRST_POSITION if request.from_ms is None else (from_ms - selected.later_ms, 0)
    low = low if request.after is None else max(low, request.after)
    return low, min((to_ms + selected.earlier_ms, 0), LAST_POSITION)


# Chooses the messages of a result among pending messages. Arguments: their due times, versions and topics, and a
# function that describes the messages at some indexes. Returns the indexes of the chosen messages, and the due times
# and topics to show.
Choose = Callable[
    [Int64Array, Int64Array, Codes, Callable[[Int64Array], Iterator[DescribedPart]]],
    tuple[Int64Array, Int64Array, Codes],
]


def _build_choose(
    request: PageRequest, selected: Selected, shown: Shown, codes: TopicCodes, held: set[int]
) -> Choose:
    """Build the function that chooses the messages of a page, in the states that selections have given them.

    It adds the versions of chosen messages that a selection holds to `held`.
    """
    from_ms, to_ms = _window(request)

    def choose(
        due_ms: Int64Array,
        seq: Int64Array,
        topic: Codes,
        describe: Callable[[Int64Array], Iterator[DescribedPart]],
    ) -> tuple[Int64Array, Int64Array, Codes]:
        """Choose the messages of the page (a `Choose`)."""
        index, due_ms, topic = shown.choose(due_ms, seq, topic, describe, is_final=not selected.moves_to)
        if selected.is_empty or not len(index):
            return index, due_ms, topic
        view = view_of(selected, describe(index), due_ms, topic, codes)
        is_chosen = ~view.is_cancelled & (view.due_ms >= from_ms) & (view.due_ms < to_ms) & shown(view.topic)
        held.update(seq[index[is_chosen & view.is_held]].tolist())
        return index[is_chosen], view.due_ms[is_chosen], view.topic[is_chosen]

    return choose


def _due_between(lookup: LookupResult, low: PagePosition, high: PagePosition) -> list[Candidate]:
    """Select the unsettled messages of a look-up in [low, high), sorted by (due_ms, seq)."""
    candidates = [
        candidate
        for candidate in lookup.candidates
        if candidate.number not in lookup.settled and low <= (candidate.due_ms, candidate.seq) < high
    ]
    # Unlike `sort`, numpy does not hold the interpreter.
    due_ms, seq = due_version_columns(candidates)
    return [candidates[index] for index in np.lexsort((seq, due_ms)).tolist()]


class Shown:
    """Maps topic codes to whether a page may show the topic. Checks each topic once."""

    def __init__(self, codes: TopicCodes, topic: str | None, may: Callable[..., bool]) -> None:
        self._codes, self._topic, self._may = codes, topic, may
        self._is_shown = np.empty(0, np.bool_)

    def __call__(self, codes: Codes) -> Bools:
        """Compute a mask of the messages whose topics a page may show, from their topic codes."""
        # A walk through the table assigns new codes as it proceeds.
        new_names = self._codes.names[len(self._is_shown) :]
        if new_names:
            shown = [is_shown(name, self._topic) and self._may(topic=name) for name in new_names]
            self._is_shown = np.concatenate((self._is_shown, np.array(shown, np.bool_)))
        return self._is_shown[codes] if len(codes) else np.empty(0, np.bool_)

    def choose(
        self,
        due_ms: Int64Array,
        seq: Int64Array,
        topic: Codes,
        describe: Callable[[Int64Array], Iterator[DescribedPart]],
        *,
        is_final: bool = True,
    ) -> tuple[Int64Array, Int64Array, Codes]:
        """Choose messages by their topics (a `Choose`).

        Without `is_final`, choose all messages, because selections may still change their topics.
        """
        index = np.flatnonzero(self(topic)) if is_final else np.arange(len(seq))
        return index, due_ms[index], topic[index]


def _build_messages(
    tables: list[pa.Table], ranges: CampaignRanges, shown: dict[int, tuple[int, str]], held: set[int]
) -> list[PendingMessage]:
    """Build the messages of a page from rows of log and table, sorted by the due times to show.

    `shown` contains the due time and the topic to show by `seq` (the version), `held` the `seq` of held messages.
    """
    rows: list[dict[str, Any]] = []
    for table in tables:
        size = pc.fill_null(pc.binary_length(table.column("body")), 0)
        rows += table.drop_columns(["body"]).append_column("size_bytes", size).to_pylist()
    for row in rows:
        row["due_ms"], row["topic"] = shown[row["seq"]]
    rows.sort(key=lambda row: (row["due_ms"], row["seq"]))
    numbers = [row["seq"] if row["number"] is None else row["number"] for row in rows]
    campaigns = _find_campaigns(np.array(numbers, np.int64), ranges)
    return [
        PendingMessage(
            number, row["topic"], row["due_ms"], row["unique_key"], row["keys"], row["tag"],
            row["size_bytes"], campaign, row["seq"] in held,
        )
        for number, row, campaign in zip(numbers, rows, campaigns, strict=True)
    ]  # fmt: skip


def _find_campaigns(numbers: Int64Array, ranges: CampaignRanges) -> list[str | None]:
    """Find the campaign of each of these messages by number. None for messages without a campaign."""
    if not len(ranges.first_seq):
        return [None] * len(numbers)
    # Only the last range that begins at or before a number can contain it.
    range_index = np.searchsorted(ranges.first_seq, numbers, side="right") - 1
    is_inside = (range_index >= 0) & (numbers < ranges.end_seq[range_index])
    return [
        ranges.names[index] if is_member else None
        for index, is_member in zip(range_index.tolist(), is_inside.tolist(), strict=True)
    ]


# ---- the messages of the table, row group by row group -------------------------------------------------------
# Files and row groups are read in the order of their first due times, so that a page reads only as many as it needs.
# Due times, numbers and topics are read of a whole row group, the other columns only of the rows that a page shows.

# Bounds for one page: about 100 ms of the background thread. A page that reaches a bound has fewer messages.
GROUPS_MAX, FILES_MAX = 64, 64


@dataclass(frozen=True, slots=True)
class Filed(Columns):
    """Scheduled messages in files, as columns, with the place where each is stored: file, row group and row."""

    due_ms: Int64Array  # in the schedule
    seq: Int64Array  # the version
    topic: Codes
    file: Int64Array  # index into Snapshot.entries
    group: Int64Array
    row: Int64Array  # within its row group
    shown_ms: Int64Array  # the due time that selections have given the message


_NONE = np.empty(0, np.int64)
NOTHING = Filed(_NONE, _NONE, np.empty(0, np.int32), _NONE, _NONE, _NONE, _NONE)


class TableWalk:
    """One walk through the files of a snapshot. Belongs to the background thread."""

    def __init__(
        self,
        snapshot: Snapshot,
        open_file: Callable[[FileEntry], DataFile],
        codes: TopicCodes,
        topic: str | None,
    ) -> None:
        """Skip row groups without messages of `topic`. None: read all topics."""
        self._snapshot, self._open_file, self._codes, self._topic = snapshot, open_file, codes, topic
        self.files: dict[int, DataFile] = {}  # the files read so far

    def after(
        self, low: PagePosition, high: PagePosition, rows: int, choose: Choose
    ) -> tuple[Filed, PagePosition]:
        """Find the pending messages in [low, high) that `choose` selects, unsorted.

        Also returns the position up to which the result is complete: after more than `rows` messages, at a bound of the
        walk, or `high`.
        """
        snapshot, parts, row_count, group_count = self._snapshot, [NOTHING], 0, 0
        # A heap of the next steps, earliest first: (first due time, file, row group). Row group -1: open the file.
        steps = [
            (max(snapshot.first_ms(entry), low[0]), file_index, -1)
            for file_index, entry in enumerate(snapshot.entries)
            if entry.max_due_ms >= low[0] and entry.min_due_ms <= high[0]
        ]
        # Files are opened in order of due time, so that a page of the next hour opens no files of later years.
        heapq.heapify(steps)
        while steps:
            first_ms, file_index, group = heapq.heappop(steps)
            is_enough = row_count > rows and _count_before(parts, first_ms) > rows
            # Never stop at the due time where the page begins, because the next page would begin at the same position.
            if first_ms > low[0] and (is_enough or group_count >= GROUPS_MAX or len(self.files) >= FILES_MAX):
                return Filed.joined(parts), (first_ms, 0)
            if group < 0:
                file = self.files[file_index] = self._open_file(snapshot.entries[file_index])
                for row_group in file.groups_between(low, high):
                    group_first_ms = max(first_ms, int(file.group_min_ms[row_group]))
                    # The file's statistics exclude most row groups of other topics without a read.
                    if self._topic is None or file.may_have_topic(row_group, self._topic):
                        heapq.heappush(steps, (group_first_ms, file_index, row_group))
                continue
            group_count += 1
            matches = self._read_group(file_index, group, low, high, choose)
            row_count += len(matches)
            parts.append(matches)
        return Filed.joined(parts), high

    def _read_group(
        self, file_index: int, group: int, low: PagePosition, high: PagePosition, choose: Choose
    ) -> Filed:
        """Find the pending messages of a row group in [low, high) that `choose` selects."""
        file = self.files[file_index]
        rows = file.read_group(group, ["due_ms", "seq", "topic"])
        due_ms, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
        is_match = self._snapshot.are_pending(due_ms, seq)
        is_match &= (due_ms > low[0]) | ((due_ms == low[0]) & (seq >= low[1]))
        is_match &= (due_ms < high[0]) | ((due_ms == high[0]) & (seq < high[1]))
        row = np.flatnonzero(is_match)
        due_ms, seq = due_ms[row], seq[row]
        topic = self._codes.encode(rows.column("topic").combine_chunks())[row]
        index, shown_ms, topic = choose(
            due_ms, seq, topic,
            lambda index: described_in_group(
                self._snapshot.selected, file, group, row[index], due_ms[index], seq[index]
            ),
        )  # fmt: skip
        count = len(index)
        return Filed(
            due_ms[index], seq[index], topic, np.full(count, file_index), np.full(count, group), row[index], shown_ms
        )  # fmt: skip

    def rows_of(self, chosen: Filed, columns: list[str]) -> pa.Table:
        """Read some columns of these messages, in their order."""
        # Sorted by file and row group, so that each row group is read once.
        order = np.lexsort((chosen.row, chosen.group, chosen.file))
        ordered, tables = chosen.part(order), []
        boundaries = np.flatnonzero(np.diff(ordered.file) | np.diff(ordered.group)) + 1
        for indexes in np.split(np.arange(len(ordered)), boundaries):
            group_messages = ordered.part(indexes)
            tables.append(
                self.files[int(group_messages.file[0])].read_group_rows(
                    int(group_messages.group[0]), group_messages.row, columns
                )
            )
        # The inverse permutation restores the order of `chosen`.
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return pa.concat_tables(tables).take(pa.array(inverse))


def is_before(messages: Logged | Filed, upto: PagePosition) -> Bools:
    """Compute a mask of the messages before a position."""
    return np.asarray((messages.due_ms < upto[0]) | ((messages.due_ms == upto[0]) & (messages.seq < upto[1])))


def _count_before(parts: list[Filed], first_ms: int) -> int:
    """Count the messages that are due before `first_ms`. Each part is of one row group, and sorted by due time."""
    return sum(int(np.searchsorted(filed.due_ms, first_ms)) for filed in parts)


# ---- complete rows of messages --------------------------------------------------------------------------------


def rows_in_log(
    reader: LogReader,
    messages: Logged,
    convert_level: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda rows: rows,
) -> pa.RecordBatch:
    """Read the complete rows (READ_SCHEMA) of at least one message in the log, messages of delay levels last.

    `convert_level` changes the rows of delay levels, which have their original topics.
    """
    batches = []
    for is_level in (False, True):
        part = messages.part(messages.is_level == is_level)
        if len(part):
            rows = reader.read_rows(part.row_seq)
            batches.append(as_scheduled(convert_level(with_original_topics(rows)) if is_level else rows))
    return pa.concat_batches(batches)


def rows_in_table(walk: TableWalk, messages: Filed) -> pa.RecordBatch:
    """Read the complete rows (READ_SCHEMA) of messages in files, in their order."""
    return scheduled_from_table(walk.rows_of(messages, TABLE_SCHEMA.names))
