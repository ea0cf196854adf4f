"""The operations that all edges call, and the order of the steps between a request and its answer.

Each operation has a caller, and policy.py checks the caller's permissions. The broker itself acts as ANONYMOUS.

All code runs on one event loop, and sending a message takes no lock. The steps are: validate, append to the log (which
fixes the order), and update the caches in the commit's callback before the answer. Only attaches wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from timeball.broker.accepting import delivery
from timeball.broker.accepting.admission import as_columns
from timeball.broker.accepting.appender import Accepted, Appender
from timeball.broker.accepting.components import Components, in_thread
from timeball.broker.accepting.ingress import Ingress
from timeball.broker.accepting.keyed_sends import KeyedSends
from timeball.broker.accepting.small_batch import Sends
from timeball.broker.accepting.sourced_sends import SourcedSends
from timeball.broker.accepting.waiters import Waiters
from timeball.broker.admin.administration import Administration
from timeball.broker.admin.campaign_changes import CampaignChanges
from timeball.broker.admin.group_states import GroupStates
from timeball.broker.admin.job_reports import JobReports
from timeball.broker.admin.push_changes import PushChanges
from timeball.broker.consuming import pull
from timeball.broker.consuming.dead_letters import DeadLetters
from timeball.broker.consuming.engine import Consuming
from timeball.broker.consuming.group_places import GroupPlaces
from timeball.broker.consuming.live_tail import LiveTail
from timeball.broker.consuming.traced import TracedConsuming
from timeball.broker.pending.forecast import Forecast
from timeball.broker.pending.listing import Listing
from timeball.broker.policy import Policy
from timeball.broker.registry.rates import Stat
from timeball.broker.revoking.cancel import cancel, settle
from timeball.broker.revoking.find_message import find_message
from timeball.broker.revoking.look_ups import LookUps
from timeball.broker.revoking.ranges import cancel_ranges
from timeball.broker.revoking.recall import recall
from timeball.broker.revoking.reschedule import reschedule
from timeball.broker.revoking.scheduled_lookup import Names
from timeball.broker.revoking.sent_states import sent_states
from timeball.broker.tables.table_changes import TableChanges
from timeball.broker.transacting import transactions
from timeball.broker.transacting.transaction_checks import TransactionChecks
from timeball.broker.transacting.transactions import Half, Transactions
from timeball.log.segment import starts
from timeball.model import limits, time_parsing, wire
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.answers import SentState
from timeball.model.errors import NotFound, OutOfRange, OverLimit
from timeball.model.message import READ_SCHEMA, Kind, codes_of, without_secrets
from timeball.model.wire import (
    Attached,
    Campaign,
    CampaignChange,
    MessagePlace,
    RangesCancelled,
    Start,
    Verdict,
)
from timeball.schedule.ticker import Ticker
from timeball.table.attachment import Attachment


class Broker:
    """The broker as the edges see it. All async methods belong to the event loop."""

    # (interval in ms, duty): periodic duties in addition to those of maintenance.py
    duties: Sequence[tuple[int, Callable[[], Awaitable[None]]]] = ()

    def __init__(
        self, parts: Components, *, scheduled_since_watermark: int = 0, halves: Iterable[Half] = ()
    ) -> None:
        self.parts = parts
        self.policy = Policy(parts.topics, parts.groups, parts.settings, parts.clock.clock)
        self._loop = asyncio.get_running_loop()
        self.waiters = Waiters()
        self.push = PushChanges(parts, self.policy)
        self.lateness = delivery.Lateness()
        self.delivery = delivery.Delivery(parts, on_visible=self.waiters.wake_queues, lateness=self.lateness)
        self.ticker = Ticker(parts.scheduler, parts.clock, self.delivery.release, self.delivery.rewrite)
        self.mover = TableChanges(parts, scheduled_since_watermark=scheduled_since_watermark)
        self.live_tail = LiveTail(parts, self.policy, self.waiters)
        self.look_ups = LookUps(parts)
        self.listing = Listing(self.look_ups, self.policy, self.mover.lock)
        self.forecast = Forecast(parts, self.policy, self.mover.lock)
        self.campaign_changes = CampaignChanges(parts, self.mover)
        self.appender = Appender(parts, self.policy, self.waiters, self.mover.tail_count)
        self.dead_letters = DeadLetters(parts, self.appender, self.policy)
        self.administration = Administration(
            parts, self.policy, self.waiters, self.dead_letters, self._count_pending
        )
        consuming = Consuming if parts.traces is None else TracedConsuming
        self.consuming = consuming(parts, self.appender, self.waiters, self.policy, self.save_offsets)
        self.job_reports = JobReports(parts, self.policy)
        self.groups = GroupStates(
            parts, self.policy, self.consuming.leases, self.dead_letters, self.consuming.subscriptions
        )
        # Two ingresses: half messages become scheduled messages without a due time, so they cannot share a batch with
        # sends.
        self.sends = Ingress(parts.traced(self.appender.send))
        self.halves = Ingress(parts.traced(self.prepare_nowait))
        self.keyed_sends = KeyedSends(parts, self.appender, self.policy, self.sent_states)
        self.sourced_sends = SourcedSends(parts, self.appender)
        self.transactions = Transactions(parts, self._publish, halves)
        self.transaction_checks = TransactionChecks(parts, self.transactions)

    # -- producing ---------------------------------------------------------------------------------------

    async def send(self, batch: pa.RecordBatch, caller: Caller = ANONYMOUS) -> Accepted:
        """Accept a batch of SEND_COLUMNS as a whole or not at all. Durable on return."""
        accepted, durable = self.appender.send(batch, caller)
        await durable
        return accepted

    async def sent_states(self, numbers: Sequence[int]) -> list[SentState]:
        """Look up the states of scheduled messages for their sender (revoking/sent_states.py)."""
        return await sent_states(self.look_ups, numbers)

    async def send_again(self, batch: pa.RecordBatch) -> None:
        """Append copies of accepted messages that return to a consumer group. Durable on return."""
        await self.appender.send_again(batch)

    def prepare_nowait(
        self, sends: Sends, caller: Caller = ANONYMOUS
    ) -> tuple[Accepted, asyncio.Future[int]]:
        """Accept messages that are hidden until `transactions.end` commits them. Their delays begin at the commit."""
        rows, _, now_ms = self.appender.admit(transactions.half_batch(as_columns(sends)))
        self.policy.admit(codes_of(rows.column("topic"))[1], caller)
        # After the admission, which refuses all messages that a commit would refuse later.
        rows = transactions.half_rows(rows)
        first_seq, durable = self.transactions.prepare(rows)
        return Accepted(first_seq, rows.num_rows, now_ms, rows), durable

    def _publish(self, batch: pa.RecordBatch, halves: pa.RecordBatch) -> asyncio.Future[int]:
        rows, level, now_ms = self.appender.admit(batch)
        rows = transactions.ending_rows(rows, halves)
        # No permission check here: the policy has admitted these topics with the half messages.
        self.appender.make_topics(rows)
        rows = transactions.as_first_moves(self.appender.prepare(rows, now_ms, level))
        moves = transactions.first_versions(rows, self.parts.writer.next_seq)

        def on_durable() -> None:
            self.transactions.ended(halves.column("seq").to_pylist())
            self.parts.outcomes.moved.add(moves)

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
        """Cancel these messages if they are pending, with one final verdict each (see revoking/cancel.py).

        `topic` limits the request to messages for this topic, because producers of different topics may use the same
        id.
        """
        names = Names(ids, keys, seqs, topic, self.policy.cancellable(caller))
        # The look-up hides messages that the caller may not cancel, so the verdict not_found reveals nothing about
        # them.
        act = partial(cancel, self.parts, self.appender, by=caller.name)
        return await settle(self.look_ups, names, act)

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
        """Give the pending ones of these messages another due time, with one verdict each (revoking/reschedule.py)."""
        names = Names(ids, keys, seqs, topic, self.policy.cancellable(caller))
        return await reschedule(self.look_ups, self.appender, names, due_ms=due_ms, delay_ms=delay_ms)

    async def recall(self, topic: str, handle: str, caller: Caller = ANONYMOUS) -> str:
        """Cancel the message of a recall handle, and return its id. revoking/recall.py lists the errors."""
        self.policy.allow(caller, Verb.CANCEL, topic=topic)
        return await recall(self.look_ups, self.appender, topic, handle, caller.name)

    async def find(
        self, message_id: str, topic: str | None = None, caller: Caller = ANONYMOUS
    ) -> list[MessagePlace]:
        """Find the messages with this id, and where they are (revoking/find_message.py)."""
        self.policy.allow(caller, Verb.LOOK)
        names = Names([message_id], topic=topic, may=self.policy.visible(caller))
        may_receive = partial(self.policy.allows, caller, Verb.RECEIVE)
        groups = GroupPlaces(self.parts, self.consuming.leases, lambda name: may_receive(group=name))
        return await find_message(self.look_ups, names, lambda name: may_receive(topic=name), groups)

    async def cancel_ranges(
        self, ranges: Sequence[tuple[int, int]], reason: str = "", caller: Caller = ANONYMOUS
    ) -> RangesCancelled:
        """Cancel the pending messages in a bulk job's ranges of numbers, (first_seq, rows). See revoking/ranges.py."""
        self.policy.allow(caller, Verb.ADMIN)
        return await cancel_ranges(self.parts, self.mover.lock, ranges, reason)

    # -- campaigns ---------------------------------------------------------------------------------------

    def campaigns(self, campaign: str | None = None, caller: Caller = ANONYMOUS) -> list[Campaign]:
        """Return one campaign with its ranges, or all campaigns without them. Raises NotFound, InvalidMessage."""
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

        `rows`, `at_ms` and `groups` belong to a plan: its number of rows, the time at which they were checked, and the
        cluster groups that each have a part. `shift` belongs to a resume: delay all messages by the length of the
        pause.
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
        """Return up to `rows` visible rows from these queues' offsets on. Waits up to `wait_ms` for the first one.

        If the topic is missing and its first message may create it, the call also waits. It then returns no rows, and
        the client asks again.
        """
        self.policy.allow(caller, Verb.RECEIVE, topic=topic)
        # The loop's clock is monotonic: a change of the wall clock must not prolong a poll.
        deadline = self._loop.time() + min(wait_ms, limits.PULL_WAIT_MS_MAX) / 1000
        if wait_ms > 0 and self.policy.is_awaited(topic):
            await self.waiters.wait(topic, deadline - self._loop.time())
            return pa.RecordBatch.from_pylist([], READ_SCHEMA)
        while True:
            # Checked in each turn, because the topic may have been deleted or closed to readers.
            seqs = pull.locate(self.policy.readable(topic, caller), offsets, rows)
            if len(seqs):
                # Without a group, only the broker's own rate counts these rows.
                self.parts.rates.add(Stat.BROKER_GET_NUMS, "", len(seqs))
                return await in_thread(self.parts.reader_thread, pull.read, self.parts.reader, seqs)
            left = deadline - self._loop.time()
            if left <= 0 or not await self.waiters.wait(topic, left):
                return pa.RecordBatch.from_pylist([], READ_SCHEMA)

    async def read_queue(
        self, topic: str, queue_id: int, offset: int, rows: int, caller: Caller = ANONYMOUS
    ) -> pa.RecordBatch:
        """Return up to `rows` rows of one queue from `offset` on."""
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
        """Read rows of the log (LogReader.coalesced), without secret values. Any thread."""
        self.policy.allow(caller, Verb.ADMIN)
        kinds, names = None if kinds is None else set(kinds), columns or READ_SCHEMA.names
        # Only the bodies of META rows contain secrets. A read without bodies or without META rows has nothing to hide.
        if "body" not in names or (kinds is not None and Kind.META not in kinds):
            return self.parts.reader.coalesced(from_seq, to_seq, kinds, coalesce_rows, columns, placed)
        # Kind and key determine which values are secret, so read both even if the caller did not request them.
        needed = list(dict.fromkeys([*names, "kind", "unique_key"]))
        rows = self.parts.reader.coalesced(from_seq, to_seq, kinds, coalesce_rows, needed, placed)
        return (without_secrets(batch).select(names) for batch in rows)

    def starts(self, from_seq: int, to_seq: int, caller: Caller = ANONYMOUS) -> list[Start]:
        """List the broker starts recorded in this log, each by the first row written after it. Any thread."""
        self.policy.allow(caller, Verb.ADMIN)
        return starts(self.parts.reader.segments, from_seq, to_seq)

    def topics(self, caller: Caller = ANONYMOUS) -> dict[str, dict[str, int]]:
        """List the topics that the caller may look at, with their numbers of queues."""
        self.policy.allow(caller, Verb.LOOK)
        return {
            topic.name: {"queues": len(topic.queues)}
            for topic in self.parts.topics.all()
            if self.policy.allows(caller, Verb.LOOK, topic=topic.name)
        }

    async def create_topic(self, name: str, queues: int | None = None, caller: Caller = ANONYMOUS) -> None:
        """Create a topic, or give it more queues. Durable on return."""
        if queues is not None and not 1 <= queues <= limits.QUEUES_PER_TOPIC_MAX:
            raise OutOfRange(f"queues {queues}: between 1 and {limits.QUEUES_PER_TOPIC_MAX}")
        self.policy.admit_managed([name], caller)
        self.parts.topics.ensure(name, queues or self.parts.settings.queues_per_topic, made_by=caller.name)
        await self.parts.writer.flushed()

    def queues(self, topic: str, caller: Caller = ANONYMOUS) -> dict[int, tuple[int, int]]:
        """Return (min_offset, max_offset) of each queue."""
        self.policy.allow(caller, Verb.LOOK, topic=topic)
        queues = self.parts.topics.get(topic).queues
        return {i: (q.index.min_offset, q.index.max_offset) for i, q in enumerate(queues)}

    def offsets(self, group: str, topic: str, caller: Caller = ANONYMOUS) -> dict[int, int]:
        """Return a group's stored offsets by queue."""
        self.policy.allow(caller, Verb.RECEIVE, topic=topic, group=group)
        self.policy.check_group(group)
        return self.parts.offsets.get(group, topic)

    def is_group(self, group: str) -> bool:
        """Check whether a consumer group exists here: it has a configuration or stored offsets."""
        # Clients that only commit offsets never configure their group.
        return self.parts.groups.find_group(group) is not None or group in self.parts.offsets.table

    async def offsets_at(self, topic: str, at_ms: int, caller: Caller = ANONYMOUS) -> dict[int, int]:
        """Find, by queue, the offset of the first message stored at or after a time in ms.

        For END, the end of the queue.
        """
        self.policy.allow(caller, Verb.RECEIVE, topic=topic)
        found, parts = {}, self.parts
        for number, queue in enumerate(parts.topics.get(topic).queues):
            # END is a mark and not a time.
            if at_ms <= time_parsing.END:
                found[number] = queue.index.max_offset
            else:
                found[number] = await in_thread(
                    parts.reader_thread, pull.offset_at, parts.reader, queue.index, at_ms
                )
        return found

    async def begin(self, group: str, topic: str, at_ms: int, caller: Caller = ANONYMOUS) -> None:
        """Set a group's offsets in a topic as in `offsets_at`, unless it has offsets there already."""
        self.policy.allow(caller, Verb.RECEIVE, topic=topic, group=group)
        # A group that has read some of the queues keeps its offsets: it will still read the others.
        if self.parts.offsets.get(group, topic):
            return
        offsets = await self.offsets_at(topic, at_ms, caller)
        # Another member may have begun during the look-up, and may have acknowledged messages since.
        if not self.parts.offsets.get(group, topic):
            await self.commit_offsets(group, topic, offsets, caller)

    async def commit_offsets(
        self, group: str, topic: str, offsets: dict[int, int], caller: Caller = ANONYMOUS
    ) -> None:
        """Store a group's offsets. Durable within about a second.

        Raises OutOfRange for an offset beyond its queue's end.
        """
        self.policy.allow(caller, Verb.RECEIVE, topic=topic, group=group)
        self.policy.check_group(group)
        self.parts.topics.get(topic)
        ends = {queue: high for queue, (_, high) in self.queues(topic).items()}
        self.parts.offsets.commit(group, topic, offsets, ends)

    async def _count_pending(self, topic: str) -> int | None:
        """Count the pending messages of a topic, without those of paused campaigns. None if there are too many."""
        if not self.parts.waiting_messages:
            return 0
        now_ms = self.parts.clock.now_ms()
        # From a day ago, for overdue messages, to the longest delay of a send or a bulk write.
        window = now_ms - limits.DAY_MS, now_ms + limits.DELAY_MS_MAX
        try:
            # Count by day, so that ten years need few buckets.
            counted = await self.forecast.counted("day", *window, topic)
        except OverLimit:
            return None
        return counted.topics.get(topic, 0)

    # -- moving what waits (see table_changes.py) -----------------------------------------------------------------

    async def drain(self, heir: str, *, dry_run: bool = False, caller: Caller = ANONYMOUS) -> wire.Drained:
        """Hand over all pending messages to another group of the cluster. Here it raises NotFound (see grouped.py)."""
        self.policy.allow(caller, Verb.ADMIN)
        raise NotFound("this broker belongs to no cluster: it was started without --cluster")

    async def reserve(self, rows: int, caller: Caller = ANONYMOUS) -> int:
        """Reserve sequence numbers for a bulk attach, and return the first."""
        self.policy.allow(caller, Verb.ADMIN)
        return await self.mover.reserve(rows)

    async def attach(self, attachment: Attachment, caller: Caller = ANONYMOUS) -> Attached:
        """Attach files to the pending table atomically."""
        self.policy.allow(caller, Verb.ADMIN)
        return await self.mover.attach(attachment)

    async def compact(self, caller: Caller = ANONYMOUS) -> Attached | None:
        """Move the scheduled messages of the log's tail to the pending table. None if there are none."""
        self.policy.allow(caller, Verb.ADMIN)
        return await self.mover.compact()

    def compactor_lease(self, lease_ms: int, caller: Caller = ANONYMOUS) -> None:
        """Leave the log's tail to an external compactor for `lease_ms`."""
        self.policy.allow(caller, Verb.ADMIN)
        self.mover.lease(lease_ms)

    def dispatcher_lease(self, lease_ms: int, caller: Caller = ANONYMOUS) -> None:
        """Leave due messages in files to an external dispatcher for `lease_ms`."""
        self.policy.allow(caller, Verb.ADMIN)
        self.delivery.lease_to_dispatcher(lease_ms)

    async def release(self, rows: pa.RecordBatch, caller: Caller = ANONYMOUS) -> delivery.Brought:
        """Release due rows that a dispatcher has brought. Durable on return."""
        self.policy.allow(caller, Verb.ADMIN)
        return await self.delivery.release_brought(rows)

    # -- people ------------------------------------------------------------------------------------------

    def status(self, caller: Caller = ANONYMOUS) -> dict[str, object]:
        """Collect figures for users and for jobs. See docs/flight.md."""
        self.policy.allow(caller, Verb.LOOK)
        parts, segments = self.parts, self.parts.reader.segments
        return {
            "now_ms": parts.clock.now_ms(),
            "log": {
                "first_seq": segments.first_seq,
                # Assigned, but maybe not durable yet. `durable_seq` is the end of the durable rows.
                "next_seq": parts.writer.next_seq,
                "durable_seq": segments.next_seq,
                "bytes": segments.size_bytes,
                "commits": parts.writer.statistics.commits,
                "rows": parts.writer.statistics.rows,
            },
            "watermark": parts.ledger.watermark,
            "settled_before_ms": parts.scheduler.settled_before_ms,
            "strategy": parts.settings.strategy,
            "durability": parts.settings.durability,
            "waiting_messages": parts.waiting_messages,
            "redelivery_messages": parts.lease_counts.waiting_rows,
            "schedule": self.schedule_statistics() | parts.file_keys.statistics(),
            "levels": parts.levels.statistics(),
            "transactions": self.transactions.statistics(),
            "table": parts.table_status(),
            "lateness": self.lateness.summary(),
            "delivered": parts.rates.total(Stat.BROKER_GET_NUMS),
            "clock_suspect": parts.clock.suspect,
            # Only groups that the caller may consume as.
            "conflicting_groups": [
                group
                for group in self.consuming.subscriptions.groups()
                if self.policy.allows(caller, Verb.RECEIVE, group=group)
            ],
        }

    def schedule_statistics(self) -> dict[str, int]:
        """Collect the counts of the scheduler, of the table and its keys, and of the strategy."""
        parts, counts = self.parts, self.parts.scheduler.statistics() | self.parts.hour_log.statistics()
        if not parts.compacts:
            kept = parts.backlog.statistics()
            # Cancelled messages stay in the backlog until their due time, so subtract them.
            opened = counts["near_rows"] + counts["moving_rows"]
            waiting = kept["waiting_rows"] + opened - counts["cancelled_rows"]
            counts |= kept | {"waiting_rows": max(0, waiting)}
        return counts

    def save_offsets(self) -> None:
        """Append to the log the changes of consumer offsets since the last call."""
        self.parts.offsets.save(self.consuming.parked())
