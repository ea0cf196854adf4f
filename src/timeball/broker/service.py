"""The facade of the broker: the operations that all edges call.

Each operation has a caller, and policy.py checks the caller's permissions. The broker itself acts as ANONYMOUS.

All code runs on one event loop, and a send takes no lock. It has these steps: validate, append to the log (which fixes
the order), update the caches in the callback of the commit, and answer. Only attaches wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from timeball.broker.accepting import delivery, transacting
from timeball.broker.accepting.admission import ParsedSends, as_columns
from timeball.broker.accepting.appender import Accepted, Appender
from timeball.broker.accepting.ingress import Ingress
from timeball.broker.accepting.keyed_sends import KeyedSends, SourcedSends
from timeball.broker.accepting.pacing import Pacing
from timeball.broker.accepting.tracing import Tracing, traced
from timeball.broker.accepting.transacting import Half, TransactionChecks, Transactions
from timeball.broker.accepting.waiters import Gate, Waiters
from timeball.broker.admin.administration import Administration, GroupStates, JobReports
from timeball.broker.admin.campaign_changes import CampaignChanges, PushChanges
from timeball.broker.admin.schedule_changes import ScheduleChanges
from timeball.broker.admin.selection_changes import SelectionChanges
from timeball.broker.consuming import pull
from timeball.broker.consuming.dead_letters import DeadLetters
from timeball.broker.consuming.engine import Consuming, TracedConsuming
from timeball.broker.consuming.group_places import GroupPlaces
from timeball.broker.consuming.leases import lease_ends
from timeball.broker.consuming.pull import LiveTail
from timeball.broker.consuming.requests import NO_ROWS
from timeball.broker.pending.forecast import Forecast
from timeball.broker.pending.listing import Listing
from timeball.broker.pending.snapshot import Snapshots
from timeball.broker.pending.survey import Surveys
from timeball.broker.pending.wakers import Wakers
from timeball.broker.pending.window_loads import WindowLoads
from timeball.broker.pending.zone_updates import ZoneUpdates
from timeball.broker.policy import Policy
from timeball.broker.recurring.successors import Successors
from timeball.broker.registry.campaigns import AttachState
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.redeliveries import Redeliveries
from timeball.broker.registry.selections import Selected
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topics import MAX_PER_SECOND, ON_PENDING, Topic
from timeball.broker.revoking.cancel import Act, LoneCancels, cancel, recall, settle
from timeball.broker.revoking.find_message import find_message, sent_states
from timeball.broker.revoking.ranges import cancel_ranges
from timeball.broker.revoking.reschedule import reschedule
from timeball.broker.revoking.scheduled_lookup import LookUps, Names
from timeball.broker.revoking.unique_sends import UniqueSends
from timeball.broker.tables.table_changes import TableChanges
from timeball.broker.virtual_time import VirtualTime
from timeball.io.clock import ManualClock, SchedulerClock
from timeball.io.files import Files
from timeball.io.threads import Threads, in_thread
from timeball.log.disk_thread import ConfirmLead, FileReplication
from timeball.log.segment import starts
from timeball.log.writer import CommitLog
from timeball.model import limits, time_parsing
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.answers import (
    Attached,
    Campaign,
    CampaignChange,
    Drained,
    MessagePlace,
    RangesCancelled,
    SentState,
    Start,
    Verdict,
)
from timeball.model.config import Settings
from timeball.model.errors import NotFound, OutOfRange, OverLimit
from timeball.model.message import READ_SCHEMA, Kind, codes_of, without_secrets
from timeball.model.send_options import OnPending
from timeball.schedule.scheduler import Scheduling
from timeball.schedule.ticker import Ticker
from timeball.table.attachment import Attachment
from timeball.table.pending_table import PendingTable


class Broker:
    """The broker as the edges see it. All async methods belong to the event loop."""

    # (interval in ms, duty): periodic duties in addition to those of maintenance.py
    duties: Sequence[tuple[int, Callable[[], Awaitable[None]]]] = ()

    def __init__(
        self,
        *,
        settings: Settings,
        files: Files,
        clock: SchedulerClock,
        log: CommitLog,
        tables: Tables,
        redeliveries: Redeliveries,
        attach_state: AttachState,
        scheduling: Scheduling,
        pending_table: PendingTable,
        threads: Threads,
        traces: Tracing | None,
        file_replication: FileReplication | None,
        confirm_lead: ConfirmLead,
        on_failure: Callable[[BaseException], None],
        scheduled_since_watermark: int = 0,
        halves: Iterable[Half] = (),
    ) -> None:
        """Create the broker from the objects that node.py has recovered. They are never replaced.

        `on_failure` stops the broker: it is called when memory may be ahead of the files. `traces` is None if tracing
        is off. `file_replication` is None for a broker without replicas. `confirm_lead` is called after a look-up has
        read the state, and before its answer. `scheduled_since_watermark` is the number of scheduled messages in the
        tail of the log, `halves` are the open half messages of transactions.
        """
        self.settings, self.files, self.clock, self.threads = settings, files, clock, threads
        self.log, self.tables, self.redeliveries, self.attach_state = log, tables, redeliveries, attach_state
        self.scheduling, self.pending_table = scheduling, pending_table
        self.traces, self.on_failure, self.confirm_lead = traces, on_failure, confirm_lead
        self.rates = Rates()
        # Requests that cancel or move scheduled messages share the gate. A resume holds it exclusively.
        self.gate = Gate()
        self._range_cancels = 0  # calls of `cancel_ranges` under way
        self.policy = Policy(tables.topics, tables.groups, settings, clock.clock)
        self._loop = asyncio.get_running_loop()
        self.waiters = Waiters()
        self.pacing = Pacing(
            self.waiters, clock=clock, writer=log.writer, topics=tables.topics, shown=tables.shown,
            on_failure=on_failure,
        )  # fmt: skip
        self.lateness = delivery.Lateness()
        self._build_schedule(scheduled_since_watermark, file_replication)
        self._build_queries()
        self._build_sends(halves)
        self._build_administration()
        self._build_consuming()

    def _build_schedule(
        self, scheduled_since_watermark: int, file_replication: FileReplication | None
    ) -> None:
        """Build the parts that append rows, change the pending table, and release due messages."""
        settings, clock, scheduler = self.settings, self.clock, self.scheduling.scheduler
        self.mover = TableChanges(
            scheduled_since_watermark=scheduled_since_watermark, settings=settings, files=self.files, clock=clock,
            log=self.log, campaigns=self.tables.campaigns, attach_state=self.attach_state,
            scheduling=self.scheduling, pending_table=self.pending_table, threads=self.threads, gate=self.gate,
            file_replication=file_replication, on_failure=self.on_failure,
        )  # fmt: skip
        self.appender = Appender(
            self.policy, self.waiters, self.mover.tail_count, settings=settings, clock=clock, writer=self.log.writer,
            topics=self.tables.topics, zones=self.tables.zones, scheduling=self.scheduling, rates=self.rates,
        )  # fmt: skip
        self.successors = Successors(
            self.tables.schedules, self.scheduling.backlog, settings.host, self._has_finished
        )
        self.delivery = delivery.Delivery(
            on_visible=self.waiters.wake_queues, lateness=self.lateness, clock=clock,
            writer=self.log.writer, topics=self.tables.topics, redeliveries=self.redeliveries, scheduler=scheduler,
            rates=self.rates, observers=[] if self.traces is None else [self.traces.released],
            successors=self.successors, selections=self.tables.selections,
            add_scheduled=self.appender.add_scheduled, encode_scheduled=self.appender.encode_scheduled,
            settings=settings,
        )  # fmt: skip
        self.ticker = Ticker(
            scheduler, clock, self.delivery.release, self.delivery.rewrite, self.delivery.indexing,
            self.tables.schedules.occurrences,
        )  # fmt: skip
        self.campaign_changes = CampaignChanges(
            self.mover, self.cancel_ranges, clock=clock, writer=self.log.writer, campaigns=self.tables.campaigns,
            attach_state=self.attach_state, scheduler=scheduler, outcomes=self.scheduling.outcomes,
            selections=self.tables.selections,
        )  # fmt: skip

    def _build_sends(self, halves: Iterable[Half]) -> None:
        """Build the parts that accept sends and transactions. Needs the look-ups of `_build_queries`."""
        settings, clock, log, tables = self.settings, self.clock, self.log, self.tables
        # Half messages have their own ingress: they become scheduled messages without a due time, so they cannot share
        # a batch with sends.
        self.sends = Ingress(traced(self.appender.send, self.traces))
        self.halves = Ingress(traced(self.prepare_nowait, self.traces))
        self.unique_sends = UniqueSends(
            self.appender, self.policy, self.look_ups, self.successors, clock=clock, writer=log.writer,
            topics=tables.topics, scheduler=self.scheduling.scheduler, rates=self.rates, traces=self.traces,
        )  # fmt: skip
        self.keyed_sends = KeyedSends(
            self.appender, self.policy, self.sent_states, self._end_selected, self.unique_sends.put, settings=settings,
            clock=clock, log=log, idempotency_keys=tables.idempotency_keys, outcomes=self.scheduling.outcomes,
            traces=self.traces,
        )  # fmt: skip
        self.sourced_sends = SourcedSends(
            self.appender, clock=clock, writer=log.writer, source_positions=tables.source_positions,
            traces=self.traces,
        )  # fmt: skip
        self.transactions = Transactions(
            self._publish, halves, settings=settings, clock=clock, writer=log.writer, reader=log.reader,
            key_index=log.key_index, reader_thread=self.threads.reader,
        )  # fmt: skip
        self.transaction_checks = TransactionChecks(
            self.transactions, clock=clock, reader=log.reader, reader_thread=self.threads.reader,
            on_failure=self.on_failure,
        )  # fmt: skip

    def _build_queries(self) -> None:
        """Build the look-ups and views of pending messages, and the bulk operations on them."""
        clock, log, file_keys = self.clock, self.log, self.pending_table.file_keys
        self.look_ups = LookUps(
            gate=self.gate, writer=log.writer, reader=log.reader, key_index=log.key_index,
            hour_log=self.scheduling.hour_log, outcomes=self.scheduling.outcomes, file_keys=file_keys,
            lookup_thread=self.threads.lookup, file_thread=self.threads.files, selections=self.tables.selections,
            confirm_lead=self.confirm_lead,
        )  # fmt: skip
        self.lone_cancels = LoneCancels(self.look_ups, self._cancel_for)
        self.snapshots = Snapshots(
            self.mover.lock, clock=clock, reader=log.reader, attach_state=self.attach_state,
            scheduling=self.scheduling, pending_table=self.pending_table, selections=self.tables.selections,
            confirm_lead=self.confirm_lead,
        )  # fmt: skip
        self.listing = Listing(
            self.look_ups, self.policy, self.snapshots, reader=log.reader, campaigns=self.tables.campaigns,
            selections=self.tables.selections, scheduling=self.scheduling, file_keys=file_keys, threads=self.threads,
        )  # fmt: skip
        self.zone_updates = ZoneUpdates(
            self.policy, self.snapshots, self.look_ups, self.appender, self.successors, settings=self.settings,
            clock=clock, log=log, schedules=self.tables.schedules, zones=self.tables.zones,
            scheduling=self.scheduling, file_keys=file_keys, threads=self.threads, rates=self.rates,
        )  # fmt: skip
        self.forecast = Forecast(
            self.policy, self.snapshots, clock=clock, reader=log.reader, background=self.threads.background,
            selections=self.tables.selections, schedules=self.tables.schedules,
        )  # fmt: skip
        surveys = Surveys(self.snapshots, reader=log.reader, background=self.threads.background)
        self.selections = SelectionChanges(
            self.policy, surveys.survey, lambda: self.campaign_changes.is_resuming or self._range_cancels > 0,
            gate=self.gate, clock=clock, writer=log.writer, tables=self.tables, attach_state=self.attach_state,
            scheduling=self.scheduling, delay_ms_max=self.settings.delay_ms_max,
        )  # fmt: skip
        self.wakers = Wakers(
            self.snapshots, self.appender, self.successors, gate=self.gate, clock=clock, log=log,
            selections=self.tables.selections, scheduling=self.scheduling, threads=self.threads,
            host=self.settings.host,
        )  # fmt: skip
        self.window_loads = WindowLoads(self.forecast, clock=clock)
        self.job_reports = JobReports(
            self.policy, files=self.files, clock=clock, reader=log.reader, attach_state=self.attach_state,
            reader_thread=self.threads.reader,
        )  # fmt: skip

    def _build_administration(self) -> None:
        """Build the parts for administrators and the live tail. Needs the parts that are built before."""
        settings, clock, log, tables = self.settings, self.clock, self.log, self.tables
        self.push = PushChanges(
            self.policy, settings=settings, clock=clock, writer=log.writer,
            push_subscriptions=tables.push_subscriptions,
        )  # fmt: skip
        self.schedules = ScheduleChanges(
            self.policy, self.appender, self.successors, self.find, clock=clock, log=log,
            schedules=tables.schedules, selections=tables.selections, zones=tables.zones,
            scheduler=self.scheduling.scheduler, rates=self.rates,
        )  # fmt: skip
        self.live_tail = LiveTail(
            self.policy, self.waiters, reader=log.reader, reader_thread=self.threads.reader, rates=self.rates
        )
        self.dead_letters = DeadLetters(
            self.appender, self.policy, settings=settings, clock=clock, log=log, tables=tables,
            reader_thread=self.threads.reader,
        )  # fmt: skip
        self.administration = Administration(
            self.policy, self.waiters, self.dead_letters, self._count_pending, clock=clock, writer=log.writer,
            tables=tables,
        )  # fmt: skip

    def _build_consuming(self) -> None:
        """Build the parts for consumers, and for a manual clock. Needs the parts that are built before."""
        settings, clock, log, tables = self.settings, self.clock, self.log, self.tables
        consuming = Consuming if self.traces is None else partial(TracedConsuming, traces=self.traces)
        self.consuming: Consuming = consuming(
            self.appender, self.waiters, self.policy, settings=settings, clock=clock, log=log, tables=tables,
            redeliveries=self.redeliveries, threads=self.threads, rates=self.rates, on_failure=self.on_failure,
        )  # fmt: skip
        # The same list: the saver puts its `join` there while it has changes to save.
        self.delivery.append_callbacks = self.consuming.saver.append_callbacks
        manual = clock.clock
        self.virtual_time = (
            VirtualTime(
                manual, clock=clock, scheduler=self.scheduling.scheduler, ticker=self.ticker, writer=log.writer,
                delivery=self.delivery, consuming=self.consuming, wake=self.wakers.wake,
            )
            if isinstance(manual, ManualClock)
            else None
        )  # fmt: skip
        if self.virtual_time is not None:
            self.virtual_time.activities.append(self.pacing)
        self.groups = GroupStates(
            self.policy, self.consuming.leases, self.dead_letters, self.consuming.subscriptions,
            topics=tables.topics, offsets=tables.offsets, groups=tables.groups, expired=tables.expired,
        )  # fmt: skip

    @property
    def pending_messages(self) -> int:
        """The number of scheduled messages that are pending, without redeliveries.

        The messages of a selection are included until they are counted, a moment after its acceptance.
        """
        not_pending = self.redeliveries.waiting_rows + self.tables.selections.pending_rows
        # Not below 0: `redeliveries` counts a message slightly longer than `outcomes` does (delivery.py).
        return max(0, self.scheduling.outcomes.waiting_rows - not_pending)

    # -- producing ---------------------------------------------------------------------------------------

    async def send(self, batch: pa.RecordBatch, caller: Caller = ANONYMOUS) -> Accepted:
        """Accept a batch of SEND_COLUMNS as a whole or not at all. Durable on return.

        Raises RequestError, OverLimit.
        """
        accepted, durable = self.appender.send(batch, caller)
        await durable
        return accepted

    async def sent_states(self, numbers: Sequence[int]) -> list[SentState]:
        """Look up the states of scheduled messages for their sender (revoking/find_message.py)."""
        return await sent_states(self.look_ups, numbers)

    async def send_again(self, batch: pa.RecordBatch) -> None:
        """Append copies of accepted messages that return to a consumer group. Durable on return."""
        await self.appender.send_again(batch)

    def prepare_nowait(
        self, sends: ParsedSends, caller: Caller = ANONYMOUS
    ) -> tuple[Accepted, asyncio.Future[int]]:
        """Append half messages. They are hidden until `transactions.end` commits them, when their delays begin.

        Returns a future that is done when they are durable. Raises the errors of a send, and OverLimit if too many half
        messages are open.
        """
        rows, _, now_ms = self.appender.admit(transacting.half_batch(as_columns(sends)))
        self.policy.ensure_topics(codes_of(rows.column("topic"))[1], caller)
        # After the admission, so that messages which a commit would refuse are refused now.
        rows = transacting.half_rows(rows)
        first_seq, durable = self.transactions.prepare(rows)
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def _publish(self, batch: pa.RecordBatch, halves: pa.RecordBatch) -> asyncio.Future[int]:
        """Append the rows that commit these half messages (READ_SCHEMA). `batch`: their messages (SEND_COLUMNS).

        Both have the same order. The future is done when the rows are durable.
        """
        rows, level, now_ms = self.appender.admit(batch)
        rows = transacting.ending_rows(rows, halves)
        # No permission check here: the policy has checked these topics when the half messages arrived.
        self.appender.make_topics(rows)
        rows = transacting.as_first_moves(self.appender.prepare(rows, now_ms, level))
        moves = transacting.first_versions(rows, self.log.writer.next_seq)

        def on_durable() -> None:
            self.transactions.ended(halves.column("seq").to_pylist())
            self.scheduling.outcomes.moved.add(moves)

        return self.appender.append(rows, on_durable).durable

    # -- cancelling --------------------------------------------------------------------------------------

    async def cancel(
        self,
        *,
        ids: Sequence[str] = (),
        keys: Sequence[str] = (),
        seqs: Sequence[int] = (),
        topic: str | None = None,
        caller: Caller = ANONYMOUS,
    ) -> list[Verdict]:
        """Cancel these messages, as far as they are pending. Returns their final verdicts (revoking/cancel.py).

        `ids`, `keys` and `seqs` each name messages. `topic` limits the request to messages of this topic, because
        producers of different topics may use the same id. Raises Forbidden, and the errors of `settle`.
        """
        # The look-up hides messages that the caller may not cancel: their verdict is `not_found`, which reveals
        # nothing.
        may = self.policy.cancellable(caller)
        if len(ids) == 1 and not (keys or seqs):
            verdicts = await self.lone_cancels.put(ids[0], topic, caller, may)
            if verdicts is not None:
                return verdicts
        return await settle(
            self.look_ups, Names(ids, keys, seqs, topic, may), self._cancel_for(caller), ends_selected=True
        )

    async def _end_selected(self, numbers: Sequence[int], caller: Caller) -> None:
        """Cancel for good the messages among `numbers` that selections have cancelled. Durable on return.

        The caller knows that no other message among them is pending, so no other message is cancelled.
        """
        if self.tables.selections.selected.is_empty:
            return
        for begin in range(0, len(numbers), limits.CANCELS_PER_REQUEST_MAX):
            names = Names(seqs=numbers[begin : begin + limits.CANCELS_PER_REQUEST_MAX])
            await settle(self.look_ups, names, self._cancel_for(caller), ends_selected=True)

    def _cancel_for(self, caller: Caller) -> Act:
        """Build the function that decides about the messages of a cancel, for this caller."""
        return partial(
            cancel, self.appender, by=caller.name, clock=self.clock, redeliveries=self.redeliveries,
            scheduler=self.scheduling.scheduler, successors=self.successors, rates=self.rates,
        )  # fmt: skip

    async def reschedule(
        self,
        *,
        ids: Sequence[str] = (),
        keys: Sequence[str] = (),
        seqs: Sequence[int] = (),
        topic: str | None = None,
        caller: Caller = ANONYMOUS,
        due_ms: int | None = None,
        delay_ms: int | None = None,
    ) -> list[Verdict]:
        """Change the due time of these messages, as far as they are pending, to `due_ms` or by `delay_ms` from now.

        Returns their verdicts. Raises Forbidden, and the errors of `reschedule` in revoking/reschedule.py.
        """
        names = Names(ids, keys, seqs, topic, self.policy.cancellable(caller))
        return await reschedule(
            self.look_ups, self.appender, names, due_ms=due_ms, delay_ms=delay_ms, settings=self.settings,
            clock=self.clock, log=self.log, scheduling=self.scheduling, file_keys=self.pending_table.file_keys,
            file_thread=self.threads.files, successors=self.successors, rates=self.rates,
        )  # fmt: skip

    async def recall(self, topic: str, handle: str, caller: Caller = ANONYMOUS) -> str:
        """Cancel the message of a recall handle. Returns its id.

        Raises Forbidden, and the errors of `recall` in revoking/cancel.py.
        """
        self.policy.allow(caller, Verb.CANCEL, topic=topic)
        return await recall(
            self.look_ups, self._cancel_for(caller), topic, handle, settings=self.settings,
            reader=self.log.reader, topics=self.tables.topics, drains=self.tables.drains,
            reader_thread=self.threads.reader,
        )  # fmt: skip

    async def find(
        self, message_id: str, topic: str | None = None, caller: Caller = ANONYMOUS
    ) -> list[MessagePlace]:
        """Find the messages with this id: their states and queue positions. Raises Forbidden.

        See revoking/find_message.py.
        """
        self.policy.allow(caller, Verb.LOOK)
        names = Names([message_id], topic=topic, may=self.policy.visible(caller))
        may_receive = partial(self.policy.allows, caller, Verb.RECEIVE)
        groups = self._group_places(lambda name: may_receive(group=name))
        return await find_message(
            self.look_ups, names, lambda name: may_receive(topic=name), groups, log=self.log,
            scheduling=self.scheduling, file_keys=self.pending_table.file_keys, threads=self.threads,
        )  # fmt: skip

    def _group_places(self, may: Callable[[str], bool]) -> GroupPlaces:
        """Build the search for states of messages in groups. `may`: whether the caller may consume as a group."""
        return GroupPlaces(
            self.consuming.leases, may, clock=self.clock, offsets=self.tables.offsets,
            redeliveries=self.redeliveries,
        )  # fmt: skip

    def _has_finished(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Check whether a group has finished a message (`GroupPlaces.has_finished`)."""
        places = self._group_places(lambda _: True)
        return places.has_finished(group, topic, queue_id, offset, self.tables.topics)

    async def cancel_ranges(
        self,
        ranges: Sequence[tuple[int, int]],
        reason: str = "",
        caller: Caller = ANONYMOUS,
        *,
        only: Selected | None = None,
    ) -> RangesCancelled:
        """Cancel the pending messages of a bulk job, given as ranges (first_seq, rows). See revoking/ranges.py.

        `only`: cancel only the messages that belong to these selections. Raises Forbidden.
        """
        self.policy.allow(caller, Verb.ADMIN)
        self._range_cancels += 1
        try:
            return await cancel_ranges(
                self.mover.lock, ranges, reason, clock=self.clock, log=self.log, attach_state=self.attach_state,
                scheduling=self.scheduling, pending_table=self.pending_table, threads=self.threads,
                rates=self.rates, gate=self.gate, schedules=self.tables.schedules, only=only,
            )  # fmt: skip
        finally:
            self._range_cancels -= 1
            self.tables.selections.forget_counts()  # they include messages that this call has cancelled

    # -- campaigns ---------------------------------------------------------------------------------------

    def campaigns(self, campaign: str | None = None, caller: Caller = ANONYMOUS) -> list[Campaign]:
        """Find a campaign with its ranges, or list all campaigns without them. Raises NotFound, InvalidMessage."""
        self.policy.allow(caller, Verb.ADMIN)
        return self.campaign_changes.all() if campaign is None else [self.campaign_changes.get(campaign)]

    async def change_campaign(
        self,
        campaign: str,
        change: CampaignChange,
        *,
        rows: int = 0,
        at_ms: int | None = None,
        shift: bool = False,
        groups: Sequence[str] = (),
        caller: Caller = ANONYMOUS,
    ) -> Campaign:
        """Plan, pause, resume or cancel a campaign. Durable on return (campaign_changes.py).

        A plan has the number of its `rows`, the time `at_ms` at which they were checked, and the cluster `groups` that
        each have a part of them. A resume with `shift` delays all messages by the length of the pause.
        """
        self.policy.allow(caller, Verb.ADMIN)
        if change == "plan":
            return await self.campaign_changes.plan(campaign, rows, at_ms, groups)
        if change == "pause":
            return await self.campaign_changes.pause(campaign)
        if change == "resume":
            return await self.campaign_changes.resume(campaign, shift=shift)
        return await self.campaign_changes.cancel(campaign)

    # -- consuming ---------------------------------------------------------------------------------------

    async def pull(
        self, topic: str, offsets: dict[int, int], rows: int, wait_ms: int, caller: Caller = ANONYMOUS
    ) -> pa.RecordBatch:
        """Read up to `rows` visible rows (READ_SCHEMA), from an offset of each queue in `offsets` on.

        Waits up to `wait_ms` for a row. If the topic is missing and its first message would create it, the call waits
        for that message. It then returns no rows, and the client asks again. Raises NotFound, Forbidden, OutOfRange.
        """
        self.policy.allow(caller, Verb.RECEIVE, topic=topic)
        # The loop's clock is monotonic: a change of the wall clock must not prolong a poll.
        deadline_s = self._loop.time() + min(wait_ms, limits.PULL_WAIT_MS_MAX) / 1000
        if wait_ms > 0 and self.policy.will_be_created(topic):
            await self.waiters.wait(topic, deadline_s - self._loop.time())
            return NO_ROWS
        while True:
            # Checked in each round, because the topic may have been deleted or closed to readers.
            seqs = pull.find_seqs(self.policy.find_readable_topic(topic, caller), offsets, rows)
            if len(seqs):
                # Without a group, only the broker's own rate counts these rows.
                self.rates.add(Stat.BROKER_GET_NUMS, "", len(seqs))
                return await in_thread(self.threads.reader, pull.read, self.log.reader, seqs)
            left_s = deadline_s - self._loop.time()
            if left_s <= 0 or not await self.waiters.wait(topic, left_s):
                return NO_ROWS

    async def read_queue(
        self, topic: str, queue_id: int, offset: int, rows: int, caller: Caller = ANONYMOUS
    ) -> pa.RecordBatch:
        """Read up to `rows` rows of one queue from `offset` on, without waiting."""
        return await self.pull(topic, {queue_id: offset}, rows, 0, caller)

    def read_log(
        self,
        from_seq: int,
        to_seq: int,
        kinds: Iterable[int] | None = None,
        coalesce_rows: int = 65_536,
        columns: Sequence[str] | None = None,
        caller: Caller = ANONYMOUS,
        placed: bool | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read rows of the log [from_seq, to_seq), without secret values. For the parameters see LogReader.coalesced.

        Any thread. Raises Forbidden.
        """
        self.policy.allow(caller, Verb.ADMIN)
        kinds = None if kinds is None else set(kinds)
        names = columns or READ_SCHEMA.names
        # Only the bodies of META rows contain secrets. A read without bodies or without META rows has nothing to hide.
        if "body" not in names or (kinds is not None and Kind.META not in kinds):
            return self.log.reader.coalesced(from_seq, to_seq, kinds, coalesce_rows, columns, placed)
        # Kind and key determine which values are secret, so read both even if the caller did not request them.
        needed = list(dict.fromkeys([*names, "kind", "unique_key"]))
        rows = self.log.reader.coalesced(from_seq, to_seq, kinds, coalesce_rows, needed, placed)
        return (without_secrets(batch).select(names) for batch in rows)

    def starts(self, from_seq: int, to_seq: int, caller: Caller = ANONYMOUS) -> list[Start]:
        """List the starts of brokers on this log, each with the first row written after it. Any thread."""
        self.policy.allow(caller, Verb.ADMIN)
        return starts(self.log.reader.segments, from_seq, to_seq)

    def topics(
        self, caller: Caller = ANONYMOUS, share: Iterable[Topic] | None = None
    ) -> dict[str, dict[str, int]]:
        """List the topics that the caller may see, by name, each with its number of queues as {"queues": number}.

        `share`: only these topics. A caller on the event loop asks in shares (registry/rates.py).
        """
        self.policy.allow(caller, Verb.LOOK)
        return {
            topic.name: {"queues": len(topic.queues)}
            for topic in (self.tables.topics.all() if share is None else share)
            if self.policy.allows(caller, Verb.LOOK, topic=topic.name)
        }

    async def create_topic(
        self,
        name: str,
        queues: int | None = None,
        caller: Caller = ANONYMOUS,
        on_pending: OnPending | None = None,
        max_per_second: int | None = None,
    ) -> None:
        """Create a topic, or add queues to it. Durable on return. Raises OutOfRange, and the errors of the policy.

        `on_pending`: the topic's rule for sends with a unique key that name no rule. `max_per_second`: how many
        messages may become visible in a second, 0 for no limit. None leaves the present value.
        """
        if max_per_second is not None and not 0 <= max_per_second <= limits.TOPIC_RATE_MAX:
            raise OutOfRange(f"max_per_second {max_per_second}: 0 (no limit) to {limits.TOPIC_RATE_MAX}")
        if queues is not None and not 1 <= queues <= limits.QUEUES_PER_TOPIC_MAX:
            raise OutOfRange(f"queues {queues}: between 1 and {limits.QUEUES_PER_TOPIC_MAX}")
        self.policy.check_new_topics([name], caller)
        topics = self.tables.topics
        topic = topics.ensure(name, queues, made_by=caller.name)
        if on_pending is not None:
            topics.set_attribute(topic, ON_PENDING, on_pending)
        if max_per_second is not None:
            topics.set_attribute(topic, MAX_PER_SECOND, str(max_per_second) if max_per_second else None)
        await self.log.writer.flushed()

    def queues(self, topic: str, caller: Caller = ANONYMOUS) -> dict[int, tuple[int, int]]:
        """List the offsets [min_offset, max_offset) of each queue of a topic. Raises NotFound."""
        self.policy.allow(caller, Verb.LOOK, topic=topic)
        queues = self.tables.topics.get(topic).queues
        return {
            number: (queue.index.min_offset, queue.index.max_offset) for number, queue in enumerate(queues)
        }

    def offsets(self, group: str, topic: str, caller: Caller = ANONYMOUS) -> dict[int, int]:
        """Find the stored offsets of a group in a topic, by queue. Empty if it has none. Raises Forbidden."""
        self.policy.allow(caller, Verb.RECEIVE, topic=topic, group=group)
        self.policy.check_group(group)
        return self.tables.offsets.get(group, topic)

    def is_group(self, group: str) -> bool:
        """Check whether a consumer group exists on this broker: it has a configuration or stored offsets."""
        # A client that only commits offsets never configures its group.
        return self.tables.groups.find_group(group) is not None or group in self.tables.offsets.table

    async def offsets_at(self, topic: str, at_ms: int, caller: Caller = ANONYMOUS) -> dict[int, int]:
        """Find the offset of the first message stored at or after `at_ms` (ms since 1970), in each queue.

        `at_ms` END (time_parsing.py) finds the ends of the queues. Raises NotFound.
        """
        self.policy.allow(caller, Verb.RECEIVE, topic=topic)
        offsets = {}
        for number, queue in enumerate(self.tables.topics.get(topic).queues):
            # END is a special value and not a time.
            if at_ms <= time_parsing.END:
                offsets[number] = queue.index.max_offset
            else:
                offsets[number] = await in_thread(
                    self.threads.reader, pull.offset_at, self.log.reader, queue.index, at_ms
                )
        return offsets

    async def begin(self, group: str, topic: str, at_ms: int, caller: Caller = ANONYMOUS) -> None:
        """Let a group begin in a topic at a time (see `offsets_at`), unless it has stored offsets there.

        Raises the errors of `commit_offsets`.
        """
        self.policy.allow(caller, Verb.RECEIVE, topic=topic, group=group)
        # A group that has offsets for only some of the queues keeps them, and still reads the other queues.
        if self.tables.offsets.get(group, topic):
            return
        offsets = await self.offsets_at(topic, at_ms, caller)
        # Another member may have stored offsets during the look-up, and may have read messages since.
        if not self.tables.offsets.get(group, topic):
            await self.commit_offsets(group, topic, offsets, caller)
            self.consuming.leases.new_units.add((group, topic))

    async def commit_offsets(
        self, group: str, topic: str, offsets: dict[int, int], caller: Caller = ANONYMOUS
    ) -> None:
        """Store a group's offsets in a topic, by queue. Durable within about a second.

        Raises OutOfRange for a queue that the topic does not have or an offset outside it. Raises NotFound, Forbidden,
        and InvalidName or OverLimit for a new group.
        """
        self.policy.allow(caller, Verb.RECEIVE, topic=topic, group=group)
        self.policy.check_group(group)
        ends = {queue: high for queue, (_, high) in self.queues(topic).items()}
        self.tables.offsets.commit(group, topic, offsets, ends)
        # Consumers that wait may have messages again.
        self.waiters.wake([lease_ends(group, topic)])

    async def _count_pending(self, topic: str) -> int | None:
        """Count the pending messages of a topic, without those of paused campaigns. None if there are too many."""
        if not self.pending_messages:
            return 0
        now_ms = self.clock.now_ms()
        # From a day ago, for overdue messages, to the longest delay of a send or a bulk write.
        window = now_ms - limits.DAY_MS, now_ms + limits.DELAY_MS_MAX
        try:
            # Buckets of a day, so that ten years need few buckets.
            counted = await self.forecast.counted("day", *window, topic)
        except OverLimit:
            return None
        return counted.topics.get(topic, 0)

    # -- changes of the pending table (see table_changes.py) -------------------------------------------------------

    async def drain(self, heir: str, *, dry_run: bool = False, caller: Caller = ANONYMOUS) -> Drained:
        """Hand over all pending messages to another group of the cluster.

        Only a broker of a cluster can do this (groups/grouped.py): this class raises NotFound.
        """
        self.policy.allow(caller, Verb.ADMIN)
        raise NotFound("this broker belongs to no cluster: it was started without --cluster")

    async def reserve(self, rows: int, caller: Caller = ANONYMOUS) -> int:
        """Reserve `rows` sequence numbers for a bulk attach. Returns the first of them."""
        self.policy.allow(caller, Verb.ADMIN)
        return await self.mover.reserve(rows)

    async def attach(self, attachment: Attachment, caller: Caller = ANONYMOUS) -> Attached:
        """Attach data files to the pending table atomically."""
        self.policy.allow(caller, Verb.ADMIN)
        return await self.mover.attach(attachment)

    async def compact(self, caller: Caller = ANONYMOUS) -> Attached | None:
        """Move the scheduled messages of the log's tail to the pending table. None if the tail has no messages."""
        self.policy.allow(caller, Verb.ADMIN)
        return await self.mover.compact()

    def compactor_lease(self, lease_ms: int, caller: Caller = ANONYMOUS) -> None:
        """Let an external compactor compact the tail of the log for `lease_ms`, instead of the broker."""
        self.policy.allow(caller, Verb.ADMIN)
        self.mover.lease(lease_ms)

    def dispatcher_lease(self, lease_ms: int, caller: Caller = ANONYMOUS) -> None:
        """Let an external dispatcher release the due messages in data files for `lease_ms`, instead of the broker."""
        self.policy.allow(caller, Verb.ADMIN)
        self.delivery.lease_to_dispatcher(lease_ms)

    async def release(self, rows: pa.RecordBatch, caller: Caller = ANONYMOUS) -> delivery.Brought:
        """Release due rows that an external dispatcher has read from data files. Durable on return."""
        self.policy.allow(caller, Verb.ADMIN)
        return await self.delivery.release_dispatched(rows)

    # -- status ------------------------------------------------------------------------------------------

    def status(self, caller: Caller = ANONYMOUS) -> dict[str, object]:
        """Collect the figures of the broker for users and for jobs. docs/flight.md explains them. Raises Forbidden."""
        self.policy.allow(caller, Verb.LOOK)
        segments = self.log.reader.segments
        return {
            "now_ms": self.clock.now_ms(),
            "log": {
                "first_seq": segments.first_seq,
                # Rows below it may not be durable yet. `durable_seq` is the end of the durable rows.
                "next_seq": self.log.writer.next_seq,
                "durable_seq": segments.next_seq,
                "bytes": segments.size_bytes,
                "commits": self.log.writer.statistics.commits,
                "rows": self.log.writer.statistics.rows,
            },
            "watermark": self.attach_state.watermark,
            "settled_before_ms": self.scheduling.scheduler.settled_before_ms,
            "strategy": self.settings.strategy,
            "durability": self.settings.durability,
            "waiting_messages": self.pending_messages,
            "held_messages": sum(self.pacing.held().values()),
            "redelivery_messages": self.redeliveries.waiting_rows,
            "schedule": self.schedule_statistics() | self.pending_table.file_keys.statistics(),
            "levels": self.scheduling.levels.statistics(),
            "transactions": self.transactions.statistics(),
            "table": self.pending_table.status(),
            "lateness": self.lateness.summary(),
            "delivered": self.rates.total(Stat.BROKER_GET_NUMS),
            "clock_suspect": self.clock.suspect,
            # Only groups as which the caller may consume.
            "conflicting_groups": [
                group
                for group in self.consuming.subscriptions.groups()
                if self.policy.allows(caller, Verb.RECEIVE, group=group)
            ],
        }

    def schedule_statistics(self) -> dict[str, int]:
        """Collect the counts of the scheduler, of the pending table, and of the strategy (`Settings.strategy`)."""
        counts = self.scheduling.scheduler.statistics() | self.scheduling.hour_log.statistics()
        if not self.scheduling.compacts:
            stored = self.scheduling.backlog.statistics()
            # Cancelled messages stay in the backlog until their due time, so subtract them.
            loaded_rows = counts["near_rows"] + counts["moving_rows"]
            pending_rows = stored["waiting_rows"] + loaded_rows - counts["cancelled_rows"]
            counts |= stored | {"waiting_rows": max(0, pending_rows)}
        return counts
