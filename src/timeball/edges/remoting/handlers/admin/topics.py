"""Administration of topics: create, change, list, delete.

broker/admin/administration.py defines the effect of a change. A tool's change is saved before the answer.

Of the name server's key-value table, one namespace is still used: ordered topics. In RocketMQ a topic is declared as
ordered twice, in the broker and in this table. The route of an ordered topic contains the number of queues of each
broker, so that queues keep their places while a broker is away. Here only the topic's own configuration counts: a write
to the table changes it, and a read is computed from it.
"""

from __future__ import annotations

import msgspec

from timeball.broker.admin.administration import TopicChange
from timeball.broker.registry.rates import shares
from timeball.broker.registry.topic import READ, WRITE, TopicConfig
from timeball.broker.registry.topics import FilterType, Topic
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    address,
    by_name,
    data_version,
)
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.shared.error_codes import Refused
from timeball.model import reserved_topics as reserved
from timeball.model.errors import RequestError

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"


class _Create(msgspec.Struct, rename="camel"):
    topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int = READ | WRITE
    topic_filter_type: FilterType = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: str = ""

    def read(self) -> TopicChange:
        """Convert to the broker's TopicChange."""
        config = TopicConfig(
            self.read_queue_nums, self.write_queue_nums, self.perm, self.order, self.topic_sys_flag
        )
        return TopicChange(self.topic, config, self.attributes, self.topic_filter_type)


class _Config(msgspec.Struct, rename="camel"):
    """RocketMQ's TopicConfig, as `mqadmin updateTopicList` reads it from a file."""

    topic_name: str
    read_queue_nums: int = 16  # RocketMQ's own defaults
    write_queue_nums: int = 16
    perm: int = READ | WRITE
    topic_filter_type: FilterType = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] | None = None

    def read(self) -> TopicChange:
        """Convert to the broker's TopicChange. Attributes without a sign are to be added."""
        config = TopicConfig(
            self.read_queue_nums, self.write_queue_nums, self.perm, self.order, self.topic_sys_flag
        )
        changes = [
            name if name.startswith("-") else f"+{name.removeprefix('+')}={value}"
            for name, value in (self.attributes or {}).items()
        ]
        return TopicChange(self.topic_name, config, ",".join(changes), self.topic_filter_type)


class _Configs(msgspec.Struct, rename="camel"):
    topic_config_list: list[_Config] = []


class _Topic(msgspec.Struct):
    topic: str


class _Key(msgspec.Struct):
    namespace: str = ""
    key: str = ""


class _Namespace(msgspec.Struct):
    namespace: str = ""


class TopicAdmin:
    """Serves the requests that create, change, list and delete topics, and those about the key-value table."""

    def __init__(self, context: RemotingContext) -> None:
        self._context, self._administration = context, context.broker.administration
        self._topics = context.broker.tables.topics
        self.handlers: Handlers = {
            RequestCode.UPDATE_AND_CREATE_TOPIC: self._update,
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: self._update_list,
            RequestCode.GET_ALL_TOPIC_CONFIG: self._all,
            RequestCode.GET_TOPIC_CONFIG: self._one,
            RequestCode.DELETE_TOPIC_IN_BROKER: self._delete,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._nothing_to_do,
            RequestCode.CLEAN_UNUSED_TOPIC: self._nothing_to_do,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self._nothing_to_do,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self._system_topics,
            RequestCode.PUT_KV_CONFIG: self._put_value,
            RequestCode.GET_KV_CONFIG: self._get_value,
            RequestCode.DELETE_KV_CONFIG: self._delete_value,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._list_values,
        }

    async def _update(self, call: Call) -> Reply:
        return await self._configure([call.fields(_Create).read()], call)

    async def _update_list(self, call: Call) -> Reply:
        return await self._configure([one.read() for one in call.body(_Configs).topic_config_list], call)

    async def _configure(self, wanted: list[TopicChange], call: Call) -> Reply:
        try:
            await self._administration.configure_topics(wanted, call.caller)
        except RequestError as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, str(error)) from error
        return call.answer()

    async def _all(self, call: Call) -> Reply:
        # Read the version first: after a change meanwhile, the tool then asks again.
        version = data_version(self._topics.version, 0)
        table = await by_name(self._topics.all(), lambda topic: (topic.name, _words(topic)))
        return call.answer_json({"dataVersion": version, "topicConfigTable": table})

    def _one(self, call: Call) -> Reply:
        return call.answer_json(_words(self._known(call.fields(_Topic).topic)))

    async def _delete(self, call: Call) -> Reply:
        await self._administration.delete_topic(call.fields(_Topic).topic, call.caller)
        return call.answer()

    def _nothing_to_do(self, call: Call) -> Reply:
        """Answer with success: Timeball has no name server or index from which a topic must be removed separately."""
        return call.answer()

    def _system_topics(self, call: Call) -> Reply:
        return call.answer_json(
            {
                "topicList": [self._context.cluster_name, self._context.broker_name, *reserved.SYSTEM_TOPICS],
                "brokerAddr": address(self._context, call.connection),
            }
        )

    # -- the name server's table of keys and values ------------------------------------------------------------

    def _get_value(self, call: Call) -> Reply:
        asked = call.fields(_Key)
        topic = self._topics.find_topic(asked.key) if asked.namespace == ORDER_NAMESPACE else None
        value = topic and order_conf(topic, self._context.broker_name)
        if not value:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND,
                f"No config item, Namespace: {asked.namespace} Key: {asked.key}",
            )
        return call.answer(ext={"value": value})

    async def _list_values(self, call: Call) -> Reply:
        namespace = call.fields(_Namespace).namespace
        table = dict[str, str]()
        if namespace == ORDER_NAMESPACE:
            async for topics in shares(self._topics.all()):
                found = {topic.name: order_conf(topic, self._context.broker_name) for topic in topics}
                table |= {name: value for name, value in found.items() if value}
        if not table:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return call.answer_json({"table": table})

    async def _put_value(self, call: Call) -> Reply:
        await self._set_order(call, order=True)
        return call.answer()

    async def _delete_value(self, call: Call) -> Reply:
        """Clear the order of a topic, even if it does not exist: tools send this for every topic that they delete."""
        await self._set_order(call, order=False)
        return call.answer()

    async def _set_order(self, call: Call, *, order: bool) -> None:
        said = call.fields(_Key)
        if said.namespace != ORDER_NAMESPACE:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"namespace {said.namespace[:80]!r}: Timeball keeps {ORDER_NAMESPACE} and nothing else",
            )
        await self._administration.set_order(said.key, call.caller, order=order)

    def _known(self, name: str) -> Topic:
        topic = self._topics.find_topic(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
        return topic


def _words(topic: Topic) -> dict[str, object]:
    """Return RocketMQ's TopicConfig."""
    return {
        "topicName": topic.name,
        "readQueueNums": topic.read_queues,
        "writeQueueNums": topic.write_queues,
        "perm": topic.perm,
        "topicFilterType": topic.filter_type,
        "topicSysFlag": topic.config.sys_flag,
        "order": topic.config.order,
        "attributes": topic.config.attributes,
    }


def order_conf(topic: Topic, broker_name: str) -> str | None:
    """Return RocketMQ's orderTopicConf, `broker:queues`, or None for a topic that is not ordered."""
    return f"{broker_name}:{topic.write_queues}" if topic.config.order else None
