"""Trace context between a program and its messages, for programs that use OpenTelemetry.

A sent message carries the context of the current span (trace_context.py), and a Worker runs its handler in a span whose
parent is that context. This module sets nothing up. Without a tracer provider in the program, no span is recorded.
Without the package `opentelemetry-api`, nothing happens at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from timeball.client.messages import Message
from timeball.model.message import encode_properties

try:
    from opentelemetry.trace import SpanKind, get_tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:  # the program has not installed opentelemetry-api
    HAS_API = False
else:
    HAS_API = True


def current_context() -> str:
    """Format the context of the current span as properties; "" when there is no span."""
    if not HAS_API:
        return ""
    context: dict[str, str] = {}
    # Always W3C's form, even if the program chose another for its HTTP headers: the broker reads no other form.
    TraceContextTextMapPropagator().inject(context)
    return encode_properties(context)


@contextmanager
def processing(message: Message, group: str) -> Iterator[None]:
    """Make a span of the message's trace current while a member of `group` processes the message."""
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
