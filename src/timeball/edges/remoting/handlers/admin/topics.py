"""Administration of topics: create, change, list and delete them, and the name server's table of ordered topics.

broker/admin/administration.py implements the changes. A change is saved before the answer.

The name server's key-value table has one namespace that tools still use: ordered topics. In RocketMQ, a topic is marked
as ordered in two places, in the broker and in this table. The route of an ordered topic contains the number of queues
of each broker, so that clients do not redistribute queues while a broker is down. Here only the topic's configuration
is stored: a write to the table changes it, and a read is computed from it.
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
    data_version,
    encode_by_name,
)
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.shared.error_codes import Refused
from timeball.model import reserved_topics as reserved
from timeball.model.errors import RequestError

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"


class _CreateFields(msgspec.Struct, rename="camel"):
    topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int = READ | WRITE
    topic_filter_type: FilterType = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: str = ""

    def to_change(self) -> TopicChange:
        """Convert to the broker's TopicChange."""
        config = TopicConfig(
            self.read_queue_nums, self.write_queue_nums, self.perm, self.order, self.topic_sys_flag
        )
        return TopicChange(self.topic, config, self.attributes, self.topic_filter_type)


class _Config(msgspec.Struct, rename="camel"):
    """RocketMQ's TopicConfig, as `mqadmin updateTopicList` reads it from a file."""

    topic_name: str
    read_queue_nums: int = 16  # RocketMQ's defaults
    write_queue_nums: int = 16
    perm: int = READ | WRITE
    topic_filter_type: FilterType = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] | None = None

    def to_change(self) -> TopicChange:
        """Convert to the broker's TopicChange. An attribute without a sign is added."""
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


class _KeyFields(msgspec.Struct):
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
            RequestCode.GET_ALL_TOPIC_CONFIG: self._list,
            RequestCode.GET_TOPIC_CONFIG: self._get,
            RequestCode.DELETE_TOPIC_IN_BROKER: self._delete,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._succeed,
            RequestCode.CLEAN_UNUSED_TOPIC: self._succeed,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self._succeed,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self._system_topics,
            RequestCode.PUT_KV_CONFIG: self._put_value,
            RequestCode.GET_KV_CONFIG: self._get_value,
            RequestCode.DELETE_KV_CONFIG: self._delete_value,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._list_values,
        }

    async def _update(self, call: Call) -> Reply:
        return await self._configure([call.fields(_CreateFields).to_change()], call)

    async def _update_list(self, call: Call) -> Reply:
        return await self._configure(
            [config.to_change() for config in call.body(_Configs).topic_config_list], call
        )

    async def _configure(self, changes: list[TopicChange], call: Call) -> Reply:
        """Create or change topics. Raises Refused."""
        try:
            await self._administration.configure_topics(changes, call.caller)
        except RequestError as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, str(error)) from error
        return call.answer()

    async def _list(self, call: Call) -> Reply:
        # The version is read first, so that a tool sees an outdated version if the table changes meanwhile.
        version = data_version(self._topics.version, 0)
        table = await encode_by_name(self._topics.all(), lambda topic: (topic.name, _topic_config(topic)))
        return call.answer_json({"dataVersion": version, "topicConfigTable": table})

    def _get(self, call: Call) -> Reply:
        return call.answer_json(_topic_config(self._find_topic(call.fields(_Topic).topic)))

    async def _delete(self, call: Call) -> Reply:
        await self._administration.delete_topic(call.fields(_Topic).topic, call.caller)
        return call.answer()

    def _succeed(self, call: Call) -> Reply:
        """Answer SUCCESS and do nothing: Timeball has no separate name server or index that must be cleaned up."""
        return call.answer()

    def _system_topics(self, call: Call) -> Reply:
        return call.answer_json(
            {
                "topicList": [self._context.cluster_name, self._context.broker_name, *reserved.SYSTEM_TOPICS],
                "brokerAddr": address(self._context, call.connection),
            }
        )

    # -- the name server's key-value table ---------------------------------------------------------------------

    def _get_value(self, call: Call) -> Reply:
        """Serve GET_KV_CONFIG: the queues of an ordered topic. Raises Refused for other keys."""
        fields = call.fields(_KeyFields)
        topic = self._topics.find_topic(fields.key) if fields.namespace == ORDER_NAMESPACE else None
        value = topic and order_conf(topic, self._context.broker_name)
        if not value:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND,
                f"No config item, Namespace: {fields.namespace} Key: {fields.key}",
            )
        return call.answer(ext={"value": value})

    async def _list_values(self, call: Call) -> Reply:
        """Serve GET_KVLIST_BY_NAMESPACE: all ordered topics."""
        namespace = call.fields(_Namespace).namespace
        table = dict[str, str]()
        if namespace == ORDER_NAMESPACE:
            async for topics in shares(self._topics.all()):
                values = {topic.name: order_conf(topic, self._context.broker_name) for topic in topics}
                table |= {name: value for name, value in values.items() if value}
        if not table:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return call.answer_json({"table": table})

    async def _put_value(self, call: Call) -> Reply:
        await self._set_order(call, order=True)
        return call.answer()

    async def _delete_value(self, call: Call) -> Reply:
        """Mark a topic as not ordered. It need not exist, because tools send this for every topic that they delete."""
        await self._set_order(call, order=False)
        return call.answer()

    async def _set_order(self, call: Call, *, order: bool) -> None:
        """Mark the topic of a key-value request as ordered or not. Raises Refused for other namespaces."""
        fields = call.fields(_KeyFields)
        if fields.namespace != ORDER_NAMESPACE:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"namespace {fields.namespace[:80]!r}: Timeball stores only {ORDER_NAMESPACE}",
            )
        await self._administration.set_order(fields.key, call.caller, order=order)

    def _find_topic(self, name: str) -> Topic:
        topic = self._topics.find_topic(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
        return topic


def _topic_config(topic: Topic) -> dict[str, object]:
    """Convert a topic to RocketMQ's TopicConfig."""
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
