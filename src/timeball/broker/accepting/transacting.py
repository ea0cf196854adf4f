"""RocketMQ transactions: half messages, their commit or rollback, and checks with the producer.

A half message is in the log, but hidden until its producer commits it or rolls it back.

Rows of the log (in the last three, `source_seq` is the number of the half message):

    SCHEDULED without a due time   the half message as it was sent; its delay, if it has one, has not begun
    RELEASE                        commit: the message is visible
    MOVED                          commit of a message with a delay, which begins now: the half message becomes a
                                   scheduled message with a due time
    CANCEL                         rollback; the body is the reason if the broker rolled it back

A half message ends once: the first request decides on the event loop, and later requests get its outcome. It is open
until the row that ends it is durable. So after a crash in between, the broker finds either this row, or an open half
message, about which it asks the producer again. The edges ask the producers (`TransactionChecks`): 6 s after the half
message arrived, then every 30 s, at most 15 times.

Retention keeps the log from the oldest open half message on. A producer that never answers cannot keep it longer than
the retention time.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.ingress import AsyncBatcher
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.config import Settings
from timeball.model.errors import Corrupt, OutOfRange, OverLimit, RequestError, TimeballError
from timeball.model.key_hash import hash_text
from timeball.model.message import (
    NO_DUE_TIME_MS,
    SEND_COLUMNS,
    Int64Array,
    Kind,
    build_rows,
    decode_properties,
    int64,
    with_seq,
)
from timeball.schedule.locations import with_column

logger = logging.getLogger(__name__)

# ---- checks: ask producers about open half messages ----------------------------------------------------------
# One loop serves the producers of all edges. Each edge registers an `Asker`, which knows its connected producers. The
# first edge that has a producer for a half message asks it. If no producer is connected, this does not count as a
# check. So the transactions of a producer that was down for an hour are still open when it returns. A half message is
# rolled back after too many checks, or when it is too old.

LOOK_S = 1.0  # the time between two rounds of checks
# After a restart many half messages may be due for a check at once. These limits of a round let the clients keep up.
CHECKS_PER_LOOK = 1_000
BYTES_PER_LOOK = 8 * 1024 * 1024


class Asker(Protocol):
    """The interface of an edge that asks its producers. Both methods run on the event loop."""

    def has_producer(self, half: Half) -> bool:
        """Check whether a producer that may be asked about this half message is connected."""

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Push the half message, a row of READ_SCHEMA, to a producer.

        Returns the bytes pushed, 0 if none accepted it.
        """


class TransactionChecks:
    """Asks producers through the `askers` of the edges. `run` asks until it is cancelled."""

    def __init__(
        self,
        transactions: Transactions,
        *,
        clock: SchedulerClock,
        reader: LogReader,
        reader_thread: Executor,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._transactions = transactions
        self._clock, self._reader, self._reader_thread = clock, reader, reader_thread
        self._on_failure = on_failure
        self.askers: list[Asker] = []

    async def run(self) -> None:
        """Call `ask_due` once a second, until cancelled. An unexpected error goes to `on_failure`."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.ask_due()
            except (RequestError, OverLimit) as error:
                logger.warning("transactions not checked, trying again later reason=%s", error)
            except Exception as error:
                # No caller awaits this task, so an unexpected error must stop the broker.
                self._on_failure(error)
                return

    async def ask_due(self) -> None:
        """Do one round: ask about half messages that are due for a check, or roll them back.

        Raises RequestError or OverLimit if a rollback cannot be written.
        """
        now_ms, size_bytes = self._clock.elapsed_ms(), 0
        rollbacks = []
        for _ in range(CHECKS_PER_LOOK):
            half = self._transactions.take_due(now_ms)
            if half is None:
                break
            reason = self._transactions.reason_to_give_up(half, now_ms)
            if reason is not None:
                rollbacks.append(self._transactions.discard(half, reason))
            elif size_bytes >= BYTES_PER_LOOK:
                # Each check pushes a whole message, and the bytes of this round are used up. The half message stays due
                # for the next round.
                self._transactions.postpone(half, now_ms)
                break
            else:
                size_bytes += await self._ask(half)
        await asyncio.gather(*rollbacks)

    async def _ask(self, half: Half) -> int:
        """Ask one producer of the half message, if any is connected. Returns the bytes pushed, 0 if none was asked."""
        if not any(asker.has_producer(half) for asker in self.askers):
            return 0
        try:
            row = await in_thread(
                self._reader_thread, self._reader.read_rows, np.array([half.seq], dtype=np.int64)
            )
        except OutOfRange:
            return 0  # the half message has ended meanwhile, and retention has removed it
        except Corrupt as error:
            # The row is damaged, so only this half message cannot be asked about.
            logger.error("transaction not checked seq=%d reason=%s", half.seq, error)
            return 0
        # One producer of any edge is enough, because it answers for its group.
        for asker in self.askers:
            size_bytes = asker.ask(half, row) if asker.has_producer(half) else 0
            if size_bytes:
                half.checks += 1
                return size_bytes
        return 0


# ---- open half messages, and the rows that end them ----------------------------------------------------------

GROUP = "PGROUP"  # RocketMQ's property with the group of producers that may be asked
IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"  # RocketMQ's property: seconds before the first check
LIFE_MS_MIN = limits.HOUR_MS  # fifteen checks take eight minutes; only tests have a retention of minutes

# Bits of RocketMQ's sysFlag: 4 a half message, 8 committed, 12 rolled back.
TRANSACTION_BITS, COMMITTED_BIT = 12, 8

_DELAYS = ("due_ms", "delay_ms", "delay_level")
_COMMITTED_COLUMNS = [name for name in SEND_COLUMNS if name not in (*_DELAYS, "sys_flag")]
_LOAD_ROWS = 1_024  # bodies in memory at a time during a start

# This many of the largest messages fit into one request. With more, a batch of commits could be refused as a whole.
COMMITS_PER_TURN = limits.REQUEST_BYTES_MAX // (limits.BODY_BYTES_MAX + 64 * 1024)
# The heap of check times is swept when it has more stale entries than this (ended or postponed half messages).
SWEEP_ENTRIES_MIN = 1_024

Publish = Callable[[pa.RecordBatch, pa.RecordBatch], Awaitable[int]]
Delay = Callable[[dict[str, str]], Mapping[str, int]]


class Outcome(Enum):
    """The outcome of a half message."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    ENDED = "ended"  # committed or rolled back: the log does not show which, because the message has no id
    NOT_FOUND = "not found"  # this group has no such half message


@dataclass(slots=True)
class Half:
    """An open half message."""

    seq: int
    group: str  # the group of producers that may end it or be asked about it
    topic: str
    unique_key: str | None
    store_ms: int
    # The time of the next check. Until `count_from` on the wall clock, then on `SchedulerClock.elapsed_ms`.
    check_ms: int
    checks: int = 0  # number of checks so far; saved in checkpoints
    begun_ms: int = 0  # the time of its arrival on `SchedulerClock.elapsed_ms`

    def count_from(self, begun_ms: int) -> None:
        """Set the time of arrival, and move the next check by the difference to the store time."""
        self.begun_ms, self.check_ms = begun_ms, self.check_ms + begun_ms - self.store_ms


def at_once(properties: dict[str, str]) -> Mapping[str, int]:
    """Return no delay columns, because the message is visible at the commit (a `Delay`)."""
    return {}


class Transactions:
    """The open half messages. Belongs to the event loop.

    `publish` appends a batch of committed messages. Its second argument are their half messages in the same order.
    """

    def __init__(
        self,
        publish: Publish,
        halves: Iterable[Half] = (),
        *,
        settings: Settings,
        clock: SchedulerClock,
        writer: LogWriter,
        reader: LogReader,
        key_index: KeyIndex,
        reader_thread: Executor,
    ) -> None:
        self._publish = publish
        self._settings, self._clock, self._writer = settings, clock, writer
        self._reader, self._key_index = reader, key_index
        self._reader_thread = reader_thread
        # Invariant: a half message is in `_open` until the row that ends it is durable. It is in `_ending` while its
        # end is under way.
        self._open = {half.seq: half for half in halves}
        # If a store time is in the future, the clock was set back since. Then the half message counts as new.
        for half in self._open.values():
            half.count_from(min(half.store_ms, clock.now_ms()))
        # A heap of (check_ms, seq). An entry whose time differs from `Half.check_ms` is stale.
        self._due = [(half.check_ms, half.seq) for half in self._open.values()]
        heapq.heapify(self._due)
        self._ending: dict[int, asyncio.Future[Outcome]] = {}
        self._commits: AsyncBatcher[tuple[Half, Delay], Outcome] = AsyncBatcher(
            self._commit, COMMITS_PER_TURN
        )
        self._rows_being_prepared = 0

    # -- rows in the log --------------------------------------------------------------------------------------

    def prepare(self, rows: pa.RecordBatch) -> tuple[int, asyncio.Future[int]]:
        """Append rows of half messages (see `half_rows`).

        Returns the number of the first row, and a future that is done when they are durable. Raises OverLimit if too
        many half messages are open.
        """
        # Each open half message takes memory, and keeps its segment of the log from retention.
        if len(self._open) + self._rows_being_prepared + rows.num_rows > limits.HALVES_OPEN_MAX:
            raise OverLimit(f"{limits.HALVES_OPEN_MAX} transactions are open; end some first")
        first_seq = self._writer.next_seq
        appended = self._writer.append(rows, on_durable=lambda: self._on_prepared(with_seq(rows, first_seq)))
        # Counted until durable, so that concurrent sends cannot exceed the limit together.
        self._rows_being_prepared += rows.num_rows
        return appended

    def _on_prepared(self, rows: pa.RecordBatch) -> None:
        """Open the half messages of durable rows (READ_SCHEMA)."""
        self._rows_being_prepared -= rows.num_rows
        elapsed_minus_wall_ms = self._clock.elapsed_ms() - self._clock.now_ms()
        for half in _read_halves(rows):
            half.count_from(half.store_ms + elapsed_minus_wall_ms)
            self._open[half.seq] = half
            heapq.heappush(self._due, (half.check_ms, half.seq))
        if len(self._due) > SWEEP_ENTRIES_MIN + 2 * len(self._open):
            # Remove stale entries now: their check times may be a day ahead, and most half messages have ended by then.
            self._due = [(half.check_ms, half.seq) for half in self._open.values()]
            heapq.heapify(self._due)

    def ended(self, seqs: Iterable[int]) -> None:
        """Remove these half messages, because the rows that end them are durable."""
        for seq in seqs:
            self._open.pop(int(seq), None)

    def open(self) -> list[tuple[int, int]]:
        """List (seq, checks) of every open half message, for the checkpoint."""
        return [(half.seq, half.checks) for half in self._open.values()]

    def find_half(self, seq: int) -> Half | None:
        """Find the open half message with this number. None if there is none."""
        return self._open.get(seq)

    @property
    def oldest_seq(self) -> int | None:
        """The first row that retention must keep. None if no half message is open."""
        return min(self._open, default=None)

    def statistics(self) -> dict[str, int | None]:
        """Collect the number of open half messages and the first row that they need, for `status`."""
        return {"open": len(self._open), "oldest_seq": self.oldest_seq}

    # -- commit and rollback ---------------------------------------------------------------------------------

    async def end(self, seq: int, group: str, *, commit: bool, delay: Delay = at_once) -> Outcome:
        """Commit or roll back a half message. Returns its outcome, also if it had ended before.

        The outcome is durable on return. `delay` computes the delay columns of SEND_COLUMNS from the properties of the
        half message. If `delay` or the admission raises an error, the half message stays open, and the error is raised.
        """
        half = self._open.get(seq)
        # The same answer as for a missing half message: a group must not learn about transactions of other groups.
        if half is not None and half.group != group:
            return Outcome.NOT_FOUND
        # A second request for the same half message gets the outcome of the first, even if it decides differently.
        ending = self._ending.get(seq)
        if ending is not None:
            return await asyncio.shield(ending)
        if half is None:
            return await in_thread(
                self._reader_thread, _find_outcome, self._reader, self._key_index, seq, group
            )
        if commit:
            return await self._finish(half, self._commits.put((half, delay)))
        # A rollback reads no body, so a batch would save nothing.
        return await self._finish(half, asyncio.ensure_future(self._roll_back(half)))

    async def _finish(self, half: Half, ending: asyncio.Future[Outcome]) -> Outcome:
        """Wait until a half message has ended, and let later requests wait too. Returns its outcome."""
        self._ending[half.seq] = ending
        ending.add_done_callback(lambda _: self._ending.pop(half.seq, None))
        # Shielded, so that a half message also ends if the caller disconnects.
        return await asyncio.shield(ending)

    async def _commit(self, commits: list[tuple[Half, Delay]]) -> list[Outcome | TimeballError]:
        """Commit a batch of half messages. Returns an outcome or an error for each."""
        seqs = np.array([half.seq for half, _ in commits], dtype=np.int64)
        rows = await in_thread(self._reader_thread, self._reader.read_rows, seqs)
        outcomes: list[Outcome | TimeballError] = []
        delays: list[Mapping[str, int]] = []
        for text, (_, delay) in zip(rows.column("properties").to_pylist(), commits, strict=True):
            try:
                # An error of one half message must not refuse the other commits of the batch.
                delays.append(delay(decode_properties(text or "")))
                outcomes.append(Outcome.COMMITTED)
            except TimeballError as error:
                outcomes.append(error)
        if delays:
            is_valid = np.array([outcome is Outcome.COMMITTED for outcome in outcomes])
            halves = rows.filter(pa.array(is_valid))
            # One append for all commits of the batch. Each row names its half message as source.
            await self._publish(_committed_batch(halves, delays), halves)
        return outcomes

    async def _roll_back(self, half: Half, reason: str = "") -> Outcome:
        """Append the CANCEL row of a half message. It is durable on return."""
        # The row has the id, so that a later end of the same half message finds it (`_find_outcome`).
        row = build_rows(
            1,
            kind=int(Kind.CANCEL),
            topic=half.topic,
            queue_id=-1,
            unique_key=half.unique_key,
            body=reason.encode() or None,
            store_ms=self._clock.now_ms(),
            accepted_ms=half.store_ms,
            source_seq=half.seq,
        )
        _, durable = self._writer.append(row, on_durable=lambda: self.ended([half.seq]))
        await durable
        return Outcome.ROLLED_BACK

    # -- checks ----------------------------------------------------------------------------------------------

    def take_due(self, now_ms: int) -> Half | None:
        """Find a half message that is due for a check, and schedule its next check. None if there is none.

        Half messages whose end is under way are left out.
        """
        while self._due and self._due[0][0] <= now_ms:
            check_ms, seq = heapq.heappop(self._due)
            half = self._open.get(seq)
            if half is None or half.check_ms != check_ms:
                continue  # a stale entry: the half message has ended or was postponed
            # Now and not by the caller: if it fails to ask, the half message must still be in the heap. Also for one
            # that is ending: if its end fails, it stays open and needs its next check.
            self.postpone(half, now_ms + limits.TRANSACTION_CHECK_INTERVAL_MS)
            if seq not in self._ending:
                return half
        return None

    def postpone(self, half: Half, check_ms: int) -> None:
        """Set the time of the next check. The old entry stays in the heap and is stale."""
        half.check_ms = check_ms
        heapq.heappush(self._due, (check_ms, half.seq))

    def reason_to_give_up(self, half: Half, now_ms: int) -> str | None:
        """Find the reason to roll back this half message instead of another check. None if there is none."""
        if half.checks >= limits.TRANSACTION_CHECKS_MAX:
            return f"its producer was asked {half.checks} times"
        if now_ms - half.begun_ms > max(self._settings.retention_ms, LIFE_MS_MIN):
            return "it is older than the retention time"
        return None

    async def discard(self, half: Half, reason: str) -> None:
        """Roll back a half message that its producer has not ended, unless it is ending now. Durable on return."""
        if half.seq in self._open and half.seq not in self._ending:
            # Logged, because the producer assumes that it may still commit.
            logger.warning(
                "half message rolled back seq=%d group=%s topic=%s unique_key=%s reason=%s",
                half.seq, half.group, half.topic, half.unique_key, reason,
            )  # fmt: skip
            await self._finish(half, asyncio.ensure_future(self._roll_back(half, reason)))


def half_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Remove the delays of a producer's batch, because they begin at the commit."""
    return batch.drop_columns([name for name in batch.schema.names if name in _DELAYS])


def half_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert admitted rows to half messages: scheduled messages without a due time."""
    return with_column(rows, "kind", pa.array(np.full(rows.num_rows, Kind.SCHEDULED, dtype=np.int8)))


def ending_rows(rows: pa.RecordBatch, halves: pa.RecordBatch) -> pa.RecordBatch:
    """Convert admitted rows to rows that commit these half messages (READ_SCHEMA): releases, or scheduled messages."""
    is_immediate = rows.column("kind").to_numpy() == Kind.MESSAGE
    accepted_ms = np.where(is_immediate, int64(halves.column("store_ms")), int64(rows.column("store_ms")))
    kinds = np.where(is_immediate, np.int8(Kind.RELEASE), np.int8(Kind.SCHEDULED))
    rows = with_column(with_column(rows, "kind", pa.array(kinds)), "accepted_ms", pa.array(accepted_ms))
    return with_column(rows, "source_seq", halves.column("seq"))


def as_first_moves(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert the rows of `ending_rows` that are due later to MOVED rows, so that they keep the half messages' numbers.

    Call `Appender.prepare` before, which expects SCHEDULED rows.
    """
    is_later = rows.column("kind").to_numpy() == Kind.SCHEDULED
    from_ms = pa.array(np.full(len(is_later), NO_DUE_TIME_MS, dtype=np.int64), mask=~is_later)
    kinds = pa.array(np.where(is_later, np.int8(Kind.MOVED), np.int8(Kind.RELEASE)))
    return with_column(with_column(rows, "kind", kinds), "from_due_ms", from_ms)


def first_versions(rows: pa.RecordBatch, first_seq: int) -> list[tuple[int, int, int, int]]:
    """List (due_ms, number, version, from_due_ms) of the MOVED rows among these, for `Moved.add`.

    The rows have the numbers from `first_seq` on.
    """
    move_indexes = np.flatnonzero(rows.column("kind").to_numpy() == Kind.MOVED)
    names = ("due_ms", "source_seq", "from_due_ms")
    due_ms, numbers, from_ms = (rows.column(name).take(pa.array(move_indexes)).to_pylist() for name in names)
    return list(zip(due_ms, numbers, (first_seq + move_indexes).tolist(), from_ms, strict=True))


def load(reader: LogReader, seqs: Int64Array, checks: Mapping[int, int]) -> list[Half]:
    """Read these open half messages at a start. `checks` is the number of checks so far, by number. This blocks."""
    halves: list[Half] = []
    for begin in range(0, len(seqs), _LOAD_ROWS):
        halves += _read_halves(reader.read_rows(seqs[begin : begin + _LOAD_ROWS]))
    for half in halves:
        half.checks = checks.get(half.seq, 0)
    return halves


def _read_halves(rows: pa.RecordBatch) -> list[Half]:
    """Build the half messages of READ_SCHEMA rows. Their times are still on the wall clock."""
    halves = []
    for row in rows.select(["seq", "topic", "unique_key", "properties", "store_ms"]).to_pylist():
        properties, store_ms = decode_properties(row["properties"] or ""), row["store_ms"]
        check_ms = store_ms + _immunity_ms(properties)
        group = properties.get(GROUP, "")
        halves.append(Half(row["seq"], group, row["topic"], row["unique_key"], store_ms, check_ms))
    return halves


def _immunity_ms(properties: dict[str, str]) -> int:
    """Compute the time in ms before the first check, at most a day.

    The default applies if the client's text is no number with at most nine digits.
    """
    text = properties.get(IMMUNITY, "")
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        return limits.TRANSACTION_FIRST_CHECK_MS
    return min(int(text) * limits.SECOND_MS, limits.DAY_MS)


def _committed_batch(rows: pa.RecordBatch, delays: list[Mapping[str, int]]) -> pa.RecordBatch:
    """Build the batch (SEND_COLUMNS) that publishes half messages. `delays`: the delay columns of each of them."""
    # RocketMQ's consumers see in these bits that the message was committed.
    sys_flag = rows.column("sys_flag").fill_null(0).to_numpy() & ~TRANSACTION_BITS | COMMITTED_BIT
    columns = {name: rows.column(name) for name in _COMMITTED_COLUMNS}
    columns["sys_flag"] = pa.array(sys_flag.astype(np.int32))
    for name in sorted({name for delay in delays for name in delay}):
        columns[name] = pa.array([delay.get(name) for delay in delays], SEND_COLUMNS[name])
    return pa.RecordBatch.from_pydict(columns)


def _find_outcome(reader: LogReader, key_index: KeyIndex, seq: int, group: str) -> Outcome:
    """Find the outcome of a half message that is not open, from the rows of the log (reader thread)."""
    # Retention has removed the row, or there never was one. The log does not show which of the two is true.
    if not reader.first_seq <= seq < reader.next_seq:
        return Outcome.NOT_FOUND
    try:
        [half] = (
            reader.read_rows(_seqs(seq)).select(["kind", "due_ms", "unique_key", "properties"]).to_pylist()
        )
    except OutOfRange:
        return Outcome.NOT_FOUND
    is_half = half["kind"] == Kind.SCHEDULED and half["due_ms"] is None
    if not is_half or decode_properties(half["properties"] or "").get(GROUP, "") != group:
        return Outcome.NOT_FOUND
    if half["unique_key"] is not None:
        seqs = key_index.find_rows(hash_text(pa.array([half["unique_key"]], pa.string())))
        for row in reader.read_rows(seqs).select(["kind", "source_seq", "due_ms"]).to_pylist():
            if row["source_seq"] == seq:
                # A rollback is a CANCEL row without a due time. A CANCEL row with one cancels a scheduled message, so
                # the half message had been committed before.
                is_roll_back = row["kind"] == Kind.CANCEL and row["due_ms"] is None
                return Outcome.ROLLED_BACK if is_roll_back else Outcome.COMMITTED
    return Outcome.ENDED


def _seqs(seq: int) -> Int64Array:
    """Build an array of one sequence number."""
    return np.array([seq], dtype=np.int64)
