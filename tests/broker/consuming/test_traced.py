"""The engine gives the same results with and without spans, and reports each valid receipt and answer to the spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.monitoring.collector import collector

from timeball.broker.consuming.engine import TracedConsuming
from timeball.broker.consuming.requests import ReceiveRequest

CONTEXT = "traceparent\x0100-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\x02"


@pytest.fixture(autouse=True)
def _spans_arrive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a collector. Without it, each stop waits for it, and the exporter's thread goes on during later tests."""
    with collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.endpoint)
        yield


class Recorded:
    """Records the calls of the broker's traces, and passes them on."""

    def __init__(self, world: World) -> None:
        traces = world.broker.traces
        self.received: list[int] = []  # the number of receipts of each call
        self.settled: list[tuple[str, list[bool]]] = []  # the operation and the valid receipts of each call
        received, settled = traces.received, traces.settled

        def note_received(group: str, rows: Any, receipts: Any) -> None:
            self.received.append(len(receipts))
            received(group, rows, receipts)

        def note_settled(operation: str, receipts: Any, valid: Any, begin_ns: int) -> None:
            self.settled.append((operation, list(valid)))
            settled(operation, receipts, valid, begin_ns)

        traces.received, traces.settled = note_received, note_settled


@pytest.mark.parametrize("save_ms", [0, 50])
def test_receives_and_acknowledgements_are_traced(save_ms: int) -> None:
    @on_node(traces=True, ack_save_ms=save_ms)
    async def run(world: World) -> None:
        consuming, recorded = world.broker.consuming, Recorded(world)
        assert isinstance(consuming, TracedConsuming)
        request = ReceiveRequest("g", "orders", rows=2)
        await world.broker.send(batch(3, properties=[CONTEXT] * 3))
        first = await consuming.receive(request, 0)
        second = await consuming.receive(request, 0)
        assert (await consuming.receive(request, 0)).receipts == []
        assert recorded.received == [2, 1]
        assert await consuming.acknowledge(first.receipts) == [True, True]
        assert await consuming.acknowledge(first.receipts) == [False, False]
        assert await consuming.dead_letter(second.receipts[0])
        assert recorded.settled == [("ack", [True, True]), ("ack", [False, False]), ("dead_letter", [True])]
        # Three receives, two acknowledgements and a dead letter. An invalid receipt has no span.
        assert world.broker.traces.counts["recorded"] == 6

    run()


@on_node(traces=True)
async def test_the_span_of_a_renamed_longer_lease_is_that_of_the_same_message(world: World) -> None:
    consuming, recorded = world.broker.consuming, Recorded(world)
    await world.broker.send(batch(1, properties=[CONTEXT]))
    (receipt,) = (await consuming.receive(ReceiveRequest("g", "orders"), 0)).receipts
    world.clock.advance(10)
    longer = await consuming.change_invisible_time(receipt, 30_000, new_receipt=True)
    assert longer != receipt
    assert consuming.acknowledge_now([longer]) == [True]
    assert recorded.settled == [("ack", [True])]
    assert world.broker.traces.counts["recorded"] == 2
