"""The composition root: builds a broker's parts from the settings, starts them in order, and stops them in reverse.

Start: lock the folder, read the checkpoint, open the log, rebuild the caches, open the ports. Nothing is acknowledged
or released before the caches agree with the log. Stop: close the ports, let the log finish, save a checkpoint. A
storage failure stops the node, and `run_until_signal` raises it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from timeball import __version__
from timeball.broker.accepting.durations import find_durations
from timeball.broker.accepting.tracing import Tracing
from timeball.broker.maintenance import Maintenance
from timeball.broker.recovery import Applying, Recovered, apply_log, starting_point
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topics import Topics
from timeball.broker.service import Broker
from timeball.edges.http.recovering import RecoveryResponder
from timeball.edges.shared.shared_limits import IdleConnections
from timeball.io.clock import Clock, ManualClock, SchedulerClock, SystemClock
from timeball.io.files import RESERVE_OF_LIBRARIES, Files, RealFiles, lent, open_files_max
from timeball.io.security import OPEN, Security
from timeball.io.threads import LoopLag, Threads, in_thread, watch_stop_signals
from timeball.log import checkpoint
from timeball.log.disk_thread import Disk, DiskThread, Leading, lead_alone
from timeball.log.format import FORMAT_VERSION
from timeball.log.key_index import KeyIndex
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.log.recovery import OpenedLog, open_log
from timeball.log.writer import CommitLog, LogWriter
from timeball.model import time_parsing
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.config import Settings
from timeball.model.errors import SetupError, not_installed_text
from timeball.model.message import SCHEDULE_TOPIC
from timeball.monitoring.figures import ReplicaReaders
from timeball.node.data_folder import check_folder, write_format
from timeball.schedule import strategies
from timeball.schedule.backlog import Backlog
from timeball.schedule.delay_levels import DelayLevels, LevelsState, LevelTable
from timeball.schedule.durations import Durations
from timeball.schedule.hour_log import HourLog
from timeball.schedule.loaded import ExternalDelivery, LoadBounds
from timeball.schedule.locations import NOTHING
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler, Scheduling
from timeball.table.data_file import DataFiles
from timeball.table.key_index import TableKeys
from timeball.table.pending_table import PendingTable, open_table

if TYPE_CHECKING:
    from timeball.edges.edges import Edges
    from timeball.edges.remoting.codec.implementation import Codec
    from timeball.monitoring.metrics import Metrics

logger = logging.getLogger(__name__)


def open_traces(clock: Clock, version: str) -> Tracing:
    """Create the tracing that makes and exports spans.

    Raises SetupError without the extra `otel`, or if the environment selects another protocol than http/protobuf.
    """
    try:
        from timeball.monitoring.traces import Traces
    except ModuleNotFoundError as error:
        raise SetupError(f"--traces: {not_installed_text(error.name, 'otel')}") from error
    return Traces(clock, version)


SWITCH_INTERVAL_S = 0.000_5  # the longest time for which a busy thread holds the interpreter

Hot = tuple[OpenedLog, Applying]  # a follower's open log, and its caches with all rows of this log applied


def _create_clock(settings: Settings) -> Clock:
    """Create the clock that the settings name. A manual clock begins at the real time."""
    system = SystemClock()
    if settings.clock == "system":
        return system
    return ManualClock(system.wall_ms(), system.boot_ms(), system.monotonic_ns() // 1_000_000)


def _build_outcomes(recovered: Recovered, tables: Tables) -> Outcomes:
    """Build the outcomes of all messages, and add the recovered wake-ups to `tables`. Runs in any thread."""
    outcomes = Outcomes()
    outcomes.restore(recovered.settled, recovered.cursor, waiting_rows=recovered.waiting_rows)
    outcomes.moved.restore(recovered.moved)
    tables.selections.woken.add(*recovered.woken)
    for name, facts in tables.campaigns.all().items():
        if facts.held_from_ms is not None:
            outcomes.holds.add(name, facts.ranges, facts.held_from_ms)
    return outcomes


class Node:
    """One broker process.

    `files` and `clock` are arguments so that tests can simulate power cuts and set the clock.
    """

    def __init__(
        self, settings: Settings, clock: Clock | None = None, files: Files | None = None,
        leading: Leading | None = None, replica: ReplicaReaders | None = None,
        load_bounds: LoadBounds = LoadBounds(),  # noqa: B008  # frozen, so it can be shared
        codec: Codec | None = None, executor: Disk | None = None,
    ) -> None:  # fmt: skip
        """Prepare the parts that need no log.

        Args:
            settings: The settings of the broker.
            clock: The clock. The default is the one that the settings name.
            files: The data folder, locked by the caller. The default is that of the settings, which `start` locks.
            leading: In a cluster, the parts of the replica that the broker uses.
            replica: In a cluster, the functions that read the state of the cluster.
            load_bounds: The limits of the scheduled messages that the schedule loads before they are due.
            codec: RocketMQ's codec. The default is the compiled one, if it is installed.
            executor: Runs all blocking work. By default, threads do.
        """
        self.settings, self._leading, self._replica = settings, leading, replica
        self._load_bounds, self._codec = load_bounds, codec
        self.clock = clock or _create_clock(settings)
        self._real_files = RealFiles(settings.data) if files is None else None
        data_folder = files or self._real_files
        assert data_folder is not None
        self.files: Files = data_folder
        # In a cluster, a function that builds a GroupedBroker, which also asks other groups.
        self.build_broker: Callable[..., Broker] = Broker
        self.broker: Broker
        self.maintenance: Maintenance
        self.security = OPEN
        self.edges: Edges | None = None
        self._traces: Tracing | None = None
        # In a cluster, a function that returns further fields of the status.
        self.cluster_status: Callable[[], dict[str, object]] = dict
        reader, background, lookup = (
            executor or ThreadPoolExecutor(1, thread_name_prefix=name)
            for name in ("reader", "background", "lookup")
        )
        disk = leading.disk if leading else executor or DiskThread()
        self._threads: tuple[Disk, Executor, Executor, Executor] = disk, reader, background, lookup
        self._loop_lag = LoopLag(self.clock)
        self.metrics: Metrics
        self._level_table = LevelTable.parse(settings.delay_levels)
        self._ticker_tasks: list[asyncio.Task[None]] = []  # releases and other work that runs until the stop
        self._failed: asyncio.Future[None] | None = None  # receives the first error that stops the node

    @property
    def port(self) -> int:
        """The port for Flight clients."""
        return self._port("flight")

    @property
    def name_server_port(self) -> int:
        """The port for RocketMQ clients' look-ups of topics, or -1 if there is none."""
        return self._port("name_server")

    @property
    def remoting_port(self) -> int:
        """The port for RocketMQ clients' sends and pulls, or -1 if there is none."""
        return self._port("remoting")

    @property
    def grpc_port(self) -> int:
        """The port for RocketMQ 5's gRPC clients, or -1 if there is none."""
        return self._port("grpc")

    @property
    def http_port(self) -> int:
        """The port for HTTP clients, or -1 if there is none."""
        return self._port("http")

    def _port(self, name: str) -> int:
        return self.edges.ports[name] if self.edges is not None else -1

    async def start(self, *, listen: bool = True, hot: Hot | None = None) -> None:
        """Recover, and serve clients unless `listen` is False.

        `hot`: the log and the caches of a follower that becomes the leader. Raises SetupError, Corrupt and OverLimit.
        After an error, the ports are closed and the folder is not locked by this node.
        """
        # By default, a busy thread may hold the interpreter for 5 ms, and no message may be released later than that.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._failed = asyncio.get_running_loop().create_future()
        self.security = Security(self.settings)
        self._traces = open_traces(self.clock, __version__) if self.settings.traces else None
        if self._real_files is not None:
            check_folder(self._real_files)
            self._real_files.lock()
        recovering = RecoveryResponder(self.settings, self.security)
        try:
            if listen:
                await recovering.start()
            await self._build(hot)
            # Before the first release: a message whose due time has passed may be due later by new rules of its zone.
            await self.broker.zone_updates.run()
            # Releases begin before the ports open: importing the code for clients takes longer than reading the log.
            self._run_until_stop(self.broker.ticker.run())
            self._run_until_stop(self._loop_lag.run())
            self.metrics = await in_thread(self._threads[2], self._create_metrics)
            if listen:
                await in_thread(self._threads[2], import_module, "timeball.edges.edges")
                # pyarrow imports it with the first column that it makes, which takes 12 ms of the event loop.
                await in_thread(self._threads[2], import_module, "numpy.ma")
            await self.broker.mover.follow()
            if listen:
                await self._listen(recovering)
        except BaseException:  # even a cancellation must not leave the folder locked
            recovering.close()
            if self._ticker_tasks:  # releases have begun already
                await self._end_tasks()
                await self._end_writes()
            if self._real_files is not None:
                self._real_files.unlock()
            raise
        self.maintenance.start()

    def _run_until_stop(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task, which the stop of the node cancels. An error of the task stops the node."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._check_ended)
        self._ticker_tasks.append(task)

    async def _listen(self, recovering: RecoveryResponder) -> None:
        """Open the ports of the edges, in place of the responder that has answered during the recovery."""
        from timeball.edges.edges import Edges

        edges = Edges(self.broker, self.metrics, self.status, self.security, self._codec)
        await edges.start(recovering)
        self.edges = edges
        self._run_until_stop(self.broker.transaction_checks.run())
        self._run_until_stop(IdleConnections(open_files_max(), set(edges.ports.values())).run())

    async def _end_tasks(self) -> None:
        """Cancel the tasks that run until the stop, and wait for them."""
        for task in self._ticker_tasks:
            task.cancel()
        await asyncio.gather(*self._ticker_tasks, return_exceptions=True)

    async def _end_work(self) -> None:
        """End releases, deliveries and listings. Nothing new is written to the log by them then."""
        await self._end_tasks()
        await self.broker.consuming.close()
        await self.broker.pacing.close()
        self.broker.listing.close()

    async def _end_writes(self) -> None:
        """Close the schedule, and wait until the log has stored all rows, unless it has failed."""
        await self.broker.scheduling.scheduler.close()
        if self.broker.log.writer.failed is None:
            await self.broker.log.writer.flushed()

    async def _build(self, hot: Hot | None) -> None:
        """Rebuild the caches from the log, and build the broker from them.

        With `hot`, the caches of a follower are used, and the log is not applied again.
        """
        settings, files, clock = self.settings, self.files, SchedulerClock(self.clock)
        _, reader_thread, background, lookup = self._threads
        write_format(files)
        opened, applying, state = await self._apply_log() if hot is None else (*hot, None)
        newest_ms = max(segment.newest_append_ms for segment in opened.segments.all)
        if self.settings.clock == "manual" and isinstance(self.clock, ManualClock):
            # A previous run may have advanced its clock far beyond the real time.
            self.clock.advance(max(0, newest_ms - self.clock.wall_ms()))
        reader, tables = applying.reader, applying.tables
        catalog, cache = await in_thread(
            reader_thread, open_table, settings.table, files, settings.table_cache_bytes,
            is_known=applying.ledger.attach_seq > 0,
        )  # fmt: skip
        recovered = await in_thread(reader_thread, applying.finish, catalog, clock.now_ms())
        # In a thread, because a sort of ten million settled messages would hold the event loop for a second.
        outcomes = await in_thread(reader_thread, _build_outcomes, recovered, tables)
        is_local, ahead_ms = cache.is_local if cache else None, self._load_bounds.ahead_ms
        data: DataFiles = files if cache else catalog.live_files
        hour_log = HourLog(data, reader, reader_thread, recovered.files, ahead_ms=ahead_ms, is_local=is_local)
        levels = self._create_levels(reader, tables.topics, outcomes)
        backlog = strategies.build(settings, files, reader, reader_thread, outcomes, ahead_ms) or hour_log
        writer = self._create_writer(opened)
        durations = Durations(outcomes, lambda: writer.next_seq, clock, find_durations)
        durations.begin(newest_ms, applying.ledger.watermark)
        tables.meta.open(writer.append, clock.now_ms)
        self.broker = self.build_broker(
            settings=settings, files=files, clock=clock,
            log=CommitLog(writer, reader, KeyIndex(files, opened.segments, reader)),
            tables=tables, redeliveries=recovered.redeliveries, attach_state=applying.ledger,
            scheduling=Scheduling(
                self._create_scheduler(reader, outcomes, backlog, hour_log, levels, durations),
                backlog, hour_log, levels, outcomes,
            ),
            pending_table=PendingTable(catalog, TableKeys(files, cache, catalog.live_files), cache),
            threads=Threads(
                reader=reader_thread, lookup=lookup, background=background,
                table=cache.table_thread if cache else reader_thread, files=lookup if cache else reader_thread,
            ),
            traces=self._traces, file_replication=self._leading.files if self._leading else None,
            confirm_lead=self._leading.confirm_lead if self._leading else lead_alone,
            on_failure=self._fail, scheduled_since_watermark=recovered.scheduled_since_watermark,
            halves=recovered.halves,
        )  # fmt: skip
        self.broker.mover.mark_behind_log(recovered.bring_up)
        await self._restore(recovered, state if recovered.resumes else None)
        self.maintenance = Maintenance(self.broker, recovered.snapshot_seq, recovered.log_from_seq)

    def _create_metrics(self) -> Metrics:
        """Create the metrics. Runs in a thread, because the import of Prometheus' client takes long."""
        from timeball.monitoring.metrics import Metrics

        return Metrics(
            self.broker, __version__, self._loop_lag, self.files.free_bytes,
            lambda: self.edges.connections if self.edges is not None else {}, self._replica,
        )  # fmt: skip

    async def _restore(self, recovered: Recovered, state: msgspec.Struct | None) -> None:
        """Restore the schedule from the recovered messages. `state`: the saved state of the strategy, or None.

        With `hour_log`, messages whose rows another strategy has written anew are moved to the pending table.
        """
        waiting, now_ms = recovered.waiting, self.broker.clock.now_ms()
        restore = self.broker.scheduling.scheduler.restore
        restore(
            self.broker.scheduling.levels, LevelsState(recovered.levels), recovered.settled, NOTHING, now_ms
        )
        if not self.broker.scheduling.compacts:
            restore(self.broker.scheduling.hour_log, None, recovered.settled, NOTHING, now_ms)
        restore(self.broker.scheduling.backlog, state, recovered.settled, waiting, now_ms)
        if self.broker.scheduling.compacts and not np.array_equal(waiting.row_seq, waiting.seq):
            logger.info(
                "scheduled messages of another --strategy moved to the pending table scheduled=%d",
                len(waiting),
            )
            await self.broker.mover.follow()
            await self.broker.mover.move_from_other_strategy(waiting)

    async def _apply_log(self) -> tuple[OpenedLog, Applying, msgspec.Struct | None]:
        """Read the checkpoint, and apply the log from there on. Returns the open log, the caches and the state.

        The state is the one that the strategy saved with the checkpoint. None if there is none.
        """
        saved = checkpoint.load(self.files)
        opened = await self._open_log(saved)
        start = starting_point(saved, opened.segments)
        state = strategies.saved_state(self.settings, self.files, start, self._load_bounds.ahead_ms)
        tables = Tables(self.files, self.settings.queues_per_topic)
        applying = await in_thread(
            self._threads[1], apply_log, start, LogReader(opened.segments), tables, resumes=state is not None
        )
        return opened, applying, state

    async def _open_log(self, saved: checkpoint.Checkpoint | None) -> OpenedLog:
        """Open the log in the disk thread. `saved`: the checkpoint, which shows the rows that are durable."""
        return await in_thread(
            self._threads[0], open_log, self.files, segment_bytes=self.settings.segment_bytes,
            now_ms=self.clock.wall_ms(), durable_before_seq=saved.facts.seq if saved else 0,
        )  # fmt: skip

    def _create_scheduler(
        self,
        reader: LogReader,
        outcomes: Outcomes,
        backlog: Backlog,
        hour_log: HourLog,
        levels: DelayLevels,
        durations: Durations,
    ) -> Scheduler:
        """Create the scheduler over the backlogs of the strategy, of the pending table, and of the delay levels."""
        bounds = self._load_bounds
        return Scheduler(
            reader,
            self._threads[1],
            outcomes,
            list(dict.fromkeys((backlog, hour_log, levels))),
            table=hour_log,
            external=ExternalDelivery(bounds.grace_ms),
            ahead_ms=strategies.opens_ahead_ms(self.settings, bounds.ahead_ms),
            gather_bytes=bounds.gather_bytes,
            on_failure=self._fail,
            durations=durations,
        )

    def _create_levels(self, reader: LogReader, topics: Topics, outcomes: Outcomes) -> DelayLevels:
        """Create the backlog of RocketMQ's delay levels, whose messages are in the queues of SCHEDULE_TOPIC."""

        def indexes() -> list[QueueIndex]:
            topic = topics.find_topic(SCHEDULE_TOPIC)
            return [] if topic is None else [queue.index for queue in topic.queues]

        ahead_ms = self._load_bounds.ahead_ms
        return DelayLevels(reader, self._level_table, indexes, outcomes, ahead_ms=ahead_ms)

    def _create_writer(self, opened: OpenedLog) -> LogWriter:
        """Create the writer of the open log."""
        return LogWriter(
            self.files, opened.segments, opened.file, self.clock, self._threads[0],
            segment_bytes=self.settings.segment_bytes, durability=self.settings.durability,
            on_failure=self._fail, replication=self._leading.replication if self._leading else None,
        )  # fmt: skip

    async def stop(self) -> None:
        """Finish accepted requests, save a checkpoint, and unlock the folder."""
        await self.close_edges()
        await self.finish()

    async def close_edges(self) -> None:
        """Stop listening, and send the last answers."""
        closing = [] if self.edges is None else [self.edges.close()]
        await asyncio.gather(self.broker.pending_table.leave_store(), *closing)

    def abort_edges(self) -> None:
        """Stop listening, and shut all clients' connections down without answers."""
        if self.edges is not None:
            self.edges.abort()

    async def finish(self) -> None:
        """End all work, save a checkpoint, and unlock the folder. The broker then refuses requests.

        After a failure of the storage no checkpoint is saved.
        """
        await self._end_work()
        await self._end_writes()
        await self.maintenance.stop(saves=self._failed is None or not self._failed.done())
        self.broker.scheduling.backlog.close()  # its files are part of the last checkpoint
        await self.broker.log.writer.close()
        for thread in self._threads:
            thread.shutdown(wait=True)
        if (cache := self.broker.pending_table.cache) is not None:
            cache.close()
        if self._traces is not None:
            await self._traces.close()
        if self._real_files is not None:
            self._real_files.unlock()

    async def abandon(self) -> None:
        """End all work without saving anything, because another node leads now, and its log counts.

        On return, no thread of this broker uses its files.
        """
        self.broker.log.writer.abandon()
        self.abort_edges()
        await self._end_work()
        await self.broker.scheduling.scheduler.close()
        await self.maintenance.stop(saves=False)
        self.broker.scheduling.backlog.close()
        await self.broker.log.writer.close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            await asyncio.to_thread(thread.shutdown)  # may wait for a compaction, and the event loop must not
        if self.edges is not None:
            await self.edges.wait_aborted()
        if (cache := self.broker.pending_table.cache) is not None:
            cache.close()
        if self._traces is not None:
            await self._traces.close()

    async def run_until_signal(self, before_stop: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serve until SIGTERM or SIGINT, or until an error stops the node, and stop. Raises this error.

        SIGHUP reloads the access file. `before_stop` runs while the broker still answers, so that its clients can end
        in an orderly way.
        """
        assert self._failed is not None
        loop, stop_signal = asyncio.get_running_loop(), watch_stop_signals()
        if self.security.access is not None:
            loop.add_signal_handler(signal.SIGHUP, self.security.reload)
        try:
            await asyncio.wait([stop_signal, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if before_stop is not None:
                await before_stop()
        finally:
            await self.stop()
        if self._failed.done():
            self._failed.result()

    def when_failed(self, call: Callable[[BaseException], None]) -> None:
        """Register a function that is called with the error that stops the node, if one does."""

        def call_with_error(failed: asyncio.Future[None]) -> None:
            error = None if failed.cancelled() else failed.exception()
            if error is not None:
                call(error)

        assert self._failed is not None
        self._failed.add_done_callback(call_with_error)

    def status(self, caller: Caller = ANONYMOUS) -> dict[str, object]:
        """Collect the status of the broker and of the process (docs/flight.md), as `caller` may see it."""
        import psutil  # not at the top: it would delay the first release by 15 ms; edges/edges.py imports it, too

        replica: dict[str, object] = {}
        if self._replica is not None:
            replica["replica"] = msgspec.structs.asdict(self._replica.figures())
        with lent(RESERVE_OF_LIBRARIES):
            memory = psutil.Process().memory_info()
        return {
            "version": __version__,
            "format": FORMAT_VERSION,
            "tzdata": time_parsing.VERSION,
            "clock": "system" if self.broker.virtual_time is None else "manual",
            "pid": os.getpid(),
            "rss_bytes": memory.rss,
            # Without the mapped log, which belongs to the page cache.
            "anon_bytes": memory.rss - memory.shared,
            "disk": {
                "free_bytes": self.files.free_bytes(),
                "no_room": self.broker.log.writer.no_room,
            },
            "access": self.security.status(),
            "codec": self.edges.remoting.codec.name if self.edges is not None else "",
            "pulls": self.edges.remoting.pulls if self.edges is not None else {},
            **self.cluster_status(),
            **replica,
            **self.broker.status(caller),
        }

    def _fail(self, error: BaseException) -> None:
        """Stop the node because of an error. Only the first one counts."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _check_ended(self, task: asyncio.Task[None]) -> None:
        """Stop the node if a task has ended with an error."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)
