"""Heartbeats: every 30 s a client names its groups. The members of a group are notified when it changes.

The first heartbeat of a consumer creates its group and the group's retry topic. Otherwise the client's next request,
which asks for the route of that topic, would fail. When members come or go, or the topics of a group change, every
member is notified (request 40) and divides the queues anew at once. Without the notification they would notice within
20 s. A group in broadcast mode is not notified, since each of its members reads all queues.

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
BODY_BYTES_MAX = 256 * 1024  # the content of a heartbeat is kept for each of thousands of connections

# The order of the enumerations in the clients' sources.
_CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
_MESSAGE_MODELS = (BROADCASTING, "CLUSTERING")
_FROM_WHERE = (
    "CONSUME_FROM_LAST_OFFSET", "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET", "CONSUME_FROM_MAX_OFFSET", "CONSUME_FROM_FIRST_OFFSET", "CONSUME_FROM_TIMESTAMP",
)  # fmt: skip


class _Producer(msgspec.Struct, rename="camel"):
    group_name: str


class SubscriptionData(msgspec.Struct, rename="camel"):
    """RocketMQ's SubscriptionData without tags and hashes, which follow from the text."""

    topic: str
    sub_string: str | None = "*"
    expression_type: str | None = "TAG"
    sub_version: int = 0

    def read(self) -> Subscription:
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

    def read(self) -> Membership:
        return Membership(
            self.group_name,
            _named("consumeType", self.consume_type, _CONSUME_TYPES),
            _named("messageModel", self.message_model, _MESSAGE_MODELS),
            _named("consumeFromWhere", self.consume_from_where, _FROM_WHERE),
            tuple(one.read() for one in self.subscription_data_set or ()),
        )


class _HeartBeat(msgspec.Struct, rename="camel"):
    client_id: str = msgspec.field(name="clientID")
    producer_data_set: list[_Producer] | None = None
    consumer_data_set: list[_Consumer] | None = None


class _Client(msgspec.Struct, rename="camel"):
    subscription_data: SubscriptionData | None = None


class _Goodbye(msgspec.Struct, rename="camel"):
    producer_group: str | None = None
    consumer_group: str | None = None


class _Group(msgspec.Struct, rename="camel"):
    consumer_group: str


class HeartBeats:
    """Serves heartbeats and good-byes, and releases the `locks` of clients that are gone."""

    def __init__(self, context: RemotingContext, locks: Locks) -> None:
        self._context, self._locks = context, locks
        self.handlers: Handlers = {
            RequestCode.HEART_BEAT: self._beat,
            RequestCode.UNREGISTER_CLIENT: self._goodbye,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self._consumer_ids,
            RequestCode.CHECK_CLIENT_CONFIG: self._check_client,
        }

    def expire(self) -> None:
        """Remove clients that have sent no heartbeat for 120 s. Called about once a second."""
        for member in self._context.sessions.expired(self._context.monotonic_ms()):
            self._gone(member.connection)
            member.connection.close()

    def _beat(self, call: Call) -> Reply:
        if len(call.command.body) > BODY_BYTES_MAX:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"a heartbeat of {len(call.command.body)} bytes; at most 256 KiB",
            )
        policy, said = self._context.broker.policy, call.body(_HeartBeat)
        produces = {one.group_name for one in said.producer_data_set or ()}
        consumes = [one.read() for one in said.consumer_data_set or ()]
        for name in [*produces, *(how.group for how in consumes)]:
            check_name(name, limits.GROUP_BYTES_MAX, "group")
        for how in consumes:
            policy.allow(call.caller, Verb.RECEIVE, group=how.group)
            for one in how.subscriptions:
                policy.allow(call.caller, Verb.RECEIVE, topic=one.topic)
        sessions, connection = self._context.sessions, call.connection
        is_new = connection not in sessions
        member = sessions.get(connection) or Member(connection, said.client_id)
        changed = sessions.beat(member, said.client_id, produces, consumes, self._context.monotonic_ms())
        member.language, member.version = call.command.language, call.command.version
        if is_new:
            connection.on_close.append(lambda: self._gone(connection))
        for how in consumes:
            self._note_filled(how.group)
            policy.register(how.group, call.caller)
            self._hear(how)
        self._tell(changed)
        return call.answer()

    def _hear(self, how: Membership) -> None:
        """Report a member's subscriptions to the broker, unless it broadcasts and so gets all messages that match."""
        subscriptions = self._context.broker.consuming.subscriptions
        wanted = [one for one in how.subscriptions if not one.topic.startswith(RETRY_PREFIX)]
        if how.message_model != BROADCASTING and wanted:
            subscriptions.hear_topics(how.group, [one.topic for one in wanted])
            for one in wanted:
                subscriptions.hear(how.group, one.topic, told(one.expression, one.expression_type))

    def _note_filled(self, name: str) -> None:
        """Note which queues of newly subscribed topics have messages. See offsets.py."""
        group, topics = self._context.sessions.group(name), self._context.broker.tables.topics
        if group is None or group.filled.keys() == group.subscriptions.keys():
            return
        noted = {}
        for wanted in group.subscriptions:
            topic = topics.find_topic(wanted)
            queues = () if topic is None else topic.queues
            now = frozenset(at for at, queue in enumerate(queues) if queue.index.max_offset)
            noted[wanted] = group.filled.get(wanted, now)
        group.filled = noted

    def _check_client(self, call: Call) -> Reply:
        """Check an SQL filter for a client before its first heartbeat. Raises Refused if it cannot be parsed."""
        wanted = call.body(_Client).subscription_data
        if wanted is not None:
            try:
                compile_filter(wanted.sub_string, wanted.expression_type)
            except InvalidFilter as error:
                raise Refused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error
        return call.answer()

    def _goodbye(self, call: Call) -> Reply:
        said, member = call.fields(_Goodbye), self._context.sessions.get(call.connection)
        if said.consumer_group:
            self._context.broker.policy.allow(call.caller, Verb.RECEIVE, group=said.consumer_group)
        if member is not None:
            self._tell(
                self._context.sessions.leave(
                    call.connection,
                    producer_group=said.producer_group,
                    consumer_group=said.consumer_group,
                )
            )
            if said.consumer_group:
                self._locks.give_up(said.consumer_group, member.client_id)
        return call.answer()

    def _gone(self, connection: Connection) -> None:
        member = self._context.sessions.get(connection)
        if member is None:
            return
        client_id = member.client_id
        changed = self._context.sessions.remove(connection)
        for group in changed:
            if client_id not in self._context.sessions.consumer_ids(group):
                self._locks.doubt(group, client_id)
        self._tell(changed)

    def _tell(self, changed: Iterable[str]) -> None:
        """Notify each member of these groups that the group has changed."""
        for name in changed:
            group, config = (
                self._context.sessions.group(name),
                self._context.broker.tables.groups.find_group(name),
            )
            if group is None or group.how.message_model == BROADCASTING:
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
        found = self._context.sessions.consumer_ids(group)
        if not found:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}")
        return call.answer_json({"consumerIdList": found})


def _named(what: str, value: int | str, names: tuple[str, ...]) -> str:
    """Return the word for a value of an enumeration, given as word or number. Raises Refused."""
    by_number = {str(number): name for number, name in enumerate(names)}
    word = str(value)[:_WORD_CHARACTERS_MAX].upper()
    if isinstance(value, int) and word not in by_number:
        raise Refused(ResponseCode.INVALID_PARAMETER, f"{what} {word}: 0 to {len(names) - 1}")
    return by_number.get(word, word)
