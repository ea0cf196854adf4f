"""RecallMessage over a real connection: the code for each outcome, and the effect on the message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.edges.grpc.sending import message, rows, sent
from tests.edges.grpc.wire import Wire
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.broker.registry.topics import TopicConfig
from timeball.broker.revoking.cancel import encode_handle
from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service
from timeball.io.clock import ManualClock

Code = definition.Code
DELAY_MS = 60_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def node(tmp_path: Path, clock: ManualClock) -> Iterator[RunningNode]:
    with running_node(tmp_path / "data", clock) as running:
        yield running


def send_delayed(wire: Wire, clock: ManualClock, **fields: object) -> service.SendResultEntry:
    """Send a message that is due after DELAY_MS, and return its result."""
    [entry] = sent(wire, message(due_ms=clock.wall_ms() + DELAY_MS, **fields))
    return entry


def recall(wire: Wire, handle: str, topic: str = "orders") -> tuple[int, str, str]:
    """Make a RecallMessage call, and return the code, the text and the message id."""
    request = service.RecallMessageRequest(topic=definition.Resource(name=topic), recall_handle=handle)
    response = wire.ask("RecallMessage", request)
    return response.status.code, response.status.message, response.message_id


def test_a_recalled_message_is_never_delivered(node: RunningNode, wire: Wire, clock: ManualClock) -> None:
    entry, other = send_delayed(wire, clock), send_delayed(wire, clock)
    for _ in range(2):  # a second recall succeeds, too
        assert recall(wire, entry.recall_handle) == (Code.OK, "OK", entry.message_id)
    clock.advance(DELAY_MS)
    eventually(lambda: rows(node), "the other message is delivered")
    assert [row["unique_key"] for row in rows(node)] == [other.message_id]


def test_a_late_recall_is_answered_with_the_time_of_delivery(
    node: RunningNode, wire: Wire, clock: ManualClock
) -> None:
    entry = send_delayed(wire, clock)
    clock.advance(DELAY_MS)
    eventually(lambda: rows(node), "the message is delivered")
    code, sentence, message_id = recall(wire, entry.recall_handle)
    assert (code, message_id) == (Code.NOT_FOUND, "")
    assert sentence == f"too late, the message was delivered at {rows(node)[0]['store_ms']}"


def test_an_invalid_or_foreign_handle_is_refused(node: RunningNode, wire: Wire, clock: ManualClock) -> None:
    entry = send_delayed(wire, clock)
    send_delayed(wire, clock, topic="others")
    due_ms, name = clock.wall_ms() + DELAY_MS, node.settings.broker_name
    for handle, code in (
        ("", Code.BAD_REQUEST),
        ("nonsense", Code.BAD_REQUEST),
        ("x" * 4_096, Code.BAD_REQUEST),
        (encode_handle("orders", "another", due_ms, entry.message_id), Code.BAD_REQUEST),
        (encode_handle("others", name, due_ms, entry.message_id), Code.BAD_REQUEST),
        (encode_handle("orders", name, due_ms, "unknown"), Code.NOT_FOUND),
    ):
        actual_code, sentence, _ = recall(wire, handle)
        assert (actual_code, bool(sentence)) == (code, True), handle
    assert recall(wire, entry.recall_handle, "nowhere")[0] == Code.TOPIC_NOT_FOUND
    assert recall(wire, entry.recall_handle, "no/name")[0] == Code.ILLEGAL_TOPIC
    assert recall(wire, entry.recall_handle)[0] == Code.OK, "the message was still pending"


def test_a_recall_in_a_topic_that_accepts_no_delays_is_refused(
    node: RunningNode, wire: Wire, clock: ManualClock
) -> None:
    entry = send_delayed(wire, clock)
    for name in ("NORMAL", "FIFO", "TRANSACTION"):
        node.broker.tables.topics.configure("orders", TopicConfig(attributes={"message.type": name}))
        assert recall(wire, entry.recall_handle)[0] == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    node.broker.tables.topics.configure("orders", TopicConfig(attributes={"message.type": "MIXED"}))
    assert recall(wire, entry.recall_handle)[0] == Code.OK


def test_a_rescheduled_message_can_be_recalled_by_its_old_handle(
    node: RunningNode, wire: Wire, clock: ManualClock
) -> None:
    moved, other = send_delayed(wire, clock), send_delayed(wire, clock)
    due_ms = clock.wall_ms() + 2 * DELAY_MS
    [verdict] = node.run(node.broker.reschedule(ids=[moved.message_id], due_ms=due_ms))
    assert verdict.verdict == "rescheduled"
    clock.advance(DELAY_MS)
    eventually(lambda: rows(node), "the other message is delivered")
    assert recall(wire, moved.recall_handle) == (Code.OK, "OK", moved.message_id)
    clock.advance(DELAY_MS)
    eventually(lambda: node.broker.status()["settled_before_ms"] > due_ms, "the new due time has passed")  # type: ignore[operator]
    assert [row["unique_key"] for row in rows(node)] == [other.message_id]


def test_a_recall_is_still_in_effect_after_a_restart(tmp_path: Path, clock: ManualClock) -> None:
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:
        entry, other = send_delayed(wire, clock), send_delayed(wire, clock)
        assert recall(wire, entry.recall_handle)[0] == Code.OK
    clock.advance(DELAY_MS)
    with running_node(tmp_path / "data", clock) as node:
        eventually(lambda: rows(node), "the message is delivered")
        assert [row["unique_key"] for row in rows(node)] == [other.message_id]
