"""Drain this group: hand over its pending messages to another group of the cluster until none is left.

The code calls the receiving group the *heir*.

    policy      this group accepts nothing new; its queues stay readable
    look        read a page of the pending messages that are due later than in MARGIN_MS
    hand over   append one frame: CANCEL rows that contain the messages, and the META row that names the transfer
    adopt       the heir appends the messages as its own, in one frame with the transfer's number
    confirm     append a META row; only then the next transfer begins

After the first frame the messages have ended here. After the second frame they are pending at the heir. A crash between
the two leaves a transfer that is not confirmed. It is read from the log and sent again, and the heir adopts it once. So
exactly one of the two groups releases each message. A look-up between the two frames returns `unavailable`.

Draining is a periodic duty of the leader. It continues after a change of leader, with the account that requested it.
Two kinds of messages stay: those that are due sooner than in MARGIN_MS, and retries for this group's consumers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from timeball.broker.accepting.gate import Gate
from timeball.broker.consuming.retry import SPENT
from timeball.broker.pending.listing import Shown
from timeball.broker.pending.log_tail import Logged, LogTail, TopicCodes
from timeball.broker.pending.pages import LAST, Position
from timeball.broker.pending.snapshot import Snapshot, Snapshots
from timeball.broker.pending.table_walk import Filed, TableWalk
from timeball.broker.policy import Policy
from timeball.broker.registry.drains import DrainFacts
from timeball.broker.registry.tables import Tables
from timeball.broker.revoking.drain_rows import encode_sent, handed_rows
from timeball.broker.revoking.group_questions import AdoptHere, GroupAnswer, OtherGroups
from timeball.broker.tables.table_changes import TableChanges
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.row_encoder import pairs_of
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.config import Settings
from timeball.model.errors import (
    Conflict,
    InvalidMessage,
    NotFound,
    OutOfRange,
    OverLimit,
    RequestError,
    StorageError,
    Unavailable,
    from_code,
)
from timeball.model.message import LOG_SCHEMA, TABLE_SCHEMA, Kind, decode_properties, encode_properties, int64
from timeball.model.wire import Drained
from timeball.schedule.columns import with_column
from timeball.schedule.delay_levels.levels import restored
from timeball.schedule.hour_log.pending import as_scheduled as scheduled_of_table
from timeball.schedule.locations import as_scheduled
from timeball.schedule.scheduler import Scheduling

logger = logging.getLogger(__name__)

MARGIN_MS = limits.MINUTE_MS  # messages due sooner are released here, because a transfer takes time
PAGE_ROWS = 65_536
# Limits of a transfer. As JSON it must fit into the body of an HTTP request (edges/http/requests.py).
ROWS_MAX, BYTES_MAX = 16_384, limits.BODY_BYTES_MAX
ROWS_FIRST = 64  # rows per read until the size of the messages is known
ADOPT_S = 20.0
LOOK_MS = 1_000


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of pending messages, and the position where the next page begins."""

    walk: TableWalk
    logged: Logged
    filed: Filed
    upto: Position


class Draining:
    """The periodic duty. Belongs to the event loop. Reads of log and table run in the background thread."""

    def __init__(
        self,
        policy: Policy,
        mover: TableChanges,
        snapshots: Snapshots,
        others: OtherGroups,
        account: Callable[[str], Caller],
        *,
        settings: Settings,
        clock: SchedulerClock,
        log: CommitLog,
        tables: Tables,
        scheduling: Scheduling,
        background: Executor,
        gate: Gate,
        pending_messages: Callable[[], int],
    ) -> None:
        """Create the duty. `account` finds the caller by name, for requests to the heir. It raises Unauthorized."""
        self._policy, self._mover, self._snapshots, self._others = policy, mover, snapshots, others
        self._clock, self._log, self._tables = clock, log, tables
        self._scheduling, self._background, self._gate = scheduling, background, gate
        self._pending_messages = pending_messages
        self._account, self._group = account, settings.group
        self._codes = TopicCodes()
        self._tail = LogTail(log.reader, self._codes)
        self._rows_at_once = ROWS_FIRST
        self._one = asyncio.Lock()  # held during a look, so that there is one transfer at a time
        self._is_done = False  # True if the last look found nothing to hand over
        self._problem = ""
        self._close()

    # -- verbs ---------------------------------------------------------------------------------------------------

    async def drain(self, heir: str, caller: Caller, *, dry_run: bool = False) -> Drained:
        """Start to hand over all pending messages to `heir`, and report the progress. May be repeated.

        Raises Forbidden, NotFound, InvalidMessage, Conflict, and Unavailable while the heir does not answer.
        """
        facts = self._tables.drains.out
        self._policy.allow(caller, Verb.ADMIN)
        if facts is not None and (facts.heir, facts.account) == (heir, caller.name):
            return self._told(facts)  # a repeated request: the row is in the log already
        self._check(heir)
        # Its start time identifies a drain, so a later drain to another heir needs another time.
        since_ms = facts.since_ms if facts is not None and facts.heir == heir else self._clock.now_ms()
        if facts is not None and since_ms <= facts.since_ms and facts.heir != heir:
            since_ms = facts.since_ms + 1  # the clock was set back
        # Ask before any change here: a group that accepts nothing and has no heir would be useless.
        answer = await self._others.ask(heir, AdoptHere(source=self._group, since_ms=since_ms), caller)
        _raise_refusal(answer, heir)
        now = self._tables.drains.out
        if now is not None and now.heir == heir:
            # The previous account may have been deleted.
            wanted = msgspec.structs.replace(now, account=caller.name)
        elif now is facts:
            wanted = DrainFacts(heir=heir, since_ms=since_ms, account=caller.name)
        else:  # during the question a transfer to the other heir began, or another drain
            raise Conflict(f"group {self._group} hands over to {now.heir if now else 'none'}; ask again")
        if dry_run:
            return self._told(wanted)
        self._log.writer.check_room()
        self._tables.drains.put(wanted)
        # Close before the row is durable: messages accepted between the two would also have to be handed over.
        self._close()
        await self._log.writer.flushed()
        return self._told(wanted)

    def check_numbers(self) -> None:
        """Raise Conflict if messages may have gone to the heir, where they have other numbers."""
        if (facts := self._tables.drains.out) is not None:
            raise Conflict(
                f"group {self._group} is drained to {facts.heir}, where its messages have other numbers: name them by "
                "id or key"
            )

    def _check(self, heir: str) -> None:
        if heir == self._group:
            raise InvalidMessage(f"group {heir} cannot be its own heir")
        if heir not in (names := self._others.names()):
            raise NotFound(f"no group {heir!r} in this cluster; there are {', '.join(names) or 'no others'}")
        facts = self._tables.drains.out
        if facts is not None and facts.heir != heir and facts.rows:
            raise Conflict(f"group {facts.heir} has not confirmed a transfer yet: drain to it until it has")
        # Held messages have no due time that the heir could use.
        held = [name for name, each in self._tables.campaigns.all().items() if each.held_from_ms is not None]
        if held:
            raise Conflict(f"campaign {held[0]} is held: resume or cancel it first")

    def _close(self) -> None:
        """Refuse new messages if this group is drained."""
        if (facts := self._tables.drains.out) is not None:
            self._policy.close(f"group {self._group} is drained to {facts.heir}: send to another group")
            self._is_done = False

    def _told(self, facts: DrainFacts) -> Drained:
        return Drained(
            group=self._group, heir=facts.heir, since_ms=facts.since_ms, moved=facts.moved_rows,
            moving=facts.rows, waiting=self._pending_messages(), is_done=self._is_done, problem=self._problem,
        )  # fmt: skip

    # -- the duty ------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Hand over all messages that are pending now, if this group is drained. A periodic duty of maintenance.py."""
        if self._tables.drains.out is None:
            return
        try:
            async with self._one:
                self._is_done = not await self._sweep()
            self._problem = ""
        # The heir refuses or does not answer, a disk is full, or the account was deleted. Report this, and try again at
        # the next look.
        except (RequestError, OverLimit, Unavailable) as error:
            if str(error) != self._problem:
                logger.warning("messages not handed over, trying again reason=%s", error)
            self._problem = str(error)

    async def _sweep(self) -> int:
        """Hand over the messages that are pending now. Returns their number."""
        await self._send_again()
        # Compact a long tail first: files are read row group by row group, but the tail is read whole for each page.
        while self._scheduling.compacts and self._mover.tail_count.rows > PAGE_ROWS and self._is_compactor:
            if await self._mover.compact() is None:
                break
        low, moved = (self._clock.now_ms() + MARGIN_MS, 0), 0
        while low < LAST:
            async with self._snapshots.taken() as snapshot:
                try:
                    page = await in_thread(self._background, self._page, snapshot, low)
                    for found, read in (
                        (page.logged, self._read_log),
                        (page.filed, partial(_read_table, page.walk)),
                    ):
                        moved += await self._hand_over_all(found, read)
                except OutOfRange:
                    # Retention has removed a row since: its message is settled (released or cancelled) or in a file.
                    continue
            low = page.upto
        if moved:  # if nothing moved, the next look reuses the tail that was read
            await in_thread(self._background, self._tail.forget)
        return moved

    @property
    def _is_compactor(self) -> bool:
        return self._clock.elapsed_ms() >= self._mover.outside_compactor_until_ms

    def _page(self, snapshot: Snapshot, low: Position) -> _Page:
        keep = Shown(self._codes, None, lambda topic: True)
        walk = TableWalk(snapshot, self._snapshots.open_file, self._codes, None)
        logged, logged_upto = self._tail.after(snapshot, low, LAST, PAGE_ROWS)
        filed, filed_upto = walk.after(low, LAST, PAGE_ROWS, keep)
        # The page ends at the nearer of both ends: after it, rows of the other source would overtake.
        upto = min(logged_upto, filed_upto)
        logged = logged.part(keep(logged.topic) & _is_before(logged, upto))
        return _Page(walk, logged, filed.part(_is_before(filed, upto)), upto)

    async def _hand_over_all(
        self, found: Logged | Filed, read: Callable[[Logged | Filed], pa.RecordBatch]
    ) -> int:
        at = moved = 0
        while at < len(found):
            part = found.part(slice(at, at + self._rows_at_once))
            rows = await in_thread(self._background, read, part)
            for transfer in _transfers(rows):
                moved += await self._hand_over(transfer)
            at += len(part)
            # The number of rows of this size that fit into a transfer.
            fitting = rows.num_rows * BYTES_MAX // max(1, rows.nbytes)
            self._rows_at_once = min(max(1, fitting), 4 * self._rows_at_once, ROWS_MAX)
        return moved

    def _read_log(self, found: Logged | Filed) -> pa.RecordBatch:
        assert isinstance(found, Logged)
        batches = []
        for is_level in (False, True):
            part = found.part(found.is_level == is_level)
            if len(part):
                rows = self._log.reader.read_rows(part.row_seq)
                batches.append(as_scheduled(_without_level(restored(rows)) if is_level else rows))
        return pa.concat_batches(batches)

    async def _hand_over(self, scheduled_rows: pa.RecordBatch) -> int:
        """End those messages that are still pending, in favour of the heir.

        Returns their number when the heir has them.
        """
        async with self._gate.passing():  # a resume changes due times
            self._log.writer.check_room()
            now_ms = self._clock.now_ms()
            due_ms = int64(scheduled_rows.column("due_ms"))
            scheduled_rows = scheduled_rows.filter(pa.array(due_ms >= now_ms + MARGIN_MS))
            # As for a cancel, this call decides the race with releases, cancels and moves. From here on nothing may
            # refuse or wait until the rows are appended.
            waited = self._scheduling.scheduler.cancel(*pairs_of(scheduled_rows))
            if not waited.any():
                return 0
            # Read here, because a command may have named another heir during the read.
            facts = self._tables.drains.out
            assert facts is not None and not facts.rows, "the one before is confirmed"
            rows = handed_rows(scheduled_rows.filter(pa.array(waited)), facts.heir, now_ms)
            begun = msgspec.structs.replace(
                facts, transfer=facts.transfer + 1, first_seq=self._log.writer.next_seq, rows=rows.num_rows,
                at_ms=now_ms,
            )  # fmt: skip
            change = self._tables.drains.changed(begun)
            _, durable = self._log.writer.append(pa.concat_batches([rows, change.rows]))
            change.keep()
        # Send the rows only when they are durable: the next leader of this group must find that these messages have
        # ended here.
        await durable
        await self._log.writer.synced()
        await self._send(rows)
        return len(rows)

    async def _send_again(self) -> None:
        """Send the transfer that was not confirmed, if there is one."""
        facts = self._tables.drains.out
        if facts is not None and facts.rows:
            await self._log.writer.flushed()
            rows = await in_thread(self._background, self._read_handed, facts)
            await self._send(rows)

    def _read_handed(self, facts: DrainFacts) -> pa.RecordBatch:
        found = list(self._log.reader.rows(facts.first_seq, facts.first_seq + facts.rows))
        rows = pa.concat_batches(found).select(LOG_SCHEMA.names)
        assert rows.num_rows == facts.rows and (rows.column("kind").to_numpy() == Kind.CANCEL).all()
        return rows

    async def _send(self, rows: pa.RecordBatch) -> None:
        """Send the current transfer, and record that the heir has it."""
        facts = self._tables.drains.out
        assert facts is not None and facts.rows == rows.num_rows
        question = AdoptHere(
            source=self._group, since_ms=facts.since_ms, transfer=facts.transfer, rows=encode_sent(rows)
        )
        caller = self._account(facts.account) if facts.account else ANONYMOUS
        answer = await self._others.ask(facts.heir, question, caller, ADOPT_S)
        _raise_refusal(answer, facts.heir)
        facts = self._tables.drains.out
        assert facts is not None
        # A crash before this row is durable only sends the transfer again.
        self._tables.drains.put(
            msgspec.structs.replace(
                facts, moved_rows=facts.moved_rows + facts.rows, first_seq=0, rows=0, at_ms=0
            )
        )


def _raise_refusal(answer: GroupAnswer | None, heir: str) -> None:
    if answer is None:
        raise Unavailable(f"group {heir} did not answer")
    if answer.refusal is not None:
        error = from_code(answer.refusal.code, f"group {heir}: {answer.refusal.text}")
        if isinstance(error, StorageError):  # the error concerns the heir's log, not this one
            raise Unavailable(str(error))
        raise error


def _transfers(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows in parts that fit into a transfer. A single row always fits."""
    if rows.num_rows == 1 or rows.nbytes <= BYTES_MAX:
        yield rows
        return
    half = rows.num_rows // 2  # split by rows, not by bytes: a few halvings isolate the large ones
    yield from _transfers(rows.slice(0, half))
    yield from _transfers(rows.slice(half))


def _is_before(found: Logged | Filed, upto: Position) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.asarray((found.due_ms < upto[0]) | ((found.due_ms == upto[0]) & (found.seq < upto[1])))


def _read_table(walk: TableWalk, found: Logged | Filed) -> pa.RecordBatch:
    assert isinstance(found, Filed)
    return scheduled_of_table(walk.rows_of(found, TABLE_SCHEMA.names))


def _without_level(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert messages of delay levels to messages with a due time, because the heir may have other levels."""
    said: Sequence[dict[str, str]] = [
        decode_properties(text or "") for text in rows.column("properties").to_pylist()
    ]
    kept = [{name: value for name, value in each.items() if name not in SPENT} for each in said]
    texts = [encode_properties(each) if each else None for each in kept]
    return with_column(rows, "properties", pa.array(texts, pa.string()))
