"""Trace context between a program and its messages, where the program uses OpenTelemetry.

A message that is sent carries the context of the span that is current (trace_context.py), and a Worker's handler runs
in a span whose parent is that. Nothing is set up here: without a tracer provider of the program's own no span is
recorded, and without `opentelemetry-api` nothing happens at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from timeball.client.messages import Message
from timeball.message import encode_properties

try:
    from opentelemetry.trace import SpanKind, get_tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:  # a program that has not installed it
    HAS_API = False
else:
    HAS_API = True


def current_context() -> str:
    """Return the context of the current span as properties; "" when there is none."""
    if not HAS_API:
        return ""
    context: dict[str, str] = {}
    # W3C's form, also in a program that has chosen another for its HTTP headers: the broker reads no other.
    TraceContextTextMapPropagator().inject(context)
    return encode_properties(context)


@contextmanager
def processing(message: Message, group: str) -> Iterator[None]:
    """Make a span of the message's trace current, while a member of a group works at the message."""
    if not HAS_API:
        yield
        return
    topic = message.topic
    attributes = {
        "messaging.system": "timeball",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": topic,
        "messaging.consumer.group.name": group,
        "messaging.message.id": message.id or "",
    }
    parent = TraceContextTextMapPropagator().extract(message.properties)
    with get_tracer("timeball").start_as_current_span(
        f"process {topic}", parent, SpanKind.CONSUMER, attributes
    ):
        yield
