"""Every header field of the requests of RocketMQ 5.5.0 is read, refused or listed here as ignored.

The fields are those of the `*RequestHeader` classes of `rocketmq-remoting` 5.5.0, for the requests that Timeball
answers. A new field may change the meaning of a request. Thus a field is ignored only for a reason that is stated here.
"""

from __future__ import annotations

import msgspec
import pytest
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode

from timeball.edges.remoting.calls import NEUTRAL_VALUES
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, JSON
from timeball.edges.remoting.handlers import heartbeats, pops, pulls, queries, retries, sends
from timeball.edges.remoting.handlers.admin import groups, progress, topics

# Not listed are the fields of RpcRequestHeader and TopicRequestHeader, from which most classes inherit: `ns` and `nsd`,
# the client's namespaceV2, which RocketMQ's broker does not read either; `bname` and `lo`, of static topics; and
# `oway`, which repeats the flag of the command.

# Request code: (the fields that are read, the fields that are ignored). REFUSED has the others.
FIELDS: dict[int, tuple[str, str]] = {
    11: (
        "consumerGroup topic queueId queueOffset maxMsgNums sysFlag commitOffset suspendTimeoutMillis subscription "
        "subVersion expressionType maxMsgBytes",
        "requestSource proxyFrowardClientId",  # a proxy sends them for the broker's logs
    ),
    12: ("topic key maxNum beginTimestamp endTimestamp indexType", ""),
    14: ("consumerGroup topic queueId setZeroIfNotFound", ""),
    15: ("consumerGroup topic queueId commitOffset", ""),
    17: (
        "topic readQueueNums writeQueueNums perm topicFilterType topicSysFlag order attributes",
        "defaultTopic force",  # there is no template topic to inherit from, and the checks are always the same
    ),
    21: ("", "topicSeq dataVersion maxTopicNum"),  # one answer contains all topics
    29: ("topic queueId timestamp boundaryType", ""),
    30: ("topic queueId", "committed"),  # a queue contains only rows that are on disk
    31: ("topic queueId", ""),
    32: ("topic queueId", ""),
    33: ("offset", "topic"),  # the stored message has the topic
    35: ("clientID producerGroup consumerGroup", ""),
    36: ("offset group delayLevel maxReconsumeTimes", "originMsgId originTopic unitMode"),  # the stored row has them
    37: (
        "producerGroup commitLogOffset commitOrRollback",
        "topic tranStateTableOffset fromTransactionCheck msgId transactionId",  # the half message has them
    ),
    38: ("consumerGroup", ""),
    100: ("namespace key value", ""),
    101: ("namespace key", ""),
    102: ("namespace key", ""),
    105: ("topic", "acceptStandardJsonOnly"),  # routes are standard JSON for all
    201: ("", "groupSeq dataVersion maxGroupNum"),  # one answer contains all groups
    202: ("topic", ""),
    203: ("consumerGroup", ""),
    204: ("producerGroup", ""),
    207: ("groupName cleanOffset", ""),
    208: ("consumerGroup topic topicList", ""),
    215: ("topic", ""),
    216: ("topic", "clusterName"),  # there is one cluster
    219: ("namespace", ""),
    222: ("group topic queueId offset timestamp isForce", ""),
    223: ("topic group clientAddr", ""),
    224: ("", "cluster"),
    300: ("topic", ""),
    303: ("topic group", ""),
    307: ("consumerGroup clientId", "jstackEnable"),  # passed on to the consumer
    309: ("consumerGroup clientId msgId", "brokerName topic topicSysFlag groupSysFlag"),  # passed on
    314: ("srcGroup destGroup topic offline", ""),
    315: ("statsName statsKey", ""),
    343: ("group", ""),
    345: ("group topic", ""),
    351: ("topic", ""),
    352: ("group", ""),
    370: ("topic recallHandle producerGroup", ""),
    200050: (
        "consumerGroup topic queueId maxMsgNums invisibleTime pollTime initMode expType exp order attemptId",
        "bornTime",  # the waiting time of a request begins with its arrival
    ),
    200051: ("consumerGroup topic queueId extraInfo offset", ""),
    200053: ("consumerGroup topic queueId extraInfo offset invisibleTime", ""),
    200054: (
        "consumerGroup topic queueId pollTime order attemptId",
        "bornTime expType exp",  # a notification may be wrong: the POP request that follows applies the filter
    ),
}  # fmt: skip
REFUSED = {
    11: "liteTopic", 12: "lastKey", 29: "liteTopic", 200051: "liteTopic", 200053: "liteTopic suspend",
}  # fmt: skip

# The classes of 5.5.0, as `javap` shows them.
OF_5_5_0 = {
    11: "consumerGroup topic liteTopic queueId queueOffset maxMsgNums sysFlag commitOffset suspendTimeoutMillis "
        "subscription subVersion expressionType maxMsgBytes requestSource proxyFrowardClientId",
    12: "topic key maxNum beginTimestamp endTimestamp indexType lastKey",
    14: "consumerGroup topic queueId setZeroIfNotFound",
    15: "consumerGroup topic queueId commitOffset",
    17: "topic defaultTopic readQueueNums writeQueueNums perm topicFilterType topicSysFlag order attributes force",
    21: "topicSeq dataVersion maxTopicNum",
    29: "topic liteTopic queueId timestamp boundaryType",
    30: "topic queueId committed", 31: "topic queueId", 32: "topic queueId", 33: "topic offset",
    35: "clientID producerGroup consumerGroup",
    36: "offset group delayLevel originMsgId originTopic unitMode maxReconsumeTimes",
    37: "topic producerGroup tranStateTableOffset commitLogOffset commitOrRollback fromTransactionCheck msgId "
        "transactionId",
    38: "consumerGroup", 100: "namespace key value", 101: "namespace key", 102: "namespace key",
    105: "topic acceptStandardJsonOnly", 201: "groupSeq dataVersion maxGroupNum", 202: "topic", 203: "consumerGroup",
    204: "producerGroup", 207: "groupName cleanOffset", 208: "consumerGroup topic topicList", 215: "topic",
    216: "topic clusterName", 219: "namespace", 222: "group topic queueId offset timestamp isForce",
    223: "topic group clientAddr", 224: "cluster", 300: "topic", 303: "topic group",
    307: "consumerGroup clientId jstackEnable",
    309: "consumerGroup clientId msgId brokerName topic topicSysFlag groupSysFlag",
    314: "srcGroup destGroup topic offline", 315: "statsName statsKey", 343: "group", 345: "group topic",
    351: "topic", 352: "group", 370: "producerGroup topic recallHandle",
    200050: "consumerGroup topic queueId maxMsgNums invisibleTime pollTime bornTime initMode expType exp order "
            "attemptId",
    200051: "consumerGroup topic queueId extraInfo offset liteTopic",
    200053: "consumerGroup topic queueId extraInfo offset invisibleTime liteTopic suspend",
    200054: "consumerGroup topic queueId pollTime bornTime order attemptId expType exp",
}  # fmt: skip

# The structures that the handlers convert headers to. A handler without one reads no field by name.
READ_BY: dict[int, type] = {
    11: pulls.PullFields, 12: queries._Query, 14: pulls._Query, 15: pulls._Update, 17: topics._CreateFields,
    29: pulls._Search, 30: pulls._Queue, 31: pulls._Queue, 32: pulls._Queue, 33: queries._View,
    36: retries._SendBack, 37: sends._End, 38: heartbeats._Group, 101: topics._KeyFields, 105: queries._Topic,
    202: progress._Topic, 203: groups._ConsumerGroup, 204: groups._ProducerGroup, 207: groups._Delete,
    208: progress._Stats, 215: topics._Topic, 219: topics._Namespace, 222: progress._Reset,
    223: groups._StatusFields, 300: groups._Topic, 303: progress._Span,
    307: groups._ConsumerFields, 309: groups._ConsumeFields,
    314: groups._Clone, 315: topics._StatsFields, 343: groups._Group,
    345: groups._GroupAndTopic, 351: topics._Topic, 352: groups._Named, 370: sends._Recall, 200050: pops._Pop,
    200051: pops._Ack, 200053: pops._ChangeInvisible, 200054: pops._Notification,
}  # fmt: skip


@pytest.mark.parametrize("code", FIELDS)
def test_each_field_of_a_header_is_read_or_refused_or_listed_as_ignored(code: int) -> None:
    read, ignored = (set(names.split()) for names in FIELDS[code])
    refused = set(REFUSED.get(code, "").split())
    assert refused <= NEUTRAL_VALUES.keys()
    assert read | ignored | refused == set(OF_5_5_0[code].split())
    assert not read & ignored and not (read | ignored) & refused
    if code in READ_BY:
        fields = {field.encode_name for field in msgspec.structs.fields(READ_BY[code])}
        assert fields - {"_UNIQUE_KEY_QUERY"} == read  # that field is in no class: the client adds it


def test_every_unsupported_field_is_a_field_of_5_5() -> None:
    assert set(NEUTRAL_VALUES) - set(" ".join(REFUSED.values()).split()) == {
        "indexType"
    }  # only some of its values are refused
    assert FIELDS.keys() == OF_5_5_0.keys() and set(FIELDS) <= set(RequestCode)


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (RequestCode.PULL_MESSAGE, {"liteTopic": "lite"}),
        (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {"liteTopic": "lite"}),
        (RequestCode.ACK_MESSAGE, {"liteTopic": "lite"}),
        (RequestCode.CHANGE_MESSAGE_INVISIBLETIME, {"suspend": "true"}),
        (RequestCode.QUERY_MESSAGE, {"indexType": "T"}),
        (RequestCode.QUERY_MESSAGE, {"lastKey": "k"}),
    ],
)
@pytest.mark.parametrize("serialisation", [JSON, BINARY])
def test_an_unsupported_field_with_an_effect_is_refused(
    node: RunningNode, code: int, fields: dict[str, str], serialisation: int
) -> None:
    if serialisation == BINARY and code > 32_767:
        pytest.skip("the binary header cannot hold the codes of POP requests")
    ext = {
        "consumerGroup": "g", "topic": "orders", "queueId": 0, "queueOffset": 0, "maxMsgNums": 1, "sysFlag": 0,
        "commitOffset": 0, "suspendTimeoutMillis": 0, "subVersion": 0, "offset": 0, "extraInfo": "x",
        "invisibleTime": 1_000, "timestamp": 0, "key": "A", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1 << 60,
    }  # fmt: skip
    [(name, value)] = fields.items()
    with Wire.to(node, serialisation) as wire:
        sent(wire)
        answer = wire.ask(code, **{**ext, **fields})
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark == f"code {int(code)}: {name} {value!r} is not supported by Timeball: leave it out"


def test_an_unsupported_field_without_an_effect_is_accepted(node: RunningNode, wire: Wire) -> None:
    sent(wire, properties={"KEYS": "k"})
    query = {"topic": "orders", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1 << 60}
    for fields in (
        {"indexType": "K", "key": "k"},
        {"indexType": "U", "key": "AB" * 16},
        {"lastKey": "", "key": "k"},
    ):
        assert wire.ask_ok(RequestCode.QUERY_MESSAGE, **query, **fields).body
    answer = wire.ask(RequestCode.QUERY_MESSAGE, **query, indexType="U", key="k")
    assert answer.code == ResponseCode.QUERY_NOT_FOUND
