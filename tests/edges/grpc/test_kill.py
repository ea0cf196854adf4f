"""Kill -9 in the midst of sends, transactions and recalls: what was answered with OK holds, and nothing is doubled.

What was under way when the broker died may have happened or not; everything else is known, and is compared with what
stands in the queues of the broker that comes after.
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
from tests.cli.processes import Running
from tests.edges.grpc.sending import message, send_request
from tests.edges.grpc.wire import Wire
from tests.node_fixture import eventually

from timeball import Timeball
from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc._generated import service_pb2 as s

CLIENTS, ROUNDS_BEFORE = 8, 400
DELAY_MS = 2_500
OK = d.Code.OK
TOPIC = d.Resource(name="orders")


@dataclass
class Known:
    """Message ids by what must have become of them. `tried`: by what may have."""

    wanted: set[str] = field(default_factory=set)
    unwanted: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, **ids: str) -> None:
        """An id for each set named; what is now unwanted is wanted no more."""
        with self._lock:
            for name, id_ in ids.items():
                getattr(self, name).add(id_)
            self.wanted -= self.unwanted

    def doubt(self, id_: str) -> None:
        """Something is under way that may change what becomes of it."""
        with self._lock:
            self.wanted.discard(id_)

    def faults(self, delivered: Counter[str]) -> list[str]:
        """Everything that may not be."""
        return [
            *(f"{id_} is lost" for id_ in sorted(self.wanted - set(delivered))),
            *(f"{id_} was taken back, and delivered" for id_ in sorted(self.unwanted & set(delivered))),
            *(f"{id_} is delivered {count} times" for id_, count in delivered.items() if count > 1),
            *(f"{id_} was never sent" for id_ in sorted(set(delivered) - self.tried)),
        ]


def produce(port: int, number: int, known: Known, done: threading.Semaphore) -> None:
    """One of each, over and over, until the broker is gone."""
    kinds = itertools.cycle((plain, committed, rolled_back, delayed, recalled))
    with Wire(port, f"client-{number}") as wire:
        try:
            for kind in kinds:
                kind(wire, known)
                done.release()
        except grpc.RpcError:
            return


def sent(wire: Wire, known: Known, **fields: Any) -> s.SendResultEntry:
    given = message(**fields)
    known.note(tried=given.system_properties.message_id)
    entry: s.SendResultEntry = wire.ask_ok("SendMessage", send_request(given)).entries[0]
    return entry


def plain(wire: Wire, known: Known) -> None:
    known.note(wanted=sent(wire, known).message_id)


def delayed(wire: Wire, known: Known) -> s.SendResultEntry:
    entry = sent(wire, known, due_ms=int(time.time() * 1_000) + DELAY_MS)
    known.note(wanted=entry.message_id)
    return entry


def recalled(wire: Wire, known: Known) -> None:
    entry = delayed(wire, known)
    known.doubt(entry.message_id)
    request = s.RecallMessageRequest(topic=TOPIC, recall_handle=entry.recall_handle)
    if wire.ask("RecallMessage", request).status.code == OK:
        known.note(unwanted=entry.message_id)
    else:  # too late, on a machine that has other things to do
        known.note(wanted=entry.message_id)


def ended(wire: Wire, known: Known, how: int) -> str:
    entry = sent(wire, known, message_type=d.MessageType.TRANSACTION)
    request = s.EndTransactionRequest(
        topic=TOPIC,
        message_id=entry.message_id,
        transaction_id=entry.transaction_id,
        resolution=d.TransactionResolution.Name(how),
    )
    wire.ask_ok("EndTransaction", request)
    return entry.message_id


def committed(wire: Wire, known: Known) -> None:
    known.note(wanted=ended(wire, known, d.TransactionResolution.COMMIT))


def rolled_back(wire: Wire, known: Known) -> None:
    known.note(unwanted=ended(wire, known, d.TransactionResolution.ROLLBACK))


def serve(data: Path) -> tuple[Running, dict[str, Any]]:
    server = Running("serve", "--json", "--port", "0", "--data", str(data))
    return server, server.wait_line(event="ready")


def delivered(ball: Timeball) -> Counter[str]:
    """What stands in the queues."""
    found: Counter[str] = Counter()
    for number, queue in ball.queues("orders").items():
        rows = queue.max - queue.min
        for batch in ball.read_queue("orders", number, queue.min, rows) if rows else ():
            found.update(batch.column("unique_key").to_pylist())
    return found


def test_what_was_answered_holds(tmp_path: Path) -> None:
    known, done = Known(), threading.Semaphore(0)
    server, ready = serve(tmp_path / "data")
    try:
        port = int(ready["grpc"].rpartition(":")[2])
        with ThreadPoolExecutor(CLIENTS) as pool:
            producers = [pool.submit(produce, port, n, known, done) for n in range(CLIENTS)]
            for _ in range(ROUNDS_BEFORE):
                assert done.acquire(timeout=BOUND_S)
            assert server.end(signal.SIGKILL) == -signal.SIGKILL
            for producer in producers:
                producer.result()
    finally:
        server.end(signal.SIGKILL)
    assert len(known.wanted) > ROUNDS_BEFORE / 4 and len(known.unwanted) > ROUNDS_BEFORE / 4
    last_due_ms = int(time.time() * 1_000) + DELAY_MS
    server, ready = serve(tmp_path / "data")
    try:
        with Timeball(ready["endpoint"]) as ball:
            eventually(lambda: ball.status()["settled_before_ms"] > last_due_ms, "every delay is over")
            assert known.faults(delivered(ball)) == []
    finally:
        server.end()


@pytest.mark.parametrize("found", [[], ["A", "A"], ["A", "B"], ["A", "stranger"]])
def test_a_fault_is_seen(found: list[str]) -> None:
    """The negative control: A was acknowledged, B was taken back, C was under way."""
    known = Known(wanted={"A"}, unwanted={"B"}, tried={"A", "B", "C"})
    assert known.faults(Counter(["A"])) == known.faults(Counter(["A", "C"])) == []
    assert len(known.faults(Counter(found))) == 1
