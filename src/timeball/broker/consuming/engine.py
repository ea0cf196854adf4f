"""The consuming engine hands messages out to consumer groups, and reports members that subscribe differently.

    Consuming         hands messages out and takes answers, for all protocols with receipts
    TracedConsuming   the same, with a span for each message that a group receives, acknowledges or gives up
    Subscriptions     the filters that the members of each group use, and their conflicts

A request is served in three steps:

1. The engine selects positions of the group's queues and leases them, on the event loop and between two awaits.
   Therefore it needs no lock, and no position is leased twice.
2. It reads the rows of these positions.
3. It answers. The leases are in memory, and follow in the log soon (lease_saver.py).

If reading fails, the positions can be leased again at once, because no consumer has seen their rows.

A message that is not acknowledged in time comes back through the group's retry topic. Its attempts are counted, and
after the last one it becomes a dead letter. For an ordered group, a queue hands out nothing while any of its messages
is leased, and a message that comes back is the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.tracing import Tracing
from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming import retry
from timeball.broker.consuming.key_limits import KeyLimits
from timeball.broker.consuming.lease_saver import LeaseSaver, restored_queues
from timeball.broker.consuming.leases import Leases, OpenCount, QueueLeases, lease_ends
from timeball.broker.consuming.redelivery import Redelivery, Return
from timeball.broker.consuming.redelivery_rows import pop_retry_topic, times_of, with_reasons
from timeball.broker.consuming.requests import NO_ROWS, Receipt, Received, ReceiveRequest, Subscription
from timeball.broker.consuming.selection import (
    Selection,
    check_invisible,
    check_request,
    count_unmatched,
    find_readable,
    selected_rows,
)
from timeball.broker.consuming.settling import Settling
from timeball.broker.consuming.waiting import WaitingReceives
from timeball.broker.filters import EVERYTHING
from timeball.broker.policy import Policy
from timeball.broker.registry.groups import FIRST_RETRY_INDEX
from timeball.broker.registry.rates import Rates
from timeball.broker.registry.redeliveries import Redeliveries
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topics import MESSAGE_TYPE, PRIORITY_TYPE, Topic, check_topic
from timeball.io.clock import SchedulerClock
from timeball.io.threads import Threads, in_thread
from timeball.log.row_encoder import ReadRows, filtered
from timeball.log.writer import CommitLog
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.answers import Conflict
from timeball.model.config import Settings
from timeball.model.errors import OutOfRange, TimeballError
from timeball.model.message import READ_SCHEMA

logger = logging.getLogger(__name__)

# ---- members of one group that subscribe differently ---------------------------------------------------------
# The members of a group share the messages of a topic, even if their filters differ. A member with the filter `red`
# skips messages with tag `blue` for the whole group, so another member with the filter `blue` never gets them. The same
# happens when RocketMQ's members subscribe to different topics: queues of a topic are assigned to members that do not
# read it. The members get no error, so the broker logs the conflict and shows it to operators.

# RocketMQ's members send a heartbeat every 30 s and are given up after 120 s.
WINDOW_MS = 2 * limits.MINUTE_MS
LOG_EVERY_MS = 10 * limits.MINUTE_MS  # for each group and topic
FILTERS_MAX = 8  # of a group and topic: more of them would not change the conflict
KEYS_MAX = 16_384  # groups and topics, 10 MB in all
RECENT_MAX = 4_096  # different filters of receives between two drains
RECENT_CHARACTERS_MAX = 512  # of each filter: longer filters are compared by their beginning
SHOWN_CHARACTERS_MAX = 200  # of a filter, or of a list of topics
TOPICS = ""  # the key under which a member's list of topics is stored


@dataclass(slots=True)
class _FilterUse:
    """The times (monotonic) at which members first and last used a filter."""

    first_ms: int
    last_ms: int


class Subscriptions:
    """The filters of the members of all groups. Belongs to the event loop.

    Members repeat their filters with each heartbeat, request or settings. Two filters conflict while both are repeated:
    the older filter was repeated after the first use of the newer filter, and both were used within `WINDOW_MS`. So a
    rollout that changes the filter of a group is a conflict only while members of both versions run.

    The state is in memory only: after a restart, members repeat their filters.
    """

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        # Group, topic and filter of the receives since the last drain. A receive only adds to this set, to stay fast.
        self.recent: set[tuple[str, str, str]] = set()
        self._uses: dict[tuple[str, str], dict[str, _FilterUse]] = {}
        # Group -> topics for which its members have used several filters.
        self._topics_with_several: dict[str, set[str]] = {}
        self._logged_ms: dict[tuple[str, str], int] = {}

    def hear(self, group: str, topic: str, filter_text: str) -> None:
        """Record that a member of a group uses a filter for a topic."""
        if len(filter_text) > SHOWN_CHARACTERS_MAX:
            # A filter may have thousands of characters. Its beginning is shown, with a hash of the whole text.
            filter_text = f"{filter_text[:SHOWN_CHARACTERS_MAX]}… ({hash(filter_text):x})"
        now_ms, key = self._monotonic_ns() // 1_000_000, (group, topic)
        uses = self._uses.get(key)
        if uses is None:
            self._evict_oldest_uses()
            uses = self._uses[key] = {}
        use = uses.get(filter_text)
        if use is None or now_ms - use.last_ms > WINDOW_MS:
            # Clients choose the texts, and each takes memory.
            if len(uses) >= FILTERS_MAX:
                del uses[min(uses, key=lambda text: uses[text].last_ms)]
            use = uses[filter_text] = _FilterUse(now_ms, now_ms)
        use.last_ms = now_ms
        # Nearly all groups use one filter for a topic, so the search for conflicts is seldom necessary.
        if len(uses) > 1:
            self._topics_with_several.setdefault(group, set()).add(topic)
            self._log_conflict(key, now_ms)

    async def drain(self) -> None:
        """Record the filters of recent receives. Called about once a second."""
        self._drain()

    def _drain(self) -> None:
        """Record the filters of recent receives, sorted, so that the result does not depend on the order of a set."""
        recent, self.recent = self.recent, set()
        for group, topic, filter_text in sorted(recent):
            self.hear(group, topic, filter_text)

    def hear_topics(self, group: str, topics: Iterable[str]) -> None:
        """Record that a member subscribes to exactly these topics."""
        self.hear(group, TOPICS, ", ".join(sorted(topics)))

    def conflicts(self, group: str) -> list[Conflict]:
        """Find the topics for which members of a group use conflicting filters now, with these filters."""
        self._drain()
        now_ms, topics = self._monotonic_ns() // 1_000_000, sorted(self._topics_with_several.get(group, ()))
        candidates = (
            Conflict(topic, self._conflicting(self._uses[group, topic], now_ms)) for topic in topics
        )
        return [conflict for conflict in candidates if conflict.wanted]

    def groups(self) -> list[str]:
        """List the groups with conflicts now, sorted."""
        self._drain()
        return [group for group in sorted(self._topics_with_several) if self.conflicts(group)]

    def _evict_oldest_uses(self) -> None:
        """Remove the uses of the groups and topics recorded first, so that there is space for one more in KEYS_MAX."""
        # Clients choose the names, so the number of keys is limited. Removed keys that are in use are soon recorded
        # again.
        while len(self._uses) >= KEYS_MAX:
            key = next(iter(self._uses))
            del self._uses[key]
            self._logged_ms.pop(key, None)
            topics = self._topics_with_several.get(key[0], set())
            topics.discard(key[1])
            if not topics:
                self._topics_with_several.pop(key[0], None)

    def _log_conflict(self, key: tuple[str, str], now_ms: int) -> None:
        """Log the conflict of a group and topic, if there is one that was not logged within LOG_EVERY_MS."""
        conflicting = self._conflicting(self._uses[key], now_ms)
        logged_ms = self._logged_ms.get(key)
        if conflicting and (logged_ms is None or now_ms - logged_ms >= LOG_EVERY_MS):
            self._logged_ms[key] = now_ms
            group, topic = key
            if topic == TOPICS:
                logger.warning("members subscribe to different topics group=%s topics=%s", group, conflicting)
            else:
                logger.warning(
                    "members filter differently group=%s topic=%s filters=%s", group, topic, conflicting
                )

    def _conflicting(self, uses: dict[str, _FilterUse], now_ms: int) -> list[str]:
        """List the filters that conflict now, sorted. Empty without a conflict."""
        # Filters of members that have gone are no longer repeated.
        current = {text: use for text, use in uses.items() if now_ms - use.last_ms <= WINDOW_MS}
        # A filter that was not repeated since the first use of the newest filter has been replaced by it.
        newest_first_ms = max((use.first_ms for use in current.values()), default=0)
        repeated = sorted(text for text, use in current.items() if use.last_ms >= newest_first_ms)
        return repeated if len(repeated) > 1 else []


# ---- the operations of consumers -----------------------------------------------------------------------------

# The nack reason of messages whose consumer disconnected. The next delivery shows it.
CONSUMER_GONE = "its consumer went away without an answer"

# Every fifth request starts with the retry topic: RocketMQ's popFromRetryProbability of 20 %.
RETRY_TURN = 5

_PROPERTIES = READ_SCHEMA.get_field_index("properties")
_RECONSUME_TIMES = READ_SCHEMA.get_field_index("reconsume_times")


class Consuming:
    """The operations of consumers. Belongs to the event loop, and `close` ends its tasks."""

    def __init__(
        self,
        appender: Appender,
        waiters: Waiters,
        policy: Policy,
        *,
        settings: Settings,
        clock: SchedulerClock,
        log: CommitLog,
        tables: Tables,
        redeliveries: Redeliveries,
        threads: Threads,
        rates: Rates,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure` gets the error of a task or timer that cannot go on. Restores the leases from `tables`."""
        self._waiters, self._policy = waiters, policy
        self._clock, self._log, self._tables, self._threads, self._rates = clock, log, tables, threads, rates
        self._loop = asyncio.get_running_loop()
        count = OpenCount()
        saved_queues, orphaned_parts = restored_queues(
            tables.leases, tables.topics.find_topic, tables.offsets.find_offset, count, clock.now_ms()
        )
        self.leases = Leases(tables.offsets, waiters, count, saved_queues, orphaned_parts)
        self._key_limits = KeyLimits(tables.groups.max_per_key, waiters)
        self._key_limits.restore(saved_queues)
        count.free_slot = self._key_limits.free_slot
        self.saver = LeaseSaver(
            self.leases, clock=clock, writer=log.writer, tables=tables, save_ms=settings.ack_save_ms,
            on_failure=on_failure,
        )  # fmt: skip
        self._redelivery = Redelivery(
            appender, waiters, self.leases, self.saver, settings=settings, clock=clock, log=log, tables=tables,
            redeliveries=redeliveries, reader_thread=threads.reader, on_failure=on_failure,
        )  # fmt: skip
        self._settling = Settling(
            waiters,
            self.leases,
            self._redelivery,
            self.saver,
            clock=clock,
            log=log,
            tables=tables,
            rates=rates,
            nack_ms_max=max(settings.delay_ms_max, limits.INVISIBLE_MS_MAX),
        )
        self._turn = itertools.count()
        self.subscriptions = Subscriptions(clock.clock.monotonic_ns)
        self._waiting = WaitingReceives(self._select_now, self._give_up)
        waiters.watch(self._waiting.topics, self._waiting.mark)
        self.leases.count.on_free = self._waiting.mark_all
        # A cache, because every request needs a subscription. Valid for `_versions`, the versions of topics and groups.
        self._subscriptions: dict[tuple[str, str], Subscription] = {}
        self._versions = (-1, -1)
        self._has_secret = False
        # The save of the first offsets of new groups, until it is durable, and the groups and topics that it covers.
        self._begin_save: asyncio.Future[int] | None = None
        self._begin_save_units = set[tuple[str, str]]()

    @property
    def waiting_receives(self) -> int:
        """The number of receives that wait for a message."""
        return self._waiting.length

    async def close(self) -> None:
        """End the tasks, and save the leases."""
        await self._settling.close()

    @property
    def next_lease_end_ms(self) -> int | None:
        """The earliest end of a lease, in ms of `SchedulerClock.elapsed_ms`. None without leases."""
        return self._redelivery.next_lease_end_ms()

    @property
    def is_busy(self) -> bool:
        """True while messages whose leases have ended are written again, or while waiting consumers are served."""
        return self._redelivery.is_writing or self._waiting.is_serving

    def wake(self) -> None:
        """Make redelivery read the clock again, because the clock was changed."""
        self._redelivery.wake()

    # -- handing out -------------------------------------------------------------------------------------------

    def join(self, group: str, topic: str, caller: Caller) -> Subscription:
        """Let a caller consume a topic as a member of a group. The first member creates the group.

        Raises InvalidName, NotFound, Forbidden, OverLimit.
        """
        if caller is not ANONYMOUS:
            caller.check(Verb.RECEIVE, topic=topic, group=group)
        return self._subscription(group, topic)

    def _subscription(self, group: str, topic: str) -> Subscription:
        """Find or create the subscription for a request whose caller was checked by `join`. Raises as `join`."""
        versions = (self._tables.topics.version, self._tables.groups.version)
        if self._versions != versions or len(self._subscriptions) >= limits.POP_WINDOWS_MAX:
            self._subscriptions.clear()
            self._versions = versions
        subscription = self._subscriptions.get((group, topic))
        if subscription is None:
            retry_name, dead_letter_name = pop_retry_topic(group, topic), retry.dead_letter_topic(group)
            # The topics of redelivered messages must have valid names too.
            for name in (topic, retry_name, dead_letter_name):
                check_topic(name)
            # ANONYMOUS, because the cache serves every caller. `join` checks the permissions of the account each time.
            groups = self._tables.groups
            subscription = Subscription(
                group=self._policy.ensure_group(group, ANONYMOUS),
                topic=self._policy.find_readable_topic(topic, ANONYMOUS),
                times_max=groups.times_max(group),
                max_per_key=groups.max_per_key(group),
                retry_name=retry_name,
                dead_letter_name=dead_letter_name,
                retry=None if retry_name == topic else self._tables.topics.find_topic(retry_name),
            )
            self._subscriptions[group, topic] = subscription
        return subscription

    async def receive(
        self, request: ReceiveRequest, wait_ms: int, on_wait: Callable[[], None] = lambda: None
    ) -> Received:
        """Lease up to `request.rows` rows, and return them with their receipts. The result is empty after `wait_ms`.

        If there is no row yet, calls `on_wait` and waits up to `wait_ms` for the first one. Raises RequestError,
        OverLimit.
        """
        check_request(request)
        self._begin_at_ends(self._subscription(request.group, request.topic))
        recent = self.subscriptions.recent
        # Bounded, because clients choose the names and filters, and the set grows until it is drained.
        if len(recent) < RECENT_MAX:
            recent.add((request.group, request.topic, request.wanted.text[:RECENT_CHARACTERS_MAX]))
        deadline_s = self._loop.time() + min(wait_ms, limits.PULL_WAIT_MS_MAX) / 1000
        if not self._has_secret:
            self._tables.receipt_secret.get()
            await self._log.writer.flushed()  # a receipt must not outlive the secret that sealed it
            self._has_secret = True
        while True:
            selection = await self._select(request, deadline_s, on_wait)
            if selection.leased:
                received = await self._hand_out(request, selection)
                if received.receipts:
                    return received
                if not (request.in_order or request.wanted.uses_index):
                    await self._skip_unmatched(request)
            elif not selection.has_unsearched:
                return Received(NO_ROWS, [], rest=selection.rest)
            # The filter matches few messages, so let other tasks run between two selections.
            await asyncio.sleep(0)

    async def _skip_unmatched(self, request: ReceiveRequest) -> None:
        """Move the group past the next messages that the filter does not match, without leasing each of them.

        A lease costs a hundred times as much as the filter's decision. If another consumer of the group leases messages
        of a queue meanwhile, the group does not move there.
        """
        for queue in self._queues_to_search(request):
            if queue.topic != request.topic or queue.returned or queue.acked_ahead:
                continue
            next_offset = queue.next_offset
            start = max(next_offset, queue.index.min_offset)
            seqs = find_readable(queue.index, start)
            if not len(seqs):
                continue
            reader = self._threads.reader
            unmatched = await in_thread(reader, count_unmatched, self._log.reader, request.wanted, seqs)
            if self.leases.is_live(queue) and queue.next_offset == next_offset:
                queue.advance(start + unmatched)
                # Now, because a queue without further messages is not searched again.
                self.leases.store(queue)

    def _begin_at_ends(self, subscription: Subscription) -> None:
        """Let a new group begin at the ends of all queues, unless its configuration says at the first messages."""
        group, topic = subscription.group, subscription.topic
        if group.consume_from_min_enable or self._tables.offsets.table.get(group.group_name, {}).get(
            topic.name
        ):
            return
        # All queues at once: a queue that the topic gets later contains only messages that the group must not miss.
        ends = {number: queue.index.max_offset for number, queue in enumerate(topic.queues)}
        self._tables.offsets.commit(group.group_name, topic.name, ends, ends)
        self.leases.new_units.add((group.group_name, topic.name))

    async def wait_for_rows(self, request: ReceiveRequest, wait_ms: int) -> bool:
        """Wait up to `wait_ms` until the group has rows to receive. False if the time is up.

        Does not apply filters, and leases nothing. A new group does not begin here unless it begins at the ends.
        """
        check_request(request)
        self._begin_at_ends(self._subscription(request.group, request.topic))
        deadline_s = self._loop.time() + min(wait_ms, limits.PULL_WAIT_MS_MAX) / 1000
        while True:
            if self._has_rows(request):
                return True
            left_s = deadline_s - self._loop.time()
            if left_s <= 0 or not await self._waiters.wait_any(self._topics_of(request), left_s):
                return False

    def _has_rows(self, request: ReceiveRequest) -> bool:
        """Check whether a queue of this request has messages that the group may receive. Raises OutOfRange."""
        for topic, queue_ids in self._queues_of(request):
            offsets = self._tables.offsets.table.get(request.group, {}).get(topic.name, {})
            for queue_id in queue_ids:
                queue = self.leases.get(request.group, topic.name, queue_id)
                index = topic.queues[queue_id].index
                if queue is None or not self.leases.is_live(queue):
                    has_rows = max(offsets.get(queue_id, 0), index.min_offset) < index.max_offset
                else:
                    has_rows = bool(queue.returned) or queue.next_offset < index.max_offset
                    has_rows &= not (request.in_order and queue.in_flight)
                if has_rows:
                    return True
        return False

    async def _select(
        self, request: ReceiveRequest, deadline_s: float, on_wait: Callable[[], None]
    ) -> Selection:
        """Lease available positions, or the first ones that arrive before `deadline_s` on the loop's clock."""
        selection = self._select_now(request)
        if selection.leased or selection.has_unsearched or self._loop.time() >= deadline_s:
            return selection
        on_wait()
        served = await self._waiting.wait(request, self._topics_of(request), deadline_s)
        return self._select_now(request) if served is None else served

    def _topics_of(self, request: ReceiveRequest) -> set[str]:
        """Name the topics whose messages a request may get, and the ends of leases that it may wait for."""
        topics = {request.topic}
        if not request.in_order:
            topics.add(self._subscription(request.group, request.topic).retry_name)
        return topics | {lease_ends(request.group, topic) for topic in topics}

    def _select_now(self, request: ReceiveRequest) -> Selection:
        """Lease the positions that are available now. The selection may be empty. Raises OutOfRange, OverLimit."""
        queues, free_positions = self._queues_to_search(request), self.leases.free_positions
        self.leases.count.was_exhausted |= free_positions <= 0
        now_ms = self._clock.now_ms()
        # A position that is leased again, perhaps in the same millisecond, has another receipt. An ordered group gets
        # the same position again while its lease goes on.
        pop_ms = max(now_ms, 1 + self.leases.count.ended_pop_ms)
        if request.in_order:
            pop_ms = max(pop_ms, 1 + max((queue.last_pop_ms for queue in queues), default=0))
        selection = Selection(
            max(0, min(request.rows, free_positions)), pop_ms, self._clock.read_elapsed_ms + request.invisible_ms,
            now_ms=now_ms, in_order=request.in_order, attempt_id=request.attempt_id,
        )  # fmt: skip
        selection.examined_queues = len(queues)
        subscription = self._subscription(request.group, request.topic)
        if subscription.max_per_key is not None and not request.in_order:
            self._select_by_key(request, selection, subscription.topic, queues)
        for queue in queues:
            if selection.turn is None:  # otherwise `_select_by_key` has leased positions of all queues
                # A message in the retry topic has passed the filter before.
                selection.lease(queue, request.wanted if queue.topic == request.topic else EVERYTHING)
            selection.rest += queue.index.max_offset - queue.next_offset
        if not selection.leased:
            # With leases, `_hand_out` does this after the read.
            self.leases.store_all(selection.queues)
        return selection

    def _select_by_key(
        self, request: ReceiveRequest, selection: Selection, topic: Topic, queues: Sequence[QueueLeases]
    ) -> None:
        """Lease positions for a group with a limit of leases for each key, and begin the selection's turn.

        The main topic and the retry topic are searched one after the other, each in the order of the log.
        """
        # The queues of a PRIORITY topic are searched one after another, because priority goes before the order of keys.
        if topic.config.attributes.get(MESSAGE_TYPE) == PRIORITY_TYPE:
            parts = [[queue] for queue in queues]
        else:
            parts = [[*part] for _, part in itertools.groupby(queues, key=lambda queue: queue.topic)]
        for part in parts:
            wanted = request.wanted if part[0].topic == request.topic else EVERYTHING
            selection.lease_in_log_order(
                part, wanted, only_returned=not self._key_limits.may_lease_new(request.group)
            )
        selection.turn = self._key_limits.begin_turn(
            request.group, lambda: self.leases.give_up(selection.leased, selection.pop_ms)
        )
        if not selection.leased:
            selection.turn.end()

    def _give_up(self, selection: Selection) -> None:
        """Let the positions of a selection be leased again, because its consumer has not seen the messages."""
        if selection.turn is None or selection.turn.is_decided:
            self.leases.give_up(selection.leased, selection.pop_ms)
        else:
            selection.turn.give_up()

    def _queues_to_search(self, request: ReceiveRequest) -> list[QueueLeases]:
        """List the queues that this request may lease from, in the order in which to search them.

        Raises OutOfRange, OverLimit.
        """
        turn = next(self._turn)
        main = self._subscription(request.group, request.topic)
        topics = self._queues_of(request)
        ordered_queues: list[QueueLeases] = []
        by_priority = main.topic.config.attributes.get(MESSAGE_TYPE) == PRIORITY_TYPE and not request.in_order
        # The retry topic is searched last, but first in each RETRY_TURN-th request, so that it does not starve.
        for topic, queue_ids in reversed(topics) if turn % RETRY_TURN == 0 and not by_priority else topics:
            is_main = topic is main.topic
            from_max = request.from_max and is_main
            queues = self.leases.open(
                request.group, topic, queue_ids, from_max=from_max, queues_in_use=ordered_queues
            )
            for queue in queues:
                if queue.returned or queue.parked:
                    queue.drop_before(self._log.reader.first_seq)
            if by_priority and is_main:
                # The last queue has the highest priority (rules.queue_of_priority).
                ordered_queues += reversed(queues)
                continue
            # Each request begins with another queue, so that the last ones do not starve while the first have messages.
            start = turn % max(1, len(queues))
            ordered_queues += queues[start:] + queues[:start]
        return ordered_queues

    def _queues_of(self, request: ReceiveRequest) -> list[tuple[Topic, Sequence[int]]]:
        """List the topics of a request, with the numbers of the queues from which it may lease. Raises OutOfRange."""
        main = self._subscription(request.group, request.topic)
        topics = [main.topic] if request.in_order or main.retry is None else [main.topic, main.retry]
        count = main.topic.read_queues
        if request.queue_id >= count:
            raise OutOfRange(f"queue {request.queue_id}: topic {main.topic.name!r} has {count}")
        return [
            (
                topic,
                [request.queue_id]
                if topic is main.topic and request.queue_id >= 0
                else range(topic.read_queues),
            )
            for topic in topics
        ]

    async def _read(self, request: ReceiveRequest, selection: Selection) -> ReadRows:
        """Read the rows of a selection. Removes the positions of rows that are not for this consumer.

        If the filter excludes a row, or a copy is for another group, its position is done. A position without a slot of
        its key waits for a slot.
        """
        seqs = [lease.seq for _, _, lease in selection.leased]
        rows, keep = await selected_rows(
            request,
            seqs,
            writer=self._log.writer,
            reader=self._log.reader,
            reader_thread=self._threads.reader,
        )
        # A selection that was given up meanwhile holds no positions.
        if keep is not None and not (selection.turn is not None and selection.turn.is_given_up):
            self.leases.finish(selection.split_unwanted(keep))
        if selection.turn is not None:
            return await self._admit(request, selection, rows)
        return rows

    async def _admit(self, request: ReceiveRequest, selection: Selection, rows: ReadRows) -> ReadRows:
        """Take a slot of its key for each position. Positions without one leave the selection and wait for a slot.

        Returns the rows of the remaining positions.
        """
        assert selection.turn is not None
        # False: the positions were given back together with an earlier selection.
        if not await selection.turn.wait():
            selection.turn.end()
            selection.leased = []
            return NO_ROWS
        keep = self._key_limits.admit(request.group, selection.leased, rows)
        selection.turn.end()
        if keep.all():
            return rows
        selection.split_unwanted(keep)
        return filtered(rows, keep)

    async def _save_first_offsets(self, queues: Collection[QueueLeases]) -> None:
        """Save the first offsets of a group that has begun in these queues. Raises OverLimit on a full disk.

        They are in the log before its first messages are handed out. Otherwise the group could begin elsewhere after a
        crash. If a full disk refuses the first offset of one group, other groups still get their messages.
        """
        units = {(queue.group, queue.topic) for queue in queues}
        if not units.isdisjoint(self.leases.new_units):
            self._begin_save = self.saver.save_new_groups(queues)
            self._begin_save_units |= self.leases.new_units
            self.leases.new_units.clear()  # after the save, which a full disk refuses
        if self._begin_save is not None and not units.isdisjoint(self._begin_save_units):
            begin_save = self._begin_save
            await asyncio.shield(begin_save)  # the next requests of the group wait for it, too
            if self._begin_save is begin_save:
                self._begin_save, self._begin_save_units = None, set()

    async def _hand_out(self, request: ReceiveRequest, selection: Selection) -> Received:
        """Read the rows of a selection, and build the answer. Raises OverLimit if the disk is full.

        If this fails, the positions can be leased again.
        """
        # Before the read: if the consumer disconnects during it, the positions must still come back.
        self._redelivery.add_deadlines(selection)
        try:
            await self._save_first_offsets(selection.queues)
            rows = await self._read(request, selection)
            self.leases.store_all(selection.queues)
            if not self.saver.save_ms:
                await self.saver.save_and_wait()
        except BaseException:  # also when the consumer has disconnected, because it has not seen these rows
            self._give_up(selection)
            raise
        size_bytes = sum(lease.size_bytes for _, _, lease in selection.leased)
        self._rates.count_received(request.topic, request.group, rows.num_rows, size_bytes)
        pop_ms, leased = selection.pop_ms, selection.leased
        receipts = [
            Receipt(request.group, queue.topic, queue.queue_id, offset, pop_ms) for queue, offset, _ in leased
        ]
        times = [lease.times for _, _, lease in leased] if request.in_order else []
        received = Received(rows, receipts, pop_ms, times, selection.rest)
        if request.in_order and request.counts_times:
            return await self._count_attempts(request, selection, received)
        return received

    async def _count_attempts(
        self, request: ReceiveRequest, selection: Selection, received: Received
    ) -> Received:
        """Write the number of earlier attempts and the last nack reason into the rows of an ordered group.

        Messages without attempts left become dead letters. Returns the other messages, without `times`. If that fails,
        the positions can be leased again. Raises OverLimit if the disk is full.
        """
        times = times_of(received.rows) + np.array(received.times, dtype=np.int64)
        exhausted = times > self._tables.groups.times_max(request.group)
        # The answer's rows show the attempts. An in-order lease has no row in the log that counts them.
        rows = received.rows.set_column(
            _RECONSUME_TIMES, READ_SCHEMA.field(_RECONSUME_TIMES), pa.array(times.astype(np.int32))
        )
        if any(reasons := [lease.nack_reason for _, _, lease in selection.leased]):
            texts = with_reasons(rows.column("properties"), reasons)
            rows = rows.set_column(_PROPERTIES, READ_SCHEMA.field(_PROPERTIES), texts)
        receipts = received.receipts
        if exhausted.any():
            flags = list(zip(receipts, exhausted.tolist(), strict=True))
            try:
                await asyncio.gather(
                    *(self.dead_letter(receipt) for receipt, is_exhausted in flags if is_exhausted)
                )
            # Also when the consumer has disconnected, because it has not seen the other rows.
            except BaseException:
                self.return_unseen(receipts)
                raise
            rows = rows.filter(pa.array(~exhausted))
            receipts = [receipt for receipt, is_exhausted in flags if not is_exhausted]
        return Received(rows, receipts, received.pop_ms, rest=received.rest)

    # -- answers -------------------------------------------------------------------------------------------------

    def acknowledge_now(self, receipts: Sequence[Receipt]) -> list[bool]:
        """End these leases in memory. The result is False for each receipt that is not, or no longer, valid.

        With `ack_save_ms` 0, the caller awaits `saver.save_and_wait` before it answers.
        """
        return self._settling.acknowledge(receipts)

    async def acknowledge(self, receipts: Sequence[Receipt]) -> list[bool]:
        """End these leases. Each receipt that is not, or no longer, valid has the result False. Raises OutOfRange."""
        if len(receipts) > limits.CANCELS_PER_REQUEST_MAX:
            raise OutOfRange(f"at most {limits.CANCELS_PER_REQUEST_MAX} receipts in one request; split it")
        results = self.acknowledge_now(receipts)
        if not self.saver.save_ms and receipts:
            await self.saver.save_and_wait()
        return results

    def was_ended(self, receipts: Sequence[Receipt]) -> list[bool]:
        """Find the receipts whose messages were acknowledged or became dead letters, as far as the broker remembers.

        To acknowledge such a receipt again is no error, because the first answer may have been lost. The result is
        False for a message that has come back meanwhile, and for all receipts some time after the end of the lease.
        """
        return [self._settling.was_ended(receipt) for receipt in receipts]

    async def change_invisible_time(
        self, receipt: Receipt, invisible_ms: int | None, *, counts: bool = True, new_receipt: bool = False
    ) -> Receipt | None:
        """Make a lease end `invisible_ms` from now. Returns its receipt, or None if `receipt` is not valid.

        If `invisible_ms` is None, the message is given back (`nack`) with the delay of the group's retry policy. With
        `new_receipt`, a new receipt replaces the old one, except in an ordered group. Without `counts`, the lease does
        not count as an attempt (RocketMQ's `suspend`). A lease of an ordered group always counts. If the message was
        given back, the returned receipt is not valid any more. `Settling.change` names the other cases of this.

        Raises OutOfRange, and OverLimit if the disk is full.
        """
        if invisible_ms is None:
            return await self.nack(receipt, None, counts=counts)
        check_invisible(invisible_ms, 0)
        changed = await self._settling.change(receipt, invisible_ms, counts=counts, new_receipt=new_receipt)
        if not self.saver.save_ms:
            await self.saver.save_and_wait()
        return changed

    async def nack(
        self,
        receipt: Receipt,
        delay_ms: int | None,
        reason: str = "",
        *,
        counts: bool = True,
        first: int = FIRST_RETRY_INDEX,
    ) -> Receipt | None:
        """Give a message back for its next delivery in `delay_ms`, durably. Returns `receipt`, or None if not valid.

        Afterwards the receipt is not valid, except in an ordered group. The next delivery and the dead letter show the
        reason (redelivery_rows.NACK_REASON). If `delay_ms` is None, the group's retry policy decides, and `first` is
        the index at which its list of delays begins (see `retry_delay_ms`). For an ordered group, None is no delay.

        Raises InvalidDelay for more than the longest delay of a send, or more than 12 h for a message that is leased in
        order. Raises OverLimit if the disk is full.
        """
        is_valid = await self._settling.give_up(receipt, Return(delay_ms, first, reason), counts=counts)
        return receipt if is_valid else None

    async def dead_letter(self, receipt: Receipt, reason: str = "") -> bool:
        """Move the message to the dead letters now, durably. False if not valid. Raises OverLimit on a full disk."""
        return await self._settling.give_up(receipt, Return(reason=reason, is_dead=True))

    async def give_back(self, receipts: Sequence[Receipt]) -> None:
        """Give back the messages of a consumer that disconnected without an answer. They count as failed attempts.

        An error is logged and not raised.
        """
        try:
            await asyncio.gather(*(self.nack(receipt, None, CONSUMER_GONE) for receipt in receipts))
        except TimeballError as error:
            # The leases are unchanged, so the messages come back when their leases end.
            logger.warning("messages not given back early messages=%d reason=%s", len(receipts), error)

    def return_unseen(self, receipts: Sequence[Receipt]) -> None:
        """End leases whose consumer disconnected before it received the messages.

        They come back at once, and the lease does not count as an attempt.
        """
        self._settling.give_back(receipts)


# ---- the operations with tracing -----------------------------------------------------------------------------
# A separate class, so that the engine without tracing has no overhead. Changes of invisible times have no spans,
# because workers that renew their leases would make most of them.


class TracedConsuming(Consuming):
    """The operations of consumers, recorded in the broker's traces."""

    def __init__(self, *args: Any, traces: Tracing, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._traces = traces

    async def receive(
        self, request: ReceiveRequest, wait_ms: int, on_wait: Callable[[], None] = lambda: None
    ) -> Received:
        """Receive messages, and record the messages that were handed out."""
        received = await super().receive(request, wait_ms, on_wait)
        # A long poll that ended without messages is no event of any message.
        if received.receipts:
            self._traces.received(request.group, received.rows, received.receipts)
        return received

    def acknowledge_now(self, receipts: Sequence[Receipt]) -> list[bool]:
        """End leases as `Consuming.acknowledge_now`, and record them as acknowledged."""
        # Read before the call, so that the span includes its time.
        begin_ns = self._traces.now_ns()
        valid = super().acknowledge_now(receipts)
        self._traces.settled("ack", receipts, valid, begin_ns)
        return valid

    async def dead_letter(self, receipt: Receipt, reason: str = "") -> bool:
        """Move a message to the dead letters as `Consuming.dead_letter`, and record it."""
        begin_ns = self._traces.now_ns()
        is_valid = await super().dead_letter(receipt, reason)
        self._traces.settled("dead_letter", [receipt], [is_valid], begin_ns)
        return is_valid
