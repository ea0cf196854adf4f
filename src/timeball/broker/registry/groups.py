"""Consumer groups as an operator configures them: may they consume, how often is a message tried, in how many queues.

A group comes into being with its first member, with RocketMQ's defaults, and stays until somebody deletes it.
Names and values are RocketMQ's own, since its tools write them and read them back; what Timeball does not act
on (the slow-reading broker) is kept and given back as it came.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from timeball import limits
from timeball.broker.consuming import retry
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.broker.registry.topics import check_name
from timeball.errors import GroupNotFound, OverLimit

ATTRIBUTES_MAX = 64

# The integer range of RocketMQ's fields; -1 in retry_max_times is "the default" there as here.
Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Queues = Annotated[int, msgspec.Meta(ge=0, le=limits.QUEUES_PER_TOPIC_MAX)]


class ExponentialRetry(msgspec.Struct, frozen=True, rename="camel"):
    """Kept for clients that retry by themselves; durations in ms."""

    initial: int = 5_000
    max: int = 2 * limits.HOUR_MS
    multiplier: int = 2


class CustomizedRetry(msgspec.Struct, frozen=True, rename="camel"):
    """The same as a list of durations in ms."""

    next: Annotated[list[int], msgspec.Meta(max_length=64)] = []


class RetryPolicy(msgspec.Struct, frozen=True, rename="camel"):
    """RocketMQ's GroupRetryPolicy (retry_policy.py). As in RocketMQ, consumers of remoting do not feel it."""

    type: str = "CUSTOMIZED"
    exponential_retry_policy: ExponentialRetry | None = None
    customized_retry_policy: CustomizedRetry | None = None


class SubscriptionGroup(msgspec.Struct, frozen=True, rename="camel"):
    """RocketMQ's SubscriptionGroupConfig."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: Queues = 1
    retry_max_times: Int32 = 16
    group_retry_policy: RetryPolicy = RetryPolicy()
    broker_id: Int32 = 0
    which_broker_when_consume_slowly: Int32 = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: Int32 = 0
    consume_timeout_minute: Int32 = 15
    attributes: Annotated[dict[str, str], msgspec.Meta(max_length=ATTRIBUTES_MAX)] = {}


class Groups:
    """All groups. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._kept = MetaTable(meta, "group", SubscriptionGroup)
        self._groups = self._kept.values  # to be read; changes go through `_kept`
        self.version = 0  # counts changes since the start, for tools that ask whether anything is new

    def get(self, name: str) -> SubscriptionGroup:
        """The group; raises GroupNotFound."""
        group = self._groups.get(name)
        if group is None:
            raise GroupNotFound(f"consumer group {name[: limits.GROUP_BYTES_MAX]!r} does not exist")
        return group

    def find(self, name: str) -> SubscriptionGroup | None:
        """The group, if it exists."""
        return self._groups.get(name)

    def times_max(self, name: str) -> int:
        """How often a message is tried again that this group did not acknowledge; a group unknown has the default."""
        group = self._groups.get(name)
        return retry.times_max(-1 if group is None else group.retry_max_times, None)

    def all(self) -> list[SubscriptionGroup]:
        """All groups."""
        return list(self._groups.values())

    def ensure(self, name: str) -> SubscriptionGroup:
        """The group, made with the defaults when there is none; raises InvalidMessage, OverLimit."""
        return self._groups.get(name) or self.update(SubscriptionGroup(name))

    def update(self, group: SubscriptionGroup) -> SubscriptionGroup:
        """Make a group or replace its configuration; raises InvalidMessage, OverLimit."""
        name = group.group_name
        if self._groups.get(name) == group:
            return group
        check_name(name, limits.GROUP_BYTES_MAX, "group")
        if name not in self._groups and len(self._groups) >= limits.GROUPS_MAX:
            raise OverLimit(f"{limits.GROUPS_MAX} consumer groups exist; delete some first")
        self._put(name, group)
        return group

    def remove(self, name: str) -> None:
        """Forget a group; nothing happens when there is none. Its members make it anew when they beat."""
        if name in self._groups:
            self._put(name, None)

    def _put(self, name: str, group: SubscriptionGroup | None) -> None:
        self._kept.put([(name, group)])
        self.version += 1
