"""Members of groups: heartbeats, notifications of changes, locks on queues, and assignments of queues to members.

Every 30 s a client names its groups in a heartbeat. The first heartbeat of a consumer creates its group and the group's
retry topic. Otherwise the client's next request, which asks for the route of that topic, would fail. When members join
or leave, or the topics of a group change, every member is notified (request 40) and rebalances at once. Without the
notification it would rebalance within 20 s. A group in broadcast mode is not notified, since each of its members reads
all queues.

When a client rebalances, it may ask the broker for locks on its queues (orderly consumers), or for the queues
themselves.

Java and Node clients send enumerations as words, the C++ client as numbers. Both are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from timeball.broker.filters import compile_filter, normalized_text
from timeball.broker.registry.groups import RequestMode
from timeball.broker.registry.topics import check_name
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command
from timeball.edges.remoting.connection import Connection, Member
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import BROADCASTING, Membership, Subscription
from timeball.model import limits
from timeball.model.access import Verb
from timeball.model.errors import InvalidFilter
from timeball.model.message import RETRY_PREFIX

# ---- heartbeats ----------------------------------------------------------------------------------------------

_WORD_CHARACTERS_MAX = 64  # of the name of an enumeration value
BODY_BYTES_MAX = 256 * 1024  # small, since the broker keeps the content for each of thousands of connections

# Enumerations in the order of the clients' sources. The C++ client sends the index.
_CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
_MESSAGE_MODELS = (BROADCASTING, "CLUSTERING")
_FROM_WHERE = (
    "CONSUME_FROM_LAST_OFFSET", "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET", "CONSUME_FROM_MAX_OFFSET", "CONSUME_FROM_FIRST_OFFSET", "CONSUME_FROM_TIMESTAMP",
)  # fmt: skip


class _Producer(msgspec.Struct, rename="camel"):
    group_name: str


class SubscriptionData(msgspec.Struct, rename="camel"):
    """RocketMQ's SubscriptionData, without the tags and hashes that the client derives from `sub_string`."""

    topic: str
    sub_string: str | None = "*"
    expression_type: str | None = "TAG"
    sub_version: int = 0

    def to_subscription(self) -> Subscription:
        """Convert to the broker's Subscription. An absent expression matches everything."""
        return Subscription(
            self.topic, self.sub_string or "*", self.expression_type or "TAG", self.sub_version
        )


class _Consumer(msgspec.Struct, rename="camel"):
    group_name: str
    consume_type: int | str = "CONSUME_PASSIVELY"
    message_model: int | str = "CLUSTERING"
    consume_from_where: int | str = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] | None = None

    def to_membership(self) -> Membership:
        """Convert to the broker's Membership. Raises Refused for an unknown number of an enumeration."""
        return Membership(
            self.group_name,
            _enum_name("consumeType", self.consume_type, _CONSUME_TYPES),
            _enum_name("messageModel", self.message_model, _MESSAGE_MODELS),
            _enum_name("consumeFromWhere", self.consume_from_where, _FROM_WHERE),
            tuple(data.to_subscription() for data in self.subscription_data_set or ()),
        )


class _HeartBeat(msgspec.Struct, rename="camel"):
    client_id: str = msgspec.field(name="clientID")
    producer_data_set: list[_Producer] | None = None
    consumer_data_set: list[_Consumer] | None = None


class _ClientConfig(msgspec.Struct, rename="camel"):
    subscription_data: SubscriptionData | None = None


class _Unregister(msgspec.Struct, rename="camel"):
    producer_group: str | None = None
    consumer_group: str | None = None


class _Group(msgspec.Struct, rename="camel"):
    consumer_group: str


class HeartBeats:
    """Serves HEART_BEAT and UNREGISTER_CLIENT, and releases the queue `locks` of disconnected clients."""

    def __init__(self, context: RemotingContext, locks: Locks) -> None:
        self._context, self._locks = context, locks
        self.handlers: Handlers = {
            RequestCode.HEART_BEAT: self._heartbeat,
            RequestCode.UNREGISTER_CLIENT: self._unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self._consumer_ids,
            RequestCode.CHECK_CLIENT_CONFIG: self._check_client,
        }

    def expire(self) -> None:
        """Remove clients that have sent no heartbeat for 120 s. Called about once a second."""
        for member in self._context.sessions.expired(self._context.monotonic_ms()):
            self._remove_client(member.connection)
            member.connection.close()

    def _heartbeat(self, call: Call) -> Reply:
        """Serve HEART_BEAT: check names and permissions, register the groups, and notify their members.

        Raises Refused, InvalidName, Unauthorized, Forbidden, OverLimit.
        """
        if len(call.command.body) > BODY_BYTES_MAX:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"a heartbeat of {len(call.command.body)} bytes; at most 256 KiB",
            )
        policy, heartbeat = self._context.broker.policy, call.body(_HeartBeat)
        produces = {producer.group_name for producer in heartbeat.producer_data_set or ()}
        consumes = [consumer.to_membership() for consumer in heartbeat.consumer_data_set or ()]
        for name in [*produces, *(membership.group for membership in consumes)]:
            check_name(name, limits.GROUP_BYTES_MAX, "group")
        for membership in consumes:
            policy.allow(call.caller, Verb.RECEIVE, group=membership.group)
            for subscription in membership.subscriptions:
                policy.allow(call.caller, Verb.RECEIVE, topic=subscription.topic)
        sessions, connection = self._context.sessions, call.connection
        is_new = connection not in sessions
        member = sessions.get(connection) or Member(connection, heartbeat.client_id)
        changed_groups = sessions.beat(
            member, heartbeat.client_id, produces, consumes, self._context.monotonic_ms()
        )
        member.language, member.version = call.command.language, call.command.version
        if is_new:
            connection.on_close.append(lambda: self._remove_client(connection))
        for membership in consumes:
            self._update_nonempty_queues(membership.group)
            policy.register(membership.group, call.caller)
            self._report_subscriptions(membership)
        self._notify_members(changed_groups)
        return call.answer()

    def _report_subscriptions(self, membership: Membership) -> None:
        """Report a member's subscriptions to the broker, which finds members with different filters.

        Members in broadcast mode are not reported, because each gets all messages that match its own filter.
        """
        group_subscriptions = self._context.broker.consuming.subscriptions
        subscriptions = [each for each in membership.subscriptions if not each.topic.startswith(RETRY_PREFIX)]
        if membership.message_model != BROADCASTING and subscriptions:
            group_subscriptions.hear_topics(membership.group, [each.topic for each in subscriptions])
            for each in subscriptions:
                shown_filter = normalized_text(each.expression, each.expression_type)
                group_subscriptions.hear(membership.group, each.topic, shown_filter)

    def _update_nonempty_queues(self, group_name: str) -> None:
        """Record which queues of newly subscribed topics have messages now. `Offsets` needs it for the first offset."""
        group, topics = self._context.sessions.group(group_name), self._context.broker.tables.topics
        if group is None or group.nonempty_queues.keys() == group.subscriptions.keys():
            return
        queues_by_topic = {}
        for topic_name in group.subscriptions:
            topic = topics.find_topic(topic_name)
            queues = () if topic is None else topic.queues
            nonempty = frozenset(queue_id for queue_id, queue in enumerate(queues) if queue.index.max_offset)
            queues_by_topic[topic_name] = group.nonempty_queues.get(topic_name, nonempty)
        group.nonempty_queues = queues_by_topic

    def _check_client(self, call: Call) -> Reply:
        """Serve CHECK_CLIENT_CONFIG: check an SQL filter for a client. Raises Refused if it is not valid."""
        subscription = call.body(_ClientConfig).subscription_data
        if subscription is not None:
            try:
                compile_filter(subscription.sub_string, subscription.expression_type)
            except InvalidFilter as error:
                raise Refused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error
        return call.answer()

    def _unregister(self, call: Call) -> Reply:
        """Serve UNREGISTER_CLIENT: remove the client from the named groups and release its locks."""
        fields, member = call.fields(_Unregister), self._context.sessions.get(call.connection)
        if fields.consumer_group:
            self._context.broker.policy.allow(call.caller, Verb.RECEIVE, group=fields.consumer_group)
        if member is not None:
            self._notify_members(
                self._context.sessions.leave(
                    call.connection,
                    producer_group=fields.producer_group,
                    consumer_group=fields.consumer_group,
                )
            )
            if fields.consumer_group:
                self._locks.release_locks(fields.consumer_group, member.client_id)
        return call.answer()

    def _remove_client(self, connection: Connection) -> None:
        """Remove the client of a connection, and shorten its locks where no other connection has its client id."""
        member = self._context.sessions.get(connection)
        if member is None:
            return
        client_id = member.client_id
        changed_groups = self._context.sessions.remove(connection)
        for group in changed_groups:
            if client_id not in self._context.sessions.consumer_ids(group):
                self._locks.shorten_locks(group, client_id)
        self._notify_members(changed_groups)

    def _notify_members(self, changed_groups: Iterable[str]) -> None:
        """Notify each member of these groups that the group has changed."""
        for name in changed_groups:
            group = self._context.sessions.group(name)
            config = self._context.broker.tables.groups.find_group(name)
            if group is None or group.membership.message_model == BROADCASTING:
                continue
            if config is not None and not config.notify_consumer_ids_changed_enable:
                continue
            for member in group.members:
                code = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
                member.connection.push(Command(code, ext={"consumerGroup": name}))

    def _consumer_ids(self, call: Call) -> Reply:
        """Serve GET_CONSUMER_LIST_BY_GROUP: list the client ids of a group's members. Raises Refused without any."""
        group = call.fields(_Group).consumer_group
        client_ids = self._context.sessions.consumer_ids(group)
        if not client_ids:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return call.answer_json({"consumerIdList": client_ids})


def _enum_name(field: str, value: int | str, names: tuple[str, ...]) -> str:
    """Convert the value of an enumeration, a name or an index of `names`, to its name.

    An unknown name is accepted, in capitals and shortened. Raises Refused for an unknown number.
    """
    by_number = {str(number): name for number, name in enumerate(names)}
    word = str(value)[:_WORD_CHARACTERS_MAX].upper()
    if isinstance(value, int) and word not in by_number:
        raise Refused(ResponseCode.INVALID_PARAMETER, f"{field} {word}: 0 to {len(names) - 1}")
    return by_number.get(word, word)


# ---- locks on queues, and assignments of queues --------------------------------------------------------------
# Locks are not saved, as in RocketMQ: after a start of the broker, the first client that asks for a queue gets its
# lock.

EXPIRY_MS = 60_000  # RocketMQ's rebalance.lockMaxLiveTime of the broker
TRUST_MS = 30_000  # time for which a client relies on a lock after the answer

QueueKey = tuple[str, int]  # topic, queue


class MessageQueue(msgspec.Struct, frozen=True, rename="camel"):
    """RocketMQ's MessageQueue."""

    topic: str
    queue_id: int
    broker_name: str = ""


ANY_QUEUE = -1
CLIENT_ID_CHARACTERS_MAX = 4_096  # an address and a name fit. Each lock stores the id of its holder


class _LockRequest(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: Annotated[str, msgspec.Meta(max_length=CLIENT_ID_CHARACTERS_MAX)]
    mq_set: list[MessageQueue] = []


class _AssignmentQuery(msgspec.Struct, rename="camel"):
    topic: str
    consumer_group: str
    client_id: str = ""
    strategy_name: str = "AVG"
    message_model: Literal["CLUSTERING", "BROADCASTING"] = "CLUSTERING"


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_ms: int
    expires_ms: int


class Locks:
    """Serves LOCK_BATCH_MQ and UNLOCK_BATCH_MQ. All times are from the monotonic clock.

    Orderly consumers lock the queues that they read. A client renews its locks every 20 s and relies on a lock for 30 s
    after the answer. Here a lock lasts 60 s, so it never expires while its holder relies on it. A client that
    unregisters gives up its locks at once. A client that has only lost its connection may still process messages that
    it pulled: its locks expire when it does not rely on them any more, 30 s after the last renewal. No other client
    gets the queue before.

    Only existing queues can be locked, and only by existing groups. This limits the memory of the locks.
    """

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self._groups: dict[str, dict[QueueKey, _Lock]] = {}
        self.handlers: Handlers = {
            RequestCode.LOCK_BATCH_MQ: self._lock,
            RequestCode.UNLOCK_BATCH_MQ: self._unlock,
        }

    def holder(self, group: str, topic: str, queue_id: int) -> str | None:
        """Return the id of the client that holds the lock of a queue, or None."""
        lock = self._groups.get(group, {}).get((topic, queue_id))
        return lock.client_id if lock is not None and self._context.monotonic_ms() < lock.expires_ms else None

    def is_held(self, group: str) -> bool:
        """Return whether any client of the group holds a lock."""
        now_ms = self._context.monotonic_ms()
        return any(now_ms < lock.expires_ms for lock in self._locks_of(group).values())

    def release_locks(self, group: str, client_id: str) -> None:
        """Release the locks of a client that has unregistered from the group."""
        self._set_locks(
            group, {key: lock for key, lock in self._locks_of(group).items() if lock.client_id != client_id}
        )

    def shorten_locks(self, group: str, client_id: str) -> None:
        """Let the locks of a disconnected client expire TRUST_MS after their last renewal."""
        for lock in self._locks_of(group).values():
            if lock.client_id == client_id:
                lock.expires_ms = min(lock.expires_ms, lock.renewed_ms + TRUST_MS)

    def _lock(self, call: Call) -> Reply:
        """Serve LOCK_BATCH_MQ: lock the requested queues, and answer with the requested queues that it holds now.

        A queue that another client holds is left out, and so is a queue or group that does not exist.
        """
        request = self._read_request(call)
        now_ms = self._context.monotonic_ms()
        locks = {
            queue_key: lock
            for queue_key, lock in self._locks_of(request.consumer_group).items()
            if now_ms < lock.expires_ms
        }
        locked_queues = []
        for queue in request.mq_set:
            queue_key = (queue.topic, queue.queue_id)
            lock = locks.get(queue_key)
            if self._may_be_locked(request.consumer_group, queue) and (
                lock is None or lock.client_id == request.client_id
            ):
                locks[queue_key] = _Lock(request.client_id, now_ms, now_ms + EXPIRY_MS)
                locked_queues.append(queue)
        self._set_locks(request.consumer_group, locks)
        return call.answer_json({"lockOKMQSet": locked_queues})

    def _unlock(self, call: Call) -> Reply:
        """Serve UNLOCK_BATCH_MQ: release the client's locks on these queues."""
        request = self._read_request(call)
        queue_keys = {(queue.topic, queue.queue_id) for queue in request.mq_set}
        remaining_locks = {
            queue_key: lock
            for queue_key, lock in self._locks_of(request.consumer_group).items()
            if queue_key not in queue_keys or lock.client_id != request.client_id
        }
        self._set_locks(request.consumer_group, remaining_locks)
        return call.answer()

    def _read_request(self, call: Call) -> _LockRequest:
        request = call.body(_LockRequest)
        self._context.broker.policy.allow(call.caller, Verb.RECEIVE, group=request.consumer_group)
        return request

    def _may_be_locked(self, group: str, queue: MessageQueue) -> bool:
        """Return whether group and queue exist in this broker."""
        if self._context.broker.tables.groups.find_group(group) is None:
            return False
        if queue.broker_name not in ("", self._context.broker_name):
            return False
        topic = self._context.broker.tables.topics.find_topic(queue.topic)
        return topic is not None and 0 <= queue.queue_id < len(topic.queues)

    def _locks_of(self, group: str) -> dict[QueueKey, _Lock]:
        return self._groups.get(group, {})

    def _set_locks(self, group: str, locks: dict[QueueKey, _Lock]) -> None:
        """Replace the locks of a group. A group without locks takes no memory."""
        if locks:
            self._groups[group] = locks
        else:
            self._groups.pop(group, None)


class Assignments:
    """Serves QUERY_ASSIGNMENT and SET_MESSAGE_REQUEST_MODE: which queues a member consumes, and whether it pops.

    Assignments follow RocketMQ's rules. For a group that pulls, the broker divides the queues among the members as the
    clients would do themselves. A member of a group that pops gets "any queue", or its own share and the shares of the
    next few members.
    """

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._broker = context, context.broker
        self.handlers: Handlers = {
            RequestCode.QUERY_ASSIGNMENT: self._query_assignment,
            RequestCode.SET_MESSAGE_REQUEST_MODE: self._set_mode,
        }

    def _query_assignment(self, call: Call) -> Reply:
        """Serve QUERY_ASSIGNMENT: the queues of one member, and whether it pulls or pops.

        The answer has null instead of queues if the topic does not exist or `assign` returns None.
        """
        query = call.body(_AssignmentQuery)
        self._broker.policy.allow(call.caller, Verb.RECEIVE, topic=query.topic, group=query.consumer_group)
        topic = self._broker.tables.topics.find_topic(query.topic)
        mode = self._broker.tables.request_modes.get(query.topic, query.consumer_group)
        queue_ids: list[int] | None = None
        if topic is not None and query.message_model == "BROADCASTING":
            queue_ids = list(range(topic.read_queues))
        elif topic is not None:
            queue_ids = assign(
                query.client_id,
                list(range(topic.read_queues)),
                self._context.sessions.consumer_ids(query.consumer_group),
                strategy=query.strategy_name,
                pops=mode.mode == "POP",
                share_with=mode.pop_share_queue_num,
            )
        assignments = None
        if queue_ids is not None:
            assignments = [
                {
                    "messageQueue": {
                        "topic": query.topic,
                        "brokerName": self._context.broker_name,
                        "queueId": queue_id,
                    },
                    "mode": mode.mode,
                }
                for queue_id in queue_ids
            ]
        # With null the client keeps its queues. With an empty list it gives up all of them.
        return call.answer_json({"messageQueueAssignments": assignments})

    async def _set_mode(self, call: Call) -> Reply:
        """Serve SET_MESSAGE_REQUEST_MODE: set whether a group pulls or pops a topic. Durable when answered.

        Raises Refused for a retry topic.
        """
        mode = call.body(RequestMode)
        if mode.topic.startswith(RETRY_PREFIX):
            raise Refused(ResponseCode.NO_PERMISSION, "retry topic is not allowed to set mode")
        self._broker.tables.request_modes.set(mode)
        await self._broker.log.writer.flushed()
        return call.answer()


def allocate_averagely(client_id: str, queue_ids: list[int], client_ids: list[str]) -> list[int]:
    """RocketMQ's AVG: each client gets consecutive queues. With a remainder, the first clients get one queue more."""
    index, (count, remainder) = client_ids.index(client_id), divmod(len(queue_ids), len(client_ids))
    begin = index * count + min(index, remainder)
    return queue_ids[begin : begin + count + (index < remainder)]


def allocate_by_circle(client_id: str, queue_ids: list[int], client_ids: list[str]) -> list[int]:
    """RocketMQ's AVG_BY_CIRCLE: with n clients, each gets every n-th queue."""
    return queue_ids[client_ids.index(client_id) :: len(client_ids)]


STRATEGIES = {"AVG": allocate_averagely, "AVG_BY_CIRCLE": allocate_by_circle}


def assign(
    client_id: str, queue_ids: list[int], client_ids: list[str], *, strategy: str, pops: bool, share_with: int
) -> list[int] | None:
    """Assign queues to a client of a group. Without ANY_QUEUE, a client that is no member gets [].

    Returns None for an unknown strategy, or without members or queues.

    `share_with`: a popping member also gets the queues of this many members after it. If it is 0 or covers all other
    members, the result is ANY_QUEUE: the broker chooses the queue of each POP request.
    """
    allocate, members = STRATEGIES.get(strategy), sorted(set(client_ids))
    if allocate is None or not members or not queue_ids:
        return None
    if pops and (share_with <= 0 or share_with >= len(members) - 1):
        return [ANY_QUEUE]
    if client_id not in members:
        return []
    index = members.index(client_id)
    if not pops:
        return allocate(client_id, queue_ids, members)
    if len(members) > len(queue_ids):
        return [queue_ids[index % len(queue_ids)]]
    sharing_members = {
        members[(index + step) % len(members)] for step in range(min(share_with + 1, len(members)))
    }
    return sorted(queue for member in sharing_members for queue in allocate(member, queue_ids, members))
