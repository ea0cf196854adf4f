"""What operators change of topics, of groups and of a group's offsets.

Each verb asks the policy for its caller first; what it has changed is durable when it returns. A topic that is deleted
disappears with its messages; promises made to it still fall due, and bring it back as any first message would.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from timeball.access import Caller, Verb
from timeball.broker.components import Components
from timeball.broker.dead_letters import DeadLetters
from timeball.broker.policy import Policy
from timeball.broker.registry.expired import Expiry
from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topic import Topic, TopicConfig, altered_attributes, check_config
from timeball.broker.registry.topics import FilterType
from timeball.broker.retention import unread
from timeball.broker.waiters import Waiters
from timeball.message import DLQ_PREFIX

logger = logging.getLogger(__name__)

# Returns how many scheduled messages wait for a topic; None when they are too many to be counted.
CountPending = Callable[[str], Awaitable[int | None]]


@dataclass(frozen=True, slots=True)
class TopicChange:
    """The wanted configuration of a topic. `attributes`: changes to it, as `altered_attributes` reads them."""

    name: str
    config: TopicConfig
    attributes: str = ""
    filter_type: FilterType | None = None


class TopicRemoved(NamedTuple):
    """The messages that a deleted topic took along, and those that go on without it.

    `unread`: of all groups with offsets in the topic. `dead_letters`: of the group whose dead letters the topic held.
    `pending`: scheduled messages that still wait, and make the topic again when they are due; None: not counted.
    """

    unread: int
    dead_letters: int
    pending: int | None


class Administration:
    """The verbs of operators. Belongs to the event loop."""

    def __init__(
        self,
        parts: Components,
        policy: Policy,
        waiters: Waiters,
        dead_letters: DeadLetters,
        count_pending: CountPending,
    ) -> None:
        self._parts, self._policy, self._waiters = parts, policy, waiters
        self._dead_letters, self._count_pending = dead_letters, count_pending

    # -- topics ------------------------------------------------------------------------------------------------

    async def configure_topics(self, changes: Sequence[TopicChange], caller: Caller) -> None:
        """Make or change topics: none of them when one cannot be so, those before it when one is refused later.

        Raises InvalidName, Forbidden, OverLimit, OutOfRange, RequestError.
        """
        # All are checked before the first is changed: a request that cannot be granted changes nothing.
        configs = [self._config(change, caller) for change in changes]
        # The bound on new topics counts for operators too: a script may make as many as a client.
        self._policy.admit_managed([change.name for change in changes], caller)
        try:
            for change, config in zip(changes, configs, strict=True):
                self._parts.topics.configure(
                    change.name, config, filter_type=change.filter_type, made_by=caller.name
                )
        finally:
            await self._parts.writer.flushed()

    def _config(self, change: TopicChange, caller: Caller) -> TopicConfig:
        self._policy.check_managed(change.name, caller)
        known = self._parts.topics.find_topic(change.name)
        attributes = altered_attributes(known.config.attributes if known else {}, change.attributes)
        config = msgspec.structs.replace(change.config, attributes=attributes)
        check_config(config)
        return config

    async def set_order(self, name: str, caller: Caller, *, order: bool) -> None:
        """Make a topic an ordered one or not; nothing happens when there is no such topic."""
        self._policy.allow(caller, Verb.ADMIN)
        topic = self._parts.topics.find_topic(name)
        if topic is not None and topic.config.order != order:
            self._parts.topics.configure(name, msgspec.structs.replace(topic.config, order=order))
            await self._parts.writer.flushed()

    async def delete_topic(self, name: str, caller: Caller) -> TopicRemoved | None:
        """Delete a topic with its messages and the offsets in it; return what it held, None when there is no topic."""
        self._policy.check_managed(name, caller)
        # First, so that a topic that does not exist costs no count.
        if self._parts.topics.find_topic(name) is None:
            return None
        pending = await self._count_pending(name)
        topic = self._parts.topics.find_topic(name)
        if topic is None:  # another operator was quicker
            return None
        lost, letters = self._unread(topic), 0
        if name.startswith(DLQ_PREFIX):
            group = name.removeprefix(DLQ_PREFIX)
            letters = self._dead_letters.count(group)
            lost += [Expiry(group, name, letters, {})] if letters else []
        removed = TopicRemoved(sum(one.rows for one in lost) - letters, letters, pending)
        # Rows appended from now on belong to a topic of the same name that may be made again.
        self._parts.topics.delete(name, self._parts.writer.next_seq)
        self._parts.offsets.forget_topic(name)
        if lost:
            self._parts.expired.add(lost, self._parts.clock.now_ms())
        if name.startswith(DLQ_PREFIX):
            self._parts.resolved_dead_letters.forget(name.removeprefix(DLQ_PREFIX))
            self._parts.repeated_dead_letters.forget(name.removeprefix(DLQ_PREFIX))
        self._waiters.wake([name])  # consumers that wait for its messages are told that it is gone
        await self._parts.writer.flushed()
        if lost or pending:
            logger.warning(
                "topic deleted topic=%s unread=%d dead_letters=%d pending=%s",
                name, removed.unread, letters, "unknown" if pending is None else pending,
            )  # fmt: skip
        return removed

    def _unread(self, topic: Topic) -> list[Expiry]:
        """Return the messages of a topic that groups have not read."""
        table, found = self._parts.offsets.table, list[Expiry]()
        for group in self._parts.offsets.groups_of(topic.name):
            if rows := unread(topic, table[group][topic.name]):
                found.append(Expiry(group, topic.name, rows, {}))
        return found

    # -- groups ------------------------------------------------------------------------------------------------

    async def configure_groups(self, groups: Iterable[SubscriptionGroup], caller: Caller) -> None:
        """Make groups or replace their configurations, in turn until one is refused; raises InvalidName, OverLimit."""
        self._policy.allow(caller, Verb.ADMIN)
        try:
            for group in groups:
                self._parts.groups.update(group)
        finally:
            await self._parts.writer.flushed()

    async def delete_group(self, name: str, caller: Caller, *, with_offsets: bool) -> None:
        """Delete a group; one that has members comes back with their next heartbeat, as in RocketMQ."""
        self._policy.allow(caller, Verb.ADMIN)
        self._parts.groups.remove(name)
        if with_offsets:
            self._parts.offsets.forget_group(name)
        # Offsets that stay keep no messages while the group is deleted.
        self._parts.expired.note_deleted(name, keeps_offsets=bool(self._parts.offsets.topics_of(name)))
        await self._parts.writer.flushed()
