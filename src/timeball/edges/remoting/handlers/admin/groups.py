"""Administration of consumer groups: their settings, members and connected clients, and requests to a consumer.

Tools configure, list and delete groups. A change is saved before the answer. A group that is deleted while it has
members is created again with default settings by their next heartbeat, as in RocketMQ.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable

import msgspec

from timeball.broker.registry.groups import ATTRIBUTES_MAX, SubscriptionGroup
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    data_version,
    decode_object_keys,
    encode_by_name,
    encode_with_object_keys,
)
from timeball.edges.remoting.codec.codes import Language, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, encode
from timeball.edges.remoting.codec.records import parse_offset_msg_id
from timeball.edges.remoting.connection import Connection, Member
from timeball.edges.remoting.handlers.queries import stored_message
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import Subscription
from timeball.model.errors import InvalidMessage, Unavailable

# ---- groups and connected clients ----------------------------------------------------------------------------


class _Named(msgspec.Struct, rename="camel"):
    group: str


class _Clone(msgspec.Struct, rename="camel"):
    src_group: str
    dest_group: str
    topic: str = ""
    offline: bool = False


class _Configs(msgspec.Struct, rename="camel"):
    group_config_list: list[dict[str, msgspec.Raw]] = []


class _Delete(msgspec.Struct, rename="camel"):
    group_name: str
    clean_offset: bool = False


class _ConsumerGroup(msgspec.Struct, rename="camel"):
    consumer_group: str


class _ProducerGroup(msgspec.Struct, rename="camel"):
    producer_group: str


class _Topic(msgspec.Struct):
    topic: str


class _Group(msgspec.Struct):
    group: str


class _GroupAndTopic(msgspec.Struct):
    group: str
    topic: str


class GroupAdmin:
    """Serves the requests about consumer groups and about connected clients."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._broker, self._sessions = context, context.broker, context.sessions
        self._groups = context.broker.tables.groups
        self.handlers: Handlers = {
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._update,
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self._update_list,
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._list,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self._get,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self._delete,
            RequestCode.CLONE_GROUP_OFFSET: self._clone_offsets,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self._consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self._producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self._list_producers,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self._groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self._topics_of_group,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self._subscription,
        }

    async def _update(self, call: Call) -> Reply:
        return await self._update_all(call, [call.body(dict[str, msgspec.Raw])])

    async def _update_list(self, call: Call) -> Reply:
        return await self._update_all(call, call.body(_Configs).group_config_list)

    async def _update_all(self, call: Call, configs: list[dict[str, msgspec.Raw]]) -> Reply:
        """Create or change groups. Raises Refused, Forbidden, InvalidName and OverLimit.

        If a configuration cannot be decoded, no group changes. If one is refused, only the groups before it change.
        """
        try:
            groups = [_decode_config(config) for config in configs]
            await self._broker.administration.configure_groups(
                map(self._apply_attributes, groups), call.caller
            )
        except (msgspec.ValidationError, InvalidMessage) as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, f"the group's configuration: {error}") from error
        return call.answer()

    def _apply_attributes(self, group: SubscriptionGroup) -> SubscriptionGroup:
        """Apply the attributes of a configuration to those that the group has already, as RocketMQ does.

        `-name` removes an attribute. `+name`, or a name without a sign, sets it. Returns the configuration with the
        resulting attributes. Raises InvalidMessage if there are too many.
        """
        existing_group = self._groups.find_group(group.group_name)
        attributes = {} if existing_group is None else dict(existing_group.attributes)
        for name, value in group.attributes.items():
            if name.startswith("-"):
                attributes.pop(name[1:], None)
            else:
                attributes[name.removeprefix("+")] = value
        if len(attributes) > ATTRIBUTES_MAX:
            raise InvalidMessage(f"{len(attributes)} attributes: at most {ATTRIBUTES_MAX}")
        return msgspec.structs.replace(group, attributes=attributes)

    async def _list(self, call: Call) -> Reply:
        """Serve GET_ALL_SUBSCRIPTIONGROUP_CONFIG: the settings of all groups."""
        # The version is read first, so that a tool sees an outdated version if the table changes meanwhile.
        version = data_version(self._groups.version, 0)
        table = await encode_by_name(self._groups.all(), lambda group: (group.group_name, group))
        return call.answer_json(
            {"dataVersion": version, "forbiddenTable": {}, "subscriptionGroupTable": table}
        )

    def _get(self, call: Call) -> Reply:
        """Serve GET_SUBSCRIPTIONGROUP_CONFIG: the settings of one group. Raises Refused if it does not exist."""
        name = call.fields(_Named).group
        group = self._groups.find_group(name)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{name}] not exist")
        return call.answer_json(group)

    async def _delete(self, call: Call) -> Reply:
        """Serve DELETE_SUBSCRIPTIONGROUP: delete a group if it exists, and on request its offsets."""
        fields = call.fields(_Delete)
        await self._broker.administration.delete_group(
            fields.group_name, call.caller, with_offsets=fields.clean_offset
        )
        return call.answer()

    async def _clone_offsets(self, call: Call) -> Reply:
        """Serve CLONE_GROUP_OFFSET: copy a group's offsets to another group, for one topic or for all of its topics."""
        fields = call.fields(_Clone)
        offsets, topics = self._broker.tables.offsets, self._broker.tables.topics
        group = self._sessions.group(fields.src_group)
        for topic in [fields.topic] if fields.topic else offsets.topics_of(fields.src_group):
            if topics.find_topic(topic) is None:
                continue
            if group is not None and not fields.offline and topic not in group.subscriptions:
                continue  # as in RocketMQ: the members do not subscribe to this topic any more
            await self._broker.commit_offsets(
                fields.dest_group, topic, offsets.get(fields.src_group, topic), call.caller
            )
        return call.answer()

    # -- connected clients ---------------------------------------------------------------------------------------

    def _consumers(self, call: Call) -> Reply:
        """Serve GET_CONSUMER_CONNECTION_LIST: members and subscriptions of a group. Raises Refused without members."""
        name = call.fields(_ConsumerGroup).consumer_group
        group = self._sessions.group(name)
        if group is None:
            raise Refused(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        return call.answer_json(
            {
                "connectionSet": _connections(group.members),
                "consumeFromWhere": group.membership.consume_from_where,
                "consumeType": group.membership.consume_type,
                "messageModel": group.membership.message_model,
                "subscriptionTable": {
                    topic: _subscription_data(subscription)
                    for topic, subscription in group.subscriptions.items()
                },
            }
        )

    def _producers(self, call: Call) -> Reply:
        """Serve GET_PRODUCER_CONNECTION_LIST: the members of a producer group. Raises Refused without members."""
        name = call.fields(_ProducerGroup).producer_group
        members = self._sessions.producers(name)
        if not members:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        return call.answer_json({"connectionSet": _connections(members)})

    def _list_producers(self, call: Call) -> Reply:
        """Serve GET_ALL_PRODUCER_INFO: all producers, by group."""
        now_ms, wall_ms = self._context.monotonic_ms(), self._broker.clock.now_ms()
        return call.answer_json(
            {
                "data": {
                    name: [
                        {
                            "clientId": member.client_id,
                            "remoteIP": member.connection.name,
                            "language": _language(member),
                            "version": member.version,
                            "lastUpdateTimestamp": wall_ms - (now_ms - member.heard_ms),
                        }
                        for member in self._sessions.producers(name)
                    ]
                    for name in self._sessions.producer_names()
                }
            }
        )

    def _groups_of_topic(self, call: Call) -> Reply:
        """Serve QUERY_TOPIC_CONSUME_BY_WHO: the groups that subscribe to a topic or have offsets in it."""
        topic = call.fields(_Topic).topic
        groups_with_offsets = self._broker.tables.offsets.groups_of(topic)
        return call.answer_json(
            {"groupList": sorted({*groups_with_offsets, *self._sessions.groups_on(topic)})}
        )

    def _topics_of_group(self, call: Call) -> Reply:
        group = call.fields(_Group).group
        return call.answer_json({"topicList": sorted(self._broker.tables.offsets.topics_of(group))})

    def _subscription(self, call: Call) -> Reply:
        """Serve QUERY_SUBSCRIPTION_BY_CONSUMER: a group's subscription to a topic, or null."""
        fields = call.fields(_GroupAndTopic)
        subscription = self._sessions.subscription(fields.group, fields.topic)
        return call.answer_json(
            {
                "group": fields.group,
                "topic": fields.topic,
                "subscriptionData": None if subscription is None else _subscription_data(subscription),
            }
        )


def _decode_config(config: dict[str, msgspec.Raw]) -> SubscriptionGroup:
    """Decode RocketMQ's SubscriptionGroupConfig. Raises msgspec.ValidationError."""
    # Java leaves out null fields, and other tools write them as null. Both mean the default value.
    encoded = msgspec.json.encode({name: raw for name, raw in config.items() if bytes(raw) != b"null"})
    return msgspec.json.decode(encoded, type=SubscriptionGroup, strict=False)


def _connections(members: Iterable[Member]) -> list[dict[str, object]]:
    """Convert members to RocketMQ's connectionSet."""
    return [
        {
            "clientAddr": member.connection.name,
            "clientId": member.client_id,
            "language": _language(member),
            "version": member.version,
        }
        for member in members
    ]


def _language(member: Member) -> str:
    return Language(member.language).name if member.language in set(Language) else Language.OTHER.name


def _subscription_data(subscription: Subscription) -> dict[str, object]:
    """Convert a subscription to RocketMQ's SubscriptionData."""
    tags = (
        []
        if subscription.expression_type != "TAG" or subscription.expression == "*"
        else subscription.expression.split("||")
    )
    return {
        "topic": subscription.topic,
        "subString": subscription.expression,
        "subVersion": subscription.version,
        "expressionType": subscription.expression_type,
        "tagsSet": [tag.strip() for tag in tags if tag.strip()],
        "codeSet": [],
        "classFilterMode": False,
    }


# ---- requests that are forwarded to a consumer ---------------------------------------------------------------
# A request names the consumer by group and client id. The consumer has `ANSWER_TIMEOUT_S` to answer, and its answer
# goes to the tool. Tools wait about as long.

ANSWER_TIMEOUT_S = 10.0  # RocketMQ's, for a request to one consumer
STATUS_TIMEOUT_S = 5.0  # RocketMQ's, for the offsets of a group's members


class _ConsumerFields(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: str


class _ConsumeFields(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: str
    msg_id: str


class _StatusFields(msgspec.Struct, rename="camel"):
    topic: str
    group: str
    client_addr: str = ""  # a client id, in spite of its name


class ClientForwarding:
    """Serves the requests that are forwarded to consumers."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self.handlers: Handlers = {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self._consumer_status,
        }

    async def _running_info(self, call: Call) -> Reply:
        return await self._forward(call, call.fields(_ConsumerFields))

    async def _consume_directly(self, call: Call) -> Reply:
        """Serve CONSUME_MESSAGE_DIRECTLY: have a consumer process one message. This changes no offset.

        Raises InvalidMessage, Refused, Forbidden, Unavailable.
        """
        fields = call.fields(_ConsumeFields)
        _, seq = parse_offset_msg_id(fields.msg_id)
        consumer = _ConsumerFields(fields.consumer_group, fields.client_id)
        self._find_connection(consumer)  # fails early, before the message is read
        body = await stored_message(self._context, call, seq)
        return await self._forward(call, consumer, body, brokerName=self._context.broker_name)

    async def _consumer_status(self, call: Call) -> Reply:
        """Serve INVOKE_BROKER_TO_GET_CONSUMER_STATUS: ask the members of a group, or one of them, for their offsets.

        Raises Refused if the group has no members.
        """
        fields = call.fields(_StatusFields)
        group = self._context.sessions.group(fields.group)
        if group is None:
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{fields.group}]"
            )
        members = [member for member in group.members if fields.client_addr in ("", member.client_id)]
        answers = await asyncio.gather(*(_read_offsets(member, fields) for member in members))
        # As in RocketMQ, the result does not contain members that do not answer or refuse.
        offsets_by_client = {
            member.client_id: table
            for member, table in zip(members, answers, strict=True)
            if table is not None
        }
        return call.answer_json({"consumerTable": offsets_by_client, "messageQueueTable": {}})

    async def _forward(
        self, call: Call, consumer: _ConsumerFields, body: bytes = b"", **extra_fields: str
    ) -> Reply:
        """Forward the tool's request to a consumer, with this body and more fields, and return its answer.

        Raises Refused, Unavailable.
        """
        connection = self._find_connection(consumer)
        # All fields are forwarded unchanged. Some are only for the consumer, for example whether to send a stack trace.
        command = Command(call.command.code, ext={**call.command.ext, **extra_fields}, body=body)
        consumer_answer = await connection.request(command, ANSWER_TIMEOUT_S)
        answer = call.answer(
            consumer_answer.code, consumer_answer.remark, ext=consumer_answer.ext, body=consumer_answer.body
        )
        try:
            encode(answer)
        except (ValueError, struct.error) as error:
            # The consumer answered in JSON, but the tool uses the binary header, which limits numbers and names more.
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"the answer of <{consumer.client_id}> cannot be forwarded: {error}",
            ) from error
        return answer

    def _find_connection(self, consumer: _ConsumerFields) -> Connection:
        """Find the connection of a consumer. Raises Refused if it is not connected."""
        group = self._context.sessions.group(consumer.consumer_group)
        for member in group.members if group is not None else ():
            if member.client_id == consumer.client_id and member.connection.is_open:
                return member.connection
        raise Refused(
            ResponseCode.SYSTEM_ERROR,
            f"The Consumer <{consumer.consumer_group}> <{consumer.client_id}> not online",
        )


async def _read_offsets(member: Member, fields: _StatusFields) -> msgspec.Raw | None:
    """Ask a consumer for its own offsets by queue. Returns None if it does not answer or refuses."""
    ext = {"topic": fields.topic, "group": fields.group}
    command = Command(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, ext=ext)
    try:
        answer = await member.connection.request(command, STATUS_TIMEOUT_S)
    except Unavailable:
        return None
    if answer.code != ResponseCode.SUCCESS:
        return None
    return encode_with_object_keys(decode_object_keys(answer.body, "messageQueueTable"))
