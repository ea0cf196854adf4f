"""Transactions over a real connection: half messages, EndTransaction, and the question about open transactions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.edges.grpc.sending import message, rows, send_request, sent
from tests.edges.grpc.wire import Wire, producer_settings
from tests.node_fixture import RunningNode, running_node

from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service
from timeball.edges.grpc.calls import QUEUED_COMMANDS_MAX
from timeball.edges.grpc.handlers.sends import (
    SEQ_MAX,
    Transactions,
    parse_transaction_id,
    transaction_id,
)
from timeball.io.clock import ManualClock
from timeball.model import limits

Code, Resolution = definition.Code, definition.TransactionResolution
COMMIT, ROLLBACK, UNKNOWN = (
    Resolution.COMMIT,
    Resolution.ROLLBACK,
    Resolution.TRANSACTION_RESOLUTION_UNSPECIFIED,
)


def send_half(wire: Wire, body: bytes = b"pay", **fields: Any) -> service.SendResultEntry:
    """Send a half message, and return its result."""
    [entry] = sent(wire, message(body, message_type=definition.MessageType.TRANSACTION, **fields))
    return entry


def end_half(
    wire: Wire,
    entry: service.SendResultEntry,
    resolution: int,
    topic: str = "orders",
    namespace: str = "",
    **fields: str,
) -> tuple[int, str]:
    """Make an EndTransaction call for a half message, and return the code and the text."""
    ids = {"message_id": entry.message_id, "transaction_id": entry.transaction_id, **fields}
    request = service.EndTransactionRequest(
        topic=definition.Resource(name=topic, resource_namespace=namespace),
        resolution=Resolution.Name(resolution),
        **ids,
    )
    status = wire.ask("EndTransaction", request).status
    return status.code, status.message


def test_only_a_committed_half_message_is_delivered(node: RunningNode, wire: Wire) -> None:
    entries = [send_half(wire, b"%d" % resolution) for resolution in (COMMIT, ROLLBACK, UNKNOWN)]
    assert rows(node) == []
    assert len({entry.transaction_id for entry in entries}) == 3
    for entry, resolution in zip(entries, (COMMIT, ROLLBACK, UNKNOWN), strict=True):
        assert end_half(wire, entry, resolution) == (Code.OK, "OK")
    [row] = rows(node)
    assert (row["body"], row["unique_key"], row["sys_flag"] & 12) == (
        b"%d" % COMMIT, entries[0].message_id, 8,
    )  # fmt: skip
    assert len(node.broker.transactions.open()) == 1


def test_a_repeated_end_succeeds_and_the_opposite_end_is_refused(node: RunningNode, wire: Wire) -> None:
    first, second = send_half(wire), send_half(wire)
    assert end_half(wire, first, COMMIT) == end_half(wire, first, COMMIT) == (Code.OK, "OK")
    assert end_half(wire, second, ROLLBACK) == end_half(wire, second, ROLLBACK) == (Code.OK, "OK")
    code, sentence = end_half(wire, first, ROLLBACK)
    assert code == Code.INVALID_TRANSACTION_ID and "it was committed before" in sentence
    code, sentence = end_half(wire, second, COMMIT)
    assert code == Code.INVALID_TRANSACTION_ID and "it was rolled back before" in sentence
    assert len(rows(node)) == 1


def test_a_transaction_id_of_another_message_is_refused(node: RunningNode, wire: Wire) -> None:
    entry, other = send_half(wire), send_half(wire, topic="others")
    for fields in (
        {"transaction_id": ""}, {"transaction_id": "nonsense"}, {"transaction_id": other.transaction_id},
        {"message_id": other.message_id}, {"message_id": ""}, {"topic": "others"},
        {"transaction_id": "0" * 15 + "9" + entry.transaction_id[16:]},
    ):  # fmt: skip
        assert end_half(wire, entry, COMMIT, **fields)[0] == Code.INVALID_TRANSACTION_ID, fields
    assert end_half(wire, entry, COMMIT, topic="no/name")[0] == Code.ILLEGAL_TOPIC
    assert rows(node) == []
    assert len(node.broker.transactions.open()) == 2


def test_half_messages_of_one_call_end_separately(node: RunningNode, wire: Wire) -> None:
    first, second = sent(
        wire, *(message(b"%d" % n, message_type=definition.MessageType.TRANSACTION) for n in range(2))
    )
    assert end_half(wire, second, COMMIT)[0] == end_half(wire, first, ROLLBACK)[0] == Code.OK
    assert [row["body"] for row in rows(node)] == [b"1"]


def test_many_concurrent_transactions_end_as_requested(node: RunningNode, wire: Wire) -> None:
    messages = [message(b"%d" % n, message_type=definition.MessageType.TRANSACTION) for n in range(200)]
    halves = [wire.later("SendMessage", send_request(each)) for each in messages]
    entries = [call.result().entries[0] for call in halves]
    requests = [
        service.EndTransactionRequest(
            topic=each.topic,
            message_id=entry.message_id,
            transaction_id=entry.transaction_id,
            resolution=COMMIT if n % 2 else ROLLBACK,
        )
        for n, (each, entry) in enumerate(zip(messages, entries, strict=True))
    ]
    ends = [wire.later("EndTransaction", request) for request in requests]
    assert {call.result().status.code for call in ends} == {Code.OK}
    assert {row["body"] for row in rows(node)} == {b"%d" % n for n in range(1, 200, 2)}


def test_an_open_transaction_can_be_ended_after_a_restart(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
        entry = send_half(wire)
    with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
        assert end_half(wire, entry, COMMIT) == (Code.OK, "OK")
        assert [row["body"] for row in rows(node)] == [b"pay"]


# ---- questions to producers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["", "shop"])
def test_a_producer_is_asked_about_an_open_transaction(tmp_path: Path, namespace: str) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:
        entry = send_half(wire, namespace=namespace, properties={"who": "Ada"})
        resource = definition.Resource(name="orders", resource_namespace=namespace)
        settings = definition.Settings(
            client_type=definition.ClientType.PRODUCER, publishing=definition.Publishing(topics=[resource])
        )
        stream = wire.telemetry(settings)
        clock.advance(limits.TRANSACTION_FIRST_CHECK_MS)
        asked = next(stream).recover_orphaned_transaction_command
        assert asked.transaction_id == entry.transaction_id
        half_message = asked.message
        assert (half_message.topic, half_message.body, dict(half_message.user_properties)) == (
            resource,
            b"pay",
            {"who": "Ada", "__transactionId__": entry.message_id},
        )
        assert half_message.system_properties.message_id == entry.message_id
        assert half_message.system_properties.message_type == definition.MessageType.TRANSACTION
        assert end_half(wire, entry, COMMIT, namespace=namespace) == (Code.OK, "OK")
        stream.cut()
        topic = "shop%orders" if namespace else "orders"
        assert [row["body"] for row in rows(node, topic)] == [b"pay"]


def test_a_producer_is_not_asked_before_its_recovery_duration(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:
        late = message(b"late", message_type=definition.MessageType.TRANSACTION)
        late.system_properties.orphaned_transaction_recovery_duration.seconds = 60
        sent(wire, late)
        soon = send_half(wire, b"soon")
        stream = wire.telemetry(producer_settings("orders"))
        clock.advance(59_999)
        assert next(stream).recover_orphaned_transaction_command.message.body == b"soon"
        end_half(wire, soon, ROLLBACK)
        clock.advance(1)
        assert next(stream).recover_orphaned_transaction_command.message.body == b"late"
        stream.cut()
        assert node.broker.transactions.open()[0][1] == 1


def test_without_a_producer_no_check_is_counted(tmp_path: Path) -> None:
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node) as wire:
        send_half(wire)
        stream = wire.telemetry(producer_settings("others"))
        for _ in range(limits.TRANSACTION_CHECKS_MAX + 1):
            clock.advance(limits.TRANSACTION_CHECK_INTERVAL_MS)
            node.run(node.broker.transaction_checks.ask_due())
        stream.cut()
        [(_, checks)] = node.broker.transactions.open()
        assert checks == 0


def test_a_producer_with_a_full_command_queue_is_not_asked(tmp_path: Path) -> None:
    """Commands that it has not read are queued up to a bound. A producer with a full queue is not asked."""
    with running_node(tmp_path / "data", ManualClock()) as node, Wire.to(node) as wire:
        send_half(wire)
        stream = wire.telemetry(producer_settings("orders"))
        node.run(_fill_command_queue(node))
        stream.cut()


async def _fill_command_queue(node: RunningNode) -> None:
    assert node.node.edges is not None
    [client] = node.node.edges.grpc.context.sessions.all()
    [(seq, _)] = node.broker.transactions.open()
    [handler] = [asker for asker in node.broker.transaction_checks.askers if isinstance(asker, Transactions)]
    open_half = node.broker.transactions.find_half(seq)
    assert open_half is not None and handler.has_producer(open_half)
    row = node.broker.log.reader.read_rows(np.array([seq], dtype=np.int64))
    # Without an await, so that the stream's own task cannot send any of the commands.
    queued_bytes = [handler.ask(open_half, row) for _ in range(QUEUED_COMMANDS_MAX + 1)]
    assert all(queued_bytes[:-1]) and queued_bytes[-1] == 0
    assert client.streams[0].commands.full()


@given(seq=st.integers(0, SEQ_MAX), topic=st.text(), message_id=st.text())
def test_a_transaction_id_is_parsed_to_its_number(seq: int, topic: str, message_id: str) -> None:
    assert parse_transaction_id(transaction_id(seq, topic, message_id), topic, message_id) == seq


def test_a_transaction_id_is_invalid_for_another_topic_or_message() -> None:
    text = transaction_id(17, "orders", "A")
    assert parse_transaction_id(text, "others", "A") is None
    assert parse_transaction_id(text, "orders", "B") is None


@pytest.mark.parametrize(
    "text", ["", "17", "x" * 24, "é" * 24, "f" * 24, "F" * 24, "0" * 25, "0" * 24 + "\n"]
)
def test_a_malformed_transaction_id_is_invalid(text: str) -> None:
    assert parse_transaction_id(text, "orders", "A") is None


@given(text=st.text(alphabet="0123456789ABCDEFabcdef \n", max_size=26))
def test_a_valid_transaction_id_is_in_canonical_form(text: str) -> None:
    seq = parse_transaction_id(text, "orders", "A")
    assert seq is None or transaction_id(seq, "orders", "A") == text
