"""Administration of consumer groups: configure, list and delete them; their members, and connected clients.

A tool's change is saved before the answer. A group that is deleted while it has members is created again by their next
heartbeat, with the defaults, as in RocketMQ.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from timeball.broker.registry.groups import SubscriptionGroup
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply, by_name, data_version
from timeball.edges.remoting.codec.codes import Language, RequestCode, ResponseCode
from timeball.edges.remoting.connection import Member
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import Subscription
from timeball.model.errors import InvalidMessage


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
            RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._all,
            RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: self._one,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self._delete,
            RequestCode.CLONE_GROUP_OFFSET: self._clone_offsets,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self._consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self._producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self._all_producers,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self._groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self._topics_of_group,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self._subscription,
        }

    async def _update(self, call: Call) -> Reply:
        return await self._update_all(call, [call.body(dict[str, msgspec.Raw])])

    async def _update_list(self, call: Call) -> Reply:
        return await self._update_all(call, call.body(_Configs).group_config_list)

    async def _update_all(self, call: Call, said: list[dict[str, msgspec.Raw]]) -> Reply:
        """Configure all groups, none if one cannot be decoded, or only those before the first that is refused."""
        try:
            await self._broker.administration.configure_groups([_group(one) for one in said], call.caller)
        except (msgspec.ValidationError, InvalidMessage) as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, f"the group's configuration: {error}") from error
        return call.answer()

    async def _all(self, call: Call) -> Reply:
        # Read the version first: after a change meanwhile, the tool then asks again.
        version = data_version(self._groups.version, 0)
        table = await by_name(self._groups.all(), lambda group: (group.group_name, group))
        return call.answer_json(
            {"dataVersion": version, "forbiddenTable": {}, "subscriptionGroupTable": table}
        )

    def _one(self, call: Call) -> Reply:
        name = call.fields(_Named).group
        group = self._groups.find_group(name)
        if group is None:
            raise Refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group [{name}] not exist")
        return call.answer_json(group)

    async def _delete(self, call: Call) -> Reply:
        said = call.fields(_Delete)
        await self._broker.administration.delete_group(
            said.group_name, call.caller, with_offsets=said.clean_offset
        )
        return call.answer()

    async def _clone_offsets(self, call: Call) -> Reply:
        """Copy a group's offsets to another group, for one topic or for all topics that it reads."""
        said = call.fields(_Clone)
        offsets, topics = self._broker.tables.offsets, self._broker.tables.topics
        group = self._sessions.group(said.src_group)
        for topic in [said.topic] if said.topic else offsets.topics_of(said.src_group):
            if topics.find_topic(topic) is None:
                continue
            if group is not None and not said.offline and topic not in group.subscriptions:
                continue  # as in RocketMQ: its members no longer subscribe to the topic
            await self._broker.commit_offsets(
                said.dest_group, topic, offsets.get(said.src_group, topic), call.caller
            )
        return call.answer()

    # -- who is connected ----------------------------------------------------------------------------------------

    def _consumers(self, call: Call) -> Reply:
        name = call.fields(_ConsumerGroup).consumer_group
        group = self._sessions.group(name)
        if group is None:
            raise Refused(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        return call.answer_json(
            {
                "connectionSet": _connections(group.members),
                "consumeFromWhere": group.how.consume_from_where,
                "consumeType": group.how.consume_type,
                "messageModel": group.how.message_model,
                "subscriptionTable": {topic: _words(one) for topic, one in group.subscriptions.items()},
            }
        )

    def _producers(self, call: Call) -> Reply:
        name = call.fields(_ProducerGroup).producer_group
        members = self._sessions.producers(name)
        if not members:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        return call.answer_json({"connectionSet": _connections(members)})

    def _all_producers(self, call: Call) -> Reply:
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
                    for name in self._sessions.produced()
                }
            }
        )

    def _groups_of_topic(self, call: Call) -> Reply:
        topic = call.fields(_Topic).topic
        stored = self._broker.tables.offsets.groups_of(topic)
        return call.answer_json({"groupList": sorted({*stored, *self._sessions.groups_on(topic)})})

    def _topics_of_group(self, call: Call) -> Reply:
        group = call.fields(_Group).group
        return call.answer_json({"topicList": sorted(self._broker.tables.offsets.topics_of(group))})

    def _subscription(self, call: Call) -> Reply:
        asked = call.fields(_GroupAndTopic)
        found = self._sessions.subscription(asked.group, asked.topic)
        return call.answer_json(
            {
                "group": asked.group,
                "topic": asked.topic,
                "subscriptionData": None if found is None else _words(found),
            }
        )


def _group(said: dict[str, msgspec.Raw]) -> SubscriptionGroup:
    # Java leaves out fields that are null, other tools write them. Both mean the default.
    wanted = msgspec.json.encode({name: raw for name, raw in said.items() if bytes(raw) != b"null"})
    return msgspec.json.decode(wanted, type=SubscriptionGroup, strict=False)


def _connections(members: Iterable[Member]) -> list[dict[str, object]]:
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


def _words(one: Subscription) -> dict[str, object]:
    """Return RocketMQ's SubscriptionData."""
    tags = [] if one.expression_type != "TAG" or one.expression == "*" else one.expression.split("||")
    return {
        "topic": one.topic,
        "subString": one.expression,
        "subVersion": one.version,
        "expressionType": one.expression_type,
        "tagsSet": [tag.strip() for tag in tags if tag.strip()],
        "codeSet": [],
        "classFilterMode": False,
    }
