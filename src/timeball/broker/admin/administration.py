"""Administrative operations on topics, consumer groups and the offsets of a group.

Each operation first checks the caller's permission. Its changes are durable when it returns. Deleting a topic also
removes its messages. Scheduled messages for that topic stay pending. When they are due, they create the topic again, as
the first message to a new topic does.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from timeball.broker.accepting.waiters import Waiters
from timeball.broker.consuming.dead_letters import DeadLetters
from timeball.broker.consuming.retention import unread
from timeball.broker.policy import Policy
from timeball.broker.registry.expired import Expiry
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.tables import Tables
from timeball.broker.registry.topic import Topic, TopicConfig, altered_attributes, check_config
from timeball.broker.registry.topics import FilterType
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model.access import Caller, Verb
from timeball.model.message import DLQ_PREFIX

logger = logging.getLogger(__name__)

# Counts the pending messages of a topic. The result is None if there are too many to count.
CountPending = Callable[[str], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class TopicChange:
    """The requested configuration of a topic. `attributes` holds changes in the format of `altered_attributes`."""

    name: str
    config: TopicConfig
    attributes: str = ""
    filter_type: FilterType | None = None


class TopicRemoved(NamedTuple):
    """Counts of the messages that were deleted with a topic, and of its scheduled messages that stay pending.

    `unread` sums over all groups with offsets in the topic. `dead_letters` is 0 unless the topic held the dead letters
    of a group. `pending` counts scheduled messages, which create the topic again when they are due. None: not counted.
    """

    unread: int
    dead_letters: int
    pending: int | None


class Administration:
    """The operations for administrators. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        waiters: Waiters,
        dead_letters: DeadLetters,
        count_pending: CountPending,
        *,
        clock: SchedulerClock,
        writer: LogWriter,
        tables: Tables,
    ) -> None:
        self._policy, self._waiters = policy, waiters
        self._clock, self._writer, self._tables = clock, writer, tables
        self._dead_letters, self._count_pending = dead_letters, count_pending

    # -- topics ------------------------------------------------------------------------------------------------

    async def configure_topics(self, changes: Sequence[TopicChange], caller: Caller) -> None:
        """Create topics or change their configuration.

        All changes are checked before the first one is made, so an invalid configuration changes nothing. If a topic is
        refused later, the topics before it stay changed. Raises InvalidName, Forbidden, OverLimit, OutOfRange,
        RequestError.
        """
        # Check all changes before the first one is made: an invalid request must change nothing.
        configs = [self._check_change(change, caller) for change in changes]
        # The limit of new topics also applies to administrators: a script can create as many as a client.
        self._policy.admit_managed([change.name for change in changes], caller)
        try:
            for change, config in zip(changes, configs, strict=True):
                self._tables.topics.configure(
                    change.name, config, filter_type=change.filter_type, made_by=caller.name
                )
        finally:
            # Also after a refusal, because the topics before it stay changed.
            await self._writer.flushed()

    def _check_change(self, change: TopicChange, caller: Caller) -> TopicConfig:
        """Check a change of a topic, and build the new configuration. Raises as `configure_topics`."""
        self._policy.check_managed(change.name, caller)
        known = self._tables.topics.find_topic(change.name)
        attributes = altered_attributes(known.config.attributes if known else {}, change.attributes)
        config = msgspec.structs.replace(change.config, attributes=attributes)
        check_config(config)
        return config

    async def set_order(self, name: str, caller: Caller, *, order: bool) -> None:
        """Mark a topic as ordered or unordered. Does nothing if the topic does not exist."""
        self._policy.allow(caller, Verb.ADMIN)
        topic = self._tables.topics.find_topic(name)
        if topic is not None and topic.config.order != order:
            self._tables.topics.configure(name, msgspec.structs.replace(topic.config, order=order))
            await self._writer.flushed()

    async def delete_topic(self, name: str, caller: Caller) -> TopicRemoved | None:
        """Delete a topic, its messages and the offsets in it. Returns counts, or None if the topic does not exist."""
        self._policy.check_managed(name, caller)
        # Check before the count, which is expensive.
        if self._tables.topics.find_topic(name) is None:
            return None
        pending = await self._count_pending(name)
        topic = self._tables.topics.find_topic(name)
        if topic is None:  # another request deleted it during the count
            return None
        # Messages that now count as expired: unread messages and dead letters.
        expiries, dead_letters = self._count_unread(topic), 0
        if name.startswith(DLQ_PREFIX):
            group = name.removeprefix(DLQ_PREFIX)
            dead_letters = self._dead_letters.count(group)
            expiries += [Expiry(group, name, dead_letters, {})] if dead_letters else []
        # `expiries` includes the dead letters, which are not unread messages.
        removed = TopicRemoved(sum(expiry.rows for expiry in expiries) - dead_letters, dead_letters, pending)
        # A topic of the same name may be created again. Rows from this number on belong to the new one.
        self._tables.topics.delete(name, self._writer.next_seq)
        self._tables.offsets.forget_topic(name)
        if expiries:
            self._tables.expired.add(expiries, self._clock.now_ms())
        if name.startswith(DLQ_PREFIX):
            self._tables.resolved_dead_letters.forget(name.removeprefix(DLQ_PREFIX))
            self._tables.repeated_dead_letters.forget(name.removeprefix(DLQ_PREFIX))
        self._waiters.wake([name])  # so that waiting consumers learn that the topic was deleted
        await self._writer.flushed()
        if expiries or pending:
            logger.warning(
                "topic deleted topic=%s unread=%d dead_letters=%d pending=%s",
                name, removed.unread, dead_letters, "unknown" if pending is None else pending,
            )  # fmt: skip
        return removed

    def _count_unread(self, topic: Topic) -> list[Expiry]:
        """Count the messages of a topic that each group with offsets has not read."""
        offset_table, expiries = self._tables.offsets.table, list[Expiry]()
        for group in self._tables.offsets.groups_of(topic.name):
            if rows := unread(topic, offset_table[group][topic.name]):
                expiries.append(Expiry(group, topic.name, rows, {}))
        return expiries

    # -- groups ------------------------------------------------------------------------------------------------

    async def configure_groups(self, groups: Iterable[SubscriptionGroup], caller: Caller) -> None:
        """Create groups or replace their configurations, in order. Groups before a refused one stay changed.

        Raises InvalidName and OverLimit.
        """
        self._policy.allow(caller, Verb.ADMIN)
        try:
            for group in groups:
                self._tables.groups.update(group)
        finally:
            # Also after a refusal, because the groups before it stay changed.
            await self._writer.flushed()

    async def delete_group(self, name: str, caller: Caller, *, with_offsets: bool) -> None:
        """Delete a group. As in RocketMQ, the next heartbeat of a member creates the group again."""
        self._policy.allow(caller, Verb.ADMIN)
        self._tables.groups.remove(name)
        if with_offsets:
            self._tables.offsets.forget_group(name)
        # Retention ignores the offsets that stay, until the group is created again.
        self._tables.expired.note_deleted(name, keeps_offsets=bool(self._tables.offsets.topics_of(name)))
        await self._writer.flushed()
