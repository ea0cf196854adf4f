"""kill -9 of a real broker while consumers receive and acknowledge over gRPC, again and again.

With `--ack-save-ms 0`, every answer stays in effect: an acknowledged message never comes back, a leased one has no
other lease until its lease ends, and every message that was not acknowledged comes again. A call that was in flight
when the broker was killed may have been executed or not.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pyarrow.compute as pc
import pytest
from tests.bounds import BOUND_S
from tests.cli.processes import Running, client_of
from tests.edges.grpc.wire import Wire

from timeball import Timeball
from timeball.broker.registry.tables import SavedPart
from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc._generated import service_pb2 as s
from timeball.model.message import Kind, pairs_of

CONSUMERS, KILLS, RECEIVED_BEFORE, ROWS = 4, 3, 120, 8
GROUP, TOPIC = "g", "orders"
INVISIBLE_MS = 600_000  # no lease ends while the test runs


@dataclass
class Known:
    """Bodies by the answers to a consumer. `doubtful`: acknowledged without an answer."""

    received: Counter[str] = field(default_factory=Counter)
    acked: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def faults(self, sent: set[str], handed_out_after: Counter[str], waiting: Counter[str]) -> list[str]:
        """List all contradictions. `waiting`: messages that a lease in the log brings back."""
        total = self.received + handed_out_after
        return [
            *(f"{body} was handed out {n} times" for body, n in total.items() if n > 1),
            *(f"{body} is lost" for body in sorted(sent - set(total) - set(waiting) - self.doubtful)),
            *(f"{body} was acknowledged and waits" for body in sorted(self.acked & set(waiting))),
            *(
                f"{body} was handed out and nothing brings it back"
                for body in sorted(set(total) - self.acked - self.doubtful - set(waiting))
            ),
            *(f"{body} waits {n} times" for body, n in waiting.items() if n > 1),
        ]


def serve(data: Path) -> tuple[Running, dict[str, Any]]:
    """Start a broker. Returns its process and its `ready` event, which contains the addresses."""
    server = Running("serve", "--json", "--port", "0", "--data", str(data), "--ack-save-ms", "0")
    return server, server.wait_line(event="ready")


def grpc_port(ready: dict[str, Any]) -> int:
    return int(ready["grpc"].rpartition(":")[2])


def receive(wire: Wire) -> list[Any]:
    """Receive up to ROWS messages (protobuf)."""
    return wire.receive(GROUP, TOPIC, batch_size=ROWS, invisible_ms=INVISIBLE_MS)


def consume(port: int, number: int, known: Known, done: threading.Semaphore) -> None:
    """Receive, and acknowledge every other message, until the broker is gone. `done` counts the received messages."""
    with Wire(port, f"consumer-{number}") as wire:
        try:
            while True:
                messages = receive(wire)
                with known.lock:
                    known.received.update(message.body.decode() for message in messages)
                for message in messages[::2]:
                    acknowledge(wire, message, known)
                done.release(max(1, len(messages)))
        except grpc.RpcError:
            return


def acknowledge(wire: Wire, message: Any, known: Known) -> None:
    """Acknowledge a message. Its body is in `doubtful` until the answer arrives."""
    body = message.body.decode()
    with known.lock:
        known.doubtful.add(body)
    entry = s.AckMessageEntry(
        message_id=message.system_properties.message_id,
        receipt_handle=message.system_properties.receipt_handle,
    )
    request = s.AckMessageRequest(group=d.Resource(name=GROUP), topic=d.Resource(name=TOPIC), entries=[entry])
    wire.ask_ok("AckMessage", request)
    with known.lock:
        known.doubtful.discard(body)
        known.acked.add(body)


def held(ball: Timeball) -> Counter[str]:
    """The bodies of the messages whose leases of GROUP are in the log, with the number of their leases."""
    log = ball.status()["log"]
    parts: dict[str, SavedPart] = {}
    visible: dict[tuple[int, int], str] = {}
    for batch in ball.read_log(log["first_seq"], log["next_seq"]):
        meta = batch.filter(pc.equal(batch.column("kind"), int(Kind.META)))
        for key, value in pairs_of(meta):
            if key.startswith("leases/") and value:
                parts[key] = msgspec.json.decode(value, type=SavedPart)
            else:
                parts.pop(key, None)
        for row in batch.select(["topic", "queue_id", "queue_offset", "body"]).to_pylist():
            if row["topic"] == TOPIC:
                visible[row["queue_id"], row["queue_offset"]] = row["body"].decode()
    return Counter(
        visible[part.queue_id, offset]
        for part in parts.values()
        if (part.group, part.topic) == (GROUP, TOPIC)
        for run in part.runs
        for offset in range(run.offset, run.offset + run.count)
    )


@pytest.mark.slow
def test_after_each_kill_no_message_is_lost_or_handed_out_twice(tmp_path: Path) -> None:
    known, sent = Known(), {f"m{n}" for n in range(1_500)}
    server, ready = serve(tmp_path / "data")
    try:
        with client_of(ready) as ball:
            ball.create_topic(TOPIC, 4)
            ball.send_many([{"topic": TOPIC, "body": body.encode()} for body in sorted(sent)])
        for _ in range(KILLS):
            done = threading.Semaphore(0)
            with ThreadPoolExecutor(CONSUMERS) as pool:
                consumers = [pool.submit(consume, grpc_port(ready), n, known, done) for n in range(CONSUMERS)]
                for _ in range(RECEIVED_BEFORE):
                    assert done.acquire(timeout=BOUND_S)
                assert server.end(signal.SIGKILL) == -signal.SIGKILL
                for consumer in consumers:
                    consumer.result()
            server, ready = serve(tmp_path / "data")
        assert len(known.acked) > KILLS * RECEIVED_BEFORE / 4
        after: Counter[str] = Counter()
        with Wire(grpc_port(ready), "last") as wire, client_of(ready) as ball:
            while messages := receive(wire):
                after.update(message.body.decode() for message in messages)
            assert known.faults(sent, after, held(ball)) == []
    finally:
        server.end(signal.SIGKILL)


@pytest.mark.parametrize(
    ("after", "waiting"),
    [
        (["A", "B"], ["B", "C"]),  # A was handed out again although it had been acknowledged
        (["B", "D"], ["B", "C"]),  # D was handed out again although its lease had not ended
        (["B"], ["B"]),  # C was handed out, and nothing brings it back
        ([], ["C"]),  # B is lost
        (["B"], ["A", "B", "C"]),  # A was acknowledged, and waits for the end of a lease
        (["B"], ["B", "C", "C"]),  # C has two leases
    ],
)
def test_a_fault_is_seen(after: list[str], waiting: list[str]) -> None:
    """The negative control: A was acknowledged, C and D were handed out, D perhaps acknowledged, B never seen."""
    known = Known(Counter(["A", "C", "D"]), {"A"}, {"D"})
    sent = {"A", "B", "C", "D"}
    assert known.faults(sent, Counter(["B"]), Counter(["B", "C"])) == []
    assert known.faults(sent, Counter(["B"]), Counter(["B", "C", "D"])) == []
    assert len(known.faults(sent, Counter(after), Counter(waiting))) == 1
