"""OpenTelemetry spans of messages: sent, released, received, acknowledged. Off unless `--traces` is set.

    send           parent: the context in the message's properties. Without a context the sampler decides whether the
                   send is the root of a new trace. The message then carries the context of that root
    release        parent: the context in the message; from the due time until the release is on disk
    receive        parent: the context in the message; for each message that a group receives
    ack,           parent: the receive
    dead_letter

The OTEL_* variables set the destination, the sampling and the attributes, as OpenTelemetry's specification defines.
OpenTelemetry's batch processor exports the spans in a separate thread with a bounded queue. If the collector is slow or
unreachable, spans are lost, but messages are not delayed.

A span costs the event loop 25 to 90 microseconds. So the number of spans per second is limited for each operation.
Further spans are counted and left out. Traced messages hardly slow other messages down, because rows are examined as
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
from timeball.model.trace_context import has_context, has_context_mask, with_contexts

SPANS_PER_S = 500  # per operation
SPANS_AT_ONCE = 100  # the size of a burst; takes up to ten milliseconds of the event loop
ROOT_CANDIDATES_MAX = SMALL_ROWS  # only this many rows of a batch may begin a trace, the first ones
LEASES_MAX = 10_000  # leased messages whose receive span is remembered as the parent of the acknowledgement
STOP_S = 3.0  # longest time to export the remaining spans at the end

OPERATIONS = ("send", "release", "receive", "settle")
_MS_NS = 1_000_000
_ATTRIBUTE_COLUMNS = {
    "topic", "properties", "unique_key", "due_ms", "delay_ms", "delay_level", "store_ms", "queue_id", "reconsume_times",
}  # fmt: skip
_TOPIC, _PROPERTIES = SEND_NAMES.index("topic"), SEND_NAMES.index("properties")


class _Leased(NamedTuple):
    """The context of a leased message's receive span, and the attributes of its acknowledgement."""

    context: Context
    topic: str
    attributes: Mapping[str, Any]


class Traces:
    """Creates spans and exports them (Tracing of broker/accepting/tracing.py). Belongs to the event loop."""

    def __init__(self, clock: Clock, version: str) -> None:
        """`version`: of Timeball, an attribute of all spans.

        Raises SetupError if the environment selects another protocol than http/protobuf.
        """
        _check_protocol()
        self._clock = clock
        # From the monotonic clock to the time since 1970. `now_ns` updates it.
        self._offset_ns = 0
        self._rate_limits = {name: _RateLimit(clock) for name in OPERATIONS}
        # By receipt, without its last part, which may change during a lease. The oldest entry is dropped first.
        self._leased: OrderedDict[tuple[object, ...], _Leased] = OrderedDict()
        self._propagator = TraceContextTextMapPropagator()
        self.left_out = dict.fromkeys(OPERATIONS, 0)
        self.counts = {"recorded": 0, "exported": 0, "failed": 0}
        # A separate provider: a program that runs a broker may have a global one for its own spans.
        self._provider = TracerProvider(resource=_resource(version), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(_CountingExporter(OTLPSpanExporter(), self.counts))
        )
        self._tracer = self._provider.get_tracer("timeball", version)

    async def close(self) -> None:
        """Export the remaining spans for at most STOP_S, so that a missing collector does not delay the end."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            loop.call_soon_threadsafe(ended.set)

        # Not a thread of an executor, because Python waits for those when the process ends.
        threading.Thread(
            target=_ignore_closed_loop, args=(shut_down,), name="traces-stop", daemon=True
        ).start()
        try:
            await asyncio.wait_for(ended.wait(), STOP_S)
        except TimeoutError:
            pass

    def now_ns(self) -> int:
        """Read the time since 1970 in nanoseconds.

        The wall clock has milliseconds, and the monotonic clock adds the finer digits.
        """
        wall_ns, monotonic_ns = self._clock.wall_ms() * _MS_NS, self._clock.monotonic_ns()
        if not wall_ns <= self._offset_ns + monotonic_ns < wall_ns + _MS_NS:
            self._offset_ns = wall_ns - monotonic_ns
        return self._offset_ns + monotonic_ns

    # -- send ----------------------------------------------------------------------------------------------------

    def send(self, batch: SendBatch, accept: Callable[[SendBatch], Accepting[R]]) -> Accepting[R]:
        """Call `accept` for a batch, with a span for each traced message. Returns its result, and raises its errors.

        If a message begins a trace, the context of the trace is added to the message before.
        """
        begin_ns = self.now_ns()
        spans, contexts = self._begin_sends(batch, begin_ns)
        # If `accept` raises, no span is ended and exported, because the batch may be tried again in parts.
        answer, durable = accept(with_contexts(batch, contexts))
        if spans:
            durable.add_done_callback(partial(self._end_sends, spans))
        return answer, durable

    def _begin_sends(self, batch: SendBatch, begin_ns: int) -> tuple[list[Span], list[str | None]]:
        """Begin the spans of these sends. Returns the spans, and for each message the context to add to it, or None.

        Messages with a context are children of it. Of the others, the first ROOT_CANDIDATES_MAX may begin traces, if
        the sampler selects them.
        """
        if isinstance(batch, list):
            count = len(batch)
            with_context = [index for index, row in enumerate(batch) if has_context(row[_PROPERTIES])]
        else:
            count, with_context = batch.num_rows, _rows_with_context(batch)
        spans, contexts = list[Span](), list[str | None]()
        for index in self._limit("send", with_context):
            row = _row_values(batch, index)
            parent = self._decode_context(row["properties"])
            span = self._begin("send", SpanKind.SERVER, parent, begin_ns, row["topic"])
            if span.is_recording():
                span.set_attributes(_send_attributes(row))
                spans.append(span)
        has_parent, rate_limit = set(with_context), self._rate_limits["send"]
        for index in range(min(count, ROOT_CANDIDATES_MAX)):
            if index in has_parent:
                continue
            if not rate_limit.free_spans():
                break
            # Only the topic is read before the sampler decides, because most messages are not sampled.
            topic = batch[index][_TOPIC] if isinstance(batch, list) else batch.column("topic")[index].as_py()
            span = self._begin("send", SpanKind.PRODUCER, Context(), begin_ns, topic)
            if span.is_recording():
                rate_limit.take(1)
                span.set_attributes(_send_attributes(_row_values(batch, index)))
                spans.append(span)
                contexts += [None] * (index - len(contexts))
                contexts.append(self._encode_context(span))
        return spans, contexts + [None] * (count - len(contexts))

    def _end_sends(self, spans: Sequence[Span], durable: asyncio.Future[int]) -> None:
        """End the spans of sends when their rows are durable, or failed. Called by the future `durable`."""
        now_ns = self.now_ns()
        error = None if durable.cancelled() else durable.exception()
        for span in spans:
            if error is not None:
                span.set_status(StatusCode.ERROR, str(error))
            self._end(span, now_ns)

    # -- release, receive, ack ---------------------------------------------------------------------------------------

    def released(self, scheduled_rows: pa.RecordBatch, now_ms: int) -> None:
        """Record the releases of scheduled messages (rows in READ_SCHEMA), which have become durable at `now_ms`."""
        for index in self._limit("release", _rows_with_context(scheduled_rows)):
            row = _row_values(scheduled_rows, index)
            due_ms = row["due_ms"]
            # A due time in the past may be long before the send.
            begin_ns = max(due_ms, row["store_ms"]) * _MS_NS
            parent = self._decode_context(row["properties"])
            span = self._begin("release", SpanKind.INTERNAL, parent, begin_ns, row["topic"])
            if span.is_recording():
                lateness = {
                    "timeball.due_ms": due_ms,
                    "timeball.lateness_ms": lateness_ms(due_ms, row["store_ms"], now_ms),
                }
                span.set_attributes(_message_attributes(row) | lateness)
                self._end(span, max(begin_ns, now_ms * _MS_NS))

    def received(self, group: str, rows: pa.RecordBatch, receipts: Sequence[tuple[object, ...]]) -> None:
        """Record that a group has received these rows (in READ_SCHEMA). `receipts` has a receipt for each row.

        The spans have no duration, because most of a receive is a long poll.
        """
        now_ns = self.now_ns()
        for index in self._limit("receive", _rows_with_context(rows)):
            row = _row_values(rows, index)
            parent = self._decode_context(row["properties"])
            span = self._begin("receive", SpanKind.SERVER, parent, now_ns, row["topic"])
            if span.is_recording():
                attributes = {**_message_attributes(row), "messaging.consumer.group.name": group}
                queue, attempt = str(row["queue_id"]), 1 + (row["reconsume_times"] or 0)
                delivery = {"messaging.destination.partition.id": queue, "timeball.attempt": attempt}
                span.set_attributes(attributes | delivery)
                context = set_span_in_context(span, Context())
                self._leased[receipts[index][:-1]] = _Leased(context, row["topic"], attributes)
                self._end(span, now_ns)
        while len(self._leased) > LEASES_MAX:
            self._leased.popitem(last=False)

    def settled(
        self, operation: str, receipts: Sequence[tuple[object, ...]], valid: Sequence[bool], begin_ns: int
    ) -> None:
        """Record that consumers have ended leases by `operation`: "ack" or "dead_letter".

        `valid` is False for a receipt whose lease had ended before. The last part of a receipt is ignored, because it
        may have changed since the receive.
        """
        if not self._leased:
            return
        now_ns = self.now_ns()
        keys = [receipt[:-1] for receipt, is_valid in zip(receipts, valid, strict=True) if is_valid]
        remembered = [leased for key in keys if (leased := self._leased.pop(key, None)) is not None]
        for leased in self._limit("settle", remembered):
            span = self._begin(operation, SpanKind.SERVER, leased.context, begin_ns, leased.topic)
            if span.is_recording():
                span.set_attributes(leased.attributes)
                self._end(span, now_ns)

    # -- spans -------------------------------------------------------------------------------------------------------

    def _limit(self, operation: str, items: list[Any]) -> list[Any]:
        """Return the first items, as many as the rate limit of the operation allows. Counts the others as left out."""
        if not items:
            return items
        count = self._rate_limits[operation].take(len(items))
        self.left_out[operation] += len(items) - count
        return items[:count]

    def _begin(self, operation: str, kind: SpanKind, parent: Context, begin_ns: int, topic: str) -> Span:
        """Begin the span of an operation on a message of `topic`, with the attributes of the operation."""
        attributes = _ATTRIBUTES_BY_OPERATION[operation] | {"messaging.destination.name": topic}
        return self._tracer.start_span(f"{operation} {topic}", parent, kind, attributes, start_time=begin_ns)

    def _end(self, span: Span, now_ns: int) -> None:
        self.counts["recorded"] += 1
        span.end(now_ns)

    def _decode_context(self, properties: str) -> Context:
        return self._propagator.extract(decode_properties(properties))

    def _encode_context(self, span: Span) -> str:
        context: dict[str, str] = {}
        self._propagator.inject(context, set_span_in_context(span, Context()))
        return encode_properties(context)


def _operation_attributes(operation: str, kind: str) -> dict[str, str]:
    """Build the attributes of all spans of an operation. `kind`: its type in the conventions, or "" for none."""
    attributes = {"messaging.system": "timeball", "messaging.operation.name": operation}
    return attributes | ({"messaging.operation.type": kind} if kind else {})


_ATTRIBUTES_BY_OPERATION = {
    "send": _operation_attributes("send", "send"),
    "release": _operation_attributes("release", ""),  # the conventions have no type that fits a release
    "receive": _operation_attributes("receive", "receive"),
    "ack": _operation_attributes("ack", "settle"),
    "dead_letter": _operation_attributes("dead_letter", "settle"),
}


def _rows_with_context(rows: pa.RecordBatch) -> list[int]:
    """Find the rows whose properties contain a trace context. Returns their indices."""
    column_index = rows.schema.get_field_index("properties")
    # The column of a send may have any type here, because admission checks it later.
    if column_index < 0 or rows.schema.field(column_index).type != pa.string():
        return []
    properties = rows.column(column_index)
    if rows.num_rows <= SMALL_ROWS:  # a vectorized kernel costs more than so few rows
        return [index for index, text in enumerate(properties.to_pylist()) if has_context(text)]
    indices: list[int] = np.flatnonzero(np.asarray(has_context_mask(properties))).tolist()
    return indices


def _row_values(batch: SendBatch, index: int) -> dict[str, Any]:
    """Read the values of a row that become attributes, by column name. Each value costs a microsecond or two."""
    if isinstance(batch, list):
        return dict(zip(SEND_NAMES, batch[index], strict=True))
    return {
        name: batch.column(column_index)[index].as_py()
        for column_index, name in enumerate(batch.schema.names)
        if name in _ATTRIBUTE_COLUMNS
    }


def _message_attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"messaging.message.id": row.get("unique_key") or ""}


def _send_attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    # These are the sender's values. Admission converts a delay to a due time later.
    times = {f"timeball.{name}": row.get(name) for name in ("due_ms", "delay_ms", "delay_level")}
    return _message_attributes(row) | {name: value for name, value in times.items() if value is not None}


class _RateLimit:
    """A token bucket that limits spans to SPANS_PER_S, with bursts of up to SPANS_AT_ONCE."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free_spans, self._at_ns = clock, float(SPANS_AT_ONCE), clock.monotonic_ns()

    def free_spans(self) -> int:
        """Refill the bucket for the time since the last call. Returns the number of spans that may be created now."""
        now_ns = self._clock.monotonic_ns()
        gained_spans = (now_ns - self._at_ns) / 1e9 * SPANS_PER_S
        self._free_spans, self._at_ns = min(float(SPANS_AT_ONCE), self._free_spans + gained_spans), now_ns
        return int(self._free_spans)

    def take(self, wanted: int) -> int:
        """Take up to `wanted` spans from the bucket. Returns the number taken."""
        taken_spans = min(wanted, self.free_spans())
        self._free_spans -= taken_spans
        return taken_spans


class _CountingExporter(SpanExporter):
    """An exporter that counts exported and failed spans. Runs in the exporting thread."""

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
        """Wait until all spans are exported. Returns False after the timeout."""
        return self._exporter.force_flush(timeout_millis)


def _check_protocol() -> None:
    """Raise SetupError if the environment selects another protocol than http/protobuf."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    for name in names:
        if (protocol := os.environ.get(name)) not in (None, "", "http/protobuf"):
            raise SetupError(
                f"{name}={protocol}: spans go by http/protobuf; set it so, and the endpoint's port to the collector's "
                "for HTTP (4318)"
            )


def _resource(version: str) -> Resource:
    """Build the attributes of this process: those of the environment, and the version.

    The name of the service is "timeball", unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES contain one.
    """
    configured = Resource.create()
    service_name = str(configured.attributes.get("service.name", "unknown_service"))
    is_named = not service_name.startswith("unknown_service")  # OpenTelemetry's default
    defaults = Resource({"service.version": version} | ({} if is_named else {"service.name": "timeball"}))
    # In `merge`, the argument overrides the object.
    return configured.merge(defaults) if not is_named else defaults.merge(configured)


def _ignore_closed_loop(call: Callable[[], None]) -> None:
    try:
        call()
    except RuntimeError:
        pass  # the event loop has closed already, so it no longer waits
