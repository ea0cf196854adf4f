"""What the composition root hands to the broker, and the way off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from timeball.broker.consuming.in_flight import InFlight
from timeball.broker.rates import Rates
from timeball.broker.registry.groups import Groups
from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.new_topics import NewTopics
from timeball.broker.registry.offsets import Offsets
from timeball.broker.registry.receipt_secret import ReceiptSecret
from timeball.broker.registry.request_modes import RequestModes
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


class Tables:
    """What the META rows of the log are kept in; all of them before recovery reads the first one."""

    def __init__(self, files: Files, queues_per_topic: int) -> None:
        self.meta = meta = MetaLog()
        self.topics = Topics(files, meta, queues_per_topic=queues_per_topic)
        self.offsets, self.groups, self.request_modes = Offsets(meta), Groups(meta), RequestModes(meta)
        self.receipt_secret, self.in_flight = ReceiptSecret(meta), InFlight(meta)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the composition root hands to the broker."""

    settings: Settings
    files: Files
    clock: SchedulerClock
    writer: LogWriter
    reader: LogReader
    key_index: KeyIndex
    topics: Topics
    new_topics: NewTopics
    meta: MetaLog
    offsets: Offsets
    groups: Groups
    request_modes: RequestModes
    receipt_secret: ReceiptSecret
    in_flight: InFlight
    scheduler: Scheduler
    backlog: Backlog  # keeps what is sent for an instant: the strategy of the settings
    hour_log: HourLog  # keeps the pending table, whatever keeps what is sent
    levels: DelayLevels
    outcomes: Outcomes  # of all promises
    catalog: Catalog
    ledger: AttachState
    reader_thread: Executor
    background: Executor
    on_failure: Callable[[BaseException], None]
    rates: Rates = field(default_factory=Rates)

    @property
    def compacts(self) -> bool:
        """Return whether what is sent waits in the log's tail, to be moved to the pending table."""
        return self.backlog is self.hour_log


async def in_thread(thread: Executor, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run something that touches the disk in one of the broker's threads."""
    return await asyncio.get_running_loop().run_in_executor(thread, partial(call, *args, **kwargs))


@contextmanager
def undone(*steps: Callable[[], None]) -> Iterator[None]:
    """Take these steps when the body fails: a full disk is no reason to believe that something is saved."""
    try:
        yield
    except BaseException:  # also a caller who has gone away
        for step in steps:
            step()
        raise
