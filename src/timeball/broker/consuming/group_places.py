"""Find the state of a visible message in each consumer group, from the rows with its id and from the leases.

A *copy* is a row in a retry topic or in the dead letters. A copy with a delay names the row that was handed out, and
its release names the scheduled message. Copies that are visible at once name no row. These are attributed to the newest
message of their topic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from timeball.broker.consuming.leases import Leases
from timeball.broker.consuming.redelivery_rows import pop_retry_topic
from timeball.broker.registry.groups import Offsets
from timeball.broker.registry.rates import shares
from timeball.broker.registry.redeliveries import Redeliveries, topic_of
from timeball.broker.registry.topics import Topic, Topics
from timeball.io.clock import SchedulerClock
from timeball.model.answers import GroupPlace, MessagePlace
from timeball.model.message import (
    DLQ_PREFIX,
    ORIGIN_GROUP,
    RETRY_PREFIX,
    RETRY_TOPIC,
    SCHEDULE_TOPIC,
    Kind,
    decode_properties,
)
from timeball.schedule.delay_levels import REAL_TOPIC

WAITING, LEASED, DONE, DEAD = "waiting", "leased", "done", "dead"


class Copy(NamedTuple):
    """A row that brings a message back to a group, or contains it as a dead letter."""

    kind: int
    seq: int
    # For a scheduled message: the row that was handed out. For other kinds: the scheduled message, if there was one.
    source_seq: int | None
    topic: str
    queue_id: int
    queue_offset: int | None
    due_ms: int | None
    attempts: int
    group: str
    origin: str | None  # the topic that the message was sent to


def copy_of(row: Mapping[str, Any]) -> Copy | None:
    """Read a row of the log (READ_SCHEMA, as a mapping) as a copy for a group. None if it is not a copy."""
    properties, topic = decode_properties(row["properties"] or ""), row["topic"]
    if topic == SCHEDULE_TOPIC:
        topic = properties.get(REAL_TOPIC, topic)
    if not topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        return None
    # A copy of RocketMQ's own clients does not name its group. The name of its topic is a prefix and the group's name.
    group = properties.get(ORIGIN_GROUP) or topic.removeprefix(RETRY_PREFIX).removeprefix(DLQ_PREFIX)
    # Without a name of the original topic, it is derived from the retry topic. A topic of the group alone names none.
    origin = properties.get(RETRY_TOPIC)
    if origin is None or origin.startswith(RETRY_PREFIX):
        message_topic = topic_of(group, origin or topic)
        origin = None if message_topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) else message_topic
    return Copy(
        row["kind"], row["seq"], row["source_seq"], topic, row["queue_id"], row["queue_offset"], row["due_ms"],
        row["reconsume_times"] or 0, group, origin,
    )  # fmt: skip


def copies_by_message(copies: Iterable[Copy], places: Mapping[int, MessagePlace]) -> dict[int, list[Copy]]:
    """Group copies by the numbers (`seq`) of their messages, each group in the order of the log.

    `places`: the visible messages, by the number of their row. A copy that cannot be attributed to one of these
    messages (see the module) is left out.
    """
    message_of = {row: place.seq for row, place in places.items()}  # the number of the message of each row
    newest_by_topic = {place.topic: place.seq for _, place in sorted(places.items())}
    by_number: dict[int, list[Copy]] = defaultdict(list)
    for copy in sorted(copies, key=lambda row_copy: row_copy.seq):
        # A copy comes after the row that it names, so `message_of` already contains that row.
        number = message_of.get(copy.source_seq) if copy.source_seq is not None else None
        if number is None and copy.origin in newest_by_topic:
            number = newest_by_topic[copy.origin]
        if number is not None:
            message_of[copy.seq] = number
            by_number[number].append(copy)
    return by_number


class GroupPlaces:
    """Finds the state of messages in consumer groups. Belongs to the event loop.

    `may` states whether the caller may consume as a group. Other groups are left out.
    """

    def __init__(
        self,
        leases: Leases,
        may: Callable[[str], bool],
        *,
        clock: SchedulerClock,
        offsets: Offsets,
        redeliveries: Redeliveries,
    ) -> None:
        self._leases, self._may = leases, may
        self._clock, self._offsets, self._redeliveries = clock, offsets, redeliveries

    async def of(self, place: MessagePlace, copies: Iterable[Copy]) -> list[GroupPlace]:
        """Find the state of a visible message in each group, sorted by group. `copies`: its copies in log order.

        Groups that have not begun in the topic are left out.
        """
        assert place.topic is not None
        # Each group's last copy decides, because it is the newest state of the message there.
        last_copies = {copy.group: copy for copy in copies}
        groups = {*last_copies, *self._offsets.groups_of(place.topic)}
        states = list[GroupPlace]()
        async for names in shares(sorted(groups)):
            for group in filter(self._may, names):
                copy = last_copies.get(group)
                if copy is None:
                    state = self._state_at(group, place.topic, place.queue_id, place.queue_offset, 0)
                else:
                    state = self._state_of_copy(group, copy)
                states += [] if state is None else [state]
        return states

    def has_finished(self, group: str, name: str, queue_id: int, offset: int, topics: Topics) -> bool:
        """Check whether a group has acknowledged the message at a position of a topic, or will not get it any more.

        A message that returns to the group is not finished. Its retry topic does not show which message returns, so
        no message of the topic is finished while any message returns.
        """
        topic = topics.find_topic(name)
        if topic is None or queue_id >= len(topic.queues) or offset < topic.queues[queue_id].index.min_offset:
            return True  # retention or an operator has removed it
        place = self._state_at(group, name, queue_id, offset, 0)
        if place is None or place.state != DONE or self._redeliveries.count((group, name)):
            return False
        # A copy that waits for its due time is in `_redeliveries`. A visible one is in a retry topic: that of group and
        # topic (POP), or that of the group (RocketMQ's push).
        retries = (topics.find_topic(retry) for retry in (pop_retry_topic(group, name), RETRY_PREFIX + group))
        return all(self._has_read(group, retry) for retry in retries if retry is not None)

    def _has_read(self, group: str, topic: Topic) -> bool:
        """Check whether a group has finished all messages of a topic."""
        for queue_id, queue in enumerate(topic.queues):
            # Includes messages that the topic's limit per second does not show to consumers yet.
            first, end = queue.index.min_offset, queue.index.end_offset
            leases = self._leases.get(group, topic.name, queue_id)
            if leases is not None and self._leases.is_live(leases):
                first = max(first, leases.first_open)
            else:
                first = max(first, self._offsets.find_offset(group, topic.name, queue_id) or 0)
            if first < end:
                return False
        return True

    def _state_of_copy(self, group: str, copy: Copy) -> GroupPlace | None:
        """Find the state that the last copy of the message for this group shows."""
        # A MOVED row without a due time is a repeated dead letter.
        if copy.kind in (Kind.SCHEDULED, Kind.MOVED) and copy.due_ms is not None:
            if copy.kind == Kind.SCHEDULED and copy.source_seq is None:
                # A RocketMQ client has returned it with a delay, and it is not released yet.
                return GroupPlace(group, WAITING, copy.attempts, copy.due_ms)
            # Moves keep the number of the scheduled message.
            number = copy.seq if copy.kind == Kind.SCHEDULED else copy.source_seq
            if self._redeliveries.is_waiting(number or 0):
                return GroupPlace(group, WAITING, copy.attempts, copy.due_ms)
            return GroupPlace(group, DONE, copy.attempts)  # released or cancelled
        if copy.topic.startswith(DLQ_PREFIX):
            return GroupPlace(group, DEAD, copy.attempts)
        return self._state_at(group, copy.topic, copy.queue_id, copy.queue_offset, copy.attempts)

    def _state_at(
        self, group: str, topic: str, queue_id: int | None, offset: int | None, attempts: int
    ) -> GroupPlace | None:
        """Find the state of the message at a queue position, from the leases of the group or from its stored offset.

        `attempts`: how often the message was handed out before this row. None if the group has not begun in the queue.
        """
        if queue_id is None or offset is None:
            return None
        queue = self._leases.get(group, topic, queue_id)
        if queue is not None and self._leases.is_live(queue):
            lease = queue.in_flight.get(offset)
            if lease is not None:
                state = WAITING if offset in queue.nacked else LEASED
                until_ms = self._clock.as_wall(lease.deadline_ms)
                return GroupPlace(group, state, attempts + 1 + lease.times, until_ms)
            is_open = offset >= queue.next_offset and offset not in queue.acked_ahead
            lease = queue.returned.get(offset) or queue.parked.get(offset)
            if is_open or lease is not None:
                return GroupPlace(group, WAITING, attempts + (0 if lease is None else lease.times))
            return _done_state(group, attempts)
        stored = self._offsets.find_offset(group, topic, queue_id)
        if stored is None:
            return GroupPlace(group, WAITING, attempts) if attempts else None
        return GroupPlace(group, WAITING, attempts) if offset >= stored else _done_state(group, attempts)


def _done_state(group: str, attempts: int) -> GroupPlace:
    """Build the state of a message that a group has finished. `attempts`: as in `_state_at`.

    A row with earlier attempts is a copy for this group alone, so it was handed out once more. A row without them may
    have been skipped by the group's filter, so its number of attempts is 0.
    """
    return GroupPlace(group, DONE, attempts + 1 if attempts else 0)
