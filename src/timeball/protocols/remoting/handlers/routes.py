"""What a name server is asked: where a topic lives, and which brokers there are.

There is one broker, so every route names it. A topic that nobody has made yet has no route; a producer then asks for
RocketMQ's template topic TBW102 and sends with its route, and the first message makes the topic. The names of
the cluster and of the broker are topics too, as far as routes go: administration tools ask for them.
"""

from __future__ import annotations

import msgspec

from timeball.broker.registry.reserved_topics import AUTO_CREATE_TOPIC, RETRY_PREFIX
from timeball.broker.registry.topic_config import INHERIT, READ, WRITE
from timeball.broker.registry.topics import check_topic
from timeball.protocols.error_codes import Refused
from timeball.protocols.remoting.calls import Call, Handlers, Reply
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.connection import Connection
from timeball.protocols.remoting.handlers.admin.key_values import order_conf
from timeball.protocols.remoting.site import Site

MASTER_ID = "0"


class _Topic(msgspec.Struct):
    topic: str


class Routes:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def handlers(self) -> Handlers:
        """The requests answered here."""
        return {
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
        known = self._site.broker.parts.topics.find(topic)
        if known is not None and known.config.order:
            route["orderTopicConf"] = order_conf(known, self._site.broker_name)
        return call.answer_json(route)

    def _queues(self, topic: str) -> dict[str, object]:
        site, settings = self._site, self._site.broker.parts.settings
        read = write = settings.queues_per_topic
        perm, sys_flag = READ | WRITE, 0
        known, standing = site.broker.parts.topics.find(topic), site.broker.policy.standing_queues(topic)
        if known is not None:
            read, write, perm = known.read_queues, known.write_queues, known.perm
            sys_flag = known.config.sys_flag
        elif topic.startswith(RETRY_PREFIX):
            # A consumer asks before its first heartbeat makes it; an honest "no" would be its answer for 20 to 30 s.
            check_topic(topic)
            read = write = 1
        elif topic == AUTO_CREATE_TOPIC and site.broker.policy.has_template:
            perm |= INHERIT  # what tells a producer that a topic may be made from it
        elif standing is not None:
            read = write = standing
        else:
            check_topic(topic)
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST, f"No topic route info in name server for the topic: {topic}"
            )
        return {
            "brokerName": site.broker_name,
            "readQueueNums": read,
            "writeQueueNums": write,
            "perm": perm,
            "topicSysFlag": sys_flag,
            "topicSynFlag": 0,
        }

    def _broker(self, connection: Connection) -> dict[str, object]:
        site = self._site
        return {
            "cluster": site.cluster_name,
            "brokerName": site.broker_name,
            "brokerAddrs": {MASTER_ID: site.address(connection)},
        }

    def _cluster(self, call: Call) -> Reply:
        site = self._site
        broker = self._broker(call.connection)
        return call.answer_json(
            {
                "brokerAddrTable": {site.broker_name: broker},
                "clusterAddrTable": {site.cluster_name: [site.broker_name]},
            }
        )

    def _topics(self, call: Call) -> Reply:
        site = self._site
        names = {topic.name for topic in site.broker.parts.topics.all()}
        return call.answer_json({"topicList": sorted(names | {site.cluster_name, site.broker_name})})
