"""Replies: the broker pushes a reply to the producer of the request, or refuses it at once."""

from __future__ import annotations

import pytest
from tests.accounts import guarded_node
from tests.edges.remoting.handlers.test_sends import rows, sent
from tests.edges.remoting.signing import SignedWire
from tests.edges.remoting.wire import Wire, json_body
from tests.node_fixture import RunningNode

from timeball.broker.registry.topics import READ, WRITE
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.model.message import decode_properties, encode_properties

REPLY, REPLY_V2 = RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2
PUSHED = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
TOPIC = "DefaultCluster_REPLY_TOPIC"
BEAT = {"clientID": "asker", "producerDataSet": [{"groupName": "askers"}]}
PROPERTIES = encode_properties({"REPLY_TO_CLIENT": "asker", "CORRELATION_ID": "7", "MSG_TYPE": "reply"})
SHORT = {"a": "repliers", "b": TOPIC, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 5, "h": 0, "i": PROPERTIES}
LONG = {
    "producerGroup": "repliers", "topic": TOPIC, "defaultTopic": "TBW102", "defaultTopicQueueNums": 4, "queueId": 0,
    "sysFlag": 0, "bornTimestamp": 5, "flag": 0, "properties": PROPERTIES,
}  # fmt: skip


@pytest.mark.parametrize(("code", "header"), [(REPLY, LONG), (REPLY_V2, SHORT)])
def test_a_reply_is_pushed_to_the_requesting_producer(
    node: RunningNode, wire: Wire, code: int, header: dict[str, object]
) -> None:
    with Wire.to(node) as asker:
        asker.ask_ok(RequestCode.HEART_BEAT, BEAT)
        asked = wire.send(code, b"yes", **header)
        pushed = asker.next_pushed()
        assert (pushed.code, pushed.body, pushed.is_one_way) == (PUSHED, b"yes", False)
        added = {name: pushed.ext.pop(name) for name in ("bornHost", "storeHost", "storeTimestamp")}
        assert added["storeHost"].endswith(str(node.node.remoting_port)) and int(added["storeTimestamp"])
        assert pushed.ext == {k: str(v) for k, v in LONG.items()} | {
            "reconsumeTimes": "0",
            "unitMode": "false",
        }
        asker.reply(pushed)
        answer = wire.answer_to(asked)
        assert answer.code == ResponseCode.SUCCESS
        assert {"msgId": "0", "queueId": "0", "queueOffset": "0"}.items() <= answer.ext.items()
    assert TOPIC not in node.broker.topics(), "no topic is created, so the reply is not stored"


def test_a_client_with_a_namespace_replies_to_the_topic_of_its_namespace(
    node: RunningNode, wire: Wire
) -> None:
    """`ClientConfig.setNamespace("ns")` names it. It has a route even if topics are not created automatically."""
    object.__setattr__(node.broker.settings, "auto_create_topics", False)
    topic = f"ns%{TOPIC}"
    [queues] = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic))["queueDatas"]
    assert (queues["writeQueueNums"], queues["perm"]) == (1, READ | WRITE)
    with Wire.to(node) as asker:
        asker.ask_ok(RequestCode.HEART_BEAT, BEAT)
        asked = wire.send(REPLY_V2, b"yes", **(SHORT | {"b": topic}))
        pushed = asker.next_pushed()
        assert (pushed.ext["topic"], pushed.body) == (topic, b"yes")
        asker.reply(pushed)
        assert wire.answer_to(asked).code == ResponseCode.SUCCESS
    assert sent(wire, topic=topic).code == ResponseCode.TOPIC_NOT_EXIST, "the topic takes only replies"


def test_a_reply_that_cannot_be_pushed_is_refused_at_once(node: RunningNode, wire: Wire) -> None:
    def remark_of_refusal(**changed: object) -> str:
        """Send a reply with changed fields, which must be refused, and return the remark."""
        answer = wire.ask(REPLY_V2, b"yes", **(SHORT | changed))
        assert answer.code != ResponseCode.SUCCESS
        return str(answer.remark)

    assert "channel of <asker> not found" in remark_of_refusal()
    assert "REPLY_TO_CLIENT" in remark_of_refusal(i="CORRELATION_ID\x017\x02")
    for other_topic in ("orders", f"ns-{TOPIC}", f"{TOPIC}%ns"):
        assert TOPIC in remark_of_refusal(b=other_topic)
    wire.ask_ok(RequestCode.HEART_BEAT, {"clientID": "asker", "consumerDataSet": [{"groupName": "g"}]})
    assert "not found" in remark_of_refusal(), "a client that is only a consumer gets no replies"
    with Wire.to(node) as asker:
        asker.ask_ok(RequestCode.HEART_BEAT, BEAT)
        asked = wire.send(REPLY_V2, b"yes", **SHORT)
        asker.reply(asker.next_pushed(), code=ResponseCode.SYSTEM_ERROR)
        assert wire.answer_to(asked).code == ResponseCode.SYSTEM_ERROR
        asked = wire.send(REPLY_V2, b"yes", **SHORT)
        asker.next_pushed()
    assert wire.answer_to(asked).code == ResponseCode.SYSTEM_ERROR, (
        "the producer disconnected without an answer"
    )


def test_only_a_message_that_asks_for_a_reply_gets_the_cluster_property(
    node: RunningNode, wire: Wire
) -> None:
    sent(wire)
    sent(wire, properties={"REPLY_TO_CLIENT": "asker", "CORRELATION_ID": "7"})
    sent(wire, properties={"REPLY_TO_CLIENT": "asker", "CLUSTER": "another"})
    result = [decode_properties(str(row["properties"])).get("CLUSTER") for row in rows(node)]
    assert result == [None, "DefaultCluster", "another"]


def test_the_reply_topic_has_a_route(wire: Wire) -> None:
    [queues] = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=TOPIC))["queueDatas"]
    assert (queues["writeQueueNums"], queues["perm"]) == (1, READ | WRITE)


def test_a_reply_requires_permission_to_send_to_the_reply_topic(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with guarded_node(tmp_path_factory.mktemp("node")) as node:
        with SignedWire.of(node, "shop") as shop, SignedWire.of(node, "root") as root:
            assert shop.ask(REPLY_V2, b"yes", **SHORT).code == ResponseCode.NO_PERMISSION
            answer = root.ask(REPLY_V2, b"yes", **SHORT)
            assert answer.code == ResponseCode.SYSTEM_ERROR, "permitted, but no producer is connected"
