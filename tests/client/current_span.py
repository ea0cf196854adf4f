"""A span of the program's own, as OpenTelemetry's SDK makes it current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON


class Current(NamedTuple):
    """Its ids in hexadecimal, and the `traceparent` that names it."""

    trace: str
    id: str
    traceparent: str


@contextmanager
def current(*, sampled: bool = True) -> Iterator[Current]:
    provider = TracerProvider(sampler=ALWAYS_ON if sampled else ALWAYS_OFF, shutdown_on_exit=False)
    with provider.get_tracer("a program").start_as_current_span("a program's work") as span:
        context = span.get_span_context()
        ids = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
        yield Current(*ids, f"00-{ids[0]}-{ids[1]}-{context.trace_flags:02x}")
