"""A span of the program's own, as OpenTelemetry's SDK makes it current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON


class Current(NamedTuple):
    """The ids of a span and of its trace in hexadecimal, and the `traceparent` that names the span."""

    trace: str
    id: str
    traceparent: str


@contextmanager
def current(*, sampled: bool = True) -> Iterator[Current]:
    """Make a new span the current one in this block. Its `traceparent` says whether it is sampled."""
    provider = TracerProvider(sampler=ALWAYS_ON if sampled else ALWAYS_OFF, shutdown_on_exit=False)
    with provider.get_tracer("a program").start_as_current_span("a program's work") as span:
        context = span.get_span_context()
        trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
        yield Current(trace_id, span_id, f"00-{trace_id}-{span_id}-{context.trace_flags:02x}")
