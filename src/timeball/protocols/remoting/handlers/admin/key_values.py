"""The name server's table of keys and values, of which one namespace is left in use: ordered topics.

In RocketMQ a topic is made an ordered one twice, in the broker and in this table, and an ordered topic's route
says how many queues each broker has, so that they stay where they are when a broker is away. Here the topic's own
configuration is the one place: what is written to the table changes it, and what is read is made from it.
"""

from __future__ import annotations

import msgspec

from timeball.broker.registry.topics import Topic
from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.site import Site

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"


class _Key(msgspec.Struct):
    namespace: str = ""
    key: str = ""


class _Namespace(msgspec.Struct):
    namespace: str = ""


class KeyValues:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site, self._broker = site, site.broker
        self._topics = site.broker.parts.topics

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {
            RequestCode.PUT_KV_CONFIG: self._put,
            RequestCode.GET_KV_CONFIG: self._get,
            RequestCode.DELETE_KV_CONFIG: self._delete,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._list,
        }

    def _get(self, call: Call) -> Reply:
        asked = call.fields(_Key)
        topic = self._topics.find(asked.key) if asked.namespace == ORDER_NAMESPACE else None
        value = topic and order_conf(topic, self._site.broker_name)
        if not value:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND,
                f"No config item, Namespace: {asked.namespace} Key: {asked.key}",
            )
        return call.answer(ext={"value": value})

    def _list(self, call: Call) -> Reply:
        namespace = call.fields(_Namespace).namespace
        table = {}
        if namespace == ORDER_NAMESPACE:
            found = {topic.name: order_conf(topic, self._site.broker_name) for topic in self._topics.all()}
            table = {name: value for name, value in found.items() if value}
        if not table:
            raise Refused(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {namespace}")
        return call.answer_json({"table": table})

    async def _put(self, call: Call) -> Reply:
        await self._set_order(call, order=True)
        return call.answer()

    async def _delete(self, call: Call) -> Reply:
        """Also when there is no such topic: tools say so of every topic that they have deleted."""
        await self._set_order(call, order=False)
        return call.answer()

    async def _set_order(self, call: Call, *, order: bool) -> None:
        said = call.fields(_Key)
        if said.namespace != ORDER_NAMESPACE:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"namespace {said.namespace[:80]!r}: Timeball keeps {ORDER_NAMESPACE} and nothing else",
            )
        topic = self._topics.find(said.key)
        if topic is not None and topic.config.order != order:
            self._topics.configure(topic.name, msgspec.structs.replace(topic.config, order=order))
            await self._broker.parts.writer.flushed()


def order_conf(topic: Topic, broker_name: str) -> str | None:
    """RocketMQ's orderTopicConf: each broker and its number of queues; None for a topic that is not ordered."""
    return f"{broker_name}:{topic.write_queues}" if topic.config.order else None
