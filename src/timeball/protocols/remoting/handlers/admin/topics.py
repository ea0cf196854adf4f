"""Topics as tools manage them: create, change, list, delete.

A topic that is deleted disappears with its messages; promises made to it still fall due, and bring it back as
any first message would. What a tool writes is saved before the answer.
"""

from __future__ import annotations

import msgspec

from timeball.access import Caller
from timeball.broker.registry import reserved_topics as reserved
from timeball.broker.registry import topic_config
from timeball.broker.registry.topic_config import TopicConfig
from timeball.broker.registry.topics import FilterType, Topic
from timeball.errors import RequestError
from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.codec.tables import data_version
from timeball.protocols.remoting.site import Site


class _Create(msgspec.Struct, rename="camel"):
    topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int = topic_config.READ | topic_config.WRITE
    topic_filter_type: FilterType = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: str = ""


class _Config(msgspec.Struct, rename="camel"):
    """RocketMQ's TopicConfig, as `mqadmin updateTopicList` reads it from a file."""

    topic_name: str
    read_queue_nums: int = 16  # RocketMQ's own defaults
    write_queue_nums: int = 16
    perm: int = topic_config.READ | topic_config.WRITE
    topic_filter_type: FilterType = "SINGLE_TAG"
    topic_sys_flag: int = 0
    order: bool = False
    attributes: dict[str, str] | None = None

    def as_header(self) -> _Create:
        """Return the same as the header of a single one has it; attributes without a sign are to be added."""
        changes = [
            name if name.startswith("-") else f"+{name.removeprefix('+')}={value}"
            for name, value in (self.attributes or {}).items()
        ]
        return _Create(
            self.topic_name, self.read_queue_nums, self.write_queue_nums, self.perm, self.topic_filter_type,
            self.topic_sys_flag, self.order, ",".join(changes),
        )  # fmt: skip


class _Configs(msgspec.Struct, rename="camel"):
    topic_config_list: list[_Config] = []


class _Topic(msgspec.Struct):
    topic: str


class TopicAdmin:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site, self._broker = site, site.broker
        self._topics = site.broker.parts.topics

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {
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
        }

    async def _update(self, call: Call) -> Reply:
        said = call.fields(_Create)
        try:
            config = self._config(said)
            self._broker.policy.admit_managed([said.topic], call.caller)
            self._configure(said, config, call.caller)
        except RequestError as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, str(error)) from error
        await self._broker.parts.writer.flushed()
        return call.answer()

    async def _update_list(self, call: Call) -> Reply:
        """Many at once: none of them when one cannot be read, those before it when one is refused later."""
        wanted = [one.as_header() for one in call.body(_Configs).topic_config_list]
        try:
            configs = [self._config(said) for said in wanted]
            self._broker.policy.admit_managed([said.topic for said in wanted], call.caller)
            for said, config in zip(wanted, configs, strict=True):
                self._configure(said, config, call.caller)
        except RequestError as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, str(error)) from error
        finally:
            await self._broker.parts.writer.flushed()
        return call.answer()

    def _configure(self, said: _Create, config: TopicConfig, caller: Caller) -> None:
        self._topics.configure(said.topic, config, filter_type=said.topic_filter_type, made_by=caller.name)

    def _config(self, said: _Create) -> TopicConfig:
        """Return what a topic is to be like; raises RequestError when no topic can."""
        self._broker.policy.check_managed(said.topic)
        known = self._topics.find(said.topic)
        config = TopicConfig(
            read_queues=said.read_queue_nums,
            write_queues=said.write_queue_nums,
            perm=said.perm,
            order=said.order,
            sys_flag=said.topic_sys_flag,
            attributes=topic_config.altered(known.config.attributes if known else {}, said.attributes),
        )
        topic_config.check(config)
        return config

    def _all(self, call: Call) -> Reply:
        return call.answer_json(
            {
                "dataVersion": data_version(self._topics.version, 0),
                "topicConfigTable": {topic.name: _words(topic) for topic in self._topics.all()},
            }
        )

    def _one(self, call: Call) -> Reply:
        return call.answer_json(_words(self._known(call.fields(_Topic).topic)))

    async def _delete(self, call: Call) -> Reply:
        name = call.fields(_Topic).topic
        self._broker.policy.check_managed(name, call.caller)
        if self._topics.delete(name, self._broker.parts.writer.next_seq):
            self._broker.parts.offsets.forget_topic(name)
            self._broker.waiters.wake([name])  # who waits for its messages is told that it is gone
            await self._broker.parts.writer.flushed()
        return call.answer()

    def _nothing_to_do(self, call: Call) -> Reply:
        """Agree: what a name server or an index still has of a topic elsewhere goes here with the topic and the log."""
        return call.answer()

    def _system_topics(self, call: Call) -> Reply:
        return call.answer_json(
            {
                "topicList": [self._site.cluster_name, self._site.broker_name, *reserved.SYSTEM_TOPICS],
                "brokerAddr": self._site.address(call.connection),
            }
        )

    def _known(self, name: str) -> Topic:
        topic = self._topics.find(name)
        if topic is None:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
        return topic


def _words(topic: Topic) -> dict[str, object]:
    """RocketMQ's TopicConfig."""
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
