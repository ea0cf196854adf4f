"""Drain a group: hand over its pending messages to another group of the cluster, the *heir*, until none is left.

`Draining` is the side of the group that is drained, `DrainReceiver` is the side of the heir:

    close       the drained group accepts no new messages. Its queues stay readable
    read        it reads a page of its pending messages that are due later than MARGIN_MS from now
    hand over   it appends one frame: CANCEL rows that contain the messages, and a META row with the transfer's number
    adopt       the heir appends the messages as its own, in one frame with the transfer's number
    confirm     the drained group appends a META row. Only then the next transfer begins

After the frame of "hand over" the messages have ended in the drained group. After the frame of "adopt" they are pending
at the heir. A crash between the two leaves an unconfirmed transfer. It is read from the log and sent again, and the
heir adopts it once. So exactly one of the two groups releases each message. A lookup between the two frames returns
`unavailable`.

Draining is a periodic task of the leader. It continues after a change of leader, with the account that requested it.
Two kinds of messages stay: those that are due within MARGIN_MS, and retries for the drained group's consumers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import msgspec
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.waiters import Gate
from timeball.broker.consuming.retry import SPENT
from timeball.broker.pending.listing import Filed, Shown, TableWalk, is_before, rows_in_log, rows_in_table
from timeball.broker.pending.snapshot import Logged, LogTail, Snapshot, Snapshots, TopicCodes
from timeball.broker.policy import Policy
from timeball.broker.registry.tables import AdoptedFacts, DrainFacts, Drains, Tables
from timeball.broker.revoking.drain_rows import build_adopted_rows, build_drain_rows, decode_sent, encode_sent
from timeball.broker.revoking.group_questions import AdoptHere, GroupAnswer, OtherGroups
from timeball.broker.tables.table_changes import TableChanges
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.row_encoder import pairs_of
from timeball.log.writer import CommitLog, LogWriter
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.answers import LAST_POSITION, Drained, PagePosition
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
from timeball.model.message import LOG_SCHEMA, Kind, decode_properties, encode_properties, int64
from timeball.schedule.locations import with_column
from timeball.schedule.scheduler import Scheduling

logger = logging.getLogger(__name__)

MARGIN_MS = limits.MINUTE_MS  # messages due within this time are released here, because a transfer takes time
PAGE_ROWS = 65_536
# Limits of a transfer. As JSON it must fit into the body of an HTTP request (edges/http/requests.py).
ROWS_MAX, BYTES_MAX = 16_384, limits.BODY_BYTES_MAX
ROWS_FIRST = 64  # rows per read until the size of the messages is known
ADOPT_S = 20.0
HAND_OVER_EVERY_MS = 1_000


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of pending messages, from log and files."""

    walk: TableWalk  # reads the messages of `filed`
    logged: Logged
    filed: Filed
    upto: PagePosition  # where the next page begins


class Draining:
    """The drain of this group. Belongs to the event loop. Reads of log and table run in the background thread."""

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
        """Create the drain.

        `account` maps an account's name to a caller, for requests to the heir. It raises Unauthorized.
        """
        self._policy, self._mover, self._snapshots, self._others = policy, mover, snapshots, others
        self._clock, self._log, self._tables = clock, log, tables
        self._scheduling, self._background, self._gate = scheduling, background, gate
        self._pending_messages = pending_messages
        self._account, self._group = account, settings.group
        self._codes = TopicCodes()
        self._tail = LogTail(log.reader, self._codes)
        self._rows_at_once = ROWS_FIRST  # rows of the next read, adapted to the size of the messages
        self._hand_over_lock = asyncio.Lock()  # one transfer at a time
        self._is_done = False  # True if the last call of `hand_over` found no messages
        self._problem = ""
        self._close_if_drained()

    # -- operations ----------------------------------------------------------------------------------------------

    async def drain(self, heir: str, caller: Caller, *, dry_run: bool = False) -> Drained:
        """Start to hand over all pending messages to `heir`, and report the progress. May be repeated.

        `dry_run`: only check whether it would start. Raises Forbidden, NotFound, InvalidMessage, Conflict, and
        Unavailable while the heir does not answer.
        """
        facts = self._tables.drains.out
        self._policy.allow(caller, Verb.ADMIN)
        if facts is not None and (facts.heir, facts.account) == (heir, caller.name):
            return self._report_progress(facts)  # a repeated request: the META row is in the log already
        self._check_heir(heir)
        # The start time identifies a drain, so a drain to another heir needs a later time, even after the clock was set
        # back.
        since_ms = self._clock.now_ms()
        if facts is not None:
            since_ms = facts.since_ms if facts.heir == heir else max(since_ms, facts.since_ms + 1)
        # Ask the heir before any change here: a group that is closed but cannot hand over messages would be useless.
        answer = await self._others.ask(heir, AdoptHere(source=self._group, since_ms=since_ms), caller)
        _raise_refusal(answer, heir)
        current_facts = self._tables.drains.out  # read again, because it may have changed meanwhile
        if current_facts is not None and current_facts.heir == heir:
            # Only the account changes. The previous one may have been deleted.
            new_facts = msgspec.structs.replace(current_facts, account=caller.name)
        elif current_facts is facts:
            new_facts = DrainFacts(heir=heir, since_ms=since_ms, account=caller.name)
        else:  # meanwhile a transfer or another drain began
            raise Conflict(
                f"group {self._group} hands over to {current_facts.heir if current_facts else 'none'}; ask again"
            )
        if dry_run:
            return self._report_progress(new_facts)
        self._log.writer.check_admission()
        self._tables.drains.put(new_facts)
        # Close at once, not when the row is durable: messages accepted meanwhile would also have to be handed over.
        self._close_if_drained()
        await self._log.writer.flushed()
        return self._report_progress(new_facts)

    def check_numbers(self) -> None:
        """Raise Conflict if this group is drained, because messages have other numbers at the heir."""
        if (facts := self._tables.drains.out) is not None:
            raise Conflict(
                f"group {self._group} is drained to {facts.heir}, where its messages have other numbers: name them by "
                "id or key"
            )

    def _check_heir(self, heir: str) -> None:
        """Raise InvalidMessage, NotFound or Conflict if this group cannot be drained to `heir` now."""
        if heir == self._group:
            raise InvalidMessage(f"group {heir} cannot be its own heir")
        if heir not in (names := self._others.names()):
            raise NotFound(f"no group {heir!r} in this cluster; there are {', '.join(names) or 'no others'}")
        current = self._tables.drains.out
        if current is not None and current.heir != heir and current.rows:
            raise Conflict(f"group {current.heir} has not confirmed a transfer yet: drain to it until it has")
        # Held messages have no due time that the heir could use.
        held_campaigns = [
            name
            for name, campaign in self._tables.campaigns.all().items()
            if campaign.held_from_ms is not None
        ]
        if held_campaigns:
            raise Conflict(f"campaign {held_campaigns[0]} is held: resume or cancel it first")
        # The heir does not know the selections of this group, and its messages have other numbers.
        if active_selections := self._tables.selections.active:
            raise Conflict(f"selection {active_selections[0]} is active: undo it, or wait until it is over")
        # A successor would be appended here, while its predecessor is pending at the heir.
        schedules = self._tables.schedules
        if len(schedules.occurrences):
            active_schedule = schedules.name_of(next(iter(schedules.occurrences)))
            raise Conflict(f"schedule {active_schedule!r} is active: pause it, and put it in group {heir}")

    def _close_if_drained(self) -> None:
        """Make the policy refuse new messages if this group is drained."""
        if (facts := self._tables.drains.out) is not None:
            self._policy.close(f"group {self._group} is drained to {facts.heir}: send to another group")
            self._is_done = False

    def _report_progress(self, facts: DrainFacts) -> Drained:
        """Build the report of a drain for users."""
        return Drained(
            group=self._group, heir=facts.heir, since_ms=facts.since_ms, moved=facts.moved_rows,
            moving=facts.rows, waiting=self._pending_messages(), is_done=self._is_done, problem=self._problem,
        )  # fmt: skip

    # -- the periodic task ---------------------------------------------------------------------------------------

    async def hand_over(self) -> None:
        """Hand over all messages that are pending now, if this group is drained. Called by maintenance.py periodically.

        Temporary errors are logged, and `drain` shows them as `problem`.
        """
        if self._tables.drains.out is None:
            return
        try:
            async with self._hand_over_lock:
                self._is_done = not await self._hand_over_pending()
            self._problem = ""
        # The heir refuses or does not answer, a disk is full, or the account was deleted. The next call tries again.
        except (RequestError, OverLimit, Unavailable) as error:
            if str(error) != self._problem:
                logger.warning("messages not handed over, trying again reason=%s", error)
            self._problem = str(error)

    async def _hand_over_pending(self) -> int:
        """Hand over the messages that are pending now, page by page. Returns their number."""
        await self._resend_unconfirmed()
        # Compact a long tail first: files are read row group by row group, but the tail is read completely.
        while self._scheduling.compacts and self._mover.tail_count.rows > PAGE_ROWS and self._is_compactor:
            if await self._mover.compact() is None:
                break
        from_position, moved_rows = (self._clock.now_ms() + MARGIN_MS, 0), 0
        while from_position < LAST_POSITION:
            async with self._snapshots.taken() as snapshot:
                try:
                    page = await in_thread(self._background, self._read_page, snapshot, from_position)
                    for messages, read in (
                        (page.logged, self._read_from_log),
                        (page.filed, partial(_read_from_table, page.walk)),
                    ):
                        moved_rows += await self._hand_over_all(messages, read)
                except OutOfRange:
                    # Retention has removed a row since the snapshot: its message is settled or in a file. Read again.
                    continue
            from_position = page.upto
        if moved_rows:  # if nothing moved, the next call reuses the tail in memory
            await in_thread(self._background, self._tail.forget)
        return moved_rows

    @property
    def _is_compactor(self) -> bool:
        """True unless an external compactor has a lease."""
        return self._clock.elapsed_ms() >= self._mover.external_compactor_until_ms

    def _read_page(self, snapshot: Snapshot, from_position: PagePosition) -> _Page:
        """Read the pending messages from a position on, up to PAGE_ROWS from log and from files (background thread)."""
        shown = Shown(self._codes, None, lambda topic: True)  # all topics
        walk = TableWalk(snapshot, self._snapshots.open_file, self._codes, None)
        in_log, log_upto = self._tail.after(snapshot, from_position, LAST_POSITION, PAGE_ROWS)
        in_files, files_upto = walk.after(from_position, LAST_POSITION, PAGE_ROWS, shown.choose)
        # Both sources are complete up to the nearer of their ends.
        upto = min(log_upto, files_upto)
        in_log = in_log.part(shown(in_log.topic) & is_before(in_log, upto))
        return _Page(walk, in_log, in_files.part(is_before(in_files, upto)), upto)

    async def _hand_over_all(
        self, messages: Logged | Filed, read: Callable[[Logged | Filed], pa.RecordBatch]
    ) -> int:
        """Hand over messages in transfers of bounded size. Returns the number of messages handed over.

        `read` reads the complete rows of some messages (background thread).
        """
        index = moved_rows = 0
        while index < len(messages):
            chunk = messages.part(slice(index, index + self._rows_at_once))
            rows = await in_thread(self._background, read, chunk)
            for transfer in _split_transfers(rows):
                moved_rows += await self._hand_over(transfer)
            index += len(chunk)
            # The next chunk has as many rows of this size as fit into a transfer.
            fitting_rows = rows.num_rows * BYTES_MAX // max(1, rows.nbytes)
            self._rows_at_once = min(max(1, fitting_rows), 4 * self._rows_at_once, ROWS_MAX)
        return moved_rows

    def _read_from_log(self, messages: Logged | Filed) -> pa.RecordBatch:
        """Read the complete rows of messages from the log. It has the type that `_hand_over_all` expects."""
        assert isinstance(messages, Logged)
        return rows_in_log(self._log.reader, messages, _without_level)

    async def _hand_over(self, scheduled_rows: pa.RecordBatch) -> int:
        """Hand over the messages among these that are still pending, in one transfer.

        Returns the number of messages handed over, when the heir has adopted them. Messages that are due within
        MARGIN_MS are left out.
        """
        async with self._gate.passing():  # excludes the resume of a campaign, which changes due times
            self._log.writer.check_admission()
            now_ms = self._clock.now_ms()
            due_ms = int64(scheduled_rows.column("due_ms"))
            scheduled_rows = scheduled_rows.filter(pa.array(due_ms >= now_ms + MARGIN_MS))
            # As for a cancel, this call decides the race with releases, cancels and moves. No await and no error until
            # the rows are appended.
            was_pending = self._scheduling.scheduler.cancel(*pairs_of(scheduled_rows))
            if not was_pending.any():
                return 0
            # Read now, because a command may have named another heir meanwhile.
            facts = self._tables.drains.out
            assert facts is not None and not facts.rows, "the previous transfer is confirmed"
            rows = build_drain_rows(scheduled_rows.filter(pa.array(was_pending)), facts.heir, now_ms)
            transfer_facts = msgspec.structs.replace(
                facts, transfer=facts.transfer + 1, first_seq=self._log.writer.next_seq, rows=rows.num_rows,
                at_ms=now_ms,
            )  # fmt: skip
            change = self._tables.drains.build_change(transfer_facts)
            _, durable = self._log.writer.append(pa.concat_batches([rows, change.rows]))
            change.apply()
        # Send the rows only when they are durable: the next leader of this group must know that the messages ended.
        await durable
        await self._log.writer.synced()
        await self._send(rows)
        return len(rows)

    async def _resend_unconfirmed(self) -> None:
        """Read the unconfirmed transfer from the log, if there is one, and send it again."""
        facts = self._tables.drains.out
        if facts is not None and facts.rows:
            await self._log.writer.flushed()
            rows = await in_thread(self._background, self._read_drain_rows, facts)
            await self._send(rows)

    def _read_drain_rows(self, facts: DrainFacts) -> pa.RecordBatch:
        """Read the CANCEL rows of the unconfirmed transfer from the log."""
        batches = list(self._log.reader.rows(facts.first_seq, facts.first_seq + facts.rows))
        rows = pa.concat_batches(batches).select(LOG_SCHEMA.names)
        assert rows.num_rows == facts.rows and (rows.column("kind").to_numpy() == Kind.CANCEL).all()
        return rows

    async def _send(self, rows: pa.RecordBatch) -> None:
        """Send the rows of the current transfer to the heir, and record that it has adopted them.

        Raises the error with which the heir refuses them, and Unavailable if it does not answer.
        """
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
        # After a crash before this row is durable, the transfer is sent again, and the heir ignores it.
        self._tables.drains.put(
            msgspec.structs.replace(
                facts, moved_rows=facts.moved_rows + facts.rows, first_seq=0, rows=0, at_ms=0
            )
        )


def _raise_refusal(answer: GroupAnswer | None, heir: str) -> None:
    """Raise the error that the answer of the heir contains, if any, or Unavailable if there is no answer."""
    if answer is None:
        raise Unavailable(f"group {heir} did not answer")
    if answer.refusal is not None:
        error = from_code(answer.refusal.code, f"group {heir}: {answer.refusal.text}")
        if isinstance(error, StorageError):  # the error concerns the heir's log, not the log of this group
            raise Unavailable(str(error))
        raise error


def _split_transfers(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows in parts that fit into a transfer. A single row always fits."""
    if rows.num_rows == 1 or rows.nbytes <= BYTES_MAX:
        yield rows
        return
    middle = rows.num_rows // 2  # halves by number of rows; repeated halving isolates large messages
    yield from _split_transfers(rows.slice(0, middle))
    yield from _split_transfers(rows.slice(middle))


def _read_from_table(walk: TableWalk, messages: Logged | Filed) -> pa.RecordBatch:
    """Read the complete rows of messages from the table. It has the type that `_hand_over_all` expects."""
    assert isinstance(messages, Filed)
    return rows_in_table(walk, messages)


def _without_level(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Remove the properties of delay levels, because the heir may have other levels. Due times stay the same."""
    row_properties: Sequence[dict[str, str]] = [
        decode_properties(text or "") for text in rows.column("properties").to_pylist()
    ]
    remaining = [
        {name: value for name, value in properties.items() if name not in SPENT}
        for properties in row_properties
    ]
    texts = [encode_properties(properties) if properties else None for properties in remaining]
    return with_column(rows, "properties", pa.array(texts, pa.string()))


# ---- the heir: adopt each transfer exactly once --------------------------------------------------------------
# One frame contains the SCHEDULED rows of a transfer and a META row with the transfer's number. If the sending group
# was killed before it received the answer, it sends the transfer again. The heir then finds the number, and answers
# without adopting the messages again.


class DrainReceiver:
    """Adopts transfers from other groups. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        appender: Appender,
        *,
        settings: Settings,
        clock: SchedulerClock,
        writer: LogWriter,
        drains: Drains,
        on_adopted: Callable[[], None],
    ) -> None:
        """`on_adopted` is called when messages from another group are durable."""
        self._policy, self._appender, self._on_adopted = policy, appender, on_adopted
        self._settings, self._clock, self._writer, self._drains = settings, clock, writer, drains

    async def adopt(self, question: AdoptHere, caller: Caller) -> None:
        """Adopt a transfer. It is durable on return. Transfer 0 only checks whether this group would accept a drain.

        Raises Forbidden, Unauthorized, Conflict, OutOfRange, InvalidMessage and OverLimit: then no row of the transfer
        is adopted. After StorageError, NotLeader or Unavailable it may be adopted, and the sender repeats it.
        """
        self._policy.allow(caller, Verb.ADMIN)
        last_transfer = self._drains.adopted(question.source)
        if last_transfer is not None and question.since_ms < last_transfer.since_ms:
            raise OutOfRange(f"group {question.source} has begun a newer drain than this one")
        if not question.transfer:
            # Not checked for a real transfer: its messages have ended in the sending group and must not be lost.
            if (own_drain := self._drains.out) is not None:
                raise Conflict(
                    f"group {self._settings.group} is drained itself, to {own_drain.heir}: name that one"
                )
            return
        if (
            last_transfer is not None
            and question.since_ms == last_transfer.since_ms
            and question.transfer <= last_transfer.transfer
        ):
            await self._writer.flushed()  # the first copy of this transfer may not be durable yet
            return
        self._append(question, 0 if last_transfer is None else last_transfer.rows)
        await self._writer.flushed()

    def _append(self, question: AdoptHere, rows_before: int) -> None:
        """Append the messages of a transfer with its META row. `rows_before`: rows of earlier transfers."""
        self._writer.check_admission()
        now_ms = self._clock.now_ms()
        scheduled_rows = build_adopted_rows(
            decode_sent(question.rows), now_ms=now_ms, host=self._settings.host
        )
        # The META rows of the topics must precede the rows that use them.
        self._appender.make_topics(scheduled_rows)
        # A limit of the backlog is for sends. The other group has accepted these messages.
        rows = self._appender.prepare_accepted(scheduled_rows, now_ms)
        facts = AdoptedFacts(
            since_ms=question.since_ms, transfer=question.transfer, rows=rows_before + rows.num_rows
        )
        change = self._drains.adoption_row(question.source, facts)
        # No await between the check in `adopt` and the append. Otherwise two copies of a transfer that arrive at the
        # same time would both be adopted.
        self._appender.append(pa.concat_batches([rows, change.rows]), self._on_adopted)
        change.apply()
