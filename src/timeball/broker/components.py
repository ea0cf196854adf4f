"""The components of a broker, as the composition root builds them, and the way off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from timeball.broker.rates import Rates
from timeball.broker.registry.campaigns import Campaigns
from timeball.broker.registry.groups import Groups, RequestModes
from timeball.broker.registry.idempotency import IdempotencyKeys
from timeball.broker.registry.leases import ReceiptSecret, SavedLeases
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.broker.registry.offsets import Offsets
from timeball.broker.registry.topics import Topics
from timeball.broker.tables.attach import AttachState
from timeball.clock import SchedulerClock
from timeball.config import Settings
from timeball.files import Files
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.writer import LogWriter
from timeball.schedule.backlog import Backlog
from timeball.schedule.delay_levels.backlog import DelayLevels
from timeball.schedule.hour_log.backlog import HourLog
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler
from timeball.table.catalog import Catalog

P = ParamSpec("P")
R = TypeVar("R")


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
    campaigns: Campaigns
    idempotency_keys: IdempotencyKeys
    scheduler: Scheduler
    backlog: Backlog  # keeps promises that are sent for an instant: the strategy of the settings
    hour_log: HourLog  # keeps the pending table, under every strategy
    levels: DelayLevels
    outcomes: Outcomes  # of all promises
    catalog: Catalog  # the table's Delta log: a cache of the live files
    ledger: AttachState  # attaches and reservations, as TABLE rows say
    reader_thread: Executor  # one thread: reads log and files, and alone changes the Delta log
    background: Executor  # one thread: compaction and rewriting, which may take seconds
    on_failure: Callable[[BaseException], None]  # stops the broker: memory may be ahead of the files
    rates: Rates = field(default_factory=Rates)
    revoking: Gate = field(default_factory=Gate)  # open to all that end or move promises, closed by a resume

    @property
    def compacts(self) -> bool:
        """Return whether promises wait in the log's tail, to be moved to the pending table."""
        return self.backlog is self.hour_log


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
