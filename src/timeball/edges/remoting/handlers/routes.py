"""The requests of a name server: the route of a topic, and the list of brokers.

There is one broker, so every route contains it. A topic that does not exist yet has no route. A producer then asks for
RocketMQ's template topic TBW102 and sends with its route, and the first message creates the topic. The names of the
cluster and of the broker count as topics too, because administration tools ask for their routes.
"""

from __future__ import annotations

import msgspec

from timeball.broker.registry.topic import INHERIT, READ, WRITE
from timeball.broker.registry.topics import check_topic
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply, address
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.connection import Connection
from timeball.edges.remoting.handlers.admin.topics import order_conf
from timeball.edges.shared.error_codes import Refused
from timeball.model.message import RETRY_PREFIX
from timeball.model.reserved_topics import AUTO_CREATE_TOPIC

MASTER_ID = "0"


class _Topic(msgspec.Struct):
    topic: str


class Routes:
    """Serves the requests to a name server."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self.handlers: Handlers = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._cluster,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics,
        }

    def _route(self, call: Call) -> Reply:
        topic = call.fields(_Topic).topic
        route: dict[str, object] = {
            "queueDatas": [self._queues(topic)],
            "brokerDatas": [self._broker(call.connection)],
            "filterServerTable": {},
        }
        known = self._context.broker.tables.topics.find_topic(topic)
        if known is not None and known.config.order:
            route["orderTopicConf"] = order_conf(known, self._context.broker_name)
        return call.answer_json(route)

    def _queues(self, topic: str) -> dict[str, object]:
        context, settings = self._context, self._context.broker.settings
        read = write = settings.queues_per_topic
        perm, sys_flag = READ | WRITE, 0
        known, standing = (
            context.broker.tables.topics.find_topic(topic),
            context.broker.policy.system_topic_queues(topic),
        )
        if known is not None:
            read, write, perm = known.read_queues, known.write_queues, known.perm
            sys_flag = known.config.sys_flag
        elif topic.startswith(RETRY_PREFIX):
            # A consumer asks before its first heartbeat creates the topic. After a refusal it would ask again only in
            # 20 to 30 s.
            check_topic(topic)
            read = write = 1
        elif topic == AUTO_CREATE_TOPIC and context.broker.policy.has_template:
            perm |= INHERIT  # tells a producer that it may create a topic from the template
        elif standing is not None:
            read = write = standing
        else:
            check_topic(topic)
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST, f"No topic route info in name server for the topic: {topic}"
            )
        return {
            "brokerName": context.broker_name,
            "readQueueNums": read,
            "writeQueueNums": write,
            "perm": context.broker.policy.permission(topic, perm),
            "topicSysFlag": sys_flag,
            "topicSynFlag": 0,
        }

    def _broker(self, connection: Connection) -> dict[str, object]:
        context = self._context
        return {
            "cluster": context.cluster_name,
            "brokerName": context.broker_name,
            "brokerAddrs": {MASTER_ID: address(context, connection)},
        }

    def _cluster(self, call: Call) -> Reply:
        context = self._context
        broker = self._broker(call.connection)
        return call.answer_json(
            {
                "brokerAddrTable": {context.broker_name: broker},
                "clusterAddrTable": {context.cluster_name: [context.broker_name]},
            }
        )

    def _topics(self, call: Call) -> Reply:
        context = self._context
        names = {topic.name for topic in context.broker.tables.topics.all()}
        return call.answer_json({"topicList": sorted(names | {context.cluster_name, context.broker_name})})
