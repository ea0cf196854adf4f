"""Spans of messages, exported by OpenTelemetry: sent, released, received, acknowledged. Off unless `--traces` is set.

    send      child of the context in the message's properties. Without a context it is a root, if the sampler decides
              so, and the message then carries its context
    release   child of that; from the due time of the message until its release is on disk
    receive   child of that, for each message that a group receives
    ack       child of the receive, as is dead_letter

The OTEL_* variables set the destination, the sampling and the attributes, as OpenTelemetry's specification defines.
OpenTelemetry's batch processor exports, in a separate thread with a bounded queue. A collector that is slow or gone
costs spans and nothing else.

A span costs the event loop 25 to 90 microseconds. So each operation has an allowance of spans per second, and further
spans are counted and left out. Spans of some messages make no other message slower, because rows are examined as
columns.

Prior art for names: OpenTelemetry's semantic conventions for messaging.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from timeball.broker.accepting.tracing import Accepting, R
from timeball.io.clock import Clock
from timeball.model.errors import SetupError
from timeball.model.message import (
    SEND_NAMES,
    SMALL_ROWS,
    SendBatch,
    decode_properties,
    encode_properties,
    lateness_ms,
)
from timeball.model.trace_context import has_context, have_context, with_contexts

SPANS_PER_S = 500  # of each operation
SPANS_AT_ONCE = 100  # up to ten milliseconds of the event loop
ROOTS_LOOKED_AT = SMALL_ROWS  # only the first rows of a batch may begin a trace
LEASES_MAX = 10_000  # messages handed out whose acknowledgement becomes a child of their receive
STOP_S = 3.0  # for spans that wait to be exported

OPERATIONS = ("send", "release", "receive", "settle")
_MS_NS = 1_000_000
_TOLD = {
    "topic", "properties", "unique_key", "due_ms", "delay_ms", "delay_level", "store_ms", "queue_id", "reconsume_times",
}  # fmt: skip
_TOPIC, _PROPERTIES = SEND_NAMES.index("topic"), SEND_NAMES.index("properties")


class _Leased(NamedTuple):
    """The receive span's context of a message that is handed out, and the attributes of its acknowledgement."""

    context: Context
    topic: str
    attributes: Mapping[str, Any]


class Traces:
    """Makes spans and has them exported (Tracing of broker/accepting/tracing.py). Belongs to the event loop."""

    def __init__(self, clock: Clock, version: str) -> None:
        _check_protocol()
        self._clock, self._offset_ns = clock, 0
        self._allowances = {name: _Allowance(clock) for name in OPERATIONS}
        # by receipt, without its last part; the oldest one is dropped first
        self._leased: OrderedDict[tuple[object, ...], _Leased] = OrderedDict()
        self._propagator = TraceContextTextMapPropagator()
        self.left_out = dict.fromkeys(OPERATIONS, 0)
        self.counts = {"recorded": 0, "exported": 0, "failed": 0}
        # A separate provider: a program that runs a broker may have a global one for its own spans.
        self._provider = TracerProvider(resource=_resource(version), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Counted(OTLPSpanExporter(), self.counts)))
        self._tracer = self._provider.get_tracer("timeball", version)

    async def close(self) -> None:
        """Export the remaining spans, for at most STOP_S: a collector that is gone must not delay the end."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            loop.call_soon_threadsafe(ended.set)

        # Not a thread of an executor, because Python waits for those when the process ends.
        threading.Thread(target=_quietly, args=(shut_down,), name="traces-stop", daemon=True).start()
        try:
            await asyncio.wait_for(ended.wait(), STOP_S)
        except TimeoutError:
            pass

    def now_ns(self) -> int:
        """The time since 1970 in nanoseconds, finer than the wall clock's milliseconds."""
        wall_ns, monotonic_ns = self._clock.wall_ms() * _MS_NS, self._clock.monotonic_ns()
        if not wall_ns <= self._offset_ns + monotonic_ns < wall_ns + _MS_NS:
            self._offset_ns = wall_ns - monotonic_ns
        return self._offset_ns + monotonic_ns

    # -- send ----------------------------------------------------------------------------------------------------

    def send(self, batch: SendBatch, accept: Callable[[SendBatch], Accepting[R]]) -> Accepting[R]:
        """Accept a batch, with a span for each traced message. A new trace's context is added to its message."""
        begin_ns = self.now_ns()
        spans, contexts = self._begin_sends(batch, begin_ns)
        # A refused batch gets no spans, because it may be tried again in parts.
        answer, durable = accept(with_contexts(batch, contexts))
        if spans:
            durable.add_done_callback(partial(self._end_sends, spans))
        return answer, durable

    def _begin_sends(self, batch: SendBatch, begin_ns: int) -> tuple[list[Span], list[str | None]]:
        """Begin the spans of these sends. Returns the spans, and the contexts to add to messages without one."""
        if isinstance(batch, list):
            count, given = len(batch), [at for at, row in enumerate(batch) if has_context(row[_PROPERTIES])]
        else:
            count, given = batch.num_rows, _given(batch)
        spans, contexts = list[Span](), list[str | None]()
        for at in self._allowed("send", given):
            row = _row(batch, at)
            parent = self._context_of(row["properties"])
            span = self._begin("send", SpanKind.SERVER, parent, begin_ns, row["topic"])
            if span.is_recording():
                span.set_attributes(_of_send(row))
                spans.append(span)
        known, allowance = set(given), self._allowances["send"]
        for at in range(min(count, ROOTS_LOOKED_AT)):
            if at in known:
                continue
            if not allowance.room():
                break
            # Most messages are not sampled, so their other columns are not read.
            topic = batch[at][_TOPIC] if isinstance(batch, list) else batch.column("topic")[at].as_py()
            span = self._begin("send", SpanKind.PRODUCER, Context(), begin_ns, topic)
            if span.is_recording():
                allowance.take(1)
                span.set_attributes(_of_send(_row(batch, at)))
                spans.append(span)
                contexts += [None] * (at - len(contexts))
                contexts.append(self._text_of(span))
        return spans, contexts + [None] * (count - len(contexts))

    def _end_sends(self, spans: Sequence[Span], durable: asyncio.Future[int]) -> None:
        now_ns = self.now_ns()
        error = None if durable.cancelled() else durable.exception()
        for span in spans:
            if error is not None:
                span.set_status(StatusCode.ERROR, str(error))
            self._end(span, now_ns)

    # -- release, receive, ack ---------------------------------------------------------------------------------------

    def released(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> None:
        """Record the releases of rows in READ_SCHEMA of scheduled messages, which are durable now."""
        for at in self._allowed("release", _given(scheduled_rows)):
            row = _row(scheduled_rows, at)
            due_ms = row["due_ms"]
            # The due time may have passed long before the message was sent.
            begin_ns = max(due_ms, row["store_ms"]) * _MS_NS
            parent = self._context_of(row["properties"])
            span = self._begin("release", SpanKind.INTERNAL, parent, begin_ns, row["topic"])
            if span.is_recording():
                late = {
                    "timeball.due_ms": due_ms,
                    "timeball.lateness_ms": lateness_ms(due_ms, row["store_ms"], now_ms),
                }
                span.set_attributes(_of_row(row) | late)
                self._end(span, max(begin_ns, now_ms * _MS_NS))

    def received(self, group: str, rows: pa.RecordBatch, receipts: Sequence[tuple[object, ...]]) -> None:
        """Record the receive of rows in READ_SCHEMA by a group.

        The spans have no length, because most receives wait for their messages.
        """
        now_ns = self.now_ns()
        for at in self._allowed("receive", _given(rows)):
            row = _row(rows, at)
            parent = self._context_of(row["properties"])
            span = self._begin("receive", SpanKind.SERVER, parent, now_ns, row["topic"])
            if span.is_recording():
                attributes = {**_of_row(row), "messaging.consumer.group.name": group}
                queue, attempt = str(row["queue_id"]), 1 + (row["reconsume_times"] or 0)
                more = {"messaging.destination.partition.id": queue, "timeball.attempt": attempt}
                span.set_attributes(attributes | more)
                context = set_span_in_context(span, Context())
                self._leased[receipts[at][:-1]] = _Leased(context, row["topic"], attributes)
                self._end(span, now_ns)
        while len(self._leased) > LEASES_MAX:
            self._leased.popitem(last=False)

    def settled(
        self, operation: str, receipts: Sequence[tuple[object, ...]], valid: Sequence[bool], begin_ns: int
    ) -> None:
        """Record the ends of leases by their receipts.

        The last part of a receipt may have changed meanwhile, so it is ignored.
        """
        if not self._leased:
            return
        now_ns = self.now_ns()
        ended = [one[:-1] for one, is_valid in zip(receipts, valid, strict=True) if is_valid]
        found = [leased for key in ended if (leased := self._leased.pop(key, None)) is not None]
        for leased in self._allowed("settle", found):
            span = self._begin(operation, SpanKind.SERVER, leased.context, begin_ns, leased.topic)
            if span.is_recording():
                span.set_attributes(leased.attributes)
                self._end(span, now_ns)

    # -- spans -------------------------------------------------------------------------------------------------------

    def _allowed(self, operation: str, wanted: list[Any]) -> list[Any]:
        """Select the items that the operation's allowance permits, and count the others as left out."""
        if not wanted:
            return wanted
        count = self._allowances[operation].take(len(wanted))
        self.left_out[operation] += len(wanted) - count
        return wanted[:count]

    def _begin(self, operation: str, kind: SpanKind, parent: Context, begin_ns: int, topic: str) -> Span:
        attributes = _OF_OPERATION[operation] | {"messaging.destination.name": topic}
        return self._tracer.start_span(f"{operation} {topic}", parent, kind, attributes, start_time=begin_ns)

    def _end(self, span: Span, now_ns: int) -> None:
        self.counts["recorded"] += 1
        span.end(now_ns)

    def _context_of(self, properties: str) -> Context:
        return self._propagator.extract(decode_properties(properties))

    def _text_of(self, span: Span) -> str:
        context: dict[str, str] = {}
        self._propagator.inject(context, set_span_in_context(span, Context()))
        return encode_properties(context)


def _of(operation: str, kind: str) -> dict[str, str]:
    found = {"messaging.system": "timeball", "messaging.operation.name": operation}
    return found | ({"messaging.operation.type": kind} if kind else {})


_OF_OPERATION = {
    "send": _of("send", "send"),
    "release": _of("release", ""),  # none of the few types in the conventions fits a release
    "receive": _of("receive", "receive"),
    "ack": _of("ack", "settle"),
    "dead_letter": _of("dead_letter", "settle"),
}


def _given(rows: pa.RecordBatch) -> list[int]:
    """Find the rows that carry a context."""
    at = rows.schema.get_field_index("properties")
    # In a send the column may have any type, because it is checked later.
    if at < 0 or rows.schema.field(at).type != pa.string():
        return []
    properties = rows.column(at)
    if rows.num_rows <= SMALL_ROWS:  # a vectorized kernel costs more than so few rows
        return [i for i, text in enumerate(properties.to_pylist()) if has_context(text)]
    found: list[int] = np.flatnonzero(np.asarray(have_context(properties))).tolist()
    return found


def _row(batch: SendBatch, at: int) -> dict[str, Any]:
    """Extract the values of a row that spans use, by name. Each one costs a microsecond or two."""
    if isinstance(batch, list):
        return dict(zip(SEND_NAMES, batch[at], strict=True))
    return {name: batch.column(i)[at].as_py() for i, name in enumerate(batch.schema.names) if name in _TOLD}


def _of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"messaging.message.id": row.get("unique_key") or ""}


def _of_send(row: Mapping[str, Any]) -> dict[str, Any]:
    # The values are those that the sender gave: a delay becomes a due time later, by the clock of the admission.
    given = {f"timeball.{name}": row.get(name) for name in ("due_ms", "delay_ms", "delay_level")}
    return _of_row(row) | {name: value for name, value in given.items() if value is not None}


class _Allowance:
    """The number of spans that may be made now: SPANS_PER_S, and up to SPANS_AT_ONCE after a pause."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._room, self._at_ns = clock, float(SPANS_AT_ONCE), clock.monotonic_ns()

    def room(self) -> int:
        """Compute how many spans may be made now."""
        now_ns = self._clock.monotonic_ns()
        gained = (now_ns - self._at_ns) / 1e9 * SPANS_PER_S
        self._room, self._at_ns = min(float(SPANS_AT_ONCE), self._room + gained), now_ns
        return int(self._room)

    def take(self, wanted: int) -> int:
        """Use up to `wanted` spans of the allowance, and return their number."""
        taken = min(wanted, self.room())
        self._room -= taken
        return taken


class _Counted(SpanExporter):
    """An exporter that counts the outcomes, in the thread that exports."""

    def __init__(self, exporter: SpanExporter, counts: dict[str, int]) -> None:
        self._exporter, self._counts = exporter, counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans and count the outcome."""
        result = self._exporter.export(spans)
        self._counts["exported" if result is SpanExportResult.SUCCESS else "failed"] += len(spans)
        return result

    def shutdown(self) -> None:
        """Abandon exports that are under way."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return whether all spans are exported."""
        return self._exporter.force_flush(timeout_millis)


def _check_protocol() -> None:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    for name in names:
        if (asked := os.environ.get(name)) not in (None, "", "http/protobuf"):
            raise SetupError(
                f"{name}={asked}: spans go by http/protobuf; set it so, and the endpoint's port to the collector's "
                "for HTTP (4318)"
            )


def _resource(version: str) -> Resource:
    """Build the attributes of this process. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override the name."""
    given = Resource.create()
    is_named = not str(given.attributes.get("service.name", "unknown_service")).startswith("unknown_service")
    ours = Resource({"service.version": version} | ({} if is_named else {"service.name": "timeball"}))
    return given.merge(ours) if not is_named else ours.merge(given)


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except RuntimeError:
        pass  # the event loop has closed already, so it no longer waits
