"""Consumer groups: their configuration, retry delays, request modes and stored offsets. Also the epoch of the log.

A group is created with its first member, with RocketMQ's defaults, and stays until an operator deletes it. Its
configuration says whether it may consume, how often a message is tried, and how many queues it has. Names and values
are RocketMQ's, because its tools write them and read them back. Settings without a function in Timeball (the broker for
slow consumers) are stored and returned unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.broker.registry.topics import check_name, check_topic
from timeball.model import limits
from timeball.model.errors import GroupNotFound, OutOfRange, OverLimit

ATTRIBUTES_MAX = 64
TIMES_MAX = 16  # RocketMQ's retryMaxTimes
# An attribute of a group: how often a message may be given back without an attempt, and the default.
UNCOUNTED_MAX_ATTRIBUTE, UNCOUNTED_MAX = "timeball.uncounted.max", 1_000
MAX_PER_KEY = "timeball.max.per.key"  # an attribute of a group: the limit of leases with the same key

# The integer range of RocketMQ's fields. As in RocketMQ, -1 in retry_max_times means the default.
Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Queues = Annotated[int, msgspec.Meta(ge=0, le=limits.QUEUES_PER_TOPIC_MAX)]


class ExponentialRetry(msgspec.Struct, frozen=True, rename="camel"):
    """A policy whose delays grow exponentially. Durations in milliseconds."""

    initial: int = 5_000
    max: int = 2 * limits.HOUR_MS
    multiplier: int = 2


class CustomizedRetry(msgspec.Struct, frozen=True, rename="camel"):
    """A policy with a list of delays, in milliseconds."""

    next: Annotated[list[int], msgspec.Meta(max_length=64)] = []


class RetryPolicy(msgspec.Struct, frozen=True, rename="camel"):
    """RocketMQ's GroupRetryPolicy (`retry_delay_ms`). As in RocketMQ, it has no effect on consumers of remoting."""

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


def times_max(of_group: int, of_client: int | None) -> int:
    """Choose how often a message may be delivered again: the client's value, or the group's if the client has none.

    A negative value means the default, TIMES_MAX.
    """
    configured = of_group if of_client is None else of_client
    return configured if configured >= 0 else TIMES_MAX


class Groups:
    """All consumer groups. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "group", SubscriptionGroup)
        self._groups = self._table.values  # the values of `_table`, read-only: changes go through `_put`
        self.version = 0  # counts changes since the start, so that tools can see whether anything is new

    def get(self, name: str) -> SubscriptionGroup:
        """Find a group. Raises GroupNotFound."""
        group = self._groups.get(name)
        if group is None:
            raise GroupNotFound(f"consumer group {name[: limits.GROUP_BYTES_MAX]!r} does not exist")
        return group

    def find_group(self, name: str) -> SubscriptionGroup | None:
        """Find a group, or None if it does not exist."""
        return self._groups.get(name)

    def times_max(self, name: str) -> int:
        """Find how often a message that this group did not acknowledge may be tried again."""
        group = self._groups.get(name)
        return times_max(-1 if group is None else group.retry_max_times, None)

    def uncounted_max(self, name: str) -> int:
        """Find how often members of this group may give a message back without an attempt."""
        number = self._number(name, UNCOUNTED_MAX_ATTRIBUTE)
        return UNCOUNTED_MAX if number is None else number

    def max_per_key(self, name: str) -> int | None:
        """Find how many messages with the same key members of this group may hold. None without a limit."""
        return self._number(name, MAX_PER_KEY) or None

    def _number(self, name: str, attribute: str) -> int | None:
        """Read a numeric attribute of a group. None if it is missing or no number."""
        group = self._groups.get(name)
        text = "" if group is None else group.attributes.get(attribute, "")
        # The tools that write attributes do not check them.
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None

    def all(self) -> list[SubscriptionGroup]:
        """List all groups."""
        return list(self._groups.values())

    def names(self) -> set[str]:
        """List the names of all groups."""
        return set(self._groups)

    def ensure(self, name: str) -> SubscriptionGroup:
        """Find a group, or create it with the defaults. Raises InvalidName, OverLimit."""
        return self._groups.get(name) or self.update(SubscriptionGroup(name))

    def update(self, group: SubscriptionGroup) -> SubscriptionGroup:
        """Create a group or replace its configuration. Raises InvalidName, OverLimit."""
        name = group.group_name
        # Members register with every heartbeat, so an unchanged group must not add a row to the log.
        if self._groups.get(name) == group:
            return group
        # Names become parts of the names of topics and of the keys of META rows.
        check_name(name, limits.GROUP_BYTES_MAX, "group")
        if name not in self._groups and len(self._groups) >= limits.GROUPS_MAX:
            raise OverLimit(f"{limits.GROUPS_MAX} consumer groups exist; delete some first")
        self._put(name, group)
        return group

    def remove(self, name: str) -> None:
        """Delete a group, if it exists. The next heartbeat of a member creates it again."""
        if name in self._groups:
            self._put(name, None)

    def _put(self, name: str, group: SubscriptionGroup | None) -> None:
        self._table.put([(name, group)])
        # Counted for every change: tools use this number to decide whether they must read the groups again.
        self.version += 1


# ---- delays between two attempts -----------------------------------------------------------------------------

_S, _M, _H = limits.SECOND_MS, limits.MINUTE_MS, limits.HOUR_MS
# RocketMQ's 18 default delay levels.
LEVELS_MS = (
    1 * _S, 5 * _S, 10 * _S, 30 * _S, 1 * _M, 2 * _M, 3 * _M, 4 * _M, 5 * _M, 6 * _M, 7 * _M, 8 * _M, 9 * _M,
    10 * _M, 20 * _M, 30 * _M, 1 * _H, 2 * _H,
)  # fmt: skip
# The index of a customised policy's first delay: RocketMQ's levels 1 and 2 are not for retries.
FIRST_RETRY_INDEX = 2
# Push consumers over gRPC use all delays of the list.
PUSH_FIRST = 0
POWER_MAX = 32


def retry_delay_ms(policy: RetryPolicy | None, attempt: int, *, first: int = FIRST_RETRY_INDEX) -> int:
    """Compute the delay in milliseconds between a failed attempt and the next delivery.

        CUSTOMIZED    item first + n of a list of delays, and then always the last item. Without a list: LEVELS_MS
        EXPONENTIAL   initial x multiplier^n, at most max

    `attempt` is counted from 1, as consumers of RocketMQ 5 see it. n is RocketMQ's reconsumeTimes, one less.
    `policy` None: RocketMQ's default.
    `first`: the index at which a list begins. RocketMQ's brokers begin with the third item (10 s), its push consumers
    over gRPC with the first (PUSH_FIRST, 1 s).
    """
    policy = policy or RetryPolicy()
    reconsume_times = max(0, attempt - 1)
    if policy.type == "EXPONENTIAL":
        delay_ms = _exponential(policy.exponential_retry_policy or ExponentialRetry(), reconsume_times)
    else:
        delay_ms = _customized(policy.customized_retry_policy or CustomizedRetry(), reconsume_times + first)
    # An administrator's tools may send policies with any numbers.
    return min(max(0, delay_ms), limits.INVISIBLE_MS_MAX)


def durations_ms(policy: CustomizedRetry | None) -> list[int]:
    """List the delays in ms of a customised policy, or RocketMQ's levels if it has none."""
    return list(policy.next) if policy is not None and policy.next else list(LEVELS_MS)


def _customized(policy: CustomizedRetry, index: int) -> int:
    """Compute the delay in ms at an index of the policy's list."""
    durations = durations_ms(policy)
    # After the end of the list, its last duration is repeated.
    return durations[min(index, len(durations) - 1)]


def _exponential(policy: ExponentialRetry, reconsume_times: int) -> int:
    """Compute the delay in ms after `reconsume_times` earlier redeliveries."""
    # Bounded, because Python's integers grow without limit.
    factor: int = policy.multiplier ** min(reconsume_times, POWER_MAX)
    return min(policy.max, policy.initial * factor)


# ---- request modes -------------------------------------------------------------------------------------------

Mode = Literal["PULL", "POP"]


class RequestMode(msgspec.Struct, frozen=True, rename="camel"):
    """How a group consumes a topic. `pop_share_queue_num` 0: each client pops from all queues."""

    topic: str
    consumer_group: str
    mode: Mode = "PULL"
    pop_share_queue_num: int = 0


class RequestModes:
    """The request modes (PULL or POP) that administrators set for groups and topics. The default is PULL.

    RocketMQ stores the same in messageRequestMode.json. Belongs to the event loop.
    """

    def __init__(self, meta: MetaLog) -> None:
        self._modes = MetaTable(meta, "mode", RequestMode)

    def get(self, topic: str, group: str) -> RequestMode:
        """Find the mode in which this group consumes a topic. PULL if none is set."""
        return self._modes.values.get(f"{topic}@{group}") or RequestMode(topic, group)

    def set(self, mode: RequestMode) -> None:
        """Change a group's mode. Raises InvalidName, OverLimit."""
        check_topic(mode.topic)
        check_name(mode.consumer_group, limits.GROUP_BYTES_MAX, "group")
        key = f"{mode.topic}@{mode.consumer_group}"
        # Topic and group need not exist, so the number of modes has its own bound.
        if key not in self._modes.values and len(self._modes.values) >= limits.GROUPS_MAX:
            raise OverLimit(f"the modes of {limits.GROUPS_MAX} groups are set")
        self._modes.put([(key, mode)])


# ---- the epoch of a replicated log ---------------------------------------------------------------------------
# The META row of the epoch is the first row that a leader writes (docs/cluster-protocol.md).

PREFIX = "cluster"
EPOCH_KEY = f"{PREFIX}/epoch"


class EpochFacts(msgspec.Struct, frozen=True):
    """The value of the META row that opens an epoch."""

    # Grows with each change of leader. Every later frame has it in its header.
    epoch: int
    leader: str  # a replica: node and incarnation
    # Only information for people and for the dump. Due times follow each leader's own clock, guarded against steps.
    wall_ms: int  # by the leader's clock


# ---- stored offsets, per topic and queue ---------------------------------------------------------------------
#     offsets/<group>@<topic>   {queue: offset}
#
# Changed offsets are appended as one frame of META rows: those of leases together with the leases
# (consuming/lease_saver.py), those that consumers store themselves at most once a second (RocketMQ: every five
# seconds). After a crash a group may see the messages of its last moments again (G4, at least once). It never misses
# any, because the rows of offsets come after the messages that they cover.

PARKED = "parked"  # a row of earlier versions, which is ignored

Table = dict[str, dict[str, dict[int, int]]]  # group -> topic -> queue -> offset
Unit = tuple[str, str]  # a group and a topic, whose offsets are saved together


class Offsets:
    """The stored offsets of all groups. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._meta = meta
        self.table: Table = {}  # read-only outside; changes go through `commit` and `advance`
        self._changed: set[Unit] = set()  # changed and not saved yet
        self._moved: set[Unit] = set()  # the part of `_changed` that was changed by `commit`, or forgotten
        meta.register("offsets", self)

    def restore(self, name: str, value: bytes) -> None:
        """Recovery: apply a row of offsets from the log. `name` is `<group>@<topic>`. An empty value deletes them."""
        if name == PARKED:
            return
        group, _, topic = name.partition("@")
        if value:
            self.table.setdefault(group, {})[topic] = msgspec.json.decode(value, type=dict[int, int])
        else:
            self._forget(group, topic)

    def get(self, group: str, topic: str) -> dict[int, int]:
        """Copy the offsets of a group in a topic, by queue. Empty if it has none."""
        return dict(self.table.get(group, {}).get(topic, {}))

    def find_offset(self, group: str, topic: str, queue: int) -> int | None:
        """Find a group's offset in one queue, or None if it has none."""
        return self.table.get(group, {}).get(topic, {}).get(queue)

    def topics_of(self, group: str) -> list[str]:
        """List the topics in which a group has stored offsets."""
        return list(self.table.get(group, {}))

    def groups_of(self, topic: str) -> list[str]:
        """List the groups that have stored offsets in a topic."""
        return [group for group, topics in self.table.items() if topic in topics]

    def forget_group(self, group: str) -> None:
        """Forget the offsets of a deleted group. Its next member begins like a member of a new group."""
        for topic in self.topics_of(group):
            self._forget(group, topic)
            self._mark_moved(group, topic)

    def forget_topic(self, topic: str) -> None:
        """Forget the offsets in a deleted topic. In a new topic with this name, all groups begin anew."""
        for group in self.groups_of(topic):
            self._forget(group, topic)
            self._mark_moved(group, topic)

    def commit(self, group: str, topic: str, offsets: dict[int, int], queue_max: dict[int, int]) -> None:
        """Store offsets (by queue) in memory. `changed` saves them later. `queue_max`: the end offset of each queue.

        Raises OutOfRange for a negative offset, an offset beyond its queue's end and a queue that the topic does not
        have. Raises InvalidName or OverLimit for a new group.
        """
        if group not in self.table:
            check_name(group, limits.GROUP_BYTES_MAX, "group")
            if len(self.table) >= limits.GROUPS_MAX:
                raise OverLimit(f"{limits.GROUPS_MAX} consumer groups exist; delete some first")
        for queue, offset in offsets.items():
            if queue not in queue_max:
                raise OutOfRange(f"queue {queue}: {topic!r} does not have it")
            if offset < 0:
                raise OutOfRange(f"offset {offset} of queue {queue}: offsets are not negative")
            # With an offset beyond the end, the group would skip future messages.
            if offset > queue_max[queue]:
                raise OutOfRange(
                    f"offset {offset} of queue {queue}: the queue of {topic!r} ends at {queue_max[queue]}"
                )
        self.table.setdefault(group, {}).setdefault(topic, {}).update(offsets)
        self._mark_moved(group, topic)

    def advance(self, group: str, topic: str, queue: int, offset: int) -> None:
        """Store the offset that follows from the leases of a queue, in memory until it is saved with them."""
        self.table[group][topic][queue] = offset
        self._changed.add((group, topic))

    def moved(self) -> set[Unit]:
        """Find the units whose offsets were changed by `commit` or forgotten since they were last saved."""
        return set(self._moved)

    def build_change(self, units: Iterable[Unit] | None = None) -> Change:
        """Build rows with the changed offsets of these units. None: of all units."""
        saved_units = set(self._changed) if units is None else self._changed.intersection(units)
        encoded = self._meta.build_change(
            (f"offsets/{group}@{topic}", self.table.get(group, {}).get(topic))
            for group, topic in sorted(saved_units)
        )

        def apply() -> None:
            encoded.apply()
            self._changed -= saved_units
            self._moved -= saved_units

        return encoded._replace(apply=apply)

    def _mark_moved(self, group: str, topic: str) -> None:
        """Mark the offsets of a unit as changed by another cause than its leases."""
        self._changed.add((group, topic))
        self._moved.add((group, topic))

    def _forget(self, group: str, topic: str) -> None:
        """Remove the offsets of a unit from memory."""
        topics = self.table.get(group, {})
        topics.pop(topic, None)
        if not topics:
            self.table.pop(group, None)
