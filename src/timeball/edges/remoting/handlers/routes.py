"""Serve the requests to a name server: the route of a topic, and the lists of brokers and topics.

There is one broker, so every route contains it. A topic that does not exist yet has no route. A producer then asks for
the route of RocketMQ's template topic TBW102 and sends to it, and the first message creates the topic. The names of the
cluster and of the broker are topics too, because administration tools ask for their routes.
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
        """Serve GET_ROUTEINFO_BY_TOPIC. Raises Refused if the topic has no route."""
        topic = call.fields(_Topic).topic
        route: dict[str, object] = {
            "queueDatas": [self._queue_data(topic)],
            "brokerDatas": [self._broker_data(call.connection)],
            "filterServerTable": {},
        }
        existing_topic = self._context.broker.tables.topics.find_topic(topic)
        if existing_topic is not None and existing_topic.config.order:
            route["orderTopicConf"] = order_conf(existing_topic, self._context.broker_name)
        return call.answer_json(route)

    def _queue_data(self, topic: str) -> dict[str, object]:
        """Create RocketMQ's QueueData of a topic. Raises Refused if the topic has no route."""
        context, settings = self._context, self._context.broker.settings
        read = write = settings.queues_per_topic
        perm, sys_flag = READ | WRITE, 0
        existing_topic, system_topic_queues = (
            context.broker.tables.topics.find_topic(topic),
            context.broker.policy.system_topic_queues(topic),
        )
        if existing_topic is not None:
            read, write, perm = existing_topic.read_queues, existing_topic.write_queues, existing_topic.perm
            sys_flag = existing_topic.config.sys_flag
        elif topic.startswith(RETRY_PREFIX):
            # A consumer asks before its first heartbeat has created the topic. After a refusal it would ask again only
            # after 20 to 30 s.
            check_topic(topic)
            read = write = 1
        elif topic == AUTO_CREATE_TOPIC and context.broker.policy.has_template:
            perm |= INHERIT  # tells a producer that it may create a topic from the template
        elif system_topic_queues is not None:
            read = write = system_topic_queues
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

    def _broker_data(self, connection: Connection) -> dict[str, object]:
        context = self._context
        return {
            "cluster": context.cluster_name,
            "brokerName": context.broker_name,
            "brokerAddrs": {MASTER_ID: address(context, connection)},
        }

    def _cluster(self, call: Call) -> Reply:
        context = self._context
        broker = self._broker_data(call.connection)
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
