"""An OTLP receiver over HTTP: the broker's exports, decoded with OpenTelemetry's own definitions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from tests.node_fixture import eventually


class Span(NamedTuple):
    """One span. The ids are in hexadecimal, as in a `traceparent`."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    service: str
    status: int


class Collector:
    """Collects the spans that it receives. `status` is the HTTP status of its answers."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.status = 200
        self.requests = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                """Record the spans of a request, and answer with `status`."""
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.requests += 1
                if collector.status == 200:
                    assert self.path == "/v1/traces", self.path
                    assert self.headers["content-type"] == "application/x-protobuf"
                    collector.spans += decode_spans(data)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait_for(self, *names: str, trace: str | None = None) -> list[Span]:
        """Wait for spans with all of these names in the trace (None: in any). Returns all spans of it."""

        def spans_so_far() -> list[Span]:
            return [span for span in list(self.spans) if trace in (None, span.trace)]

        eventually(lambda: not set(names) - {span.name for span in spans_so_far()}, f"spans {names}")
        return spans_so_far()


def decode_spans(data: bytes) -> list[Span]:
    """Decode the spans of an export request."""
    request = ExportTraceServiceRequest.FromString(data)
    spans = []
    for resource_spans in request.resource_spans:
        resource = _values(resource_spans.resource.attributes)
        for scope in resource_spans.scope_spans:
            for span in scope.spans:
                spans.append(
                    Span(
                        span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.kind,
                        span.start_time_unix_nano, span.end_time_unix_nano, _values(span.attributes),
                        resource["service.name"], span.status.code,
                    )
                )  # fmt: skip
    return spans


def _values(attributes: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value"))
        for attribute in attributes
    }


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector for the length of the block."""
    running = Collector()
    try:
        yield running
    finally:
        running.close()
