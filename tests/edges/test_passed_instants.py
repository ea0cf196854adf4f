"""A message whose due time has passed at its send is a scheduled message, too: a cancel gets the verdict `released`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.edges.grpc import wire as grpc_wire
from tests.edges.grpc.sending import message
from tests.edges.grpc.sending import sent as sent_by_grpc
from tests.edges.remoting import wire as remoting_wire
from tests.edges.remoting.handlers.test_sends import sent
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode

LATE_MS = 5
EDGES = ["http", "remoting", "grpc"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node") / "data", queues_per_topic=1) as running:
        yield running


def send_late(node: RunningNode, edge: str, topic: str) -> tuple[str, str]:
    """Send a message whose due time has passed, over this edge. Return its id and its recall handle."""
    due_ms = node.broker.clock.now_ms() - LATE_MS
    if edge == "http":
        with node.client() as ball:
            return ball.send(topic, b"x", at=due_ms).id, ""
    if edge == "remoting":
        with remoting_wire.Wire.to(node) as wire:
            answer = sent(wire, topic=topic, properties={"TIMER_DELIVER_MS": str(due_ms), "UNIQ_KEY": topic})
            return topic, answer.ext["recallHandle"]
    with grpc_wire.Wire.to(node) as wire:
        [entry] = sent_by_grpc(wire, message(topic=topic, due_ms=due_ms))
        return entry.message_id, entry.recall_handle


def delivered(node: RunningNode, topic: str) -> bool:
    """Check that the message is in its queue."""
    return topic in node.broker.topics() and node.broker.queues(topic)[0][1] == 1


@pytest.mark.parametrize("edge", EDGES)
def test_a_cancel_after_the_due_time_is_answered_released(node: RunningNode, edge: str) -> None:
    topic = f"late-{edge}"
    key, handle = send_late(node, edge, topic)
    eventually(lambda: delivered(node, topic), "the message is delivered")
    with node.client() as ball:
        assert ball.cancel(key).verdict == "released"
    if edge == "remoting":
        with remoting_wire.Wire.to(node) as wire:
            response = wire.ask(
                RequestCode.RECALL_MESSAGE, producerGroup="p", topic=topic, recallHandle=handle
            )
        assert response.code == ResponseCode.ILLEGAL_OPERATION and "too late" in str(response.remark)
    if edge == "grpc":
        with grpc_wire.Wire.to(node) as wire:
            request = service.RecallMessageRequest(
                topic=definition.Resource(name=topic), recall_handle=handle
            )
            status = wire.ask("RecallMessage", request).status
        assert status.code == definition.Code.NOT_FOUND and "too late" in status.message


def test_a_message_that_was_for_now_is_no_scheduled_message(node: RunningNode) -> None:
    """The control: a message without a due time cannot be cancelled."""
    with node.client() as ball:
        assert ball.cancel(ball.send("for-now", b"x").id).verdict == "not_found"
