"""The components of a broker, as node.py builds them, and helpers to run blocking calls in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import pyarrow as pa

from timeball.broker.accepting.small_batch import Sends, as_batch
from timeball.broker.registry.attach import AttachState
from timeball.broker.registry.campaigns import Campaigns
from timeball.broker.registry.dead_letters import RepeatedDeadLetters, ResolvedDeadLetters
from timeball.broker.registry.drains import Drains
from timeball.broker.registry.expired import ExpiredMessages
from timeball.broker.registry.groups import PREFIX, EpochFacts, Groups, RequestModes
from timeball.broker.registry.idempotency import IdempotencyKeys
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.broker.registry.leases import ReceiptSecret, SavedLeases
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.broker.registry.offsets import Offsets
from timeball.broker.registry.push_subscriptions import PushSubscriptions
from timeball.broker.registry.rates import Rates
from timeball.broker.registry.source_positions import SourcePositions
from timeball.broker.registry.topics import Topics
from timeball.io.clock import SchedulerClock
from timeball.io.files import Files
from timeball.log.disk_thread import FileReplication
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.config import Settings
from timeball.model.message import SendBatch
from timeball.schedule.backlog import Backlog
from timeball.schedule.delay_levels.backlog import DelayLevels
from timeball.schedule.hour_log.backlog import HourLog
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler
from timeball.schedule.strategies import ahead_ms_of
from timeball.table.catalog import Catalog
from timeball.table.data_file import DataFiles
from timeball.table.file_cache import FileCache, Ranged
from timeball.table.key_index import TableKeys

# An object store may be unreachable for one hour. The other 10 minutes are the time to fetch files ahead.
FETCH_AHEAD_MS = limits.HOUR_MS + 10 * limits.MINUTE_MS

P = ParamSpec("P")
R = TypeVar("R")
# The answer to a send, and a future that is done when it is durable.
Accepting = tuple[R, "asyncio.Future[int]"]


class Gate:
    """Keeps requests that cancel or move scheduled messages apart from a resume. Belongs to the event loop.

    Such a request finds a message, waits for the disk, and then decides by the due time and number that it found. A
    resume changes due times, so no request may be between these steps at that moment. Passing the gate does not give up
    the loop, unless a resume is inside alone or waits for it.
    """

    def __init__(self) -> None:
        self._alone = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Be inside together with others."""
        async with self._alone:
            # Inside the lock: while a caller of `alone` waits, no other can enter, so its wait ends.
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Be inside alone. Waits until the others have left, and keeps new ones out until the end."""
        async with self._alone:
            await self._empty.wait()
            yield


class Tracing(Protocol):
    """Spans of the broker's operations on messages (monitoring/traces.py). Belongs to the event loop."""

    counts: dict[str, int]  # spans by outcome: recorded, exported, failed
    left_out: dict[str, int]  # messages that have a trace context but got no span, by operation

    def send(self, batch: SendBatch, accept: Callable[[SendBatch], Accepting[R]]) -> Accepting[R]:
        """Accept a batch, and record a span for each traced message. Some messages first receive a trace context."""

    def released(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> None:
        """Record the releases of READ_SCHEMA rows that are durable now."""

    def received(self, group: str, rows: pa.RecordBatch, receipts: Sequence[tuple[object, ...]]) -> None:
        """Record that a group received READ_SCHEMA rows."""

    def now_ns(self) -> int:
        """Read the time in ns, for `begin_ns` of `settled`."""

    def settled(
        self, operation: str, receipts: Sequence[tuple[object, ...]], valid: Sequence[bool], begin_ns: int
    ) -> None:
        """Record the ends of leases, given by their receipts."""

    async def close(self) -> None:
        """Export the remaining spans, if that is possible soon."""


class Tables:
    """The tables that are stored as META rows. All are registered before recovery reads the first row."""

    def __init__(self, files: Files, queues_per_topic: int) -> None:
        self.meta = meta = MetaLog()
        self.topics = Topics(files, meta, queues_per_topic=queues_per_topic)
        self.offsets, self.groups, self.request_modes = Offsets(meta), Groups(meta), RequestModes(meta)
        self.receipt_secret = ReceiptSecret(meta)
        self.in_flight = MetaTable(meta, "in_flight", SavedLeases)
        self.campaigns = Campaigns(meta)
        self.idempotency_keys = IdempotencyKeys(meta)
        self.source_positions = SourcePositions(meta)
        self.push_subscriptions = PushSubscriptions(meta)
        self.resolved_dead_letters = ResolvedDeadLetters(meta)
        self.repeated_dead_letters = RepeatedDeadLetters(meta)
        self.expired = ExpiredMessages(meta)
        self.epochs = MetaTable(meta, PREFIX, EpochFacts)
        self.drains = Drains(meta)


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of one broker. node.py builds them, and they are never replaced."""

    settings: Settings
    files: Files
    clock: SchedulerClock  # guarded against jumps: a jump ahead is first on probation (clock.py)
    writer: LogWriter
    reader: LogReader
    key_index: KeyIndex
    topics: Topics
    meta: MetaLog  # writes META rows: topics, groups, offsets, request modes
    offsets: Offsets
    groups: Groups
    request_modes: RequestModes
    receipt_secret: ReceiptSecret
    in_flight: MetaTable[SavedLeases]  # leases saved by the last orderly stop
    lease_counts: LeaseCounts  # counts of leases that are rows of the log
    campaigns: Campaigns
    idempotency_keys: IdempotencyKeys
    source_positions: SourcePositions
    push_subscriptions: PushSubscriptions
    resolved_dead_letters: ResolvedDeadLetters
    repeated_dead_letters: RepeatedDeadLetters  # dead letters whose rows in the queue retention has removed
    expired: ExpiredMessages  # counts of messages that expired before a group read them
    epochs: MetaTable[EpochFacts]
    drains: Drains  # states of drains: to another group of the cluster, or from one
    scheduler: Scheduler
    backlog: Backlog  # stores messages sent with a due time: the configured strategy
    hour_log: HourLog  # serves the pending table, under every strategy
    levels: DelayLevels
    outcomes: Outcomes  # outcomes of all scheduled messages
    file_keys: TableKeys  # rows of the live files by id, key and number
    catalog: Catalog  # the table's Delta log: a cache of the live files
    ledger: AttachState  # attaches and reservations, from TABLE rows
    reader_thread: Executor  # one thread: reads log and files for releases and consumers
    # One thread: changes the Delta log; the same as the reader thread, except for an object store.
    table_thread: Executor
    lookup_thread: Executor  # one thread: finds scheduled messages in log and files
    background: Executor  # one thread: compaction and rewriting, which may take seconds
    on_failure: Callable[[BaseException], None]  # stops the broker: memory may be ahead of the files
    file_replication: FileReplication | None = None  # None: this broker has no replicas
    # Cache of a table in an object store; None: the files are in the data folder.
    cache: FileCache | None = None
    traces: Tracing | None = None  # None: off
    rates: Rates = field(default_factory=Rates)
    # Open to requests that cancel or move scheduled messages, closed by a resume.
    revoking: Gate = field(default_factory=Gate)

    @property
    def compacts(self) -> bool:
        """True if scheduled messages wait in the log's tail until compaction moves them to the pending table."""
        return self.backlog is self.hour_log

    @property
    def data_files(self) -> DataFiles:
        """The source of any data file, for threads that may wait for an object store."""
        return self.catalog.data if self.cache is None else Ranged(self.cache)

    @property
    def whole_files(self) -> DataFiles:
        """The same for callers that read whole files."""
        return self.catalog.data if self.cache is None else self.cache

    @property
    def file_thread(self) -> Executor:
        """The thread for reads of data files that a request needs. Releases must not wait for an object store."""
        return self.reader_thread if self.cache is None else self.lookup_thread

    def soon_ms(self) -> int:
        """Compute the due time in ms up to which files of a table in an object store are fetched ahead."""
        return self.clock.now_ms() + FETCH_AHEAD_MS + ahead_ms_of(self.settings)

    def table_status(self) -> dict[str, object]:
        """Build the figures of `TableStatus`."""
        foreign = self.catalog.foreign
        found: dict[str, object] = {
            "uri": self.catalog.uri,
            "version": self.catalog.version,
            "foreign_commits": foreign.commits,
            "last_foreign_commit": foreign.last,
            "lost_files": len(foreign.missing),
            "lost_rows": sum(entry.rows for entry in foreign.missing),
        }
        if self.cache is not None:
            found |= {
                "problem": self.cache.problem,
                "cached_bytes": self.cache.size_bytes,
                "missing_files": self.cache.missing_files,
            }
        return found

    async def leave_store(self) -> None:
        """Stop using the object store of the pending table, if there is one. Abandons requests without an answer."""
        if self.cache is not None:
            # Waits for answers that are on their way, at most one second.
            await asyncio.to_thread(self.cache.leave_store)

    @property
    def waiting_messages(self) -> int:
        """The number of pending messages, without cancelled ones and leases."""
        # Clamped at 0, because a lease is counted slightly longer than its message (delivery.py).
        return max(0, self.outcomes.waiting_rows - self.lease_counts.waiting_rows)

    def traced(
        self, accept: Callable[Concatenate[Sends, P], Accepting[R]]
    ) -> Callable[Concatenate[Sends, P], Accepting[R]]:
        """Wrap a function that accepts messages, so that it traces them. If tracing is off, return it unchanged."""
        traces = self.traces
        if traces is None:
            return accept

        def accept_traced(sends: Sends, /, *args: P.args, **kwargs: P.kwargs) -> Accepting[R]:
            return traces.send(as_batch(sends), lambda rows: accept(rows, *args, **kwargs))

        return accept_traced


def in_thread(thread: Executor, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
    """Run a blocking call in one of the broker's threads."""
    return asyncio.get_running_loop().run_in_executor(thread, partial(call, *args, **kwargs))


@contextmanager
def rollback_on_error(*steps: Callable[[], None]) -> Iterator[None]:
    """Run these steps if the body fails. A full disk must not leave memory with unsaved state."""
    try:
        yield
    except BaseException:  # also the cancellation by a caller that has gone away
        for step in steps:
            step()
        raise
