"""The components of a broker, as the composition root builds them, and the way off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import pyarrow as pa

from timeball import limits
from timeball.broker.few_sends import Sends, as_batch
from timeball.broker.rates import Rates
from timeball.broker.registry.campaigns import Campaigns
from timeball.broker.registry.dead_letters import RepeatedDeadLetters, ResolvedDeadLetters
from timeball.broker.registry.drains import Drains
from timeball.broker.registry.epochs import PREFIX, EpochFacts
from timeball.broker.registry.expired import ExpiredMessages
from timeball.broker.registry.groups import Groups, RequestModes
from timeball.broker.registry.idempotency import IdempotencyKeys
from timeball.broker.registry.lease_counts import LeaseCounts
from timeball.broker.registry.leases import ReceiptSecret, SavedLeases
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.broker.registry.offsets import Offsets
from timeball.broker.registry.push_subscriptions import PushSubscriptions
from timeball.broker.registry.source_positions import SourcePositions
from timeball.broker.registry.topics import Topics
from timeball.broker.tables.attach import AttachState
from timeball.clock import SchedulerClock
from timeball.config import Settings
from timeball.files import Files
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.replication import FileReplication
from timeball.log.writer import LogWriter
from timeball.message import SendBatch
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

# The hour that a store may be away, and time to fetch what comes into it.
FETCH_AHEAD_MS = limits.HOUR_MS + 10 * limits.MINUTE_MS

P = ParamSpec("P")
R = TypeVar("R")
Accepting = tuple[R, "asyncio.Future[int]"]  # the answer to a send, and when it is durable


class Gate:
    """Holds requests that end or move promises apart from a resume. Belongs to the event loop.

    Such a request looks a promise up, waits for the disk, and decides by the instant and number that it has found. A
    resume gives promises other instants, so at that moment no request may be between look and decision. Passing the
    gate while no one is alone inside does not give up the loop.
    """

    def __init__(self) -> None:
        self._alone = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Be inside with others."""
        async with self._alone:
            # Behind the lock: while one waits to be alone no other comes in, so its wait ends.
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
        """Be inside alone: others have left, and wait until this has."""
        async with self._alone:
            await self._empty.wait()
            yield


class Tracing(Protocol):
    """Spans of what the broker does with messages (monitoring/traces.py). Belongs to the event loop."""

    counts: dict[str, int]  # spans by outcome: recorded, exported, failed
    left_out: dict[str, int]  # messages with a context that got no span, by operation

    def send(self, batch: SendBatch, accept: Callable[[SendBatch], Accepting[R]]) -> Accepting[R]:
        """Accept a batch, with a span for each message that is traced; some are given a context before."""

    def released(self, promises: pa.RecordBatch, now_ms: int) -> None:
        """Record the releases of READ_SCHEMA promises that are durable now."""

    def received(self, group: str, rows: pa.RecordBatch, receipts: Sequence[tuple[object, ...]]) -> None:
        """Record the receipts of READ_SCHEMA rows by a group."""

    def now_ns(self) -> int:
        """Return the instant from which `settled` counts."""

    def settled(
        self, operation: str, receipts: Sequence[tuple[object, ...]], valid: Sequence[bool], begin_ns: int
    ) -> None:
        """Record the ends of leases by their receipts."""

    async def close(self) -> None:
        """Export the rest, if that can be done soon."""


class Tables:
    """The tables that META rows are kept in; all are registered before recovery reads the first row."""

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
    """The parts of one broker; built by node.py, and never replaced."""

    settings: Settings
    files: Files
    clock: SchedulerClock  # guarded: a jump ahead is on probation (clock.py)
    writer: LogWriter
    reader: LogReader
    key_index: KeyIndex
    topics: Topics
    meta: MetaLog  # writes the rows that topics, groups, offsets and modes are
    offsets: Offsets
    groups: Groups
    request_modes: RequestModes
    receipt_secret: ReceiptSecret
    in_flight: MetaTable[SavedLeases]  # leases that the last orderly stop has saved
    lease_counts: LeaseCounts  # of leases that the log keeps
    campaigns: Campaigns
    idempotency_keys: IdempotencyKeys
    source_positions: SourcePositions
    push_subscriptions: PushSubscriptions
    resolved_dead_letters: ResolvedDeadLetters
    repeated_dead_letters: RepeatedDeadLetters  # which retention has removed from their queues
    expired: ExpiredMessages  # before a group read them
    epochs: MetaTable[EpochFacts]
    drains: Drains  # what waits is handed over to another group of the cluster, or adopted from one
    scheduler: Scheduler
    backlog: Backlog  # keeps promises that are sent for an instant: the strategy of the settings
    hour_log: HourLog  # keeps the pending table, under every strategy
    levels: DelayLevels
    outcomes: Outcomes  # of all promises
    file_keys: TableKeys  # rows of the live files by id, key and number
    catalog: Catalog  # the table's Delta log: a cache of the live files
    ledger: AttachState  # attaches and reservations, as TABLE rows say
    reader_thread: Executor  # one thread: reads log and files for releases and consumers
    table_thread: Executor  # one thread: changes the Delta log; the reader thread, but for an object store
    lookup_thread: Executor  # one thread: finds promises in log and files, beside the reader thread
    background: Executor  # one thread: compaction and rewriting, which may take seconds
    on_failure: Callable[[BaseException], None]  # stops the broker: memory may be ahead of the files
    file_replication: FileReplication | None = None  # None: this broker is alone
    cache: FileCache | None = None  # of a table in an object store; None: its files are in the data folder
    traces: Tracing | None = None  # None: off
    rates: Rates = field(default_factory=Rates)
    revoking: Gate = field(default_factory=Gate)  # open to all that end or move promises, closed by a resume

    @property
    def compacts(self) -> bool:
        """Return whether promises wait in the log's tail, to be moved to the pending table."""
        return self.backlog is self.hour_log

    @property
    def data_files(self) -> DataFiles:
        """Return the source of any data file, for threads that may wait for an object store."""
        return self.catalog.data if self.cache is None else Ranged(self.cache)

    @property
    def whole_files(self) -> DataFiles:
        """Return the same for what reads all of them."""
        return self.catalog.data if self.cache is None else self.cache

    @property
    def file_thread(self) -> Executor:
        """Return the thread for reads of any data file that a request needs: releases must not wait for a store."""
        return self.reader_thread if self.cache is None else self.lookup_thread

    def soon_ms(self) -> int:
        """Return the instant up to which files of a table in an object store are fetched ahead."""
        return self.clock.now_ms() + FETCH_AHEAD_MS + ahead_ms_of(self.settings)

    def table_status(self) -> dict[str, object]:
        """Return what `TableStatus` says."""
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
        """Ask the object store of the pending table no more, if there is one; a request without an answer is left."""
        if self.cache is not None:
            # Answers that are on their way are waited for, a second at most.
            await asyncio.to_thread(self.cache.leave_store)

    @property
    def waiting_messages(self) -> int:
        """Return how many scheduled messages wait: none that was cancelled, and no lease."""
        # Never below nought, although a lease counts a moment longer than its promise (delivery.py).
        return max(0, self.outcomes.waiting_rows - self.lease_counts.waiting_rows)

    def traced(
        self, accept: Callable[Concatenate[Sends, P], Accepting[R]]
    ) -> Callable[Concatenate[Sends, P], Accepting[R]]:
        """Return a verb that accepts messages as one that traces them; itself when tracing is off."""
        traces = self.traces
        if traces is None:
            return accept

        def accept_traced(sends: Sends, /, *args: P.args, **kwargs: P.kwargs) -> Accepting[R]:
            return traces.send(as_batch(sends), lambda rows: accept(rows, *args, **kwargs))

        return accept_traced


def in_thread(thread: Executor, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
    """Run something that touches the disk in one of the broker's threads."""
    return asyncio.get_running_loop().run_in_executor(thread, partial(call, *args, **kwargs))


@contextmanager
def rollback_on_error(*steps: Callable[[], None]) -> Iterator[None]:
    """Take these steps when the body fails: a full disk is no reason to believe that something is saved."""
    try:
        yield
    except BaseException:  # also a caller who has gone away
        for step in steps:
            step()
        raise
