"""No request about a topic with a mistyped name creates that topic, except a send.

The first heartbeat of a group creates its retry topic, as in RocketMQ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.in_process import run_here
from tests.edges.grpc import wire as grpc_wire
from tests.edges.remoting import wire as remoting_wire
from tests.node_fixture import RunningNode, running_node

from timeball import Timeball
from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service
from timeball.edges.remoting.codec.codes import RequestCode
from timeball.model.errors import TimeballError

TYPO = "mistyped"
CREATING_REQUESTS = (
    "SEND",
    "CREATE",
    "CONSUMER_SEND_MSG_BACK",
    "END_TRANSACTION",
    "UPDATE_BROKER",
    "REGISTER_BROKER",
)
FIELDS = {
    "topic": TYPO, "consumerGroup": "readers", "group": "readers", "producerGroup": "p", "clientID": "c", "queueId": 0,
    "queueOffset": 0, "commitOffset": 0, "offset": 0, "maxMsgNums": 8, "sysFlag": 6, "suspendTimeoutMillis": 0,
    "subscription": "*", "subVersion": 0, "invisibleTime": 60_000, "pollTime": 0, "bornTime": 0, "initMode": 0,
    "expType": "TAG", "exp": "*", "timestamp": 0, "key": "k", "maxNum": 8, "beginTimestamp": 0, "endTimestamp": 1 << 41,
    "extraInfo": "0 0 60000 0 0 broker-a 0 0", "isForce": "true", "recallHandle": "x",
}  # fmt: skip
BODIES: dict[int, object] = {
    RequestCode.HEART_BEAT: {
        "clientID": "c",
        "producerDataSet": [{"groupName": "p"}],
        "consumerDataSet": [{
            "groupName": "readers", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": [{"topic": TYPO, "subString": "*", "subVersion": 1}],
        }],
    },
    RequestCode.QUERY_ASSIGNMENT: {
        "topic": TYPO, "consumerGroup": "readers", "clientId": "c", "strategyName": "AVG",
        "messageModel": "CLUSTERING",
    },
    RequestCode.LOCK_BATCH_MQ: {
        "consumerGroup": "readers", "clientId": "c",
        "mqSet": [{"topic": TYPO, "brokerName": "broker-a", "queueId": 0}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running_node(tmp_path_factory.mktemp("typo") / "data") as running:
        assert running.settings.auto_create_topics  # otherwise nothing could create a topic
        yield running


def topic_names(node: RunningNode) -> set[str]:
    """Return the names of all topics except retry topics."""
    return {name for name in node.broker.topics() if not name.startswith("%RETRY%")}


@pytest.mark.parametrize(
    "code",
    [code for code in RequestCode if not code.name.startswith(CREATING_REQUESTS)],
    ids=lambda code: code.name,
)
def test_a_remoting_request_that_reads_creates_no_topic(node: RunningNode, code: RequestCode) -> None:
    before = topic_names(node)
    with remoting_wire.Wire.to(node) as wire:
        assert wire.ask(code, BODIES.get(code, b""), **FIELDS)
    assert topic_names(node) == before


GRPC: dict[str, Any] = {
    "QueryRoute": service.QueryRouteRequest(topic=definition.Resource(name=TYPO)),
    "QueryAssignment": service.QueryAssignmentRequest(
        topic=definition.Resource(name=TYPO), group=definition.Resource(name="readers")
    ),
    "ReceiveMessage": grpc_wire.receive_request("readers", TYPO, wait_ms=0),
    "Heartbeat": service.HeartbeatRequest(
        group=definition.Resource(name="readers"), client_type=definition.ClientType.SIMPLE_CONSUMER
    ),
}


@pytest.mark.parametrize("name", GRPC)
def test_a_grpc_call_that_reads_creates_no_topic(node: RunningNode, name: str) -> None:
    before = topic_names(node)
    with grpc_wire.Wire.to(node) as wire:
        if name == "ReceiveMessage":
            assert list(wire.stream(name, GRPC[name]))
        else:
            assert wire.ask(name, GRPC[name]).status.code
    assert topic_names(node) == before


PYTHON: dict[str, Callable[[Timeball], object]] = {
    "pull": lambda ball: ball.pull(TYPO, "readers", wait=0),
    "pull that waits": lambda ball: ball.pull(TYPO, "readers", wait="0.05s"),
    "consume": lambda ball: list(ball.consume(TYPO, "readers", until_idle="0.05s")),
    "queues": lambda ball: ball.queues(TYPO),
    "offsets": lambda ball: ball.offsets("readers", TYPO),
    "commit": lambda ball: ball.commit(TYPO, "readers", {0: 0}),
    "browse": lambda ball: ball.browse(TYPO),
    "browse that waits": lambda ball: ball.browse(TYPO, "readers", wait="0.05s"),
    "read_queue": lambda ball: ball.read_queue(TYPO, 0, 0, 1).read_all(),
    "cancel": lambda ball: ball.cancel("nobody's"),
}


@pytest.mark.parametrize("name", PYTHON)
def test_a_call_of_the_client_that_reads_creates_no_topic(node: RunningNode, name: str) -> None:
    before = topic_names(node)
    with node.client() as ball:
        try:
            PYTHON[name](ball)
        except TimeballError as error:
            assert TYPO in str(error)
    assert topic_names(node) == before


@pytest.mark.parametrize(
    "command",
    [
        ("pull", TYPO),
        ("pull", TYPO, "--wait", "50ms"),
        ("pull", TYPO, "--peek"),
        ("pending", "--topic", TYPO),
    ],
    ids=" ".join,
)
def test_a_command_that_reads_creates_no_topic(node: RunningNode, command: tuple[str, ...]) -> None:
    before = topic_names(node)
    result = run_here(*command, TIMEBALL_ENDPOINT=node.http_endpoint, TIMEBALL_FLIGHT=node.endpoint)
    if "--wait" not in command:  # a wait for a topic that does not exist is no error
        assert "nothing new" not in result.stdout + result.stderr
    assert topic_names(node) == before


def test_a_send_makes_it(tmp_path: Path) -> None:
    """The control: a send creates the topic, which `topic_names` shows."""
    with running_node(tmp_path / "data") as node, node.client() as ball:
        assert topic_names(node) == set()
        ball.send(TYPO, "x")
        assert topic_names(node) == {TYPO}
