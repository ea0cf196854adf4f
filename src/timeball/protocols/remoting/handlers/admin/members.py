"""Who is connected, for tools: the members of a group, what they subscribe to, and who reads a topic."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.clients import Member, Subscription
from timeball.protocols.remoting.codec.codes import Language, RequestCode, ResponseCode
from timeball.protocols.remoting.site import Site


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


class MemberAdmin:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site, self._clients = site, site.clients

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self._consumers,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self._producers,
            RequestCode.GET_ALL_PRODUCER_INFO: self._all_producers,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self._groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self._topics_of_group,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self._subscription,
        }

    def _consumers(self, call: Call) -> Reply:
        name = call.fields(_ConsumerGroup).consumer_group
        group = self._clients.consumers(name)
        if group is None:
            raise Refused(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        return call.answer_json(
            {
                "connectionSet": _connections(group.members.values()),
                "consumeFromWhere": group.how.consume_from_where,
                "consumeType": group.how.consume_type,
                "messageModel": group.how.message_model,
                "subscriptionTable": {topic: _words(one) for topic, one in group.subscriptions.items()},
            }
        )

    def _producers(self, call: Call) -> Reply:
        name = call.fields(_ProducerGroup).producer_group
        members = self._clients.producer_members(name)
        if not members:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        return call.answer_json({"connectionSet": _connections(members)})

    def _all_producers(self, call: Call) -> Reply:
        now_ms, wall_ms = self._site.monotonic_ms(), self._site.broker.parts.clock.now_ms()
        return call.answer_json(
            {
                "data": {
                    name: [
                        {
                            "clientId": member.client_id,
                            "remoteIP": member.connection.name,
                            "language": _language(member),
                            "version": member.version,
                            "lastUpdateTimestamp": wall_ms - (now_ms - member.beaten_ms),
                        }
                        for member in self._clients.producer_members(name)
                    ]
                    for name in self._clients.producer_groups()
                }
            }
        )

    def _groups_of_topic(self, call: Call) -> Reply:
        topic = call.fields(_Topic).topic
        stored = self._site.broker.parts.offsets.groups_of(topic)
        return call.answer_json({"groupList": sorted({*stored, *self._clients.groups_on(topic)})})

    def _topics_of_group(self, call: Call) -> Reply:
        group = call.fields(_Group).group
        return call.answer_json({"topicList": sorted(self._site.broker.parts.offsets.topics_of(group))})

    def _subscription(self, call: Call) -> Reply:
        asked = call.fields(_GroupAndTopic)
        found = self._clients.subscription(asked.group, asked.topic)
        return call.answer_json(
            {
                "group": asked.group,
                "topic": asked.topic,
                "subscriptionData": None if found is None else _words(found),
            }
        )


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
    """RocketMQ's SubscriptionData."""
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
