"""Recalls that race the due instant: never recalled and delivered, never neither, and every answer is the log's.

A thousand scheduled messages fall due within a second while 64 clients' calls, each aimed at its scheduled message's
instant and some before and behind it, take them back. What was delivered is what stands in the queues, and what a
consumer receives and acknowledges meanwhile is the same, once each.
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

from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.grpc._generated import service_pb2 as s
from timeball.model.message import Kind

SCHEDULED_ROWS, CALLS, WIRES = 1_000, 64, 8
AHEAD_MS, SPREAD_MS = 1_500, 1_000
MISS_MS = 60  # how far from its instant a recall may be aimed
OK, TOO_LATE = d.Code.OK, d.Code.NOT_FOUND


@dataclass
class Race:
    """What was answered and what happened, by message id."""

    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    delivered: Counter[str] = field(default_factory=Counter)
    released_ms: dict[str, int] = field(default_factory=dict)  # by the log
    cancelled: set[str] = field(default_factory=set)
    received: Counter[str] = field(default_factory=Counter)

    def faults(self) -> list[str]:
        """Everything that may not be."""
        found = []
        for name, (code, sentence) in self.answers.items():
            times, was_cancelled = self.delivered[name], name in self.cancelled
            if code == OK and (times, was_cancelled) != (0, True):
                found.append(f"{name}: recalled, delivered {times} times, cancelled: {was_cancelled}")
            if code == TOO_LATE and (times, was_cancelled) != (1, False):
                found.append(f"{name}: too late, delivered {times} times, cancelled: {was_cancelled}")
            if (
                code == TOO_LATE
                and sentence != f"too late, the message was delivered at {self.released_ms.get(name)}"
            ):
                found.append(f"{name}: {sentence!r}, and the log says {self.released_ms.get(name)}")
            if code not in (OK, TOO_LATE):
                found.append(f"{name}: {d.Code.Name(code)} {sentence}")
            if self.received[name] != times:
                found.append(f"{name}: delivered {times} times, received {self.received[name]} times")
        return found

    def watch(self, node: RunningNode) -> None:
        """What the queues and the log hold now."""
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
        """Whether every scheduled message has come to an end, or some have come to too many."""
        self.watch(node)
        return (
            self.delivered.total() + len(self.cancelled) >= SCHEDULED_ROWS
            and self.received.total() >= self.delivered.total()
        )


def wait_until(instant_ms: float) -> None:
    """The aim of a shot: what is tested holds whenever it is fired."""
    left_s = instant_ms / 1_000 - time.time()
    if left_s > 0:
        time.sleep(left_s)


def promised(wire: Wire) -> list[tuple[str, str, int]]:
    """(id, recall handle, due_ms) of all scheduled messages."""
    now_ms = int(time.time() * 1_000)
    given = [message(due_ms=now_ms + AHEAD_MS + n % SPREAD_MS) for n in range(SCHEDULED_ROWS)]
    response = wire.ask_ok("SendMessage", send_request(*given))
    due = [each.system_properties.delivery_timestamp.ToMilliseconds() for each in given]
    return [(e.message_id, e.recall_handle, at) for e, at in zip(response.entries, due, strict=True)]


def recalled(wire: Wire, shots: list[tuple[str, str, float]]) -> dict[str, tuple[int, str]]:
    """The answers to recalls at these instants (ms)."""
    found = {}
    for name, handle, at_ms in sorted(shots, key=lambda shot: shot[2]):
        wait_until(at_ms)
        request = s.RecallMessageRequest(topic=d.Resource(name="orders"), recall_handle=handle)
        status = wire.ask("RecallMessage", request).status
        found[name] = (status.code, status.message)
    return found


def consume(wire: Wire, received: Counter[str], over: threading.Event) -> None:
    """Receive and acknowledge until told to stop, and then until there is nothing more."""
    while True:
        was_over = over.is_set()
        found = wire.receive("readers", "orders", wait_ms=50)
        if not found:
            if was_over:
                return
            continue
        received.update(each.system_properties.message_id for each in found)
        entries = [
            s.AckMessageEntry(
                message_id=each.system_properties.message_id,
                receipt_handle=each.system_properties.receipt_handle,
            )
            for each in found
        ]
        group, topic = d.Resource(name="readers"), d.Resource(name="orders")
        wire.ask_ok("AckMessage", s.AckMessageRequest(group=group, topic=topic, entries=entries))


@pytest.mark.slow
def test_a_thousand_recalls_race_their_instants(tmp_path: Path) -> None:
    race, aim, over = Race(), random.Random(6), threading.Event()
    with running_node(tmp_path / "data") as node:
        wires = [Wire.to(node, f"client-{n}") for n in range(WIRES)]
        shots = [
            (name, handle, due_ms + aim.uniform(-MISS_MS, MISS_MS))
            for name, handle, due_ms in promised(wires[0])
        ]
        with ThreadPoolExecutor(CALLS + 1) as pool:
            consuming = pool.submit(consume, wires[-1], race.received, over)
            try:
                parts = [pool.submit(recalled, wires[n % WIRES], shots[n::CALLS]) for n in range(CALLS)]
                for part in parts:
                    race.answers.update(part.result())
                eventually(lambda: race.is_over(node), "each scheduled message is received or cancelled")
            finally:
                over.set()  # else the pool would wait for it for ever
            consuming.result()
        for wire in wires:
            wire.close()
    assert len(race.answers) == SCHEDULED_ROWS
    assert race.faults() == []
    assert {code for code, _ in race.answers.values()} == {OK, TOO_LATE}, "there was no race"
    with running_node(tmp_path / "data") as node:
        race.watch(node)
    assert race.faults() == [], "after a restart"


def recorded() -> Race:
    """A race without a fault: A was recalled, B was not."""
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
        lambda race: race.answers.update(B=(d.Code.INTERNAL_SERVER_ERROR, "")),
    ],
)
def test_the_record_of_a_race_sees_each_fault(spoil: object) -> None:
    """The negative control."""
    race = recorded()
    assert race.faults() == []
    spoil(race)  # type: ignore[operator]
    assert race.faults()
