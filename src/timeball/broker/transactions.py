"""Transactions: half messages, kept in the log and shown to nobody until their producer says what is to become of them.

    PROMISE without an instant   the half message as it came; its delay, if it has one, has not begun
    RELEASE                      commit: the message is visible; `source_seq` names the half
    PROMISE                      commit of a message with a delay, which begins now; `source_seq` names the half
    CANCEL                       rollback; `source_seq` names the half, the body says why when the broker gave it up

A half is ended once: whoever comes first takes it on the event loop, and whoever comes later is told what
became of it. It is open until the row that ends it is durable; so a broker that was killed in between finds either
that row or an open half, and asks the producer again. Producers are asked by an edge (`take_due`), six seconds
after the half came and then every half minute, fifteen times at most.

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
from timeball.broker.admission import SEND_COLUMNS
from timeball.broker.ingress import AsyncBatcher
from timeball.broker.parts import Parts, in_thread
from timeball.errors import OutOfRange, OverLimit, TimeballError
from timeball.key_hash import hash_text
from timeball.log.format import with_seq
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.message import LOG_SCHEMA, Int64Array, Kind, build_rows, decode_properties

logger = logging.getLogger(__name__)

GROUP = "PGROUP"  # the producers that may be asked
IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"  # RocketMQ's: not to be asked sooner
LIFE_MS_MIN = limits.HOUR_MS  # a retention of minutes is for tests; fifteen checks take eight

# Bits of RocketMQ's sysFlag: 4 a half message, 8 committed, 12 rolled back.
TRANSACTION_BITS, COMMITTED_BIT = 12, 8

_DELAYS = ("due_ms", "delay_ms", "delay_level")
_KEPT = [name for name in SEND_COLUMNS if name not in (*_DELAYS, "sys_flag")]
_LOAD_ROWS = 1_024  # so many bodies are in memory at a time when a broker starts

# The largest messages all fit into one request: or a turn would be refused, with whoever else is in it.
COMMITS_PER_TURN = limits.REQUEST_BYTES_MAX // (limits.BODY_BYTES_MAX + 64 * 1024)
SWEEP_ENTRIES_MIN = 1_024  # instants to ask at, of halves that have ended or were put off

Publish = Callable[[pa.RecordBatch, pa.RecordBatch], Awaitable[int]]
Delay = Callable[[dict[str, str]], Mapping[str, int]]


class Outcome(Enum):
    """What became of a half message."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    ENDED = "ended"  # one of the two; the log cannot tell which, because the message had no id
    NOT_FOUND = "not found"  # there is no such half message of this group


@dataclass(slots=True)
class Half:
    """An open half message. `check_ms`: when its producer is asked next."""

    seq: int
    group: str
    topic: str
    unique_key: str | None
    store_ms: int
    check_ms: int
    checks: int = 0


def at_once(properties: dict[str, str]) -> Mapping[str, int]:
    """The delay of messages that have none."""
    return {}


class Transactions:
    """The open halves. Belongs to the event loop. `publish` sends a batch, each row in place of the half beside it."""

    def __init__(self, parts: Parts, publish: Publish, halves: Iterable[Half] = ()) -> None:
        self._parts, self._publish = parts, publish
        self._open = {half.seq: half for half in halves}
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
        if len(self._open) + self._preparing + rows.num_rows > limits.HALVES_OPEN_MAX:
            raise OverLimit(f"{limits.HALVES_OPEN_MAX} transactions are open; end some first")
        first_seq = self._parts.writer.next_seq
        appended = self._parts.writer.append(rows, on_durable=lambda: self._opened(with_seq(rows, first_seq)))
        self._preparing += rows.num_rows
        return appended

    def _opened(self, rows: pa.RecordBatch) -> None:
        self._preparing -= rows.num_rows
        for half in _halves(rows):
            self._open[half.seq] = half
            heapq.heappush(self._due, (half.check_ms, half.seq))
        if len(self._due) > SWEEP_ENTRIES_MIN + 2 * len(self._open):
            # Most have ended by now, and a producer may have asked for a day of peace.
            self._due = [(half.check_ms, half.seq) for half in self._open.values()]
            heapq.heapify(self._due)

    def ended(self, seqs: Iterable[int]) -> None:
        """The rows that end these halves are durable."""
        for seq in seqs:
            self._open.pop(int(seq), None)

    def open(self) -> list[tuple[int, int]]:
        """(seq, checks) of every open half, for the checkpoint."""
        return [(half.seq, half.checks) for half in self._open.values()]

    def find(self, seq: int) -> Half | None:
        """The open half with this number."""
        return self._open.get(seq)

    @property
    def oldest_seq(self) -> int | None:
        """What retention must not go beyond; None when nothing is open."""
        return min(self._open, default=None)

    def statistics(self) -> dict[str, int | None]:
        """Figures for people."""
        return {"open": len(self._open), "oldest_seq": self.oldest_seq}

    # -- the producer's side ---------------------------------------------------------------------------------

    async def end(self, seq: int, group: str, *, commit: bool, delay: Delay = at_once) -> Outcome:
        """Publish a half or drop it; returns what has become of it, now or before. Durable on return.

        `delay` gives the delay columns of admission.SEND_COLUMNS by the half's properties. What it or admission
        raises leaves the half open.
        """
        half = self._open.get(seq)
        if half is not None and half.group != group:
            return Outcome.NOT_FOUND
        ending = self._ending.get(seq)
        if ending is not None:
            return await asyncio.shield(ending)
        if half is None:
            parts = self._parts
            return await in_thread(parts.reader_thread, _look_up, parts.reader, parts.key_index, seq, group)
        if commit:
            return await self._begin(half, self._commits.put((half, delay)))
        return await self._begin(half, asyncio.ensure_future(self._roll_back(half)))

    async def _begin(self, half: Half, ending: asyncio.Future[Outcome]) -> Outcome:
        self._ending[half.seq] = ending
        ending.add_done_callback(lambda _: self._ending.pop(half.seq, None))
        # A caller who goes away must not leave the half taken and not ended.
        return await asyncio.shield(ending)

    async def _commit(self, commits: list[tuple[Half, Delay]]) -> list[Outcome | TimeballError]:
        seqs = np.array([half.seq for half, _ in commits], dtype=np.int64)
        rows = await in_thread(self._parts.reader_thread, self._parts.reader.take, seqs)
        outcomes: list[Outcome | TimeballError] = []
        delays: list[Mapping[str, int]] = []
        for text, (_, delay) in zip(rows.column("properties").to_pylist(), commits, strict=True):
            try:
                delays.append(delay(decode_properties(text or "")))
                outcomes.append(Outcome.COMMITTED)
            except TimeballError as error:
                outcomes.append(error)
        if delays:
            good = np.array([outcome is Outcome.COMMITTED for outcome in outcomes])
            halves = rows.filter(pa.array(good))
            await self._publish(_messages(halves, delays), halves)
        return outcomes

    async def _roll_back(self, half: Half, why: str = "") -> Outcome:
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
        """A half whose producer is to be asked now; it comes again after the interval, whatever the caller does."""
        while self._due and self._due[0][0] <= now_ms:
            check_ms, seq = heapq.heappop(self._due)
            half = self._open.get(seq)
            if half is None or half.check_ms != check_ms:
                continue  # ended, or put off since
            self.put_off(half, now_ms + limits.TRANSACTION_CHECK_INTERVAL_MS)
            if seq not in self._ending:
                return half
        return None

    def put_off(self, half: Half, check_ms: int) -> None:
        """Ask at another time."""
        half.check_ms = check_ms
        heapq.heappush(self._due, (check_ms, half.seq))

    def given_up(self, half: Half, now_ms: int) -> str | None:
        """Why nobody is to be asked about this half any more; None when somebody is."""
        if half.checks >= limits.TRANSACTION_CHECKS_MAX:
            return f"its producer was asked {half.checks} times"
        if now_ms - half.store_ms > max(self._parts.settings.retention_ms, LIFE_MS_MIN):
            return "it is older than the retention time"
        return None

    async def discard(self, half: Half, why: str) -> None:
        """Roll a half back that its producer has not ended; durable on return."""
        if half.seq in self._open and half.seq not in self._ending:
            logger.warning(
                "half message rolled back seq=%d group=%s topic=%s unique_key=%s reason=%s",
                half.seq, half.group, half.topic, half.unique_key, why,
            )  # fmt: skip
            await self._begin(half, asyncio.ensure_future(self._roll_back(half, why)))


def half_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """What a producer prepares, without its delays: they begin with the commit."""
    return batch.drop_columns([name for name in batch.schema.names if name in _DELAYS])


def half_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return admitted rows as halves: promises without an instant."""
    return _with_column(rows, "kind", pa.array(np.full(rows.num_rows, Kind.PROMISE, dtype=np.int8)))


def ending_rows(rows: pa.RecordBatch, halves: pa.RecordBatch) -> pa.RecordBatch:
    """Return admitted rows as what publishes these halves (READ_SCHEMA): those for now are their releases."""
    kinds = rows.column("kind").to_numpy()
    is_now = kinds == Kind.MESSAGE
    accepted = pa.array(halves.column("store_ms").to_numpy(), mask=~is_now)
    rows = _with_column(rows, "kind", pa.array(np.where(is_now, np.int8(Kind.RELEASE), kinds)))
    return _with_column(_with_column(rows, "accepted_ms", accepted), "source_seq", halves.column("seq"))


def _with_column(rows: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    at = LOG_SCHEMA.get_field_index(name)
    return rows.set_column(at, LOG_SCHEMA.field(at), values)


def load(
    reader: LogReader, known: Iterable[tuple[int, int]], opened: Int64Array, ended: Int64Array
) -> list[Half]:
    """Recovery: the halves that are open by the checkpoint (`known`) and by the rows behind it. Blocking."""
    checks = dict(known)
    seqs = np.setdiff1d(np.union1d(np.array(list(checks), dtype=np.int64), opened), ended)
    found: list[Half] = []
    for at in range(0, len(seqs), _LOAD_ROWS):
        found += _halves(reader.take(seqs[at : at + _LOAD_ROWS]))
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
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        return limits.TRANSACTION_FIRST_CHECK_MS
    return min(int(text) * limits.SECOND_MS, limits.DAY_MS)


def _messages(rows: pa.RecordBatch, delays: list[Mapping[str, int]]) -> pa.RecordBatch:
    """What is sent for halves that are committed: their rows, and their delays."""
    sys_flag = rows.column("sys_flag").fill_null(0).to_numpy() & ~TRANSACTION_BITS | COMMITTED_BIT
    columns = {name: rows.column(name) for name in _KEPT}
    columns["sys_flag"] = pa.array(sys_flag.astype(np.int32))
    for name in sorted({name for delay in delays for name in delay}):
        columns[name] = pa.array([delay.get(name) for delay in delays], SEND_COLUMNS[name])
    return pa.RecordBatch.from_pydict(columns)


def _look_up(reader: LogReader, key_index: KeyIndex, seq: int, group: str) -> Outcome:
    """What became of a half that is not open (reader thread)."""
    if not reader.first_seq <= seq < reader.next_seq:
        return Outcome.NOT_FOUND
    try:
        [half] = reader.take(_seqs(seq)).select(["kind", "due_ms", "unique_key", "properties"]).to_pylist()
    except OutOfRange:
        return Outcome.NOT_FOUND
    is_half = half["kind"] == Kind.PROMISE and half["due_ms"] is None
    if not is_half or decode_properties(half["properties"] or "").get(GROUP, "") != group:
        return Outcome.NOT_FOUND
    if half["unique_key"] is not None:
        seqs = key_index.find(hash_text(pa.array([half["unique_key"]], pa.string())))
        for row in reader.take(seqs).select(["kind", "source_seq"]).to_pylist():
            if row["source_seq"] == seq:
                return Outcome.ROLLED_BACK if row["kind"] == Kind.CANCEL else Outcome.COMMITTED
    return Outcome.ENDED


def _seqs(seq: int) -> Int64Array:
    return np.array([seq], dtype=np.int64)
