"""The trace context of sent and received messages, for programs that use OpenTelemetry.

A sent message carries the context of the current span (model/trace_context.py). On the receiving side, a Worker runs
its handler in a span whose parent is that context.

The program must set up OpenTelemetry itself. Without a tracer provider, no span is recorded. In a program that has not
imported OpenTelemetry, there is no current span, and the functions do nothing. So the client does not import it either,
which would take longer than the import of the client.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from timeball.client.messages import Message


def is_used() -> bool:
    """True if the program has imported OpenTelemetry."""
    return "opentelemetry.trace" in sys.modules


def current_context() -> dict[str, str]:
    """Read the context of the current span, by the names of W3C's headers. Empty if there is no span."""
    context: dict[str, str] = {}
    if is_used():
        from opentelemetry.trace.propagation.tracecontext import (
            TraceContextTextMapPropagator,
        )

        # Always W3C's form, even if the program uses another form in its HTTP headers: the broker reads no other form.
        TraceContextTextMapPropagator().inject(context)
    return context


@contextmanager
def processing(message: Message, group: str) -> Iterator[None]:
    """Open a span while a member of `group` processes the message. Its parent is the context in the message."""
    if not is_used():
        yield
        return
    from opentelemetry.trace import SpanKind, get_tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

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
