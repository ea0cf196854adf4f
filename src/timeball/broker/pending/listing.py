"""A page of the pending messages, by due time.

Messages with the same due time are in the order in which they got it. A page shows the state at one moment. A message
that is moved between two pages may be in both or in neither, and one that is not moved is in exactly one. The work for
a page is bounded. So it may have fewer messages than requested, or none, and still contain the position of the next
page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.pending.log_tail import Codes, Logged, LogTail, TopicCodes
from timeball.broker.pending.pages import Page, Waiting, Wanted
from timeball.broker.pending.snapshot import Snapshot, Snapshots, is_shown
from timeball.broker.pending.table_walk import TableWalk
from timeball.broker.policy import Policy
from timeball.broker.registry.campaigns import Campaigns
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.scheduled_lookup import Candidate, Names, pairs, read
from timeball.io.threads import Threads, in_thread
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.errors import OutOfRange, Unavailable
from timeball.model.message import Int64Array, Kind
from timeball.schedule.backlog import Bools
from timeball.schedule.delay_levels.levels import restored
from timeball.schedule.scheduler import Scheduling
from timeball.table.key_index import TableKeys

LOOK_ROWS = 65_536  # rows of the log examined for one page
KEPT_S = 60.0  # how long the sorted scheduled messages of the log are kept after a page
_SHOWN = ["due_ms", "seq", "number", "topic", "unique_key", "keys", "tag", "body"]


# For a lookup of campaigns by number: the first numbers of ranges, their ends, and the names of the campaigns.
Ranges = tuple[Int64Array, Int64Array, list[str]]


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
        scheduling: Scheduling,
        file_keys: TableKeys,
        threads: Threads,
    ) -> None:
        self._look_ups, self._policy, self._snapshots = look_ups, policy, snapshots
        self._reader, self._campaigns, self._scheduling = reader, campaigns, scheduling
        self._file_keys, self._threads = file_keys, threads
        self._codes = TopicCodes()
        self._tail = LogTail(reader, self._codes)
        self._forgetting: asyncio.TimerHandle | None = None

    async def page(self, wanted: Wanted, caller: Caller = ANONYMOUS) -> Page:
        """Return a page of pending messages of topics that the caller may see. Raise Forbidden, NotFound, OutOfRange.

        Also raise Unavailable when the rows moved twice during the read.
        """
        if not 1 <= wanted.rows <= limits.LISTED_ROWS_MAX:
            raise OutOfRange(f"{wanted.rows} messages in a page: 1 to {limits.LISTED_ROWS_MAX}")
        self._policy.allow(caller, Verb.LOOK, topic=wanted.topic)
        key = wanted.key
        found = await (
            self._by_position(wanted, caller) if key is None else self._with_key(wanted, key, caller)
        )
        # Only the first page checks whether the topic is known. A later page may be empty.
        is_first = wanted.after is None
        has_messages = bool(found.messages) or found.next_page is not None or not is_first
        self._policy.check_known(wanted.topic, has_messages=has_messages)
        return found

    # -- by position ---------------------------------------------------------------------------------------------

    async def _by_position(self, wanted: Wanted, caller: Caller) -> Page:
        may = partial(self._policy.allows, caller, Verb.LOOK)
        background = self._threads.background
        try:
            # The second attempt has a new snapshot, taken after retention has removed the rows.
            for _ in range(2):
                async with self._snapshots.taken() as snapshot:
                    try:
                        return await in_thread(background, self._page, snapshot, wanted, may, self._ranges())
                    except OutOfRange:
                        # Retention has removed a row since the snapshot: its scheduled message is settled, or in a
                        # file.
                        continue
        finally:
            # Also after an error, because the sorted scheduled messages take memory.
            self._forget_later()
        raise Unavailable("what waits has moved while it was read; ask again")

    def _page(self, snapshot: Snapshot, wanted: Wanted, may: Callable[..., bool], ranges: Ranges) -> Page:
        keep = Shown(self._codes, wanted.topic, may)
        walk = TableWalk(snapshot, self._snapshots.open_file, self._codes, wanted.topic)
        logged, logged_upto = self._tail.after(snapshot, wanted.low, wanted.high, LOOK_ROWS)
        logged = logged.part(keep(logged.topic))
        filed, filed_upto = walk.after(wanted.low, wanted.high, wanted.rows, keep)
        upto = min(logged_upto, filed_upto)
        due_ms = np.concatenate((logged.due_ms, filed.due_ms))
        seq = np.concatenate((logged.seq, filed.seq))
        # After `upto` one of the two sources may have more scheduled messages, so those of the other are left for the
        # next page.
        order = np.lexsort((seq, due_ms))
        order = order[(due_ms[order] < upto[0]) | ((due_ms[order] == upto[0]) & (seq[order] < upto[1]))]
        chosen = order[: wanted.rows]
        if len(order) > len(chosen):
            last = chosen[-1]
            upto = int(due_ms[last]), int(seq[last]) + 1
        # Bodies and names are read only for the chosen scheduled messages.
        in_log = chosen[chosen < len(logged)]
        in_table = chosen[chosen >= len(logged)] - len(logged)
        rows = [*self._read_log(logged.part(in_log))]
        if len(in_table):
            rows.append(walk.rows_of(filed.part(in_table), _SHOWN))
        messages = _messages(rows, ranges)
        return Page(messages, None if upto >= wanted.high else upto)

    def _read_log(self, logged: Logged) -> list[pa.Table]:
        """Read the columns that a page shows, in the form of the table's rows."""
        parts = []
        for is_level in (False, True):
            part = logged.part(logged.is_level == is_level)
            if not len(part):
                continue
            rows = self._reader.read_rows(part.row_seq)
            rows = restored(rows) if is_level else rows
            # A row that writes a scheduled message again contains its number.
            number = pc.if_else(
                pc.equal(rows.column("kind"), int(Kind.MOVED)), rows.column("source_seq"), part.row_seq
            )
            changed = {"due_ms": pa.array(part.due_ms), "seq": pa.array(part.seq), "number": number}
            parts.append(
                pa.table({name: changed[name] if name in changed else rows.column(name) for name in _SHOWN})
            )
        return parts

    def _ranges(self) -> Ranges:
        found = sorted(
            (first_seq, first_seq + rows, name)
            for name, facts in self._campaigns.all().items()
            for first_seq, rows in facts.ranges
        )
        first = np.array([one[0] for one in found], np.int64)
        return first, np.array([one[1] for one in found], np.int64), [one[2] for one in found]

    def _forget_later(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
        loop = asyncio.get_running_loop()
        self._forgetting = loop.call_later(
            KEPT_S, lambda: loop.run_in_executor(self._threads.background, self._tail.forget)
        )

    # -- by key --------------------------------------------------------------------------------------------------

    async def _with_key(self, wanted: Wanted, key: str, caller: Caller) -> Page:
        """Return a page of pending messages with this key, found by the key index."""
        # The lookup hides scheduled messages that the caller may not see, and copies on their way back to a group.
        names = Names(keys=[key], topic=wanted.topic, may=self._policy.visible(caller))
        found = await self._look_ups.look_up(names)
        low, high = wanted.low, wanted.high
        candidates = sorted(
            (
                c
                for c in found.candidates
                if c.number not in found.settled and low <= (c.due_ms, c.seq) < high
            ),
            key=lambda c: (c.due_ms, c.seq),
        )
        # After the lookup, on the event loop: a release on its way to the disk has no row in the log yet.
        waits = self._scheduling.outcomes.waits(*pairs(candidates)).tolist() if candidates else []
        candidates = [c for c, does in zip(candidates, waits, strict=True) if does]
        chosen = candidates[: wanted.rows]
        messages = await in_thread(self._threads.files, self._read_candidates, chosen, self._ranges())
        # The lookup is complete, so more candidates are the only reason for another page.
        is_last = len(candidates) == len(chosen)
        return Page(messages, None if is_last else (chosen[-1].due_ms, chosen[-1].seq + 1))

    def _read_candidates(self, chosen: list[Candidate], ranges: Ranges) -> list[Waiting]:
        rows = read(self._reader, self._file_keys, self._scheduling.hour_log.pending.live, chosen)
        # A scheduled message whose row has left log and table since then is settled, and left out of the page.
        by_seq = {row["seq"]: row for row in rows.select(["seq", "tag", "body"]).to_pylist()}
        names = _campaigns(np.array([c.number for c in chosen], np.int64), ranges)
        return [
            Waiting(
                c.number, c.topic, c.due_ms, c.unique_key, c.keys,
                by_seq[c.seq]["tag"], len(by_seq[c.seq]["body"] or b""), name,
            )
            for c, name in zip(chosen, names, strict=True) if c.seq in by_seq
        ]  # fmt: skip


class Shown:
    """Decides which topics a page may show, by their codes. It checks each topic once."""

    def __init__(self, codes: TopicCodes, topic: str | None, may: Callable[..., bool]) -> None:
        self._codes, self._topic, self._may = codes, topic, may
        self._known = np.empty(0, np.bool_)

    def __call__(self, codes: Codes) -> Bools:
        # A walk finds new topics as it proceeds.
        fresh = self._codes.names[len(self._known) :]
        if fresh:
            shown = [is_shown(name, self._topic) and self._may(topic=name) for name in fresh]
            self._known = np.concatenate((self._known, np.array(shown, np.bool_)))
        return self._known[codes] if len(codes) else np.empty(0, np.bool_)


def _messages(tables: list[pa.Table], ranges: Ranges) -> list[Waiting]:
    rows: list[dict[str, Any]] = []
    for table in tables:
        size = pc.fill_null(pc.binary_length(table.column("body")), 0)
        rows += table.drop_columns(["body"]).append_column("size_bytes", size).to_pylist()
    # Rows of log and table come one after the other.
    rows.sort(key=lambda row: (row["due_ms"], row["seq"]))
    numbers = [row["seq"] if row["number"] is None else row["number"] for row in rows]
    names = _campaigns(np.array(numbers, np.int64), ranges)
    return [
        Waiting(
            number, row["topic"], row["due_ms"], row["unique_key"], row["keys"], row["tag"],
            row["size_bytes"], name,
        )
        for number, row, name in zip(numbers, rows, names, strict=True)
    ]  # fmt: skip


def _campaigns(number: Int64Array, ranges: Ranges) -> list[str | None]:
    """Return the campaign of each of these numbers, with None for messages of no campaign."""
    first, end, names = ranges
    if not len(first):
        return [None] * len(number)
    # The ranges are disjoint and sorted, so only the last one that begins at or before the number can contain it.
    at = np.searchsorted(first, number, side="right") - 1
    is_in = (at >= 0) & (number < end[at])
    return [names[one] if inside else None for one, inside in zip(at.tolist(), is_in.tolist(), strict=True)]
