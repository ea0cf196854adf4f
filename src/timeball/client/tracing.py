"""Trace context between a program and its messages, for programs that use OpenTelemetry.

A sent message carries the context of the current span (trace_context.py). A Worker runs its handler in a span whose
parent is that context. The program must set up OpenTelemetry itself. Without a tracer provider, no span is recorded.
Without the package `opentelemetry-api`, this module does nothing.
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
    """Encode the context of the current span as properties. Returns "" without a span."""
    if not HAS_API:
        return ""
    context: dict[str, str] = {}
    # Always W3C's form, even if the program uses another form in HTTP headers, because the broker reads no other form.
    TraceContextTextMapPropagator().inject(context)
    return encode_properties(context)


@contextmanager
def processing(message: Message, group: str) -> Iterator[None]:
    """Open a span while a member of `group` processes the message. Its parent is the context in the message."""
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
