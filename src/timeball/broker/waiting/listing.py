"""A page of the messages that wait, by the instant at which they are due.

Messages of one instant stand in the order in which they got it. A page is one look at what waits at that moment: one
that is moved between two pages may be in both or in neither, and each that stays is in one. The work of a page is
bounded, so it may have fewer messages than asked for, or none, and still say where the next one begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.access import ANONYMOUS, Caller, Verb
from timeball.broker.components import in_thread
from timeball.broker.policy import Policy
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.promise_lookup import Candidate, Names, pairs, read
from timeball.broker.waiting.log_tail import Codes, Logged, LogTail, TopicCodes
from timeball.broker.waiting.pages import Page, Waiting, Wanted
from timeball.broker.waiting.snapshot import Snapshot, is_shown, opened, taken
from timeball.broker.waiting.table_walk import TableWalk
from timeball.errors import OutOfRange, Unavailable
from timeball.message import Int64Array, Kind
from timeball.schedule.backlog import Bools
from timeball.schedule.delay_levels.levels import restored

LOOK_ROWS = 65_536  # of the log that one page looks at
KEPT_S = 60.0  # the sorted promises of the log are kept, behind the last page
_SHOWN = ["due_ms", "seq", "number", "topic", "unique_key", "keys", "tag", "body"]


# Looked up by number: those of campaigns, by their first number, their end and their name.
Ranges = tuple[Int64Array, Int64Array, list[str]]


class Listing:
    """Pages of what waits. Belongs to the event loop; what reads log and table, to the background thread."""

    def __init__(self, look_ups: LookUps, policy: Policy, attaching: asyncio.Lock) -> None:
        self._look_ups, self._parts = look_ups, (parts := look_ups.parts)
        self._policy, self._attaching = policy, attaching
        self._codes = TopicCodes()
        self._tail = LogTail(parts.reader, self._codes)
        self._forgetting: asyncio.TimerHandle | None = None

    async def page(self, wanted: Wanted, caller: Caller = ANONYMOUS) -> Page:
        """Return a page of what waits, of topics that the caller may look at; raise Forbidden, NotFound, OutOfRange."""
        if not 1 <= wanted.rows <= limits.LISTED_ROWS_MAX:
            raise OutOfRange(f"{wanted.rows} messages in a page: 1 to {limits.LISTED_ROWS_MAX}")
        self._policy.allow(caller, Verb.LOOK, topic=wanted.topic)
        key = wanted.key
        found = await (
            self._by_position(wanted, caller) if key is None else self._with_key(wanted, key, caller)
        )
        is_first = wanted.after is None
        has_messages = bool(found.messages) or found.next_page is not None or not is_first
        self._policy.check_known(wanted.topic, has_messages=has_messages)
        return found

    # -- by position ---------------------------------------------------------------------------------------------

    async def _by_position(self, wanted: Wanted, caller: Caller) -> Page:
        may = partial(self._policy.allows, caller, Verb.LOOK)
        background = self._parts.background
        try:
            for _ in range(2):
                async with taken(self._parts, self._attaching) as snapshot:
                    try:
                        return await in_thread(background, self._page, snapshot, wanted, may, self._ranges())
                    except OutOfRange:
                        # Retention has removed a row since the snapshot: its promise is settled, or in a file.
                        continue
        finally:
            self._forget_later()
        raise Unavailable("what waits has moved while it was read; ask again")

    def _page(self, snapshot: Snapshot, wanted: Wanted, may: Callable[..., bool], ranges: Ranges) -> Page:
        keep = Shown(self._codes, wanted.topic, may)
        walk = TableWalk(snapshot, partial(opened, self._parts), self._codes, wanted.topic)
        logged, logged_upto = self._tail.after(snapshot, wanted.low, wanted.high, LOOK_ROWS)
        logged = logged.part(keep(logged.topic))
        filed, filed_upto = walk.after(wanted.low, wanted.high, wanted.rows, keep)
        upto = min(logged_upto, filed_upto)
        due_ms = np.concatenate((logged.due_ms, filed.due_ms))
        seq = np.concatenate((logged.seq, filed.seq))
        # Behind `upto` one of the two may have more: what the other has there waits for the next page.
        order = np.lexsort((seq, due_ms))
        order = order[(due_ms[order] < upto[0]) | ((due_ms[order] == upto[0]) & (seq[order] < upto[1]))]
        chosen = order[: wanted.rows]
        if len(order) > len(chosen):
            last = chosen[-1]
            upto = int(due_ms[last]), int(seq[last]) + 1
        # Bodies and names of these alone are read.
        in_log = chosen[chosen < len(logged)]
        in_table = chosen[chosen >= len(logged)] - len(logged)
        rows = [*self._read_log(logged.part(in_log))]
        if len(in_table):
            rows.append(walk.rows_of(filed.part(in_table), _SHOWN))
        messages = _messages(rows, ranges)
        return Page(messages, None if upto >= wanted.high else upto)

    def _read_log(self, logged: Logged) -> list[pa.Table]:
        """Return the columns of these promises that a page shows, as of rows of the table."""
        parts = []
        for is_level in (False, True):
            part = logged.part(logged.is_level == is_level)
            if not len(part):
                continue
            rows = self._parts.reader.read_rows(part.row_seq)
            rows = restored(rows) if is_level else rows
            # A row that holds a promise anew names its number.
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
            for name, facts in self._parts.campaigns.all().items()
            for first_seq, rows in facts.ranges
        )
        first = np.array([one[0] for one in found], np.int64)
        return first, np.array([one[1] for one in found], np.int64), [one[2] for one in found]

    def _forget_later(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
        loop = asyncio.get_running_loop()
        self._forgetting = loop.call_later(
            KEPT_S, lambda: loop.run_in_executor(self._parts.background, self._tail.forget)
        )

    # -- by key --------------------------------------------------------------------------------------------------

    async def _with_key(self, wanted: Wanted, key: str, caller: Caller) -> Page:
        """Return a page of what waits and carries this key: the key index knows where it is."""
        parts = self._parts
        # The lookup hides what the caller may not see, and copies on their way back.
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
        # Asked behind the lookup, on the loop: a release on its way to the disk is in no row yet.
        waits = parts.outcomes.waits(*pairs(candidates)).tolist() if candidates else []
        candidates = [c for c, does in zip(candidates, waits, strict=True) if does]
        chosen = candidates[: wanted.rows]
        messages = await in_thread(parts.file_thread, self._read_candidates, chosen, self._ranges())
        is_last = len(candidates) == len(chosen)
        return Page(messages, None if is_last else (chosen[-1].due_ms, chosen[-1].seq + 1))

    def _read_candidates(self, chosen: list[Candidate], ranges: Ranges) -> list[Waiting]:
        parts = self._parts
        rows = read(parts.reader, parts.file_keys, parts.hour_log.pending.live, chosen)
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
    """Says which topics a page may show, by their codes; each is asked for once."""

    def __init__(self, codes: TopicCodes, topic: str | None, may: Callable[..., bool]) -> None:
        self._codes, self._topic, self._may = codes, topic, may
        self._known = np.empty(0, np.bool_)

    def __call__(self, codes: Codes) -> Bools:
        # A walk meets new topics as it goes.
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
    """Return the campaign of each of these numbers, None for a message that is of none."""
    first, end, names = ranges
    if not len(first):
        return [None] * len(number)
    at = np.searchsorted(first, number, side="right") - 1
    is_in = (at >= 0) & (number < end[at])
    return [names[one] if inside else None for one, inside in zip(at.tolist(), is_in.tolist(), strict=True)]
