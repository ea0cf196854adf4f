"""Recalls near the due time: each message is either recalled or delivered, and each response agrees with the log.

A thousand scheduled messages become due within a second. 64 concurrent calls recall each of them a little before or
after its due time. A consumer receives and acknowledges messages meanwhile. It must receive exactly the messages that
are in the queues, once each.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.edges.grpc.sending import message, rows, send_request
from tests.edges.grpc.wire import Wire
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.edges.grpc._generated import definition_pb2 as definition
from timeball.edges.grpc._generated import service_pb2 as service
from timeball.model.message import Kind

SCHEDULED_ROWS, CALLS, WIRES = 1_000, 64, 8
AHEAD_MS, SPREAD_MS = 1_500, 1_000
MISS_MS = 60  # the maximum time between a recall and the due time of its message
OK, TOO_LATE = definition.Code.OK, definition.Code.NOT_FOUND


@dataclass
class Race:
    """The responses to recalls, and the fates of the messages, by message id."""

    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    delivered: Counter[str] = field(default_factory=Counter)
    released_ms: dict[str, int] = field(default_factory=dict)  # by the log
    cancelled: set[str] = field(default_factory=set)
    received: Counter[str] = field(default_factory=Counter)

    def faults(self) -> list[str]:
        """List all contradictions."""
        faults = []
        for name, (code, sentence) in self.answers.items():
            times, was_cancelled = self.delivered[name], name in self.cancelled
            if code == OK and (times, was_cancelled) != (0, True):
                faults.append(f"{name}: recalled, delivered {times} times, cancelled: {was_cancelled}")
            if code == TOO_LATE and (times, was_cancelled) != (1, False):
                faults.append(f"{name}: too late, delivered {times} times, cancelled: {was_cancelled}")
            if (
                code == TOO_LATE
                and sentence != f"too late, the message was delivered at {self.released_ms.get(name)}"
            ):
                faults.append(f"{name}: {sentence!r}, and the log says {self.released_ms.get(name)}")
            if code not in (OK, TOO_LATE):
                faults.append(f"{name}: {definition.Code.Name(code)} {sentence}")
            if self.received[name] != times:
                faults.append(f"{name}: delivered {times} times, received {self.received[name]} times")
        return faults

    def read_state(self, node: RunningNode) -> None:
        """Read the current state from the queues and the log."""
        self.delivered = Counter(row["unique_key"] for row in rows(node))
        self.released_ms, self.cancelled = {}, set()
        end = node.broker.log.reader.next_seq
        for batch in node.broker.read_log(1, end, [Kind.RELEASE, Kind.CANCEL]):
            for row in batch.select(["kind", "unique_key", "store_ms"]).to_pylist():
                if row["kind"] == Kind.RELEASE:
                    self.released_ms[row["unique_key"]] = row["store_ms"]
                else:
                    self.cancelled.add(row["unique_key"])

    def is_over(self, node: RunningNode) -> bool:
        """Return whether every scheduled message was cancelled or delivered, and every delivered one received."""
        self.read_state(node)
        return (
            self.delivered.total() + len(self.cancelled) >= SCHEDULED_ROWS
            and self.received.total() >= self.delivered.total()
        )


def wait_until(time_ms: float) -> None:
    """Sleep until about this time. The test does not depend on the accuracy."""
    remaining_s = time_ms / 1_000 - time.time()
    if remaining_s > 0:
        time.sleep(remaining_s)


def send_scheduled_messages(wire: Wire) -> list[tuple[str, str, int]]:
    """Send all scheduled messages, and return id, recall handle and due_ms of each."""
    now_ms = int(time.time() * 1_000)
    messages = [message(due_ms=now_ms + AHEAD_MS + n % SPREAD_MS) for n in range(SCHEDULED_ROWS)]
    response = wire.ask_ok("SendMessage", send_request(*messages))
    due_times_ms = [each.system_properties.delivery_timestamp.ToMilliseconds() for each in messages]
    return [
        (entry.message_id, entry.recall_handle, due_ms)
        for entry, due_ms in zip(response.entries, due_times_ms, strict=True)
    ]


def recall_at(wire: Wire, recalls: list[tuple[str, str, float]]) -> dict[str, tuple[int, str]]:
    """Recall messages (id, recall handle, time of the call in ms), and return the responses by id."""
    responses = {}
    for name, handle, time_ms in sorted(recalls, key=lambda recall: recall[2]):
        wait_until(time_ms)
        request = service.RecallMessageRequest(topic=definition.Resource(name="orders"), recall_handle=handle)
        status = wire.ask("RecallMessage", request).status
        responses[name] = (status.code, status.message)
    return responses


def consume(wire: Wire, received: Counter[str], over: threading.Event) -> None:
    """Receive and acknowledge messages until `over` is set and no message is left."""
    while True:
        was_over = over.is_set()
        messages = wire.receive("readers", "orders", wait_ms=50)
        if not messages:
            if was_over:
                return
            continue
        received.update(each.system_properties.message_id for each in messages)
        entries = [
            service.AckMessageEntry(
                message_id=each.system_properties.message_id,
                receipt_handle=each.system_properties.receipt_handle,
            )
            for each in messages
        ]
        group, topic = definition.Resource(name="readers"), definition.Resource(name="orders")
        wire.ask_ok("AckMessage", service.AckMessageRequest(group=group, topic=topic, entries=entries))


@pytest.mark.slow
def test_recalls_near_the_due_time_agree_with_queues_and_log(tmp_path: Path) -> None:
    race, aim, over = Race(), random.Random(6), threading.Event()
    with running_node(tmp_path / "data") as node:
        wires = [Wire.to(node, f"client-{n}") for n in range(WIRES)]
        recalls = [
            (name, handle, due_ms + aim.uniform(-MISS_MS, MISS_MS))
            for name, handle, due_ms in send_scheduled_messages(wires[0])
        ]
        with ThreadPoolExecutor(CALLS + 1) as pool:
            consuming = pool.submit(consume, wires[-1], race.received, over)
            try:
                calls = [pool.submit(recall_at, wires[n % WIRES], recalls[n::CALLS]) for n in range(CALLS)]
                for call in calls:
                    race.answers.update(call.result())
                eventually(lambda: race.is_over(node), "each scheduled message is received or cancelled")
            finally:
                over.set()  # otherwise the pool would wait for the consumer for ever
            consuming.result()
        for wire in wires:
            wire.close()
    assert len(race.answers) == SCHEDULED_ROWS
    assert race.faults() == []
    assert {code for code, _ in race.answers.values()} == {OK, TOO_LATE}, (
        "some recalls succeed and some are too late"
    )
    with running_node(tmp_path / "data") as node:
        race.read_state(node)
    assert race.faults() == [], "after a restart"


def race_without_fault() -> Race:
    """A was recalled, B was delivered."""
    sentence = "too late, the message was delivered at 7"
    return Race(
        {"A": (OK, "OK"), "B": (TOO_LATE, sentence)}, Counter({"B": 1}), {"B": 7}, {"A"}, Counter({"B": 1})
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda race: race.delivered.update(["A"]),
        lambda race: race.cancelled.discard("A"),
        lambda race: race.delivered.update(["B"]),
        lambda race: race.delivered.clear(),
        lambda race: race.cancelled.add("B"),
        lambda race: race.released_ms.update(B=8),
        lambda race: race.answers.update(A=(TOO_LATE, "too late, the message was delivered at 7")),
        lambda race: race.answers.update(B=(OK, "OK")),
        lambda race: race.received.update(["B"]),
        lambda race: race.received.update(["A"]),
        lambda race: race.received.clear(),
        lambda race: race.answers.update(B=(definition.Code.INTERNAL_SERVER_ERROR, "")),
    ],
)
def test_the_record_of_a_race_sees_each_fault(spoil: object) -> None:
    """Control: each change to a valid record is reported."""
    race = race_without_fault()
    assert race.faults() == []
    spoil(race)  # type: ignore[operator]
    assert race.faults()
