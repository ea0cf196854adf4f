"""SIGKILL amid sends, transactions and recalls: calls answered with OK stay in effect, and no message is duplicated.

A call without an answer at the kill may have been executed or not. The effects of all other calls are compared with the
messages in the queues after a restart.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.bounds import BOUND_S
from tests.cli.processes import Running, client_of
from tests.edges.grpc.sending import message, send_request
from tests.edges.grpc.wire import Wire
from tests.node_fixture import eventually

from timeball import Timeball
from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service

CLIENTS, ROUNDS_BEFORE = 8, 400
DELAY_MS = 2_500
OK = definition.Code.OK
TOPIC = definition.Resource(name="orders")


@dataclass
class Expectations:
    """The ids of the messages that must be delivered (`wanted`) or must not be (`unwanted`), and of all (`tried`).

    A message in neither of the first two sets may be delivered: the outcome of its call is unknown.
    """

    wanted: set[str] = field(default_factory=set)
    unwanted: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, **ids: str) -> None:
        """Add an id to each named set. An unwanted id is removed from `wanted`."""
        with self._lock:
            for name, id_ in ids.items():
                getattr(self, name).add(id_)
            self.wanted -= self.unwanted

    def note_unknown(self, id_: str) -> None:
        """Note that a call is under way whose outcome decides whether the message is delivered."""
        with self._lock:
            self.wanted.discard(id_)

    def faults(self, delivered: Counter[str]) -> list[str]:
        """List the differences between these deliveries and the expected ones."""
        return [
            *(f"{id_} is lost" for id_ in sorted(self.wanted - set(delivered))),
            *(
                f"{id_} was recalled or rolled back, and delivered"
                for id_ in sorted(self.unwanted & set(delivered))
            ),
            *(f"{id_} is delivered {count} times" for id_, count in delivered.items() if count > 1),
            *(f"{id_} was never sent" for id_ in sorted(set(delivered) - self.tried)),
        ]


def produce(port: int, number: int, expected: Expectations, done: threading.Semaphore) -> None:
    """Send messages of each kind in turn, until the broker is killed."""
    sends = itertools.cycle((send_plain, send_committed, send_rolled_back, send_delayed, send_and_recall))
    with Wire(port, f"client-{number}") as wire:
        try:
            for send_kind in sends:
                send_kind(wire, expected)
                done.release()
        except grpc.RpcError:
            return


def send(wire: Wire, expected: Expectations, **fields: Any) -> service.SendResultEntry:
    """Send a message, noted as tried before, and return its result."""
    sent_message = message(**fields)
    expected.note(tried=sent_message.system_properties.message_id)
    entry: service.SendResultEntry = wire.ask_ok("SendMessage", send_request(sent_message)).entries[0]
    return entry


def send_plain(wire: Wire, expected: Expectations) -> None:
    """Send a message that must be delivered."""
    expected.note(wanted=send(wire, expected).message_id)


def send_delayed(wire: Wire, expected: Expectations) -> service.SendResultEntry:
    """Send a delayed message that must be delivered, and return its result."""
    entry = send(wire, expected, due_ms=int(time.time() * 1_000) + DELAY_MS)
    expected.note(wanted=entry.message_id)
    return entry


def send_and_recall(wire: Wire, expected: Expectations) -> None:
    """Send a delayed message and recall it. It must not be delivered if the recall succeeds."""
    entry = send_delayed(wire, expected)
    expected.note_unknown(entry.message_id)
    request = service.RecallMessageRequest(topic=TOPIC, recall_handle=entry.recall_handle)
    if wire.ask("RecallMessage", request).status.code == OK:
        expected.note(unwanted=entry.message_id)
    else:  # the message was released before the recall
        expected.note(wanted=entry.message_id)


def send_and_end(wire: Wire, expected: Expectations, resolution: int) -> str:
    """Send a half message, end it with a resolution, and return its id."""
    entry = send(wire, expected, message_type=definition.MessageType.TRANSACTION)
    request = service.EndTransactionRequest(
        topic=TOPIC,
        message_id=entry.message_id,
        transaction_id=entry.transaction_id,
        resolution=definition.TransactionResolution.Name(resolution),
    )
    wire.ask_ok("EndTransaction", request)
    return entry.message_id


def send_committed(wire: Wire, expected: Expectations) -> None:
    """Send and commit a half message, which must be delivered."""
    expected.note(wanted=send_and_end(wire, expected, definition.TransactionResolution.COMMIT))


def send_rolled_back(wire: Wire, expected: Expectations) -> None:
    """Send and roll back a half message, which must not be delivered."""
    expected.note(unwanted=send_and_end(wire, expected, definition.TransactionResolution.ROLLBACK))


def serve(data: Path) -> tuple[Running, dict[str, Any]]:
    """Start a broker, and return its process and its ready line."""
    server = Running("serve", "--json", "--port", "0", "--data", str(data))
    return server, server.wait_line(event="ready")


def delivered(ball: Timeball) -> Counter[str]:
    """Count the messages in the queues by their ids."""
    counts: Counter[str] = Counter()
    for number, queue in ball.queues("orders").items():
        rows = queue.max - queue.min
        for batch in ball.read_queue("orders", number, queue.min, rows) if rows else ():
            counts.update(batch.column("unique_key").to_pylist())
    return counts


def test_calls_answered_with_ok_stay_in_effect_after_a_kill(tmp_path: Path) -> None:
    expected, done = Expectations(), threading.Semaphore(0)
    server, ready = serve(tmp_path / "data")
    try:
        port = int(ready["grpc"].rpartition(":")[2])
        with ThreadPoolExecutor(CLIENTS) as pool:
            producers = [pool.submit(produce, port, n, expected, done) for n in range(CLIENTS)]
            for _ in range(ROUNDS_BEFORE):
                assert done.acquire(timeout=BOUND_S)
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
            for producer in producers:
                producer.result()
    finally:
        server.end(signal.SIGKILL)
    assert len(expected.wanted) > ROUNDS_BEFORE / 4 and len(expected.unwanted) > ROUNDS_BEFORE / 4
    last_due_ms = int(time.time() * 1_000) + DELAY_MS
    server, ready = serve(tmp_path / "data")
    try:
        with client_of(ready) as ball:
            eventually(
                lambda: ball.status()["settled_before_ms"] > last_due_ms, "all delayed messages are due"
            )
            assert expected.faults(delivered(ball)) == []
    finally:
        server.end()


@pytest.mark.parametrize("delivered_ids", [[], ["A", "A"], ["A", "B"], ["A", "D"]])
def test_a_fault_is_seen(delivered_ids: list[str]) -> None:
    """Control: A was answered with OK, B was recalled or rolled back, and the outcome for C is unknown."""
    expected = Expectations(wanted={"A"}, unwanted={"B"}, tried={"A", "B", "C"})
    assert expected.faults(Counter(["A"])) == expected.faults(Counter(["A", "C"])) == []
    assert len(expected.faults(Counter(delivered_ids))) == 1
