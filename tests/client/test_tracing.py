"""Trace context of the Python clients: from the program's current span to a message, and from that to a handler."""

import asyncio
import threading

import pyarrow as pa
import pytest
from opentelemetry import trace
from tests.client.current_span import Current, current
from tests.node_fixture import RunningNode, eventually

from timeball import AsyncTimeball, Message, Timeball, Worker
from timeball.client import tracing

OWN_CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def pulled_contexts(ball: Timeball, topic: str) -> list[str | None]:
    """The traceparent of each message of a pull, None without one."""
    return [message.properties.get("traceparent") for message in ball.pull(topic, "g", wait="20s")]


@pytest.mark.parametrize("sampled", [True, False])
def test_a_sent_message_carries_the_current_span_unless_it_has_a_context(
    ball: Timeball, sampled: bool
) -> None:
    topic = f"spans-{sampled}"
    ball.create_topic(topic, 1)
    with current(sampled=sampled) as span:
        ball.send(topic, "a", properties={"a": "b"})
        ball.send(topic, "b", properties={"traceparent": OWN_CONTEXT})
        ball.send_many(
            [{"body": "c"}, {"body": "d", "properties": {"traceparent": OWN_CONTEXT}}], topic=topic
        )
    ball.send(topic, "e")
    assert pulled_contexts(ball, topic) == [
        span.traceparent,
        OWN_CONTEXT,
        span.traceparent,
        OWN_CONTEXT,
        None,
    ]


def test_rows_of_a_table_carry_the_current_span_unless_they_have_a_context(columns: Timeball) -> None:
    columns.create_topic("span-columns", 1)
    with current() as span:
        rows = pa.table({"body": [b"a", b"b"], "properties": [None, f"traceparent\x01{OWN_CONTEXT}\x02"]})
        columns.send_many(rows, topic="span-columns")
    assert pulled_contexts(columns, "span-columns") == [span.traceparent, OWN_CONTEXT]


def test_an_awaited_send_carries_the_span_of_its_task(node: RunningNode, ball: Timeball) -> None:
    ball.create_topic("awaited", 1)

    async def send() -> Current:
        async with AsyncTimeball(node.http_endpoint) as client:
            with current() as span:
                await client.send("awaited", "a")
            await client.send("awaited", "b")
            return span

    span = asyncio.run(send())
    assert pulled_contexts(ball, "awaited") == [span.traceparent, None]


def test_a_send_repeated_by_its_id_in_another_span_is_recognized(ball: Timeball) -> None:
    """A program that sends again after a restart has the same `message_id`, and another span."""
    seqs = []
    for _ in range(2):
        with current():
            seqs.append(ball.send("repeated", "a", message_id="order-17", retry=True).seq)
    seqs.append(ball.send("repeated", "a", message_id="order-17", retry=True).seq)
    assert len(set(seqs)) == 1


def test_a_handler_of_a_worker_runs_in_the_trace_of_its_message(ball: Timeball) -> None:
    ball.create_topic("handled", 1)
    with current() as span:
        ball.send("handled", "a")
    ball.send("handled", "b")
    handled: list[tuple[str, dict[str, str]]] = []  # trace id of the current span, and context of sends

    def handler(message: Message) -> None:
        context = trace.get_current_span().get_span_context()
        handled.append((trace.format_trace_id(context.trace_id), tracing.current_context()))

    with Worker(ball, "workers", "handled", handler) as worker:
        eventually(lambda: worker.counts.acknowledged == 2, "both are handled")
    (trace_id, context), (trace_id_without, context_without) = handled
    # The program has no tracer provider, so the current span is that of the message. Sends of the handler carry it.
    assert trace_id == span.trace and context == {"traceparent": span.traceparent}
    assert trace_id_without == "0" * 32 and context_without == {}


def test_without_opentelemetry_a_message_carries_no_context(
    ball: Timeball, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "is_used", lambda: False)
    done = threading.Event()
    ball.create_topic("bare", 1)
    with current():
        ball.send("bare", "a")
    with Worker(ball, "workers", "bare", lambda _: done.set()):
        eventually(done.is_set, "the message is handled")
    assert pulled_contexts(ball, "bare") == [None]
