"""Traces: real brokers and clients, and a receiver that decodes the exported spans, or is dead."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.broker.on_node import batch, column, on_node
from tests.client.current_span import current
from tests.crash.world import World
from tests.edges.grpc.consumer import resource
from tests.edges.grpc.sending import message, sent
from tests.edges.grpc.wire import Wire, s
from tests.edges.http.client import client_of
from tests.monitoring import test_metrics
from tests.monitoring.collector import Collector, Span, collector
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.broker.accepting.tracing import traced
from timeball.io.clock import ManualClock
from timeball.model.errors import SetupError
from timeball.model.message import decode_properties
from timeball.model.trace_context import TRACEPARENT
from timeball.monitoring import traces
from timeball.monitoring.traces import LEASES_MAX, SPANS_AT_ONCE, SPANS_PER_S, Traces

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{CALLER}-01"
FLAGS = "03"  # of a root: sampled, and its id is random (W3C, level 2)
UNSAMPLED = f"00-{TRACE}-{CALLER}-00"
ALL = ("send orders", "release orders", "receive orders", "ack orders")
OK = 0


@pytest.fixture(autouse=True)
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector, and the variables that lead to it."""
    with collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield running


def by_name(spans: list[Span]) -> dict[str, Span]:
    """Index spans by name. Each name must occur once."""
    span_by_name = {span.name: span for span in spans}
    assert len(span_by_name) == len(spans), spans
    return span_by_name


def check_tree(spans: list[Span], root: str) -> dict[str, Span]:
    """Check for one span of each name in ALL: three are children of `root`, the ack is a child of the receive."""
    span_by_name = by_name(spans)
    assert set(span_by_name) == set(ALL)
    send, release, receive, ack = (span_by_name[name] for name in ALL)
    assert {span.trace for span in spans} == {send.trace}
    assert (release.parent, receive.parent, ack.parent) == (root, root, receive.id)
    assert all(span.begin_ns <= span.end_ns for span in spans)
    assert send.end_ns <= release.end_ns <= receive.begin_ns <= ack.end_ns
    due_ms = release.attributes["timeball.due_ms"]
    assert release.begin_ns == due_ms * 1_000_000
    assert send.attributes.get("timeball.due_ms", due_ms) == due_ms
    assert "timeball.due_ms" in send.attributes or send.attributes["timeball.delay_ms"] == 10
    late_ms = (release.end_ns - release.begin_ns) // 1_000_000
    assert release.attributes["timeball.lateness_ms"] == late_ms >= 0
    assert {span.attributes["messaging.system"] for span in spans} == {"timeball"}
    assert {span.attributes["messaging.destination.name"] for span in spans} == {"orders"}
    assert len({span.attributes["messaging.message.id"] for span in spans}) == 1
    assert (
        receive.attributes["messaging.consumer.group.name"]
        == "g"
        == ack.attributes["messaging.consumer.group.name"]
    )
    types = [span.attributes.get("messaging.operation.type") for span in (send, release, receive, ack)]
    assert types == ["send", None, "receive", "settle"]
    assert {span.service for span in spans} == {"timeball"} and {span.status for span in spans} == {OK}
    return span_by_name


def correct_trace() -> list[Span]:
    """Build the spans of a correct trace by hand."""
    common = {
        "messaging.system": "timeball", "messaging.destination.name": "orders", "messaging.message.id": "17",
        "timeball.due_ms": 20,
    }  # fmt: skip
    of_group = {"messaging.consumer.group.name": "g"}
    lateness = {"timeball.lateness_ms": 2}
    attributes = {
        "send orders": common | {"messaging.operation.type": "send"},
        "release orders": common | lateness,
        "receive orders": common | of_group | {"messaging.operation.type": "receive"},
        "ack orders": common | of_group | {"messaging.operation.type": "settle"},
    }
    begins_ms, parents = (10, 20, 30, 40), (CALLER, CALLER, CALLER, "id-30")
    return [
        Span(
            name,
            TRACE,
            f"id-{begin_ms}",
            parent,
            2,
            begin_ms * 1_000_000,
            (begin_ms + 2) * 1_000_000,
            attributes[name],
            "timeball",
            OK,
        )
        for name, begin_ms, parent in zip(ALL, begins_ms, parents, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param("send orders", {"trace": "another"}, id="another trace"),
        pytest.param("release orders", {"parent": "id-10"}, id="release below the send"),
        pytest.param("receive orders", {"parent": ""}, id="receive without a parent"),
        pytest.param("ack orders", {"parent": CALLER}, id="ack not below the receive"),
        pytest.param("release orders", {"begin_ns": 19_000_000}, id="release begins before it is due"),
        pytest.param("release orders", {"end_ns": 25_000_000}, id="release ends later than its lateness"),
        pytest.param("receive orders", {"begin_ns": 5_000_000}, id="receive before the release"),
        pytest.param("ack orders", {"name": "receive orders"}, id="two receives and no ack"),
        pytest.param("send orders", {"status": 2}, id="failed send"),
        pytest.param("receive orders", {"attributes": {}}, id="no attributes"),
        pytest.param("send orders", None, id="no send"),
    ],
)
def test_check_tree_notices_each_fault_of_a_trace(name: str, fault: dict[str, Any] | None) -> None:
    """The control of `check_tree`. `fault`: the changed fields of the span, or None to leave it out."""
    spans = correct_trace()
    check_tree(spans, CALLER)
    index = [span.name for span in spans].index(name)
    spans[index : index + 1] = [] if fault is None else [spans[index]._replace(**fault)]
    with pytest.raises((AssertionError, KeyError)):
        check_tree(spans, CALLER)


# ---- one trace over each edge ---------------------------------------------------------------------------------


def test_over_http_all_spans_are_in_the_trace_of_the_callers_header(
    tmp_path: Path, receiver: Collector
) -> None:
    with running_node(tmp_path / "data", http_port=0, traces=True) as node, client_of(node) as client:
        client.send("orders", {"body": "17", "after": "10ms"}, traceparent=PARENT, tracestate="vendor=1")
        reply = client.receive("orders", "g", wait="20s")
        (received,) = reply.value["messages"]
        assert (received["properties"][TRACEPARENT], received["properties"]["tracestate"]) == (
            PARENT,
            "vendor=1",
        )
        client.ask("POST", "/v1/topics/orders/ack", {"receipts": [received["receipt"]]}, query={"group": "g"})
        spans = check_tree(receiver.wait_for(*ALL), CALLER)
    assert spans["send orders"].trace == TRACE and spans["send orders"].parent == CALLER


def test_over_grpc_all_spans_are_in_one_trace_also_after_a_restart(
    tmp_path: Path, receiver: Collector
) -> None:
    clock = ManualClock()
    node = RunningNode(tmp_path / "data", clock, traces=True)
    node.start()
    try:
        node.run(node.broker.create_topic("orders"))
        with Wire.to(node) as wire:
            sent(wire, message(due_ms=clock.wall + 60_000, properties={TRACEPARENT: PARENT}))
        receiver.wait_for("send orders")
    finally:
        node.stop()
    node.start()
    try:
        clock.advance(60_000)
        with Wire.to(node) as wire:
            (received,) = wire.receive("g", "orders", wait_ms=20_000)
            wire.ask_ok("AckMessage", acknowledge(received))
        check_tree(receiver.wait_for(*ALL, trace=TRACE), CALLER)
    finally:
        node.stop()


def acknowledge(received: Any) -> s.AckMessageRequest:
    """Build the request to acknowledge a received message."""
    system = received.system_properties
    entry = s.AckMessageEntry(message_id=system.message_id, receipt_handle=system.receipt_handle)
    return s.AckMessageRequest(group=resource("g"), topic=resource("orders"), entries=[entry])


def test_a_client_sends_its_current_span_as_the_parent_of_all_spans(
    tmp_path: Path, receiver: Collector
) -> None:
    with running_node(tmp_path / "data", traces=True) as node, node.client() as ball:
        with current() as span:
            ball.send("orders", "17", after="10ms")
        (received,) = ball.pull("orders", "g", wait="20s")
        assert received.ack()
        spans = check_tree(receiver.wait_for(*ALL), span.id)
    assert spans["send orders"].trace == span.trace


# ---- roots -------------------------------------------------------------------------------------------------------


def test_a_message_without_a_context_begins_a_trace_and_gets_its_context(
    tmp_path: Path, receiver: Collector
) -> None:
    with running_node(tmp_path / "data", traces=True) as node, node.client() as ball:
        ball.send("orders", "17", after="10ms", properties={"a": "b"})
        (received,) = ball.pull("orders", "g", wait="20s")
        received.ack()
        spans = receiver.wait_for(*ALL)
        send = by_name(spans)["send orders"]
        check_tree(spans, send.id)
    assert send.parent == "" and send.kind == 4  # a producer
    assert received.properties == {TRACEPARENT: f"00-{send.trace}-{send.id}-{FLAGS}", "a": "b"}


@pytest.mark.parametrize(
    ("sampler", "properties"),
    [("always_off", {"a": "b"}), ("parentbased_always_on", {"a": "b", TRACEPARENT: UNSAMPLED})],
)
def test_an_unsampled_message_keeps_its_bytes_and_has_no_spans(
    tmp_path: Path,
    receiver: Collector,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    properties: dict[str, str],
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    with running_node(tmp_path / "data", traces=True) as node, node.client() as ball:
        ball.send("orders", "17", after="10ms", properties=properties)
        (received,) = ball.pull("orders", "g", wait="20s")
        received.ack()
        assert received.properties == properties
        assert counts(node) == {"recorded": 0, "exported": 0, "failed": 0}
    assert receiver.spans == []


def counts(node: RunningNode) -> dict[str, int]:
    """Read the broker's numbers of recorded, exported and failed spans."""
    traces_of_broker = node.broker.traces
    assert traces_of_broker is not None
    return dict(traces_of_broker.counts)


def traced_send(world: World) -> Any:
    return traced(world.broker.appender.send, world.broker.traces)


def test_a_sampler_with_a_ratio_changes_only_the_sampled_messages_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")

    @on_node(traces=True)
    async def run(world: World) -> None:
        accept = traced_send(world)
        texts: list[str | None] = []
        for _ in range(4):
            world.clock.advance(1_000)  # so that the rate limit allows another second of spans
            accepted, durable = accept(batch(50, properties=["a\x01b\x02"] * 50))
            await durable
            texts += column(accepted.stored_rows, "properties")
        with_context = [text for text in texts if text != "a\x01b\x02"]
        assert 50 < len(with_context) < 150
        form = re.compile(f"traceparent\x0100-[0-9a-f-]+-{FLAGS}\x02a\x01b\x02")
        assert all(text and form.fullmatch(text) for text in with_context)

    run()


@pytest.mark.parametrize("rows", [3, traces.ROOT_CANDIDATES_MAX + 10])
def test_messages_in_columns_get_contexts_and_keep_their_own(rows: int) -> None:
    @on_node(traces=True)
    async def run(world: World) -> None:
        columns = {
            "properties": [None, f"{TRACEPARENT}\x01{PARENT}\x02", "a\x01b\x02"]
            + ["" for _ in range(rows - 3)]
        }
        accept = traced_send(world)
        accepted, durable = accept(batch(rows, **columns))
        await durable
        first, second, third, *_ = (
            decode_properties(text or "") for text in column(accepted.stored_rows, "properties")
        )
        assert set(first) == {TRACEPARENT} and second == {TRACEPARENT: PARENT}
        assert set(third) == {TRACEPARENT, "a"} and third[TRACEPARENT] != first[TRACEPARENT]

    run()


# ---- bounds ------------------------------------------------------------------------------------------------------


@on_node(traces=True)
async def test_spans_beyond_the_rate_limit_are_left_out_and_counted(world: World) -> None:
    rows = 20_000
    properties = [f"{TRACEPARENT}\x01{PARENT}\x02"] * rows
    await world.broker.send(batch(rows, properties=properties, delay_ms=[5_000] * rows))
    await world.advance(5_000)
    await world.until(lambda: world.broker.lateness.released == rows, "all are released")
    values = await test_metrics.samples(world)
    assert values["timeball_trace_spans_total", "recorded"] == SPANS_AT_ONCE
    assert values["timeball_trace_spans_left_out_total", "release"] == rows - SPANS_AT_ONCE
    world.clock.advance(100)
    world.broker.traces.released(await _released(world, rows), world.clock.wall)
    values_later = await test_metrics.samples(world)
    assert values_later["timeball_trace_spans_total", "recorded"] == SPANS_AT_ONCE + SPANS_PER_S // 10


async def _released(world: World, rows: int) -> Any:
    """Read up to `rows` of the released messages."""
    (low, high) = world.broker.queues("orders")[0]
    return await world.broker.read_queue("orders", 0, low, min(rows, high - low))


@on_node(traces=True)
async def test_the_number_of_remembered_leases_is_bounded(world: World) -> None:
    await world.broker.send(batch(1, properties=[f"{TRACEPARENT}\x01{PARENT}\x02"]))
    traces_of_broker, row = world.broker.traces, (await _released(world, 1))
    for number in range(LEASES_MAX + 10):
        if number % SPANS_AT_ONCE == 0:
            world.clock.advance(1_000)
        traces_of_broker.received("g", row, [("g", "orders", number, 0)])
    assert len(traces_of_broker._leased) == LEASES_MAX


def test_messages_are_delivered_although_the_collector_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Collector
) -> None:
    receiver.close()  # its port is closed now
    monkeypatch.setattr(traces, "STOP_S", 0.1)
    node = RunningNode(tmp_path / "data", traces=True)
    node.start()
    with node.client() as ball:
        for number in range(20):
            ball.send("orders", f"{number}", after="10ms")
        bodies: set[bytes] = set()
        eventually(
            lambda: (
                bodies.update(message.body for message in ball.pull("orders", "g", wait="1s"))
                or len(bodies) == 20
            ),
            "all are received",
        )
        assert counts(node)["exported"] == 0 and counts(node)["recorded"] >= 60
    node.stop()


def test_spans_that_the_collector_refuses_are_counted_as_failed(tmp_path: Path, receiver: Collector) -> None:
    receiver.status = 400
    with running_node(tmp_path / "data", traces=True) as node, node.client() as ball:
        ball.send("orders", "17")
        eventually(lambda: counts(node)["failed"], "an export has failed")
        assert counts(node)["exported"] == 0


def test_queued_spans_are_exported_when_the_broker_stops(
    tmp_path: Path, receiver: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", str(1_000 * BOUND_S * 10))
    with running_node(tmp_path / "data", traces=True) as node, node.client() as ball:
        ball.send("orders", "17")
        assert receiver.spans == []
    assert [span.name for span in receiver.spans] == ["send orders"]


# ---- off, and settings -----------------------------------------------------------------------------------------------


def test_without_the_option_no_span_is_made_and_no_tracing_code_is_called(
    tmp_path: Path, receiver: Collector
) -> None:
    with running_node(tmp_path / "data") as node, node.client() as ball:
        broker = node.broker
        assert broker.sends.accept == broker.appender.send and broker.halves.accept == broker.prepare_nowait
        assert type(broker.consuming).__name__ == "Consuming"
        ball.send("orders", "17", properties={TRACEPARENT: PARENT}, after="10ms")
        (received,) = ball.pull("orders", "g", wait="20s")
        received.ack()
        assert received.properties == {TRACEPARENT: PARENT}
    assert receiver.requests == 0


def test_a_start_with_traces_but_without_the_extra_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "timeball.monitoring.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    node = RunningNode(tmp_path / "data", traces=True)
    with pytest.raises(SetupError, match=r"pip install '\.\[otel\]'"):
        node.start()


def test_another_export_protocol_is_refused_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SetupError, match="OTEL_EXPORTER_OTLP_PROTOCOL=grpc: spans go by http/protobuf"):
        Traces(ManualClock(), "1")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "timeball"),
        ({"OTEL_SERVICE_NAME": "orders-broker"}, "orders-broker"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=b,zone=eu"}, "b"),
    ],
)
def test_the_environment_overrides_the_name_of_the_service(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    created = traces._resource("1.2")
    assert (created.attributes["service.name"], created.attributes["service.version"]) == (name, "1.2")
    assert created.attributes.get("zone") == ("eu" if "zone" in str(variables) else None)


def test_times_follow_the_wall_clock_with_the_digits_of_the_monotonic_one(receiver: Collector) -> None:
    class FineClock(ManualClock):
        """A clock whose monotonic time has `fine_ns` besides its milliseconds."""

        fine_ns = 0

        def monotonic_ns(self) -> int:
            return super().monotonic_ns() + self.fine_ns

    clock = FineClock()
    traces_of_broker = Traces(clock, "1")
    assert traces_of_broker.now_ns() == clock.wall * 1_000_000
    clock.fine_ns = 400_000
    assert traces_of_broker.now_ns() == clock.wall * 1_000_000 + 400_000
    clock.step_wall(-5_000)
    assert traces_of_broker.now_ns() == clock.wall * 1_000_000
