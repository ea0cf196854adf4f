"""Heartbeats: every 30 s a client names its groups. The members of a group are notified when the group changes.

The first heartbeat of a consumer creates its group and the group's retry topic. Otherwise the client's next request,
which asks for the route of that topic, would fail. When members join or leave, or the topics of a group change, every
member is notified (request 40) and rebalances at once. Without the notification it would rebalance within 20 s. A group
in broadcast mode is not notified, since each of its members reads all queues.

Java and Node clients send enumerations as words, the C++ client as numbers. Both are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from timeball.broker.filters import compile_filter, told
from timeball.broker.registry.topics import check_name
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command
from timeball.edges.remoting.connection import Connection, Member
from timeball.edges.remoting.handlers.rebalance import Locks
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import BROADCASTING, Membership, Subscription
from timeball.model import limits
from timeball.model.access import Verb
from timeball.model.errors import InvalidFilter
from timeball.model.message import RETRY_PREFIX

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
        """Serve HEART_BEAT: check names and permissions, register the groups, and notify their members."""
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
        changed = sessions.beat(member, heartbeat.client_id, produces, consumes, self._context.monotonic_ms())
        member.language, member.version = call.command.language, call.command.version
        if is_new:
            connection.on_close.append(lambda: self._remove_client(connection))
        for membership in consumes:
            self._update_nonempty_queues(membership.group)
            policy.register(membership.group, call.caller)
            self._report_subscriptions(membership)
        self._notify_members(changed)
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
                shown_filter = told(each.expression, each.expression_type)
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
        """Check an SQL filter for a client before its first heartbeat. Raises Refused if it cannot be parsed."""
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
        changed = self._context.sessions.remove(connection)
        for group in changed:
            if client_id not in self._context.sessions.consumer_ids(group):
                self._locks.shorten_locks(group, client_id)
        self._notify_members(changed)

    def _notify_members(self, changed: Iterable[str]) -> None:
        """Notify each member of these groups that the group has changed."""
        for name in changed:
            group, config = (
                self._context.sessions.group(name),
                self._context.broker.tables.groups.find_group(name),
            )
            if group is None or group.membership.message_model == BROADCASTING:
                continue
            if config is not None and not config.notify_consumer_ids_changed_enable:
                continue
            for member in group.members:
                member.connection.push(
                    Command(
                        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
                        ext={"consumerGroup": name},
                    )
                )

    def _consumer_ids(self, call: Call) -> Reply:
        group = call.fields(_Group).consumer_group
        client_ids = self._context.sessions.consumer_ids(group)
        if not client_ids:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return call.answer_json({"consumerIdList": client_ids})


def _enum_name(what: str, value: int | str, names: tuple[str, ...]) -> str:
    """Convert an enumeration value, sent as name or number, to its name. Raises Refused for an unknown number."""
    by_number = {str(number): name for number, name in enumerate(names)}
    word = str(value)[:_WORD_CHARACTERS_MAX].upper()
    if isinstance(value, int) and word not in by_number:
        raise Refused(ResponseCode.INVALID_PARAMETER, f"{what} {word}: 0 to {len(names) - 1}")
    return by_number.get(word, word)
