"""Transactions: half messages, kept in the log and hidden until their producer commits or rolls them back.

    PROMISE without an instant   the half message as it came; its delay, if it has one, has not begun
    RELEASE                      commit: the message is visible; `source_seq` names the half
    MOVED                        commit of a message with a delay, which begins now: the half, number `source_seq`, is a
                                 promise for an instant from now on
    CANCEL                       rollback; `source_seq` names the half, the body says why when the broker gave it up

A half is ended once: the first request decides on the event loop, and later ones get its outcome. It is open until the
row that ends it is durable; so a broker that was killed in between finds either that row or an open half, and asks the
producer again. Producers are asked by an edge (`take_due`), six seconds after the half came and then every half minute,
fifteen times at most.

Retention keeps the log from the oldest open half on; a producer who never answers cannot hold it for longer than
the retention time.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker.components import Components, in_thread
from timeball.broker.ingress import AsyncBatcher
from timeball.errors import OutOfRange, OverLimit, TimeballError
from timeball.key_hash import hash_text
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.message import (
    LOG_SCHEMA,
    NO_INSTANT_MS,
    SEND_COLUMNS,
    Int64Array,
    Kind,
    build_rows,
    decode_properties,
    int64,
    with_seq,
)

logger = logging.getLogger(__name__)

GROUP = "PGROUP"  # the producers that may be asked
IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"  # RocketMQ's: not to be asked sooner
LIFE_MS_MIN = limits.HOUR_MS  # a retention of minutes is for tests; fifteen checks take eight

# Bits of RocketMQ's sysFlag: 4 a half message, 8 committed, 12 rolled back.
TRANSACTION_BITS, COMMITTED_BIT = 12, 8

_DELAYS = ("due_ms", "delay_ms", "delay_level")
_KEPT = [name for name in SEND_COLUMNS if name not in (*_DELAYS, "sys_flag")]
_LOAD_ROWS = 1_024  # so many bodies are in memory at a time when a broker starts

# The largest messages all fit into one request: or a turn would be refused whole, with the commits of others in it.
COMMITS_PER_TURN = limits.REQUEST_BYTES_MAX // (limits.BODY_BYTES_MAX + 64 * 1024)
SWEEP_ENTRIES_MIN = 1_024  # instants to ask at, of halves that have ended or were put off

Publish = Callable[[pa.RecordBatch, pa.RecordBatch], Awaitable[int]]
Delay = Callable[[dict[str, str]], Mapping[str, int]]


class Outcome(Enum):
    """The outcome of a half message."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    ENDED = "ended"  # one of the two; the log cannot tell which, because the message had no id
    NOT_FOUND = "not found"  # there is no such half message of this group


@dataclass(slots=True)
class Half:
    """An open half message. `check_ms`: when its producer is asked next, by `SchedulerClock.elapsed_ms`."""

    seq: int
    group: str  # the producers that may end it, or be asked about it
    topic: str
    unique_key: str | None
    store_ms: int
    check_ms: int  # also its entry in the heap; another entry of it is out of date
    checks: int = 0  # how often a producer was asked; saved in checkpoints
    begun_ms: int = 0  # when it came, by the same clock

    def count_from(self, begun_ms: int) -> None:
        """Let its time begin then."""
        self.begun_ms, self.check_ms = begun_ms, self.check_ms + begun_ms - self.store_ms


def at_once(properties: dict[str, str]) -> Mapping[str, int]:
    """Return the delay columns of messages that have no delay."""
    return {}


class Transactions:
    """The open halves. Belongs to the event loop. `publish` sends a batch, each row in place of the half beside it."""

    def __init__(self, parts: Components, publish: Publish, halves: Iterable[Half] = ()) -> None:
        self._parts, self._publish = parts, publish
        # Invariant: a half is in `_open` until the row that ends it is durable, and in `_ending` while that is
        # decided.
        self._open = {half.seq: half for half in halves}
        # One that seems to be from the future came before the clock was set back: it begins anew.
        for half in self._open.values():
            half.count_from(min(half.store_ms, parts.clock.now_ms()))
        self._due = [(half.check_ms, half.seq) for half in self._open.values()]
        heapq.heapify(self._due)
        self._ending: dict[int, asyncio.Future[Outcome]] = {}
        self._commits: AsyncBatcher[tuple[Half, Delay], Outcome] = AsyncBatcher(
            self._commit, COMMITS_PER_TURN
        )
        self._preparing = 0

    # -- the log's side --------------------------------------------------------------------------------------

    def prepare(self, rows: pa.RecordBatch) -> tuple[int, asyncio.Future[int]]:
        """Append admitted rows as halves; returns the first's number and when they are durable. Raises OverLimit."""
        # Each open half takes memory, and keeps its segment of the log from retention.
        if len(self._open) + self._preparing + rows.num_rows > limits.HALVES_OPEN_MAX:
            raise OverLimit(f"{limits.HALVES_OPEN_MAX} transactions are open; end some first")
        first_seq = self._parts.writer.next_seq
        appended = self._parts.writer.append(rows, on_durable=lambda: self._opened(with_seq(rows, first_seq)))
        # Counted until durable, so that sends which come together cannot pass the bound together.
        self._preparing += rows.num_rows
        return appended

    def _opened(self, rows: pa.RecordBatch) -> None:
        self._preparing -= rows.num_rows
        later_ms = self._parts.clock.elapsed_ms() - self._parts.clock.now_ms()
        for half in _halves(rows):
            half.count_from(half.store_ms + later_ms)
            self._open[half.seq] = half
            heapq.heappush(self._due, (half.check_ms, half.seq))
        if len(self._due) > SWEEP_ENTRIES_MIN + 2 * len(self._open):
            # Most have ended by now, and a producer may have asked for a day of peace.
            self._due = [(half.check_ms, half.seq) for half in self._open.values()]
            heapq.heapify(self._due)

    def ended(self, seqs: Iterable[int]) -> None:
        """Forget these halves: the rows that end them are durable."""
        for seq in seqs:
            self._open.pop(int(seq), None)

    def open(self) -> list[tuple[int, int]]:
        """Return (seq, checks) of every open half, for the checkpoint."""
        return [(half.seq, half.checks) for half in self._open.values()]

    def find_half(self, seq: int) -> Half | None:
        """Return the open half with this number."""
        return self._open.get(seq)

    @property
    def oldest_seq(self) -> int | None:
        """Return the row that retention must not go beyond; None when no half is open."""
        return min(self._open, default=None)

    def statistics(self) -> dict[str, int | None]:
        """Return figures for people."""
        return {"open": len(self._open), "oldest_seq": self.oldest_seq}

    # -- the producer's side ---------------------------------------------------------------------------------

    async def end(self, seq: int, group: str, *, commit: bool, delay: Delay = at_once) -> Outcome:
        """Publish a half or drop it; return its outcome, now or before. Durable on return.

        `delay` gives the delay columns of SEND_COLUMNS by the half's properties. What it or admission
        raises leaves the half open.
        """
        half = self._open.get(seq)
        # As if there were none: a group must not learn of another's transactions.
        if half is not None and half.group != group:
            return Outcome.NOT_FOUND
        # A second end of the same half, perhaps the other way: it gets the outcome of the first.
        ending = self._ending.get(seq)
        if ending is not None:
            return await asyncio.shield(ending)
        if half is None:
            parts = self._parts
            return await in_thread(parts.reader_thread, _look_up, parts.reader, parts.key_index, seq, group)
        if commit:
            return await self._begin(half, self._commits.put((half, delay)))
        # A rollback reads no body, so it gains nothing from a batch.
        return await self._begin(half, asyncio.ensure_future(self._roll_back(half)))

    async def _begin(self, half: Half, ending: asyncio.Future[Outcome]) -> Outcome:
        self._ending[half.seq] = ending
        ending.add_done_callback(lambda _: self._ending.pop(half.seq, None))
        # A caller who goes away must not leave the half taken and not ended.
        return await asyncio.shield(ending)

    async def _commit(self, commits: list[tuple[Half, Delay]]) -> list[Outcome | TimeballError]:
        seqs = np.array([half.seq for half, _ in commits], dtype=np.int64)
        rows = await in_thread(self._parts.reader_thread, self._parts.reader.read_rows, seqs)
        outcomes: list[Outcome | TimeballError] = []
        delays: list[Mapping[str, int]] = []
        for text, (_, delay) in zip(rows.column("properties").to_pylist(), commits, strict=True):
            try:
                # A fault of one half must not refuse the others of the turn.
                delays.append(delay(decode_properties(text or "")))
                outcomes.append(Outcome.COMMITTED)
            except TimeballError as error:
                outcomes.append(error)
        if delays:
            good = np.array([outcome is Outcome.COMMITTED for outcome in outcomes])
            halves = rows.filter(pa.array(good))
            # One append for all commits of the turn; each row names its half as source.
            await self._publish(_messages(halves, delays), halves)
        return outcomes

    async def _roll_back(self, half: Half, why: str = "") -> Outcome:
        # The id goes along, so that a later end of the same half finds this row (`_look_up`).
        row = build_rows(
            1,
            kind=int(Kind.CANCEL),
            topic=half.topic,
            queue_id=-1,
            unique_key=half.unique_key,
            body=why.encode() or None,
            store_ms=self._parts.clock.now_ms(),
            accepted_ms=half.store_ms,
            source_seq=half.seq,
        )
        _, durable = self._parts.writer.append(row, on_durable=lambda: self.ended([half.seq]))
        await durable
        return Outcome.ROLLED_BACK

    # -- asking ----------------------------------------------------------------------------------------------

    def take_due(self, now_ms: int) -> Half | None:
        """Return a half whose producer must be asked now; it comes again after the interval, asked or not."""
        while self._due and self._due[0][0] <= now_ms:
            check_ms, seq = heapq.heappop(self._due)
            half = self._open.get(seq)
            # The heap is not searched when an instant changes: an entry that is not the half's present one is passed
            # over.
            if half is None or half.check_ms != check_ms:
                continue  # ended, or put off since
            # Before it is returned: a caller that fails to ask must not lose the half from the heap.
            self.put_off(half, now_ms + limits.TRANSACTION_CHECK_INTERVAL_MS)
            if seq not in self._ending:
                return half
        return None

    def put_off(self, half: Half, check_ms: int) -> None:
        """Ask at another time."""
        half.check_ms = check_ms
        heapq.heappush(self._due, (check_ms, half.seq))

    def given_up(self, half: Half, now_ms: int) -> str | None:
        """Return why no producer is asked about this half any more; None while one is."""
        if half.checks >= limits.TRANSACTION_CHECKS_MAX:
            return f"its producer was asked {half.checks} times"
        if now_ms - half.begun_ms > max(self._parts.settings.retention_ms, LIFE_MS_MIN):
            return "it is older than the retention time"
        return None

    async def discard(self, half: Half, why: str) -> None:
        """Roll a half back that its producer has not ended; durable on return."""
        if half.seq in self._open and half.seq not in self._ending:
            # The operator should know: the producer believes that it may still commit.
            logger.warning(
                "half message rolled back seq=%d group=%s topic=%s unique_key=%s reason=%s",
                half.seq, half.group, half.topic, half.unique_key, why,
            )  # fmt: skip
            await self._begin(half, asyncio.ensure_future(self._roll_back(half, why)))


def half_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a producer's batch without its delays: they begin with the commit."""
    return batch.drop_columns([name for name in batch.schema.names if name in _DELAYS])


def half_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return admitted rows as halves: promises without an instant."""
    return _with_column(rows, "kind", pa.array(np.full(rows.num_rows, Kind.PROMISE, dtype=np.int8)))


def ending_rows(rows: pa.RecordBatch, halves: pa.RecordBatch) -> pa.RecordBatch:
    """Return admitted rows as those that publish these halves (READ_SCHEMA): rows for now are their releases."""
    is_now = rows.column("kind").to_numpy() == Kind.MESSAGE
    accepted_ms = np.where(is_now, int64(halves.column("store_ms")), int64(rows.column("store_ms")))
    kinds = np.where(is_now, np.int8(Kind.RELEASE), np.int8(Kind.PROMISE))
    rows = _with_column(_with_column(rows, "kind", pa.array(kinds)), "accepted_ms", pa.array(accepted_ms))
    return _with_column(rows, "source_seq", halves.column("seq"))


def as_first_moves(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of `ending_rows` for later, once they are prepared, as moves: the promise keeps the half's number."""
    is_later = rows.column("kind").to_numpy() == Kind.PROMISE
    from_ms = pa.array(np.full(len(is_later), NO_INSTANT_MS, dtype=np.int64), mask=~is_later)
    kinds = pa.array(np.where(is_later, np.int8(Kind.MOVED), np.int8(Kind.RELEASE)))
    return _with_column(_with_column(rows, "kind", kinds), "from_due_ms", from_ms)


def first_versions(rows: pa.RecordBatch, first_seq: int) -> list[tuple[int, int, int, int]]:
    """Return the moves among rows in the log from `first_seq` on, as schedule/moved.py takes them."""
    at = np.flatnonzero(rows.column("kind").to_numpy() == Kind.MOVED)
    names = ("due_ms", "source_seq", "from_due_ms")
    due_ms, number, from_ms = (rows.column(name).take(pa.array(at)).to_pylist() for name in names)
    return list(zip(due_ms, number, (first_seq + at).tolist(), from_ms, strict=True))


def _with_column(rows: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    at = LOG_SCHEMA.get_field_index(name)
    return rows.set_column(at, LOG_SCHEMA.field(at), values)


def load(reader: LogReader, seqs: Int64Array, checks: Mapping[int, int]) -> list[Half]:
    """Return these halves, which are open; `checks`: how often their producers were asked by then. Blocking."""
    found: list[Half] = []
    for at in range(0, len(seqs), _LOAD_ROWS):
        found += _halves(reader.read_rows(seqs[at : at + _LOAD_ROWS]))
    for half in found:
        half.checks = checks.get(half.seq, 0)
    return found


def _halves(rows: pa.RecordBatch) -> list[Half]:
    found = []
    for row in rows.select(["seq", "topic", "unique_key", "properties", "store_ms"]).to_pylist():
        properties = decode_properties(row["properties"] or "")
        check_ms = row["store_ms"] + _immunity_ms(properties)
        found.append(
            Half(
                row["seq"],
                properties.get(GROUP, ""),
                row["topic"],
                row["unique_key"],
                row["store_ms"],
                check_ms,
            )
        )
    return found


def _immunity_ms(properties: dict[str, str]) -> int:
    text = properties.get(IMMUNITY, "")
    # A client's text: anything but a short number means the default.
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        return limits.TRANSACTION_FIRST_CHECK_MS
    return min(int(text) * limits.SECOND_MS, limits.DAY_MS)


def _messages(rows: pa.RecordBatch, delays: list[Mapping[str, int]]) -> pa.RecordBatch:
    """Return the batch to send for halves that are committed: their rows, and their delays."""
    # Consumers of RocketMQ read from these bits that the message was committed.
    sys_flag = rows.column("sys_flag").fill_null(0).to_numpy() & ~TRANSACTION_BITS | COMMITTED_BIT
    columns = {name: rows.column(name) for name in _KEPT}
    columns["sys_flag"] = pa.array(sys_flag.astype(np.int32))
    for name in sorted({name for delay in delays for name in delay}):
        columns[name] = pa.array([delay.get(name) for delay in delays], SEND_COLUMNS[name])
    return pa.RecordBatch.from_pydict(columns)


def _look_up(reader: LogReader, key_index: KeyIndex, seq: int, group: str) -> Outcome:
    """Return the outcome of a half that is not open (reader thread)."""
    # Nothing else is known of it: retention has removed the half, or it never was.
    if not reader.first_seq <= seq < reader.next_seq:
        return Outcome.NOT_FOUND
    try:
        [half] = (
            reader.read_rows(_seqs(seq)).select(["kind", "due_ms", "unique_key", "properties"]).to_pylist()
        )
    except OutOfRange:
        return Outcome.NOT_FOUND
    is_half = half["kind"] == Kind.PROMISE and half["due_ms"] is None
    if not is_half or decode_properties(half["properties"] or "").get(GROUP, "") != group:
        return Outcome.NOT_FOUND
    if half["unique_key"] is not None:
        seqs = key_index.find_rows(hash_text(pa.array([half["unique_key"]], pa.string())))
        for row in reader.read_rows(seqs).select(["kind", "source_seq", "due_ms"]).to_pylist():
            if row["source_seq"] == seq:
                # A CANCEL with an instant ended a promise: the half was committed with a delay before.
                is_roll_back = row["kind"] == Kind.CANCEL and row["due_ms"] is None
                return Outcome.ROLLED_BACK if is_roll_back else Outcome.COMMITTED
    return Outcome.ENDED


def _seqs(seq: int) -> Int64Array:
    return np.array([seq], dtype=np.int64)
